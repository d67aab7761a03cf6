"""Kernelproof's own Triton kernels against the oracle: in the interpreter, and on a GPU if any."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import BUILT_IN, Target, UnsupportedError, find_implementation
from kernelproof.impl.triton.attention_call import check_divisor
from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    Problem,
)

OURS = sorted(name for name in BUILT_IN if name.startswith("triton-"))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

REFUSALS = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from kernelproof.impl import Target, find_implementation
from kernelproof.reference import (
    AttentionProblem, MergeProblem, MetadataProblem, MoEProblem, NormQuantizeProblem,
    QuantizeProblem, RopeAppendProblem, RouteProblem,
)
for name in {names!r}:
    found = find_implementation(name)
    problem = {{
        "merge_state": MergeProblem(),
        "build_metadata": MetadataProblem(),
        "moe": MoEProblem(),
        "route": RouteProblem(),
        "quantize": QuantizeProblem(),
        "norm_and_quantize": NormQuantizeProblem(),
        "rope_and_append": RopeAppendProblem(),
    }}.get(found.operation) or AttentionProblem(found.operation, dtype="bfloat16")
    print(found.refusal(problem, Target.here()))
"""


def refusals(blocked: str, interpret: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS.format(blocked=blocked, names=OURS)],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class TestRefusals:
    def test_all_are_registered(self) -> None:
        assert OURS == [
            "triton-append", "triton-attention", "triton-attention-graph",
            "triton-attention-split-kv", "triton-merge-state", "triton-metadata", "triton-moe",
            "triton-norm-quantize", "triton-quantize", "triton-ragged-attention",
            "triton-rope-append", "triton-route",
        ]  # fmt: skip

    def test_without_triton_all_are_unsupported_in_one_sentence(self) -> None:
        how = "python -m pip install '.[triton]' in a clone of kernelproof"
        said = f"triton cannot be imported (triton is missing): {how} brings it"
        assert refusals("triton", "1") == [said] * len(OURS)

    def test_without_the_interpreter_all_are_unsupported_on_a_cpu(self) -> None:
        said = "Triton runs on a CPU only under TRITON_INTERPRET=1, set before it is imported"
        assert refusals("nothing", "0") == [said] * len(OURS)

    def test_of_an_old_gpu(self) -> None:
        turing = Target(device="cuda", sm=75)
        reason = find_implementation("triton-attention").refusal(AttentionProblem(), turing)
        assert reason == "these Triton kernels need sm_80 or newer, not sm_75"

    @pytest.mark.parametrize("version", ["3.2.0", "3.3.0", None])
    def test_of_a_triton_without_gather(self, version: str | None) -> None:
        ampere = Target(device="cuda", sm=80, triton=version)
        reason = find_implementation("triton-moe").refusal(MoEProblem(), ampere)
        said = "sorting needs tl.gather, which Triton has from 3.3 on; this is 3.2.0"
        assert reason == (said if version == "3.2.0" else None)

    @pytest.mark.parametrize(("dim", "said"), [(20, "not 20"), (520, "not 520")])
    def test_of_head_dims(self, dim: int, said: str) -> None:
        problem = AttentionProblem(head_dim_vo=dim)
        reason = find_implementation("triton-attention").refusal(problem, Target())
        assert reason == f"head_dim_vo must be a multiple of 8 up to 512, {said}"

    def test_of_batches_too_long_to_divide_by_the_page_size(self) -> None:
        check_divisor("page_size", 16, "keys", 2**31)
        check_divisor("page_size", 48, "keys", 2**24)
        with pytest.raises(UnsupportedError, match=r"page_size 48 is no power of two: .*22369621"):
            check_divisor("page_size", 48, "keys", 2**25)


def ask(worker: Worker, device: str, name: str, law: str, problem: Problem) -> Verdict:
    payload = {
        "task": "judge", "law": law, "implementation": name, "problem": problem.to_json(),
        "device": device,
    }  # fmt: skip
    return verdict_of(worker.run(payload, Deadlines(run=60.0)))


def batch(**changes: Any) -> AttentionProblem:  # noqa: ANN401  fields of any type
    """Return a mixed batch: a decode, a prefill, no query, a chunk, and more queries than keys."""
    fields: dict[str, Any] = {
        "query_lens": (1, 5, 0, 3, 4), "seq_lens": (37, 5, 3, 9, 2), "num_kv_heads": 2,
        "group_size": 3, "page_size": 4, "page_order": 1, "dtype": "float16", **changes,
    }  # fmt: skip
    return AttentionProblem(**fields)


def long(**changes: Any) -> AttentionProblem:  # noqa: ANN401  fields of any type
    """Return requests of several blocks of keys and of rows."""
    fields: dict[str, Any] = {
        "query_lens": (70, 1), "seq_lens": (130, 100), "group_size": 2, "page_size": 16,
        "dtype": "float16", "causal": True, **changes,
    }  # fmt: skip
    return AttentionProblem(**fields)


ATTENTION = [
    batch(),
    batch(causal=True, kv_layout="HND", strided_q=True, strided_kv=True),
    batch(causal=True, window_left=2, logits_soft_cap=5.0, sinks=True, dtype="bfloat16"),
    batch(custom_mask=True, per_head_scales=True, k_scale=1.25, v_scale=0.5),
    batch(custom_mask=True, causal=True, window_left=7, sinks=True, dtype="float32"),
    batch(sinks=True, query_lens=(2, 1), seq_lens=(0, 4)),
    batch(query_lens=(3, 1), seq_lens=(0, 0), causal=True),
    batch(query_lens=(0, 0), seq_lens=(3, 0)),
    batch(query_lens=(), seq_lens=()),
    batch(shared_prefix_pages=2, seq_lens=(37, 12, 3, 9, 8)),
    batch(regime="shifted_logits", dtype="float32"),
    batch(regime="exact_grid", sm_scale=1.0, sinks=True, dtype="bfloat16"),
    batch(logits_soft_cap=30.0, sm_scale=0.05, dtype="float32"),
    batch(logits_soft_cap=1.0, sm_scale=1.0, regime="outlier_channels"),
    batch(page_size=1), batch(page_size=3), batch(page_size=256),
    long(), long(causal=False, regime="dominant_key"), long(window_left=15),
    long(window_left=40, regime="exact_grid", sm_scale=1.0), long(dtype="float32"),
    *(batch(query_lens=(1, 2), seq_lens=(33, 2), head_dim_qk=qk, head_dim_vo=vo)
      for qk, vo in ((8, 8), (24, 40), (40, 24), (80, 80), (96, 96), (192, 128), (512, 512))),
    batch(query_lens=(1,), seq_lens=(20,), head_dim_qk=512, head_dim_vo=512, dtype="float32"),
]  # fmt: skip
MANY = batch(  # more requests than are looked through at once
    query_lens=(0,) * 250 + (1,) * 9, seq_lens=(2,) * 259, num_kv_heads=1, group_size=1
)
LAWS = ["unused_memory", "inputs_unchanged", "output_buffers", "repeated_calls", "logit_shift"]


@pytest.mark.parametrize("problem", ATTENTION, ids=lambda problem: problem.id)
def test_paged_attention(problem: AttentionProblem, worker: Worker, device: str) -> None:
    verdict = ask(worker, device, "triton-attention", "parity", problem)
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("problem", ATTENTION[:20:2], ids=lambda problem: problem.id)
def test_split_kv(problem: AttentionProblem, worker: Worker, device: str) -> None:
    verdict = ask(worker, device, "triton-attention-split-kv", "parity", problem)
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("problem", ATTENTION[:9], ids=lambda problem: problem.id)
def test_ragged_attention(problem: AttentionProblem, worker: Worker, device: str) -> None:
    changes: dict[str, Any] = {
        "operation": "ragged_attention", "page_size": 1, "page_order": 0, "kv_layout": "NHD",
    }  # fmt: skip
    ragged = replace(problem, **changes)
    verdict = ask(worker, device, "triton-ragged-attention", "parity", ragged)
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("custom_mask", [False, True])
def test_many_requests(custom_mask: bool, worker: Worker, device: str) -> None:
    problem = replace(MANY, custom_mask=custom_mask)
    verdict = ask(worker, device, "triton-attention", "parity", problem)
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("law", LAWS)
def test_laws_of_attention(law: str, worker: Worker, device: str) -> None:
    for name in ("triton-attention", "triton-attention-split-kv"):
        verdict = ask(worker, device, name, law, batch(causal=True, strided_kv=True))
        assert verdict.status == "PASS", verdict


@pytest.mark.parametrize(
    "problem",
    [
        MergeProblem(num_states=1, num_tokens=3, empty="all"),
        MergeProblem(num_states=2, num_tokens=5, num_heads=3, empty="some", dtype="bfloat16"),
        MergeProblem(num_states=3, num_tokens=5, num_heads=3, regime="shifted", head_dim=80),
        MergeProblem(num_states=4, num_tokens=2, empty="all", dtype="float16"),
        MergeProblem(num_states=5, num_tokens=2, regime="exact_grid", dtype="bfloat16"),
        MergeProblem(num_states=7, num_tokens=70, num_heads=8, empty="some", head_dim=256),
        MergeProblem(num_states=7, num_tokens=0),
    ],
    ids=lambda problem: problem.id,
)
@pytest.mark.parametrize("law", ["parity", "inputs_unchanged", "output_buffers"])
def test_merge_state(law: str, problem: MergeProblem, worker: Worker, device: str) -> None:
    verdict = ask(worker, device, "triton-merge-state", law, problem)
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_layout": "HND", "strided_kv": True, "dtype": "bfloat16"},
        {"query_lens": (0, 0), "seq_lens": (3, 0)},
        {"query_lens": (), "seq_lens": ()},
        {"query_lens": (1,) * 70, "seq_lens": (5,) * 70},
        {"head_dim_qk": 24, "head_dim_vo": 40, "page_size": 1},
        {"head_dim_qk": 192, "num_kv_heads": 8, "dtype": "float32"},
    ],
)
@pytest.mark.parametrize("seed", [0, 1], ids=["seed0", "seed1"])  # one of them in place
def test_append(changes: dict[str, Any], seed: int, worker: Worker, device: str) -> None:
    fields: dict[str, Any] = {"query_lens": (2, 0, 9, 1), "seq_lens": (5, 3, 9, 1), **changes}
    problem = batch(**{"operation": "append_paged_kv", "seed": seed, **fields})
    for law in ("append_parity", "integer_inputs_unchanged"):
        verdict = ask(worker, device, "triton-append", law, problem)
        assert verdict.status == "PASS", verdict


STEPS = [
    ((1, 2, 0), (5, 40, 0)),
    ((), ()),
    ((0, 0), (0, 0)),
    ((3,) * 9, (17, 16, 15, 1, 0, 33, 4, 8, 2)),
]


METADATA_LAWS = ["metadata_parity", "metadata_fresh_buffers", "integer_inputs_unchanged"]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("law", METADATA_LAWS)
def test_metadata(law: str, page_size: int, worker: Worker, device: str) -> None:
    problem = MetadataProblem(tuple(STEPS), page_size, spare_columns=2)
    verdict = ask(worker, device, "triton-metadata", law, problem)
    assert verdict.status == "PASS", verdict


@needs_cuda
def test_metadata_never_waits_for_the_gpu(worker: Worker, device: str) -> None:
    if device == "cuda":
        problem = MetadataProblem(tuple(STEPS), 16)
        verdict = ask(worker, device, "triton-metadata", "metadata_no_host_sync", problem)
        assert verdict.status == "PASS", verdict
