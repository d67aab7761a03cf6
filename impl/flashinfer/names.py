"""FlashInfer's names of activations and routing methods.

They are looked up by name in the release that is installed, and never passed as numbers, which
move: ``ActivationType.Identity`` is 7 in 0.6.7, 8 in 0.6.13 and 9 in 0.7.2.post1, and 6 of
``RoutingMethodType`` was Unspecified and is SigmoidRenorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...reference.moe.routing_methods import ROUTING_NAMES
from ..targets.optional import require
from ..targets.target import UnsupportedError

ENUMS = "flashinfer.tllm_enums"
ACTIVATION_NAMES: Mapping[str, str] = {
    "swiglu": "Swiglu",
    "geglu": "Geglu",
    "geglu_tanh": "GegluTanh",
    "swiglu_oai": "SwigluBias",
    "silu": "Silu",
    "gelu": "Gelu",
    "relu": "Relu",
    "relu2": "Relu2",
    "identity": "Identity",
}
"""Members of ``ActivationType``, by the oracle's names. gelu_tanh has none."""
ROUTING_MEMBERS: Mapping[str, str] = {
    ours: theirs for theirs, ours in ROUTING_NAMES["flashinfer"].items()
}
"""Members of ``RoutingMethodType``, by the oracle's names. deepseek_v4 has none."""


def activation_member(activation: str) -> Any:  # noqa: ANN401  a member of an enum of theirs
    """Return the release's ``ActivationType`` member of an activation.

    Raises:
        UnsupportedError: the release has none by that name, or FlashInfer is not installed.
    """
    return _member("ActivationType", ACTIVATION_NAMES.get(activation), activation)


def routing_member(method: str) -> Any:  # noqa: ANN401  a member of an enum of theirs
    """Return the release's ``RoutingMethodType`` member of a routing method.

    Raises:
        UnsupportedError: the release has none by that name, or FlashInfer is not installed.
    """
    return _member("RoutingMethodType", ROUTING_MEMBERS.get(method), method)


def _member(enum: str, name: str | None, ours: str) -> Any:  # noqa: ANN401  theirs
    members = getattr(require(ENUMS, "flashinfer"), enum).__members__
    if name is None or name not in members:
        wanted = f" (it would be {name})" if name else ""
        message = f"FlashInfer's {enum} has no member for {ours!r}{wanted}"
        raise UnsupportedError(message)
    return members[name]
