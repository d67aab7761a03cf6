"""The results of a run as JUnit XML: one test case for each implementation and law."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from ...impl.gpu.interpreted import CAVEATS, NOTE
from ...properties.findings.causes import Cause, cause_of, causes_of
from ...properties.findings.coverage import gaps_text
from ...properties.findings.report import Finding, ImplementationReport, LawReport
from ...properties.findings.text_format import element_lines
from ...properties.laws import laws_of
from ...properties.verdicts.text import compact, count_of
from .claims import lost_lines
from .outline import in_order
from .summary import Summary, known_findings, missing_of, reason_idle, seconds

ILLEGAL = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What the XML standard does not allow, or discourages: control characters, half surrogates."""


def to_junit(summary: Summary) -> str:
    """Return a JUnit document with a suite for each implementation, those with findings first."""
    root = ET.Element("testsuites", name="kernelproof", time=f"{summary.report.seconds:.3f}")
    if summary.failure or summary.report.lost or not summary.report.implementations:
        suite = ET.SubElement(root, "testsuite", name="kernelproof")
        case = ET.SubElement(suite, "testcase", classname="kernelproof", name="run", time="0")
        _result(case, "error", summary.sentence, summary.failure or summary.report.lost)
        _count(suite)
    if summary.lost:
        suite = ET.SubElement(root, "testsuite", name="claims")
        for told in lost_lines(summary.lost):
            case = ET.SubElement(suite, "testcase", classname="claims", name=legal(told), time="0")
            _result(case, "failure", told)
        _count(suite)
    for report in in_order(summary.report.implementations):
        root.append(_suite(report, summary))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def legal(text: str) -> str:
    """Replace by escapes what XML cannot hold, control characters above all."""
    return ILLEGAL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _suite(report: ImplementationReport, summary: Summary) -> ET.Element:
    suite = ET.Element(
        "testsuite",
        name=legal(report.name),
        time=f"{seconds(report):.3f}",
        timestamp=summary.date,
    )
    _properties(
        suite,
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
        suite.append(_law(report, law, summary, causes))
    for finding in report.replayed:
        whose = "ledger" if finding.contradicts else "corpus"
        case = _case(report, f"{finding.law} ({whose} case {finding.problem.id})", 0.0)
        _failure(case, finding, cause_of(causes, finding))
        suite.append(case)
    for finding in report.separation.further:
        if not finding.entry:
            case = _case(report, f"{finding.law} ({finding.problem.id})", 0.0)
            _failure(case, finding, cause_of(causes, finding))
            suite.append(case)
    idle = reason_idle(report, summary)
    if report.error:
        case = _case(report, "run", 0.0)
        _result(case, "error", report.error.splitlines()[0], report.error)
        suite.append(case)
    elif idle and not report.laws:
        names = [law.name for law in laws_of(report.operation)]
        for name in [name for name in names if not summary.laws or name in summary.laws] or ["run"]:
            case = _case(report, name, 0.0)
            _result(case, "skipped", idle)
            suite.append(case)
    _count(suite)
    return suite


def _law(
    report: ImplementationReport, law: LawReport, summary: Summary, causes: Sequence[Cause]
) -> ET.Element:
    case = _case(report, law.law, law.seconds)
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
        _result(case, "skipped", "KNOWN " + "; ".join(told), kind="known")
    elif law.incomplete:
        counts = f"{law.judged} of {law.floor} problems in {law.seconds:.0f} s"
        _result(case, "skipped", f"INCOMPLETE: judged {counts}", kind="incomplete")
    elif not law.judged:
        reason = next(iter(report.refused.values()), "the law had nothing to judge")
        counts = f"{law.unsupported} unsupported, {law.vacuous} with nothing to judge"
        _result(case, "skipped", f"no problem was judged ({counts}): {reason}")
    return case


def _case(report: ImplementationReport, name: str, seconds: float) -> ET.Element:
    return ET.Element(
        "testcase", classname=legal(report.name), name=legal(name), time=f"{seconds:.3f}"
    )


def _failure(case: ET.Element, finding: Finding, cause: Cause | None) -> None:
    """Add a failure; one with the cause of another says so, and no more of it."""
    verdict = finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    if cause is not None and finding is not cause.finding:
        told = f"{title}: the same cause as under {cause.finding.law}"
        lines = [compact(finding.problem), finding.replay]
        _result(case, "failure", told, "\n".join(filter(None, lines)), kind=title)
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
    _result(case, "failure", f"{title}: {first}", "\n".join(lines), kind=title)
    if verdict.printed:
        ET.SubElement(case, "system-out").text = legal(verdict.printed)


def _result(case: ET.Element, tag: str, message: str, text: str = "", kind: str = "") -> None:
    element = ET.SubElement(case, tag, message=legal(" ".join(message.split())))
    if kind:
        element.set("type", legal(kind))
    if text:
        element.text = legal(text)


def _properties(parent: ET.Element, **values: object) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=legal(name), value=legal(str(value)))


def _count(suite: ET.Element) -> None:
    cases = list(_cases(suite))
    suite.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))


def _cases(suite: ET.Element) -> Iterator[ET.Element]:
    return suite.iter("testcase")
