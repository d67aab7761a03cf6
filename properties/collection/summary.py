"""What pytest prints of a run of the suite, and when it fails a run in which no test failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from ..verdicts.text import one_line


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
                self.told[report.nodeid] = {**properties, "failed": report.failed}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run in which nothing at all was judged of what it was about."""
        if self.idle() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print counts, findings and how to see them again."""
        if not self.told:
            return
        items = self.told.values()
        # By its command: a stored case and a search may come to the same one.
        found = {item["replay"]: item for item in items if item.get("replay") and item["failed"]}
        known = sum("entry" in item for item in items)
        ended = [item["ended"] for item in items if "ended" in item]
        cut = ended.count("stopped")
        terminalreporter.section("kernelproof")
        for item in found.values():
            configuration = f"  {item['configuration']}" if item["configuration"] else ""
            title = f"{item['status']}  {item['implementation']}  {item['law']}{configuration}"
            terminalreporter.line(one_line(title), red=True)
            terminalreporter.line(f"  {one_line(item['replay'])}")
        for name, reason in self.idle().items():
            line = f"NOT CONFORMING: no problem at all was judged of {name}"
            terminalreporter.line(one_line(f"{line}: {reason}" if reason else line), red=True)
        for sentence in dict.fromkeys(self.left):
            terminalreporter.line(f"note: {one_line(sentence)}", yellow=True)
        judged = sum(item.get("judged", 0) for item in items)
        line = f"{_count(judged, 'problem')} judged, {_count(len(found), 'finding')}, {known} known"
        if early := len(ended) - cut:
            line += f"; {_count(early, 'item')} ended early, out of time"
        if cut:
            line += f"; {_count(cut, 'item')} interrupted"
        terminalreporter.line(line)

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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
