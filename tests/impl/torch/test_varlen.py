"""torch's varlen_attn: each argument arrives, as a stand-in for a GPU finds, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.reference import AttentionProblem, materialise, oracle, ragged_attention
from kernelproof.reference.tensors.inputs import RaggedAttentionInputs

MODULE = "torch.nn.attention.varlen"
MIXED = AttentionProblem(
    operation="ragged_attention",
    query_lens=(3, 1, 0, 2),
    seq_lens=(5, 7, 2, 2),
    num_kv_heads=2,
    group_size=2,
    dtype="bfloat16",
    v_scale=2.0,
    k_scale=0.5,
    strided_q=True,
)
KERNEL = find_implementation("torch-varlen-attn")
GPU = replace(Target.here("cpu"), device="cuda", sm=90)


@pytest.fixture(autouse=True)
def _varlen() -> None:
    """Import it for a test only: it brings torch's compiler, 1.7 s wherever tests are collected."""
    pytest.importorskip(MODULE)


def stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,  # noqa: ANN401
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert return_aux.lse
    assert enable_gqa
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    found = ragged_attention(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        causal=False,
        sm_scale=scale,
        window_left=window_size[0],
        window_right=window_size[1],
    )
    return found.out.to(query.dtype), found.lse.T.float().contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_left": 1},
        {"window_left": 1, "window_right": 0, "sm_scale": 0.25},
    ],
    ids=str,
)
def test_each_option_arrives(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.varlen_attn", stand_in)
    problem = replace(MIXED, **options)
    assert KERNEL.refusal(problem, GPU) is None
    inputs = materialise(problem)
    assert isinstance(inputs, RaggedAttentionInputs)
    out, lse = KERNEL.function(inputs)
    expected = oracle.attention(inputs)
    assert torch.allclose(out.double(), expected.out, rtol=8e-3, atol=8e-3)
    assert torch.allclose(lse.double(), expected.lse, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "16 bits only"),
        ({"head_dim_vo": 32}, "one head dim"),
        ({"head_dim_qk": 20, "head_dim_vo": 20}, "multiples of 8"),
        ({"head_dim_qk": 512, "head_dim_vo": 512}, "at most 256"),
        ({"logits_soft_cap": 1.0}, "no logits soft cap"),
        ({"sinks": True}, "no attention sinks"),
        ({"v_scale": 1.25}, "round out twice"),
        ({"query_lens": (0, 0, 0, 0)}, "without a token"),
        ({"seq_lens": (5, 7, 2, 0)}, "without keys"),
        ({"alibi": True}, "the feature alibi"),
    ],
    ids=str,
)
def test_what_it_does_not_claim(changes: dict[str, Any], said: str) -> None:
    assert said in str(KERNEL.refusal(replace(MIXED, **changes), GPU))


def test_a_cpu_is_refused() -> None:
    refusal = KERNEL.refusal(MIXED, Target.here("cpu"))
    assert refusal is not None
    assert (refusal.code, str(refusal)) == (
        "device",
        "varlen_attn is FlashAttention, which runs on a GPU only",
    )


def test_a_release_without_a_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.varlen_attn", lambda: None)
    assert KERNEL.refusal(MIXED, GPU) == "varlen_attn of this torch takes no scale"
