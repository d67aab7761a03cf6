"""A comparison's report on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....properties.verdicts.text import count_of, one_line
from ...reports.display import command, line, say
from ...reports.outline import short_issue
from ..behaviour.speed import memory_sentences
from ..verdicts.findings import ACTIONS, engines_in_words, spared, uses_in_words

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
"""Changes that do nothing and are shown one by one all the same, where all is asked for; others
are counted."""
NEW = ("still-failing", "candidate-only-failure", "hang-stays", "slower", "more-memory")
"""Of them, those that are shown one by one anyway, unless they are known."""
FEW = 3
"""Subjects that are named of changes that are counted."""


def print_report(out: Console, report: Mapping[str, Any], *, verbose: bool = False) -> None:
    """Print a report: the verdict, chip by chip, what stands against it, and what did not run.

    Args:
        out: where to.
        report: of a comparison.
        verbose: print each finding in full, what calls take and need, and why something did not
            run; else what is known, or only reported, is counted.
    """
    line(out, "", report["message"], STYLES.get(report["verdict"], ""))
    line(out, "", title(report), "bold")
    if report["chips"]:
        out.print(_chips(report["chips"]))
    for each in report["conditions"]:
        line(out, "condition", each["rule"], "yellow")
    findings = sorted(report["findings"], key=lambda each: ACTIONS.index(each["action"]))
    for each in findings:
        if _in_full(each, verbose=verbose):
            # What conditions ask for stands above.
            _finding(out, each, rule=verbose or each["action"] == "block")
    rest = [each for each in findings if not _in_full(each, verbose=verbose)]
    for known in known_lines([each for each in rest if is_known(each)]):
        line(out, "", f"KNOWN {known}", "yellow")
    for failure in report["failures"]:
        line(out, "INCOMPLETE", failure, "yellow")
    for machine in report["machines"]:
        _machine(out, machine, verbose=verbose)
    unused = _engines(out, report)
    _counted(out, [each for each in rest if not is_known(each) and each not in unused])
    for name in report["policy"]["unused"]:
        _line(out, "policy", f"nothing was found that accept {name!r} is about")
    _not_tested(out, report, verbose=verbose)


def _engines(out: Console, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Print which sources were read, and return the findings that they spare, a line each."""
    for told in engines_in_words(report):
        _line(out, "engine", told)
    unused = spared(report)
    for each in unused:
        _line(out, "not used by the engine", f"{each['change']} {each['subject']}")
    return unused


def title(report: Mapping[str, Any]) -> str:
    """Name what was compared."""
    return f"flashinfer-python {side_name(report, 'baseline')} to {side_name(report, 'candidate')}"


def side_name(report: Mapping[str, Any], side: str) -> str:
    """Name one side: its version, and where it came from if that says more."""
    told = report[side]
    version, given = told.get("flashinfer"), told["given"]
    return str(given) if version in (None, given) else f"{version} ({given})"


def _in_full(each: Mapping[str, Any], *, verbose: bool) -> bool:
    if each["action"] != "report" or each["accepted"]:
        return True
    if verbose:
        return each["change"] in REPORTED_IN_FULL
    return each["change"] in NEW and not each["entry"]


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


def _finding(out: Console, each: Mapping[str, Any], *, rule: bool) -> None:
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
    if told := uses_in_words(each.get("uses")):
        command(out, "engine", told)
    if each["problem"]:
        command(out, "problem", str(each["problem"].get("told", each["problem"])))
    for text in each["replay"].values():
        command(out, "replay", text)
    if rule and each["rule"] and each["action"] != "report":
        command(out, "rule", each["rule"])


def is_known(each: Mapping[str, Any]) -> bool:
    """Whether a finding does nothing, and is a failure that the ledger or the rules explain."""
    does_nothing = each["action"] == "report" and not each["accepted"]
    return does_nothing and each["change"] in NEW and bool(each["entry"])


def known_lines(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each issue that known findings are about, or entry without an issue."""
    by_cause: dict[tuple[str, str], list[str]] = {}
    for each in findings:
        cause = (each["change"], each["issue"] or each["entry"])
        by_cause.setdefault(cause, []).append(each["subject"])
    return [
        f"{change}: {count_of(len(subjects), 'finding')} of "
        f"{', '.join(dict.fromkeys(subjects))} ({short_issue(cause)})"
        for (change, cause), subjects in by_cause.items()
    ]


def _counted(out: Console, findings: Sequence[Mapping[str, Any]]) -> None:
    by_change: dict[str, list[str]] = {}
    for each in findings:
        by_change.setdefault(each["change"], []).append(each["subject"])
    for change, subjects in by_change.items():
        _line(out, change, f"{count_of(len(subjects), 'finding')}: {_some(subjects)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (", ..." if len(names) > FEW else "")


def _not_tested(out: Console, report: Mapping[str, Any], *, verbose: bool) -> None:
    left_out = [
        *(each for machine in report["machines"] for each in machine["not_tested"]),
        *report["not_tested"],
    ]
    if left_out and not verbose:
        # Behind a colon each is named.
        what = "; ".join(each["what"].partition(":")[0] for each in left_out)
        _line(out, "not tested", f"{what} (-v says why)")
    for each in left_out if verbose else ():
        _line(out, "not tested", f"{each['what']}: {each['why']}")


def _machine(out: Console, machine: Mapping[str, Any], *, verbose: bool) -> None:
    soak = machine["liveness"]
    ran = len(machine["implementations"])
    _line(
        out,
        f"ran on {_chip(machine['chip'])}",
        f"{count_of(machine['judged'], 'problem')} of {count_of(ran, 'implementation')}, profile "
        f"{machine['profile']}{stored_first(machine)}; soaked {len(soak['soaked'])} with "
        f"{soak['launches']} launches a problem: {count_of(len(soak['hangs']), 'hang')}",
    )
    for each in machine["timings"].get("speed", ()) if verbose else ():
        for one in each["measurements"]:
            _line(
                out,
                "speed",
                f"{each['name']}: {one['ratio']:.2f} of the baseline's seconds "
                f"({one['low']:.2f} to {one['high']:.2f})",
            )
            if sentences := memory_sentences(one):
                _line(out, "memory", f"{each['name']}: {'; '.join(sentences)}")


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
