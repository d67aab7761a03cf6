"""What a run's reports say of published calls (``ci/published``), which no implementation has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from ...properties.verdicts.text import count_of
from ..console.errors import CONFORMING, INCOMPLETE, NONCONFORMING, WORST_FIRST
from .junit import case, result, suite
from .outline import Block, Line

TITLE = "published calls"
Published = Mapping[str, Any]


def were_asked(published: Published) -> bool:
    """Whether published calls were asked at all."""
    return "summary" in published


def failure(published: Published) -> str:
    """Return why the release was not read, though they were to be asked; else an empty text."""
    return f"{TITLE}: {published['why']}" if "exit_code" in published else ""


def broken_laws(published: Published, *, known: bool) -> list[tuple[Mapping[str, Any], str]]:
    """Return the known findings or the others, and the calls' names; one of a law and a call."""
    found: dict[tuple[str, str], tuple[Mapping[str, Any], str]] = {}
    for call in published.get("calls", ()):
        for each in call["findings"]:
            if bool(each["known"]) == known:
                found.setdefault((call["name"], each["law"]), (each, call["name"]))
        if not known:
            for why in call["accused"]:
                accused = {"law": "its own reference", "why": why, "axes": {}, "known": ""}
                found.setdefault((call["name"], accused["law"]), (accused, call["name"]))
    return list(found.values())


def nothing_judged(published: Published) -> bool:
    """Whether they were asked, and no function of the release answered."""
    return were_asked(published) and not published["summary"]["judged"]


def exit_code(published: Published, code: int) -> int:
    """Return the exit code of a gate with published calls.

    Args:
        published: what became of them.
        code: exit code of the laws.
    """
    own = CONFORMING
    if failure(published):
        own = published["exit_code"]
    elif broken_laws(published, known=False):
        own = NONCONFORMING
    elif nothing_judged(published):
        own = INCOMPLETE
    # What the laws have found is not hidden by a release that cannot be read.
    return code if code == NONCONFORMING else min(own, code, key=WORST_FIRST.index)


def sentence(published: Published) -> str:
    """Return the counts of published calls; empty where they were not asked."""
    if not were_asked(published):
        return ""
    summary = published["summary"]
    new, known = (len(broken_laws(published, known=each)) for each in (False, True))
    counts = {
        "judged by FlashInfer's own function": summary["judged"],
        "by their reference only": summary["reference only"],
        "not compiled": summary["not compiled"],
        "not begun": len(published["not begun"]),
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    found = f"{count_of(new, 'new finding')}, {known} known"
    return f"{TITLE}: {', '.join(parts) or 'none judged'}; {found}"


def finding_blocks(published: Published) -> Iterator[Block]:
    """Yield a block for each new finding."""
    for each, name in broken_laws(published, known=False):
        axes = [("problem", json.dumps(each["axes"]))] if each["axes"] else []
        notes = [*axes, ("replay", replay(published, name))]
        status = {"hangs": "HANG", "crashes": "CRASH"}.get(each["law"], "FAIL")
        yield Block(f"{status}  {TITLE}: {name}  {each['law']}", each["why"], status, notes)


def finding_texts(published: Published) -> Iterator[str]:
    """Yield what is wrong of each new finding, on which problem, and how to see it again."""
    for block in finding_blocks(published):
        notes = [f"{name}: {text}" for name, text in block.notes]
        yield "\n".join([f"{block.title}: {block.message}", *notes])


def replay(published: Published, name: str) -> str:
    """Return the command that judges a call again."""
    where = f"--device {published['device']} --seed {published['seed']}"
    return f"kernelproof published installed {name} {where}"


def known_lines(published: Published) -> Iterator[Line]:
    """Yield a line for each known finding."""
    for each, name in broken_laws(published, known=True):
        yield Line("", f"KNOWN {TITLE}: {name}: {each['law']}: {each['known']}", "yellow")


def weak_lines(published: Published) -> Iterator[Line]:
    """Yield what failed, was not compiled, not begun or ended, and which faults were accepted."""
    if why := failure(published):
        yield Line(published["state"].upper(), why, "yellow")
    if not were_asked(published):
        return
    if nothing_judged(published):
        yield Line("INCOMPLETE", f"{TITLE}: no function of the release answered", "yellow")
    for module, names in published["not compiled"].items():
        yield Line("not compiled", f"{TITLE}: module {module}: {', '.join(names)}", "yellow")
    if begun := published["not begun"]:
        yield Line("not begun", f"{TITLE}: {', '.join(begun)}", "yellow")
    for call in published["calls"]:
        if call["state"] == "ended" and not call["findings"]:
            yield Line("note", f"{TITLE}: {call['name']}: {call['why']}", "yellow")
        for part, why in call["parts"].items():
            yield Line("note", f"{TITLE}: {call['name']}: {part} not judged: {why}", "yellow")
    if faults := published["summary"]["accepted"]:
        yield Line("note", f"{TITLE}: seeded faults accepted: {'; '.join(faults)}", "yellow")


def passed_lines(published: Published) -> Iterator[Line]:
    """Yield the counts in one line."""
    if told := sentence(published):
        yield Line("published", told.removeprefix(f"{TITLE}: "))


def left_out_lines(published: Published) -> Iterator[Line]:
    """Yield why they were not asked."""
    if published and not were_asked(published) and not failure(published):
        state = {"left out": "not run"}.get(published["state"], published["state"].upper())
        yield Line(state, f"{TITLE}: {published['why']}", "dim")


def junit_suite(published: Published) -> ET.Element:
    """Return a suite with a case for each call; what was not judged is skipped."""
    made = suite(TITLE)
    new = broken_laws(published, known=False)
    for call in published.get("calls", ()):
        one = case(made, call["name"])
        mine = [each for each, name in new if name == call["name"]]
        if mine:
            told = [f"{each['law']}: {each['why']}" for each in mine]
            again = replay(published, call["name"])
            result(one, "failure", told[0], "\n".join([*told, again]), kind="FAIL")
        elif call["state"] != "judged":
            result(one, "skipped", f"{call['state']}: {call['why']}")
    if not were_asked(published):
        tag = "error" if failure(published) else "skipped"
        result(case(made, "run"), tag, published["why"])
    return made
