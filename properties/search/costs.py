"""A file of cost classes: with it, the same seed draws the same problems on any machine.

What a call costs is measured, and decides how many problems are drawn and how large they are.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ...impl.targets.data_files import read_json
from ...impl.targets.schemas import Table, converted
from ..findings.files import Output
from ..space.profiles import Cost, Profile

SCHEMA = "kernelproof-costs-1"


class CostsError(ValueError):
    """A file of cost classes that cannot be used; the message names the file and the field."""


class CostClass(Table, frozen=True):
    """See ``Cost``."""

    name: str
    problems: Annotated[float, msgspec.Meta(gt=0, le=1)]
    max_work: Annotated[int, msgspec.Meta(ge=1)]


class CostFile(Table, frozen=True):
    """Cost classes of one profile on one device, by the name of the implementation."""

    schema: Literal["kernelproof-costs-1"]
    profile: str
    device: str
    costs: dict[str, CostClass]


def read_costs(path: Path, profile: Profile, device: str) -> dict[str, Cost]:
    """Read the cost class of each implementation, by its name.

    Raises:
        CostsError: no such file, or not of this profile and device, or a wrong field.
    """
    found = converted(read_json(path, CostsError), CostFile, path, CostsError)
    for name, wanted in (("profile", profile.name), ("device", device)):
        if (value := getattr(found, name)) != wanted:
            message = f"{path}: {name} is {value!r}, and this run's is {wanted!r}"
            raise CostsError(message)
    return {
        name: Cost(each.name, each.problems, each.max_work) for name, each in found.costs.items()
    }


def costs_file(cases: Path, profile: Profile, device: str) -> Path:
    """Return the file that runs of a profile on a device write, below their folder of cases."""
    return cases / "costs" / f"{profile.name}-{device}.json"


def keep_costs(cases: Path, profile: Profile, device: str, costs: Mapping[str, Cost]) -> None:
    """Write measured classes below a folder of cases; those of other implementations stay.

    A file that cannot be written costs no run its result: a line on stderr says so.
    """
    if not costs:
        return
    path = costs_file(cases, profile, device)
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
    except CostsError:  # there is none
        before = {}
    rows = {name: vars(cost) for name, cost in sorted({**before, **costs}.items())}
    head = {"schema": SCHEMA, "profile": profile.name, "device": device}
    Output("", path).write({**head, "costs": rows})
