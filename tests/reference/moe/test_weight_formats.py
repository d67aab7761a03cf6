"""The numbers of quantised weights and hidden states, against loops over the bytes of the codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl.features import drawn_features
from kernelproof.reference import MatrixFormat, MoEProblem, QuantizedMatrix, materialise, oracle
from kernelproof.reference.moe.weights import checked_matrix
from kernelproof.reference.tensors.moe_inputs import MoEInputs

SMALL = MoEProblem(num_tokens=3, hidden=64, inter=32, num_experts=2, top_k=2, seed=11)
BLOCKS = replace(SMALL, hidden=136, inter=72)
"""Two blocks of scales in each direction, the last ones short."""


def inputs_of(problem: MoEProblem) -> MoEInputs:
    made = materialise(problem)
    assert isinstance(made, MoEInputs)
    return made


def codes_of(matrix: torch.Tensor | QuantizedMatrix) -> QuantizedMatrix:
    assert isinstance(matrix, QuantizedMatrix)
    return matrix


def by_hand(matrix: QuantizedMatrix, expert: int) -> list[list[float]]:
    """Return the numbers of an expert's int8 weights, one after another."""
    rows = matrix.codes[expert].tolist()
    kind, scales = matrix.format.scales, matrix.scales[expert].tolist()
    found = []
    for row, codes in enumerate(rows):
        if kind == "tensor":
            found.append([code * scales for code in codes])
        elif kind == "channel":
            found.append([code * scales[row] for code in codes])
        else:
            of_row = scales[row // 128]
            found.append([code * of_row[column // 128] for column, code in enumerate(codes)])
    return found


def tokens_by_hand(matrix: QuantizedMatrix) -> list[list[float]]:
    """Return the numbers of int8 hidden states."""
    scales = matrix.scales.tolist()
    return [
        [
            code * (scales[token][column // 128] if matrix.format.in_blocks else scales[token])
            for column, code in enumerate(codes)
        ]
        for token, codes in enumerate(matrix.codes.tolist())
    ]


def as_numbers(inputs: MoEInputs) -> MoEInputs:
    """Return the call with the numbers that ``by_hand`` reads in the place of codes."""
    numbers = {}
    for name in ("w13", "w2"):
        matrix = codes_of(getattr(inputs, name))
        each = [by_hand(matrix, expert) for expert in range(len(matrix.codes))]
        numbers[name] = torch.tensor(each, dtype=torch.float64)
    if isinstance(inputs.hidden, QuantizedMatrix):
        hidden = tokens_by_hand(inputs.hidden)
        numbers["hidden"] = torch.tensor(hidden, dtype=torch.float64)
    return replace(inputs, **numbers)


@pytest.mark.parametrize("quantized", ["int8_tensor", "int8_channel", "int8_block"])
@pytest.mark.parametrize("hidden", [False, True])
def test_int8_is_what_loops_over_bytes_read(quantized: str, hidden: bool) -> None:
    problem = replace(BLOCKS, quantized=quantized, quantized_hidden=hidden)
    wanted = ["int8_weights", "quantized_hidden"] if hidden else ["int8_weights"]
    assert drawn_features(problem) == wanted
    inputs = inputs_of(problem)
    assert codes_of(inputs.w13).codes.dtype == torch.int8
    assert int(codes_of(inputs.w13).codes.abs().max()) > 31
    if hidden:
        shape = [3, 2] if quantized == "int8_block" else [3]
        assert list(codes_of(inputs.hidden).scales.shape) == shape
    assert torch.equal(oracle.experts(inputs), oracle.experts(as_numbers(inputs)))


def test_int8_codes_are_near_the_values() -> None:
    values = inputs_of(SMALL).w13
    assert isinstance(values, torch.Tensor)
    for quantized in ("int8_tensor", "int8_channel", "int8_block"):
        made = inputs_of(replace(SMALL, quantized=quantized)).w13
        read = torch.stack([checked_matrix("w13", made, "e r c").weights(e) for e in range(2)])
        assert 0 < float((read - values).norm() / values.norm()) < 0.06
        assert torch.equal(read.to(torch.bfloat16).double(), read), "bfloat16 holds them"


def test_the_least_code_of_int8_is_read_as_it_is() -> None:
    codes = torch.full((1, 2, 4), -128, dtype=torch.int8)
    matrix = QuantizedMatrix(codes, torch.tensor([0.5]), checked_format("int8_tensor"))
    assert bool((checked_matrix("w2", matrix, "e r c").weights(0) == -64.0).all())


def checked_format(quantized: str) -> MatrixFormat:
    return codes_of(inputs_of(replace(SMALL, quantized=quantized)).w13).format
