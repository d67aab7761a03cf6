"""A report that was damaged is refused in a sentence that names the field, or joined: no more."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from kernelproof.ci.bump.command import RENDER
from kernelproof.ci.bump.report.merging import merge
from kernelproof.ci.bump.report.outline import print_report, to_markdown
from kernelproof.ci.bump.report.shape import ReportError, read_report
from kernelproof.ci.cli import main
from kernelproof.ci.reports.markdown import escaped

KEPT = Path(__file__).with_name("report.json")
"""A part of the comparison of 0.6.13 and 0.7.2.post1 on an H200, of a few chips and findings."""
VALUES: tuple[Any, ...] = (None, 1, -1.5, True, "text", [], [1], {}, {"a": None}, [{}])


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """Return a report with a little of everything."""
    report: dict[str, Any] = json.loads(KEPT.read_text())
    by_change = {each["change"]: each for each in report["findings"]}
    report["findings"] = list(by_change.values())
    report["features"]["rows"] = report["features"]["rows"][:2]
    machine = report["machines"][0]
    for part in (machine["implementations"], machine["timings"]["speed"]):
        del part[2:]
    report["policy"]["accepted"] = [{"finding": "surface/*", "reason": "seen", "chips": [90]}]
    return report


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("chips", [{}], "Object missing required field `chip` - at `$.chips[0]`"),
        ("chips.0.evidence", "hearsay", "Invalid value 'hearsay' - at `$.chips[0].evidence`"),
        ("policy", {}, "Object missing required field `source` - at `$.policy`"),
        ("policy.accepted", ["*"], "Expected `object`, got `str` - at `$.policy.accepted[0]`"),
        (
            "policy.actions.new-failure",
            "ignore",
            "Invalid value 'ignore' - at `$.policy.actions['new-failure']`",
        ),
        ("machines", [1], "Expected `object`, got `int` - at `$.machines[0]`"),
        ("machines.0.judged", "many", "Expected `int`, got `str` - at `$.machines[0].judged`"),
        ("baseline", {}, "Object missing required field `given` - at `$.baseline`"),
        (
            "features.rows.0.cells.1.chip",
            None,
            "Expected `int | str`, got `null` - at `$.features.rows[0].cells[1].chip`",
        ),
        ("features", 1, "Expected `object | null`, got `int` - at `$.features`"),
        ("findings.0.chips", 90, "Expected `array`, got `int` - at `$.findings[0].chips`"),
        ("findings.0.action", "", "Invalid value '' - at `$.findings[0].action`"),
        (
            "not_tested.0",
            {"what": "calls"},
            "Object missing required field `why` - at `$.not_tested[0]`",
        ),
        ("findings.0.change", "worse", "Invalid value 'worse' - at `$.findings[0].change`"),
        ("findings.0.chip", 90, "Object contains unknown field `chip` - at `$.findings[0]`"),
        (
            "machines.0.versions.baseline.torch",
            2,
            "Expected `str | null`, got `int` - at `$.machines[0].versions['baseline']['torch']`",
        ),
        ("failures", [None], "Expected `str`, got `null` - at `$.failures[0]`"),
    ],
)
def test_the_field_that_is_wrong_is_named(
    small: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    value: object,
    told: str,
) -> None:
    report = copy.deepcopy(small)
    *parents, last = [int(each) if each.isdigit() else each for each in path.split(".")]
    holder: Any = report
    for each in parents:
        holder = holder[each]
    holder[last] = value
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert main(["merge", str(file)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{file}: " in said
    assert told in said


def test_what_is_kept_can_be_read() -> None:
    assert read_report(KEPT)["verdict"] == "do not bump"


def test_what_calls_need_of_memory_is_told_once(small: dict[str, Any]) -> None:
    report = copy.deepcopy(small)
    for each in report["machines"][0]["timings"]["speed"]:
        del each["measurements"][1:]
        each["measurements"][0]["peak_bytes"] = {"baseline": 20_480, "candidate": 3_000_000}
    out = io.StringIO()
    print_report(Console(file=out, width=1000), report, verbose=True)
    assert out.getvalue().count("allocates 20.5 kB and 3.0 MB") == len(
        report["machines"][0]["timings"]["speed"]
    )


def test_damage_anywhere_is_refused_or_does_nothing(small: dict[str, Any], tmp_path: Path) -> None:
    draw, file, refused = Random(0), tmp_path / "report.json", 0  # noqa: S311  places to damage
    places = list(_places(small))
    for _ in range(150):
        report = copy.deepcopy(small)
        holder: Any = report
        *parents, last = draw.choice(places)
        for each in parents:
            holder = holder[each]
        if draw.random() < 0.3:
            del holder[last]
        else:
            holder[last] = draw.choice(VALUES)
        file.write_text(json.dumps(report))
        try:
            merged = merge([file], None, "merge")
        except ReportError:
            refused += 1
            continue
        print_report(Console(file=io.StringIO()), merged)
        for render in RENDER.values():
            render(merged)
    assert refused > 50


def _places(value: object, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Return the way to each part of a report, the upper ones as often as the lower ones."""
    inner: Any = value
    keys = (
        inner if isinstance(value, dict) else range(len(inner)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*path, key)
        yield from _places(inner[key], *path, key)


def test_the_verdict_is_first_and_what_is_known_is_counted() -> None:
    report = read_report(KEPT)

    def printed(*, verbose: bool) -> list[str]:
        out = io.StringIO()
        print_report(Console(file=out, width=120), report, verbose=verbose)
        return out.getvalue().splitlines()

    short, whole = printed(verbose=False), printed(verbose=True)
    assert short[0] == whole[0] == report["message"]
    assert 2 * len(short) < len(whole)
    assert len(short) <= 40
    parts = ["block  ", "condition  ", "report  slower", "KNOWN still-failing: ", "also changed: "]
    parts += ["ran on SM90", "not tested: compile; "]
    first = [next(n for n, line in enumerate(short) if line.startswith(each)) for each in parts]
    assert first == sorted(first)
    assert not any(line.startswith(("report  fixed", "speed: ")) for line in short)
    assert any(line.startswith("report  fixed") for line in whole)
    page = to_markdown(report)
    parts = [escaped(report["message"]), "### Conditions", "What blocks", "New, and only reported"]
    parts += ["Known (", "still-failing: ", "Other behaviour", "Other changes", "What ran, and"]
    assert [page.index(part) for part in parts] == sorted(page.index(part) for part in parts)
    assert any(line.startswith("not tested: compile: not asked for") for line in whole)


def test_implementations_that_were_not_run_are_counted_together(
    report: Callable[..., dict[str, Any]],
) -> None:
    made = report()
    for names, why in ((["a", "b"], "no such chip"), (["c"], "no package"), ([], "no time")):
        told = {"what": f"some: {names}", "why": why, "implementations": names}
        made["not_tested"].append(told)
    out = io.StringIO()
    print_report(Console(file=out, width=120), made, verbose=False)
    assert "some; 3 implementations (-v says why)" in " ".join(out.getvalue().split())


def test_what_blocks_is_printed_whole_and_rules_stand_with_their_findings(
    report: Callable[..., dict[str, Any]],
) -> None:
    made = report()
    made["conditions"].append({"rule": "stay with 0.6 on SM90", "findings": []})
    moved, *_ = made["findings"]
    moved["message"] = f"decode.plan: position {', '.join(map(str, range(100)))} moved"
    (condition,) = [each for each in made["findings"] if each["action"] == "condition"]
    condition["message"] = f"ActivationType: {', '.join(map(str, range(100)))} moved"
    machine = made["machines"][0]
    machine["problems"] = machine["judged"] + 3

    def printed(*, verbose: bool) -> str:
        out = io.StringIO()
        print_report(Console(file=out, width=100), made, verbose=verbose)
        return out.getvalue()

    short, whole = printed(verbose=False), printed(verbose=True)
    assert moved["message"] in short
    assert condition["message"] not in short
    assert condition["message"] in whole
    assert short.count(condition["rule"]) == 1
    assert "condition: stay with 0.6 on SM90" in short
    assert "4 problems judged (and 3 with nothing to judge) of" in short
    assert "also changed: 1 fixed, 1 declared-gained" in short
    assert "xqa" not in short
    assert "xqa" in whole
