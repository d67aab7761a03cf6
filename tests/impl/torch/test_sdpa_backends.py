"""torch's SDPA backend by backend: what each refuses, and rows without keys as it leaves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.torch import sdpa_backends
from kernelproof.reference import AttentionProblem, materialise, oracle
from kernelproof.reference.tensors.inputs import RaggedAttentionInputs

CPU, H100 = Target.here("cpu"), Target(sm=90, device="cuda", torch="2.11.0")
NAMES = tuple(f"torch-sdpa-{name}" for name in sdpa_backends.BACKENDS)
ROWS = AttentionProblem(
    "ragged_attention",
    query_lens=(5, 2, 0, 3),
    seq_lens=(3, 7, 2, 0),
    num_kv_heads=2,
    group_size=2,
    causal=True,
    dtype="bfloat16",
)


@pytest.mark.parametrize("name", ["default", "math", "flash"])
@pytest.mark.parametrize(
    "changes", [{}, {"window_left": 1}, {"causal": False}, {"seq_lens": (5, 2, 0, 3)}], ids=str
)
def test_backends_of_a_cpu_are_right(name: str, changes: dict[str, Any]) -> None:
    found, problem = find_implementation(f"torch-sdpa-{name}"), replace(ROWS, **changes)
    assert (found.refusal(problem, CPU) is None) == (name != "default")
    inputs = materialise(problem)
    assert isinstance(inputs, RaggedAttentionInputs)
    out, lse = found.function(inputs)
    assert lse is None
    assert torch.allclose(out.double(), oracle.attention(inputs).out, rtol=2**-6, atol=2**-7)


def test_rows_without_keys_are_what_torch_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        del k
        return v.mean(dim=2, keepdim=True).repeat_interleave(2, dim=1).expand_as(q)

    monkeypatch.setattr(sdpa_backends, "scaled_dot_product_attention", mean)
    inputs = materialise(ROWS)
    assert isinstance(inputs, RaggedAttentionInputs)
    for name in NAMES[:3]:
        out, _ = find_implementation(name).function(inputs)
        expected = inputs.v[:3].mean(dim=0).repeat_interleave(2, dim=0)
        assert torch.equal(out[0], expected)  # sees no key of three
        assert not out[-3:].any()  # there is no call without keys


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("efficient", "torch has no efficient backend on a CPU"),
        ("cudnn", "torch has no cudnn backend on a CPU"),
        ("default", "on a CPU torch chooses math or flash"),
    ],
)
def test_what_is_not_judged_on_a_cpu_says_so(name: str, why: str) -> None:
    refusal = find_implementation(f"torch-sdpa-{name}").refusal(ROWS, CPU)
    assert refusal is not None
    assert (refusal.code, str(refusal)) == ("device", why)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("flash", {"dtype": "float32"}, "16 bits"),
        ("flash", {"window_left": 3}, "no mask"),
        ("flash", {"head_dim_vo": 8}, "one head dim"),
        ("cudnn", {"dtype": "float32"}, "16 bits"),
        ("cudnn", {"seq_lens": (3, 1, 2, 0)}, "single key"),
        ("cudnn", {"head_dim_qk": 12}, "multiples of 8"),
        ("cudnn", {"head_dim_qk": 264}, "at most 256"),
        ("efficient", {"head_dim_vo": 20}, "multiples of 8"),
        ("default", {"sinks": True}, "sinks"),
        ("math", {"logits_soft_cap": 5.0}, "soft cap"),
        ("math", {"v_scale": 1.25}, "twice"),
        ("math", {"v_scale": 0.5, "dtype": "float16"}, "twice"),
    ],
)
def test_what_a_gpus_backends_refuse(name: str, changes: dict[str, Any], why: str) -> None:
    found = find_implementation(f"torch-sdpa-{name}")
    assert found.refusal(ROWS, H100) is None
    assert why in str(found.refusal(replace(ROWS, **changes), H100))


def test_older_chips_lack_flash_attention_and_cudnn() -> None:
    turing = Target(sm=75, device="cuda", torch="2.11.0")
    refused = [n for n in NAMES if find_implementation(n).refusal(ROWS, turing) is not None]
    assert refused == ["torch-sdpa-flash", "torch-sdpa-cudnn"]
