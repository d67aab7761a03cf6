"""Time of laws and implementations, beside what they found and which seeded bugs they kill."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.ci.reports.html_report import to_html
from kernelproof.ci.reports.json_report import to_json
from kernelproof.fixtures import EVIDENCE
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from kernelproof.properties.verdicts.comparison import fail
from kernelproof.reference import MergeProblem
from kernelproof.tests.ci.reports.test_outline import lines_of, summary


def killers(operation: str) -> list[list[str]]:
    """Return of each seeded bug the laws that killed it, as the evidence has them."""
    kept = json.loads((EVIDENCE / f"score-{operation}.json").read_text(encoding="utf-8"))
    return [each["laws"] for each in kept["bugs"] if each["control"] == "bug"]


def reports() -> list[ImplementationReport]:
    found = Finding("one", "parity", fail("numeric", "wrong"), MergeProblem())
    merging = [
        LawReport("parity", judged=3, seconds=10.0, finding=found),
        LawReport("merge_identity", judged=4, seconds=20.0, known=Counter({"known-1": 2})),
        LawReport("soak", judged=1, seconds=50.0),
        LawReport("merge_union"),
    ]
    experts = [LawReport("parity", judged=5, seconds=20.0), LawReport("soak", vacuous=1)]
    return [
        ImplementationReport("one", "k:one", "merge_state", laws=merging),
        ImplementationReport("two", "k:two", "moe", laws=experts),
    ]


def test_each_law_has_its_time_findings_and_seeded_bugs() -> None:
    data = to_json(summary(*reports()))
    soak, parity, identity = data["time_by_law"]  # one without time or problems is left out

    def bugs(law: str, *operations: str) -> dict[str, int]:
        every = [each for operation in operations for each in killers(operation)]
        return {
            "kills": sum(law in each for each in every),
            "kills_first": sum(each[:1] == [law] for each in every),
            "kills_only": every.count([law]),
            "seeded_bugs": len(every),
        }

    def expected(law: str, *numbers: float) -> dict[str, Any]:
        names = ("seconds", "share", "judged", "new", "known")
        return {"law": law, **dict(zip(names, numbers, strict=True))}

    # Soak judged nothing of the second one, whose bugs it could not find.
    assert soak == {**expected("soak", 50.0, 0.5, 1, 0, 0), **bugs("soak", "merge_state")}
    assert parity == {
        **expected("parity", 30.0, 0.3, 8, 1, 0),
        **bugs("parity", "merge_state", "moe"),
    }
    assert identity == {
        **expected("merge_identity", 20.0, 0.2, 4, 0, 1),
        **bugs("merge_identity", "merge_state"),
    }
    assert parity["kills"] > parity["kills_first"] > 0
    assert identity["kills_only"] > 0


def test_each_implementation_has_its_share_and_what_its_laws_could_find() -> None:
    one, two = to_json(summary(*reports()))["implementations"]
    assert (one["share"], one["new"], one["known"]) == (0.8, 1, 1)
    assert (two["share"], two["new"], two["known"]) == (0.2, 0, 0)
    every = killers("moe")
    assert two["seeded_bugs"] == len(every)
    assert 0 < two["kills"] == sum("parity" in each for each in every) < len(every)


def test_a_run_without_time_has_no_shares() -> None:
    data = to_json(summary(ImplementationReport("new", "k:new", laws=[LawReport("parity")])))
    [only] = data["implementations"]
    assert data["time_by_law"] == []
    assert (only["share"], only["seeded_bugs"]) == (0, 0)


def test_the_table_is_asked_for_and_folded_on_the_page() -> None:
    made = summary(*reports())
    assert not any(line.startswith(" law ") for line in lines_of(made))
    lines = lines_of(made, verbose=True)
    start = next(number for number, line in enumerate(lines) if line.startswith(" law "))
    rows = [line.split() for line in lines[start + 2 : start + 5]]
    assert [row[:6] for row in rows] == [
        ["soak", "50.0", "50%", "1", "0", "0"],
        ["parity", "30.0", "30%", "8", "1", "0"],
        ["merge_identity", "20.0", "20%", "4", "0", "1"],
    ]
    assert "kills, first, only: seeded bugs" in "\n".join(lines)
    section = to_html(made).partition('<section id="time-by-law"')[2].partition("</section>")[0]
    assert "<details" in section.partition("<table")[0]
    assert section.count("<tr>") == 1 + len(rows)
    assert "merge_union" not in section


@pytest.mark.parametrize(
    ("seconds", "of_soak", "laws", "told"),
    [
        (61.0, 50.0, (), True),
        (60.0, 50.0, (), False),
        (61.0, 16.0, (), False),  # a quarter at most
        (61.0, 50.0, ("soak",), False),  # asked for by name
    ],
)
def test_a_law_that_took_much_of_a_long_run_and_found_nothing_is_named(
    seconds: float, of_soak: float, laws: tuple[str, ...], *, told: bool
) -> None:
    made = summary(*reports())
    made.report.implementations[0].laws[2].seconds = of_soak
    report: RunReport = replace(made.report, seconds=seconds)
    lines = [line for line in lines_of(replace(made, report=report, laws=laws)) if "time:" in line]
    bugs = killers("merge_state")
    first = sum(each[:1] == ["soak"] for each in bugs)
    sentence = (
        f"time: soak took 50% of the laws' time and found nothing; of {len(bugs)} seeded bugs "
        f"it finds {first} first, and {bugs.count(['soak'])} that no other law finds"
    )
    assert lines == ([sentence] if told else [])
