"""A kernel may round a cache's keys and values to the queries' dtype at any place of a scale."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded.decoding import widened
from kernelproof.properties.seeded.kernels import attend
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import Arithmetic, AttentionProblem
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

TARGET, PARITY, QUICK = Target.here("cpu"), find_law("parity"), PROFILES["quick"]
PROBLEMS = 300
"""Problems of int8 caches under queries of 16 bits."""
HALVES = ("float16", "bfloat16")


class _Anywhere:
    def stage(self, name: str) -> nullcontext[None]:
        del name
        return nullcontext()


def scaled_before(codes: torch.Tensor, tokens: torch.Tensor, scale: float, dtype: Any) -> Any:  # noqa: ANN401
    return (codes * tokens * scale).to(dtype).float()


def scales_first(codes: torch.Tensor, tokens: torch.Tensor, scale: float, dtype: Any) -> Any:  # noqa: ANN401
    return (codes * (tokens * scale)).to(dtype).float()


def scaled_after(codes: torch.Tensor, tokens: torch.Tensor, scale: float, dtype: Any) -> Any:  # noqa: ANN401
    return (codes * tokens).to(dtype).float() * scale


def scaled_in_dtype(codes: torch.Tensor, tokens: torch.Tensor, scale: float, dtype: Any) -> Any:  # noqa: ANN401
    return ((codes * tokens).to(dtype) * scale).float()


def verdict(subject: Subject, problem: AttentionProblem) -> Verdict:
    try:
        return PARITY.check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize(
    "place", [scaled_before, scales_first, scaled_after, scaled_in_dtype], ids=lambda f: f.__name__
)
def test_an_int8_cache_may_be_rounded_at_any_place_of_its_scale(place: Any) -> None:  # noqa: ANN401
    def dequantise(inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401
        plain = widened(inputs)
        if inputs.kv_cache_sf is not None and inputs.k_cache.dtype == torch.int8:
            keys, values = (
                place(codes.float(), tokens, scale, inputs.q.dtype)
                for codes, tokens, scale in zip(
                    (inputs.k_cache, inputs.v_cache),
                    inputs.kv_cache_sf,
                    (inputs.k_scale, inputs.v_scale),
                    strict=True,
                )
            )
            plain = replace(plain, k_cache=keys, v_cache=values, k_scale=1.0, v_scale=1.0)
        return attend(plain)

    made = implementation(
        "paged_attention",
        name=f"dequantise-{place.__name__}",
        features=("per_token_head_kv",),
        arithmetic=Arithmetic(dequantized="inputs"),
    )(dequantise)
    axes = narrow(
        made.operation, lambda asked: [made.refusal(each, TARGET) for each in asked], QUICK.max_work
    )
    assert axes is not None
    caches = tuple(pair for pair in axes.allows("caches") if pair[0].startswith("int8"))
    axes = replace(axes, values={**axes.values, "caches": caches, "dtype": HALVES})
    subject = Subject(made, TARGET, _Anywhere())
    drawn = [
        each
        for each in draw_problems(axes, QUICK, 5, PROBLEMS)
        if isinstance(each, AttentionProblem) and each.kv_cache
    ]
    assert sum(each.k_scale == 1.25 for each in drawn) > PROBLEMS // 40
    accused = [(each, said) for each in drawn if (said := verdict(subject, each)).bad]
    assert accused == []
