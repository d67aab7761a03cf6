"""Laws of preparing batches: what is right passes, and what they say of faults."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from kernelproof.impl import Implementation, Target
from kernelproof.impl.torch.preparation import prepare_batch
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import preparation_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import BatchProblem
from kernelproof.reference.attention.preparation import OUTPUTS

STEPS = (((1, 5, 2, 0), (7, 5, 19, 0)), ((1, 1), (8, 6)), ((9,), (9,)))
REJECTED = ((0, 3, 2, 0), (0, 1), (5,))
MIXED = BatchProblem(
    "page_table", STEPS, 4, spare_rows=1, spare_columns=1, spare_entries=3,
    rejected=REJECTED, drafts=3, is_shifted=True, max_model_len=16, is_tree=True,
)  # fmt: skip
"""Decodes, a prefill, a request without keys, and smaller batches behind it. Two requests keep none
of their new tokens, and one is as long as the model takes."""
LAWS = ("parity", "one_buffer", "parts", "garbage")


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: BatchProblem) -> Verdict:
    subject = Subject(implementation, Target.here("cpu"), Stages())
    try:
        return find_law(f"batch_{law}").check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rest", ["kept", "zero_rows"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_right(law: str, rest: str, output: str) -> None:
    base = MIXED
    if output == "num_kv_splits":  # of requests with keys
        base = replace(MIXED, steps=STEPS[1:], rejected=REJECTED[1:])
    problem = replace(base, output=output, rest=rest, window_left=2, world=3, rank=1, interleave=2)
    problem = replace(problem, is_shifted=rest == "kept")
    for implementation in (prepare_batch, bugs.own_batch_buffer, bugs.written_batch_buffer):
        found = verdict(law, implementation, problem)
        assert found.status == "PASS", found.message
        assert found.vacuous == (law == "parts" and OUTPUTS[output].is_relative)


@pytest.mark.parametrize("law", LAWS)
def test_tables_with_zeros_in_their_tails_are_right(law: str) -> None:
    for output in ("page_table", "padded_tokens"):
        problem = replace(MIXED, output=output, rest="zero_tails")
        assert verdict(law, prepare_batch, problem).status == "PASS"


@pytest.mark.parametrize(
    ("law", "bug", "output", "said"),
    [
        ("one_buffer", bugs.page_of_the_batch_before, "page_indices", "step 1: page_indices in"),
        ("parity", bugs.positions_as_int32, "positions", "buffer is torch.int32, not int64"),
        ("parity", bugs.chunks_from_zero, "positions", "step 0: positions"),
        ("parts", bugs.rows_in_order, "page_table", "with requests [1] only: page_table of"),
        ("garbage", bugs.one_block_of_rows, "local_seq_lens", "local_seq_lens in a longer"),
    ],
)
def test_a_finding_says_what_is_wrong(
    law: str, bug: Implementation, output: str, said: str
) -> None:
    rest = "zero_rows" if bug is bugs.one_block_of_rows else "kept"
    found = verdict(law, bug, replace(MIXED, output=output, rest=rest))
    assert found.status == "FAIL"
    assert said in found.message


def test_one_request_has_no_parts() -> None:
    assert verdict("parts", prepare_batch, BatchProblem()).vacuous


@pytest.mark.parametrize("output", ["slot_mapping", "next_slots", "query_slots"])
def test_slots_beyond_int32(output: str) -> None:
    problem = replace(MIXED, output=output)
    for implementation in (prepare_batch, bugs.written_batch_buffer):
        assert verdict("far_slots", implementation, problem).status == "PASS"
    found = verdict("far_slots", bugs.slots_of_keys_in_int32, problem)
    assert found.status == "FAIL"
    assert f"{output} beyond int32" in found.message
    assert verdict("far_slots", prepare_batch, replace(problem, page_size=1)).vacuous
    assert verdict("far_slots", prepare_batch, replace(problem, output="positions")).vacuous
