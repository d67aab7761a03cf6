"""What a law is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..verdicts.subject import Subject
from ..verdicts.verdict import Verdict

Values = tuple[Any, ...]
Choice = Mapping[str, Callable[[Values], Values]]
"""Functions by axis that filter its values down to those on which a law can judge."""


@dataclass(frozen=True)
class Law:
    """Something that must hold of every implementation of some operations.

    Attributes:
        name: how reports, ledgers and seeds call it.
        operations: what it speaks of.
        check: gives the verdict on a subject and a problem; may raise ``Stop``.
        statement: the law in one sentence.
        weight: its share of a profile's problems; parity sees the most.
        needs: an implementation must declare one of these, ``"writes_out"`` or features, for the
            law to have anything to look at; nothing if empty.
        looks_at: which values of axes it needs: problems are drawn by the first choice that leaves
            some of each axis, and the law has nothing to look at where none does. All if empty.
        overlap: why the law is kept though others kill every seeded bug that it kills; empty where
            it kills one alone.
        floor: fewest problems that it must judge of an implementation to count.
        cpu_seconds: least deadline of each call on a CPU: of a law whose calls are much larger
            than the problem that it is given.
        pairs: whether it judges the problems that cover pairs of features, see ``space.pairs``.
    """

    name: str
    operations: tuple[str, ...]
    check: Callable[[Subject, Any], Verdict]
    statement: str
    weight: float = 1.0
    needs: tuple[str, ...] = ()
    looks_at: tuple[Choice, ...] = field(default=(), hash=False)
    overlap: str = ""
    floor: int = 3
    cpu_seconds: float = 0.0
    pairs: bool = False

    def concerns(self, declared: Collection[str]) -> bool:
        """Whether an implementation that declares this has anything for the law to look at."""
        return not self.needs or any(each in declared for each in self.needs)


def chosen(values: Values) -> Values:
    """Leave out the values that mean that something is off."""
    return tuple(value for value in values if value)


def several(values: Values) -> Values:
    """Leave all of them, where there is a choice."""
    return values if len(values) > 1 else ()


ATTENTION = ("paged_attention", "ragged_attention")
PAGED = ("paged_attention",)
MERGE = ("merge_state",)
METADATA = ("build_metadata",)
CONTEXT_PARALLEL = ("slice_context_parallel",)
SLOTS = ("map_slots",)
BATCH = ("prepare_batch",)
STEPS = ("prepare_steps",)
PLAN = ("plan",)
APPEND = ("append_paged_kv",)
ROUTE = ("route",)
MOE = ("moe",)
BATCHED = ("batched_moe",)
QUANTIZE = ("quantize",)
NORM = ("norm_and_quantize",)
REARRANGE = ("rearrange",)
ROPE = ("rope_and_append",)
