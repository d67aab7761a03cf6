"""torch's scaled_dot_product_attention: a bias is added to logits in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.reference import AttentionProblem, materialise, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs

MIXED = AttentionProblem(
    query_lens=(3, 1, 0, 2), seq_lens=(5, 70, 2, 2), num_kv_heads=2, group_size=2, causal=True,
    page_size=4,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{"logits_bias": "dense"}, {"alibi": True}, {"alibi": True, "alibi_function": "sqrt"}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_a_bias_of_16_bit_operands_is_rounded_once(
    kind: str, options: dict[str, Any], dtype: str
) -> None:
    found = find_implementation(f"torch-sdpa-{kind}")
    pages = {"page_size": 1} if kind == "ragged" else {}
    problem = replace(
        MIXED, **{"operation": f"{kind}_attention", "dtype": dtype, **pages, **options}
    )
    assert found.refusal(problem, Target.here("cpu")) is None
    inputs = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs | RaggedAttentionInputs)
    out, _ = found.function(inputs)
    rounding = torch.finfo(getattr(torch, dtype)).eps / 2
    expected = oracle.attention(inputs).out
    assert torch.allclose(out.double(), expected, rtol=1.01 * rounding, atol=1e-5)
