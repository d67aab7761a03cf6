"""Activations between the two products of an expert, and how far they carry an error.

A gated activation makes phi(gate) * up of the two halves of the first product; the others make
phi(x) of all of it. alpha, beta and limit belong to the swiglu family, with GPT-OSS's numbers as
the defaults of swiglu_oai:

    gate' = min(gate, limit),   up' = min(max(up, -limit), limit)
    out   = gate' * sigmoid(alpha * gate') * (up' + beta)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

Unary = Callable[[torch.Tensor], torch.Tensor]

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715
"""Of the tanh approximation: Hendrycks & Gimpel, arXiv:1606.08415."""


class Phi(NamedTuple):
    """A function of one number, and how far an error of its argument carries.

    Attributes:
        value: the function.
        change: bounds |value(x') - value(x)| for |x' - x| <= error, given x and error.
    """

    value: Unary
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def smooth(value: Unary, slope: Unary, curvature: float) -> Phi:
    """Make a Phi by Taylor's theorem.

    Args:
        value: the function.
        slope: its derivative.
        curvature: the largest absolute value of its second derivative.
    """

    def change(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        return slope(x).abs() * error + 0.5 * curvature * error.square()

    return Phi(value, change)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x times the normal distribution's probability of less than x."""
    below: torch.Tensor = torch.special.erfc(-SQRT_HALF * x)
    return 0.5 * x * below


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi)
    below: torch.Tensor = torch.special.erfc(-SQRT_HALF * x)
    return 0.5 * below + x * density


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of gelu."""
    inner = SQRT_2_OVER_PI * (x + GELU_CUBE * x**3)
    # (1 + tanh(y)) / 2 is sigmoid(2 y), which does not cancel where x is negative.
    return x * torch.sigmoid(2.0 * inner)


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    inner = SQRT_2_OVER_PI * (x + GELU_CUBE * x**3)
    share = torch.sigmoid(2.0 * inner)
    rate = 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBE * x.square())
    return share + x * share * (1.0 - share) * rate


def swish(alpha: float) -> Phi:
    """Return x sigmoid(alpha x), which is silu where alpha is 1."""

    def value(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(alpha * x)

    def slope(x: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(alpha * x)
        return share + alpha * x * share * (1.0 - share)

    return smooth(value, slope, 0.5 * abs(alpha))


def clamp(low: float, high: float) -> Phi:
    """Return x within [low, high]: an error beyond an end by less than itself is cut."""

    def change(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        beyond = torch.relu(x - high) + torch.relu(low - x)
        return torch.relu(error - beyond)

    return Phi(lambda x: x.clamp(low, high), change)


def _relu2_change(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    inside = 2.0 * x * error + error.square()
    return torch.where(x > 0, inside, torch.relu(x + error).square())


GELU = smooth(gelu, _gelu_slope, 0.8)
GELU_TANH = smooth(gelu_tanh, _gelu_tanh_slope, 0.85)
RELU = Phi(torch.relu, lambda x, error: torch.minimum(error, torch.relu(x + error)))
RELU2 = Phi(lambda x: torch.relu(x).square(), _relu2_change)
IDENTITY = Phi(lambda x: x, lambda _x, error: error)


class Activation(NamedTuple):
    """An activation by its name.

    Attributes:
        gated: takes a gate and an up projection, so that w13 has 2 * inter rows.
        phi: of the gate, or of the only projection; None for the swiglu family, see ``phi_of``.
        alpha, beta, limit: the family's defaults; None: the activation takes no such argument.
        cancels: its formulas, x (1 + erf) / 2 and x (1 + tanh) / 2, lose digits for negative x.
    """

    gated: bool
    phi: Phi | None = None
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    cancels: bool = False


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(gated=True, alpha=1.0, beta=0.0, limit=math.inf),
    "swiglu_oai": Activation(gated=True, alpha=1.702, beta=1.0, limit=7.0),
    "geglu": Activation(gated=True, phi=GELU, cancels=True),
    "geglu_tanh": Activation(gated=True, phi=GELU_TANH, cancels=True),
    "silu": Activation(gated=False, phi=swish(1.0)),
    "gelu": Activation(gated=False, phi=GELU, cancels=True),
    "gelu_tanh": Activation(gated=False, phi=GELU_TANH, cancels=True),
    "relu": Activation(gated=False, phi=RELU),
    "relu2": Activation(gated=False, phi=RELU2),
    "identity": Activation(gated=False, phi=IDENTITY),
}
"""By name. FlashInfer's ActivationType calls them Swiglu, SwigluBias (swiglu_oai: alpha, beta and
limit are given by tensors), Geglu, GegluTanh, Silu, Gelu, Relu, Relu2 and Identity; vLLM's
SILU_NO_MUL, GELU_NO_MUL, RELU2_NO_MUL are silu, gelu and relu2, its SILU is swiglu."""


class Swiglu(NamedTuple):
    """The numbers of the swiglu family for one expert."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


def activation_of(name: str, *, interleaved: bool = False) -> Activation:
    """Look an activation up.

    Args:
        name: one of ``ACTIVATIONS``.
        interleaved: its gate and up rows alternate, so it must have a gate.

    Raises:
        ValueError: a name that is none of these, or ``interleaved`` without a gate.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        message = f"activation is {name!r}; it must be one of {', '.join(ACTIVATIONS)}"
        raise ValueError(message)
    activation = ACTIVATIONS[name]
    if interleaved and not activation.gated:
        message = f"interleaved is {interleaved}, but activation {name!r} has no gate rows"
        raise ValueError(message)
    return activation


def activate(
    activation: Activation, projected: torch.Tensor, numbers: Swiglu, *, interleaved: bool = False
) -> torch.Tensor:
    """Apply an activation.

    Args:
        activation: which.
        projected: [rows, inter], or [rows, 2 * inter] if gated: gates first, then ups.
        numbers: of the swiglu family.
        interleaved: gate 0, up 0, gate 1, up 1, ... instead (GPT-OSS's checkpoints).

    Returns:
        [rows, inter].
    """
    if not activation.gated:
        return phi_of(activation, numbers).value(projected)
    gate, up = halves(projected, interleaved=interleaved)
    if math.isfinite(numbers.limit):
        gate, up = gate.clamp(max=numbers.limit), up.clamp(-numbers.limit, numbers.limit)
    return phi_of(activation, numbers).value(gate) * (up + numbers.beta)


def carried_error(
    activation: Activation,
    projected: torch.Tensor,
    errors: torch.Tensor,
    numbers: Swiglu,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """Bound how far ``activate`` moves, elementwise, where projected is off by at most errors.

    Args:
        activation, projected, numbers, interleaved: as in ``activate``.
        errors: of the shape of projected.

    Returns:
        [rows, inter].
    """
    phi = phi_of(activation, numbers)
    if not activation.gated:
        return phi.change(projected, errors)
    gate, up = halves(projected, interleaved=interleaved)
    gate_error, up_error = halves(errors, interleaved=interleaved)
    below, within = clamp(-math.inf, numbers.limit), clamp(-numbers.limit, numbers.limit)
    gate_error, up_error = below.change(gate, gate_error), within.change(up, up_error)
    gate, up = below.value(gate), within.value(up) + numbers.beta
    moved = phi.change(gate, gate_error)
    return moved * (up.abs() + up_error) + phi.value(gate).abs() * up_error


def phi_of(activation: Activation, numbers: Swiglu) -> Phi:
    """Return the function of the gate, or of the only projection."""
    return activation.phi or swish(numbers.alpha)


def halves(x: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gates and the ups of [rows, 2 * inter], views of it."""
    if interleaved:
        return x[:, 0::2], x[:, 1::2]
    inter = x.shape[1] // 2
    return x[:, :inter], x[:, inter:]
