"""How the time of a run is shared out between the laws."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kernelproof.properties.search.ending import Ending
from kernelproof.properties.search.pace import HASTE, LEAST_SECONDS, Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only a test moves."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_laws_share_the_time_that_is_left_by_their_weights(clock: list[float]) -> None:
    pace = Pace(Ending(100.0), 2, 2)
    pace.plan("mine", {"parity": 3.0, "call_order": 1.0})
    # The other one is expected to have laws of this weight, too.
    assert pace.seconds(1.0) == pytest.approx(HASTE * 200.0 / 8.0)
    pace.skip()
    assert pace.seconds(1.0) == pytest.approx(HASTE * 200.0 / 4.0)
    clock[0] = 60.0
    pace.end("mine", "parity")
    pace.end("mine", "parity")  # what is judged again changes nothing
    assert pace.seconds(1.0) == pytest.approx(HASTE * 80.0)
    clock[0] = 101.0
    assert pace.seconds(1.0) == LEAST_SECONDS


def test_those_that_are_prepared_yet_are_judged_as_often_as_others() -> None:
    pace: Any = Pace(Ending(100.0), 1, 4)
    pace.plan("mine", {"parity": 3.0})
    pace.skip()
    assert pace._weight == pytest.approx(3.0 + 2 * 1.5)


def test_a_run_without_an_end_has_no_pace() -> None:
    pace = Pace(Ending(), 8, 1)
    pace.plan("mine", {"parity": 3.0})
    assert pace.seconds(3.0) == math.inf


def test_each_law_begins_however_much_the_others_take(clock: list[float]) -> None:
    laws = [f"law{number}" for number in range(300)]
    pace = Pace(Ending(600.0), 1, 1)
    pace.plan("mine", dict.fromkeys(laws, 0.5))
    for law in laws:
        assert clock[0] < 600.0
        clock[0] += min(pace.seconds(0.5), 3.0)
        pace.end("mine", law)
