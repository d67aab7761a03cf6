"""What a call compiles, tunes or imports has the deadline of a compilation, and is no running."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.impl.protocol import Implementation
from kernelproof.properties.isolation.stages import Deadlines
from kernelproof.properties.verdicts import specialising
from kernelproof.properties.verdicts.specialising import STAGE, WATCHED
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.worker.pools import open_pool
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionProblem, oracle

PROBLEM = AttentionProblem(query_lens=(1,), seq_lens=(2,), page_size=4, head_dim_qk=8)


class Watched:
    """Stages, of which those that were entered are known."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.now: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Go through one."""
        self.entered.append(name)
        self.now.append(name)
        try:
            yield
        finally:
            self.now.pop()


def doing(what: Callable[[], object]) -> tuple[Implementation, Watched, Subject]:
    """Return an implementation that does something in each call."""

    @implementation("paged_attention", name="does-something")
    def attend(inputs: Any) -> Any:  # noqa: ANN401
        what()
        return oracle.attention(inputs)

    stages = Watched()
    return attend, stages, Subject(attend, Target.here("cpu"), stages)


@pytest.fixture(params=WATCHED, ids=lambda each: each[1])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stand in for a function of a library that compiles: it takes a tenth of a second."""
    module, name = request.param
    *classes, last = name.split(".")

    def compiles(*_: object) -> None:
        time.sleep(0.1)

    home: Any = ModuleType(module)
    owner = home
    for each in classes:
        setattr(owner, each, type(each, (), {}))
        owner = getattr(owner, each)
    setattr(owner, last, compiles)
    monkeypatch.setitem(sys.modules, module, home)
    return lambda: getattr(owner, last)()  # noqa: PLW0108  whatever stands there by then


def test_a_call_that_compiles_is_seen(compiler: Callable[[], None]) -> None:
    _, stages, subject = doing(compiler)
    subject.try_call(PROBLEM)
    assert stages.entered.count(STAGE) == 1
    assert subject.calls == 1
    assert subject.seconds < 0.09  # the call without the tenth of a second


def test_the_same_outside_of_a_call_is_not(compiler: Callable[[], None]) -> None:
    _, stages, subject = doing(lambda: None)
    subject.try_call(PROBLEM)
    stages.entered.clear()
    compiler()
    assert not stages.entered


def test_a_compilation_of_another_thread_is_not_that_of_the_call(
    compiler: Callable[[], None],
) -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=compiler)
        thread.start()
        thread.join()

    _, stages, subject = doing(elsewhere)
    subject.try_call(PROBLEM)
    assert STAGE not in stages.entered


def test_an_import_is_seen_and_what_it_brings_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import time\ntime.sleep(0.1)\ndef compile_it(): time.sleep(0.1)\n"
    (tmp_path / "imported_in_a_call.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(specialising, "WATCHED", (("imported_in_a_call", "compile_it"),))

    def imports() -> None:
        import imported_in_a_call  # type: ignore[import-not-found]

        imported_in_a_call.compile_it()

    _, stages, subject = doing(imports)
    subject.try_call(PROBLEM)
    assert stages.entered.count(STAGE) == 2
    assert subject.seconds < 0.09
    stages.entered.clear()
    subject.try_call(PROBLEM)  # imported by now
    assert stages.entered.count(STAGE) == 1
    sys.modules.pop("imported_in_a_call")


def test_dynamo_says_when_it_compiles() -> None:
    """A shape that was not seen before is compiled for inside a later call."""
    from torch._dynamo.callback import callback_handler

    twice = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    size = [3]
    _, stages, subject = doing(lambda: twice(torch.ones(size[0])))
    for size[0], compiled in ((3, True), (3, False), (4, True), (4, False)):
        stages.entered.clear()
        subject.try_call(PROBLEM)
        assert (STAGE in stages.entered) == compiled, size
    assert callback_handler.start_callbacks.count(specialising._dynamo_begins) == 1


def test_an_exception_of_a_compiler_leaves_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        msg = "no kernel"
        raise ValueError(msg)

    home: Any = SimpleNamespace(compile_it=fails)
    monkeypatch.setitem(sys.modules, "a_compiler", home)
    monkeypatch.setattr(specialising, "WATCHED", (("a_compiler", "compile_it"),))

    def tries() -> None:
        with pytest.raises(ValueError, match="no kernel"):
            home.compile_it()
        assert stages.now[-1] != STAGE

    _, stages, subject = doing(tries)
    subject.try_call(PROBLEM)


SLOW = """
import time
from types import SimpleNamespace
import sys
from kernelproof.impl import implementation
from kernelproof.reference import oracle

compiles = {"_do_compile": lambda *_: time.sleep(wait)}
jit = SimpleNamespace(JITFunction=type("JITFunction", (), compiles))
sys.modules["triton.runtime.jit"] = jit
wait, calls = 0.0, 0


def kernel(inputs):
    global wait
    if inputs.q.shape[0] == 2:
        wait = WAIT
        LOOP
    return oracle.attention(inputs)


kernel = implementation("paged_attention", name="kernel")(kernel)
"""
"""Calls of two tokens compile, whatever came before."""


def _status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, wait: float) -> str:
    name = f"compiling_{abs(hash((loop, wait)))}"
    text = SLOW.replace("WAIT", str(wait)).replace("LOOP", loop)
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    address = Address(f"{name}:kernel", None, "cpu")
    problem = AttentionProblem(query_lens=(2,), seq_lens=(2,), page_size=4, head_dim_qk=8)
    deadlines = Deadlines(run=0.5, specialise=2.0)
    with open_pool("cpu", standby=False) as pool, pool.lease() as worker:
        assert worker.run(address.case("parity", PROBLEM), deadlines).status == "done"
        outcome = worker.run(address.case("parity", problem), deadlines)
    if outcome.status == "done":
        assert outcome.result is not None
        return str(outcome.result["status"])
    return f"{outcome.status} {outcome.kind}"


COMPILES = "jit.JITFunction._do_compile(None)"


@pytest.mark.parametrize(
    ("loop", "wait", "status"),
    [
        (COMPILES, 1.0, "PASS"),
        (COMPILES, 60.0, "hang specialise"),
        (f"while True: {COMPILES}", 0.01, "hang specialise"),
        (f"{COMPILES}; time.sleep(60)", 0.1, "hang run"),
    ],
    ids=["slow", "never ends", "again and again", "compiles and hangs"],
)
def test_a_hang_is_found_and_a_compilation_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, wait: float, status: str
) -> None:
    assert _status(tmp_path, monkeypatch, loop, wait) == status
