"""The values that may be drawn for one operation, by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...impl.targets.refusal import Refusal
from ..laws.law import Choice
from .given_lengths import LENGTHS
from .moe_axes import TOGETHER

FIELDS = {
    "head_dims": ("head_dim_qk", "head_dim_vo"),
    "caches": ("kv_cache", "q_dtype"),
    "outputs": ("output", "rest"),
    "blocks": ("block_rows", "block_channels", "scale"),
    "kinds": ("codes", "saturate"),
    "turning": ("rope_dim", "plain_dim", "latent"),
    "head_counts": ("num_qo_heads", "num_kv_heads"),
    "scales": ("q_scale", "k_scale", "v_scale"),
    **TOGETHER,
}
"""Fields of the axes that have several each."""
NO_FIELDS = ("phase", "verify", "real", "fp4", "global_scale", *LENGTHS)
"""Axes that are lengths of a problem, rows of several fields, or fields that few problems have."""


def tuples(value: Any) -> Any:  # noqa: ANN401  JSON
    """Turn lists at any depth into tuples; of a mapping, those of its values."""
    if isinstance(value, dict):
        return {name: tuples(each) for name, each in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Axes:
    """What may be drawn for one operation.

    Attributes:
        operation: the operation of the problems.
        values: allowed values by axis, simplest first.
        max_work: most work of one problem, see ``AttentionProblem.work``.
        refused: axis and value of what narrowing removed, with the implementation's reason.
        simplest: one value each, together the simplest problem that is supported.
        restrictions: axes and the values that they are drawn from, one of these at a time; nothing
            where all of ``values`` may be combined. See ``modules``.
        edges: numbers of keys, ascending, that a kernel's tiles and parts end at. Where there are
            any, a problem is one request around or beyond one of them, if its operation has such.
        max_heads: most query heads of a batch of attention, each request's counted; 0 for any.
        max_requests: most requests of a batch of attention, or of a builder's; 0 for any.
        max_steps: most batches of a builder's problem; 0 for any.
    """

    operation: str
    values: Mapping[str, tuple[Any, ...]]
    max_work: int
    refused: Mapping[str, str] = field(default_factory=dict)
    simplest: Mapping[str, Any] = field(default_factory=dict)
    restrictions: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    edges: tuple[int, ...] = ()
    max_heads: int = 0
    max_requests: int = 0
    max_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary; refusals keep their codes."""
        refused = {
            name: each.to_json() if isinstance(each, Refusal) else each
            for name, each in self.refused.items()
        }
        return {**vars(self), "refused": refused}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Axes:
        """Read what ``to_json`` gave; TypeError or ValueError where it is something else."""
        refused = {
            name: each if isinstance(each, str) else Refusal(**each)
            for name, each in data["refused"].items()
        }
        return cls(**{**tuples(dict(data)), "refused": refused})

    def restricted(self) -> list[Axes]:
        """Return the axes of each restriction, or these where there is none."""
        parts = [
            replace(self, values={**self.values, **part}, restrictions=())
            for part in self.restrictions
        ]
        return parts or [self]

    def allows(self, name: str) -> tuple[Any, ...]:
        """Return the values of an axis."""
        return self.values[name]

    def within(self, choices: Sequence[Choice]) -> Axes | None:
        """Return the axes that hold something for a law, see ``Law.looks_at``; None if none do."""
        if not choices:
            return self
        # Of all restrictions: a law may compare a module with another.
        wanted = [
            {name: set(leave(self._anywhere(name))) for name, leave in choice.items()}
            for choice in choices
        ]
        parts = [
            part
            for restriction in self.restrictions or ({},)
            if (part := self._chosen(restriction, wanted)) is not None
        ]
        if not parts:
            return None
        if self.restrictions:
            return replace(self, restrictions=tuple(parts))
        return replace(self, values={**self.values, **parts[0]})

    def _chosen(
        self,
        restriction: Mapping[str, tuple[Any, ...]],
        wanted: Sequence[Mapping[str, set[Any]]],
    ) -> Mapping[str, tuple[Any, ...]] | None:
        allowed = {**self.values, **restriction}
        for choice in wanted:
            left = {
                name: tuple(each for each in allowed[name] if each in kept)
                for name, kept in choice.items()
            }
            if all(left.values()):
                return {**restriction, **left}
        return None

    def _anywhere(self, name: str) -> tuple[Any, ...]:
        """Return the values of an axis in any of the restrictions."""
        given = (part.get(name, self.values[name]) for part in self.restrictions or ({},))
        return tuple(dict.fromkeys(value for values in given for value in values))
