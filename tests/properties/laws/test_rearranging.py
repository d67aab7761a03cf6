"""Laws of layouts: what is right passes, and what they say of faults."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kernelproof.impl import Implementation, Target
from kernelproof.impl.torch.rearrange import rearrange
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import rearrange_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import RearrangeProblem

SCALES = RearrangeProblem(matrices=2, rows=130, columns=5, dtype="bfloat16", seed=1)
ROWS = RearrangeProblem("rows", rows=64, columns=3, seed=2)
FOLDED = RearrangeProblem("scales_64x128", 2, 64, 8, seed=3)
WEIGHTS = RearrangeProblem("int4_mixed", 2, 32, 64, seed=4)


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: RearrangeProblem) -> Verdict:
    subject = Subject(implementation, Target.here("cpu"), Stages())
    try:
        return find_law(law).check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("problem", [SCALES, ROWS, FOLDED, WEIGHTS], ids=lambda each: each.id)
@pytest.mark.parametrize(
    "law",
    ["rearrange_parity", "rearrange_one_element", "rearrange_experts", "rearrange_again",
     "integer_inputs_unchanged", "slack_rows"],
)  # fmt: skip
def test_what_is_right(law: str, problem: RearrangeProblem) -> None:
    found = verdict(law, rearrange, problem)
    assert found.status == "PASS", found.message
    assert found.vacuous == (law == "rearrange_experts" and problem is ROWS)


@pytest.mark.parametrize(
    ("law", "bug", "problem", "said"),
    [
        ("rearrange_parity", bugs.tiles_column_by_column, SCALES, "out["),
        ("rearrange_parity", bugs.garbage_in_the_padding, SCALES, "127"),
        ("rearrange_parity", bugs.bits_as_numbers, SCALES, "out["),
        ("rearrange_parity", bugs.inverse_of_the_shuffle, ROWS, "out["),
        ("rearrange_parity", bugs.neighbours_folded, FOLDED, "out["),
        ("rearrange_parity", bugs.bytes_for_words, WEIGHTS, "out["),
        ("rearrange_one_element", bugs.a_row_of_padding_holds_the_last, RearrangeProblem(),
         "2 elements changed"),
        ("rearrange_experts", bugs.experts_like_the_first, FOLDED, "expert 1 alone"),
        ("rearrange_one_element", bugs.answer_of_the_first_call, WEIGHTS, "0 elements changed"),
        ("rearrange_again", bugs.padding_of_the_third_buffer, SCALES, "the second time"),
        ("integer_inputs_unchanged", bugs.written_over_its_input, ROWS, "changed its input x"),
        ("slack_rows", bugs.padding_from_the_rows_behind, RearrangeProblem(seed=8), "in memory"),
    ],
)  # fmt: skip
def test_what_they_say_of_faults(
    law: str, bug: Implementation, problem: RearrangeProblem, said: str
) -> None:
    found = verdict(law, bug, problem)
    assert found.bad
    assert said in found.message
