"""What a kernel rounds, and what each choice adds to the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import Arithmetic, AttentionProblem, materialise, oracle
from kernelproof.reference.error_terms import TANH
from kernelproof.reference.merge import merge_error_bound

PROBLEM = AttentionProblem(
    query_lens=(3, 1), seq_lens=(40, 90), num_kv_heads=2, head_dim_qk=64, head_dim_vo=64,
    dtype="float16", page_size=16, causal=True, logits_soft_cap=5.0,
)  # fmt: skip
PLAIN = Arithmetic(probabilities="inputs")


def bounds(arithmetic: Arithmetic, **fields: object) -> tuple[torch.Tensor, torch.Tensor]:
    inputs: Any = materialise(replace(PROBLEM, **fields))  # type: ignore[arg-type]
    judged = oracle.judge_attention(inputs, arithmetic)
    return judged.bound.out, judged.bound.lse


def test_a_row_sum_of_rounded_probabilities_costs_the_lse_their_roundoff() -> None:
    out, lse = bounds(PLAIN)
    rounded_out, rounded_lse = bounds(replace(PLAIN, row_sum="probabilities"))
    assert torch.allclose(rounded_lse - lse, torch.full_like(lse, 2.0**-11))
    assert not torch.equal(rounded_out, out)
    # Where nothing is rounded there is nothing to sum otherwise.
    unrounded = Arithmetic(row_sum="probabilities")
    assert torch.equal(bounds(unrounded)[1], bounds(Arithmetic())[1])


def test_partial_outputs_are_rounded_once_more_and_the_lse_is_not() -> None:
    out, lse = bounds(PLAIN)
    more_out, same_lse = bounds(replace(PLAIN, partial_outputs=True))
    assert torch.equal(same_lse, lse)
    assert (more_out > out).all()
    assert (more_out - out).max() < 2.0**-9  # a roundoff of values around 1


def test_an_approximate_tanh_counts_with_a_soft_cap_alone() -> None:
    rough = replace(PLAIN, tanh="approximate")
    assert (bounds(rough)[1] > bounds(PLAIN)[1]).all()
    assert (bounds(rough)[1] - bounds(PLAIN)[1]).max() < 3 * TANH * 5.0
    for one, other in zip(bounds(rough, logits_soft_cap=0.0), bounds(PLAIN, logits_soft_cap=0.0),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


def test_products_in_fixed_point_count_with_fp8_queries_alone() -> None:
    rough = replace(PLAIN, fp8_products="fixed_point")
    fp8 = {"kv_cache": "float8_e4m3fn", "q_dtype": "float8_e4m3fn", "logits_soft_cap": 0.0}
    (out, lse), (more_out, more_lse) = bounds(PLAIN, **fp8), bounds(rough, **fp8)
    assert (more_out > out).all()
    assert (more_lse > lse).all()
    assert (more_lse - lse).max() < 0.1
    for one, other in zip(bounds(rough), bounds(PLAIN), strict=True):
        assert torch.equal(one, other)


def test_a_merge_in_steps_is_rounded_in_between() -> None:
    outs, lses = torch.randn(5, 3, 2, 8, dtype=torch.float16), torch.randn(5, 3, 2)
    once = merge_error_bound(outs, lses, arithmetic=Arithmetic())
    twice = merge_error_bound(outs, lses, arithmetic=Arithmetic(partial_outputs=True))
    assert (twice.out > once.out).all()
    assert torch.equal(twice.lse, once.lse)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"accumulate": "float4"}, "accumulate is 'float4'; known formats"),
        ({"row_sum": "both"}, "row_sum is 'both'; it must be one of"),
        ({"tanh": "fast"}, "tanh is 'fast'; it must be one of"),
        ({"fp8_products": "maybe"}, "fp8_products is 'maybe'; it must be one of"),
        ({"exponent": "maybe"}, "exponent is 'maybe'; it must be one of"),
    ],
)
def test_an_unknown_choice_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Arithmetic.{said}"):
        Arithmetic(**fields)
