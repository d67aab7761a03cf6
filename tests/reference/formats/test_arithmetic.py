"""What a kernel rounds, and what each choice adds to the bound."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    compare_routing,
    materialise,
    oracle,
    route,
)
from kernelproof.reference.attention.error_terms import TANH
from kernelproof.reference.attention.merge import merge_error_bound
from kernelproof.reference.formats.arithmetic import CHOICES, FORMATS

PROBLEM = AttentionProblem(
    query_lens=(3, 1),
    seq_lens=(40, 90),
    num_kv_heads=2,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="float16",
    page_size=16,
    causal=True,
    logits_soft_cap=5.0,
)
PLAIN = Arithmetic(probabilities="inputs")


def bounds(arithmetic: Arithmetic, **fields: object) -> tuple[torch.Tensor, torch.Tensor]:
    inputs: Any = materialise(replace(PROBLEM, **fields))  # type: ignore[arg-type]
    bounded = oracle.bounded_attention(inputs, arithmetic)
    return bounded.bound.out, bounded.bound.lse


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


def test_parts_that_are_merged_in_steps_are_rounded_twice_where_there_are_many_keys() -> None:
    once = replace(PLAIN, partial_outputs=True)
    (out, lse), (more_out, same_lse) = bounds(once), bounds(replace(once, merged_outputs=40))
    assert torch.equal(same_lse, lse)
    assert torch.equal(more_out[:3], out[:3]), "40 keys"
    twice = more_out[3] - out[3]
    assert torch.allclose(twice, out[3] - bounds(PLAIN)[0][3])
    assert (twice > 0).all()


def split_decode(inputs: Any, part: int, rows: int) -> torch.Tensor:  # noqa: ANN401
    """Decode in float64 but for what split-KV stores: each part, and each row of threads."""
    dtype = inputs.q.dtype
    slots = inputs.metadata.paged_kv_indices.long()  # a key a page
    k, v = (cache[slots, 0, 0].double() for cache in (inputs.k_cache, inputs.v_cache))
    logits = inputs.q[0].double() @ k.T * inputs.sm_scale

    def merged(states: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        lses = torch.stack([lse for _, lse in states])
        weights = torch.softmax(lses, dim=0).unsqueeze(-1)
        out = (weights * torch.stack([out for out, _ in states])).sum(0)
        return out.to(dtype).double(), lses.logsumexp(0)

    states: list[Any] = []
    for start in range(0, len(k), part):
        some = logits[:, start : start + part]
        states.append(merged([(some.softmax(-1) @ v[start : start + part], some.logsumexp(-1))]))
    return merged([merged(states[row::rows]) for row in range(rows)])[0][None]  # type: ignore[misc]


def test_split_kv_as_a_gpu_did_it_is_outside_of_the_bound_of_one_rounding() -> None:
    """22 parts on 16 rows of threads; out[0, 3, 14] is an H200's, of the first seed."""
    problem = AttentionProblem(
        seq_lens=(2763,),
        group_size=4,
        head_dim_qk=64,
        head_dim_vo=64,
        dtype="float16",
        regime="dominant_key",
    )
    assert split_decode(materialise(problem), part=128, rows=16)[0, 3, 14] == 2.06640625
    # Of the first seed the bound holds by what a sum in float32 may lose besides.
    inputs: Any = materialise(replace(problem, seed=9))
    out = split_decode(inputs, part=128, rows=16)
    once = Arithmetic(partial_outputs=True, tanh="approximate")
    ratios = []
    for arithmetic in (once, replace(once, merged_outputs=260)):
        bounded = oracle.bounded_attention(inputs, arithmetic)
        ratios.append(float(((out - bounded.expected.out).abs() / bounded.bound.out).max()))
    assert ratios[0] == pytest.approx(1.07049, abs=1e-4)
    assert ratios[1] < 0.75


def test_a_fused_exponent_shows_on_the_exact_grid_where_sums_are_not_of_rounded_numbers() -> None:
    """FA2 with 512 channels: an H200 was off by a unit in 422 of 512 elements, as here."""
    problem = AttentionProblem(
        head_dim_qk=512,
        head_dim_vo=512,
        dtype="float16",
        kv_cache="float8_e4m3fn",
        window_left=0,
        regime="exact_grid",
        seed=4,
    )
    inputs: Any = materialise(problem)
    slot = int(inputs.metadata.paged_kv_indices[0])
    logit = (inputs.q[0, 0].float() * inputs.k_cache[slot, 0, 0].float()).sum()
    scale = torch.tensor(inputs.sm_scale, dtype=torch.float32) * math.log2(math.e)
    rounded = logit * scale
    exponent = logit.double() * scale.double() - rounded.double()  # a fused multiply-add
    share = torch.exp2(exponent.float())
    bounded = oracle.bounded_attention(inputs, Arithmetic(probabilities="inputs", exponent="fused"))
    expected = bounded.expected.out
    out = (expected.float() * share.half().float() / share).half().double()
    assert int((out != expected).sum()) == 422
    assert out[0, 0, 0] == 9.0078125
    assert ((out - expected).abs() <= bounded.bound.out).all()
    # FA2 divides by the rounded number itself elsewhere.
    assert torch.equal(
        expected.float() * share.half().float() / share.half().float(), expected.float()
    )


def test_an_approximate_tanh_counts_with_a_soft_cap_alone() -> None:
    rough = replace(PLAIN, tanh="approximate")
    assert (bounds(rough)[1] > bounds(PLAIN)[1]).all()
    assert (bounds(rough)[1] - bounds(PLAIN)[1]).max() < 3 * TANH * 5.0
    for one, other in zip(
        bounds(rough, logits_soft_cap=0.0), bounds(PLAIN, logits_soft_cap=0.0), strict=True
    ):
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
        ({"merged_outputs": 9}, "merged_outputs is 9; it must be a number of keys, and 0 without"),
        ({"merged_outputs": -1, "partial_outputs": True}, "merged_outputs is -1; it must be"),
    ],
)
def test_an_unknown_choice_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Arithmetic.{said}"):
        Arithmetic(**fields)


def test_what_is_no_arithmetic_is_refused() -> None:
    message = "arithmetic is 'float32'; it must be an Arithmetic, or None"
    problem = AttentionProblem(seq_lens=(3,))
    with pytest.raises(ValueError, match=message):
        oracle.bounded_attention(materialise(problem), "float32")  # type: ignore[arg-type]
    routing = route(torch.zeros(1, 4), 2)
    with pytest.raises(ValueError, match=message):
        compare_routing(routing, torch.zeros(1, 4), 2, arithmetic="float32")  # type: ignore[arg-type]


def test_the_documentation_has_every_field_and_every_value(repository: Path) -> None:
    page = (repository / "docs" / "error-bounds.md").read_text(encoding="utf-8")
    formats = next(line for line in page.split("\n\n") if "FORMAT is one of" in line)
    table = page.partition("| field | value | what |\n|---|---|---|\n")[2].partition("\n\n")[0]
    found: dict[str, set[Any]] = {}
    name = ""
    for row in table.splitlines():
        field, values = row.split("|")[1:3]
        name = field.strip(" `") or name
        named = re.findall(r"`([^`]+)`", values)
        found.setdefault(name, set()).update(map(ast.literal_eval, named))
        if "FORMAT" in values:
            found[name] |= set(map(ast.literal_eval, re.findall(r'"\w+"', formats)))
    booleans: dict[str, tuple[Any, ...]] = {
        "partial_outputs": (False, True),
        "merged_outputs": (0,),
    }
    wanted = {**FORMATS, **CHOICES, **booleans}
    assert list(found)
    assert found == {each: set(values) for each, values in wanted.items()}
    assert set(wanted) == {each.name for each in fields(Arithmetic)}
    for each, known in found.items():  # a value that is documented is taken
        for value in known:
            replace(Arithmetic(), **{each: value})
