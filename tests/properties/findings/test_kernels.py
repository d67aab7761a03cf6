"""Lines of kernels beside their source: what never ran, under which condition, in which share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kernelproof.properties.findings.kernels import (
    KernelRuns,
    Share,
    _is_false,
    kernel_gaps,
    kernels_text,
    share_of,
)

SOURCE = '''\
import triton


@triton.jit
def kernel(out, A, B):
    """Write."""
    x = 1
    if A:
        x = 2
        if B:
            x = (
                3
            )
    elif not B:
        x = helper(4)
    else:
        x = 5
        x = 6
    for i in range(x):
        x = 7
    while x:
        if not A:
            x = 8
    try:
        x = 9
    finally:
        x = 10
    return x


@triton.jit
def helper(x):
    return x


@triton.jit
def other(x):
    return x


def host(x):
    return x
'''
EVERY = (7, 8, 9, 10, 11, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 33)


def runs_of(file: Path, lines: Sequence[int], false: Sequence[int] = ()) -> KernelRuns:
    bits = sum(1 << 2 * line for line in lines) + sum(1 << 2 * line + 1 for line in false)
    runs = KernelRuns()
    launched = {"5": {"A": ["False"]}}
    runs.add({str(file): {"ran": f"{bits:x}", "launched": launched, "compiled": {}}})
    return runs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "kernels.py"
    made.write_text(SOURCE)
    return made


def test_blocks_that_did_not_run_have_the_condition_above_them(file: Path) -> None:
    lines = sorted({*EVERY} - {9, 10, 11, 15, 33, 18, 17, 23})
    kernel, helper, other = runs_of(file, lines).functions()
    assert [(each.text, each.statements) for each in kernel.never_run] == [
        ("9-13 under A", 3),
        ("15 under not B", 1),
        ("17-18 under B", 2),
        ("23 under not A", 1),
    ]
    assert (kernel.run, kernel.lines, kernel.role) == (11, 18, "launched")
    assert (helper.run, helper.lines, helper.role) == (0, 1, "called")
    assert (other.role, other.never_run) == ("not launched", ())


def test_what_ran_wholly_says_so(file: Path) -> None:
    functions = runs_of(file, EVERY, false=[10, 22]).functions()
    assert kernels_text(functions) == "kernel lines 100 %"
    assert (functions[0].branches, functions[0].taken) == (8, 8)
    assert not kernel_gaps([runs_of(file, EVERY)])


def test_several_problems_run_more_together(file: Path) -> None:
    first, second = runs_of(file, EVERY[:8]), runs_of(file, EVERY[8:], false=[10])
    assert [gap.judged for gap in kernel_gaps([first])] == [8]
    first.include(second)
    assert share_of(first.functions()) == Share(19, 19)
    assert not kernel_gaps([first, second])


def test_flags_that_no_caller_sets_leave_out_what_only_they_reach(file: Path) -> None:
    functions = runs_of(file, sorted({*EVERY} - {9, 10, 11, 15, 33})).functions()
    assert share_of(functions) == Share(14, 19)
    assert share_of(functions, ["A"]) == Share(14, 16)
    assert share_of(functions, ["B"]) == Share(14, 19)  # where it is not set, "not B" holds
    assert kernels_text(functions, {"A": "engine.py:3"}).startswith(
        "kernel lines 73 % (87 % without A); never run: kernel 9-13 under A, kernel 15 under not B"
    )


@pytest.mark.parametrize(
    ("condition", "needed"),
    [("A", True), ("A and x", True), ("x or A", False), ("A or B", True), ("not A", False),
     ("not (x or not A)", True), ("not x", False), ("A == 2", False), ("", False)],
)  # fmt: skip
def test_a_condition_needs_a_flag_where_it_is_false_without(condition: str, needed: bool) -> None:
    assert _is_false(condition, ["A", "B"]) is needed


def test_the_floor_does_not_ask_for_lines_of_unset_flags(file: Path) -> None:
    few = runs_of(file, [7, 8, 14, 17, 18, 19, 20, 21])
    assert [(gap.judged, gap.floor) for gap in kernel_gaps([few])] == [(8, 9)]
    assert not kernel_gaps([few], ["A"])


@pytest.mark.parametrize("source", ["def kernel(:", "\x00", ""])
def test_a_file_that_cannot_be_read_has_no_functions(tmp_path: Path, source: str) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(source)
    assert not runs_of(file, [1]).functions()
    assert not runs_of(tmp_path / "none.py", [1]).functions()
    assert not kernels_text([])


def test_specialisations_stand_for_lines_on_a_gpu(file: Path) -> None:
    runs = KernelRuns()
    of_kernel = {"ran": "", "launched": {"5": {"A": ["True"]}}, "compiled": {"5": 3}}
    runs.add({str(file): of_kernel})  # type: ignore[dict-item]  # TypedDict
    functions = runs.functions()
    assert "specialisations compiled: kernel 3; " in kernels_text(functions)
    assert share_of(functions) == Share(0, 0)
    assert not kernel_gaps([runs])


SHARED = """\
def make(n):
    scale = n

    @triton.jit
    def inner(x):
        return x * scale

    return inner


if TWO:
    @triton.jit
    def variant(x):
        return helper(x)
    @triton.jit
    def helper(x):
        return x
else:
    @triton.jit
    def variant(x):
        if EVEN: x = x + 1
        if not EVEN:
            x = x + 2
        return helper(x)
    @triton.jit
    def helper(x):
        return x
"""
"""A function that makes a kernel, two kernels of one name, and an ``if`` in one line."""


@pytest.mark.parametrize(
    ("launched", "lines", "expected"),
    [
        (5, [6], {5: "launched", 13: "", 16: "", 20: "", 26: ""}),
        (13, [14, 17], {5: "", 13: "launched", 16: "called", 20: "", 26: ""}),
        (20, [21, 22, 24, 27], {5: "", 13: "", 16: "", 20: "launched", 26: "called"}),
        (20, [21, 22], {5: "", 13: "", 16: "", 20: "launched", 26: "called"}),
    ],
)
def test_functions_are_known_by_their_lines(
    tmp_path: Path, launched: int, lines: list[int], expected: dict[int, str]
) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(SHARED)
    runs, ran = KernelRuns(), sum(1 << 2 * line for line in lines)
    runs.add({str(file): {"ran": f"{ran:x}", "launched": {str(launched): {}}, "compiled": {}}})
    functions = sorted(runs.functions(), key=lambda each: each.line)
    assert {each.line: each.role.replace("not launched", "") for each in functions} == expected


def test_an_if_in_one_line_shows_no_outcome(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(SHARED)
    runs, ran = KernelRuns(), sum(1 << 2 * line for line in (21, 22, 23, 24)) + (1 << 2 * 21 + 1)
    runs.add({str(file): {"ran": f"{ran:x}", "launched": {"20": {}}, "compiled": {}}})
    (kernel,) = [each for each in runs.functions() if each.role == "launched"]
    assert (kernel.branches, kernel.taken, kernel.run, kernel.lines) == (2, 1, 4, 4)
