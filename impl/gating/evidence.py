"""How a cell of the support table is known: declared, compiled for the chip, or run on it."""

from __future__ import annotations

from functools import cache

from ...fixtures import EVIDENCE
from ..compile_evidence import COMPILED, read_evidence
from ..target import Target
from .feature import Feature

Cell = tuple[object, ...]


def cell(feature: Feature, sm: int | None, flashinfer: str | None) -> Cell:
    """Give what evidence is about: the fields that make another kernel of it."""
    return (
        feature.operation,
        feature.backend,
        feature.phase,
        feature.head_dim_qk,
        feature.q_dtype,
        feature.kv_dtype,
        feature.activation,
        feature.quantisation,
        sm,
        flashinfer,
    )


def level_of(feature: Feature, target: Target) -> str:
    """Give the strongest evidence for a cell; empty where there is none but the rule."""
    return known_cells().get(cell(feature, target.sm, target.flashinfer), "")


@cache
def known_cells() -> dict[Cell, str]:
    """Read the evidence that is kept, once.

    Raises:
        EvidenceError: a file of it cannot be read.
    """
    return {
        cell(Feature(**record.feature), record.sm, record.flashinfer): COMPILED  # type: ignore[arg-type]  # fields by name
        for path in sorted(EVIDENCE.glob("compile-*.json"))
        for record in read_evidence(path).records
        if record.status == COMPILED and record.feature
    }
