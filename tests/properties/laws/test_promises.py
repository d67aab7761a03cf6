"""Laws of what builders promise: each passes what is right, and names what is wrong."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from kernelproof.impl import Implementation, Target, find_implementation, implementation
from kernelproof.impl.torch.preparation import prepare_batch
from kernelproof.impl.torch.slots import map_slots
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import metadata_bugs as bugs
from kernelproof.properties.seeded.honest import Built, build
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import BatchProblem, MetadataProblem, Problem, SlotsProblem
from kernelproof.reference.tensors.inputs import MetadataInputs

MIXED = MetadataProblem((((1, 3, 0), (7, 3, 0)), ((1, 2), (9, 2))), 4, spare_columns=1)
"""A decode, a prefill and a request of nothing, then a smaller batch."""
LAWS = ("metadata_attended", "int64_inputs", "metadata_refusals")


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, subject: Implementation, problem: Problem = MIXED) -> Verdict:
    try:
        return find_law(law).check(Subject(subject, Target.here("cpu"), Stages()), problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", LAWS)
def test_what_is_right(law: str) -> None:
    found = verdict(law, find_implementation("reference-metadata"))
    assert found.status == "PASS", found.message
    assert not found.vacuous


def test_int64_of_slots_and_batches() -> None:
    steps = (((1, 3), (7, 3)),)
    for subject, problem in (
        (map_slots, SlotsProblem(steps, 4)),
        (prepare_batch, BatchProblem("positions", steps)),
    ):
        found = verdict("int64_inputs", subject, problem)
        assert found.status == "PASS", found.message


def test_a_batch_without_requests_has_nothing_to_refuse() -> None:
    empty = MetadataProblem((((), ()),))
    assert verdict("metadata_refusals", bugs.narrow_table_accepted, empty).vacuous


def test_what_they_say() -> None:
    verdict("metadata_attended", bugs.page_size_of_the_first_batch)
    other = replace(MIXED, page_size=2)
    found = verdict("metadata_attended", bugs.page_size_of_the_first_batch, other)
    assert "attention refuses what was built: " in found.message
    found = verdict("int64_inputs", bugs.int64_lengths_read_as_int32)
    assert "of int64" in found.message
    whole = MetadataProblem((((1,), (8,)),), 4)
    found = verdict("metadata_refusals", bugs.narrow_table_accepted, whole)
    assert (found.kind, found.message) == ("refusal", "seq_lens[0] is 9: the call returned")


def test_pages_and_keys_of_no_request() -> None:
    @implementation("build_metadata", name="other-pages")
    def other_pages(inputs: MetadataInputs) -> Built:
        built = build(inputs)
        return replace(built, paged_kv_indices=built.paged_kv_indices + 10**6)

    @implementation("build_metadata", name="other-lengths")
    def other_lengths(inputs: MetadataInputs) -> Built:
        built = build(inputs)
        return replace(built, paged_kv_last_page_len=built.paged_kv_last_page_len * 0)

    assert "pages of no request" in verdict("metadata_attended", other_pages).message
    assert "paged_kv_last_page_len[0]" in verdict("metadata_attended", other_lengths).message


def test_an_error_that_names_nothing() -> None:
    @implementation("build_metadata", name="raises", features=("refuses_malformed",))
    def raises(inputs: MetadataInputs) -> Built:
        if (inputs.query_lens < 0).any():
            message = "wrong"
            raise ValueError(message)
        return build(inputs)

    found = verdict("metadata_refusals", raises)
    assert found.message == "query_lens[2] is -1: raised ValueError, which names no argument"
