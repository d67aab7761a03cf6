"""Mutants of small kernels: what each operator changes, samples, and marked copies."""

from __future__ import annotations

import ast
import runpy
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from kernelproof.ci.mutate.mutants import Mutant, marked, mutants_of, sample
from kernelproof.ci.mutate.operators import OPERATORS

KERNEL = dedent(
    '''
    import triton
    import triton.language as tl

    SIZE = 1 + 1  # no part of a kernel


    @triton.jit
    def kernel(x, y, stride_a, stride_b, n: tl.constexpr = 3):
        """Return 1 + 1."""
        row = tl.program_id(0).to(tl.int64)
        if row >= n:
            return
        tl.static_assert(n + 1 > 0)
        place = (row) * stride_a + tl.arange(0, 4) * stride_b
        inside = (place < n) & (row != 7)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.full((4,), float("-inf"), tl.float32)
        total += tl.sum(value, axis=0)
        tl.store(y + place, total, mask=inside)
    '''
).lstrip()


def changes(operator: str, text: str = KERNEL) -> set[tuple[str, str]]:
    """Return each line that an operator changes, and what it becomes."""
    found = set()
    for mutant in mutants_of("kernels.py", text):
        if mutant.operator == operator:
            lines = mutant.diff.splitlines()[1:]
            before = " / ".join(line[1:].strip() for line in lines if line.startswith("-"))
            after = " / ".join(line[1:].strip() for line in lines if line.startswith("+"))
            found.add((before, after))
    return found


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("operator", "if row >= n:", "if row > n:"),
        (
            "operator",
            "inside = (place < n) & (row != 7)",
            "inside = (place < n) | (row != 7)",
        ),
        ("operator", "total += tl.sum(value, axis=0)", "total -= tl.sum(value, axis=0)"),
        ("operator", "total += tl.sum(value, axis=0)", "total += tl.max(value, axis=0)"),
        (
            "constant",
            "inside = (place < n) & (row != 7)",
            "inside = (place < n) & (row != 8)",
        ),
        (
            "constant",
            'total = tl.full((4,), float("-inf"), tl.float32)',
            'total = tl.full((4,), float("inf"), tl.float32)',
        ),
        (
            "mask",
            "value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)",
            "value = tl.load(x + place, mask=None, other=None).to(tl.float32)",
        ),
        (
            "other",
            "value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)",
            'value = tl.load(x + place, mask=inside, other=float("nan")).to(tl.float32)',
        ),
        (
            "cast",
            "value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)",
            "value = (tl.load(x + place, mask=inside, other=0.0))",
        ),
        ("int64", "row = tl.program_id(0).to(tl.int64)", "row = (tl.program_id(0))"),
        ("conjunct", "inside = (place < n) & (row != 7)", "inside = (row != 7)"),
        ("conjunct", "inside = (place < n) & (row != 7)", "inside = (place < n)"),
        ("axis", "total += tl.sum(value, axis=0)", "total += tl.sum(value, axis=1)"),
        (
            "strides",
            "place = (row) * stride_a + tl.arange(0, 4) * stride_b",
            "place = (row) * stride_b + tl.arange(0, 4) * stride_a",
        ),
        ("update", "total += tl.sum(value, axis=0)", "total = tl.sum(value, axis=0)"),
        ("update", "tl.store(y + place, total, mask=inside)", "pass"),
        ("exit", "return", "pass"),
        (
            "exit",
            "if row >= n: / return / tl.static_assert(n + 1 > 0)",
            "tl.static_assert(n + 1 > 0) / if row >= n: / return",
        ),
    ],
)
def test_each_operator_changes_one_thing(operator: str, before: str, after: str) -> None:
    assert (before, after) in changes(operator)


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        ("b = tl.arange(0, 4) + a", False),
        ("b = tl.load(x)", True),
        ("a = tl.arange(0, 4)", True),
        ("b = helper(x)", True),
        ("tl.store(x, a)", True),
    ],
)
def test_an_exit_moves_only_where_that_may_show(after: str, *, moved: bool) -> None:
    text = f"@triton.jit\ndef kernel(x, a):\n    if a:\n        return\n    {after}\n"
    exits = [each for each in mutants_of("kernels.py", text) if each.operator == "exit"]
    assert len(exits) == 1 + moved


@pytest.mark.parametrize(
    ("second", "moved"),
    [
        ("if b:\n        return", False),
        ("if tl.cdiv(b, 4) == 0:\n        return", False),
        ("if tl.load(x):\n        return", True),
        ("if b:\n        return 1", True),
        ("if b:\n        tl.store(x, b)\n        return", True),
    ],
)
def test_two_exits_are_not_swapped_where_either_order_leaves(second: str, *, moved: bool) -> None:
    text = f"@triton.jit\ndef kernel(x, a, b):\n    if a:\n        return\n    {second}\n"
    swapped = text.replace(
        f"    if a:\n        return\n    {second}", f"    {second}\n    if a:\n        return"
    )
    assert (swapped in {each.text for each in mutants_of("kernels.py", text)}) == moved


def test_mutants_are_code_each_once_and_nothing_else_is_changed() -> None:
    mutants = mutants_of("kernels.py", KERNEL)
    assert len({each.text for each in mutants}) == len(mutants)
    assert {each.operator for each in mutants} == set(OPERATORS)
    for each in mutants:
        assert ast.dump(ast.parse(each.text)) != ast.dump(ast.parse(KERNEL))
        assert each.text.startswith(KERNEL[: KERNEL.index("row = ")])
        assert each.text.count("tl.static_assert(n + 1 > 0)") == 1


def test_functions_jitted_by_a_call_are_kernels_and_others_are_not() -> None:
    text = "def one(x):\n    return x + 1\ndef two(x):\n    return x + 1\nmade = triton.jit(one)\n"
    assert {each.kernel for each in mutants_of("kernels.py", text)} == {"one"}


def test_an_operator_behind_a_comment_or_beside_other_letters_than_ascii() -> None:
    text = "@jit\ndef one(x):\n    return ('é', x  # a + b\n            + 1, x - 1)\n"
    changed = [each.text for each in mutants_of("kernels.py", text) if each.operator == "operator"]
    assert changed == [text.replace("x - 1", "x + 1")]


def test_a_sample_is_even_and_the_same_for_a_seed() -> None:
    def made(kernel: str, operator: str, count: int) -> list[Mutant]:
        return [
            Mutant("f", kernel, operator, n, f"{kernel} {operator} {n}", "") for n in range(count)
        ]

    mutants = [*made("a", "mask", 50), *made("a", "cast", 3), *made("b", "mask", 20)]
    taken = sample(mutants, 9, seed=1)
    assert taken == sample(mutants, 9, seed=1) != sample(mutants, 9, seed=2)
    assert set(Counter((each.kernel, each.operator) for each in taken).values()) == {3}
    assert len(sample(mutants, None, seed=0)) == len({each.id for each in mutants})


def test_a_marked_copy_writes_the_lines_that_ran(tmp_path: Path) -> None:
    text = dedent(
        '''
        jit = lambda function: function
        @jit
        def kernel(x):
            """Double."""
            if x > 5:
                x += 1; x += 2
            elif x > 3:
                x += 4
            for _ in range(2):
                x = (x
                     * 2)
            return x
        '''
    ).lstrip()
    ran = tmp_path / "ran"
    (tmp_path / "kernels.py").write_text(marked("kernels.py", text, ran))
    assert runpy.run_path(str(tmp_path / "kernels.py"))["kernel"](4) == 32
    assert ran.read_text().split() == [f"kernels.py:{line}" for line in (5, 8, 9, 10, 12)]
    (at_elif,) = [each for each in mutants_of("kernels.py", text) if "x >= 3" in each.text]
    assert at_elif.line == 5


@pytest.mark.parametrize(
    "body",
    [
        "\n    a = x + 1; b = a + 2\n    return b\n",
        "\n    a = (x +\n        1); b = a + 2\n    return b\n",
        "\n    if x: x = 1; x = x + 2\n    return x\n",
        " return x + 1\n",
        ' """Add."""; return x + 1\n',
    ],
)
def test_statements_that_share_a_line(tmp_path: Path, body: str) -> None:
    text = f"jit = lambda function: function\n@jit\ndef kernel(x):{body}"
    made, ran = mutants_of("kernels.py", text), tmp_path / "ran"
    (tmp_path / "kernels.py").write_text(marked("kernels.py", text, ran))
    ran.touch()
    assert runpy.run_path(str(tmp_path / "kernels.py"))["kernel"](1) > 1
    seen = {int(each.rpartition(":")[2]) for each in ran.read_text().split()}
    assert {each.line for each in made} <= seen
    assert bool(made) == body.startswith("\n"), "a function in one line has no mutants"
