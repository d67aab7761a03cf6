"""What the laws of padding, slack and far memory give an implementation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation, implementation
from kernelproof.impl.torch.sdpa import paged as sdpa
from kernelproof.properties.laws import find_law
from kernelproof.properties.laws.batches import Batch
from kernelproof.properties.laws.far import has_room, narrow
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem, materialise
from kernelproof.reference.tensors.allocation import FAR, unreserved
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

PROBLEM = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=2, causal=True)
SEEN: list[PagedAttentionInputs] = []


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


@implementation("paged_attention", name="watches", features=("host_bounds", "large_tensors"))
def watches(inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401  a pair
    """Attend, and keep what it was given."""
    SEEN.append(inputs)
    return sdpa(inputs)


def given(law: str, **fields: Any) -> list[PagedAttentionInputs]:  # noqa: ANN401  of a problem
    """Return what a law that passes gives the implementation, over some seeds."""
    SEEN.clear()
    subject = Subject(watches, Target.here("cpu"), Stages())
    for seed in range(8):
        verdict = find_law(law).check(subject, replace(PROBLEM, seed=seed, **fields))
        assert verdict.status == "PASS", verdict
    return list(SEEN)


def test_bounds_are_the_truth_except_where_they_are_given_slack() -> None:
    inputs: Any = materialise(PROBLEM)
    assert (inputs.max_q_len, inputs.max_kv_len) == (2, 5)
    seen = given("slack_bounds")
    truth, slack = seen[::2], seen[1::2]
    assert {(each.max_q_len, each.max_kv_len) for each in truth} == {(2, 5)}
    assert {each.max_q_len for each in slack} == {2, 3, 4}
    assert {each.max_kv_len for each in slack} > {8}
    assert all(each.max_kv_len >= 5 for each in slack)
    assert all(not each.q_len_bound for each in given("row_containment"))


def test_exact_lengths_are_written_to_the_tensors_of_the_call_before() -> None:
    seen = given("exact_lengths")
    for bound, exact in zip(seen[::2], seen[1::2], strict=True):
        assert exact.metadata is bound.metadata
        assert exact.metadata.seq_lens.tolist() == [5, 3]
        assert exact.metadata.paged_kv_last_page_len.tolist() == [1, 1]
        assert (exact.max_kv_len, exact.max_q_len) == (6, 2), "the host knows whole pages"
    assert not given("exact_lengths", page_size=1), "whole pages are exact there"


def test_published_lengths_are_below_the_planned_ones_and_not_below_the_queries() -> None:
    batch = Batch(replace(PROBLEM, query_lens=(2, 1, 1), seq_lens=(5, 0, 9)), PROBLEM, 9)
    shorter = [batch.shortened(step).problem.seq_lens for step in range(40)]
    assert {s for s, _, _ in shorter} == {2, 3, 4, 5}
    assert {s for _, s, _ in shorter} == {0}
    assert {s for _, _, s in shorter} == set(range(1, 10))


@pytest.mark.parametrize(
    ("bug", "actions"),
    [
        ("replays_keep_planned_lengths", "plan the batch; capture; replay; "),
        ("merges_planned_parts", "plan the batch; run; "),
    ],
)
def test_publishing_is_told(bug: str, actions: str) -> None:
    found = find_implementation(f"kernelproof.properties.seeded.attention.exact_bugs:{bug}")
    subject = Subject(found, Target.here("cpu"), Stages())
    problem = replace(PROBLEM, seq_lens=(9, 7))
    law = find_law("life_cycle")
    said = (law.check(subject, replace(problem, seed=seed)).message for seed in range(40))
    assert any(each.startswith(f"{actions}publish exact lengths below") for each in said)


def test_padded_requests_have_no_keys_and_stale_pages_or_zeros() -> None:
    rows = [each.block_table[2:].tolist() for each in given("padded_batch")[1::2]]
    pages = {page for table in rows for row in table for page in row}
    assert pages <= {0, *range(5)}
    assert any(any(row) for table in rows for row in table)


def test_far_memory_is_not_touched() -> None:
    room = unreserved((FAR,), torch.float32)
    room[-1] = 1.0
    assert room.numel() == FAR
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    assert pages * 4096 < FAR
    near, far = given("far_pages")[:2]
    assert far.k_cache.numel() > FAR > near.k_cache.numel()
    assert far.v_cache.data_ptr() == far.k_cache[1:].data_ptr()  # one room, a page apart
    there, here = far.metadata.paged_kv_indices.long(), near.metadata.paged_kv_indices.long()
    assert torch.equal(far.k_cache[there], near.k_cache[here])
    assert torch.equal(far.v_cache[there], near.v_cache[here])
    assert int(far.metadata.paged_kv_indices.max()) * far.k_cache.stride(0) > FAR - 2**10


@pytest.mark.parametrize(
    ("free", "needed", "room"),
    [(100, 100, True), (40, 101, False), (40, 100, None)],
    ids=["room", "too small", "others use it"],
)
def test_a_far_law_does_not_wait_for_what_others_use_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, free: int, needed: int, room: bool | None
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    subject = Subject(watches, Target(device="cuda"), Stages())
    if room is None:  # the suite's tensors have no room: the problem is judged later
        with pytest.raises(MemoryError, match="are needed"):
            has_room(subject, needed)
    else:
        assert has_room(subject, needed) is room


def test_far_pages_of_a_module_that_was_not_built_are_judged() -> None:
    """On a GPU the law asks for 16 bits, and the module that was built may have 32."""
    keyed = replace(watches, compile_key=lambda problem: problem.strided_kv)
    problem = AttentionProblem(seq_lens=(5,), page_size=4, head_dim_qk=8, strided_kv=True)
    subject = Subject(keyed, Target.here("cpu"), Stages(), modules=(keyed.module_of(problem),))
    verdict = find_law("far_pages").check(subject, problem)
    assert (verdict.status, verdict.vacuous) == ("PASS", False)


@pytest.mark.parametrize(
    ("device", "dtype", "asked"),
    [("cuda", "float32", "bfloat16"), ("cuda", "float16", "float16"),
     ("cpu", "float32", "float32")],
)  # fmt: skip
def test_far_tensors_on_a_gpu_hold_values_of_16_bits(device: str, dtype: str, asked: str) -> None:
    problem = AttentionProblem(dtype=dtype)
    assert narrow(Subject(watches, Target(device=device), Stages()), problem).dtype == asked


def test_far_tensors_stay_wide_where_nothing_else_is_claimed() -> None:
    only_wide = replace(watches, supports=lambda problem, _: problem.dtype == "float32" or "no")
    subject = Subject(only_wide, Target(device="cuda"), Stages())
    assert narrow(subject, AttentionProblem()).dtype == "float32"
