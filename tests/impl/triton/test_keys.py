"""Keys of Triton's kernels: one for each that is compiled, and modules that hold them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.triton.moe import module_fields as moe_module
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.space.profiles import PROFILES, on_device
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference import MoEProblem
from kernelproof.tests.choosing import choose

ON_GPU = Target(sm=90, device="cuda", triton="3.6.0", torch="2.11.0", cuda="13.0")
PROGRAM = Path(__file__).with_name("signatures.py")
MOE_FIELDS = len(moe_module(MoEProblem())) + 2
BUILT_AHEAD = [
    "triton-attention", "triton-attention-split-kv", "triton-ragged-attention",
    "triton-attention-graph", "triton-merge-state", "triton-append", "triton-metadata",
    "triton-route", "triton-moe",
]  # fmt: skip


def test_one_key_is_one_compiled_kernel() -> None:
    """Else a call would be compiled within the deadline of one that is compiled already."""
    names = [each for each in BUILT_AHEAD if not each.endswith("graph")]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *names],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    for name, told in json.loads(done.stdout).items():
        assert told["differing"] == {}, name
        # All that a problem launches is what the calls of its module launch.
        assert told["missing"] == [], name
        assert told["keys"] > 10 or name == "triton-metadata"
        assert told["modules"] or name == "triton-moe"


def parts(key: object) -> set[object]:
    """Split the keys of calls that launch several kernels, each by a part of it."""
    if not isinstance(key, tuple):
        return {key}
    if isinstance(key[0], tuple):  # of a batch; then the room that is captured for it, or splits
        (*options, rows), *more = key
        return {(*options, rows), *((*options, room) for room in more[: 2 - len(more)])}
    if len(key) < MOE_FIELDS:
        return {key}
    slots, *sorting = key[MOE_FIELDS - 1 :]
    return {("slots", slots), *(tuple(sorting[i : i + 3]) for i in range(0, len(sorting), 3))}


@pytest.mark.parametrize("name", BUILT_AHEAD)
def test_a_module_holds_the_kernels_of_all_its_problems(name: str) -> None:
    found = find_implementation(name)
    key = found.compile_key
    assert key is not None
    axes = narrow(
        found.operation, lambda problems: [found.refusal(each, ON_GPU) for each in problems], 10**8
    )
    assert axes is not None
    built: dict[str, set[object]] = {}
    for problem in draw_problems(axes, PROFILES["gate"], 0, 300):
        kernels = list(found.problems_of_module(problem))
        module = found.module_of(problem)
        assert {found.module_of(each) for each in kernels} == {module}
        assert all(found.refusal(each, ON_GPU) is None for each in kernels)
        here = built.setdefault(module, {part for each in kernels for part in parts(key(each))})
        # How often keys are split the device has a say in: what is launched is compared above.
        assert parts(key(problem)) <= here, problem


@pytest.mark.parametrize("name", BUILT_AHEAD)
def test_on_a_gpu_the_gate_builds_some_modules_ahead(name: str) -> None:
    found = find_implementation(name)
    assert found.builds_ahead("cuda")
    assert not found.builds_ahead("cpu")
    axes = narrow(
        found.operation,
        lambda problems: [found.refusal(each, ON_GPU) for each in problems],
        on_device(PROFILES["gate"], "cuda").max_work,
    )
    assert axes is not None

    def keys(problems: object) -> list[str | None]:
        return [
            found.module_of(each) if found.refusal(each, ON_GPU) is None else None
            for each in problems  # type: ignore[attr-defined]
        ]

    most = PROFILES["gate"].modules_of(found.build_minutes)
    modules = choose(axes, keys, most, companions=True)
    assert len({each.key for each in modules}) == len(modules) <= most
    for each in modules:
        assert found.module_of(each.first) == each.key
