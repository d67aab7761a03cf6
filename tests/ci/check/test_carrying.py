"""A function that no process can import arrives there by its source, with all that it uses."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from kernelproof.ci.check.carrying import CarryError, reference_of, written
from kernelproof.impl import Implementation, find_implementation, implementation
from kernelproof.reference import Arithmetic, MergeProblem, materialise

Cells = Callable[..., dict[str, Any]]
_numbers = itertools.count()


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cells:
    """Return a function that runs cells as a notebook does, which keeps their sources."""
    monkeypatch.chdir(tmp_path)

    def run(*sources: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        for source in map(dedent, sources):
            name = f"<cell {next(_numbers)}>"
            lines = source.splitlines(keepends=True)
            linecache.cache[name] = (len(source), None, lines, name)
            exec(compile(source, name, "exec", dont_inherit=True), names)  # noqa: S102  a cell
        return names

    return run


def there(value: object, **claims: object) -> Implementation:
    """Return what a worker finds of a function, or of an implementation."""
    if not isinstance(value, Implementation):
        value = implementation("merge_state", **{"name": "mine", **claims})(value)  # type: ignore[arg-type]
    return find_implementation(written(value, Path("calls")))


def test_a_function_arrives_with_all_that_it_uses(cells: Cells) -> None:
    names = cells(
        """
        import math
        import torch
        import torch.nn.functional as F
        from dataclasses import dataclass, field
        from math import inf
        LEAST, DTYPE, TABLE, BOUNDS = -1e30, torch.float32, torch.arange(3), (1, [2.0, None])
        LOW = -inf
        @dataclass
        class Pair:
            first: float
            second: float = LEAST
            def sum(self): return self.first + self.second
        """,
        """
        def inner(x, *, low=LOW):
            return outer(x) if x is None else max(x, low, BOUNDS[0])
        def outer(x):
            return inner(1) if x is None else F.relu(torch.tensor(x, dtype=DTYPE)).item()
        @torch.no_grad()
        def mine(inputs: "Nobody"):
            squares = [inner(each) ** 2 for each in TABLE.tolist()]
            return squares, outer(None), Pair(math.pi).sum() < 0, torch.is_grad_enabled()
        """,
    )
    made = there(names["mine"])
    assert made(None) == ([1, 1, 4], 1.0, True, False)
    assert (made.name, made.operation) == ("mine", "merge_state")


def test_what_is_claimed_arrives_too(cells: Cells) -> None:
    names = cells(
        """
        MOST = 3
        def key(problem): return problem.dtype
        few = lambda problem, target: problem.num_states <= MOST or "too many"
        def mine(inputs): return MOST
        """
    )
    given = {"supports": names["few"], "compile_key": names["key"], "features": {"lse_views"}}
    arithmetic = Arithmetic(probabilities="bfloat16")
    made = there(names["mine"], arithmetic=arithmetic, name="a name", provider="torch", **given)
    assert made.supports is not None
    assert made.compile_key is not None
    assert made.supports(MergeProblem(num_states=2), None) is True  # type: ignore[arg-type]
    assert made.supports(MergeProblem(num_states=4), None) == "too many"  # type: ignore[arg-type]
    assert made.compile_key(MergeProblem()) == "float32"
    assert made.features == {"lse_views"}
    assert (made.arithmetic, made.name, made.provider) == (arithmetic, "a name", "torch")


def test_an_implementation_is_made_anew_with_what_it_declares(cells: Cells) -> None:
    names = cells(
        """
        from kernelproof import impl
        def build():
            few = 2
            def small(problem, target): return problem.num_states <= few
            @impl.implementation("merge_state", name="local", supports=small, writes_out=True)
            def mine(inputs): return few
            return mine
        local = build()
        @impl.implementation("merge_state", name="of the notebook")
        def mine(inputs): return helper(mine)
        def helper(each): return each is mine
        """
    )
    made = there(names["local"])
    assert made(None) == 2
    assert made.writes_out
    assert made.supports is not None
    assert not made.supports(MergeProblem(num_states=3), None)  # type: ignore[arg-type]
    assert there(names["mine"])(None) is True


def test_the_future_is_kept_and_annotations_need_not_exist(cells: Cells) -> None:
    names = cells("from __future__ import annotations\ndef mine(x: Missing) -> Other: return 1")
    assert there(names["mine"])(None) == 1


def test_a_submodule_is_imported_by_its_own_name(cells: Cells) -> None:
    names = cells(
        """
        import concurrent.futures, torch as th
        def mine(inputs): return concurrent.futures.Future, th.nn.functional.relu
        """
    )
    made = implementation("merge_state", name="m" * 300)(names["mine"])
    text = Path(written(made, Path("calls")).rpartition(":")[0]).read_text()
    assert "__import__('concurrent.futures')" in text
    assert "__import__('torch.nn.functional')" in text


def test_the_same_function_has_one_file(cells: Cells) -> None:
    names = cells("def mine(inputs): return 1", "def other(inputs): return 1")
    first = implementation("merge_state", name="mine")(names["mine"])
    assert written(first, Path("calls")) == written(first, Path("calls"))
    other = implementation("merge_state", name="mine")(names["other"])
    assert written(first, Path("calls")) != written(other, Path("calls"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import threading\nlock = threading.Lock()\ndef mine(inputs): return lock",
            "mine cannot be taken to another process: lock is a lock, which cannot be pickled",
        ),
        (
            "import torch\nbig = torch.zeros(1 << 20)\ndef mine(inputs): return big",
            "big is a Tensor of 4,19.* bytes: make it in a function",
        ),
        (
            """
            import __main__
            class Thing: x = 1
            __main__.Thing, thing = Thing, Thing()
            def mine(inputs): return thing
            """,
            "thing is a Thing, whose class no other process can import",
        ),
        (
            """
            import functools
            def f(x): return x
            cached = functools.cache(f)
            def mine(inputs): return cached(1)
            """,
            "cached is a _lru_cache_wrapper, made by a call: use a decorator, or call it in a def",
        ),
        (
            "one, two = lambda: 1, lambda: 2\ndef mine(inputs): return one()",
            r"one is one of several lambdas at <cell \d+>:1: define it by def",
        ),
        (
            "exec('def f(): return 1')\ndef mine(inputs): return f()",
            r"f has no source \(<string>:1\): define it in a file, or in a cell",
        ),
        ("exec('def mine(inputs): return 1')", r"mine cannot be .*: it has no source"),
        (
            "class A: pass\nclass B: pass\ndef mine(inputs): return A, B",
            "A is a type, of which no source is found.*; B is a type, of which no source is found",
        ),
        (
            """
            def make(x):
                def f(): return x
                return f
            f, x = make(1), 2
            def mine(inputs): return f(), x
            """,
            "x stands for two things in what it uses: rename one",
        ),
        (
            """
            def make():
                count = 0
                def mine(inputs):
                    nonlocal count
                    count += 1
                return mine
            mine = make()
            """,
            "it assigns count, which is a variable of the function around it",
        ),
    ],
)
def test_what_cannot_arrive_is_named(source: str, message: str, cells: Cells) -> None:
    names = cells(source)
    with pytest.raises(CarryError, match=message):
        there(names["mine"])


def test_a_claim_that_cannot_arrive_is_named_as_it_was_given(cells: Cells) -> None:
    names = cells("def mine(inputs): return 1\nmany = [lambda: 1, lambda: 2]")
    with pytest.raises(CarryError, match="process: supports is one of several lambdas at <cell"):
        there(names["mine"], supports=names["many"][0])


def test_a_module_that_nobody_can_import_is_named(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    names = cells("import made_up\ndef mine(inputs): return made_up")
    with pytest.raises(CarryError, match="made_up is the module made_up, which no other process"):
        there(names["mine"])


def test_what_can_be_imported_is_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "room").mkdir(parents=True)
    (elsewhere / "room" / "__init__.py").touch()
    for path in ("alone_here.py", "room/inner.py"):
        (elsewhere / path).write_text(
            "from kernelproof.impl import implementation\n"
            "def plain(inputs): return 1\n"
            "mine = implementation('merge_state', name='x')(plain)\n"
            "class Kernels:\n    @staticmethod\n    def one(inputs): return 2\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(elsewhere)
    import alone_here  # type: ignore[import-not-found]
    import room.inner  # type: ignore[import-not-found]

    assert reference_of(alone_here.plain) == "elsewhere/alone_here.py:plain"
    assert reference_of(alone_here.mine) == "elsewhere/alone_here.py:mine"
    assert reference_of(room.inner.mine) == "room.inner:mine"
    assert reference_of(room.inner.Kernels.one) == "room.inner:Kernels.one"
    assert reference_of(torch.nn.functional.relu) == "torch.nn.functional:relu"
    assert reference_of(lambda: 1) == ""
    monkeypatch.chdir(elsewhere)
    assert reference_of(alone_here.plain) == "alone_here:plain"


def test_a_file_finds_the_users_modules_from_anywhere(
    tmp_path: Path, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helpers_of_mine.py").write_text("def one(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = cells("from helpers_of_mine import one as first\ndef mine(inputs): return first()")
    made = implementation("merge_state", name="mine")(names["mine"])
    text = Path(written(made, Path("calls")).rpartition(":")[0]).read_text()
    assert f"sys.path += [{str(tmp_path)!r}]" in text
    assert "from helpers_of_mine import one as first" in text
    assert there(names["mine"])(materialise(MergeProblem())) == 1


def test_defaults_and_annotations_are_those_of_the_definition(cells: Cells) -> None:
    names = cells(
        """
        from collections.abc import Sequence
        made = []
        for n in (1, 2):
            def mine(inputs: Sequence, k=n, *, more=n + 1) -> Sequence: return k, more
            made.append(mine)
        lambdas = [lambda inputs, s=s: s for s in (1, 2)]
        """
    )
    assert there(names["made"][0])(None) == (1, 2)
    assert there(names["lambdas"][1])(None) == 2
