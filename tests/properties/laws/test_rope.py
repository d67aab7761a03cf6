"""Laws of RoPE that appends: what is right passes, and what they say of faults."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from kernelproof.impl import Implementation, Target
from kernelproof.impl.torch.rope_append import rope_and_append
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import rope_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import RopeAppendProblem

PAGES = RopeAppendProblem(
    (5, 2), (23, 2), page_size=4, num_qo_heads=4, num_kv_heads=2, rope_dim=8, plain_dim=6,
    kv_layout="HND", interleaved=True, q_scale=0.25, k_scale=0.11, v_scale=2.0, spare_channels=5,
    shift=3, skipped=True, seed=4,
)  # fmt: skip
LATENT = RopeAppendProblem((4, 1), (9, 3), rope_dim=4, plain_dim=8, latent=True, seed=2)
WIDE = replace(PAGES, codes="", quantised_q=False, q_scale=1.0, k_scale=1.0, v_scale=1.0)
FULL = replace(WIDE, skipped=False)
ZEROS = replace(PAGES, regime="zeros")
LAWS = ("rope_parity", "rope_at_zero", "rope_never_written", "rope_rows", "rope_pages",
        "rope_plain", "rope_again", "integer_inputs_unchanged", "slack_rows")  # fmt: skip


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: RopeAppendProblem) -> Verdict:
    subject = Subject(implementation, Target.here("cpu"), Stages())
    try:
        return find_law(law).check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("problem", [PAGES, LATENT, WIDE])
@pytest.mark.parametrize("implementation", [rope_and_append, *(
    bugs.honest_rope, bugs.rope_by_reciprocals, bugs.rope_of_16_bits,
    bugs.rope_with_zeros_of_its_own_sign,
    bugs.rope_with_queries_of_skipped_tokens_unwritten,
)])  # fmt: skip
def test_what_is_right(
    law: str, problem: RopeAppendProblem, implementation: Implementation
) -> None:
    for regime in ("iid", "ties", "outliers", "faint", "large", "zeros"):
        found = verdict(law, implementation, replace(problem, regime=regime))
        assert found.status == "PASS", found.message
        assert not found.vacuous


@pytest.mark.parametrize(
    ("law", "bug", "problem", "said"),
    [
        ("rope_parity", bugs.first_query_one_code_higher, LATENT, "1 codes apart (1 of"),
        ("rope_parity", bugs.last_of_the_cache_one_code_lower, LATENT, "1 codes apart (1 of"),
        ("rope_parity", bugs.last_of_the_cache_one_code_lower, FULL, "1 codes apart (1 of"),
        ("rope_parity", bugs.clears_the_rest_of_pages, LATENT, "k_cache["),
        ("rope_parity", bugs.rotary_channels_first_of_latent_keys, LATENT, "q["),
        ("rope_parity", bugs.rope_zeros_without_a_sign, ZEROS, "expected exactly -0 (0x80)"),
        ("rope_parity", bugs.sines_in_16_bits, WIDE, "codes apart"),
        ("rope_at_zero", bugs.positions_from_one, PAGES, "q["),
        ("rope_never_written", bugs.skipped_tokens_in_slot_0, LATENT, "k_cache[0, 0, 0, 0]"),
        ("rope_rows", bugs.turns_by_the_first_of_a_tile, LATENT, "another order"),
        ("rope_pages", bugs.pages_as_they_come, PAGES, "numbers of pages: k_cache"),
        ("rope_plain", bugs.plain_channels_by_cosines, PAGES, "what does not turn: q"),
        ("rope_again", bugs.turns_of_an_earlier_call, PAGES, "after another batch"),
        ("integer_inputs_unchanged", bugs.keys_turned_in_place, PAGES, "changed its input k"),
        ("far_rows", bugs.rope_row_in_int32, PAGES, ""),
    ],
)
def test_a_finding_says_what_is_wrong(
    law: str, bug: Implementation, problem: RopeAppendProblem, said: str
) -> None:
    bugs._LAST_TURNS.clear()
    found = verdict(law, bug, problem)
    assert found.status == "FAIL", found
    assert said in found.message
