"""Narrowing finds kernels of a narrow set of problems, whatever their refusals say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.reference import Problem

Rule = Callable[[Any], bool]
Draw = Callable[[Axes, int], list[Any]]
MOST_ASKED = 150_000
"""Questions to an implementation that supports nothing, each of a tenth of a millisecond."""
FEW_ASKED = 12_500
"""Most questions to a kernel of quantised operands: of each, a start of a run has several."""
WORK = 400_000
LONG = "we are sorry, but this kernel is made for one model"

EXPERTS: dict[str, Rule] = {
    "aligned": lambda p: not (p.hidden % 128 or p.inter % 128 or p.num_experts % 8)
    and p.top_k == 8,
    "quantised only": lambda p: not (p.hidden % 128 or p.inter % 128 or p.num_experts % 8)
    and p.top_k == 8 and p.quantized == "fp8_block" and p.quantized_hidden,
    "of one layer": lambda p: not p.hidden % 256 and p.top_k == 4 and p.biases
    and p.activation == "swiglu_oai" and p.num_experts >= 32,
    "two numbers": lambda p: (p.top_k, p.num_experts) == (6, 64),
    "on the input": lambda p: (p.top_k, p.num_experts) == (1, 16) and p.weights_on_input
    and p.dtype == "bfloat16",
    "whole tiles of tokens": lambda p: p.num_tokens > 0 and not p.num_tokens % 64
    and not p.hidden % 512 and p.dtype == "float16",
    "interleaved codes": lambda p: p.quantized == "mxfp4" and p.quantized_hidden
    and p.interleaved,
    "a rank's": lambda p: p.expert_parallel and (p.top_k, p.num_experts) == (8, 256),
}  # fmt: skip
ROUTES: dict[str, Rule] = {
    "groups of one model": lambda p: p.method == "deepseek_v3" and p.bias
    and (p.num_experts, p.top_k, p.num_groups, p.topk_groups) == (256, 8, 8, 4),
    "scaled": lambda p: (p.num_experts, p.top_k, p.scaling_factor) == (128, 8, 2.5),
    "scaled and biased": lambda p: p.method == "deepseek_v3" and p.bias
    and (p.num_experts, p.top_k) == (64, 6) and p.scaling_factor != 1,
    "many": lambda p: p.num_experts >= 256 and p.top_k >= 8 and p.method == "sigmoid_renorm"
    and p.dtype == "bfloat16",
}  # fmt: skip
ATTENTION: dict[str, Rule] = {
    "large groups": lambda p: p.page_size == 64 and p.head_dim_qk == p.head_dim_vo == 128
    and p.group_size >= 16,
    "FP8 queries in groups": lambda p: p.page_size == 64 and p.head_dim_qk == 128
    and p.group_size == 16 and p.kv_cache == "float8_e4m3fn" and p.q_dtype != "",
    "latent": lambda p: p.values_in_keys and p.group_size == 128 and p.dtype == "bfloat16"
    and p.page_size == 64,
    "128 latent heads": lambda p: p.values_in_keys and p.group_size == 128
    and p.head_dim_qk == 576,
    "sinks and a window": lambda p: p.head_dim_qk == p.head_dim_vo == 64 and p.group_size == 8
    and p.sinks and p.window_left == 127 and p.dtype == "bfloat16",
    "heads of one rank": lambda p: (p.num_kv_heads, p.group_size, p.page_size) == (8, 4, 16)
    and p.kv_layout == "HND" and p.causal,
    "a window and heads": lambda p: p.window_left > 0 and p.causal and not p.page_size % 64
    and p.dtype == "float16" and not p.num_kv_heads % 8,
}  # fmt: skip
CASES = [
    pytest.param(operation, rule, id=f"{operation}-{name}")
    for operation, rules in (("moe", EXPERTS), ("route", ROUTES), ("paged_attention", ATTENTION))
    for name, rule in rules.items()
]


def refusing(rule: Rule, asked: list[int], reason: str = "unsupported") -> Any:  # noqa: ANN401
    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        asked.append(len(problems))
        return [None if rule(each) else Refusal(reason) for each in problems]

    return probe


@pytest.mark.parametrize(("operation", "rule"), CASES)
def test_a_kernel_of_uncommon_values_is_found_by_no_sentence(
    drawn: Draw, operation: str, rule: Rule
) -> None:
    asked: list[int] = []
    axes = narrow(operation, refusing(rule, asked), WORK)
    assert axes is not None
    assert sum(asked) < MOST_ASKED
    found = drawn(axes, 40)
    assert sum(map(rule, found)) > 0.8 * len(found)


@pytest.mark.parametrize("operation", ["moe", "route"])
def test_what_is_found_does_not_depend_on_what_a_refusal_says(operation: str) -> None:
    rule = (EXPERTS if operation == "moe" else ROUTES)[
        "many" if operation == "route" else "aligned"
    ]
    said = [narrow(operation, refusing(rule, [], reason), WORK) for reason in ("no", LONG)]
    assert said[0] is not None
    assert said[1] is not None
    assert said[0].values == said[1].values


@pytest.mark.parametrize("operation", ["moe", "route", "paged_attention"])
def test_a_kernel_that_supports_nothing_is_asked_often_but_not_for_ever(operation: str) -> None:
    asked: list[int] = []
    assert narrow(operation, refusing(lambda _: False, asked), WORK) is None
    assert sum(asked) < MOST_ASKED


def test_quantised_operands_are_asked_about_before_other_uncommon_values() -> None:
    asked: list[int] = []
    assert narrow("moe", refusing(EXPERTS["quantised only"], asked), WORK) is not None
    assert sum(asked) < FEW_ASKED


def test_the_start_is_the_simplest_of_its_kind() -> None:
    axes = narrow("moe", refusing(EXPERTS["aligned"], []), WORK)
    assert axes is not None
    assert axes.simplest["sizes"] == (128, 128)
    assert axes.simplest["num_experts"] == 8
    assert axes.allows("top_k") == (8,)
    assert all(number % 8 == 0 for number in axes.allows("num_experts"))


def test_heads_that_are_dear_have_batches_of_several_requests(drawn: Draw) -> None:
    of_many_heads = ATTENTION["128 latent heads"]
    axes = narrow("paged_attention", refusing(of_many_heads, []), WORK)
    assert axes is not None
    found = drawn(axes, 150)
    assert sum(sum(keys > 0 for keys in each.seq_lens) > 1 for each in found) > 8
    assert sum(each.num_pages > each.num_requests for each in found) > 8
