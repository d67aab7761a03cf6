"""A file of cost classes: with it, the same seed draws the same problems on any machine.

What a call costs is measured, and decides how many problems are drawn and how large they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..findings.files import Output
from ..space.profiles import Cost, Profile

SCHEMA = "kernelproof-costs-1"
NAME = "costs.json"
"""Name of the file that every run writes beside its folder of cases."""
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "class": ("a word", lambda value: isinstance(value, str)),
    "problems": ("above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "max_work": ("a positive integer", lambda value: type(value) is int and value > 0),
}
"""Fields of a cost class: what each should be, and whether a value is."""


class CostsError(ValueError):
    """A file of cost classes that cannot be used; the message names the file and the field."""


def read_costs(path: Path, profile: Profile, device: str) -> dict[str, Cost]:
    """Read the cost class of each implementation, by its name.

    Raises:
        CostsError: no such file, or not of this profile and device, or a wrong field.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror})"
        raise CostsError(message) from error
    except ValueError as error:
        message = f"{path}: not JSON ({error})"
        raise CostsError(message) from error
    head = {"schema": SCHEMA, "profile": profile.name, "device": device}
    found = {name: data.get(name) if isinstance(data, dict) else None for name in (*head, "costs")}
    for name, wanted in head.items():
        if found[name] != wanted:
            message = f"{path}: {name} is {found[name]!r}, and should be {wanted!r}"
            raise CostsError(message)
    if not isinstance(found["costs"], dict):
        message = f"{path}: costs should be an object of cost classes, by implementation"
        raise CostsError(message)
    return {name: _cost(f"{path}: costs.{name}", each) for name, each in found["costs"].items()}


def keep_costs(cases: Path, profile: Profile, device: str, costs: Mapping[str, Cost]) -> None:
    """Write what was measured beside a folder of cases; what is there of others stays.

    A file that cannot be written costs no run its result: a line on stderr says so.
    """
    path = cases.parent / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # processes of xdist write the same file
            _write(path, profile, device, costs)
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"kernelproof: no costs are kept in {path} ({error})\n")


def _write(path: Path, profile: Profile, device: str, costs: Mapping[str, Cost]) -> None:
    try:
        before = read_costs(path, profile, device)
    except CostsError:  # there is none, or it is of another profile
        before = {}
    rows = {
        name: {"class": cost.name, "problems": cost.problems, "max_work": cost.max_work}
        for name, cost in sorted({**before, **costs}.items())
    }
    head = {"schema": SCHEMA, "profile": profile.name, "device": device}
    Output("", path).write({**head, "costs": rows})


def _cost(where: str, data: Any) -> Cost:  # noqa: ANN401  JSON
    for name, (wanted, is_right) in FIELDS.items():
        value = data.get(name) if isinstance(data, dict) else None
        if not is_right(value):
            message = f"{where}.{name} is {value!r}, and should be {wanted}"
            raise CostsError(message)
    return Cost(data["class"], float(data["problems"]), data["max_work"])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
