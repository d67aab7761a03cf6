"""A comparison's report on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....properties.verdicts.text import count_of, one_line
from ...reports.display import command, say
from ..behaviour.speed import memory_sentences

STYLES = {
    "bump": "bold green",
    "bump with conditions": "bold yellow",
    "do not bump": "bold red",
    "undecided": "bold yellow",
}
ACTION_STYLES = {"block": "FAIL", "condition": "FLAKY", "report": "KNOWN"}
REPORTED_IN_FULL = (
    "callable-added",
    "refusal-added",
    "fixed",
    "still-failing",
    "candidate-only-failure",
    "hang-stays",
    "slower",
    "faster",
    "more-memory",
)
"""Changes that do nothing and are shown one by one all the same; others are counted."""


def print_report(out: Console, report: Mapping[str, Any]) -> None:
    """Print a report: what each chip may do, what stands against it, and the verdict last."""
    out.print(Text(one_line(title(report)), "bold"), soft_wrap=True)
    if report["chips"]:
        out.print(_chips(report["chips"]))
    shown = [each for each in report["findings"] if _in_full(each)]
    for each in shown:
        _finding(out, each)
    _counted(out, [each for each in report["findings"] if not _in_full(each)])
    for machine in report["machines"]:
        _machine(out, machine)
    for each in report["not_tested"]:
        _line(out, "not tested", f"{each['what']}: {each['why']}")
    for name in report["policy"]["unused"]:
        _line(out, "policy", f"nothing was found that accept {name!r} is about")
    if report["conditions"]:
        out.print(Text("Conditions", "bold"))
        for each in report["conditions"]:
            out.print(Text(one_line(f"  - {each['rule']}")), soft_wrap=True)
    style = STYLES.get(report["verdict"], "")
    out.print(Text(one_line(report["message"]), style), soft_wrap=True)


def title(report: Mapping[str, Any]) -> str:
    """Name what was compared."""
    return f"flashinfer-python {side_name(report, 'baseline')} to {side_name(report, 'candidate')}"


def side_name(report: Mapping[str, Any], side: str) -> str:
    """Name one side: its version, and where it came from if that says more."""
    told = report[side]
    version, given = told.get("flashinfer"), told["given"]
    return str(given) if version in (None, given) else f"{version} ({given})"


def _in_full(each: Mapping[str, Any]) -> bool:
    return each["action"] != "report" or each["change"] in REPORTED_IN_FULL or each["accepted"]


def _chips(chips: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in ("chip", "verdict", "evidence"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocked by", "conditions"):
        table.add_column(heading, justify="right")
    for each in chips:
        table.add_row(
            each["name"],
            Text(each["verdict"], STYLES.get(each["verdict"], "")),
            each["evidence"],
            str(len(each["blocked_by"])),
            str(len(each["conditions"])),
        )
    return table


def _finding(out: Console, each: Mapping[str, Any]) -> None:
    label = "accepted" if each["accepted"] else each["action"]
    where = ", ".join(_chip(chip) for chip in each["chips"])
    heading = f"{label}  {each['change']}  {each['subject']}" + (f"  {where}" if where else "")
    said = each["message"]
    if each["accepted"]:
        said += f"\naccepted: {each['accepted']}"
    if each["entry"]:
        issue = f" ({each['issue']})" if each["issue"] else ""
        said += f"\nknown: {each['entry']}{issue}"
    say(out, heading, said, style=ACTION_STYLES[each["action"]])
    if each["problem"]:
        command(out, "problem", str(each["problem"].get("told", each["problem"])))
    for text in each["replay"].values():
        command(out, "replay", text)
    if each["rule"] and each["action"] != "report":
        command(out, "rule", each["rule"])


def _counted(out: Console, findings: Sequence[Mapping[str, Any]]) -> None:
    by_change: dict[str, list[str]] = {}
    for each in findings:
        by_change.setdefault(each["change"], []).append(each["subject"])
    for change, subjects in by_change.items():
        told = ", ".join(subjects[:3]) + (", ..." if len(subjects) > 3 else "")  # noqa: PLR2004
        _line(out, change, f"{count_of(len(subjects), 'finding')}: {told}")


def _machine(out: Console, machine: Mapping[str, Any]) -> None:
    soak = machine["liveness"]
    ran = len(machine["implementations"])
    _line(
        out,
        f"ran on {_chip(machine['chip'])}",
        f"{count_of(machine['judged'], 'problem')} of {count_of(ran, 'implementation')}, profile "
        f"{machine['profile']}{stored_first(machine)}; soaked {len(soak['soaked'])} with "
        f"{soak['launches']} launches a problem: {count_of(len(soak['hangs']), 'hang')}",
    )
    for each in machine["timings"].get("speed", ()):
        for one in each["measurements"]:
            _line(
                out,
                "speed",
                f"{each['name']}: {one['ratio']:.2f} of the baseline's seconds "
                f"({one['low']:.2f} to {one['high']:.2f})",
            )
            if sentences := memory_sentences(one):
                _line(out, "memory", f"{each['name']}: {'; '.join(sentences)}")
    for each in machine["not_tested"]:
        _line(out, "not tested", f"{each['what']}: {each['why']}")


def stored_first(machine: Mapping[str, Any]) -> str:
    """Return how many stored cases were replayed, after a comma; nothing if none was."""
    corpus = machine.get("corpus", {})
    if not corpus.get("replayed"):
        return ""
    stored = count_of(corpus["replayed"], "stored case")
    return f", {stored} replayed ({corpus['of_ledger']} of the ledger)"


def _line(out: Console, label: str, text: str) -> None:
    out.print(Text.assemble((f"{label}: ", "dim"), one_line(text)), soft_wrap=True)


def _chip(chip: object) -> str:
    return f"SM{chip}" if isinstance(chip, int) else str(chip).upper()
