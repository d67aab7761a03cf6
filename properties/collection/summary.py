"""What pytest prints of a run of the suite, and when it fails a run in which no test failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ...impl.gpu.interpreted import NOTE
from ..findings.not_run import BROKEN, reasons_text
from ..verdicts.text import count_of, one_line


@dataclass(eq=False)  # pytest keeps plugins in sets
class Tally:
    """Counts what the items report; as a plugin of the process that prints.

    The properties of an item travel with its report, so that xdist makes no difference.

    Attributes:
        named: implementations that were asked for by name.
        told: properties of each item that has ended, by its id.
        left: sentences on what implementations have left behind.
    """

    named: tuple[str, ...]
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record an item that has ended."""
        if report.when == "call":
            properties = dict(report.user_properties)
            if "kernelproof" in properties:
                told = {"failed": report.failed, "outcome": report.outcome}
                self.told[report.nodeid] = {**properties, **told}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run in which nothing at all was judged of what it was about."""
        if self.idle() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the verdict, findings, what is known, incomplete, passed, and what was not run.

        What is known, and what was not run, is counted; with ``-v`` each item has its line.
        """
        if not self.told:
            return
        verbose = config.option.verbose > 0
        terminalreporter.section("kernelproof")
        terminalreporter.line(self._verdict(), bold=True)
        for item in self._found.values():
            terminalreporter.line(one_line(f"{item['status']}  {_named(item)}"), red=True)
            terminalreporter.line(f"  {one_line(item['replay'])}")
        for name, reason in self.idle().items():
            line = f"no problem at all was judged of {name}"
            terminalreporter.line(one_line(f"{line}: {reason}" if reason else line), red=True)
        for line in self._known(verbose=verbose):
            terminalreporter.line(one_line(line), yellow=True)
        for line in self._incomplete():
            terminalreporter.line(one_line(line), yellow=True)
        for item in self.told.values():
            if item.get("code") == BROKEN:
                terminalreporter.line(f"left out: {one_line(item['reason'])}", yellow=True)
        for sentence in self._notes():
            terminalreporter.line(one_line(sentence), yellow=True)
        passed = [each for each in self.told.values() if each["outcome"] == "passed"]
        terminalreporter.line(f"passed: {len(passed)} of {count_of(len(self.told), 'item')}")
        for line in self._not_run(verbose=verbose):
            terminalreporter.line(one_line(line))

    @property
    def _found(self) -> dict[str, dict[str, Any]]:
        """Findings by their replay commands: a stored case and a search may have the same one."""
        items = self.told.values()
        return {item["replay"]: item for item in items if item.get("replay") and item["failed"]}

    def _verdict(self) -> str:
        items = self.told.values()
        short = any(_is_short(item) or item.get("ended") == "stopped" for item in items)
        word = "INCOMPLETE" if short else "CONFORMING"
        if self.idle() or any(item["failed"] and not _is_short(item) for item in items):
            word = "NOT CONFORMING"
        known = sum("entry" in item for item in items)
        judged = sum(item.get("judged", 0) for item in items)
        counts = f"{count_of(len(self._found), 'finding')}, {known} known"
        return f"{word}: {counts}; {count_of(judged, 'problem')} judged"

    def _known(self, *, verbose: bool) -> Iterator[str]:
        """Yield a line for each cause that the ledger knows: one issue, or one reason."""
        causes: dict[str, list[dict[str, Any]]] = {}
        for item in self.told.values():
            if "entry" in item:
                causes.setdefault(item["issue"] or item["cause"], []).append(item)
        for cause, items in causes.items():
            issue = f" ({cause})" if items[0]["issue"] else ""
            if verbose:
                yield from (f"KNOWN  {_named(each)}: {each['entry']}" for each in items)
            else:
                who = ", ".join(dict.fromkeys(each["implementation"] for each in items))
                yield f"KNOWN  {count_of(len(items), 'item')} of {who}: {items[0]['cause']}{issue}"

    def _incomplete(self) -> Iterator[str]:
        """Yield what was cut short: items below their floor by name, others counted."""
        short = [item for item in self.told.values() if _is_short(item)]
        yield from (str(item["reason"]) for item in short)
        ended = [item["ended"] for item in self.told.values() if "ended" in item]
        if early := len(ended) - ended.count("stopped"):
            yield f"{count_of(early, 'item')} ended early, out of time"
        if cut := ended.count("stopped"):
            yield f"{count_of(cut, 'item')} interrupted"

    def _notes(self) -> Iterator[str]:
        """Yield which implementations Triton's interpreter ran, and what any have left behind."""
        items = [each for each in self.told.values() if each.get("interpreted")]
        if names := dict.fromkeys(str(each["implementation"]) for each in items):
            yield f"interpreted: {', '.join(names)}: {NOTE}"
        yield from (f"note: {each}" for each in dict.fromkeys(self.left))

    def _not_run(self, *, verbose: bool) -> Iterator[str]:
        items = [item for item in self.told.values() if "code" in item]
        if items and not verbose:
            reasons = reasons_text((item["code"], item["needs"]) for item in items)
            count = f"{len(items)} of {count_of(len(self.told), 'item')}"
            yield f"not run: {count}: {reasons} (-v names them)"
        elif verbose:
            yield from (f"not run: {_named(item)}: {item['reason']}" for item in items)

    def idle(self) -> dict[str, str]:
        """Return the named implementations of which no item judged anything, and the reason.

        Only where all their items ran: a selection (`-k`, `--lf`, `-x`) says nothing of the rest.
        """
        idle = {}
        for name in self.named:
            items = [item for item in self.told.values() if item["implementation"] == name]
            complete = items and len(items) == items[0]["items"]
            if complete and not any(item.get("judged") or item["failed"] for item in items):
                idle[name] = next((item["reason"] for item in items if item.get("reason")), "")
        return idle


def _named(item: Mapping[str, Any]) -> str:
    words = (item["implementation"], item["law"], item["configuration"])
    return "  ".join(filter(None, words))


def _is_short(item: Mapping[str, Any]) -> bool:
    return item.get("status") == "INCOMPLETE"
