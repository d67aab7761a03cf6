"""Mixture of experts: the definition as plain loops, its edges, formats, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    ACTIVATIONS,
    MatrixFormat,
    QuantizedMatrix,
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    moe,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from kernelproof.reference.moe.activations import (
    Swiglu,
    activate,
    activation_of,
    carried_error,
    phi_of,
)
from kernelproof.reference.moe.calls import TOKENS
from kernelproof.reference.moe.weights import NUMBERS

FLOAT64 = torch.float64
NAN = math.nan


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=FLOAT64).to(dtype)


def silu(x: float, alpha: float = 1.0) -> float:
    return x / (1.0 + math.exp(-alpha * x))


def gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def clip(x: float, limit: float) -> float:
    return min(max(x, -limit), limit)


def soft(x: float, cap: float) -> float:
    return cap * math.tanh(x / cap) if math.isfinite(cap) else x


def step_of(gate: float, up: float, limit: float) -> float:
    return min(silu(gate), limit) * clip(up, limit)


def situ_of(gate: float, up: float, beta: float, limit: float) -> float:
    return soft(gate, beta) / (1.0 + math.exp(-gate)) * soft(up, limit)


def swiglu_of(gate: float, up: float, alpha: float, beta: float, limit: float) -> float:
    return silu(min(gate, limit), alpha) * (clip(up, limit) + beta)


GATED: dict[str, Callable[[float, float], float]] = {
    "swiglu": lambda gate, up: silu(gate) * up,
    "swiglu_oai": lambda gate, up: silu(min(gate, 7.0), 1.702) * (clip(up, 7.0) + 1.0),
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "swiglu_step": lambda gate, up: min(silu(gate), 7.0) * clip(up, 7.0),
    "situ": lambda gate, up: soft(gate, 4.0) / (1.0 + math.exp(-gate)) * soft(up, 25.0),
    "geglu1": lambda gate, up: gelu(gate) * (up + 1.0),
}
NUMBERED = ("swiglu_oai", "swiglu_step", "situ", "geglu1")
PLAIN: dict[str, Callable[[float], float]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "identity": lambda x: x,
}


def by_loops(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over slots, in Python's numbers, without a matrix product."""
    inter = w2.shape[2]
    out = torch.zeros(hidden.shape[0], w2.shape[1], dtype=FLOAT64)
    for token, x in enumerate(hidden.tolist()):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            rows = w13[expert].tolist()
            first = [sum(a * b for a, b in zip(row, x, strict=True)) for row in rows]
            if w13_bias is not None:
                first = [a + b for a, b in zip(first, w13_bias[expert].tolist(), strict=True)]
            if activation in GATED:
                middle = [GATED[activation](first[i], first[inter + i]) for i in range(inter)]
            else:
                middle = [PLAIN[activation](a) for a in first]
            for row, line in enumerate(w2[expert].tolist()):
                y = sum(a * b for a, b in zip(line, middle, strict=True))
                if w2_bias is not None:
                    y += w2_bias[expert, row].item()
                out[token, row] += weight * y
    return out


def call(
    activation: str = "swiglu",
    tokens: int = 5,
    experts: int = 4,
    top_k: int = 2,
    hidden: int = 6,
    inter: int = 3,
    dtype: torch.dtype = FLOAT64,
) -> dict[str, Any]:
    rows = inter * (2 if ACTIVATIONS[activation].gated else 1)
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(tokens, experts, generator=generator)
    return {
        "hidden": draw(tokens, hidden, seed=1, dtype=dtype),
        "w13": draw(experts, rows, hidden, seed=2, dtype=dtype),
        "w2": draw(experts, hidden, inter, seed=3, dtype=dtype),
        "topk_ids": scores.topk(top_k).indices,
        "topk_weights": torch.rand(tokens, top_k, generator=generator),
    }


def biases(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "w13_bias": draw(*inputs["w13"].shape[:2], seed=4),
        "w2_bias": draw(*inputs["w2"].shape[:2], seed=5),
    }


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT64, torch.bfloat16])
def test_the_definition(activation: str, with_bias: bool, dtype: torch.dtype) -> None:
    inputs = call(activation, dtype=dtype)
    inputs["w13"] = inputs["w13"] * 4  # beyond the limit of 7
    given = biases(inputs) if with_bias else {}
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    wide["ids"] = inputs["topk_ids"]
    wanted = by_loops(
        wide["hidden"],
        wide["w13"],
        wide["w2"],
        inputs["topk_ids"],
        wide["topk_weights"],
        activation,
        **given,
    )
    found = moe(**inputs, activation=activation, **given)
    assert found.dtype == FLOAT64
    close(found, wanted)


def test_a_case_by_hand() -> None:
    # gate 2, up 3; silu(2) = 2 / (1 + e^-2); w2 doubles; weight 1/2
    hidden = torch.tensor([[1.0, 0.0]])
    w13, w2 = torch.tensor([[[2.0, 9.0], [3.0, 9.0]]]), torch.tensor([[[2.0], [0.0]]])
    ids, weights = torch.tensor([[0]]), torch.tensor([[0.5]])
    out = moe(hidden, w13, w2, ids, weights)
    assert out.tolist() == [[pytest.approx(6.0 / (1.0 + math.exp(-2.0)), rel=1e-15), 0.0]]
    assert moe(hidden, w13[:, :1], w2, ids, weights, activation="relu2").tolist() == [[4.0, 0.0]]


def test_swiglu_takes_the_numbers_of_its_family() -> None:
    inputs = call()
    close(moe(**inputs, alpha=1.702, beta=1.0, limit=7.0), moe(**inputs, activation="swiglu_oai"))
    each = torch.tensor([1.0, 0.5, 2.0, 0.1])
    together = moe(**inputs, limit=each)
    for expert, limit in enumerate(each.tolist()):
        alone = inputs["topk_weights"] * (inputs["topk_ids"] == expert)
        close(
            moe(**{**inputs, "topk_weights": alone}, limit=each),
            moe(**{**inputs, "topk_weights": alone}, limit=limit),
        )
    assert not torch.equal(together, moe(**inputs))


def test_interleaved_rows_are_the_same_rows() -> None:
    inputs, inter = call(), 3
    given = biases(inputs)
    order = torch.arange(2 * inter).view(2, inter).T.flatten()  # gate 0, up 0, gate 1, ...
    woven = {**inputs, "w13": inputs["w13"][:, order]}
    options = {**given, "w13_bias": given["w13_bias"][:, order]}
    close(moe(**woven, **options, interleaved=True), moe(**inputs, **given))


def test_expert_shards_sum_to_the_whole() -> None:
    inputs = call()
    given = biases(inputs)
    parts = []
    for start in (0, 1, 3):
        stop = {0: 1, 1: 3, 3: 4}[start]
        shard = {**inputs, "w13": inputs["w13"][start:stop], "w2": inputs["w2"][start:stop]}
        local = {name: bias[start:stop] for name, bias in given.items()}
        parts.append(moe(**shard, **local, expert_offset=start, num_experts=4))
    close(torch.stack(parts).sum(dim=0), moe(**inputs, **given))


def test_inter_shards_sum_to_the_whole() -> None:
    inputs, inter = call(), 3
    gate, up = inputs["w13"].split(inter, dim=1)
    parts = []
    for columns in (slice(0, 1), slice(1, 3)):
        w13 = torch.cat((gate[:, columns], up[:, columns]), dim=1)
        parts.append(moe(**{**inputs, "w13": w13, "w2": inputs["w2"][:, :, columns]}))
    close(parts[0] + parts[1], moe(**inputs))


def test_shared_experts_are_added_for_every_token() -> None:
    inputs = call()
    w13, w2 = draw(2, 10, 6, seed=8), draw(2, 6, 5, seed=9)
    everyone = {
        "hidden": inputs["hidden"],
        "w13": w13,
        "w2": w2,
        "topk_ids": torch.tensor([[0, 1]]).expand(5, 2),
        "topk_weights": torch.full((5, 2), 0.4),
    }
    found = moe(**inputs, shared_w13=w13, shared_w2=w2, shared_weight=0.4)
    torch.testing.assert_close(found, moe(**inputs) + moe(**everyone), rtol=1e-6, atol=1e-6)


def test_nobody_reads_an_expert_that_nobody_selects() -> None:
    inputs = call()
    inputs["topk_ids"] = inputs["topk_ids"].clamp(max=2)
    wanted = moe(**inputs, **biases(inputs))
    inputs["w13"][3], inputs["w2"][3] = NAN, NAN
    given = biases(inputs)
    given["w13_bias"][3], given["w2_bias"][3] = NAN, NAN
    assert torch.equal(moe(**inputs, **given), wanted)


def test_a_slot_of_weight_zero_contributes_exactly_zero() -> None:
    inputs = call(top_k=3)
    inputs["topk_ids"] = inputs["topk_ids"].clamp(max=2)
    inputs["topk_ids"][:, 1] = 3
    inputs["topk_weights"][:, 1] = 0.0
    fewer = {name: inputs[name][:, [0, 2]] for name in ("topk_ids", "topk_weights")}
    wanted = moe(**{**inputs, **fewer})
    inputs["w13"][3] = NAN
    assert torch.equal(moe(**inputs), wanted)


def test_an_expert_twice_counts_twice_and_minus_one_is_none() -> None:
    inputs = call(top_k=1)
    twice = {**inputs, "topk_ids": inputs["topk_ids"].expand(5, 2)}
    twice["topk_weights"] = torch.cat((inputs["topk_weights"],) * 2, dim=1)
    close(moe(**twice), 2 * moe(**inputs))
    none = {**twice, "topk_ids": twice["topk_ids"].clone()}
    none["topk_ids"][:, 1] = -1
    close(moe(**none), moe(**inputs))


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(tokens: int) -> None:
    assert moe(**call(tokens=tokens)).shape == (tokens, 6)


def test_all_tokens_on_one_expert() -> None:
    tokens = 2 * TOKENS + 3
    inputs = call(tokens=tokens, top_k=1)
    inputs["topk_ids"].fill_(2)
    x, (gate, up) = inputs["hidden"], inputs["w13"][2].chunk(2)
    middle = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    close(moe(**inputs), inputs["topk_weights"].double() * (middle @ inputs["w2"][2].T))


def test_more_rows_than_are_widened_at_once() -> None:
    hidden = 2100
    inter = NUMBERS // hidden - 100
    assert inter < NUMBERS // hidden < 2 * inter, "w13 takes two steps"
    inputs = call(experts=2, hidden=hidden, inter=inter)
    parts = [
        inputs["topk_weights"][:, slot : slot + 1].double()
        * torch.stack(
            [
                inputs["w2"][expert]
                @ (
                    torch.nn.functional.silu(inputs["w13"][expert, :inter] @ x)
                    * (inputs["w13"][expert, inter:] @ x)
                )
                for x, expert in zip(
                    inputs["hidden"], inputs["topk_ids"][:, slot].tolist(), strict=True
                )
            ]
        )
        for slot in range(2)
    ]
    torch.testing.assert_close(moe(**inputs), parts[0] + parts[1], rtol=1e-9, atol=1e-7)


def test_weights_on_the_input() -> None:
    inputs = call("identity", top_k=1)
    close(
        moe(**inputs, activation="identity", weights_on_input=True),
        moe(**inputs, activation="identity"),
    )
    inputs = call("relu2", top_k=1)
    scaled = {**inputs, "hidden": inputs["hidden"] * inputs["topk_weights"].double()}
    scaled["topk_weights"] = torch.ones(5, 1)
    found = moe(**inputs, activation="relu2", weights_on_input=True)
    close(found, moe(**scaled, activation="relu2"))
    assert not torch.allclose(found, moe(**inputs, activation="relu2"))


def test_inputs_are_left_alone_and_runs_are_equal() -> None:
    inputs = call(dtype=torch.float32)
    given = biases(inputs)
    before = {name: tensor.clone() for name, tensor in (inputs | given).items()}
    first = moe(**inputs, **given, weights_on_input=True)
    assert torch.equal(first, moe(**inputs, **given, weights_on_input=True))
    for name, tensor in (inputs | given).items():
        assert torch.equal(tensor, before[name])


# Codes


def fp8(
    x: torch.Tensor, scale: torch.Tensor, spread: torch.Tensor, scales: str
) -> tuple[QuantizedMatrix, torch.Tensor]:
    """Quantise with a scale, and give the codes and the numbers that they stand for."""
    codes = quantize_fp8(x, scale=spread)
    form = MatrixFormat("float8_e4m3fn", scales)
    return QuantizedMatrix(codes, scale, form), dequantize_fp8(codes, spread)


def positive(*shape: int, seed: int) -> torch.Tensor:
    return draw(*shape, seed=seed).abs().float() * 0.1 + 0.01


def both(x: torch.Tensor, name: str, seed: int) -> tuple[QuantizedMatrix, torch.Tensor]:
    """Quantise weights [experts, rows, columns] or hidden states [tokens, columns]."""
    weights, rows, columns = x.dim() > 2, x.shape[-2], x.shape[-1]
    if name == "tensor":
        scale = positive(*x.shape[:-2], seed=seed)
        return fp8(x, scale, scale.reshape(*x.shape[:-2], 1, 1), name)
    if name == "channel":
        scale = positive(*x.shape[:-1], seed=seed)
        return fp8(x, scale, scale.unsqueeze(-1), name)
    if name == "block":
        blocks = -(-columns // 128)
        lines = (-(-rows // 128),) if weights else (rows,)
        scale = positive(*x.shape[:-2], *lines, blocks, seed=seed)
        spread = scale.repeat_interleave(128, dim=-1)[..., :columns]
        if weights:
            spread = spread.repeat_interleave(128, dim=-2)[:, :rows]
        return fp8(x, scale, spread, name)
    form = MatrixFormat(name)
    if name == "nvfp4":
        made = quantize_nvfp4(x, 0.01)
        numbers = dequantize_nvfp4(made.codes, made.block_scales, made.global_scale)
        return QuantizedMatrix(made.codes, made.block_scales, form, made.global_scale), numbers
    quantize = quantize_mxfp4 if name == "mxfp4" else quantize_mxfp8
    dequantize = dequantize_mxfp4 if name == "mxfp4" else dequantize_mxfp8
    codes, scales = quantize(x)
    return QuantizedMatrix(codes, scales, form), dequantize(codes, scales)


@pytest.mark.parametrize("name", ["tensor", "channel", "block", "nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("quantised_hidden", [False, True])
def test_codes_are_the_numbers_that_they_stand_for(name: str, quantised_hidden: bool) -> None:
    inputs = call(hidden=288, inter=160)
    given = dict(inputs)
    for seed, key in enumerate(("w13", "w2")):
        given[key], inputs[key] = both(inputs[key], name, seed + 20)
    if quantised_hidden:
        given["hidden"], inputs["hidden"] = both(inputs["hidden"], name, 30)
    torch.testing.assert_close(moe(**given), moe(**inputs), rtol=1e-12, atol=1e-9)


def test_a_global_scale_of_each_expert() -> None:
    inputs = call(hidden=32, inter=16)
    given = dict(inputs)
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made, numbers = both(inputs["w13"], "nvfp4", 0)
    given["w13"] = made._replace(global_scale=scales * made.global_scale)
    inputs["w13"] = numbers * scales.view(4, 1, 1)
    torch.testing.assert_close(moe(**given), moe(**inputs), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"element": "int4"}, "element is 'int4'"),
        ({"element": "nvfp4", "scales": "block"}, "scales is 'block'; nvfp4 may have"),
        ({"element": "float8_e4m3fn"}, "scales is ''; float8_e4m3fn may have"),
    ],
)
def test_formats_that_are_none(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixFormat(**options)


# Refusals


def quantised(codes: torch.Tensor, scales: torch.Tensor, scale: str = "channel") -> QuantizedMatrix:
    return QuantizedMatrix(codes, scales, MatrixFormat("float8_e4m3fn", scale))


FP8 = torch.zeros(4, 6, 6, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "swish"}, "activation is 'swish'; it must be one of swiglu"),
        ({"activation": "relu"}, "w13 has 6 rows; relu with 3 columns of w2 needs 3 rows"),
        ({"w13": torch.zeros(4, 5, 6)}, "w13 has 5 rows; swiglu with 3 columns of w2 needs 6"),
        ({"w13": torch.zeros(4, 6, 5)}, "w13 has 5 columns, but hidden has 6"),
        ({"w2": torch.zeros(3, 6, 3)}, "w2 has 3 experts, but w13 has 4"),
        ({"w13": torch.zeros(4, 6)}, r"w13 must be a tensor \[experts, rows, hidden\]"),
        ({"w13": FP8.view(torch.uint8)}, "w13 is torch.uint8, which does not say what it holds"),
        ({"hidden": torch.zeros(5, 0)}, "hidden is empty"),
        ({"w13": quantised(FP8, torch.ones(4, 5))}, r"w13.scales has shape \[4, 5\]"),
        ({"w13": quantised(FP8.float(), torch.ones(4, 6))}, "w13.codes is torch.float32"),
        ({"topk_ids": torch.zeros(5, 2)}, "topk_ids must hold integers"),
        ({"topk_ids": torch.zeros(4, 2, dtype=torch.int32)}, "topk_ids must be .* 5 tokens"),
        ({"topk_ids": torch.full((5, 2), 4)}, r"topk_ids\[0, 0\] is 4; there are 4 experts"),
        ({"topk_ids": torch.full((5, 2), -2)}, r"topk_ids\[0, 0\] is -2"),
        ({"topk_weights": torch.zeros(5, 3)}, r"topk_weights has shape \[5, 3\]"),
        ({"topk_weights": torch.zeros(5, 2, dtype=torch.int32)}, "topk_weights must have a float"),
        ({"expert_offset": 1}, "expert_offset is 1, and w13 has 4 experts: they end at 5"),
        ({"w13_bias": torch.zeros(4, 5)}, r"w13_bias has shape \[4, 5\]"),
        ({"w2_bias": torch.zeros(4, 5)}, r"w2_bias has shape \[4, 5\]"),
        ({"limit": -1.0}, r"limit\[0\] is -1.0"),
        ({"activation": "situ", "beta": 0.0}, r"beta\[0\] is 0.0; of situ it is above 0"),
        ({"activation": "situ", "alpha": 1.0}, "alpha is given, but activation 'situ' takes none"),
        ({"activation": "swiglu_step", "beta": 1.0}, "beta is given, but activation 'swiglu_step'"),
        ({"alpha": torch.ones(3)}, r"alpha has shape \[3\]; give one number or \[4\]"),
        ({"activation": "geglu", "alpha": 1.0}, "alpha is given, but activation 'geglu' takes"),
        (
            {"activation": "relu2", "w13": torch.zeros(4, 3, 6), "interleaved": True},
            "interleaved is True, but activation 'relu2' has no gate rows",
        ),
        ({"shared_w13": torch.zeros(1, 6, 6)}, "shared_w13 and shared_w2: give both"),
        (
            {"shared_w13": torch.zeros(1, 6, 6), "shared_w2": torch.zeros(1, 6, 4)},
            "shared_w13 has 6 rows",
        ),
        ({"intermediate_scale": 0.0}, r"intermediate_scale\[0\] is 0.0; a scale is positive"),
        ({"compute_dtype": torch.bfloat16}, "compute_dtype is torch.bfloat16"),
        ({"activation": ["silu"]}, r"activation is \['silu'\]; it must be one of"),
        ({"topk_ids": torch.zeros(5, 2, dtype=torch.complex64)}, "topk_ids must hold integers"),
        ({"topk_weights": None}, r"topk_weights must be a torch.Tensor \[tokens, top_k\]"),
        ({"alpha": "1"}, "alpha is '1', not a number"),
        ({"alpha": [1.0, 2.0]}, r"alpha is \[1.0, 2.0\], not a number"),
        ({"intermediate_scale": "x"}, "intermediate_scale is 'x', not a number"),
        ({"expert_offset": 0.0}, "expert_offset is 0.0, not an integer"),
        ({"num_experts": "4"}, "num_experts is '4', not an integer"),
        (
            {
                "shared_w13": torch.zeros(1, 6, 6),
                "shared_w2": torch.zeros(1, 6, 3),
                "shared_weight": torch.ones(2),
            },
            "shared_weight is .*, not a number",
        ),
        ({"hidden": torch.zeros(5, 6, device="meta")}, "hidden is on the device 'meta'"),
        ({"w2": torch.zeros(4, 6, 3, device="meta")}, "w2 is on the device 'meta'"),
        ({"topk_ids": torch.zeros(5, 2, device="meta").int()}, "topk_ids is on the device 'meta'"),
        ({"hidden": torch.zeros(5, 6).to_sparse()}, "hidden has the layout torch.sparse_coo"),
        ({"w13": quantised(FP8, [1.0] * 4)}, "w13.scales must be a tensor, not list"),  # type: ignore[arg-type]
        ({"w13": QuantizedMatrix(FP8, torch.ones(4), "float8_e4m3fn")}, "w13.format is 'float8"),  # type: ignore[arg-type]
        (
            {"w13": quantised(FP8, torch.ones(4, 6))._replace(global_scale="1")},  # type: ignore[arg-type]
            "w13.global_scale is '1', not a number",
        ),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe(**{**call(), **options})


ALPHA, BETA, LIMIT = 1.5, 0.75, 0.5
NUMBERS_GIVEN: list[tuple[str, dict[str, float], Callable[[float, float], float]]] = [
    ("swiglu", {"limit": LIMIT}, lambda g, u: swiglu_of(g, u, 1.0, 0.0, LIMIT)),
    ("swiglu", {"alpha": ALPHA}, lambda g, u: swiglu_of(g, u, ALPHA, 0.0, math.inf)),
    ("swiglu", {"beta": BETA}, lambda g, u: swiglu_of(g, u, 1.0, BETA, math.inf)),
    ("swiglu_oai", {"limit": LIMIT}, lambda g, u: swiglu_of(g, u, 1.702, 1.0, LIMIT)),
    ("swiglu_oai", {"alpha": ALPHA}, lambda g, u: swiglu_of(g, u, ALPHA, 1.0, 7.0)),
    ("swiglu_oai", {"beta": BETA}, lambda g, u: swiglu_of(g, u, 1.702, BETA, 7.0)),
    ("swiglu_step", {"limit": LIMIT}, lambda g, u: step_of(g, u, LIMIT)),
    ("swiglu_step", {"limit": math.inf}, lambda g, u: silu(g) * u),
    ("situ", {"beta": BETA}, lambda g, u: situ_of(g, u, BETA, 25.0)),
    ("situ", {"limit": LIMIT}, lambda g, u: situ_of(g, u, 4.0, LIMIT)),
    ("situ", {"beta": BETA, "limit": math.inf}, lambda g, u: situ_of(g, u, BETA, math.inf)),
    ("geglu1", {"beta": BETA}, lambda g, u: gelu(g) * (u + BETA)),
]


@pytest.mark.parametrize(("activation", "given", "rule"), NUMBERS_GIVEN)
@pytest.mark.parametrize("each", [False, True])
def test_numbers_given_by_themselves(
    activation: str,
    given: dict[str, float],
    rule: Callable[[float, float], float],
    each: bool,
) -> None:
    """A limit alone, as engines give it, leaves alpha and beta what the activation has."""
    inputs = call(activation)
    options: dict[str, Any] = dict(given)
    if each:
        options = {name: torch.full((4,), value, dtype=FLOAT64) for name, value in given.items()}
    found = moe(**inputs, activation=activation, **options)
    wanted = torch.zeros_like(found)
    ids, weights = inputs["topk_ids"].tolist(), inputs["topk_weights"].double()
    for token, experts in enumerate(ids):
        for slot, expert in enumerate(experts):
            first = (inputs["w13"][expert] @ inputs["hidden"][token]).tolist()
            middle = [rule(gate, up) for gate, up in zip(first[:3], first[3:], strict=True)]
            y = inputs["w2"][expert] @ torch.tensor(middle, dtype=FLOAT64)
            wanted[token] += weights[token, slot] * y
    close(found, wanted)


# What bounds an activation's change


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("error", [1e-3, 0.3, 4.0])
def test_an_error_of_the_projections_is_carried_no_further(name: str, error: float) -> None:
    activation, numbers = activation_of(name), Swiglu(1.702, 1.0, 3.0)
    x = torch.linspace(-8, 8, 1601, dtype=FLOAT64)
    phi = phi_of(activation, numbers)
    bound = phi.change(x, torch.full_like(x, error))
    shares = torch.linspace(-1, 1, 41, dtype=FLOAT64).unsqueeze(1)
    reached = (phi.value(x + shares * error) - phi.value(x)).abs().amax(dim=0)
    assert (reached <= bound + 1e-12).all()
    assert (bound <= reached + error**2).all()  # and is no wild guess


@pytest.mark.parametrize("name", [*GATED, "situ without a cap"])
def test_gated_errors_are_carried_no_further(name: str) -> None:
    activation = activation_of(name.removesuffix(" without a cap"))
    numbers = Swiglu(1.702, 1.0, 3.0) if name in NUMBERED else Swiglu()
    if name == "situ without a cap":
        numbers = Swiglu(beta=1.5)
    projected, errors = 4 * draw(200, 16, seed=1), 0.2 * draw(200, 16, seed=2).abs()
    bound = carried_error(activation, projected, errors, numbers)
    here = activate(activation, projected, numbers)
    for seed in range(20):
        moved = projected + errors * (2 * torch.rand_like(errors) - 1 if seed else errors.sign())
        assert ((activate(activation, moved, numbers) - here).abs() <= bound + 1e-12).all()
