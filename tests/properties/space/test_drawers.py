"""Processes that draw problems."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.drawers import Drawers, drawers_for
from kernelproof.properties.space.profiles import PROFILES

PROFILE = PROFILES["quick"]
AXES = Axes("merge_state", all_axes("merge_state"), 10**5, {})
MODULES = ({"page_size": (16,), "dtype": ("float16",)}, {"caches": (("float8_e4m3fn", ""),)})
OF_MODULES = Axes("paged_attention", all_axes("paged_attention"), 20_000, restrictions=MODULES)


@pytest.fixture
def apart() -> Iterator[Drawers]:
    drawers = Drawers(1)
    yield drawers
    drawers.close()


def test_they_draw_what_this_process_would(apart: Drawers) -> None:
    here = Drawers(0)
    assert (apart.apart, here.apart) == (True, False)
    for axes in (AXES, OF_MODULES):
        for seed in (1, 2):
            assert apart.round(axes, PROFILE, seed) == here.round(axes, PROFILE, seed)
    assert apart.problems(AXES, PROFILE, 3, 20) == here.problems(AXES, PROFILE, 3, 20)


def test_one_that_is_killed_costs_nothing(apart: Drawers) -> None:
    here = Drawers(0)
    apart.round(AXES, PROFILE, 1)
    assert apart._pool is not None
    for pid in list(apart._pool._processes):
        os.kill(pid, signal.SIGKILL)
    assert apart.round(AXES, PROFILE, 2) == here.round(AXES, PROFILE, 2)
    assert apart.round(AXES, PROFILE, 3) == here.round(AXES, PROFILE, 3)


def test_after_the_end_the_caller_draws(apart: Drawers) -> None:
    apart.close()
    assert apart.round(AXES, PROFILE, 1) == Drawers(0).round(AXES, PROFILE, 1)
    assert apart._pool is None


@pytest.mark.parametrize(
    ("cores", "askers", "processes"), [(2, 8, 0), (7, 8, 0), (16, 12, 2), (64, 12, 3), (16, 1, 0)]
)
def test_there_is_one_for_eight_cores(
    cores: int, askers: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    assert drawers_for(askers).processes == processes


def test_they_end_with_a_parent_that_is_killed() -> None:
    lines = (
        "from kernelproof.properties.space.drawers import Drawers",
        "from kernelproof.properties.space.axes import Axes, all_axes",
        "from kernelproof.properties.space.profiles import PROFILES",
        "import time",
        "drawers = Drawers(1)",
        "axes = Axes('merge_state', all_axes('merge_state'), 10**5, {})",
        "drawers.round(axes, PROFILES['quick'], 1)",
        "print(*drawers._pool._processes, flush=True)",
        "time.sleep(600)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} outlived its parent")
