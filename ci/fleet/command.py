"""A fleet for the commands check and gate, and what is shown of its kinds of machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...properties.findings.report import RunReport
from ...properties.search.plan import Plan
from ...properties.verdicts.text import one_line
from ..answers.identity import journal_path, plan_identity
from ..answers.journal import Journal
from ..console.lines import note
from ..reports.display import style_of
from ..reports.json_report import to_json
from ..reports.summary import Summary, state
from .fleet import Fleet
from .ray_machines import RayMachines, connected

FOLDER = "fleet"
"""Name of the folder of journals below a run's folder of cases."""


@contextmanager
def fleet_at(address: str, plan: Plan, cases: Path, *, resume: bool) -> Iterator[Fleet]:
    """Connect to a cluster, and yield a fleet of its machines.

    Raises:
        UsageRefusedError: Ray is not installed, the address is none, the journal is of another run.
        MachineError: no cluster answers, or it has no machine that can be used.
    """
    with connected(address):
        machines = RayMachines(plan.device, plan.jobs)
        with Journal(journal_path(cases / FOLDER, plan), flag="--cases") as journal:
            journal.start(plan_identity(plan), resume=resume, tell=note)
            for chip in machines.chips:
                journal.require(f"machines of {chip}", machines.identities(chip))
            yield Fleet(plan, machines, journal)


def print_chips(out: Console, fleet: Fleet) -> None:
    """Print a row for each implementation, with a column for each kind of machines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    table.add_column("implementation", overflow="fold")
    reports = {chip: fleet.of_chip(chip).implementations for chip in fleet.chips}
    for chip in reports:
        table.add_column(chip, no_wrap=True)
    for each in zip(*reports.values(), strict=True):
        name = next((one.name for one in each if one.operation), each[0].name)
        table.add_row(
            Text(one_line(name)), *(Text(state(one), style_of(state(one))) for one in each)
        )
    out.print(table)


def fleet_to_json(fleet: Fleet, summary_of: Callable[[RunReport], Summary]) -> dict[str, Any]:
    """Return what each unit took, and the report of each kind of machines, as one would write it.

    Where all machines are of one kind, its report is that of the run.
    """
    several = fleet.chips if len(fleet.chips) > 1 else []
    chips = {chip: to_json(summary_of(fleet.of_chip(chip))) for chip in several}
    return {"fleet": fleet.timing(), **({"chips": chips} if chips else {})}
