"""How a cell of the support table is known: declared, compiled for the chip, or run on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from ...fixtures import EVIDENCE, files_of
from ..targets.target import Target
from .compile_evidence import COMPILED, read_evidence
from .feature import Feature
from .tried import NOT_RUN, RIGHT, Record, last_seen, read_gating

Cell = tuple[object, ...]
RUN = "run"
MADE_AT_RUN_TIME = ("group_size", "page_size", "kv_layout")
"""Fields that a kernel takes as they come; the others make another kernel of it."""


def cell(feature: Feature, sm: int | None, flashinfer: str | None) -> Cell:
    """Return what compiling is about: the fields that make another module of it."""
    return (
        feature.operation,
        feature.backend,
        feature.phase,
        feature.head_dim_qk,
        feature.q_dtype,
        feature.kv_dtype,
        feature.query_len,
        feature.activation,
        feature.quantisation,
        sm,
        flashinfer,
    )


@dataclass(frozen=True)
class Seen:
    """What ran on chips, with releases of FlashInfer.

    Attributes:
        kernels: calls that were right, without the fields that are made at run time.
        values: of these fields, each in some call that was right.
        refusals: rules whose calls, made anyway, were not right.
        machines: chips and releases.
    """

    kernels: set[Cell] = field(default_factory=set)
    values: set[Cell] = field(default_factory=set)
    refusals: set[Cell] = field(default_factory=set)
    machines: set[Cell] = field(default_factory=set)

    def holds(self, feature: Feature, target: Target) -> bool:
        """Whether a call's kernel was right there, and each of its run-time values."""
        if (target.sm, target.flashinfer) not in self.machines:
            return False
        values = _values(feature, target)
        return _kernel(feature, target) in self.kernels and self.values.issuperset(values)


def _kernel(feature: Feature, target: Target) -> Cell:
    fields = {k: v for k, v in vars(feature).items() if k not in MADE_AT_RUN_TIME}
    return (target.sm, target.flashinfer, *sorted(fields.items()))


def _values(feature: Feature, target: Target) -> list[Cell]:
    where = (target.sm, target.flashinfer, feature.operation, feature.backend, feature.phase)
    return [(*where, name, getattr(feature, name)) for name in MADE_AT_RUN_TIME]


def seen_in(records: Iterable[Record]) -> Seen:
    """Sum up what was tried."""
    seen = Seen()
    for record in records:
        where = record.target.sm, record.target.flashinfer
        seen.machines.add(where)
        failed = record.outcome not in (RIGHT, NOT_RUN)
        if record.side == "supported" and record.outcome == RIGHT:
            seen.kernels.add(_kernel(record.feature, record.target))
            seen.values.update(_values(record.feature, record.target))
        elif record.side == "refused" and failed and len(record.rules) == 1:
            # Of several rules, it is not known whose doing it was.
            seen.refusals.add((record.rules[0], *where))
    return seen


def level_of(feature: Feature, target: Target) -> str:
    """Return the strongest evidence for a supported cell; empty if there is only the rule."""
    if seen().holds(feature, target):
        return RUN
    return known_cells().get(cell(feature, target.sm, target.flashinfer), "")


def level_of_refusal(rule: str, target: Target) -> str:
    """Return ``"run"`` where what a rule refuses was called there and was not right; else empty."""
    return RUN if (rule, target.sm, target.flashinfer) in seen().refusals else ""


@cache
def known_cells() -> dict[Cell, str]:
    """Read what was compiled, once.

    Raises:
        EvidenceError: a file of it cannot be read.
    """
    return {
        cell(Feature(**record.feature), record.sm, record.flashinfer): COMPILED  # type: ignore[arg-type]  # fields by name
        for path in files_of(EVIDENCE, "compile-*.json")
        for record in read_evidence(path).records
        if record.status == COMPILED and record.feature
    }


@cache
def seen() -> Seen:
    """Read what was run, once.

    Raises:
        GatingEvidenceError: a file of it cannot be read.
    """
    paths = files_of(EVIDENCE, "gating-*.json")
    return seen_in(last_seen(record for path in paths for record in read_gating(path)))
