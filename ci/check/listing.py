"""The command list: implementations and whether they can run here, laws, profiles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ...impl import Target, UnsupportedError, registry
from ...impl.targets.registrations import Registration
from ...properties.findings.files import dumps
from ...properties.findings.report import ImplementationReport
from ...properties.isolation.workers import Worker
from ...properties.laws import LAWS
from ...properties.search.preparation import survey, usable
from ...properties.space.profiles import PROFILES
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address, DeviceLostError, HarnessError
from ..console.errors import MachineError
from ..console.terminal import console
from ..reports.display import print_broken, style_of

SCHEMA = "kernelproof/list/1"
JOBS = 2
DECLARED = ("features", "arithmetic", "provider", "provider_version")
"""What is listed of what an implementation declares."""


def print_list(device: str, *, as_json: bool) -> int:
    """Print what there is.

    Raises:
        MachineError: there is no such device.
    """
    try:
        Target.here(device)
    except UnsupportedError as error:
        raise MachineError(str(error)) from error
    names, broken = usable_here(device)
    listed = {
        "schema": SCHEMA,
        "implementations": implementations(names, device),
        "broken": [vars(each) for each in broken],
        "laws": [
            {
                "name": law.name,
                "operations": list(law.operations),
                "statement": law.statement,
                "weight": law.weight,
            }
            for law in LAWS
        ],
        "profiles": [asdict(profile) for profile in PROFILES.values()],
    }
    if as_json:
        sys.stdout.write(dumps(listed))
    else:
        _print(listed, broken)
    return 0


def usable_here(device: str) -> tuple[list[str], list[Registration]]:
    """Return the names of all implementations that can be used, and the registrations that cannot.

    An isolated worker imports what distributions register: it may fail, or never end.
    """
    if not registry.installed():
        return registry.registered(), []
    try:
        Target.here(device)
    except UnsupportedError:  # the run says it
        return registry.registered(), []
    with open_pool(device, size=1, standby=False) as pool:
        return usable(pool.lease, device)


def implementations(names: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Ask isolated workers about implementations: nothing is imported here."""
    with (
        open_pool(device, size=JOBS, standby=False) as pool,
        ThreadPoolExecutor(JOBS) as executor,
    ):

        def ask(name: str) -> dict[str, Any]:
            with pool.lease() as worker:
                return _describe(worker, name, device)

        try:
            return list(executor.map(ask, names))
        except BaseException:
            pool.close()
            raise


def _describe(worker: Worker, name: str, device: str) -> dict[str, Any]:
    """Return what an implementation declares, and why it cannot run here, if so."""
    address = Address(registry.resolve_name(name), None, device)
    report = ImplementationReport(name, address.reference)
    try:
        survey(worker, address, PROFILES["quick"].max_work, report)
    except (DeviceLostError, HarnessError) as error:
        report.error = str(error)
    reason = report.error.strip().rpartition("\n")[2] or report.refusal  # of a traceback, its error
    return {
        "name": name,
        "operation": report.operation or None,
        "reference": address.reference,
        **{each: report.declared[each] for each in DECLARED if each in report.declared},
        "available": not reason,
        "reason": reason,
    }


def _print(listed: dict[str, Any], broken: Sequence[Registration]) -> None:
    out = console(sys.stdout)
    table = _table("implementation", "operation", "here")
    for each in listed["implementations"]:
        here = Text("available", style_of("PASS"))
        if not each["available"]:
            here = Text(each["reason"], style_of("UNSUPPORTED"))
        table.add_row(Text(each["name"]), each["operation"] or "?", here)
    out.print(table)
    print_broken(out, broken)
    table = _table("law", "operations", "statement")
    for law in listed["laws"]:
        table.add_row(law["name"], ", ".join(law["operations"]), Text(law["statement"]))
    out.print(table)
    table = _table("profile", "problems a law", "at most")
    for profile in listed["profiles"]:
        most = f"{profile['seconds']:g} s an implementation, shrinking aside"
        table.add_row(profile["name"], f"{profile['problems']:,}", most)
    out.print(table)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
