"""What a release of FlashInfer selects on a chip, as it is kept: a letter a kind of call.

``kernelproof support --binaries`` asks; ``python -m kernelproof.ci.evidence`` keeps the answers. A
kind in which the host's process ends is left out, as one that was never asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ..targets.data_files import read_json
from ..targets.shape_checks import checked
from .feature import Feature

SELECTIONS = "kernelproof/selections/1"
"""The name of the format."""
RUNS, RAISES, RAISES_FOR_SOME = "runs", "raises", "raises for some"
LETTERS = {RUNS: "r", RAISES: "x", RAISES_FOR_SOME: "s"}
ABSENT = "-"
"""The letter of a kind that is not kept."""
ATTENTION, MOE, GEMM = "attention", "moe", "gemm"
"""Parts of a release that are asked one by one, each with a launcher of its own."""
FIXED: Mapping[str, tuple[str, ...]] = {
    ATTENTION: ("operation", "phase", "head_dim_qk", "head_dim_vo", "q_dtype", "kv_dtype"),
    MOE: ("operation", "quantisation", "q_dtype"),
    GEMM: ("operation",),
}
"""Fields that kinds of one group share, by part."""
AXES: Mapping[str, tuple[str, ...]] = {
    ATTENTION: ("page_size", "group_size", "query_len", "window", "mask"),
    MOE: ("activation", "routing"),
    GEMM: ("quantisation", "q_dtype"),
}
"""Fields in which kinds of a group differ; the last one changes first along the letters."""
Key = tuple[Any, ...]


def part_of(operation: str) -> str:
    """Return the part of a release that has an operation."""
    return operation if operation in FIXED else ATTENTION


@dataclass(frozen=True)
class Group:
    """Kinds of call that share all but some fields.

    Attributes:
        axes: the values of each of ``AXES``.
        outcomes: a letter a combination of them, of ``LETTERS`` or ``ABSENT``.
    """

    axes: tuple[tuple[Any, ...], ...]
    outcomes: str


@dataclass(frozen=True)
class Selections:
    """The outcomes of one part of a release on one chip.

    Attributes:
        part: ``ATTENTION``, ``MOE`` or ``GEMM``.
        sm: the chip.
        flashinfer: the release.
        artifact: the hash that names its kernels.
        groups: the kinds, by the values of ``FIXED``.
    """

    part: str
    sm: int
    flashinfer: str
    artifact: str
    groups: Mapping[Key, Group]

    def outcome(self, feature: Feature) -> str:
        """Return what becomes of a kind of call; empty where it is not known."""
        group = self.groups.get(_values(feature, FIXED[self.part]))
        if group is None or feature != _plain(feature):
            return ""
        index = 0
        for value, axis in zip(_values(feature, AXES[self.part]), group.axes, strict=True):
            if value not in axis:
                return ""
            index = index * len(axis) + axis.index(value)
        return _WORDS.get(group.outcomes[index], "")

    def kinds(self) -> Iterator[tuple[Feature, str]]:
        """Yield each kind of call that is kept, with its outcome."""
        names = (*FIXED[self.part], *AXES[self.part])
        for fixed, group in self.groups.items():
            for values, letter in zip(product(*group.axes), group.outcomes, strict=True):
                if letter != ABSENT:
                    fields = dict(zip(names, (*fixed, *values), strict=True))
                    yield _feature(fields), _WORDS[letter]


_WORDS = {letter: outcome for outcome, letter in LETTERS.items()}


def _values(feature: Feature, names: Iterable[str]) -> Key:
    return tuple(getattr(feature, name) for name in names)


def _feature(fields: Mapping[str, Any]) -> Feature:
    layout = {} if fields["operation"] in FIXED else {"kv_layout": "HND"}
    return Feature(**{"backend": "trtllm-gen", **layout, **fields})


def _plain(feature: Feature) -> Feature:
    """Return the kind that was asked for a feature: only paged attention has a layout."""
    part = part_of(feature.operation)
    fields = {name: getattr(feature, name) for name in (*FIXED[part], *AXES[part])}
    plain = _feature(fields)
    if feature.operation in ("paged_attention", *FIXED):
        return plain
    return _feature({**fields, "kv_layout": feature.kv_layout})


def packed(
    sm: int, flashinfer: str, artifact: str, outcomes: Mapping[Feature, str]
) -> dict[str, Any]:
    """Return outcomes of one part as they are kept, JSON-able and sorted."""
    part = part_of(next(iter(outcomes)).operation)
    shared, varied = FIXED[part], AXES[part]
    groups: dict[Key, dict[Key, str]] = {}
    for feature, outcome in outcomes.items():
        group = groups.setdefault(_values(feature, shared), {})
        group[_values(feature, varied)] = LETTERS[outcome]
    kinds = []
    for fixed, letters in sorted(groups.items()):
        axes = [sorted({values[number] for values in letters}) for number in range(len(varied))]
        kinds.append(
            {
                "fields": dict(zip(shared, fixed, strict=True)),
                "axes": dict(zip(varied, axes, strict=True)),
                "outcomes": "".join(letters.get(values, ABSENT) for values in product(*axes)),
            }
        )
    return {
        "schema": SELECTIONS,
        "sm": sm,
        "flashinfer": flashinfer,
        "artifact": artifact,
        "kinds": kinds,
    }


def read_selections(path: Path, error: type[ValueError]) -> Selections:
    """Read the outcomes of one release on one chip.

    Raises:
        ValueError: of the given type, where the file cannot be read or has another shape.
    """
    data = read_json(path, error)
    if not isinstance(data, dict) or data.get("schema") != SELECTIONS:
        message = f"{path}: schema is not {SELECTIONS!r}"
        raise error(message)

    def schema() -> Any:  # noqa: ANN401  a type
        from .schema import KeptSelections

        return KeptSelections

    checked(data, schema, path, error)
    part = part_of(data["kinds"][0]["fields"]["operation"])
    groups = {}
    for number, kind in enumerate(data["kinds"]):
        axes = tuple(tuple(kind["axes"][name]) for name in AXES[part])
        letters = kind["outcomes"]
        if len(letters) != prod(map(len, axes)) or set(letters) - {*_WORDS, ABSENT}:
            message = f"{path}: kinds[{number}].outcomes is not a letter a combination of its axes"
            raise error(message)
        groups[tuple(kind["fields"][name] for name in FIXED[part])] = Group(axes, letters)
    return Selections(part, data["sm"], data["flashinfer"], data["artifact"], groups)
