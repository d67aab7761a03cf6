"""Laws of norms that quantise: what is right passes, and what they say of faults."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from kernelproof.impl import Implementation, Target
from kernelproof.impl.torch.norm_quantize import norm_and_quantize
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import norm_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import NormQuantizeProblem

GROUPS = NormQuantizeProblem(5, 96, block_channels=48, residual=True, spare_channels=5, seed=1)
GIVEN = NormQuantizeProblem(5, 40, block_rows=0, scale=0.0372, gamma_offset=1.0, seed=2)
LAWS = ("norm_parity", "quantize_not_finite", "quantize_rows", "quantize_signs", "quantize_again",
        "integer_inputs_unchanged", "slack_rows")  # fmt: skip


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: NormQuantizeProblem) -> Verdict:
    subject = Subject(implementation, Target.here("cpu"), Stages())
    try:
        return find_law(law).check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("problem", [GROUPS, GIVEN])
@pytest.mark.parametrize("implementation", [norm_and_quantize, *(
    bugs.honest_norm, bugs.norm_of_16_bits, bugs.norm_of_what_is_written, bugs.norm_by_reciprocals,
)])  # fmt: skip
def test_what_is_right(
    law: str, problem: NormQuantizeProblem, implementation: Implementation
) -> None:
    for regime in ("iid", "ties", "outliers", "faint", "large", "zeros"):
        found = verdict(law, implementation, replace(problem, regime=regime))
        assert found.status == "PASS", found.message
        assert not found.vacuous


@pytest.mark.parametrize(
    ("law", "bug", "problem", "said"),
    [
        ("norm_parity", bugs.norms_first_code_lower, GROUPS, "codes[0, 0] is"),
        ("norm_parity", bugs.norms_last_code_higher, GROUPS, "1 codes apart (1 of 480 differ)"),
        ("norm_parity", bugs.residual_not_written, GROUPS, "residual"),
        ("norm_parity", bugs.norm_scale_a_thousandth_larger, GROUPS, "scales[0, 0] is"),
        ("norm_parity", bugs.norm_in_16_bits, GROUPS, "is"),
        ("quantize_not_finite", bugs.root_of_rows_before, GROUPS, "elsewhere"),
        ("quantize_rows", bugs.root_of_a_tile, GROUPS, "scales are further apart"),
        ("quantize_signs", bugs.norms_amax_of_positive_numbers, GROUPS, "of the negated matrix"),
        ("quantize_again", bugs.roots_of_an_earlier_call, GIVEN, "after another batch"),
        ("integer_inputs_unchanged", bugs.sum_over_x, GROUPS, "changed its input x"),
        ("integer_inputs_unchanged", bugs.residual_beyond_its_rows, GROUPS, "outside of residual"),
    ],
)
def test_a_finding_says_what_is_wrong(
    law: str, bug: Implementation, problem: NormQuantizeProblem, said: str
) -> None:
    found = verdict(law, bug, problem)
    assert found.status == "FAIL", found
    assert said in found.message
