"""What ``route`` and ``moe`` are given: the oracle's own parameters as attributes.

``storages`` is what it is in ``inputs``: the flat buffers, with canaries around each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..moe.activations import ACTIVATIONS
from ..moe.calls import MoEOptions
from ..moe.routing_methods import RENORMALISE_FLOOR
from ..moe.routing_rules import JITTER
from ..moe.weights import QuantizedMatrix
from .moe_widths import cut_columns, cut_rows


@dataclass(frozen=True, eq=False)
class RouteInputs:
    """Arguments of ``route``.

    Attributes:
        bias: float32 or bfloat16 [experts], or None.
        num_groups, topk_groups: None without groups.
        expert_scales: float32 [experts], or None.
        shared_experts: how many of the last columns of ``logits`` are theirs.
        expert_table: int32 [vocabulary, top_k], or None.
        input_ids: int64 [tokens] where there is a table, or None.
        group_score: ``"best"``, ``"two_best"``, or None for what the method and the bias say.
        storages: flat buffers by field name, of which the tensors are views.
    """

    logits: torch.Tensor
    top_k: int
    method: str = "renormalize"
    bias: torch.Tensor | None = None
    num_groups: int | None = None
    topk_groups: int | None = None
    scaling_factor: float = 1.0
    masked_groups: str = "-inf"
    renormalise_floor: float = RENORMALISE_FLOOR
    expert_scales: torch.Tensor | None = None
    best_of_each_group: bool = False
    shared_experts: int = 0
    expert_table: torch.Tensor | None = None
    input_ids: torch.Tensor | None = None
    jitter: float = JITTER
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)
    group_score: str | None = None

    @property
    def slots(self) -> int:
        """Experts of each token, the shared ones too."""
        return self.top_k + self.shared_experts

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the oracle."""
        names = ("method", "bias", "num_groups", "topk_groups", "scaling_factor", "masked_groups",
                 "renormalise_floor", "expert_scales", "best_of_each_group", "shared_experts",
                 "expert_table", "input_ids", "jitter", "group_score")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def of_tokens(self, index: torch.Tensor) -> RouteInputs:
        """Return the same call with some of the tokens, or with them in another order."""
        ids = self.input_ids
        return replace(
            self, logits=self.logits[index], input_ids=None if ids is None else ids[index]
        )


@dataclass(frozen=True, eq=False)
class MoEInputs:
    """Arguments of ``moe``.

    Attributes:
        w2: the second matrices; with one_product [experts, inter, 0], and then the result is
            [tokens, inter].
        topk_ids: int32 [tokens, top_k].
        topk_weights: float32 [tokens, top_k].
        out_dtype: dtype of the result.
        out: buffer for the result of implementations with ``writes_out``, else None.
        hidden_size, inter_size: channels that count where the weights' tensors, and it may be the
            hidden states', are wider; the result has ``hidden_size``. None: tensors are as wide.
        router_logits: float32 [tokens, experts], of which the call takes the top_k largest and
            their softmax, for implementations with the feature ``router_logits``, else None.
        storages: flat buffers by field name, of which the tensors are views.
    """

    hidden: torch.Tensor | QuantizedMatrix
    w13: torch.Tensor | QuantizedMatrix
    w2: torch.Tensor | QuantizedMatrix
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out_dtype: torch.dtype
    activation: str = "swiglu"
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    alpha: float | torch.Tensor | None = None
    beta: float | torch.Tensor | None = None
    limit: float | torch.Tensor | None = None
    interleaved: bool = False
    expert_offset: int = 0
    num_experts: int | None = None
    weights_on_input: bool = False
    intermediate_scale: float | torch.Tensor | None = None
    shared_w13: torch.Tensor | QuantizedMatrix | None = None
    shared_w2: torch.Tensor | QuantizedMatrix | None = None
    shared_weight: float = 1.0
    output_norm_eps: float | None = None
    output_norm_gain: torch.Tensor | None = None
    output_norm_first: bool = False
    routed_scaling_factor: float = 1.0
    shared_gate: torch.Tensor | None = None
    shared_gate_logits: bool = False
    one_product: bool = False
    out: torch.Tensor | None = None
    hidden_size: int | None = None
    inter_size: int | None = None
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)
    identity_experts: int = 0
    router_logits: torch.Tensor | None = None

    def tensors(self) -> tuple[Any, Any, Any, Any, Any]:
        """Return the positional arguments of the oracle, without the padding of channels."""
        hidden, w13, w2 = self.hidden, self.w13, self.w2
        if self.hidden_size is not None:
            hidden = cut_columns(hidden, self.hidden_size)
            w13, w2 = self._first(w13), self._second(w2)
        return hidden, w13, w2, self.topk_ids, self.topk_weights

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the oracle, without padding."""
        found = {name: getattr(self, name) for name in OPTIONS}
        if self.hidden_size is not None:
            cuts = {"w13_bias": self._rows, "w2_bias": lambda each: each[:, : self.hidden_size],
                    "shared_w13": self._first, "shared_w2": self._second}  # fmt: skip
            for name, cut in cuts.items():
                found[name] = None if found[name] is None else cut(found[name])
        return found

    def _rows(self, rows: Any) -> Any:  # noqa: ANN401  of biases, or a matrix
        """Return the rows of w13, or of its bias, that count."""
        size = self.inter_size or 0
        if not ACTIVATIONS[self.activation].gated:
            return cut_rows(rows, size)
        return cut_rows(rows, 2 * size) if self.interleaved else cut_rows(rows, size, parts=2)

    def _first(self, matrix: Any) -> Any:  # noqa: ANN401  a tensor or a QuantizedMatrix
        return cut_columns(self._rows(matrix), self.hidden_size or 0)

    def _second(self, matrix: Any) -> Any:  # noqa: ANN401  a tensor or a QuantizedMatrix
        return cut_columns(cut_rows(matrix, self.hidden_size or 0), self.inter_size or 0)


OPTIONS = tuple(each.name for each in fields(MoEOptions) if each.name != "compute_dtype")
"""Keyword arguments of ``moe`` that a record has, all but ``compute_dtype``."""


def map_matrix(
    matrix: torch.Tensor | QuantizedMatrix,
    change: Any,  # noqa: ANN401  tensor -> tensor
) -> torch.Tensor | QuantizedMatrix:
    """Apply a function to the first axis of a matrix: to its numbers, or to codes and scales.

    Scales that are one for the whole matrix stay as they are.
    """
    if isinstance(matrix, torch.Tensor):
        changed: torch.Tensor = change(matrix)
        return changed
    scale = matrix.global_scale
    return matrix._replace(
        codes=change(matrix.codes),
        scales=change(matrix.scales) if matrix.scales.dim() else matrix.scales,
        global_scale=change(scale) if isinstance(scale, torch.Tensor) else scale,
        zero_points=None if matrix.zero_points is None else change(matrix.zero_points),
    )
