"""Laws of context parallelism: the partial attentions merge, and what is said where they do not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kernelproof.impl import Implementation, Target
from kernelproof.impl.torch.context_parallel import slice_context_parallel
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import context_parallel_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import ContextParallelProblem

MIXED = ContextParallelProblem(
    query_lens=(1, 4, 0, 6, 1),
    seq_lens=(37, 23, 5, 6, 1),
    page_size=4,
    world=3,
    interleave=2,
    page_order=1,
)
"""Decodes, a chunk, no query, a prefill without context, and a key that one rank alone holds."""


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: ContextParallelProblem) -> Verdict:
    try:
        return find_law(law).check(Subject(implementation, Target.here("cpu"), Stages()), problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("implementation", [slice_context_parallel, bugs.persistent_slice])
def test_partial_attentions_of_all_ranks_merge(implementation: Implementation) -> None:
    found = verdict("context_parallel_merge", implementation, MIXED)
    assert found.status == "PASS", found.message
    assert not found.vacuous
    assert found.ratio is not None
    assert found.ratio <= 1


def test_nothing_is_merged_without_queries() -> None:
    idle = ContextParallelProblem(query_lens=(0,), seq_lens=(5,))
    assert verdict("context_parallel_merge", slice_context_parallel, idle).vacuous


@pytest.mark.parametrize(
    ("law", "bug", "said"),
    [
        (
            "parity",
            bugs.last_page_len_of_group,
            "paged_kv_last_page_len[1] is 11, expected",
        ),
        ("parity", bugs.local_lengths_in_int64, "seq_lens is torch.int64, not int32"),
        ("parity", bugs.page_size_of_group, "page_size is 12, not the 4 keys of a rank's page"),
        ("partition", bugs.slice_of_first_rank, "request 0 of 37 keys: key 38 is held 1 times"),
        ("partition", bugs.page_ids_in_local_pages, "rank 0, request 0: 13 keys in pages"),
        ("merge", bugs.empty_rank_gets_a_key, "rank 1 holds no key of request 4"),
        ("merge", bugs.first_chunk_gets_a_key, "rank 0 holds no key of request 3"),
        ("merge", bugs.queries_divided_too, "rank 0: qo_indptr ends at 4 (position 5)"),
    ],
)
def test_a_finding_says_what_is_wrong(law: str, bug: Implementation, said: str) -> None:
    found = verdict(f"context_parallel_{law}", bug, MIXED)
    assert found.status == "FAIL"
    assert said in found.message
