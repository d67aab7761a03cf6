"""What a night on many GPUs takes, computed from what units took in an earlier run.

    python tests/bench/fleet_simulation.py report.json --chips 8 --releases 3

Units begin as a fleet begins them: each as soon as one of its chip's places is free, the first of
all implementations before later ones, the longest first.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kernelproof.ci.fleet.units import later_laws
from kernelproof.properties.laws import laws_of
from kernelproof.properties.search.plan import first_laws

START_SECONDS = 12.0
"""Seconds of a unit beside its laws, where the report is of a run without Ray: 11.8 and 12.6 were
measured, of six units on one H100 and on two, to start processes that import torch, to survey the
implementation and to build what it needs."""
PLACES = 12
"""Units that share a GPU, where the report does not say it: the workers of a gate on a card of
141 GB."""
ASSUMED = (
    "Assumed: each chip takes what the measured one took, modules are built, no machine is lost, "
    "releases follow one another."
)


@dataclass(frozen=True)
class Took:
    """A unit, and what it took.

    Attributes:
        implementation: its name.
        number: of the unit, among those of the implementation; the first is 0.
        seconds: from taking a place to the result.
    """

    implementation: str
    number: int
    seconds: float


def simulated(units: Sequence[Took], places: int) -> float:
    """Return the seconds that units take, as many at a time as there are places."""
    first = {unit.implementation for unit in units if not unit.number}
    ready: list[tuple[int, float, str]] = []
    later: dict[str, list[tuple[int, float, str]]] = defaultdict(list)
    for unit in units:
        waits = unit.number and unit.implementation in first
        queue = later[unit.implementation] if waits else ready
        queue.append((unit.number, -unit.seconds, unit.implementation))
    heapq.heapify(ready)
    running: list[tuple[float, int, str]] = []
    clock = 0.0
    while ready or running:
        while ready and len(running) < places:
            number, seconds, name = heapq.heappop(ready)
            heapq.heappush(running, (clock - seconds, number, name))
        clock, number, name = heapq.heappop(running)
        for each in () if number else later.pop(name, ()):
            heapq.heappush(ready, each)
    return clock


def units_of(report: Mapping[str, Any]) -> dict[str, tuple[list[Took], int]]:
    """Return the units of each chip of a report, and the chip's places.

    Those of a run without Ray are made of its laws, as a fleet would divide them.
    """
    if (fleet := report.get("fleet")) is None:
        made = [unit for each in report["implementations"] for unit in _divided(each)]
        return {"the machine": (made, PLACES)}
    chips: dict[str, tuple[list[Took], int]] = {
        chip: ([], places) for chip, places in fleet["places"].items()
    }
    for each in fleet["units"]:
        took = Took(each["implementation"], each["number"], each["seconds"])
        chips[each["chip"]][0].append(took)
    return chips


def _divided(report: Mapping[str, Any]) -> Iterator[Took]:
    took = {law["law"]: law["seconds"] for law in report["laws"]}
    laws = [law for law in laws_of(report["operation"]) if law.name in took] if took else []
    first = tuple(law.name for law in first_laws(laws))
    later = later_laws(laws, sum(took[name] for name in first)) if len(laws) > len(first) else []
    for number, names in enumerate([first, *later]):
        yield Took(report["name"], number, START_SECONDS + sum(took[name] for name in names))


@click.command()
@click.argument("report", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with this report's seconds instead of the first one's own.",
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, help="Factor of a chip's places.")
@click.option("--chips", type=click.IntRange(min=1), default=8, help="Chips of the night.")
@click.option("--releases", type=click.IntRange(min=1), default=3, help="Releases of the night.")
def main(report: Path, measured: Path | None, gpus: int, chips: int, releases: int) -> None:
    """Compare the simulated seconds of a run with measured ones, and compute a night."""
    known = json.loads(report.read_text(encoding="utf-8"))
    other = json.loads(measured.read_text(encoding="utf-8")) if measured else known
    each = {
        chip: simulated(units, places * gpus) for chip, (units, places) in units_of(known).items()
    }
    seconds, took = max(each.values()), float(other["seconds"])
    if measured or gpus == 1:
        click.echo(f"simulated {seconds:.1f} s, measured {took:.1f} s: {seconds / took - 1:+.0%}")
    else:  # the report's own seconds are those of one GPU
        click.echo(f"simulated {seconds:.1f} s on {gpus} GPUs")
    hours = releases * seconds / 3600
    click.echo(
        f"{releases} releases on {chips} chips, {gpus} GPU each: {hours:.2f} h by the clock, "
        f"{hours * chips * gpus:.1f} GPU-hours"
    )
    click.echo(ASSUMED)


if __name__ == "__main__":
    main()
