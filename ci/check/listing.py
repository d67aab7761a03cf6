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
from ...impl.features import NOT_NAMED
from ...impl.registry import registered, resolve_name
from ...properties.findings.files import dumps
from ...properties.isolation.workers import Deadlines, Worker
from ...properties.laws import LAWS
from ...properties.space.axes import narrow
from ...properties.space.profiles import PROFILES
from ...properties.worker.pools import open_pool
from ...reference import Problem
from ..console.errors import MachineError
from ..console.terminal import console
from ..reports.display import style_of

SCHEMA = "kernelproof/list/1"
JOBS = 2


class _NoAnswerError(Exception):
    """The worker could not say; the message tells why."""


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
    """Say what an implementation declares, and why it cannot run here, if so."""
    base = {"implementation": resolve_name(name), "operation": None, "device": device}
    entry: dict[str, Any] = {"name": name, "operation": None, "reference": base["implementation"]}
    reason = ""

    def probe(problems: Sequence[Problem]) -> list[str | None]:
        nonlocal reason
        asked = [problem.to_json() for problem in problems]
        reasons: list[str | None] = _ask(worker, {"task": "probe", "problems": asked, **base})[
            "reasons"
        ]
        # A feature that it does not have says less than whatever else is wanting.
        telling = (each for each in reasons if each and (NOT_NAMED not in each or not reason))
        reason = next(telling, reason)
        return reasons

    try:
        declared = _ask(worker, {"task": "describe", **base})
        entry |= {key: declared[key] for key in ("operation", "features", "arithmetic")}
        axes = narrow(str(declared["operation"]), probe, PROFILES["quick"].max_work)
    except _NoAnswerError as error:
        return {**entry, "available": False, "reason": str(error)}
    return {**entry, "available": axes is not None, "reason": None if axes else reason}


def _ask(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    outcome = worker.run(request, Deadlines())
    result: dict[str, Any] = outcome.result or {}
    if outcome.status != "done":
        raise _NoAnswerError(outcome.detail.strip().rpartition("\n")[2] or outcome.kind)
    if "error" in result:
        raise _NoAnswerError(result["error"])
    return result


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
