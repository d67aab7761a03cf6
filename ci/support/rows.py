"""The rows of the support matrix: each backend of an operation, with one feature at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ...impl.gating import CHIPS, Decision, Feature, RuleBook, Target, decide
from ...impl.gating.decision import PREFERENCE

BASES: Mapping[str, dict[str, Any]] = {
    "trtllm-gen": {"kv_layout": "HND", "group_size": 8},
    "xqa": {"group_size": 8},
}
"""What serving stacks give these backends: a plain call of theirs."""
PAGED: Mapping[str, dict[str, Any]] = {
    "decode": {},
    "prefill": {"phase": "prefill"},
    "mixed batch": {"phase": "mixed"},
    "4 query tokens": {"query_len": 4},
    "ragged, 4 at most": {"query_len": 4, "ragged_queries": True},
    "window, 4 query tokens": {"query_len": 4, "window": True},
    "draft trees of 4": {"query_len": 4, "mask": "tree"},
    "prefill, draft trees": {"phase": "prefill", "mask": "tree"},
    "no keys": {"padding": "no_keys"},
    "no keys, 4 query tokens": {"query_len": 4, "padding": "no_keys"},
    "head dim 64": {"head_dim_qk": 64},
    "head dim 256": {"head_dim_qk": 256},
    "head dim 512": {"head_dim_qk": 512},
    "page size 64": {"page_size": 64},
    "group size 5": {"group_size": 5},
    "window": {"window": True},
    "soft cap": {"soft_cap": True},
    "sinks": {"sinks": True},
    "fp8 KV": {"kv_dtype": "float8_e4m3fn"},
    "fp8 Q and KV": {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"},
    "nvfp4 KV": {"kv_dtype": "nvfp4"},
    "fp8 Q, nvfp4 KV": {"q_dtype": "float8_e4m3fn", "kv_dtype": "nvfp4"},
}
RAGGED: Mapping[str, dict[str, Any]] = {
    "prefill": {"phase": "prefill"},
    "head dim 192/128": {"phase": "prefill", "head_dim_qk": 192, "head_dim_vo": 128},
    "head dim 256": {"phase": "prefill", "head_dim_qk": 256},
}
LATENT = {"head_dim_qk": 576, "head_dim_vo": 512, "page_size": 64}
MLA: Mapping[str, dict[str, Any]] = {
    "decode": LATENT,
    "4 query tokens": {**LATENT, "query_len": 4},
    "ragged, 4 at most": {**LATENT, "query_len": 4, "ragged_queries": True},
    "fp8 KV": {**LATENT, "q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"},
}
MOE: Mapping[str, dict[str, Any]] = {
    "bf16 swiglu": {},
    "bf16 relu2": {"activation": "relu2"},
    "bf16 geglu (tanh)": {"activation": "geglu_tanh"},
    "bf16 swiglu_oai": {"activation": "swiglu_oai"},
    "fp8 per tensor": {"quantisation": "fp8_per_tensor"},
    "fp8 per tensor, relu2": {"quantisation": "fp8_per_tensor", "activation": "relu2"},
    "fp8 block": {"quantisation": "fp8_block"},
    "nvfp4": {"quantisation": "nvfp4"},
    "nvfp4, relu2": {"quantisation": "nvfp4", "activation": "relu2"},
    "mxfp8": {"quantisation": "mxfp8"},
    "mxfp4": {"quantisation": "mxfp4"},
    "mxfp8, mxfp4": {"quantisation": "mxfp8_mxfp4"},
}
PLAIN: Mapping[str, dict[str, Any]] = {"bf16": {}}
VARIANTS = {"paged_attention": PAGED, "ragged_attention": RAGGED, "mla": MLA, "moe": MOE}


@dataclass(frozen=True)
class Row:
    """One row: a kind of call, whatever the chip.

    Attributes:
        title: what is special about it.
        feature: what is asked.
    """

    title: str
    feature: Feature


@dataclass(frozen=True)
class Matrix:
    """Decisions by row and chip, for one FlashInfer version."""

    version: str
    chips: tuple[int | None, ...]
    rows: tuple[tuple[Row, tuple[Decision, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "flashinfer": self.version,
            "chips": [chip if chip is not None else "cpu" for chip in self.chips],
            "rows": [
                {
                    "title": row.title,
                    "feature": row.feature.to_json(),
                    "cells": [_cell_json(each) for each in decisions],
                }
                for row, decisions in self.rows
            ],
        }


def _cell_json(decision: Decision) -> dict[str, Any]:
    found = decision.to_json()
    found["sm"] = found.pop("target")["sm"]
    del found["feature"]
    differing = [other.differences(decision.feature) for other in decision.alternatives]
    return {**found, "alternatives": differing}


def all_rows(operation: str | None = None, backend: str | None = None) -> Iterator[Row]:
    """Return the rows of the whole matrix, or of one operation or backend."""
    for name, backends in PREFERENCE.items():
        if operation not in (None, name):
            continue
        for each in backends:
            if backend not in (None, each):
                continue
            base = Feature(name, each, **BASES.get(each, {}))
            for title, fields in VARIANTS.get(name, PLAIN).items():
                yield Row(title, replace(base, **_with_dims(fields)))


def _with_dims(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Let what follows other fields follow them again: ``replace`` would keep the base's."""
    found = dict(fields)
    if "head_dim_qk" in found:
        found.setdefault("head_dim_vo", 0)
    if "q_dtype" in found:
        found.setdefault("kv_dtype", "")
    return found


def rows_like(asked: Mapping[str, Any]) -> Iterator[Row]:
    """Return one row for each backend and phase that could serve a call with these fields."""
    operation = asked.get("operation", "paged_attention")
    backends = [asked["backend"]] if "backend" in asked else PREFERENCE[operation]
    attention = operation in ("paged_attention", "ragged_attention")
    phases = [asked["phase"]] if "phase" in asked else ["decode", "prefill"][: 1 + attention]
    for backend in backends:
        for phase in phases:
            fields = {**BASES.get(backend, {}), **asked, "backend": backend, "phase": phase}
            yield Row(phase if attention else "", Feature(**fields))


def matrix(
    rows: Iterator[Row],
    version: str,
    chips: tuple[int | None, ...],
    book: RuleBook,
    triton: str = "",
) -> Matrix:
    """Decide every cell.

    Raises:
        ValueError: a version is none by PEP 440.
    """
    return matrix_of(rows, version, [target_of(chip, version, triton) for chip in chips], book)


def matrix_of(
    rows: Iterator[Row], version: str, targets: Sequence[Target], book: RuleBook
) -> Matrix:
    """Decide every cell for machines that are given, one a column.

    Raises:
        ValueError: the version is none by PEP 440.
    """
    decided = [
        (row, tuple(decide(row.feature, target, book=book) for target in targets)) for row in rows
    ]
    return Matrix(version, tuple(target.sm for target in targets), tuple(decided))


def target_of(chip: int | None, version: str, triton: str = "") -> Target:
    """Return the machine of a column: recent CUDA and Triton, so that chip and release decide."""
    cuda = CUDA if chip else None
    return Target(sm=chip, flashinfer=version, cuda=cuda, triton=triton or TRITON)


CUDA, TRITON = "13.0", "3.6.0"
ALL_CHIPS = tuple(CHIPS)


@dataclass(frozen=True)
class Difference:
    """One kind of call that two versions decide otherwise, on chips where they say the same.

    Attributes:
        row: the kind of call.
        chips: SM numbers; None is the CPU.
        before: the older matrix's decision on the first of these chips.
        after: the other's.
    """

    row: Row
    chips: tuple[int | None, ...]
    before: Decision
    after: Decision

    @property
    def telling(self) -> Decision:
        """Return the decision that has the reason: the one that refuses."""
        return self.before if self.before.status == "refused" else self.after

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        decided = {"before": self.before, "after": self.after}
        return {
            "title": self.row.title,
            "feature": self.row.feature.to_json(),
            "chips": [chip if chip is not None else "cpu" for chip in self.chips],
            **{
                name: {"status": each.status, "rule": each.rule, "reason": each.reason}
                for name, each in decided.items()
            },
        }


def differences(old: Matrix, new: Matrix) -> list[Difference]:
    """Return what one version supports and the other does not."""
    found = []
    for (row, before), (_, after) in zip(old.rows, new.rows, strict=True):
        pairs = zip(before, after, strict=True)
        changed = [pair for pair in pairs if pair[0].supported != pair[1].supported]
        for _, group in groupby(changed, key=lambda pair: (pair[0].rule, pair[1].rule)):
            alike = list(group)
            chips = tuple(one.target.sm for one, _ in alike)
            found.append(Difference(row, chips, *alike[0]))
    return found
