"""A comparison's report on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ....impl.gpu.interpreted import CLAIM, NOTE
from ....impl.targets.backends import FLASHINFER
from ....properties.verdicts.text import count_of, one_line
from ...reports.display import command, line, style_of
from ...reports.summary import short_issue, shortened
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
    "known-of-both",
    "hang-stays",
    "slower",
    "faster",
    "more-memory",
)
"""Changes that do nothing and are shown one by one all the same, where all is asked for; others
are counted."""
NEW = (
    "still-failing",
    "candidate-only-failure",
    "known-of-both",
    "hang-stays",
    "slower",
    "more-memory",
)
"""Of them, those that are shown one by one anyway, unless they are known."""
FEW_PLACES = 2
"""Places of an engine's source that are named of a finding, unless all is asked for."""
ROWS = 2
"""Rows of a terminal that a finding's message takes at most, unless it blocks or all is asked
for."""


@dataclass(frozen=True)
class ChipsAlike:
    """Chips of which the report says the same.

    Attributes:
        names: of the chips.
        row: the first one's part of the report.
    """

    names: tuple[str, ...]
    row: Mapping[str, Any]


def print_report(out: Console, report: Mapping[str, Any], *, verbose: bool = False) -> None:
    """Print a report: the verdict, what stands against it, what is known, and what did not run.

    Args:
        out: where to.
        report: of a comparison.
        verbose: print each finding in full, what calls take and need, and why something did not
            run; else what is known, or only reported, is counted.
    """
    line(out, "", report["message"], STYLES.get(report["verdict"], ""))
    line(out, "", title(report), "bold")
    for chips in alike(report["chips"]):
        line(out, "", f"  {_said_of(chips)}", STYLES.get(chips.row["verdict"], ""))
    findings = sorted(report["findings"], key=lambda each: ACTIONS.index(each["action"]))
    asked_for = {each["rule"] or each["message"] for each in findings}
    for each in report["conditions"]:
        if each["rule"] not in asked_for:  # the others stand with their findings
            line(out, "condition", each["rule"], "yellow")
    for each in findings:
        if _in_full(each, verbose=verbose):
            _finding(out, each, verbose=verbose)
    rest = [each for each in findings if not _in_full(each, verbose=verbose)]
    for known in known_lines([each for each in rest if is_known(each)]):
        line(out, "", f"KNOWN {known}", "yellow")
    for failure in report["failures"]:
        line(out, "INCOMPLETE", failure, "yellow")
    for machine in report["machines"]:
        _machine(out, machine, verbose=verbose)
    unused = _engines(out, report)
    others = [each for each in rest if not is_known(each) and each not in unused]
    _counted(out, others, verbose=verbose)
    for name in report["policy"]["unused"]:
        _line(out, "policy", f"nothing was found that accept {name!r} is about")
    _not_tested(out, report, verbose=verbose)


def _engines(out: Console, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Print which sources were read, and return the findings that they spare."""
    for told in engines_in_words(report):
        _line(out, "engine", told)
    unused = spared(report)
    if unused:
        told = "; ".join(f"{each['change']} {each['subject']}" for each in unused)
        _line(out, "not used by the engine", told)
    return unused


def title(report: Mapping[str, Any]) -> str:
    """Name what was compared."""
    sides = " to ".join(side_name(report, side) for side in ("baseline", "candidate"))
    return f"{package_of(report)} {sides}"


def package_of(report: Mapping[str, Any]) -> str:
    """Return the distribution whose releases were compared: FlashInfer if a report says none."""
    return str(report.get("package", FLASHINFER))


def version_of(told: Mapping[str, Any]) -> str | None:
    """Return the version of a side, of FlashInfer in reports that name no package."""
    found: str | None = told.get("version", told.get("flashinfer"))
    return found


def side_name(report: Mapping[str, Any], side: str) -> str:
    """Name one side: its version, and where it came from if that says more."""
    told = report[side]
    version, given = version_of(told), told["given"]
    return str(given) if version in (None, given) else f"{version} ({given})"


def _in_full(each: Mapping[str, Any], *, verbose: bool) -> bool:
    if each["action"] != "report" or each["accepted"]:
        return True
    if verbose:
        return each["change"] in REPORTED_IN_FULL
    return each["change"] in NEW and not each["entry"]


def alike(chips: Sequence[Mapping[str, Any]]) -> list[ChipsAlike]:
    """Put chips together of which the same is said; the worst verdict first."""
    made: dict[str, list[Mapping[str, Any]]] = {}
    for each in chips:
        shown = {name: value for name, value in each.items() if name not in ("chip", "name")}
        made.setdefault(repr(shown), []).append(each)
    worst = ["do not bump", "undecided", "bump with conditions", "bump"]
    found = [ChipsAlike(tuple(e["name"] for e in each), each[0]) for each in made.values()]
    return sorted(
        found,
        key=lambda each: worst.index(v) if (v := each.row["verdict"]) in worst else len(worst),
    )


def _said_of(chips: ChipsAlike) -> str:
    row = chips.row
    against = count_of(len(row["blocked_by"]), "finding")
    conditions = count_of(len(row["conditions"]), "condition")
    told = f"{', '.join(chips.names)}: {row['verdict']} ({row['evidence']})"
    return f"{told}: {against} against it, {conditions}"


def _finding(out: Console, each: Mapping[str, Any], *, verbose: bool) -> None:
    label = "accepted" if each["accepted"] else each["action"]
    message = " ".join(each["message"].split())
    unnamed = [name for name in map(chip_label, each["chips"]) if name not in message]
    where = f"{', '.join(unnamed)}: " if unnamed else ""
    heading = f"{label}  {each['change']}  {where}"
    room = ROWS * out.width - len(heading)
    whole = verbose or each["action"] == "block"
    said = heading + (message if whole else shortened(message, room))
    line(out, "", said, style_of(ACTION_STYLES[each["action"]]))
    if each["accepted"]:
        command(out, "accepted", each["accepted"])
    if each["entry"]:
        issue = f" ({short_issue(each['issue'])})" if each["issue"] else ""
        command(out, "known", f"{each['entry']}{issue}")
    if told := uses_in_words(each.get("uses"), FEW_PLACES if not verbose else None):
        command(out, "engine", told)
    if each["problem"]:
        command(out, "problem", str(each["problem"].get("told", each["problem"])))
    for text in each["replay"].values():
        command(out, "replay", text)
    if each["rule"] and each["action"] != "report":
        command(out, "rule", each["rule"])


def is_known(each: Mapping[str, Any]) -> bool:
    """Whether a finding does nothing, and is a failure that the ledger or the rules explain."""
    does_nothing = each["action"] == "report" and not each["accepted"]
    return does_nothing and each["change"] in NEW and bool(each["entry"])


def known_lines(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each kind of change, with the causes of its known findings."""
    by_change: dict[str, list[str]] = {}
    for each in findings:
        by_change.setdefault(each["change"], []).append(short_issue(each["issue"] or each["entry"]))
    return [
        f"{change}: {count_of(len(causes), 'finding')}: {', '.join(dict.fromkeys(causes))}"
        for change, causes in by_change.items()
    ]


def _counted(out: Console, findings: Sequence[Mapping[str, Any]], *, verbose: bool) -> None:
    """Print how many findings of each change only inform; their subjects where all is asked for."""
    counts = Counter(each["change"] for each in findings)
    if counts and not verbose:
        told = ", ".join(f"{count:,} {change}" for change, count in counts.items())
        _line(out, "also changed", f"{told} (-v names them)")
    for change in counts if verbose else ():
        subjects = [each["subject"] for each in findings if each["change"] == change]
        _line(out, change, f"{count_of(len(subjects), 'finding')}: {', '.join(subjects)}")


def _not_tested(out: Console, report: Mapping[str, Any], *, verbose: bool) -> None:
    left_out = [
        *(each for machine in report["machines"] for each in machine["not_tested"]),
        *report["not_tested"],
    ]
    if left_out and not verbose:
        # Behind a colon each is named.
        parts = [
            each["what"].partition(":")[0] for each in left_out if not each.get("implementations")
        ]
        unrun = {name for each in left_out for name in each.get("implementations", ())}
        parts += [count_of(len(unrun), "implementation")] if unrun else []
        _line(out, "not tested", f"{'; '.join(parts)} (-v says why)")
    for each in left_out if verbose else ():
        _line(out, "not tested", f"{each['what']}: {each['why']}")


def _machine(out: Console, machine: Mapping[str, Any], *, verbose: bool) -> None:
    soak = machine["liveness"]
    ran = len(machine["implementations"])
    _line(
        out,
        f"ran on {chip_label(machine['chip'])}",
        f"{problems_in_words(machine)} of {count_of(ran, 'implementation')}, profile "
        f"{machine['profile']}{stored_first(machine)}; soaked {len(soak['soaked'])} with "
        f"{soak['launches']} launches a problem: {count_of(len(soak['hangs']), 'hang')}",
    )
    interpreted = [name for name, claim in claims_of(machine) if claim == CLAIM]
    if interpreted:
        of = ", ".join(interpreted) if verbose else count_of(len(interpreted), "implementation")
        _line(out, "interpreted", f"{of}: {NOTE}")
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


def problems_in_words(machine: Mapping[str, Any]) -> str:
    """Return how many problems were judged, and how many gave no law anything to judge."""
    judged = count_of(machine["judged"], "problem")
    idle = machine.get("problems", machine["judged"]) - machine["judged"]
    return f"{judged} judged (and {idle:,} with nothing to judge)" if idle else judged


def stored_first(machine: Mapping[str, Any]) -> str:
    """Return how many stored cases were replayed, after a comma; nothing if none was."""
    corpus = machine.get("corpus", {})
    if not corpus.get("replayed"):
        return ""
    stored = count_of(corpus["replayed"], "stored case")
    return f", {stored} replayed ({corpus['of_ledger']} of the ledger)"


def claims_of(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, claim) of implementations judged on a machine that ask more of callers."""
    judged = [each for each in machine.get("implementations", ()) if each.get("judged")]
    return [(each["name"], claim) for each in judged for claim in each.get("claims", ())]


def _line(out: Console, label: str, text: str) -> None:
    out.print(Text.assemble((f"{label}: ", "dim"), one_line(text)), soft_wrap=True)


def chip_label(chip: object) -> str:
    """Return the name of a chip, as every form of a report has it."""
    return f"SM{chip}" if isinstance(chip, int) else str(chip).upper()
