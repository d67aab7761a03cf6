"""The Triton MoE and router against the oracle: in the interpreter, and on a GPU if any."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl.targets.optional import missing
from kernelproof.impl.triton.moe_sort import most_blocks
from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import MoEProblem, Problem, RouteProblem
from kernelproof.reference.moe.activations import ACTIVATIONS
from kernelproof.reference.moe.routing_methods import METHODS

ABSENT = missing("triton", "triton")
RULES: dict[str, dict[str, Any]] = {
    "floor": {"renormalise_floor": 1e-6},
    "no floor": {"renormalise_floor": 0.0},
    "scales": {"expert_scales": True, "bias": True},
    "each": {"num_groups": 3, "topk_groups": 3, "best_of_each_group": True},
    "each, biased": {
        "num_groups": 6, "topk_groups": 6, "best_of_each_group": True, "bias": True,
        "method": "renormalize_naive", "expert_scales": True,
    },
    "shared": {"shared_experts": 2, "renormalise_floor": 0.0, "bias": True},
    "shared, softmax": {"shared_experts": 5, "method": "renormalize"},
    "table": {"hash_vocabulary": 129_280, "method": "deepseek_v4"},
    "table, scales": {"hash_vocabulary": 97, "method": "renormalize", "expert_scales": True},
    "sparsemixer": {"method": "sparsemixer", "top_k": 2, "jitter": 0.5},
}  # fmt: skip
"""Fields of problems with rules of single families."""
GROUPED = [name for name, method in METHODS.items() if method.score != "logit"]

SORTS = """
import torch
from kernelproof.impl.triton.moe_sort import sort_pairs

def expected(ids, weights, m, offset, experts, on_input):
    blocks = []
    for expert in range(experts):
        found = [
            pair for pair, (id, weight) in enumerate(zip(ids.flatten(), weights.flatten()))
            if id >= 0 and id - offset == expert and (on_input or weight != 0)
        ]
        blocks += [(expert, found[i : i + m]) for i in range(0, len(found), m)]
    return blocks

generator = torch.Generator().manual_seed(0)
for tokens, top_k, m, offset, experts, everywhere, dtype, on_input in (
    (1, 1, 16, 0, 1, 1, torch.int32, False),
    (5, 3, 16, 0, 4, 4, torch.int64, False),
    (90, 3, 16, 2, 4, 9, torch.int32, True),   # several chunks of pairs
    (90, 3, 32, 0, 300, 300, torch.int32, False),  # more experts than pairs
    (200, 1, 16, 0, 2, 2, torch.int32, False),  # more blocks than a program describes at once
):
    ids = torch.randint(-1, everywhere, (tokens, 2 * top_k), generator=generator).to(dtype)
    ids = ids[:, ::2]
    weights = torch.randint(0, 3, ids.shape, generator=generator).float()
    made = sort_pairs(ids, weights, m, offset, experts, on_input=on_input)
    wanted = expected(ids, weights, m, offset, experts, on_input)
    assert len(wanted) <= made.blocks, (len(wanted), made.blocks)
    for block in range(made.blocks):
        rows = int(made.block_rows[block])
        if block >= len(wanted):
            assert rows == 0
            continue
        expert, pairs = wanted[block]
        assert int(made.block_experts[block]) == expert
        assert made.pairs[block * m : block * m + rows].tolist() == pairs
"""


PATIENT = Deadlines(materialise=280.0, run=280.0, judge=280.0)
"""Deadlines just below the 300 seconds of a test: nothing hangs here, however slow the machine."""


def ask(worker: Worker, device: str, problem: Problem, law: str = "") -> Verdict:
    of_experts = isinstance(problem, MoEProblem)
    name = "triton-moe" if of_experts else "triton-route"
    law = law or ("parity" if of_experts else "routing_parity")
    payload = {
        "task": "judge", "law": law, "implementation": name, "problem": problem.to_json(),
        "device": device,
    }  # fmt: skip
    return verdict_of(worker.run(payload, PATIENT))


def experts(**changes: Any) -> MoEProblem:  # noqa: ANN401  fields of any type
    """Return a call of more tokens, rows and columns than a tile has in the interpreter."""
    fields: dict[str, Any] = {
        "num_tokens": 37, "hidden": 136, "inter": 72, "num_experts": 5, "top_k": 2,
        "dtype": "bfloat16", **changes,
    }  # fmt: skip
    return MoEProblem(**fields)


class TestExperts:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str, worker: Worker, device: str) -> None:
        for dtype in ("bfloat16", "float32"):
            verdict = ask(worker, device, experts(activation=activation, dtype=dtype, biases=True))
            assert verdict.status == "PASS", verdict

    @pytest.mark.parametrize(
        "changes",
        [
            {"dtype": "float16"},
            {"hidden": 1, "inter": 1, "num_experts": 1, "top_k": 1},
            {"hidden": 65, "inter": 33},
            {"num_tokens": 0},
            {"num_tokens": 1, "num_experts": 130, "top_k": 6},
            {"num_tokens": 150, "hidden": 16, "inter": 16, "num_experts": 3, "top_k": 3},
            {"interleaved": True, "biases": True},
            {"activation": "swiglu_oai", "swiglu_parameters": "each"},
            {"swiglu_parameters": "one"},
            {"local_experts": 2, "expert_offset": 2, "num_experts": 7},
            {"assignment": "one_expert"},
            {"assignment": "sparse"},
            {"assignment": "masked"},
            {"assignment": "duplicates", "top_k": 7},
            {"regime": "zero_weights", "biases": True},
            {"regime": "zero_weights", "biases": True, "weights_on_input": True},
            {"regime": "outlier_channels"},
            {"regime": "saturated"},
            {"regime": "exact_grid"},
            {"regime": "exact_grid", "activation": "relu2", "dtype": "float16"},
            {"strided_hidden": True},
            {"shared_experts": 2, "biases": True, "weights_on_input": True},
            {"swiglu_parameters": "limit"},
            {"swiglu_parameters": "each_limit"},
            {"activation": "situ", "swiglu_parameters": "each_beta"},
            {"activation": "swiglu_step", "swiglu_parameters": "one"},
            {"output_norm": "gain", "biases": True, "assignment": "masked"},
            {"output_norm": "gain_first", "regime": "zero_weights"},
            {"routed_scaling_factor": 2.5, "shared_experts": 1, "shared_gate": "logits"},
            {"routed_scaling_factor": 0.5, "weights_on_input": True},
            {"shared_experts": 2, "shared_gate": "weights_each", "shared_weight": 2.5},
        ],
        ids=str,
    )
    def test_shapes_and_options(self, changes: dict[str, Any], worker: Worker, device: str) -> None:
        verdict = ask(worker, device, experts(**changes))
        assert verdict.status == "PASS", verdict

    @pytest.mark.parametrize("quantized", ["fp8_tensor", "fp8_channel", "fp8_block"])
    @pytest.mark.parametrize("quantized_hidden", [False, True])
    @pytest.mark.parametrize("activation", ["swiglu", "gelu"])
    def test_fp8(
        self, quantized: str, quantized_hidden: bool, activation: str, worker: Worker, device: str
    ) -> None:
        problem = experts(
            hidden=264,
            inter=200,
            quantized=quantized,
            quantized_hidden=quantized_hidden,
            activation=activation,
            biases=True,
        )
        verdict = ask(worker, device, problem)
        assert verdict.status == "PASS", verdict

    def test_shared_experts_of_fp8(self, worker: Worker, device: str) -> None:
        problem = experts(quantized="fp8_block", quantized_hidden=True, shared_experts=1)
        verdict = ask(worker, device, problem)
        assert verdict.status == "PASS", verdict

    @pytest.mark.parametrize(
        "law",
        [
            "repeated_calls", "inputs_unchanged", "output_buffers", "unselected_experts",
            "zero_weight_slots", "expert_twins",
        ],
    )  # fmt: skip
    def test_laws(self, law: str, worker: Worker, device: str) -> None:
        verdict = ask(worker, device, experts(num_tokens=70, assignment="sparse"), law)
        assert verdict.status == "PASS", verdict

    @pytest.mark.parametrize("shared", [0, 1])
    def test_identity_experts(self, shared: int, worker: Worker, device: str) -> None:
        problem = experts(
            num_tokens=20, num_experts=5, top_k=3, identity_experts=4, shared_experts=shared
        )
        verdict = ask(worker, device, problem, "parity")
        assert verdict.status == "PASS", verdict

    def test_experts_that_are_beyond_an_int32(self, worker: Worker, device: str) -> None:
        problem = experts(num_tokens=9, hidden=64, inter=32)
        verdict = ask(worker, device, problem, "far_experts")
        assert verdict.status == "PASS", verdict


class TestRouting:
    @pytest.mark.parametrize("method", METHODS)
    def test_methods(self, method: str, worker: Worker, device: str) -> None:
        for regime in ("iid", "ties", "saturated", "all_negative"):
            for bias in (False, True)[: 1 if method == "sparsemixer" else 2]:
                problem = RouteProblem(
                    num_tokens=70,
                    num_experts=60,
                    top_k=6,
                    method=method,
                    bias=bias,
                    regime=regime,
                    dtype="bfloat16",
                    scaling_factor=2.5,
                )
                verdict = ask(worker, device, problem)
                assert verdict.status == "PASS", verdict

    @pytest.mark.parametrize("method", GROUPED)
    @pytest.mark.parametrize("masked_groups", ["-inf", "zero"])
    def test_groups(self, method: str, masked_groups: str, worker: Worker, device: str) -> None:
        for experts_, groups, best in ((128, 8, 4), (24, 3, 2), (6, 6, 4)):
            problem = RouteProblem(
                num_tokens=20,
                num_experts=experts_,
                top_k=4,
                method=method,
                bias=True,
                num_groups=groups,
                topk_groups=best,
                masked_groups=masked_groups,
                regime="negative_scores",
            )
            verdict = ask(worker, device, problem)
            assert verdict.status == "PASS", verdict

    @pytest.mark.parametrize("rule", RULES)
    def test_rules(self, rule: str, worker: Worker, device: str) -> None:
        base = RouteProblem(num_tokens=37, num_experts=60, top_k=6, method="sigmoid_renorm")
        for dtype, regime in (
            ("float32", "faint_scores"),
            ("bfloat16", "iid"),
            ("float32", "ties"),
        ):
            problem = replace(base, **RULES[rule], dtype=dtype, regime=regime, scaling_factor=2.5)
            verdict = ask(worker, device, problem)
            assert verdict.status == "PASS", verdict


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
def test_pairs_are_sorted_by_expert_and_token() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SORTS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_blocks_are_enough_whatever_the_experts() -> None:
    assert most_blocks(1, 8, 16) == 1
    assert most_blocks(16, 8, 16) == 8  # one block an expert, none of them full
    assert most_blocks(65536, 128, 128) == 512 + 127
    for pairs, found, m in ((100, 7, 16), (33, 3, 32), (5, 200, 64)):
        # The most blocks: one pair in each but the first expert.
        others = min(found, pairs) - 1
        worst = -(-(pairs - others) // m) + others
        assert worst <= most_blocks(pairs, found, m) <= pairs
