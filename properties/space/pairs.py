"""Problems of attention, and of appending, that cover features, or pairs, the same in each run.

A fault of two features shows where a call has both. A problem that is drawn has a part of what an
implementation claims, so that rare pairs meet in none of a law's problems. Here each pair of kinds
that is claimed meets in one problem at least, whose requests are long enough for both.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...reference import AttentionProblem
from ...reference.problems.base import is_power_of_two
from .attention_axes import PAIR, attention_example
from .attention_strategies import FEATURES, OF_WINDOWS, OFF, TILE_OF_HEADS
from .axis_values import Axes
from .given_lengths import given

Taken = Callable[[Sequence[AttentionProblem]], "list[bool]"]
"""Returns whether each problem is supported, and may show what is not known of it."""
Level = tuple[str, Hashable]
"""An axis, and a kind of its values other than the plainest."""
Row = tuple[Level, ...]
"""Kinds of one problem, in the order in which they are chosen."""
Pair = frozenset[Level]
"""Two kinds, in no order."""
MOST_LEVELS = 8
"""Most kinds of one problem: of many features, one hides what another shows."""
FEW_LEVELS = 4
"""Most kinds of a problem where each kind is covered, not each pair: more of them are refused."""
THIRD = ("head_dims", "group_size", "caches", "causal")
"""Axes of a kind beside which a pair may be taken that is not taken by itself."""
OF_HEADS, MOST_HEADS = ("head_dims", "group_size"), 2
"""Axes of each kind of which as many values are chosen, the smallest: others cost more."""
COVERED = (*THIRD, "q_scale", *FEATURES)
"""Axes whose kinds are covered."""
AT_ALL = ("mask_pattern", "kv_views")
"""Features whose values are all of one kind: a kernel reads masks and strides alike."""
ROTATED = ("dtype", "kv_layout", "page_size")
"""Axes of which each problem has the next value."""
WITH_OTHERS = ("caches", "head_dims", "causal")
"""Axes a value of which some kinds need besides: a scale a quantised cache, say."""
SHOWING: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("window_left", "window_right"), (1, 2)),
    "chunk": (7, 2),
    "sink_tokens": (1, 4),
    "sm_scale": (0.25, 0.05),
    "output_scale": (0.25,),
}
"""Values that show beside other features, where they may be drawn: a window of no other key, or
one wider than all requests, shows none of them, nor does a softmax with a single weight, and a
scale of 1 is no scale."""
KV_HEADS, FEW_QUERY_HEADS = 2, 16
"""KV heads of a problem, unless it had more query heads than these: scales are of each KV head."""
LARGEST_PAGE = 8
"""Most keys of a page: each request fills some, one of which may be the cache's last."""
KEYS = (80, 40, 20, 10)
"""Keys of the longest request: the first number that is within ``DEARER``."""
DEARER, DEAREST = 4, 10
"""Work of these problems, as a multiple of the most work of one that is drawn: most of requests
that could be shorter, and most of all, beyond which heads are too dear."""
LEAST_WORK, LEAST_HEADS = 1 << 15, 6
"""Fewest work of which these are multiples, and fewest heads of all requests: with less, no problem
would have several requests, KV heads and tiles of keys. Such a call takes some 0.3 s."""
SIDES: tuple[Mapping[str, Any], ...] = (
    {"window_left": 1}, {"window_right": 1, "causal": False},
)  # fmt: skip
"""Windows of which one side ends within the keys."""
TILES = 65
"""Queries of a request that fills several tiles of most kernels."""
TOKENS = 6
"""Query tokens of a chunk: more than the narrowest windows let see."""
REQUESTS = 3
"""Requests of a batch, where heads leave room for them."""


def pairs_of_features(axes: Axes, taken: Taken) -> list[AttentionProblem]:
    """Return problems that cover the pairs of kinds that an implementation takes.

    Each problem covers a pair that none before it has, and many others with it.

    Args:
        axes: what may be drawn.
        taken: asks the implementation, and its known failures.
    """
    if given(axes.values):
        return []
    rows = _Rows(_with_room(axes), taken)
    missing = rows.pairs()
    found, possible = list[AttentionProblem](), set(missing)
    while missing:
        pair, row = next(iter(missing.items()))
        longer = _with_others(row, missing, possible, rows.values)
        problem = rows.longest(longer, len(row), len(found))
        covered = rows.kinds_of(problem) if problem else set[Level]()
        if problem:
            found.append(problem)
            rows.used.update(covered)
        # The first pair was taken with the values before: refused now, it is left out.
        missing = {each: v for each, v in missing.items() if each != pair and not each <= covered}
    return [*rows.with_tiles(), *found]


def kinds_of_features(axes: Axes, taken: Taken) -> list[AttentionProblem]:
    """Return a few problems that cover each kind that an implementation takes, cheap ones first.

    Args:
        axes: what may be drawn.
        taken: asks the implementation, and its known failures.
    """
    if given(axes.values):
        return []
    rows, found = _Rows(_with_room(axes), taken), list[AttentionProblem]()
    missing = [*rows.values]
    while missing:
        row = missing[:1]
        for level in missing:
            if len(row) < FEW_LEVELS and level[0] not in {name for name, _ in row}:
                row.append(level)
        problem = rows.longest(tuple(row), 1, len(found))
        covered = rows.kinds_of(problem) if problem else set[Level]()
        if problem and covered & {*missing}:
            found.append(problem)
            rows.used.update(covered)
        missing = [each for each in missing[1:] if each not in covered]
    found += rows.with_tiles()
    # One of many heads may take as long as all others.
    return sorted(found, key=lambda problem: problem.work)


def _with_room(axes: Axes) -> Axes:
    """Return axes of one module, in which problems of several requests have room."""
    one = axes.restricted()[0]
    heads = one.max_heads and max(one.max_heads, LEAST_HEADS)
    return replace(one, max_work=max(one.max_work, LEAST_WORK), max_heads=heads)


def _with_others(
    row: Row, missing: Iterable[Pair], possible: set[Pair], levels: Iterable[Level]
) -> Row:
    """Return a row with further kinds, each of which goes with all of it.

    The next one is that with which most missing pairs are covered.
    """
    wanted = set(missing)
    while len(row) < MOST_LEVELS:
        gains = {
            level: sum(frozenset((level, each)) in wanted for each in row)
            for level in levels
            if all(frozenset((level, each)) in possible for each in row)
        }
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or not gains[best]:
            break
        row = (*row, best)
    return row


@dataclass
class _Rows:
    """Makes problems of rows of kinds, and asks which of them are taken.

    Attributes:
        axes: what may be drawn.
        ask: asks the implementation, and its known failures.
        values: the claimed values of each kind.
        needs: the value of another axis without which a kind is refused, by kind.
        used: numbers of problems by kind: its values take turns.
    """

    axes: Axes
    ask: Taken
    values: dict[Level, tuple[Any, ...]] = field(default_factory=dict)
    needs: dict[Level, dict[str, Any]] = field(default_factory=dict)
    used: Counter[Level] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Find the kinds that are claimed, and what each needs."""
        for name in COVERED:
            values = self.axes.values.get(name, ())
            showing = tuple(each for each in values if each in SHOWING.get(name, values))
            for value in showing or values:
                kind = _kind(name, value)
                some = len(self.values.get((name, kind), ())) < MOST_HEADS or name not in OF_HEADS
                if kind is not None and some:
                    self.values[name, kind] = (*self.values.get((name, kind), ()), value)
        alone = zip(self.values, self.made([((level,), 0) for level in self.values]), strict=True)
        asked = [
            (level, {name: value})
            for level, problem in alone
            if problem is None
            for name in WITH_OTHERS
            for value in self.axes.values.get(name, ())
            if name != level[0]
        ]
        tried = [
            _problem(self.axes, {**need, **self._chosen((level,))}, 0) for level, need in asked
        ]
        for (level, need), taken in zip(asked, self.ask(tried), strict=True):
            if taken:
                self.needs.setdefault(level, need)

    def pairs(self) -> dict[Pair, Row]:
        """Return the pairs that the implementation takes, each with its row.

        That is of three kinds where a pair is taken beside a third one only.
        """
        both = [row for row in itertools.combinations(self.values, 2) if row[0][0] != row[1][0]]
        found = self._taken(both)
        more = [
            (*row, level)
            for row in both
            if frozenset(row) not in found
            for level in self.values
            if level[0] in THIRD and level[0] not in {name for name, _ in row}
        ]
        return found | {pair: row for pair, row in self._taken(more).items() if pair not in found}

    def _taken(self, rows: Sequence[Row]) -> dict[Pair, Row]:
        found: dict[Pair, Row] = {}
        for row, problem in zip(rows, self.made([(row, 0) for row in rows]), strict=True):
            if problem and {*row} <= self.kinds_of(problem):
                found.setdefault(frozenset(row[:2]), row)
        return found

    def kinds_of(self, problem: AttentionProblem) -> set[Level]:
        """Return the claimed kinds that a problem has."""
        dims = (problem.head_dim_qk, problem.head_dim_vo, *(0,) * problem.values_in_keys)
        own = {"head_dims": dims, "caches": (problem.kv_cache, problem.q_dtype)}
        names = {name for name, _ in self.values}
        had = {(name, _kind(name, own.get(name) or getattr(problem, name))) for name in names}
        return had & self.values.keys()

    def made(self, asked: Sequence[tuple[Row, int]]) -> list[AttentionProblem | None]:
        """Return the problem of each row and number; None where it is not taken."""
        tried = [_problem(self.axes, self._chosen(row), number) for row, number in asked]
        most = DEAREST * self.axes.max_work
        return [
            problem if taken and problem.work <= most else None
            for problem, taken in zip(tried, self.ask(tried), strict=True)
        ]

    def longest(self, row: Row, least: int, number: int) -> AttentionProblem | None:
        """Return a problem with the first kinds of a row, and those of the others it takes."""
        kept = row[:least]
        found, turned, plain = self.made([(row, number), (kept, number), (kept, 0)])
        if found:
            return found
        # Its layout, say, is refused beside the pair: then it has the plainest one.
        found, number = (turned, number) if turned else (plain, 0)
        for level in row[least:]:
            (more,) = self.made([((*kept, level), number)])
            kept, found = ((*kept, level), more) if more else (kept, found)
        return found

    def with_tiles(self) -> list[AttentionProblem]:
        """Return a request of several tiles of queries for each side of a window, or for none.

        Where a window begins and ends is computed for each tile of rows: of queries and heads.
        """
        if not {"chunk", "prefill"} & {*self.axes.values["phase"]}:
            return []
        several = {"num_kv_heads": self.axes.values["num_kv_heads"][0]}
        groups = [each for each in self.axes.values["group_size"] if each > 1][:1]
        claimed = self.axes.values
        sides = [s for s in SIDES if all(v in claimed.get(name, ()) for name, v in s.items())]
        found = [each for side in sides for each in self._tiles({**several, **side}, groups)]
        return found or self._tiles(several, groups)

    def _tiles(self, chosen: Mapping[str, Any], groups: Sequence[int]) -> list[AttentionProblem]:
        """Return the problem with some values in a group of heads; else without, or none."""
        tried = [
            replace(
                _problem(self.axes, {**chosen, "group_size": group}, 0),
                query_lens=(TILES,),
                seq_lens=(TILES,),
            )
            for group in (*groups, 1)
        ]
        most = DEAREST * self.axes.max_work
        both = zip(tried, self.ask(tried), strict=True)
        return [each for each, taken in both if taken and each.work <= most][:1]

    def _chosen(self, row: Row) -> dict[str, Any]:
        needed = {name: v for each in row for name, v in self.needs.get(each, {}).items()}
        values = {each: self.values[each] for each in row}
        turns = {name: v[self.used[name, k] % len(v)] for (name, k), v in values.items()}
        return {**needed, **turns}


def _kind(name: str, value: Any) -> Hashable:  # noqa: ANN401  a value of any axis
    """Return the kind of a value; None for the plainest."""
    if name == "head_dims":
        padded = tuple(not is_power_of_two(each) for each in value[:PAIR])
        kind = (*padded, value[0] != value[1], len(value) > PAIR)
        return kind if any(kind) else None
    if name == "group_size":
        if value > TILE_OF_HEADS:
            return "tiles of heads", value % TILE_OF_HEADS > 0
        return None if is_power_of_two(value) else "part of a tile"
    if name == "caches":
        # Bytes that stand for FP8 are read as FP8.
        return (value[0].partition(" as ")[0], bool(value[1])) if value[0] else None
    if name == "causal":
        return None if value else "not causal"
    on = value if isinstance(value, str) and name not in AT_ALL else "on"
    return None if value == getattr(OFF, name) else on


def _problem(axes: Axes, chosen: Mapping[str, Any], number: int) -> AttentionProblem:
    """Return a problem with some values: the plainest others, or those whose turn it is."""
    plain = {name: values[0] for name, values in axes.values.items() if values}
    plain |= {name: v for name, v in axes.simplest.items() if v in axes.values.get(name, ())}
    plain |= {name: v for name, v in (("causal", True), ("regime", "iid"))
              if v in axes.values.get(name, ())}  # fmt: skip
    for name in ROTATED if number else ():
        values = axes.values.get(name, ())
        if name == "page_size":
            values = tuple(each for each in values if each <= LARGEST_PAGE)
        plain |= {name: values[number % len(values)]} if values else {}
    if number and axes.values.get("page_order"):
        plain["page_order"] = axes.values["page_order"][-1]
    if any(chosen.get(name) for name in OF_WINDOWS) and "window_left" not in chosen:
        windows = axes.values.get("window_left", ())
        chosen = {**chosen, "window_left": next((each for each in windows if each > 0), -1)}
    several = KV_HEADS * chosen.get("group_size", plain["group_size"]) <= FEW_QUERY_HEADS
    if "num_kv_heads" not in chosen and several and KV_HEADS in axes.values.get("num_kv_heads", ()):
        plain["num_kv_heads"] = KV_HEADS
    problem = replace(attention_example(axes.operation, {**plain, **chosen}), seed=number)
    for keys in KEYS:
        found = _with_lengths(axes, problem, keys, number)
        if found.work <= DEARER * axes.max_work:
            break
    return found


def _with_lengths(
    axes: Axes, problem: AttentionProblem, keys: int, number: int
) -> AttentionProblem:
    """Return a problem with requests of many keys, of several queries where that is claimed."""
    phases = axes.values["phase"]
    verified = [tokens for tokens in axes.values.get("verify", ()) if tokens > 0]
    # Of other lengths by tiles: else one request's length in another's place shows nothing.
    longest, half, few = keys, max(keys // 2 - 3, TOKENS + 1), max(keys // 4, 2)
    if "chunk" in phases:
        lengths = [(TOKENS, longest), (TOKENS + 1, half), (1, few)]
    elif "prefill" in phases:
        lengths = [(each, each) for each in (keys // 2, keys // 4, 1)]
    elif verified:
        tokens = verified[number % len(verified)]
        lengths = [(tokens, max(tokens, each)) for each in (longest, half, 1)]
    else:
        lengths = [(1, longest), (1, half), (1, few)]
    if number % 2:  # a later request takes an earlier one's place, or the other way round
        lengths[:2] = reversed(lengths[:2])
    count = axes.max_requests or REQUESTS
    if axes.max_heads:
        # Two at least: of requests with flags, every second one differs.
        count = min(count, max(2, axes.max_heads // problem.num_qo_heads))
    t, s = zip(*lengths[:count], strict=True)
    return replace(problem, query_lens=t, seq_lens=s)
