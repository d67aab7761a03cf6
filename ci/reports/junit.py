"""Results as JUnit XML; those of a run have a test case for each implementation and law."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from ...impl.gpu.interpreted import CAVEATS, NOTE
from ...properties.findings.causes import Cause, cause_of, causes_of
from ...properties.findings.coverage import gaps_text
from ...properties.findings.report import Finding, ImplementationReport, LawReport
from ...properties.findings.text_format import element_lines
from ...properties.laws import laws_of
from ...properties.verdicts.text import compact, count_of
from .claims import lost_lines
from .summary import Summary, in_order, known_findings, missing_of, reason_idle, seconds

ILLEGAL = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What the XML standard does not allow, or discourages: control characters, half surrogates."""


def to_junit(summary: Summary) -> str:
    """Return a JUnit document with a suite for each implementation, those with findings first."""
    suites = []
    if summary.failure or summary.report.lost or not summary.report.implementations:
        suites.append(suite("kernelproof"))
        why = summary.failure or summary.report.lost
        result(case(suites[-1], "run", 0.0), "error", summary.sentence, why)
    if summary.lost:
        suites.append(suite("claims"))
        for told in lost_lines(summary.lost):
            result(case(suites[-1], told, 0.0), "failure", told)
    suites += [_suite(each, summary) for each in in_order(summary.report.implementations)]
    return document("kernelproof", suites, time=f"{summary.report.seconds:.3f}")


def document(name: str, suites: Sequence[ET.Element], **attributes: str) -> str:
    """Return a JUnit document of these suites, with the counts of their results."""
    root = ET.Element("testsuites", {"name": name, **attributes})
    root.extend(suites)
    for each in suites:
        cases = each.findall("testcase")
        each.set("tests", str(len(cases)))
        for counted, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            each.set(counted, str(sum(one.find(tag) is not None for one in cases)))
    for counted in ("tests", "failures", "errors", "skipped"):
        root.set(counted, str(sum(int(each.get(counted, "0")) for each in suites)))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def suite(name: str, **attributes: str) -> ET.Element:
    """Return a suite without cases."""
    return ET.Element("testsuite", {"name": legal(name), **attributes})


def case(suite: ET.Element, name: str, seconds: float | None = None) -> ET.Element:
    """Add a case to a suite, and return it: one without a result has passed."""
    made = ET.SubElement(suite, "testcase", classname=suite.get("name", ""), name=legal(name))
    if seconds is not None:
        made.set("time", f"{seconds:.3f}")
    return made


def result(case: ET.Element, tag: str, message: str, text: str = "", kind: str = "") -> None:
    """Give a case a failure, an error, or the reason why it was skipped."""
    element = ET.SubElement(case, tag, message=legal(" ".join(message.split())))
    if kind:
        element.set("type", legal(kind))
    element.text = legal(text)


def printed(case: ET.Element, text: str) -> None:
    """Give a case what it printed."""
    ET.SubElement(case, "system-out").text = legal(text)


def legal(text: str) -> str:
    """Replace by escapes what XML cannot hold, control characters above all."""
    return ILLEGAL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _suite(report: ImplementationReport, summary: Summary) -> ET.Element:
    made = suite(report.name, time=f"{seconds(report):.3f}", timestamp=summary.date)
    _properties(
        made,
        operation=report.operation,
        reference=report.reference,
        profile=summary.report.profile,
        seed=summary.report.seed,
        replayed=report.corpus.replayed,
        coverage=report.coverage.text,
        **({"claims": "; ".join(report.claims)} if report.claims else {}),
        **({"interpreted": "; ".join((NOTE, *CAVEATS))} if report.interpreted else {}),
        **({"incomplete": gaps_text(missing_of(report))} if missing_of(report) else {}),
        **({"unexplained": left} if (left := report.separation.unexplained) else {}),
        **({"left": "; ".join(each.text for each in report.left)} if report.left else {}),
        **{f"target.{name}": value for name, value in summary.report.target.items() if value},
    )
    causes = causes_of(report)
    for law in report.laws:
        _law(case(made, law.law, law.seconds), report, law, summary, causes)
    for finding in report.replayed:
        whose = "ledger" if finding.contradicts else "corpus"
        name = f"{finding.law} ({whose} case {finding.problem.id})"
        _failure(case(made, name, 0.0), finding, cause_of(causes, finding))
    for finding in report.separation.further:
        if not finding.entry:
            name = f"{finding.law} ({finding.problem.id})"
            _failure(case(made, name, 0.0), finding, cause_of(causes, finding))
    idle = reason_idle(report, summary)
    if report.error:
        result(case(made, "run", 0.0), "error", report.error.splitlines()[0], report.error)
    elif idle and not report.laws:
        names = [law.name for law in laws_of(report.operation)]
        for name in [name for name in names if not summary.laws or name in summary.laws] or ["run"]:
            result(case(made, name, 0.0), "skipped", idle)
    return made


def _law(
    case: ET.Element,
    report: ImplementationReport,
    law: LawReport,
    summary: Summary,
    causes: Sequence[Cause],
) -> None:
    _properties(
        case,
        judged=law.judged,
        unsupported=law.unsupported,
        vacuous=law.vacuous,
        rejected=law.rejected,
        flaky=law.flaky,
        worst_ratio=f"{law.worst_ratio:.4g}",
        floor=law.floor,
        ended=law.ended,
        **{f"known.{entry}": count for entry, count in law.known.items()},
    )
    if law.finding and not law.finding.entry:
        _failure(case, law.finding, cause_of(causes, law.finding))
    elif law.known:
        told = [
            f"{each.entry}: {count_of(law.known[each.entry], 'problem')}: {each.reason}"
            for each in known_findings(report, summary.ledger)
            if law.known[each.entry]
        ]
        result(case, "skipped", "KNOWN " + "; ".join(told), kind="known")
    elif law.incomplete:
        counts = f"{law.judged} of {law.floor} problems in {law.seconds:.0f} s"
        result(case, "skipped", f"INCOMPLETE: judged {counts}", kind="incomplete")
    elif not law.judged:
        reason = next(iter(report.refused.values()), "the law had nothing to judge")
        counts = f"{law.unsupported} unsupported, {law.vacuous} with nothing to judge"
        result(case, "skipped", f"no problem was judged ({counts}): {reason}")


def _failure(case: ET.Element, finding: Finding, cause: Cause | None) -> None:
    """Add a failure; one with the cause of another says so, and no more of it."""
    verdict = finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    if cause is not None and finding is not cause.finding:
        told = f"{title}: the same cause as under {cause.finding.law}"
        lines = [compact(finding.problem), finding.replay]
        result(case, "failure", told, "\n".join(filter(None, lines)), kind=title)
        return
    lines = [
        verdict.message,
        *([cause.sentence] if cause and cause.telling else []),
        f"problem: {compact(finding.problem)}",
        *(f"wrong: {line}" for line in element_lines(verdict)),
        *([f"replay: {finding.replay}"] if finding.replay else []),
        *(["", verdict.trace] if verdict.trace else []),
    ]
    first = (verdict.message.splitlines() or [""])[0]
    result(case, "failure", f"{title}: {first}", "\n".join(lines), kind=title)
    if verdict.printed:
        printed(case, verdict.printed)


def _properties(parent: ET.Element, **values: object) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=legal(name), value=legal(str(value)))
