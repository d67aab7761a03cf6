"""A comparison's report as JUnit XML: a test case for each finding that blocks or asks for more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

from ...reports.junit import case, document, printed, result, suite
from ..verdicts.findings import uses_in_words


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
        _finding(case(areas[each["area"]], each["id"]), each)
    run = [suite("run")] if report["failures"] else []
    for number, sentence in enumerate(report["failures"], 1):
        result(case(run[0], f"failure {number}"), "error", sentence)
    return document("kernelproof gate", [chips, *areas.values(), *run])


def _finding(case: ET.Element, each: Mapping[str, Any]) -> None:
    lines = [each["message"], *(f"{side}: {text}" for side, text in each["replay"].items())]
    if told := uses_in_words(each.get("uses")):
        lines.append(f"engine: {told}")
    if each["issue"]:
        lines.append(each["issue"])
    if each["action"] == "report":
        accepted = [f"accepted: {each['accepted']}"] if each["accepted"] else []
        printed(case, "\n".join([*accepted, *lines]))
    else:
        rule = [f"rule: {each['rule']}"] if each["rule"] else []
        message = f"{each['action']}: {each['message']}"
        result(case, "failure", message, "\n".join([*lines, *rule]))
