"""Lines of kernels that Triton's interpreter runs are recorded."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
import triton.language as tl

from kernelproof.impl.gpu import kernel_lines
from kernelproof.impl.gpu.triton_interpreter import hasten
from kernelproof.properties.worker.kernel_lines import recording

HERE = __file__
SOURCE = Path(HERE).read_text().splitlines()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _doubled(value: Any) -> Any:  # noqa: ANN401
    return 2 * value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _branches(out: Any, DOUBLE: tl.constexpr, TIMES: tl.constexpr = 3) -> None:  # noqa: ANN401, N803
    """Count, and double."""
    at = tl.program_id(0)
    value = at
    if DOUBLE:
        value = _doubled(value)
    for _ in range(TIMES):
        value = value + (1)
    if at > 100:
        value = -1  # not reached
    elif at >= 0:
        value = value + 0  # taken
    tl.store(out + at, value)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _raises(out: Any) -> None:  # noqa: ANN401
    tl.store(out, 1)
    tl.load(out, cache=1)
    tl.store(out, 2)  # behind an error


def _ran(text: str, lines: frozenset[int]) -> bool:
    found = [number for number, line in enumerate(SOURCE, 1) if text in line]
    return found[0] in lines  # this call names the text a second time


@pytest.fixture(autouse=True)
def _seen() -> None:
    hasten()


def test_the_lines_of_a_launch_and_of_what_it_calls_are_recorded() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    with recording() as found:
        _branches[(2,)](out, DOUBLE=True)
    assert out.tolist() == [3, 5]
    lines = found.lines[HERE]
    assert _ran("return 2 * value", lines)
    assert _ran("value = value + (", lines)
    assert _ran("# taken", lines)
    assert not _ran("# not reached", lines)
    (values,) = found.files[HERE]["launched"].values()
    assert values == {"DOUBLE": ["True"], "TIMES": ["3"]}


def test_a_block_records_its_own_lines_only() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with recording():
        _branches[(1,)](out, DOUBLE=True)
    with recording() as found:
        _branches[(1,)](out, False, TIMES=0)  # noqa: FBT003  as a kernel's constexpr
    lines = found.lines[HERE]
    assert not _ran("return 2 * value", lines)
    assert not _ran("value = value + (", lines)
    with recording() as nothing:
        pass
    assert not nothing.files


def test_a_condition_that_was_never_false_is_seen() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    condition = 1 + next(n for n, line in enumerate(SOURCE) if "if DOUBLE" in line)
    false = 1 << 2 * condition + 1
    for double in (True, False):
        with recording() as found:
            _branches[(1,)](out, DOUBLE=double)
        ran = int(found.files[HERE]["ran"], 16)
        assert bool(ran & false) is not double


def test_lines_behind_an_error_have_not_run() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with recording() as found, pytest.raises(Exception, match="cache"):
        _raises[(1,)](out)
    lines = found.lines[HERE]
    assert _ran("tl.store(out, 1)", lines)
    assert not _ran("# behind an error", lines)


def _jit() -> Any:  # noqa: ANN401  a module
    module = ModuleType("jit")
    vars(module)["JITFunction"] = _Compiled
    return module


class _Compiled:
    """A compiled kernel's function as Triton has it, as far as it is read."""

    def __init__(self, constants: list[dict[Any, object]]) -> None:
        self.fn = _ran
        self.starting_line_number = 11
        self.raw_src = ["@triton.jit\n", "def _kernel(out, DOUBLE):\n"]
        self.arg_names = ["out", "DOUBLE"]
        self.constexprs = [1]
        compiled = {key: SimpleNamespace(src=SimpleNamespace(constants=each))
                    for key, each in enumerate(constants)}  # fmt: skip
        self.device_caches: dict[int, tuple[Any, ...]] = {0: (compiled, {})}

    def run(self) -> int:
        return 5


def test_specialisations_of_launched_kernels_are_recorded_on_a_gpu() -> None:
    kernel_lines._watch(_jit())
    kernel = _Compiled([{(1,): True}, {(1,): False, (0,): 1}])
    with recording() as found:
        assert kernel.run() == 5
    (record,) = found.files.values()
    assert record == {"ran": "", "launched": {"12": {"DOUBLE": ["True", "False"]}},
                      "compiled": {"12": 2}}  # fmt: skip
    assert found.lines == {HERE: frozenset()}


def test_a_release_that_keeps_them_otherwise_is_not_recorded() -> None:
    kernel_lines._watch(_jit())
    kernel = _Compiled([])
    kernel.device_caches = {0: ()}
    with recording() as found:
        kernel.run()
    assert not found.files
