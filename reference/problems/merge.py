"""The problem of merging: states of attention over parts of the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import DTYPES, BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types

MERGE_REGIMES = ("iid", "dominant_state", "shifted", "exact_grid")
EMPTY_STATES = ("none", "some", "all", "one")
STATE_STRIDES = ("", "padded", "different")
CONTEXTS = ("all", "some", "none")

LSE_LAYOUTS = ("", "heads_first", "padded", "padded_heads_first")
"""Ways in which lses lie in memory, the dense one first."""


@dataclass(frozen=True)
class MergeProblem(BaseProblem):
    """One call of merge_states.

    Attributes:
        num_states: states to be merged.
        num_tokens: query tokens of each state.
        num_heads: query heads of each state.
        head_dim: channels of each state.
        dtype: the dtype of the outs and the merged out; lses are float32.
        empty: which states are (0, -inf): ``none``, ``some`` (a quarter, by hash), ``all``, or
            ``one``: one of each row, by hash, where there are several states.
        regime: how values are made, one of ``MERGE_REGIMES``.
        strides: how the outs of states lie: dense if empty; ``padded``: rows of all states are
            equally wider than their channels; ``different``: each state lies by itself
            (``inputs.states``), with strides of its own.
        context: which tokens the first state has: ``all``; ``some``, those before
            ``context_tokens``; or ``none``. Behind them it is NaN and is not to be read.
        lse_layout: how lses lie: dense if empty; ``heads_first``: a view of [states, heads,
            tokens]; ``padded``: rows of each state have room for more heads, full of garbage;
            ``padded_heads_first``: rows of each head have room for more tokens.
        inf_marks_empty: whether the lse of an empty state is inf, of every other one by hash, as
            FlashAttention 2 marks a state of no keys; else -inf.
        output_scale: scale by which outputs in FP8 (float8_e4m3fn) are divided; null where the
            output has the dtype of the outs.
        seed: the seed of the values.
    """

    kind: ClassVar[str] = "merge"
    operation: ClassVar[str] = "merge_state"
    later_fields: ClassVar[tuple[str, ...]] = (
        "strides",
        "context",
        "lse_layout",
        "inf_marks_empty",
        "output_scale",
    )

    num_states: int = 2
    num_tokens: int = 1
    num_heads: int = 1
    head_dim: int = 16
    dtype: str = "float32"
    empty: str = "none"
    regime: str = "iid"
    strides: str = ""
    context: str = "all"
    lse_layout: str = ""
    inf_marks_empty: bool = False
    seed: int = 0
    output_scale: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("empty", self.empty, EMPTY_STATES)
        check_one_of("regime", self.regime, MERGE_REGIMES)
        check_one_of("strides", self.strides, STATE_STRIDES)
        check_one_of("context", self.context, CONTEXTS)
        check_one_of("lse_layout", self.lse_layout, LSE_LAYOUTS)
        check_at_least(
            self,
            (("num_states", 1), ("num_heads", 1), ("head_dim", 1), ("num_tokens", 0), ("seed", 0)),
        )

        scale = self.output_scale
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            refuse("output_scale", scale, "positive and finite, or null")

    @property
    def exact(self) -> bool:
        """Whether the output is exactly representable, so that it is compared bitwise."""
        return self.regime == "exact_grid" and self.output_scale is None

    @property
    def context_tokens(self) -> int:
        """Tokens that the first state has."""
        most = self.num_tokens
        return {"all": most, "some": self.seed % max(1, most), "none": 0}[self.context]

    @property
    def row_size(self) -> int:
        """Elements of a row of the output: heads times channels."""
        return self.num_heads * self.head_dim

    @property
    def work(self) -> int:
        """Elements of its tensors."""
        return 8 * self.num_states * self.num_tokens * self.num_heads * (self.head_dim + 1)
