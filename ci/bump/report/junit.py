"""A comparison's report as JUnit XML: a test case for each finding that blocks or asks for more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

from ...reports.junit import legal
from ..verdicts.findings import uses_in_words

SUITES = ("block", "condition", "report")


def to_junit(report: Mapping[str, Any]) -> str:
    """Return a JUnit document: chips are one suite, findings of each area another.

    What blocks, and a condition that is open, is a failure; what is only reported passes, and says
    so in its output; a chip that is undecided is an error.
    """
    root = ET.Element("testsuites", name="kernelproof gate")
    chips = ET.SubElement(root, "testsuite", name="chips")
    for each in report["chips"]:
        case = ET.SubElement(chips, "testcase", classname="chips", name=legal(each["name"]))
        if each["verdict"] == "undecided":
            _result(case, "error", report["message"])
        elif each["verdict"] != "bump":
            rules = [condition["rule"] for condition in each["conditions"]]
            _result(case, "failure", each["verdict"], [*each["blocked_by"], *rules])
    suites: dict[str, ET.Element] = {}
    for each in report["findings"]:
        area = each["area"]
        if area not in suites:
            suites[area] = ET.SubElement(root, "testsuite", name=area)
        _finding(suites[area], each)
    if report["failures"]:
        suite = ET.SubElement(root, "testsuite", name="run")
        for number, sentence in enumerate(report["failures"], 1):
            case = ET.SubElement(suite, "testcase", classname="run", name=f"failure {number}")
            _result(case, "error", sentence)
    for suite in root:
        _count(suite)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _finding(suite: ET.Element, each: Mapping[str, Any]) -> None:
    case = ET.SubElement(suite, "testcase", classname=each["area"], name=legal(each["id"]))
    lines = [each["message"], *(f"{side}: {text}" for side, text in each["replay"].items())]
    if told := uses_in_words(each.get("uses")):
        lines.append(f"engine: {told}")
    if each["issue"]:
        lines.append(each["issue"])
    if each["action"] == "report":
        output = ET.SubElement(case, "system-out")
        accepted = [f"accepted: {each['accepted']}"] if each["accepted"] else []
        output.text = legal("\n".join([*accepted, *lines]))
    else:
        rule = [f"rule: {each['rule']}"] if each["rule"] else []
        _result(case, "failure", f"{each['action']}: {each['message']}", [*lines, *rule])


def _result(case: ET.Element, tag: str, message: str, lines: list[str] | None = None) -> None:
    element = ET.SubElement(case, tag, message=legal(" ".join(message.split())))
    element.text = legal("\n".join(lines or []))


def _count(suite: ET.Element) -> None:
    cases = list(suite.iter("testcase"))
    suite.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
