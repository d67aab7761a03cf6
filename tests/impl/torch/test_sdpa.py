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
    query_lens=(3, 1, 0, 2),
    seq_lens=(5, 70, 2, 2),
    num_kv_heads=2,
    group_size=2,
    causal=True,
    page_size=4,
)


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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"v_scale": 0.5}, "v_scale 0.5 on a float16 output would round it twice"),
        ({"v_scale": 0.5, "dtype": "bfloat16"}, ""),
        ({"v_scale": 2.0}, "v_scale 2.0 on a float16 output would round it twice"),
        ({"v_scale": 2.0, "dtype": "bfloat16"}, ""),
        ({"output_divisor": 2.0}, "output_divisor 2.0 would round a float16 output twice"),
        ({"output_divisor": 2.0, "dtype": "float32"}, ""),
        ({"output_divisor": 0.5}, "output_divisor 0.5 would round a float16 output twice"),
    ],
)
def test_nothing_multiplies_an_output_of_float16_which_may_be_subnormal(
    fields: dict[str, Any], said: str
) -> None:
    problem = AttentionProblem(**{"dtype": "float16", **fields})
    why = find_implementation("torch-sdpa-paged").refusal(problem, Target.here("cpu"))
    assert (why or "") == said
