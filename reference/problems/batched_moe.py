"""Problems of batched experts: rows by expert, of which each has a number in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import BaseProblem, check_at_least, refuse
from .field_types import check_types
from .moe import MoEProblem

MOST_ROWS = 2**10
"""Most rows of an expert: an expert's rows have identities of their own."""
MOST_EXPERTS = 2**10


@dataclass(frozen=True)
class BatchedMoEProblem(BaseProblem):
    """One call of ``batched_moe``, which says more of the fields that it shares.

    Attributes:
        counts: rows in use, of each expert of this rank.
        most_rows: rows that each expert has room for.
        hidden: channels of the hidden states.
        inter: channels between both products.
        activation: one of ``ACTIVATIONS``.
        dtype: the dtype of hidden states and weights that are not quantised, and of the output.
        biases: whether both products have one.
        interleaved: gate and up rows alternate.
        swiglu_parameters: the same as in problems of ``moe``.
        quantized: format of the weights, as of problems of ``moe``.
        quantized_hidden: the hidden states are quantised too, as of problems of ``moe``.
        regime: how values are made, one of ``MOE_REGIMES``.
        seed: the seed of the values.
    """

    kind: ClassVar[str] = "batched_moe"
    operation: ClassVar[str] = "batched_moe"

    counts: tuple[int, ...] = (1,)
    most_rows: int = 1
    hidden: int = 16
    inter: int = 16
    activation: str = "swiglu"
    dtype: str = "float32"
    biases: bool = False
    interleaved: bool = False
    swiglu_parameters: str = ""
    quantized: str = ""
    quantized_hidden: bool = False
    regime: str = "iid"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_at_least(self, (("most_rows", 1), ("hidden", 1), ("inter", 1), ("seed", 0)))
        if self.most_rows > MOST_ROWS:
            refuse("most_rows", self.most_rows, f"at most {MOST_ROWS}")
        if not 1 <= len(self.counts) <= MOST_EXPERTS:
            refuse("counts", self.counts, f"a number for each of 1 to {MOST_EXPERTS} experts")
        for expert, count in enumerate(self.counts):
            if not 0 <= count <= self.most_rows:
                refuse(f"counts[{expert}]", count, f"from 0 to most_rows = {self.most_rows}")
        _ = self.rows  # checks the other fields

    @property
    def num_experts(self) -> int:
        """Experts of this rank."""
        return len(self.counts)

    @property
    def rows(self) -> MoEProblem:
        """The rows in use as tokens of one expert each, in the experts' order."""
        return MoEProblem(
            num_tokens=sum(self.counts),
            hidden=self.hidden,
            inter=self.inter,
            num_experts=self.num_experts,
            activation=self.activation,
            dtype=self.dtype,
            biases=self.biases,
            interleaved=self.interleaved,
            swiglu_parameters=self.swiglu_parameters,
            quantized=self.quantized,
            quantized_hidden=self.quantized_hidden,
            regime=self.regime,
            seed=self.seed,
            token_ids=tuple(
                expert * MOST_ROWS + row
                for expert, count in enumerate(self.counts)
                for row in range(count)
            ),
        )

    @property
    def gated(self) -> bool:
        """Whether there are gate and up rows."""
        return self.rows.gated

    @property
    def exact(self) -> bool:
        """Whether the output is exactly representable, so that it is compared bitwise."""
        return self.rows.exact

    @property
    def work(self) -> int:
        """Multiply-adds of the rows in use plus elements of the tensors: what it costs, roughly."""
        return self.rows.work + self.num_experts * self.most_rows * self.hidden
