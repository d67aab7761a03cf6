"""The outline of a comparison: the verdict, what stands against it, what is known, what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from ....impl.gpu.interpreted import CLAIM, NOTE
from ....impl.targets.backends import FLASHINFER
from ....properties.verdicts.text import count_of
from ...reports.display import print_outline
from ...reports.junit import case, document, printed, result, suite
from ...reports.markdown import code, escaped
from ...reports.markdown import to_markdown as written
from ...reports.outline import Block, Line, Part
from ...reports.summary import short_issue, shortened
from ..behaviour.published import counts_told
from ..behaviour.speed import memory_sentences
from ..surface.uses import CHANGES_FELT
from ..verdicts.findings import ACTIONS, engines_in_words, spared, uses_in_words
from .kernels import meanings


class Look(NamedTuple):
    """How a verdict looks: class and mark on a page, mark in a comment, style on a screen."""

    tone: str
    mark: str
    emoji: str
    style: str


LOOKS = {
    "bump": Look("good", "✓", "✅", "bold green"),
    "bump with conditions": Look("warn", "!", "⚠️", "bold yellow"),
    "do not bump": Look("bad", "✗", "❌", "bold red"),
    "undecided": Look("warn", "?", "❔", "bold yellow"),
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
    "kernels-changed",
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
"""Changes of those above that are shown one by one anyway, unless they are known."""
NOBODY = "Not used by the engine's source"
"""Heading of what concerns nobody: a page has it apart."""
FEW_PLACES = 2
"""Places of an engine's source that are named of a finding, unless all is asked for."""
ROWS = 2
"""Rows of a terminal that a finding's message takes at most, unless it blocks or all is asked
for."""


class ChipsAlike(NamedTuple):
    """Names of chips of which the report says the same, and the first one's part of it."""

    names: tuple[str, ...]
    row: Mapping[str, Any]


def print_report(out: Console, report: Mapping[str, Any], *, verbose: bool = False) -> None:
    """Print a report: the verdict, what stands against it, what is known, and what did not run.

    Args:
        out: where to.
        report: the report of a comparison.
        verbose: print each finding in full, what calls take and need, and why something did not
            run; else what is known, or only reported, is counted.
    """
    print_outline(out, outline_of(report, whole=verbose))


def to_markdown(report: Mapping[str, Any]) -> str:
    """Return the report for a comment on a pull request; known findings are counted."""
    heading = f"{LOOKS[report['verdict']].emoji} {escaped(title(report))}: {report['verdict']}"
    made = f"{code(report['command'])}, Kernelproof {report['kernelproof']}, {report['date']}"
    return written(heading, outline_of(report, whole=True, comment=True), made)


def to_junit(report: Mapping[str, Any]) -> str:
    """Return a JUnit document: chips are one suite, findings of each area another.

    What blocks, and a condition that is open, is a failure; what is only reported passes, and says
    so in its output; a chip that is undecided is an error.
    """
    chips = suite("chips")
    for each in report["chips"]:
        made = case(chips, each["name"])
        if each["verdict"] == "undecided":
            result(made, "error", report["message"])
        elif each["verdict"] != "bump":
            rules = [condition["rule"] for condition in each["conditions"]]
            result(made, "failure", each["verdict"], "\n".join([*each["blocked_by"], *rules]))
    areas = {each["area"]: suite(each["area"]) for each in report["findings"]}
    for each in report["findings"]:
        made = case(areas[each["area"]], each["id"])
        notes = (f"{label}: {text}" for label, text in finding_block(each, whole=True).notes)
        told = "\n".join([each["message"], *notes])
        if each["action"] == "report":
            printed(made, told)
        else:
            result(made, "failure", f"{each['action']}: {each['message']}", told)
    run = [suite("run")] if report["failures"] else []
    for number, sentence in enumerate(report["failures"], 1):
        result(case(run[0], f"failure {number}"), "error", sentence)
    return document("kernelproof gate", [chips, *areas.values(), *run])


def outline_of(report: Mapping[str, Any], *, whole: bool, comment: bool = False) -> Iterator[Part]:
    """Yield the parts of a comparison's report.

    Args:
        report: the report of a comparison.
        whole: whether to have each finding in full, what calls take and need, and why something did
            not run.
        comment: whether it is for a comment, in which known findings are counted and conditions
            stand together; elsewhere a condition stands with its finding.
    """
    findings = sorted(report["findings"], key=lambda each: ACTIONS.index(each["action"]))
    unused = spared(report)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for each in findings:
        groups.setdefault("unused" if each in unused else _group(each), []).append(each)

    def blocks(group: str) -> list[Line | Block]:
        return [finding_block(each, whole=whole) for each in groups.get(group, ())]

    verdict = Line("", report["message"], LOOKS[report["verdict"]].style)
    what = [] if comment else [Line("", title(report), "bold")]  # whose heading says it
    yield Part("Verdict", [verdict, *what, *_chips(report)], folded=False)
    advice = [Line("engine", told, "yellow")] if (told := advice_on_uses(report)) else []
    yield Part("Whom it concerns", advice, folded=False)
    with_findings = () if comment else {each["rule"] or each["message"] for each in findings}
    rules = (each["rule"] for each in report["conditions"])
    alone = [Line("condition", rule, "yellow") for rule in rules if rule not in with_findings]
    yield Part("Conditions", alone, folded=False)
    yield Part("What blocks", blocks("block"))
    yield Part("What sets conditions", blocks("condition"))
    yield Part("Accepted by the policy", blocks("accepted"))
    yield Part("New, and only reported", blocks("new"))
    if whole and not comment:
        yield Part("Known", blocks("known"))
    else:
        lines = known_lines(groups.get("known", ()))
        yield Part("Known", [Line("", f"KNOWN {each}", "yellow") for each in lines])
    failures = [Line("INCOMPLETE", each, "yellow") for each in report["failures"]]
    yield Part("Incomplete", failures, folded=False)
    not_used = blocks("unused") if whole else _unused(unused)
    yield Part(NOBODY, not_used)
    if whole:
        yield Part("Other behaviour", blocks("behaviour"))
        rest = groups.get("rest", [])
        yield Part(
            "Other changes", [Line(each["change"], each["message"], about=each) for each in rest]
        )
    else:
        others = [*groups.get("behaviour", ()), *groups.get("rest", ())]
        yield Part("Other changes", _counted(others))
    yield Part("What ran, and what did not", _ran(report, whole=whole))


def _chips(report: Mapping[str, Any]) -> Iterator[Line]:
    for chips in alike(report["chips"]):
        yield Line("", f"  {_said_of(chips)}", LOOKS[chips.row["verdict"]].style)


def _group(each: Mapping[str, Any]) -> str:
    """Return the part of the outline that a finding belongs to."""
    if each["accepted"]:
        return "accepted"
    if each["action"] != "report":
        return str(each["action"])
    if each["change"] in NEW:
        return "known" if each["entry"] else "new"
    return "behaviour" if each["change"] in REPORTED_IN_FULL else "rest"


def advice_on_uses(report: Mapping[str, Any]) -> str:
    """Return what ``--uses`` would tell; empty where it was given, or nothing depends on it."""
    against = [each for each in report["findings"] if each["action"] != "report"]
    felt = [each for each in against if each["change"] in CHANGES_FELT]
    if report.get("engines") or not felt or package_of(report) != FLASHINFER:
        return ""
    return (
        f"{len(felt)} of the {len(against)} that block or set a condition may concern nobody: give "
        "--uses PATH, the source of your engine, and what that does not use does not count"
    )


def _unused(findings: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield the findings that the source of the engine spares."""
    if findings:
        told = "; ".join(f"{each['change']} {each['subject']}" for each in findings)
        yield Line("not used by the engine", told)


def finding_block(each: Mapping[str, Any], *, whole: bool) -> Block:
    """Return what is said of a finding."""
    label = "accepted" if each["accepted"] else each["action"]
    message = " ".join(each["message"].split())
    unnamed = [name for name in map(chip_label, each["chips"]) if name not in message]
    where = f"{', '.join(unnamed)}: " if unnamed else ""
    heading = f"{label}  {each['change']}  {where}"
    issue = f" ({short_issue(each['issue'])})" if each["issue"] else ""
    problem = each["problem"]
    notes = [
        ("accepted", each["accepted"]),
        ("known", f"{each['entry']}{issue}".strip()),
        ("engine", uses_in_words(each.get("uses"), None if whole else FEW_PLACES)),
        ("problem", str(problem.get("told", problem)) if problem else ""),
        *(("replay", text) for text in each["replay"].values()),
        ("rule", each["rule"] if each["action"] != "report" else ""),
    ]
    return Block(
        heading,
        message
        if whole or each["action"] == "block"
        else lambda width: shortened(message, ROWS * width - len(heading)),
        ACTION_STYLES[each["action"]],
        [note for note in notes if note[1]],
        inline=True,
        about=each,
    )


def _counted(findings: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield how many findings of each change only inform."""
    counts = Counter(each["change"] for each in findings)
    if counts:
        told = ", ".join(f"{count:,} {change}" for change, count in counts.items())
        yield Line("also changed", f"{told} (-v names them)")


def _ran(report: Mapping[str, Any], *, whole: bool) -> Iterator[Line]:
    """Yield what ran on each machine, which sources were read, and what was not tested."""
    for machine in report["machines"]:
        yield from _machine(machine, whole=whole)
    for chip in report.get("kernels", ()):
        yield from (Line("kernels", told) for told in meanings(chip))
    yield from (Line("engine", told) for told in engines_in_words(report))
    for name in report["policy"]["unused"]:
        yield Line("policy", f"nothing was found that accept {name!r} is about")
    several = len(report["machines"]) > 1
    left_out = [
        *(
            {**each, "where": f" ({chip_label(machine['chip'])})" if several else ""}
            for machine in report["machines"]
            for each in machine["not_tested"]
        ),
        *report["not_tested"],
    ]
    if left_out and not whole:
        # Behind a colon each is named.
        parts = [
            each["what"].partition(":")[0] for each in left_out if not each.get("implementations")
        ]
        unrun = {name for each in left_out for name in each.get("implementations", ())}
        parts += [count_of(len(unrun), "implementation")] if unrun else []
        yield Line("not tested", f"{'; '.join(parts)} (-v says why)")
    for each in left_out if whole else ():
        yield Line("not tested", f"{each['what']}{each.get('where', '')}: {each['why']}")


def _machine(machine: Mapping[str, Any], *, whole: bool) -> Iterator[Line]:
    soak = machine["liveness"]
    failed = sum(each["failed"] for each in soak["soaked"] if isinstance(each["failed"], int))
    ran = count_of(len(machine["implementations"]), "implementation")
    seed = f", seed {machine['seed']}" if whole else ""
    failures = f", {count_of(failed, 'failure')}" if whole else ""
    device = f" ({machine['device_name']})" if whole and machine["device_name"] else ""
    yield Line(
        f"ran on {chip_label(machine['chip'])}{device}",
        f"{problems_in_words(machine)} of {ran}, profile {machine['profile']}"
        f"{seed}{stored_first(machine)}; soaked {len(soak['soaked'])} with "
        f"{soak['launches']} launches a problem: {count_of(len(soak['hangs']), 'hang')}{failures}",
    )
    for side, told in counts_told(machine.get("published", {})):
        yield Line("published calls", f"{side}: {told}")
    claims = claims_of(machine)
    interpreted = [name for name, claim in claims if claim == CLAIM]
    if interpreted:
        of = ", ".join(interpreted) if whole else count_of(len(interpreted), "implementation")
        yield Line("interpreted", f"{of}: {NOTE}")
    for name, claim in claims if whole else ():
        if claim != CLAIM:
            yield Line("note", f"{name} {claim}")
    for each in machine["timings"].get("speed", ()) if whole else ():
        for one in each["measurements"]:
            ratio = f"{one['ratio']:.2f} of the baseline's seconds"
            yield Line("speed", f"{each['name']}: {ratio} ({one['low']:.2f} to {one['high']:.2f})")
            if sentences := memory_sentences(one):
                yield Line("memory", f"{each['name']}: {'; '.join(sentences)}")


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


def known_lines(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each kind of change, with the causes of its known findings."""
    by_change: dict[str, list[str]] = {}
    for each in findings:
        by_change.setdefault(each["change"], []).append(short_issue(each["issue"] or each["entry"]))
    return [
        f"{change}: {count_of(len(causes), 'finding')}: {', '.join(dict.fromkeys(causes))}"
        for change, causes in by_change.items()
    ]


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


def chip_label(chip: object) -> str:
    """Return the name of a chip, as every form of a report has it."""
    return f"SM{chip}" if isinstance(chip, int) else str(chip).upper()
