"""Implementations that behave as a test orders, by the node of the cluster on which they run."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import torch

from kernelproof.impl import implementation
from kernelproof.impl.targets.unpacked import unpacked
from kernelproof.reference import Arithmetic, MergeProblem, oracle
from kernelproof.reference.tensors.inputs import MergeInputs

Merged = tuple[torch.Tensor, torch.Tensor]
ORDERS = Path(os.environ.get("KERNELPROOF_TEST_ORDERS", "."))
NODE = os.environ.get("KERNELPROOF_TEST_NODE", "none")


def hangs(states: int) -> bool:
    """Whether a call is to hang on this node: of more than two states, or when files hold words.

    The calls before all laws merge two states, and have 20 s each: a minute passes where they hang.
    """
    order = ORDERS / NODE
    if not order.exists():
        return False
    pattern, _, words = order.read_text().partition("\n")
    if not pattern:
        return states > 2
    files = Path(pattern).parent.glob(Path(pattern).name)
    return any(words.encode() in each.read_bytes() for each in files)


def _steady(inputs: MergeInputs) -> Merged:
    expected = oracle.bounded_merge(inputs, Arithmetic()).expected
    return expected.out.to(inputs.out_dtype), expected.lse.to(torch.float32)


def _obedient(inputs: MergeInputs) -> Merged:
    if hangs(len(inputs.outs)):
        with (ORDERS / "hung").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(600)
    return _steady(inputs)


def _not_on_c(problem: object, target: object) -> bool | str:
    del problem, target
    return NODE != "c" or "not on c"


obedient = implementation("merge_state", name="obedient")(_obedient)
tame, docile = (
    implementation("merge_state", name=name, supports=_not_on_c)(_obedient)
    for name in ("tame", "docile")
)


def _has_release(problem: object, target: object) -> bool | str:
    del problem, target
    found = unpacked("vllm")
    return bool(found and found.version == "9.8") or "vllm 9.8 is not there"


of_a_release = implementation("merge_state", name="released", supports=_has_release)(_steady)


def _module(dtype: str) -> Path:
    """Return the file that stands for a compiled module in the cache of this node."""
    return ORDERS / f"module-{NODE}-{dtype}"


def _library(problem: MergeProblem) -> tuple[str, bool]:
    return f"merge {problem.dtype}", _module(problem.dtype).exists()


def _compiled(inputs: MergeInputs) -> Merged:
    """Compile a module where this node has none; each one is a line of a file."""
    dtype = str(inputs.out_dtype).removeprefix("torch.")
    module = _module(dtype)
    with module.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            with (ORDERS / "builds").open("a") as file:
                file.write(f"{NODE} {dtype}\n")
            time.sleep(1)
            module.touch()
    return _steady(inputs)


sharing, sharing_too = (
    implementation(
        "merge_state",
        name=name,
        compile_key=lambda problem: problem.dtype,
        library=_library,
        build_ahead=True,
        build_minutes=0.1,
        build_compilers=1,
    )(_compiled)
    for name in ("sharing", "sharing-too")
)
