"""What a run has reached of an implementation, as data and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..verdicts.text import count_of

EDGES = {
    "several_requests": "several requests",
    "request_without_keys": "a request without keys",
    "several_pages": "several pages",
    "several_tiles": "several tiles of keys",
    "several_splits": "several splits of the keys",
    "several_chunks": "queries behind earlier keys",
    "several_experts": "tokens on four experts or more",
    "rows_beyond_a_tile": "more tokens of an expert than a tile has rows",
    "several_slots": "several experts a token",
}
"""Structural edges that a problem may cross, by the field that counts them, in words."""
MOST_NAMED = 3
"""Gaps that a sentence names; it counts the others."""


@dataclass(frozen=True)
class Gap:
    """A floor that was not reached: what too few problems were judged of.

    Attributes:
        code: ``law``: problems of a law; ``edge``: problems that cross a structural edge; ``axis``:
            problems with a value of a run-time axis; ``real``: problems with a value that ten
            families of models have; ``feature``: problems with a feature that is declared;
            ``kernel``: lines of a Triton kernel.
        name: the name of the law, the edge, the axis, the feature or the kernel.
        value: the value of the axis; the longest blocks of the kernel that did not run.
        judged, floor: problems that were judged, or lines that ran, and that are wanted.
        seconds: seconds of a worker that reaching the floor would take; None where nothing was
            judged, which leaves it unknown.
    """

    code: Literal["law", "edge", "axis", "real", "feature", "kernel"]
    name: str
    value: str = ""
    judged: int = 0
    floor: int = 1
    seconds: float | None = None

    @property
    def text(self) -> str:
        """What is missing, in words."""
        if self.code == "kernel":
            lines = count_of(self.floor, "line")
            return f"{self.judged} of {lines} of {self.name}, never run: {self.value}"
        value = f"with {self.name}={self.value}"
        of = {
            "law": f"under {self.name}",
            "axis": value,
            "real": f"{value}, as models have",
            "feature": f"with the feature {self.name}, which is declared",
        }
        about = of.get(self.code, f"with {EDGES.get(self.name, self.name)}")
        return f"{self.judged} of {count_of(self.floor, 'problem')} {about}"


@dataclass(frozen=True)
class Coverage:
    """What was reached of one implementation.

    Attributes:
        asked: laws that were to run.
        judged: problems that each law judged.
        early: laws that ended before they had their problems, and why: ``time``, ``stopped`` or
            ``room``.
        idle: laws that found nothing to judge.
        lengths: least, median, 90 % quantile and most of keys and queries of a request, of requests
            and pages of a problem, and so on; by name.
        edges: problems that crossed each structural edge, see ``EDGES``; only those that a problem
            of the operation can cross.
        pairs: pairs of values of two axes that were seen together, and how many there are.
        unseen: claimed values of which no problem was judged, by axis.
        gaps: floors that were not reached.
        real: values of the table of what models have that judged problems had, by axis.
        real_unseen: those that might have been drawn and were not.
        without_long: why no request of many thousand keys was judged; empty where one was, or the
            profile asks for none.
        without_full: which kinds of batches that fill a GPU were not judged, and why; empty where
            each was, or the run asks for none.
    """

    asked: int = 0
    judged: Mapping[str, int] = field(default_factory=dict)
    early: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    lengths: Mapping[str, tuple[int, int, int, int]] = field(default_factory=dict)
    edges: Mapping[str, int] = field(default_factory=dict)
    pairs: tuple[int, int] = (0, 0)
    unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    real: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    real_unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_long: str = ""
    without_full: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        names = ("least", "median", "p90", "most")
        return {
            **asdict(self),
            "lengths": {
                name: dict(zip(names, numbers, strict=True))
                for name, numbers in self.lengths.items()
            },
            "pairs": {"seen": self.pairs[0], "of": self.pairs[1]},
            "gaps": [{**asdict(gap), "text": gap.text} for gap in self.gaps],
        }

    @property
    def laws(self) -> str:
        """Laws that judged something, of those that were to run."""
        return f"{sum(map(bool, self.judged.values()))}/{self.asked}"

    @property
    def longest(self) -> str:
        """The first of the lengths, its median and its most."""
        for _, median, _, most in self.lengths.values():
            return f"{median:,} to {most:,}"
        return ""

    @property
    def text(self) -> str:
        """What was reached, in one line."""
        parts = [f"{self.laws} laws judged problems"]
        if self.early:
            parts.append(f"ended early: {', '.join(self.early)}")
        parts += [
            f"{name} {median:,} to {most:,}" for name, (_, median, _, most) in self.lengths.items()
        ]
        crossed = [f"{EDGES[name]} {count:,}" for name, count in self.edges.items()]
        seen, of = self.pairs
        pairs = [f"{seen:,} of {of:,} pairs of axis values"] if of else []
        drawn, left = (sum(map(len, each.values())) for each in (self.real, self.real_unseen))
        real = [f"{drawn:,} of {drawn + left:,} values of models"] if drawn + left else []
        long = [f"no very long request: {self.without_long}"] if self.without_long else []
        full = [self.without_full] if self.without_full else []
        return "; ".join([*parts, *crossed, *pairs, *real, *long, *full])


def gaps_text(gaps: tuple[Gap, ...]) -> str:
    """Return what is missing and the seconds that it would take, in one sentence's end."""
    named = ", ".join(gap.text for gap in gaps[:MOST_NAMED])
    others = f" and {len(gaps) - MOST_NAMED} more" if len(gaps) > MOST_NAMED else ""
    known = [gap.seconds for gap in gaps if gap.seconds is not None]
    if not known:
        return f"{named}{others}"
    more = "more than " if len(known) < len(gaps) else "about "
    return f"{named}{others}; the rest would take a worker {more}{max(1.0, sum(known)):.0f} s"
