"""Activations between the two products of an expert, and how far they carry an error.

A gated activation makes phi(gate) * up of the two halves of the first product; the others make
phi(x) of all of it. alpha, beta and limit belong to the swiglu family, with GPT-OSS's numbers as
the defaults of swiglu_oai:

    gate' = min(gate, limit),   up' = min(max(up, -limit), limit)
    out   = gate' * sigmoid(alpha * gate') * (up' + beta)

Others take some of them. swiglu_step (Step-3.5's SwigluStep) limits after the activation, situ
(Kimi K3) has soft limits, geglu1 (Moondream 3) adds beta = 1:

    swiglu_step: min(silu(gate), limit) * up'
    situ:        beta * tanh(gate / beta) * sigmoid(gate) * limit * tanh(up / limit)
    geglu1:      gelu(gate) * (up + beta)
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
"""Coefficient of the tanh approximation: Hendrycks & Gimpel, arXiv:1606.08415."""


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


def _soft_cap_slope(x: torch.Tensor, cap: float) -> torch.Tensor:
    return 1.0 - torch.tanh(x / cap).square()


TANH_CURVATURE = 4.0 / (3.0 * math.sqrt(3.0))
"""Largest absolute value of the second derivative of tanh."""
SIGMOID_CURVATURE = 1.0 / (6.0 * math.sqrt(3.0))
"""Largest absolute value of the second derivative of the sigmoid."""


def soft_cap(cap: float) -> Phi:
    """Return cap tanh(x / cap), whose slope is at most 1."""
    inner = smooth(
        lambda x: cap * torch.tanh(x / cap),
        lambda x: _soft_cap_slope(x, cap),
        TANH_CURVATURE / cap,
    )
    return Phi(inner.value, lambda x, error: torch.minimum(error, inner.change(x, error)))


def situ(beta: float) -> Phi:
    """Return beta tanh(x / beta) sigmoid(x)."""

    def value(x: torch.Tensor) -> torch.Tensor:
        return beta * torch.tanh(x / beta) * torch.sigmoid(x)

    def slope(x: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(x)
        falling = beta * torch.tanh(x / beta) * share * (1.0 - share)
        return _soft_cap_slope(x, beta) * share + falling

    # t'' s + 2 t' s' + t s'' with |t'| <= 1, |s'| <= 1/4 and |t| <= min(beta, |x|); |x s''| < 0.17.
    curvature = TANH_CURVATURE / beta + 0.5 + min(0.17, SIGMOID_CURVATURE * beta)
    return smooth(value, slope, curvature)


def chain(first: Phi, second: Phi) -> Phi:
    """Return second(first(x))."""
    return Phi(
        lambda x: second.value(first.value(x)),
        lambda x, error: second.change(first.value(x), first.change(x, error)),
    )


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
        phi: the function applied to the gate, or to the only projection; None for the swiglu
            family, see ``phi_of``.
        alpha, beta, limit: the family's defaults; None: the activation takes no such argument.
        cancels: its formulas, x (1 + erf) / 2 and x (1 + tanh) / 2, lose digits for negative x.
        limits: how its limit is applied: ``"before"`` the function of the gate, ``"after"`` it, or
            ``"softly"``, by tanh and to the ups only.
    """

    gated: bool
    phi: Phi | None = None
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    cancels: bool = False
    limits: str = "before"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the numbers that it takes, of alpha, beta and limit."""
        return tuple(name for name in Swiglu._fields if getattr(self, name) is not None)


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
    "swiglu_step": Activation(gated=True, phi=swish(1.0), limit=7.0, limits="after"),
    "situ": Activation(gated=True, beta=4.0, limit=25.0, limits="softly"),
    "geglu1": Activation(gated=True, phi=GELU, beta=1.0, cancels=True),
}
"""Activations by name. FlashInfer's ActivationType calls them Swiglu, SwigluBias (swiglu_oai:
alpha, beta and limit are given by tensors), Geglu, GegluTanh, Silu, Gelu, Relu, Relu2 and Identity;
vLLM's SILU_NO_MUL, GELU_NO_MUL, RELU2_NO_MUL are silu, gelu and relu2, its SILU is swiglu; its
SWIGLUSTEP and SITU (``layers/activation.py``) are swiglu_step and situ, whose ``linear_beta`` is
limit here; geglu1 is the experts' activation of its ``models/moondream3.py``."""


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
        numbers: the numbers of the swiglu family.
        interleaved: gate 0, up 0, gate 1, up 1, ... instead (GPT-OSS's checkpoints).

    Returns:
        [rows, inter].
    """
    if not activation.gated:
        return phi_of(activation, numbers).value(projected)
    gate, up = halves(projected, interleaved=interleaved)
    of_gate, of_up = gated_parts(activation, numbers)
    return of_gate.value(gate) * (of_up.value(up) + shift_of(activation, numbers))


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
        activation, projected, numbers, interleaved: the same as in ``activate``.
        errors: the errors of the shape of projected.

    Returns:
        [rows, inter].
    """
    phi = phi_of(activation, numbers)
    if not activation.gated:
        return phi.change(projected, errors)
    gate, up = halves(projected, interleaved=interleaved)
    gate_error, up_error = halves(errors, interleaved=interleaved)
    of_gate, of_up = gated_parts(activation, numbers)
    moved, up_error = of_gate.change(gate, gate_error), of_up.change(up, up_error)
    up = of_up.value(up) + shift_of(activation, numbers)
    return moved * (up.abs() + up_error) + of_gate.value(gate).abs() * up_error


def phi_of(activation: Activation, numbers: Swiglu) -> Phi:
    """Return the function of the gate, or of the only projection."""
    if activation.limits == "softly":
        return situ(numbers.beta)
    return activation.phi or swish(numbers.alpha)


def gated_parts(activation: Activation, numbers: Swiglu) -> tuple[Phi, Phi]:
    """Return the functions of the gate and of the up projection, limits included."""
    phi, limit = phi_of(activation, numbers), numbers.limit
    if not math.isfinite(limit):
        return phi, IDENTITY
    if activation.limits == "softly":
        return phi, soft_cap(limit)
    below, within = clamp(-math.inf, limit), clamp(-limit, limit)
    return chain(phi, below) if activation.limits == "after" else chain(below, phi), within


def shift_of(activation: Activation, numbers: Swiglu) -> float:
    """Return what is added to the up projection: beta, where it is no soft cap of the gate's."""
    return 0.0 if activation.limits == "softly" else numbers.beta


def lost_by_functions(
    activation: Activation,
    projected: torch.Tensor,
    numbers: Swiglu,
    *,
    share: float,
    tanh: float,
    interleaved: bool = False,
) -> torch.Tensor | float:
    """Bound what the activation's own sigmoid, erf or tanh loses: [rows, inter], or 0.

    Args:
        activation, projected, numbers, interleaved: the same as in ``activate``.
        share: absolute error of the sigmoid, or of (1 + erf) / 2, that the gate is multiplied by.
        tanh: absolute error of each tanh of a soft cap.
    """
    soft = activation.limits == "softly"
    if not (share or (tanh and soft)):
        return 0.0
    if not activation.gated:
        return share * projected.abs()
    gate, up = halves(projected, interleaved=interleaved)
    of_gate, of_up = gated_parts(activation, numbers)
    other = (of_up.value(up) + shift_of(activation, numbers)).abs()
    if not soft:
        # The gate as it is multiplied: beyond a limit that comes before, it is the limit.
        if activation.limits == "before":
            gate = gate.clamp(max=numbers.limit)
        return share * gate.abs() * other
    capped = soft_cap(numbers.beta).value(gate).abs()
    lost = (share * capped + tanh * numbers.beta * torch.sigmoid(gate)) * other
    if math.isfinite(numbers.limit):
        lost = lost + tanh * numbers.limit * of_gate.value(gate).abs()
    return lost


def halves(x: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gates and the ups of [rows, 2 * inter], views of it."""
    if interleaved:
        return x[:, 0::2], x[:, 1::2]
    inter = x.shape[1] // 2
    return x[:, :inter], x[:, inter:]
