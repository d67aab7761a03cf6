"""Tensors wider than the channels that count: the answer is that of tensors without padding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl.torch.moe import experts
from kernelproof.reference import MoEProblem, QuantizedMatrix, materialise, problem_from_json
from kernelproof.reference.operations import OPERATIONS

PLAIN = MoEProblem(num_tokens=5, hidden=64, inter=32, num_experts=3, top_k=2)
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biases": True, "dtype": "bfloat16"},
    "interleaved": {"interleaved": True, "biases": True},
    "no gate": {"activation": "relu2"},
    "shared": {"shared_experts": 1},
    "strided": {"strided_hidden": True},
    "norm": {"output_norm": "gain", "routed_scaling_factor": 2.5},
    "norm of gained": {"output_norm": "gain_first", "biases": True},
    "gate": {"shared_experts": 2, "shared_gate": "logits_each"},
    "identities": {"identity_experts": 8, "top_k": 3},
    **{
        name: {"quantized": name, "quantized_hidden": True}
        for name in ("mxfp4", "nvfp4", "fp8_channel", "fp8_tensor")
    },
    "fp8_block": {"quantized": "fp8_block", "quantized_hidden": True, "hidden": 136, "inter": 128},
}
WIDTHS = [(96, True), (96, False), (256, True), (256, False)]
Made = Any  # a record of moe


def made(problem: MoEProblem, **options: Any) -> Made:  # noqa: ANN401
    return materialise(problem, **options)


def answer(inputs: Made) -> torch.Tensor:
    found: torch.Tensor = OPERATIONS["moe"].answer(inputs)
    return found


def shape_of(matrix: torch.Tensor | QuantizedMatrix) -> tuple[int, ...]:
    if isinstance(matrix, torch.Tensor):
        return tuple(matrix.shape)
    return (*matrix.codes.shape[:-1], matrix.codes.shape[-1] * matrix.format.packed)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FIELDS)
def test_padding_changes_nothing(name: str, width: tuple[int, bool]) -> None:
    pad_to, pad_states = width
    narrow = replace(PLAIN, **FIELDS[name])
    if narrow.quantized == "fp8_block" and pad_to % 128:
        pad_to = 384
    wide = replace(narrow, pad_to=pad_to, pad_states=pad_states)
    inputs = made(wide)
    rows = (2 if wide.gated else 1) * wide.wide_inter
    assert wide.wide_hidden > wide.hidden
    assert shape_of(inputs.w13) == (3, rows, wide.wide_hidden)
    assert shape_of(inputs.w2) == (3, wide.wide_hidden, wide.wide_inter)
    assert shape_of(inputs.hidden) == (5, wide.wide_hidden if pad_states else wide.hidden)
    expected = answer(made(narrow))
    assert torch.equal(answer(inputs), expected)
    poisoned = made(wide, padding=math.nan)
    assert torch.equal(answer(poisoned), expected)
    found = experts(poisoned)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


def test_gates_and_ups_are_padded_each_for_themselves() -> None:
    narrow = made(replace(PLAIN, inter=2, hidden=3, biases=True))
    wide = made(replace(PLAIN, inter=2, hidden=3, biases=True, pad_to=4, pad_states=True))
    w13, b13 = wide.w13, wide.w13_bias
    assert w13.shape == (3, 8, 4)
    assert torch.equal(w13[:, :2, :3], narrow.w13[:, :2])
    assert torch.equal(w13[:, 4:6, :3], narrow.w13[:, 2:])
    assert torch.equal(b13[:, 4:6], narrow.w13_bias[:, 2:])
    assert torch.equal(wide.w2[:, :3, :2], narrow.w2)
    left = w13.clone()
    left[:, :2, :3] = left[:, 4:6, :3] = 0
    assert not left.any()
    assert not wide.hidden[:, 3].any()


def test_multiplying_the_padding_is_right_too() -> None:
    """As the tensors hold zeros there, whole tensors may be multiplied."""
    problem = replace(PLAIN, hidden=20, inter=12, pad_to=16, pad_states=True)
    inputs = made(problem)
    out = torch.zeros(5, 32, dtype=torch.float64)
    for token in range(5):
        for slot in range(2):
            expert = int(inputs.topk_ids[token, slot])
            gates, ups = (inputs.w13[expert].double() @ inputs.hidden[token].double()).chunk(2)
            middle = torch.nn.functional.silu(gates) * ups
            y = inputs.w2[expert].double() @ middle
            out[token] += y * inputs.topk_weights[token, slot].double()
    torch.testing.assert_close(out[:, :20], answer(inputs), rtol=1e-12, atol=1e-14)
    assert not out[:, 20:].any()


def test_old_problems_say_nothing_of_padding() -> None:
    assert "pad_to" not in PLAIN.to_json()
    wide = replace(PLAIN, pad_to=96)
    assert problem_from_json(wide.to_json()) == wide


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pad_states": True}, "field pad_states is True; it must be false where pad_to is 0"),
        ({"pad_to": -1}, "field pad_to is -1"),
        ({"pad_to": 96, "one_product": True}, "field pad_to is 96; it must be 0 with one_product"),
        ({"pad_to": 96, "quantized": "mxfp8"}, "field quantized is 'mxfp8'"),
        ({"pad_to": 24, "quantized": "mxfp4"}, "field pad_to is 24; it must be a multiple of 32"),
        ({"pad_to": 128, "quantized": "fp8_block"}, "field inter is 32; it must be a multiple of"),
    ],
)
def test_what_no_call_can_look_like_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **fields)
