"""Reading a comparison's report back: what its file must hold (docs/bump.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...console.errors import UsageRefusedError
from ..sides.releases import SIDES
from ..verdicts.findings import ACTIONS, Finding
from ..verdicts.verdict import EVIDENCE
from .contents import SCHEMA


class ReportError(UsageRefusedError):
    """A report that cannot be read; the message names the file and the field."""


@dataclass(frozen=True)
class Each:
    """Any names, each with a value of this shape."""

    shape: object


@dataclass(frozen=True)
class Among:
    """One of these values."""

    values: tuple[object, ...]


NUMBER = (int, float, str)
"""What is infinite or NaN is text."""
CHIP = (int, str)
CONDITIONS = [{"rule": str, "findings": [str]}]
NOT_TESTED = [{"what": str, "why": str, "chips?": [CHIP]}]
SIDE = {
    "given": str,
    **dict.fromkeys(("flashinfer", "torch", "triton", "cuda"), (str, None)),
    "own_environment": Among((True, False)),
    "artifacts": Each(str),
    "not_imported": Each(str),
}
CELL = {"status": str, "evidence": str, "rule": str}
FINDING = {
    "area": str,
    "action": Among(ACTIONS),
    **dict.fromkeys(("accepted", "rule", "entry", "issue", "reason"), str),
    "chips": [CHIP],
    "baseline": Each(object),
    "candidate": Each(object),
    "laws": [str],
    "problem": ({"id": str, "told": str}, None),
    "replay": Each(str),
    "found_by": [str],
    "count": int,
}
MACHINE = {
    "chip": CHIP,
    **dict.fromkeys(("device", "device_name", "profile", "command"), str),
    "versions": Each(Each((str, None))),
    "seed": int,
    "judged": int,
    "corpus?": {"replayed": int, "of_ledger": int},
    "implementations": [
        {
            **dict.fromkeys(("name", "reference", "operation", "backend"), str),
            "runs": [str],
            "reasons": Each(str),
            "judged": int,
            "laws": [
                {"law": str, "judged": int, "pass": int, "changes": Each(int),
                 "worst_ratio": Each(NUMBER)}
            ],
            "ratios": Each([NUMBER]),
            "bits": {"compared": int, "changed": int, "other_inputs": int},
            "modules": int,
        }
    ],
    "liveness": {
        "launches": int,
        "soaked": [{"name": str, "problems": int, "failed": int}],
        "hangs": [str],
        "known": [str],
    },
    "compiled": [{"side": str, "unit": str, "sm": CHIP, "status": str}],
    "not_tested": NOT_TESTED,
    "timings": {
        "seconds": (int, float),
        "parts?": Each((int, float)),
        "builds": [{"name": str, "seconds": Each([(int, float)])}],
        "speed": [
            {
                "name": str,
                "measurements": [
                    {
                        **dict.fromkeys(("ratio", "low", "high"), (int, float)),
                        "seconds": dict.fromkeys(SIDES, (int, float)),
                        "problem": str,
                        "work": (int, float),
                    }
                ],
            }
        ],
    },
}  # fmt: skip
REPORT = {
    "verdict": str,
    "message": str,
    **dict.fromkeys(SIDES, SIDE),
    "chips": [
        {
            "chip": CHIP,
            "name": str,
            "verdict": str,
            "evidence": Among(EVIDENCE),
            "blocked_by": [str],
            "conditions": CONDITIONS,
        }
    ],
    "conditions": CONDITIONS,
    "findings": [Each(object)],  # see read_report
    "features": (
        None,
        {
            "chips": [CHIP],
            "rules": Each(str),
            "rows": [
                {
                    **dict.fromkeys(("title", "operation", "backend"), str),
                    "cells": [
                        {"chip": CHIP, "change": str, **dict.fromkeys(SIDES, CELL)},
                    ],
                }
            ],
        },
    ),
    "machines": [MACHINE],
    "not_tested": NOT_TESTED,
    "failures": [str],
    "policy": {
        "source": str,
        "actions": Each(Among(ACTIONS)),
        "slower": (int, float),
        "required": [CHIP],
        "accepted": [{"finding": str, "reason": str, "chips": [CHIP]}],
        "rules": [str],
        "unused": [str],
    },
    **dict.fromkeys(("kernelproof", "date", "command"), str),
}


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ReportError: the file cannot be read, or is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror})"
        raise ReportError(message) from error
    except (ValueError, RecursionError) as error:
        message = f"{path}: not JSON ({error})"
        raise ReportError(message) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else None
        message = f"{path}: its schema is {schema!r}; this Kernelproof reads {SCHEMA!r}"
        raise ReportError(message)
    _check(data, REPORT, path)
    try:
        for each in data["findings"]:
            Finding.from_json(each)
    except (ValueError, TypeError, AttributeError) as error:
        message = f"{path}: {error}"
        raise ReportError(message) from error
    for number, each in enumerate(data["findings"]):
        _check(each, FINDING, path, f"findings[{number}]")
    return data


def _check(value: object, shape: object, path: Path, name: str = "") -> None:
    wrong = next(_wrong(value, shape, name), None)
    if wrong is not None:
        message = f"{path}: the field {wrong!r} is missing or of the wrong kind"
        raise ReportError(message)


def _wrong(value: object, shape: object, name: str) -> Iterator[str]:
    """Name the parts of a value that do not have the shape they should."""
    if isinstance(shape, tuple):
        *others, last = sorted(shape, key=lambda each: isinstance(each, dict | Each))
        if all(list(_wrong(value, each, name)) for each in others):
            yield from _wrong(value, last, name)
    elif isinstance(shape, list | dict | Each) and isinstance(value, _container(shape)):
        for inner, its_shape, its_name in _parts(value, shape):
            yield from _wrong(inner, its_shape, f"{name}{its_name}".lstrip("."))
    elif not _fits(value, shape):
        yield name


def _container(shape: list[Any] | dict[str, Any] | Each) -> type:
    return list if isinstance(shape, list) else dict


def _parts(value: Any, shape: Any) -> Iterator[tuple[object, object, str]]:  # noqa: ANN401  JSON
    """Give what a list or dictionary holds, with the shape and the name of each."""
    if isinstance(shape, list):
        yield from ((each, shape[0], f"[{number}]") for number, each in enumerate(value))
    elif isinstance(shape, Each):
        yield from ((each, shape.shape, f".{key}") for key, each in value.items())
    else:
        for key, inner in shape.items():
            plain = key.removesuffix("?")
            if plain in value or plain == key:
                yield value.get(plain, ...), inner, f".{plain}"


def _fits(value: object, shape: object) -> bool:
    if isinstance(shape, Among):
        return value in shape.values
    if not isinstance(shape, type):
        return shape is None and value is None
    return isinstance(value, shape) and (shape is object or not isinstance(value, bool))
