"""A file of cost classes: with it, the same seed draws the same problems on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelproof.properties.isolation.workers import Outcome, Worker
from kernelproof.properties.search.costs import (
    SCHEMA,
    CostsError,
    builds_file,
    costs_file,
    keep_builds,
    keep_costs,
    read_builds,
    read_costs,
)
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import Cost, Profile

TINY = Profile("tiny", problems=20, max_work=20_000, shrink_seconds=30.0, seconds=60.0)
HONEST = f"{Path(__file__).parents[1] / 'engine_subjects.py'}:honest_attention"
FAST, SLOW = Cost("fast", 1.0, 20_000), Cost("slow", 0.2, 1_250)
GIVEN = {"name": "fast", "problems": 1, "max_work": 9}


def test_what_was_measured_is_read_back_and_others_stay(tmp_path: Path) -> None:
    cpu, cuda = (costs_file(tmp_path, TINY, device) for device in ("cpu", "cuda"))
    keep_costs(tmp_path, TINY, "cpu", {"one": FAST})
    keep_costs(tmp_path, TINY, "cpu", {"two": SLOW})
    keep_costs(tmp_path, TINY, "cuda", {"two": FAST})
    keep_costs(tmp_path, TINY, "cuda", {})  # of a run that ended before it measured
    assert read_costs(cpu, TINY, "cpu") == {"one": FAST, "two": SLOW}
    assert read_costs(cuda, TINY, "cuda") == {"two": FAST}
    assert not list(tmp_path.glob("*.json"))  # a folder of cases is read by that pattern


def test_what_builds_took_is_read_back_and_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_builds(tmp_path) == {}
    keep_builds(tmp_path, {})
    assert not builds_file(tmp_path).exists()
    keep_builds(tmp_path, {"fa2 a": 5.5, "fa2 b": 2.0})
    keep_builds(tmp_path, {"fa2 b": 0.25, "one that was there": 1e-9})
    assert read_builds(tmp_path) == {"fa2 a": 5.5, "fa2 b": 0.25, "one that was there": 0.001}
    assert not capsys.readouterr().err
    builds_file(tmp_path).write_text('{"schema": "kernelproof-builds-1", "minutes": {"fa2 a": 0}}')
    assert read_builds(tmp_path) == {}
    assert "Expected `float` > 0.0 - at `$.minutes['fa2 a']`" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    keep_costs(tmp_path / "file" / "cases", TINY, "cpu", {"one": FAST})
    assert "no costs are kept in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other-2"}, "Invalid enum value 'other-2' - at `$.schema`"),
        ({"profile": "gate"}, "profile is 'gate', and this run's is 'tiny'"),
        ({"device": None}, "Expected `str`, got `null` - at `$.device`"),
        ({"costs": [1]}, "Expected `object`, got `array` - at `$.costs`"),
        ({"costs": {"one": 3}}, "Expected `object`, got `int` - at `$.costs['one']`"),
        (
            {"costs": {"one": {"problems": 1}}},
            "Object missing required field `name` - at `$.costs['one']`",
        ),
        (
            {"costs": {"one": {**GIVEN, "problems": 0}}},
            "Expected `float` > 0.0 - at `$.costs['one'].problems`",
        ),
        (
            {"costs": {"one": {**GIVEN, "problems": 1.5}}},
            "Expected `float` <= 1.0 - at `$.costs['one'].problems`",
        ),
        (
            {"costs": {"one": {**GIVEN, "max_work": True}}},
            "Expected `int`, got `bool` - at `$.costs['one'].max_work`",
        ),
        (
            {"costs": {"one": {**GIVEN, "work": 1}}},
            "Object contains unknown field `work` - at `$.costs['one']`",
        ),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    data = {"schema": SCHEMA, "profile": "tiny", "device": "cpu", "costs": {}}
    path.write_text(json.dumps({**data, **change}))
    with pytest.raises(CostsError) as error:
        read_costs(path, TINY, "cpu")
    assert str(error.value).startswith(f"{path}: {message}")


def test_no_file_and_no_json(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(CostsError, match=r"costs\.json: cannot be read"):
        read_costs(path, TINY, "cpu")
    path.write_text("[1")
    with pytest.raises(CostsError, match=r"costs\.json: not JSON"):
        read_costs(path, TINY, "cpu")


def test_the_same_costs_draw_the_same_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says: here every run measures another cost."""
    judged: list[Any] = []
    answer = Worker.answer

    def noted(self: Worker) -> Outcome:
        judged.append(self._asked[0][0]["problem"])
        return answer(self)

    def drawn(cost: Cost, measured: Cost) -> list[Any]:
        judged.clear()
        monkeypatch.setattr(
            "kernelproof.properties.search.preparation.cost_of", lambda *_: measured
        )
        run = Run(Plan([HONEST], TINY, laws=["parity"], jobs=1, costs={"honest": cost}))
        (report,) = run.execute().implementations
        assert not report.error
        assert (report.cost, run.costs) == (cost.name, {"honest": cost})
        return [*judged]

    monkeypatch.setattr(Worker, "answer", noted)
    first = drawn(FAST, SLOW)
    assert len(first) >= TINY.problems
    assert drawn(FAST, FAST) == first
    fewer = drawn(SLOW, FAST)
    assert 0 < len(fewer) < len(first)
    assert fewer != first[: len(fewer)]
