"""Problems: compact, frozen, JSON-serialisable descriptions of one call.

A problem holds no tensor: ``materialise`` makes the tensors from it, with the same bits everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .attention import (
    ATTENTION_OPERATIONS,
    ATTENTION_REGIMES,
    EXACT_GAP,
    EXACT_KEYS,
    LARGEST_EXACT_QUERY,
    LEAST_EXACT_SCALE,
    MAX_REQUESTS,
    AttentionProblem,
)
from .base import (
    DTYPES,
    MAX_SEQ_LEN,
    BaseProblem,
    check_at_least,
    check_lengths,
    check_one_of,
    refuse,
)
from .moe import MoEProblem, RouteProblem

__all__ = [
    "ATTENTION_OPERATIONS",
    "ATTENTION_REGIMES",
    "DTYPES",
    "EMPTY_STATES",
    "EXACT_GAP",
    "EXACT_KEYS",
    "LARGEST_EXACT_QUERY",
    "LEAST_EXACT_SCALE",
    "MAX_REQUESTS",
    "MAX_SEQ_LEN",
    "MERGE_REGIMES",
    "AttentionProblem",
    "BaseProblem",
    "MergeProblem",
    "MetadataProblem",
    "MoEProblem",
    "Problem",
    "RouteProblem",
]

MERGE_REGIMES = ("iid", "dominant_state", "shifted", "exact_grid")
EMPTY_STATES = ("none", "some", "all")


@dataclass(frozen=True)
class MergeProblem(BaseProblem):
    """One call of merge_states.

    Attributes:
        num_states, num_tokens, num_heads, head_dim: shape of the states.
        dtype: of the outs and the merged out; lses are float32.
        empty: which states are (0, -inf): ``none``, ``some`` (a quarter, by hash) or ``all``.
        regime: one of ``MERGE_REGIMES``.
        seed: of the values.
    """

    kind: ClassVar[str] = "merge"
    operation: ClassVar[str] = "merge_state"

    num_states: int = 2
    num_tokens: int = 1
    num_heads: int = 1
    head_dim: int = 16
    dtype: str = "float32"
    empty: str = "none"
    regime: str = "iid"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("empty", self.empty, EMPTY_STATES)
        check_one_of("regime", self.regime, MERGE_REGIMES)
        check_at_least(
            self,
            (("num_states", 1), ("num_heads", 1), ("head_dim", 1), ("num_tokens", 0), ("seed", 0)),
        )

    @property
    def exact(self) -> bool:
        """Whether the output is exactly representable, so that it is compared bitwise."""
        return self.regime == "exact_grid"

    @property
    def work(self) -> int:
        """Elements of its tensors."""
        return 8 * self.num_states * self.num_tokens * self.num_heads * (self.head_dim + 1)


@dataclass(frozen=True)
class MetadataProblem(BaseProblem):
    """Several calls of build_metadata in a row, as an engine steps through batches.

    Attributes:
        steps: a (query_lens, seq_lens) pair a call; batches shrink and grow.
        page_size: keys a page.
        spare_columns: garbage entries at the end of each block-table row.
        decode_threshold: query tokens up to which a request is a decode; above 1, as in
            speculative decoding, all decodes of a batch have as many.
        seed: of the page ids and the garbage.
    """

    kind: ClassVar[str] = "metadata"
    operation: ClassVar[str] = "build_metadata"

    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((1,), (1,)),)
    page_size: int = 1
    spare_columns: int = 0
    decode_threshold: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        for position, step in enumerate(self.steps):
            if len(step) != 2 or len(step[0]) != len(step[1]):  # noqa: PLR2004
                refuse(f"steps[{position}]", step, "a pair of equally many lengths")
            for lengths in step:
                check_lengths(f"steps[{position}]", lengths)
        check_at_least(
            self,
            (("page_size", 1), ("spare_columns", 0), ("decode_threshold", 1), ("seed", 0)),
        )

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Pages of all steps."""
        return sum(-(-s // self.page_size) for _, seq_lens in self.steps for s in seq_lens) + 1


Problem = AttentionProblem | MergeProblem | MetadataProblem | RouteProblem | MoEProblem
