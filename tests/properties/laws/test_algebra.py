"""Triton kernels whose algebra is the oracle's pass in float64; what roundings hide is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    RouteProblem,
)
from kernelproof.tests.interpreting import ask

RAGGED = "ragged_attention"
OURS: dict[str, Problem] = {
    "triton-attention": AttentionProblem(
        query_lens=(3, 1), seq_lens=(20, 70), dtype="bfloat16", causal=True, sinks=True
    ),
    "triton-attention-split-kv": AttentionProblem(seq_lens=(300,), dtype="bfloat16"),
    "triton-ragged-attention": AttentionProblem(
        RAGGED, seq_lens=(70,), dtype="float16", logits_soft_cap=10.0
    ),
    "triton-merge-state": MergeProblem(num_states=3, dtype="bfloat16"),
    "triton-moe": MoEProblem(num_tokens=5, dtype="bfloat16"),
    "triton-route": RouteProblem(num_tokens=5, num_experts=8, method="deepseek_v4"),
}
KERNEL_FILE = """
import torch, triton, triton.language as tl
from kernelproof.impl import implementation

LOG2E = 1.4426950216  # as vLLM has it: the nearest float32, which is widened at the second call

@triton.jit
def merge(outs, lses, out, rows, rate, DIM: tl.constexpr, EPS: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, DIM)
    first, second = tl.load(lses + row), tl.load(lses + rows + row)
    base = tl.maximum(tl.maximum(first, second), -1e30)
    a, b = tl.exp2((first - base) * rate), tl.exp2((second - base) * rate)
    x = tl.load(outs + row * DIM + at).to(tl.float32)
    y = tl.load(outs + (rows + row) * DIM + at).to(tl.float32)
    x, y = tl.where(a > 0, x, 0.0), tl.where(b > 0, y, 0.0)
    total = tl.where(a + b == 0, 1.0, a + b)
    tl.store(out + row * DIM + at, (x * a + y * b) / (total + EPS))

def launch(inputs, eps):
    outs, lses = inputs.outs.contiguous(), inputs.lses.contiguous()
    out = torch.empty_like(outs[0], dtype=inputs.out_dtype)
    merge[(lses[0].numel(),)](outs, lses, out, lses[0].numel(), LOG2E, outs.shape[-1], eps)
    return out, None

def supports(problem, target):
    return problem.num_states == 2

@implementation("merge_state", name="right", supports=supports, features=("float64_algebra",))
def right(inputs):
    return launch(inputs, 0.0)

@implementation("merge_state", name="with-eps", supports=supports, features=("float64_algebra",))
def with_eps(inputs):
    return launch(inputs, 1e-6)
"""


@pytest.mark.parametrize("name", OURS)
def test_our_kernels_compute_what_the_oracle_does(name: str, interpreter: Worker) -> None:
    found = ask(interpreter, "algebra", name, OURS[name])
    assert (found.status, found.vacuous) == ("PASS", False)
    assert found.ratio is not None
    assert found.ratio < 0.01, "float64 takes next to nothing of what is allowed"


def test_an_expert_on_the_threshold_of_sparsemixer_may_go_either_way(interpreter: Worker) -> None:
    """Its distance is 2 jitter of its size to the last bit of a float32, as the kernel has it."""
    problem = RouteProblem(
        num_tokens=1,
        token_ids=(888,),
        num_experts=95,
        top_k=2,
        method="sparsemixer",
        dtype="float16",
        regime="negative",
        seed=1,
    )
    found = ask(interpreter, "algebra", "triton-route", problem)
    assert (found.status, found.vacuous) == ("PASS", False)
    assert found.ratio is not None
    assert found.ratio > 0.1, "it went the other way"


def test_a_fault_that_16_bits_hide_is_found(interpreter: Worker, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(KERNEL_FILE)
    problem = MergeProblem(num_states=2, num_tokens=4, dtype="bfloat16", head_dim=16)
    right, wrong = (f"{tmp_path / 'own.py'}:{name}" for name in ("right", "with_eps"))
    assert ask(interpreter, "parity", wrong, problem).status == "PASS"
    found = ask(interpreter, "algebra", wrong, problem)
    assert found.status == "FAIL"
    assert found.message.startswith("with every float of the kernel in float64, out[")
    found = ask(interpreter, "algebra", right, problem)
    assert (found.status, found.vacuous) == ("PASS", False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torch-sdpa-math", AttentionProblem(RAGGED)),
        ("torch-moe", MoEProblem(num_tokens=3)),
        ("triton-attention", AttentionProblem(output_scale=0.5)),
    ],
)
def test_it_says_nothing_of_what_is_no_kernel_or_makes_codes(
    name: str, problem: Problem, interpreter: Worker
) -> None:
    found = ask(interpreter, "algebra", name, problem)
    assert found.vacuous or found.status == "UNSUPPORTED"


def test_only_a_promise_of_what_triton_interprets_is_judged(
    interpreter: Worker, tmp_path: Path
) -> None:
    own = (
        KERNEL_FILE
        + """
@implementation("merge_state", name="unpromised", supports=supports)
def unpromised(inputs):
    return launch(inputs, 1e-6)
"""
    )
    plain = """
from kernelproof.impl import implementation

@implementation("merge_state", name="no-kernel", features=("float64_algebra",))
def no_kernel(inputs):
    return inputs.outs[0], inputs.lses[0]
"""
    (tmp_path / "promising.py").write_text(own)
    (tmp_path / "plain.py").write_text(plain)

    def declares(implementation: str) -> bool:
        payload = {"task": "describe", "implementation": implementation, "device": "cpu"}
        told: Any = interpreter.run(payload, Deadlines(run=60.0)).result
        return "float64_algebra" in told["declares"]

    mine = [
        f"{tmp_path}/{name}"
        for name in ("promising.py:right", "promising.py:unpromised", "plain.py:no_kernel")
    ]
    names = ("triton-route", *mine, "torch-sdpa-math")
    assert [declares(each) for each in names] == [True, True, False, False, False]
