"""What Triton would compile for drawn problems, told without a GPU; ``test_triton_keys`` runs it.

It is a program of its own, for the kernels have to be imported as compiled ones: whether they are
is settled by TRITON_INTERPRET when triton is imported. Launches are recorded, not done.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from kernelproof.impl import Implementation, Target, find_implementation
from kernelproof.impl.targets.optional import require
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference import MetadataProblem, Problem, materialise

ON_GPU = Target(sm=90, device="cuda", triton="3.6.0", torch="2.11.0", cuda="13.0")
PROBLEMS, WORK = 200, 200_000
LAUNCHING = ("attention_call", "append", "merge", "metadata", "moe_call", "moe_sort", "route")
"""Modules of ``kernelproof.impl.triton`` that launch kernels."""
EXPERTS_KERNELS = ("project", "contract", "combine", "sort_pairs")
BY_DEVICE = ("BLOCK", "CHUNK", "EVEN", "DTYPE")
"""Constants of the experts' kernels that a CPU has others of, whatever tensors say they are on."""
Signature = dict[str, Any]


def signature(kernel: Any, given: dict[str, Any]) -> Signature:  # noqa: ANN401  a Triton kernel
    """Return what Triton specialises on: constants, dtypes, alignment, ones and sixteens."""
    free = {each.name for each in kernel.params if each.do_not_specialize}
    return {
        name: value if name.isupper() else _of(value, specialised=name not in free)
        for name, value in given.items()
        if not (kernel.__name__.lstrip("_") in EXPERTS_KERNELS and name.startswith(BY_DEVICE))
    }


def _of(value: Any, *, specialised: bool) -> object:  # noqa: ANN401  any argument
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        width = "int32" if -(2**31) <= value < 2**31 else "int64"
        looked_at = 1 if value == 1 else 16 if value % 16 == 0 else 0
        return width, looked_at if specialised else None
    return type(value).__name__


class _Kernels:
    """Stands for a module of kernels, and records their launches."""

    def __init__(self, module: Any, seen: list[tuple[str, Signature]]) -> None:  # noqa: ANN401
        self._module, self._seen = module, seen

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  what can be launched
        kernel = getattr(self._module, name)

        def launch(*given: Any, **more: Any) -> None:  # noqa: ANN401
            named = {**dict(zip(kernel.arg_names, given, strict=False)), **more}
            options = ("num_warps", "num_stages", "enable_fp_fusion")
            for option in options:
                named.pop(option, None)
            self._seen.append((name, signature(kernel, named)))

        class Grid:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return launch

        return Grid()


@contextmanager
def recorded() -> Iterator[list[tuple[str, Signature]]]:
    """Record launches in place of them, on tensors that say that they are on a GPU."""
    seen: list[tuple[str, Signature]] = []

    def found(name: str, extra: str) -> Any:  # noqa: ANN401  a module
        module = require(name, extra)
        return _Kernels(module, seen) if ".triton.kernels." in name else module

    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)):
        patches: list[Any] = [
            mock.patch.object(
                importlib.import_module(f"kernelproof.impl.triton.{name}"), "require", found
            )
            for name in LAUNCHING
        ]
        call = importlib.import_module("kernelproof.impl.triton.attention_call")
        patches.append(mock.patch.object(call, "multiprocessors", return_value=132))
        for patch in patches:
            patch.start()
        try:
            yield seen
        finally:
            for patch in patches:
                patch.stop()


def launches(found: Implementation, problem: Problem) -> list[tuple[str, Signature]]:
    """Return the kernels that a call of a problem launches, with what Triton sees of them."""
    steps = range(len(problem.steps)) if isinstance(problem, MetadataProblem) else (0,)
    made = [
        materialise(problem, "cpu", **({"step": step} if len(steps) > 1 or step else {}))  # type: ignore[arg-type]
        for step in steps
    ]
    with recorded() as seen:
        for inputs in made:
            found.function(inputs)
    return seen


def frozen(seen: list[tuple[str, Signature]]) -> set[str]:
    """Return launches as a set."""
    return {json.dumps([kernel, each], sort_keys=True, default=str) for kernel, each in seen}


def seen(name: str) -> dict[str, Any]:
    """Return what differs among the launches of problems of one key, and what no module builds."""
    found = find_implementation(name)
    assert found.compile_key is not None
    axes = narrow(
        found.operation, lambda problems: [found.refusal(each, ON_GPU) for each in problems], WORK
    )
    assert axes is not None
    known: dict[str, list[tuple[str, Signature]]] = {}
    differing: dict[str, int] = {}
    built: dict[str, set[str]] = {}
    missing: list[str] = []
    for problem in draw_problems(axes, PROFILES["gate"], 0, PROBLEMS):
        key = repr(found.compile_key(problem))
        here = launches(found, problem)
        if found.operation != "moe":
            module = found.module_of(problem)
            if module not in built:
                kernels = found.problems_of_module(problem)
                built[module] = set().union(*(frozen(launches(found, each)) for each in kernels))
            missing += [] if frozen(here) <= built[module] else [str(problem)]
        # Where there is no token, or a batch is in fewer parts, fewer kernels are launched.
        if len(known.setdefault(key, here)) < len(here):
            known[key] = here
        for (kernel, first), (same, more) in zip(known[key], here, strict=False):
            if kernel != same:
                differing[f"{kernel} and {same}"] = differing.get(f"{kernel} and {same}", 0) + 1
                continue
            for argument, value in more.items():
                if first.get(argument) != value:
                    what = f"{kernel}.{argument}: {first.get(argument)} and {value}"
                    differing[what] = differing.get(what, 0) + 1
    return {"keys": len(known), "modules": len(built), "differing": differing, "missing": missing}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: seen(name) for name in sys.argv[1:]}))
