"""What is imported beside Kernelproof does not decide what is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis.internal.conjecture.providers import HypothesisProvider

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.hypothesis_settings import without_local_constants
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_round
from kernelproof.reference import Problem

AXES = Axes("paged_attention", all_axes("paged_attention"), 200_000, {})
NUMBERS = {*range(10_007, 10_507)}


@pytest.fixture
def imported(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Return a function that imports a local module with numbers of its own."""
    # Not in a folder that is called after a test: Hypothesis takes no numbers of these.
    folder = Path(tmp_path_factory.mktemp("kernels"))
    (folder / "somebodys_kernels.py").write_text(f"NUMBERS = {sorted(NUMBERS)}\n")
    monkeypatch.syspath_prepend(str(folder))

    def do() -> None:
        importlib.import_module("somebodys_kernels")

    return do


def drawn() -> list[str]:
    found: list[str] = []

    def look(problem: Problem) -> None:
        assert not HypothesisProvider(None)._local_constants.integers
        found.append(problem.id)

    assert not draw_round(AXES, PROFILES["quick"], 0, look)
    return found


def test_numbers_of_local_modules_are_not_drawn(imported: Callable[[], None]) -> None:
    before = drawn()
    imported()
    with without_local_constants():
        assert not HypothesisProvider(None)._local_constants.integers
        with without_local_constants():  # as another thread does
            assert not HypothesisProvider(None)._local_constants.integers
        assert not HypothesisProvider(None)._local_constants.integers
    # Outside of a search Hypothesis does as it always does.
    assert set(HypothesisProvider(None)._local_constants.integers) >= NUMBERS
    assert drawn() == before
