"""The bound on experts: honest kernels in 16 bits and FP8 stay inside it, wrong ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    ACTIVATIONS,
    Arithmetic,
    MatrixFormat,
    QuantizedMatrix,
    dequantize_nvfp4,
    moe,
    moe_error_bound,
    quantize_fp8,
    quantize_nvfp4,
    route,
)
from kernelproof.reference.formats.int4_groups import dequantize_int4_groups, quantize_int4_groups

FLOAT32 = torch.float32
HALVES = [torch.bfloat16, torch.float16]
functional = torch.nn.functional


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "swiglu_oai": swiglu_oai,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "swiglu_step": lambda gate, up: functional.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0),
    "situ": lambda gate, up: (
        4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * 25.0 * torch.tanh(up / 25.0)
    ),
    "geglu1": lambda gate, up: functional.gelu(gate) * (up + 1.0),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "identity": lambda x: x,
}


def to_fp8(a: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise rows with a scale of their own."""
    scale = a.abs().amax(dim=1, keepdim=True).clamp_min(1e-20) / 448
    return (a / scale).to(torch.float8_e4m3fn).float() * scale


def to_nvfp4(a: torch.Tensor) -> torch.Tensor:
    made = quantize_nvfp4(a, float(a.abs().max()) / (6 * 448))
    return dequantize_nvfp4(*made).float()


def rounded_by(a: torch.Tensor, chosen: str | None, dtype: torch.dtype) -> torch.Tensor:
    if chosen is None:
        return a
    named = {"float8_e4m3fn": to_fp8, "nvfp4": to_nvfp4}
    return named[chosen](a) if chosen in named else a.to(dtype).float()


def one_by_one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply with a float32 sum that takes one product after the other."""
    out = torch.zeros(len(x), len(w))
    for column in range(x.shape[1]):
        out += x[:, column : column + 1] * w[:, column]
    return out


def blas(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


@dataclass(frozen=True)
class Kernel:
    """A call, and a float32 kernel for it that rounds where ``arithmetic`` says."""

    hidden: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    activation: str = "swiglu"
    options: dict[str, Any] = field(default_factory=dict)
    arithmetic: Arithmetic = field(default_factory=lambda: Arithmetic(intermediate="inputs"))
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = blas

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (self.hidden, self.w13, self.w2, self.topk_ids, self.topk_weights)

    def expected(self) -> torch.Tensor:
        return moe(*self.arguments(), activation=self.activation, **self.options)

    def bound(self) -> torch.Tensor:
        return moe_error_bound(
            *self.arguments(),
            activation=self.activation,
            arithmetic=self.arithmetic,
            **self.options,
        )

    def run(self, function: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """Return what the kernel makes, with another activation function if one is given."""
        dtype, act = self.hidden.dtype, function or FUNCTIONS[self.activation]
        out = torch.zeros(len(self.hidden), self.w2.shape[1])
        if self.arithmetic.combine:
            out = out.to(dtype)
        for expert in range(len(self.w13)):
            tokens, slots = (self.topk_ids == expert).nonzero(as_tuple=True)
            weights = self.topk_weights[tokens, slots].float().unsqueeze(1)
            first = self.multiply(self.hidden[tokens].float(), self.w13[expert].float())
            if "w13_bias" in self.options:
                first += self.options["w13_bias"][expert].float()
            if self.options.get("weights_on_input"):
                first, weights = first * weights, torch.ones_like(weights)
            first = rounded_by(first, self.arithmetic.projections, dtype)
            a = act(*first.chunk(2, dim=1)) if ACTIVATIONS[self.activation].gated else act(first)
            if "intermediate_scale" in self.options:
                scale = self.options["intermediate_scale"][expert]
                a = (a / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            else:
                a = rounded_by(a, self.arithmetic.intermediate, dtype)
            y = self.multiply(a, self.w2[expert].float())
            if "w2_bias" in self.options:
                y += self.options["w2_bias"][expert].float()
            if self.arithmetic.partial_outputs:
                y = y.to(dtype).float()
            out.index_add_(0, tokens, (y * weights).to(out.dtype))
        return out.to(dtype)

    def ratio(self, found: torch.Tensor) -> float:
        """Return the largest error of what was found, as a share of its bound."""
        return float(((found.double() - self.expected()).abs() / self.bound()).max())


def draw(*shape: int, seed: int, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(
    activation: str = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 24,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 256,
    inter: int = 192,
    biases: bool = False,
    scale: float = 1.0,
) -> Kernel:
    rows = inter * (2 if ACTIVATIONS[activation].gated else 1)
    routing = route(draw(tokens, experts, seed=1), top_k)
    options: dict[str, Any] = {}
    if biases:
        options["w13_bias"] = draw(experts, rows, seed=5, dtype=dtype)
        options["w2_bias"] = draw(experts, hidden, seed=6, dtype=dtype)
    return Kernel(
        draw(tokens, hidden, seed=2, dtype=dtype),
        (scale * draw(experts, rows, hidden, seed=3) / math.sqrt(hidden)).to(dtype),
        (draw(experts, hidden, inter, seed=4) / math.sqrt(inter)).to(dtype),
        routing.topk_ids,
        routing.topk_weights.float(),
        activation,
        options,
    )


ARITHMETIC = {
    "intermediate": Arithmetic(intermediate="inputs"),
    "all": Arithmetic(intermediate="inputs", projections="inputs", partial_outputs=True),
    "combine": Arithmetic(intermediate="inputs", partial_outputs=True, combine="inputs"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_honest_kernels_are_inside(
    activation: str, dtype: torch.dtype, name: str, scale: float
) -> None:
    kernel = replace(case(activation, dtype, biases=True, scale=scale), arithmetic=ARITHMETIC[name])
    assert 0.02 < kernel.ratio(kernel.run()) < 0.9


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("multiply", [blas, one_by_one])
def test_float32_throughout(
    activation: str, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    kernel = replace(case(activation, FLOAT32), arithmetic=Arithmetic(), multiply=multiply)
    ratio = kernel.ratio(kernel.run())
    assert ratio < 0.5
    # A BLAS may be as exact as it likes; sums one by one round where this file says.
    assert multiply is blas or ratio > 0.004


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (8, 2), (700, 5), (4, 900)])
def test_sizes_small_and_lopsided(sizes: tuple[int, int]) -> None:
    kernel = case(hidden=sizes[0], inter=sizes[1], tokens=60)
    assert kernel.ratio(kernel.run()) < 0.95


@pytest.mark.parametrize("intermediate", ["float8_e4m3fn", "nvfp4"])
def test_intermediates_in_few_bits(intermediate: str) -> None:
    kernel = replace(case(), arithmetic=Arithmetic(intermediate=intermediate))
    assert 0.02 < kernel.ratio(kernel.run()) < 0.9
    # As if it were not rounded: outside, so that the term is needed.
    assert replace(kernel, arithmetic=Arithmetic()).ratio(kernel.run()) > 1


def test_weights_that_are_rounded_before_they_are_multiplied() -> None:
    kernel = replace(case(hidden=256, inter=192), arithmetic=Arithmetic(dequantized="inputs"))
    codes: list[Any] = []
    numbers: list[torch.Tensor] = []
    for weights in (kernel.w13, kernel.w2):
        made = quantize_int4_groups(weights.float(), 32)
        codes.append(QuantizedMatrix(made.codes, made.scales, MatrixFormat("int4_g32")))
        exact = dequantize_int4_groups(made.codes, 32, made.scales)
        numbers.append(exact.to(torch.bfloat16))
    found = replace(kernel, w13=numbers[0], w2=numbers[1]).run()
    given = replace(kernel, w13=codes[0], w2=codes[1])
    assert 0.02 < given.ratio(found) < 0.9
    # As if they were not: outside, so that the term is needed.
    assert replace(given, arithmetic=Arithmetic()).ratio(found) > 1


@pytest.mark.parametrize("share", [1.0, 0.25, 30.0])
def test_a_scale_of_the_intermediate_that_is_given_beforehand(share: float) -> None:
    """At a quarter of the largest element's scale some saturate; at 30 times many underflow."""
    scale = torch.full((8,), share * 6.0 / 448)
    kernel = case("silu", scale=2.0)
    kernel = replace(
        kernel,
        options={"intermediate_scale": scale},
        arithmetic=Arithmetic(intermediate="float8_e4m3fn"),
    )
    assert 0.02 < kernel.ratio(kernel.run()) < 0.9
    if share < 1:  # the saturation is part of the definition, not of the error
        assert kernel.ratio(replace(kernel, options={}).run()) > 1


def test_equal_rows_of_w13_round_alike() -> None:
    kernel = case("silu", inter=256)
    kernel.w13.copy_(kernel.w13[:, :1])
    kernel.w2.copy_(kernel.w2.abs())  # so that equal errors do not cancel
    assert kernel.ratio(kernel.run()) < 0.9


def test_all_slots_on_equal_experts() -> None:
    kernel = case(top_k=8)
    kernel.w13.copy_(kernel.w13[:1].clone())
    kernel.w2.copy_(kernel.w2[:1].clone())
    assert kernel.ratio(kernel.run()) < 0.9


def test_products_that_are_subnormal_where_they_are_added() -> None:
    kernel = replace(case("swiglu", torch.float16, top_k=8), arithmetic=ARITHMETIC["combine"])
    kernel.topk_weights.mul_(2.0**-20)
    assert 0.02 < kernel.ratio(kernel.run()) < 0.9


def test_weights_on_the_input() -> None:
    kernel = case("relu2", top_k=1)
    weights = 0.5 + torch.rand(24, 1, generator=torch.Generator().manual_seed(7))
    kernel = replace(kernel, topk_weights=weights, options={"weights_on_input": True})
    assert 0.02 < kernel.ratio(kernel.run()) < 0.9


def test_zeros_are_exact() -> None:
    kernel = case()
    kernel.hidden.zero_()
    assert (kernel.bound() <= 1e-6).all()
    nothing = replace(kernel, topk_ids=torch.full_like(kernel.topk_ids, -1))
    assert not nothing.expected().any()
    assert (nothing.bound() <= 1e-30).all()


@pytest.mark.parametrize("fixed_point", [False, True])
def test_hidden_states_as_codes(fixed_point: bool) -> None:
    kernel = case()
    scale = torch.tensor(0.01)
    codes = quantize_fp8(kernel.hidden, scale=scale)
    states = QuantizedMatrix(codes, scale, MatrixFormat("float8_e4m3fn", "tensor"))
    products = "fixed_point" if fixed_point else "accumulate"
    arithmetic = Arithmetic(intermediate="inputs", fp8_products=products)
    bound = moe_error_bound(states, *kernel.arguments()[1:], arithmetic=arithmetic)
    expected = moe(states, *kernel.arguments()[1:])
    widened = replace(
        kernel,
        hidden=codes.float() * scale,
        arithmetic=Arithmetic(intermediate="float8_e4m3fn"),
    )
    found = widened.run().bfloat16()
    assert 0.001 < ((found.double() - expected).abs() / bound).max() < 0.9


def test_shared_experts_are_bounded_too() -> None:
    kernel = case()
    shared: dict[str, Any] = {"shared_w13": kernel.w13[:1], "shared_w2": kernel.w2[:1]}
    wanted = moe(*kernel.arguments(), **shared)
    ids = torch.cat((kernel.topk_ids, torch.zeros(24, 1, dtype=torch.int32)), dim=1)
    weights = torch.cat((kernel.topk_weights, torch.ones(24, 1)), dim=1)
    both = replace(kernel, topk_ids=ids, topk_weights=weights)
    torch.testing.assert_close(wanted, both.expected())
    torch.testing.assert_close(
        moe_error_bound(*kernel.arguments(), **shared, arithmetic=kernel.arithmetic), both.bound()
    )


# Wrong kernels


def swapped(kernel: Kernel) -> torch.Tensor:
    right = FUNCTIONS[kernel.activation]
    return kernel.run(lambda gate, up: right(up, gate))


def last_expert_dropped(kernel: Kernel) -> torch.Tensor:
    left = kernel.topk_weights * (kernel.topk_ids != len(kernel.w13) - 1)
    return replace(kernel, topk_weights=left).run()


def not_renormalised(kernel: Kernel) -> torch.Tensor:
    weights = route(draw(24, 8, seed=1), 2, method="default").topk_weights
    return replace(kernel, topk_weights=weights.float()).run()


def without(name: str) -> Callable[[Kernel], torch.Tensor]:
    def run(kernel: Kernel) -> torch.Tensor:
        kept = {key: value for key, value in kernel.options.items() if key != name}
        return replace(kernel, options=kept).run()

    return run


def last_column_dropped(kernel: Kernel) -> torch.Tensor:
    w2 = kernel.w2.clone()
    w2[:, :, -1] = 0
    return replace(kernel, w2=w2).run()


def ups_not_capped(kernel: Kernel) -> torch.Tensor:
    return kernel.run(lambda gate, up: 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * up)


def no_limit(kernel: Kernel) -> torch.Tensor:
    return kernel.run(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1.0))


FAULTS: dict[str, tuple[str, Callable[[Kernel], torch.Tensor]]] = {
    "gate and up swapped": ("swiglu", swapped),
    "gate and up swapped, geglu": ("geglu", swapped),
    "silu for gelu": ("gelu", lambda kernel: kernel.run(functional.silu)),
    "swiglu for geglu": ("geglu", lambda kernel: kernel.run(FUNCTIONS["swiglu"])),
    "relu for relu2": ("relu2", lambda kernel: kernel.run(torch.relu)),
    "renormalisation skipped": ("swiglu", not_renormalised),
    "last expert dropped": ("swiglu", last_expert_dropped),
    "first bias forgotten": ("swiglu", without("w13_bias")),
    "second bias forgotten": ("swiglu", without("w2_bias")),
    "limit not applied": ("swiglu_oai", no_limit),
    "alpha and beta forgotten": ("swiglu_oai", lambda kernel: kernel.run(FUNCTIONS["swiglu"])),
    "limit after silu not applied": ("swiglu_step", lambda k: k.run(FUNCTIONS["swiglu"])),
    "ups not capped": ("situ", ups_not_capped),
    "gates not capped": ("situ", lambda kernel: kernel.run(FUNCTIONS["swiglu"])),
    "1 not added to ups": ("geglu1", lambda kernel: kernel.run(FUNCTIONS["geglu"])),
    "last column dropped": ("swiglu", last_column_dropped),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_wrong_kernels_are_outside(name: str, dtype: torch.dtype, arithmetic: str) -> None:
    activation, wrong = FAULTS[name]
    kernel = case(activation, dtype, biases=True, scale=4.0)
    kernel = replace(kernel, arithmetic=ARITHMETIC[arithmetic])
    assert kernel.ratio(wrong(kernel)) > 1.5
