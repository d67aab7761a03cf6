"""The simulation of a night: nights by hand, and a report without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelproof.properties.laws import laws_of
from kernelproof.tests.bench.fleet_simulation import Took, main, simulated, units_of

UNITS = [Took("a", 0, 10.0), Took("b", 0, 5.0), Took("a", 1, 4.0), Took("b", 1, 6.0),
         Took("b", 1, 1.0)]  # fmt: skip


@pytest.mark.parametrize(
    ("places", "seconds"),
    [
        (1, 26.0),
        (2, 14.0),  # b: 0 to 5, 5 to 11, 11 to 12; a: 0 to 10, 10 to 14
        (9, 14.0),
    ],
)
def test_units_wait_for_a_place_and_for_the_first_of_theirs(places: int, seconds: float) -> None:
    assert simulated(UNITS, places) == seconds


def test_the_longest_of_those_that_wait_begins_first() -> None:
    units = [Took("a", 0, 1.0), *(Took("a", 1, seconds) for seconds in (2.0, 2.0, 4.0))]
    assert simulated(units, 2) == 5.0


def test_a_report_without_ray_is_divided_as_a_fleet_divides() -> None:
    report: dict[str, Any] = {
        "implementations": [
            {
                "name": name,
                "operation": operation,
                "laws": [
                    {"law": law.name, "seconds": 1.5 * number}
                    for number, law in enumerate(laws_of(operation))
                ],
            }
            for name, operation in (("a", "merge_state"), ("b", "paged_attention"))
        ]
    }
    ((units, _),) = units_of(report).values()
    firsts = [unit for unit in units if not unit.number]
    assert [unit.implementation for unit in firsts] == ["a", "b"]
    laws = sum(law["seconds"] for each in report["implementations"] for law in each["laws"])
    assert sum(unit.seconds for unit in units) == pytest.approx(laws + 12.0 * len(units))


def test_a_run_on_one_gpu_says_what_two_take(tmp_path: Path) -> None:
    units = [
        {
            "chip": "sm90",
            "implementation": unit.implementation,
            "number": unit.number,
            "seconds": unit.seconds,
        }
        for unit in UNITS
    ]
    one = {"seconds": 26.0, "fleet": {"places": {"sm90": 1}, "units": units}}
    for name, report in (("one", one), ("two", {"seconds": 17.5})):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    words = [str(tmp_path / "one.json")]
    said = CliRunner().invoke(main, words, catch_exceptions=False).output
    assert said.startswith("simulated 26.0 s, measured 26.0 s: +0%\n")
    words += ["--gpus", "2"]
    said = CliRunner().invoke(main, words, catch_exceptions=False).output
    assert said.startswith("simulated 14.0 s on 2 GPUs\n")
    words += ["--measured", str(tmp_path / "two.json")]
    said = CliRunner().invoke(main, words, catch_exceptions=False).output
    assert said.startswith("simulated 14.0 s, measured 17.5 s: -20%\n")
