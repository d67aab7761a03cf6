"""Reports as JUnit XML: documents, suites, cases and their results, whatever they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

ILLEGAL = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What the XML standard does not allow, or discourages: control characters, half surrogates."""


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


def case(
    suite: ET.Element,
    name: str,
    seconds: float | None = None,
    place: Mapping[str, str | int] | None = None,
) -> ET.Element:
    """Add a case to a suite, and return it: one without a result has passed.

    Args:
        suite: the suite of the case.
        name: the name of the case.
        seconds: the seconds that it took.
        place: the ``file`` and the ``line`` that it is about.
    """
    made = ET.SubElement(suite, "testcase", classname=suite.get("name", ""), name=legal(name))
    for attribute, value in (place or {}).items():
        made.set(attribute, legal(str(value)))
    if seconds is not None:
        made.set("time", f"{seconds:.3f}")
    return made


def result(case: ET.Element, tag: str, message: str, text: str = "", kind: str = "") -> None:
    """Add a failure, an error, or the reason for a skip to a case."""
    element = ET.SubElement(case, tag, message=legal(" ".join(message.split())))
    if kind:
        element.set("type", legal(kind))
    element.text = legal(text)


def printed(case: ET.Element, text: str) -> None:
    """Add what it printed to a case."""
    ET.SubElement(case, "system-out").text = legal(text)


def properties(parent: ET.Element, **values: object) -> None:
    """Add values by name to a suite or a case."""
    made = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(made, "property", name=legal(name), value=legal(str(value)))


def legal(text: str) -> str:
    """Replace by escapes what XML cannot hold, control characters above all."""
    return ILLEGAL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
