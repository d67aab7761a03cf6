"""The problem of batch metadata: the batches that an engine steps through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import BaseProblem, check_at_least, check_lengths, refuse
from .field_types import check_types


@dataclass(frozen=True)
class MetadataProblem(BaseProblem):
    """Several calls of build_metadata in a row, as an engine steps through batches.

    Attributes:
        steps: a (query_lens, seq_lens) pair a call; batches shrink and grow.
        page_size: keys a page.
        spare_columns: garbage entries at the end of each block-table row.
        decode_threshold: query tokens up to which a request is a decode; above 1, as in
            speculative decoding, all decodes of a batch have as many.
        seed: the seed of the page ids and the garbage.
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
        check_types(self)
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
