"""Evidence that is kept: every record is about a cell, and cells show the level that they have."""

from __future__ import annotations

import pytest

from kernelproof.fixtures import EVIDENCE
from kernelproof.impl.gating import Feature, Target, decide
from kernelproof.impl.gating.knowledge import CompiledUnit, read_compilation, table
from kernelproof.impl.gating.rules import COMPILED

FILES = sorted(EVIDENCE.glob("compile-*.json"))
RECORDS = [record for path in FILES for record in read_compilation(path).records]


def test_the_required_modules_were_compiled_for_the_required_chips() -> None:
    for version in ("0.6.7", "0.7.2.post1"):
        for sm in (90, 100, 103, 120, 121):
            units = {r.unit for r in RECORDS if (r.flashinfer, r.sm) == (version, sm)}
            assert {
                "decode-bf16-hd128",
                "prefill-fa2-bf16-hd128",
                "moe-cutlass-bf16-relu2",
            } <= units


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if r.feature], ids=lambda r: f"{r.flashinfer}-{r.sm}-{r.unit}"
)
def test_no_rule_allows_what_does_not_compile(record: CompiledUnit) -> None:
    decision = decide(
        Feature(**record.feature),  # type: ignore[arg-type]  # fields by name
        Target(sm=record.sm, flashinfer=record.flashinfer, cuda="13.0"),
    )
    if decision.supported:
        assert record.status == COMPILED, f"{decision.rule} allows it: {record.message}"
        assert decision.evidence in ("compiled", "run")


def test_relu2_is_absent_at_0_6_7_and_there_at_0_7_2() -> None:
    status = {
        r.flashinfer: r.status
        for r in RECORDS
        if r.unit == "moe-cutlass-bf16-relu2" and r.sm == 121
    }
    assert status == {"0.6.7": "incomplete", "0.7.2.post1": COMPILED}


def test_a_cell_without_evidence_has_the_level_of_its_rule() -> None:
    decision = decide(Feature(backend="fa2"), Target(sm=80, flashinfer="0.6.13"))
    assert decision.evidence == "declared"
    assert table().modules
