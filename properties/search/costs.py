"""Files of what runs have measured: cost classes of calls, and minutes of builds.

What a call costs decides how many problems are drawn and how large they are: with a file of cost
classes, the same seed draws the same problems on any machine. What a library took to build decides
which modules a later run has time for.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ...impl.targets.data_files import read_json
from ...impl.targets.schemas import Table, converted
from ..findings.files import Output, make_folder
from ..space.profiles import Cost, Profile

SCHEMA = "kernelproof-costs-1"
BUILDS_SCHEMA = "kernelproof-builds-1"


class CostsError(ValueError):
    """A file of cost classes that cannot be used; the message names the file and the field."""


class CostClass(Table, frozen=True):
    """See ``Cost``."""

    name: str
    problems: Annotated[float, msgspec.Meta(gt=0, le=1)]
    max_work: Annotated[int, msgspec.Meta(ge=1)]
    max_heads: Annotated[int, msgspec.Meta(ge=0)] = 0


class CostFile(Table, frozen=True):
    """Cost classes of one profile on one device, by the name of the implementation."""

    schema: Literal["kernelproof-costs-1"]
    profile: str
    device: str
    costs: dict[str, CostClass]


class BuildFile(Table, frozen=True):
    """Minutes of one core that each library took to build, by its name."""

    schema: Literal["kernelproof-builds-1"]
    minutes: dict[str, Annotated[float, msgspec.Meta(gt=0)]]


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
        name: Cost(each.name, each.problems, each.max_work, each.max_heads)
        for name, each in found.costs.items()
    }


def costs_file(cases: Path, profile: Profile, device: str) -> Path:
    """Return the file that runs of a profile on a device write, below their folder of cases."""
    return cases / "costs" / f"{profile.name}-{device}.json"


def builds_file(cases: Path) -> Path:
    """Return the file that runs write after they have built modules, below their folder of cases.

    What a build costs depends on the machine, not on the profile.
    """
    return cases / "costs" / "builds.json"


def read_builds(cases: Path) -> dict[str, float]:
    """Return the minutes of one core that each library took in earlier runs; none without a file.

    A file that cannot be read costs no run its result: a line on stderr says so.
    """
    path = builds_file(cases)
    if not path.exists():
        return {}
    try:
        return dict(converted(read_json(path, CostsError), BuildFile, path, CostsError).minutes)
    except CostsError as error:
        sys.stderr.write(f"kernelproof: builds are planned as declared ({error})\n")
        return {}


def keep_builds(cases: Path, minutes: Mapping[str, float]) -> None:
    """Write what builds took below a folder of cases; other libraries' minutes stay."""
    if not minutes:
        return
    path = builds_file(cases)

    def write() -> None:
        known = {**read_builds(cases), **minutes}
        rows = {name: round(known[name], 3) or 0.001 for name in sorted(known)}
        Output("", path).write({"schema": BUILDS_SCHEMA, "minutes": rows})

    _write_alone(path, write)


def keep_costs(cases: Path, profile: Profile, device: str, costs: Mapping[str, Cost]) -> None:
    """Write measured classes below a folder of cases; those of other implementations stay."""
    if not costs:
        return
    path = costs_file(cases, profile, device)
    _write_alone(path, lambda: _write(path, profile, device, costs))


def _write_alone(path: Path, write: Callable[[], None]) -> None:
    """Write a file while no other process does.

    A file that cannot be written costs no run its result: a line on stderr says so.
    """
    try:
        make_folder(path.parent)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # processes of xdist write the same file
            write()
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"kernelproof: no costs are kept in {path} ({error})\n")


def _write(path: Path, profile: Profile, device: str, costs: Mapping[str, Cost]) -> None:
    # A file that cannot be read stays as it is: the CostsError says so.
    before = read_costs(path, profile, device) if path.exists() else {}
    rows = {name: vars(cost) for name, cost in sorted({**before, **costs}.items())}
    head = {"schema": SCHEMA, "profile": profile.name, "device": device}
    Output("", path).write({**head, "costs": rows})
