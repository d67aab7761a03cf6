"""Laws of slot mapping: what is right passes, and what they say of faults."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kernelproof.impl import Implementation, Target
from kernelproof.impl.torch.slots import map_slots
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import slots_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import SlotsProblem

STEPS = (((1, 5, 2, 1), (7, 5, 19, 0)), ((1, 1), (8, 6)), ((9,), (9,)))
MIXED = SlotsProblem(STEPS, page_size=4, spare_rows=1, spare_columns=1, spare_slots=3)
"""Decodes, a prefill, padding with a token, and smaller batches behind it."""
GROUP = SlotsProblem(STEPS, page_size=4, world=3, rank=1, interleave=2, first_page=2**29)
LAWS = ("parity", "one_buffer", "ranks", "parts", "garbage")


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: SlotsProblem) -> Verdict:
    subject = Subject(implementation, Target.here("cpu"), Stages())
    try:
        return find_law(f"slots_{law}").check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("problem", [MIXED, GROUP])
@pytest.mark.parametrize("implementation", [map_slots, bugs.own_buffer, bugs.written_buffer])
def test_what_is_right(law: str, problem: SlotsProblem, implementation: Implementation) -> None:
    found = verdict(law, implementation, problem)
    assert found.status == "PASS", found.message
    assert not found.vacuous


@pytest.mark.parametrize(
    ("law", "bug", "problem", "said"),
    [
        ("one_buffer", bugs.slots_of_the_batch_before, MIXED, "step 1: slot_mapping in the buffer"),
        ("parity", bugs.slots_as_int32, MIXED, "slot_mapping is torch.int32, not int64"),
        ("ranks", bugs.padding_from_the_next_multiple, MIXED, "behind the 9 tokens is not -1"),
        ("ranks", bugs.slots_in_int32, GROUP, "not in page"),
        ("ranks", bugs.slots_of_every_rank, GROUP, "has a slot on 3 ranks"),
        ("parts", bugs.rows_in_the_batchs_order, MIXED, "alone"),
        ("garbage", bugs.first_block_of_padding, MIXED, "of a longer buffer is not -1"),
    ],
)
def test_a_finding_says_what_is_wrong(
    law: str, bug: Implementation, problem: SlotsProblem, said: str
) -> None:
    found = verdict(law, bug, problem)
    assert found.status == "FAIL"
    assert said in found.message


def test_one_request_has_no_parts() -> None:
    assert verdict("parts", map_slots, SlotsProblem()).vacuous
