"""Adapters to engines' experts and routers: what they claim, and real files judged by parity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import laws_of
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import HANDLER
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import BatchedMoEProblem, MoEProblem, Problem, RouteProblem

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

ENGINES = Path(__file__).parents[3] / ".engines"
NEWEST = ("vllm-0.33.0", "sglang-0.5.23", "lmdeploy-0.18.0", "liger-kernel-0.8.5")
EXPERTS = MoEProblem(num_tokens=7, hidden=32, inter=64, num_experts=4, top_k=2)
FP8 = replace(EXPERTS, quantized="fp8_channel", quantized_hidden=True)
OF_A_TENSOR = replace(FP8, quantized="fp8_tensor", dtype="float16", weights_on_input=True)
BLOCKS = replace(FP8, quantized="fp8_block", hidden=144, inter=136, biases=True)
BLOCKS_OF_ROWS = replace(BLOCKS, hidden=160, inter=144)
SHARD = replace(BLOCKS, num_tokens=40, local_experts=2, expert_offset=1)
INTEGERS = replace(FP8, quantized="int8_channel", dtype="float16", biases=True)
W8A16 = replace(INTEGERS, quantized_hidden=False, weights_on_input=True, biases=False)
BATCHED = BatchedMoEProblem(counts=(3, 0, 5), most_rows=8, hidden=32, inter=64)
INT4 = replace(EXPERTS, quantized="int4_g32", dtype="bfloat16", num_tokens=20)
ROUTED = RouteProblem(num_tokens=5, num_experts=20, top_k=6, method="renormalize")
BIASED = replace(ROUTED, num_experts=32, method="deepseek_v3", bias=True, scaling_factor=2.5)
GROUPED = replace(BIASED, num_groups=4, topk_groups=2)
ZEROED = replace(GROUPED, masked_groups="zero")
INKLING = replace(BIASED, shared_experts=2, renormalise_floor=0.0)
HASHED = replace(
    ROUTED, method="deepseek_v4", hash_vocabulary=50, renormalise_floor=0.0, scaling_factor=1.5
)
OF_192 = replace(BIASED, num_experts=192, top_k=8)
OF_384 = replace(BIASED, num_experts=384, method="deepseek_v4")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Lend a worker that loads the engines' files."""
    folders = [str(ENGINES / name) for name in NEWEST if (ENGINES / name).is_dir()]
    if not folders:
        pytest.skip("the engines' files are not there: `make engines` fetches them")
    environment = {"TRITON_INTERPRET": "1", FROM: ":".join(folders)}
    preload = ("torch", "kernelproof.properties.worker.tasks")
    with (
        WorkerPool(HANDLER, preload=preload, environment=environment, standby=False) as pool,
        pool.lease() as lent,
    ):
        yield lent


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm-fused-moe-td", EXPERTS),
        ("vllm-fused-moe-td", replace(EXPERTS, num_tokens=1, num_experts=8, biases=True)),
        *(
            (name, problem)
            for name in ("vllm-fused-moe-fp8", "vllm-fused-moe-fp8-swap-ab")
            for problem in (FP8, OF_A_TENSOR, BLOCKS, SHARD)
        ),
        *(
            (name, problem)
            for name in ("vllm-fused-moe-int8", "sglang-fused-moe-int8")
            for problem in (INTEGERS, W8A16, replace(SHARD, quantized="int8_block"))
        ),
        ("vllm-fused-moe-int8", replace(W8A16, quantized="int8_tensor")),
        *(
            (name, problem)
            for name in ("vllm-fused-moe-wna16", "sglang-fused-moe-wna16")
            for problem in (
                INT4,
                replace(
                    INT4, quantized="int4_g128", hidden=160, num_tokens=1, weights_on_input=True
                ),
                replace(INT4, quantized="int4_zp_g32", local_experts=2, expert_offset=1),
                replace(INT4, quantized="int8_block", dtype="float16", hidden=144),
                replace(INT4, quantized="int8_block", num_experts=5),
            )
        ),
        ("vllm-batched-moe-td", BATCHED),
        ("vllm-batched-moe-td", replace(BATCHED, hidden=40, dtype="float16")),
        ("liger-fused-moe", replace(EXPERTS, num_tokens=70, top_k=3, dtype="float16")),
        ("liger-fused-moe", replace(EXPERTS, num_experts=5, assignment="duplicates", top_k=4)),
        ("lmdeploy-fused-moe-w8a8", replace(INTEGERS, biases=False)),
        ("sglang-fused-moe", replace(EXPERTS, dtype="float16", biases=True, activation="relu2")),
        ("sglang-fused-moe", replace(EXPERTS, activation="geglu_tanh", weights_on_input=True)),
        ("sglang-fused-moe", replace(SHARD, quantized="", quantized_hidden=False)),
        *(
            (name, problem)
            for name in ("sglang-fused-moe-fp8", "sglang-fused-moe-fp8-swap-ab")
            for problem in (FP8, OF_A_TENSOR, BLOCKS, SHARD)
        ),
        ("sglang-fused-moe", replace(EXPERTS, routed_scaling_factor=2.5)),
        ("sglang-fused-moe-tma", BLOCKS_OF_ROWS),
        ("sglang-fused-moe-tma", replace(BLOCKS_OF_ROWS, local_experts=2, expert_offset=1)),
        ("sglang-fused-moe-tma", replace(BLOCKS_OF_ROWS, activation="relu2", num_tokens=40)),
        *(
            (name, replace(EXPERTS, **fields))
            for name in ("lmdeploy-fused-moe", "lmdeploy-fused-moe-compact")
            for fields in (
                {"dtype": "float16", "biases": True, "activation": "relu2"},
                {"local_experts": 2, "expert_offset": 1, "num_tokens": 70},
            )
        ),
        ("lmdeploy-fused-moe-fp8-block", replace(BLOCKS, hidden=64, inter=64)),
        ("lmdeploy-fused-moe-fp8-block", replace(BLOCKS, hidden=256, inter=128, dtype="float16")),
        ("lmdeploy-fused-moe-w8a8", FP8),
        ("lmdeploy-fused-moe-w8a8", replace(FP8, local_experts=2, num_tokens=70)),
        *(
            ("sglang-moe-fused-gate", problem)
            for problem in (ROUTED, BIASED, GROUPED, OF_384, replace(ROUTED, method="sigmoid"))
        ),
        ("sglang-gemma4-routing", replace(ROUTED, dtype="float16", scaling_factor=2.5)),
        ("sglang-gemma4-routing", replace(ROUTED, expert_scales=True)),
        ("sglang-sigmoid-gate-topk-renorm", INKLING),
        ("sglang-sigmoid-gate-topk-renorm", replace(INKLING, shared_experts=0, bias=False)),
        ("sglang-hash-topk", HASHED),
        ("sglang-muse-spark-routing", BIASED),
        ("sglang-muse-spark-routing", replace(OF_192, method="renormalize_naive")),
        ("vllm-musespark1x-routing", BIASED),
        ("vllm-musespark1x-routing", replace(OF_192, method="renormalize_naive")),
        ("vllm-dsv4-topk", OF_384),
        ("vllm-dsv4-topk", replace(OF_384, num_experts=256, bias=False)),
        ("lmdeploy-noaux-tc", BIASED),
        ("lmdeploy-noaux-tc", ZEROED),
        ("lmdeploy-noaux-tc", replace(ZEROED, method="sigmoid", regime="ties")),
        ("lmdeploy-single-group-topk", OF_192),
    ],
)
def test_real_files(worker: Worker, name: str, problem: Problem) -> None:
    engine = name.partition("-")[0]
    if not any(each.startswith(engine) and (ENGINES / each).is_dir() for each in NEWEST):
        pytest.skip(f"the files of {engine} are not there: `make engines` fetches them")
    (law,) = (law.name for law in laws_of(problem.operation) if law.name.endswith("parity"))
    address = Address(BUILT_IN[name], None, "cpu")
    outcome = worker.run(address.case(law, problem), Deadlines(run=60.0))
    assert outcome.result is not None, outcome
    verdict = Verdict.from_json(outcome.result)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("vllm-fused-moe-fp8", EXPERTS, "weights are FP8"),
        ("vllm-fused-moe-fp8", replace(FP8, quantized_hidden=False), "are to be given"),
        ("vllm-fused-moe-fp8-swap-ab", replace(BLOCKS, num_tokens=65), "fewer than 64 rows"),
        ("vllm-fused-moe-td", replace(EXPERTS, inter=40), "whole tiles of 32"),
        ("vllm-fused-moe-wna16", W8A16, "int4 in groups, or int8 in blocks"),
        ("vllm-batched-moe-td", replace(BATCHED, hidden=34), "multiples of 16 bytes"),
        ("sglang-fused-moe-wna16", W8A16, "int4 in groups, or int8 in blocks"),
        ("sglang-fused-moe", replace(EXPERTS, num_tokens=0), "launches nothing"),
        ("sglang-fused-moe-fp8", EXPERTS, "weights are FP8"),
        ("sglang-fused-moe-tma", FP8, "FP8 in blocks"),
        ("sglang-fused-moe-tma", BLOCKS, "multiples of 16 bytes"),
        ("sglang-fused-moe-fp8", replace(FP8, quantized_hidden=False), "are to be given"),
        ("vllm-fused-moe-int8", EXPERTS, "weights are int8"),
        ("vllm-fused-moe-int8", replace(W8A16, quantized="int8_block"), "beside int8 only"),
        ("sglang-fused-moe-int8", EXPERTS, "weights are int8"),
        ("sglang-fused-moe-int8", replace(W8A16, quantized="int8_tensor"), "of a channel"),
        ("sglang-fused-moe-int8", replace(W8A16, quantized="int8_block"), "beside int8 only"),
        ("liger-fused-moe", replace(EXPERTS, activation="silu"), "is SwiGLU"),
        ("liger-fused-moe", replace(EXPERTS, num_tokens=0), "at least one"),
        ("lmdeploy-fused-moe", replace(EXPERTS, assignment="masked"), "never -1"),
        ("lmdeploy-fused-moe-fp8-block", FP8, "weights are fp8_block"),
        ("lmdeploy-fused-moe-w8a8", EXPERTS, "weights are codes"),
        ("lmdeploy-fused-moe-fp8-block", BLOCKS, "one power of two"),
        ("lmdeploy-fused-moe-w8a8", replace(FP8, activation="silu"), "is SwiGLU"),
        ("sglang-moe-fused-gate", replace(ROUTED, method="llama4"), "weights are scores"),
        ("sglang-moe-fused-gate", replace(ROUTED, bias=True), "a bias of its logits"),
        ("sglang-moe-fused-gate", ZEROED, "are never chosen"),
        (
            "sglang-moe-fused-gate",
            replace(GROUPED, method="sigmoid", bias=False),
            "their two best experts",
        ),
        (
            "sglang-moe-fused-gate",
            replace(GROUPED, num_groups=32, topk_groups=16),
            "two experts or",
        ),
        ("sglang-gemma4-routing", replace(ROUTED, bias=True), "there is no bias"),
        ("sglang-gemma4-routing", BIASED, "there is no bias"),
        ("sglang-gemma4-routing", replace(ROUTED, num_experts=1025), "at most 1024"),
        (
            "sglang-sigmoid-gate-topk-renorm",
            replace(GROUPED, renormalise_floor=0.0),
            "no groups of experts",
        ),
        ("sglang-sigmoid-gate-topk-renorm", BIASED, "has no floor"),
        ("sglang-sigmoid-gate-topk-renorm", replace(INKLING, top_k=7), "next power of two"),
        ("sglang-hash-topk", ROUTED, "the method is deepseek_v4"),
        ("sglang-hash-topk", replace(HASHED, hash_vocabulary=0), "those of a table"),
        ("sglang-hash-topk", replace(HASHED, renormalise_floor=1e-20), "has no floor"),
        ("sglang-sigmoid-gate-topk-renorm", replace(BIASED, dtype="float16"), "of the logits"),
        ("sglang-sigmoid-gate-topk-renorm", replace(OF_192, top_k=33), "at most 32"),
        ("sglang-muse-spark-routing", ROUTED, "the method is deepseek_v3 or"),
        ("vllm-musespark1x-routing", replace(BIASED, num_tokens=0), "nothing is launched"),
        ("vllm-dsv4-topk", replace(OF_384, num_experts=128), "256 or 384 experts"),
        ("vllm-dsv4-topk", replace(OF_384, dtype="float16"), "logits are float32"),
        ("lmdeploy-fused-moe-fp8-block", replace(BLOCKS, hidden=16, inter=16), "from 32 on"),
        ("lmdeploy-noaux-tc", ROUTED, "the method is deepseek_v3 or"),
        ("lmdeploy-noaux-tc", replace(BIASED, num_experts=96), "a power of two"),
        ("lmdeploy-noaux-tc", GROUPED, "a score of zero"),
        ("lmdeploy-noaux-tc", replace(ZEROED, num_groups=32, topk_groups=16), "two experts or"),
        ("lmdeploy-single-group-topk", BIASED, "there are 192 experts"),
    ],
)
def test_what_is_not_claimed(
    name: str, problem: Problem, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = [ENGINES / each for each in NEWEST if each.startswith(name.partition("-")[0])]
    if not found[0].is_dir():
        pytest.skip("what a release has is read from its files")
    monkeypatch.setenv(FROM, str(found[0]))
    refusal = find_implementation(name).refusal(problem, Target.here("cpu"))
    assert refusal is not None
    assert said in refusal


@pytest.mark.parametrize(
    ("name", "problem", "tokens"),
    [
        ("liger-fused-moe", EXPERTS, (7, 513, 1024, 8192, 16)),
        ("liger-fused-moe", replace(EXPERTS, top_k=1), (7, 1025, 2048, 16384, 16)),
        ("sglang-sigmoid-gate-topk-renorm", INKLING, (7, 129, 769, 1025)),
    ],
)
def test_numbers_of_tokens_that_are_compiled_for_apart_have_keys_of_their_own(
    name: str, problem: MoEProblem | RouteProblem, tokens: tuple[int, ...]
) -> None:
    key = find_implementation(name).compile_key
    assert key is not None
    keys = {key(replace(problem, num_tokens=each)) for each in tokens}
    assert len(keys) == len(tokens)
