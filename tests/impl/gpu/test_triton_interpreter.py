"""Loops that scalars bound, in an interpreter like that of triton 3.6 with NumPy 2.4."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl.gpu.triton_interpreter import scalars_as_bounds
from kernelproof.impl.targets.optional import missing

ABSENT = missing("triton", "triton")
needs_triton = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
OURS = [
    "triton-append", "triton-attention", "triton-attention-split-kv", "triton-merge-state",
    "triton-metadata", "triton-moe", "triton-ragged-attention", "triton-route",
]  # fmt: skip
UNBOUND = ["triton-route"]
"""All loops of its kernel are as long as constants say."""
FLASHINFER = ["flashinfer-triton-merge-states", "flashinfer-triton-variable-length-merge-states"]

CALLS = """
import json
import triton
from triton.runtime import interpreter
from kernelproof.impl import find_implementation
from kernelproof.reference import (
    AttentionProblem, MergeProblem, MetadataProblem, MoEProblem, RouteProblem, materialise,
)

methods = interpreter._patch_lang_tensor

def index(self):  # older NumPy only warns
    if self.handle.data.ndim:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
    return int(self.handle.data)

def as_in_3_6(tensor, *scope):
    methods(tensor, *scope)
    tensor.__index__ = index

interpreter._patch_lang_tensor = as_in_3_6
failed = []
for version, names in {asked!r}:
    triton.__version__ = version
    for name in names:
        found = find_implementation(name)
        problem = {{
            "merge_state": MergeProblem(num_states=3),
            "build_metadata": MetadataProblem((((1, 2), (5, 40)),), 16),
            "moe": MoEProblem(),
            "route": RouteProblem(),
        }}.get(found.operation) or AttentionProblem(found.operation)
        try:
            found(materialise(problem))
        except interpreter.InterpreterError as error:
            assert "only 0-dimensional arrays" in str(error), error
            failed.append([version, name])
print(json.dumps(failed))
"""
"""Program that prints the kernels that fail, with the version; it takes seconds to start."""

HASTENED = """
import json
import torch
from unittest import mock
from triton.runtime import interpreter
from kernelproof.impl import find_implementation
from kernelproof.impl.gpu.triton_interpreter import hasten
from kernelproof.reference import AttentionProblem, materialise

patches = []
builtins = interpreter._patch_builtin

def counted(*args):
    patches.append(args[0])
    return builtins(*args)

found = find_implementation("triton-attention")
inputs = materialise(AttentionProblem(query_lens=(3, 1), seq_lens=(70, 9), logits_soft_cap=8.0))

def called():
    patches.clear()
    with mock.patch.object(interpreter, "_patch_builtin", counted):
        answer = found(inputs)
    return answer, len(patches)

(before, often), _ = called(), hasten()
hasten()
called()
after, seldom = called()
print(json.dumps([all(map(torch.equal, before, after)), often, seldom]))
"""


def printed(code: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@functools.cache
def failed() -> list[Any]:
    """Return the versions and kernels that fail, FlashInfer's too where it is installed."""
    others = FLASHINFER if missing("flashinfer", "flashinfer") is None else []
    return printed(CALLS.format(asked=[("3.6.0", [*OURS, *others]), ("3.7.0", OURS)]))


@needs_triton
class TestKernels:
    def test_ours_and_those_of_flashinfer_run(self) -> None:
        assert [name for version, name in failed() if version == "3.6.0"] == []

    def test_ours_would_fail_and_newer_versions_are_left_alone(self) -> None:
        found = [name for version, name in failed() if version == "3.7.0"]
        assert found == [name for name in OURS if name not in UNBOUND]

    def test_hastened_the_language_is_patched_once_a_launch_and_answers_are_the_same(self) -> None:
        same, often, seldom = printed(HASTENED)
        assert same
        assert often > seldom > 0


@needs_triton
class TestContext:
    @pytest.fixture
    def interpreter(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.setattr("triton.__version__", "3.6.0+git1234")
        return importlib.import_module("triton.runtime.interpreter")

    def test_an_array_of_one_element_bounds_a_loop(
        self, interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Scalar:
            handle = SimpleNamespace(data=importlib.import_module("numpy").array([3]))

        given: list[Any] = []
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: given.append(args))
        with scalars_as_bounds(torch.zeros(1)):
            interpreter._patch_lang_tensor(Scalar, "scope")
        assert given == [(Scalar, "scope")]
        assert list(range(Scalar())) == [0, 1, 2]  # type: ignore[call-overload]

    def test_nothing_is_changed_afterwards_or_for_a_gpu(self, interpreter: ModuleType) -> None:
        before = interpreter._patch_lang_tensor
        with scalars_as_bounds(torch.zeros(1)):
            assert interpreter._patch_lang_tensor is not before
        assert interpreter._patch_lang_tensor is before
        with scalars_as_bounds(SimpleNamespace(is_cuda=True)):  # type: ignore[arg-type]
            assert interpreter._patch_lang_tensor is before


HELPERS = """
import triton
from triton.language import exp2 as power, static_range, sum

@triton.jit
def total(x):
    result = x
    for _ in static_range(2):
        result += power(x)
    return sum(result, 0)
"""
KERNELS = """
import triton
import triton.language as tl
from triton.language import associative_scan, load, multiple_of, range as loop, store
from triton.language.extra.cuda import libdevice
from helpers import total

logarithm, power = tl.log2, tl.math.exp2
take, first = tl.reshape, tl.arange
hyperbolic = tl.extra.cuda.libdevice.tanh

@triton.jit
def plus(a, b):
    return a + b

@triton.jit
def kernel(X, Out, n, SIZE: tl.constexpr):
    at = multiple_of(first(0, SIZE), 4)
    x = take(load(X + at), (SIZE,))
    for _ in loop(0, n):
        x = logarithm(power(x)) + 1
    x += hyperbolic(x) + libdevice.fast_dividef(x, 4.0) + tl.extra.cuda.libdevice.rsqrt(x)
    x = associative_scan(x, 0, plus)
    store(Out, total(x))
"""
BOUND = """
import json, sys
sys.path.insert(0, {folder!r})
import torch
from triton import language
from triton.runtime import interpreter
from kernelproof.impl.gpu.triton_interpreter import hasten, scalars_as_bounds
import helpers, kernels

def tried():
    out = torch.zeros(1)
    try:
        with scalars_as_bounds(out):  # which triton 3.6 does not take with NumPy 2.4
            kernels.kernel[(1,)](torch.arange(4.0), out, 2, SIZE=4)
    except interpreter.InterpreterError:
        return None
    return float(out)

names = [(each, name, value) for each in (kernels, helpers) for name, value in vars(each).items()]
failed = tried()
hasten()
found = [tried(), tried()]
same = all(vars(module)[name] is value for module, name, value in names)
print(json.dumps([failed, *found, same, kernels.logarithm is language.log2]))
"""


@needs_triton
def test_names_that_modules_bind_are_reached_and_given_back(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(HELPERS, encoding="utf-8")
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    x = torch.arange(2.0, 6.0)
    scanned = (x + x.tanh() + x / 4 + x.rsqrt()).cumsum(0)
    expected = float((scanned + 2 * torch.exp2(scanned)).sum())
    found = printed(BOUND.format(folder=str(tmp_path)))
    assert found == [None, pytest.approx(expected), pytest.approx(expected), True, True]
