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

from ...impl import Target, UnsupportedError
from ...impl.registry import registered, resolve_name
from ...properties.findings.files import dumps
from ...properties.findings.report import ImplementationReport
from ...properties.isolation.workers import Worker
from ...properties.laws import LAWS
from ...properties.search.preparation import survey
from ...properties.space.profiles import PROFILES
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address, DeviceLostError, HarnessError
from ..console.errors import MachineError
from ..console.terminal import console
from ..reports.display import style_of

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
    listed = {
        "schema": SCHEMA,
        "implementations": implementations(registered(), device),
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
        _print(listed)
    return 0


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
    address = Address(resolve_name(name), None, device)
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


def _print(listed: dict[str, Any]) -> None:
    out = console(sys.stdout)
    table = _table("implementation", "operation", "here")
    for each in listed["implementations"]:
        here = Text("available", style_of("PASS"))
        if not each["available"]:
            here = Text(each["reason"], style_of("UNSUPPORTED"))
        table.add_row(Text(each["name"]), each["operation"] or "?", here)
    out.print(table)
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
