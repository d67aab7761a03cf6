"""Problems that a limit of work may not leave out: several experts, rows beyond a tile, requests.

A kernel that takes hidden and inter in large multiples only, or whose calls are slow, has room for
one expert and one token within the work of a problem. Some of its problems are drawn beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from ...reference import MoEProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.problems.moe import MULTIPLES
from .axis_values import Axes
from .moe_axes import moe_example
from .strategy_helpers import sampled

LEAST_EXPERTS = 4
"""Experts with tokens that some problems have, whatever their weights cost."""
TILE_ROWS = 16
"""Rows of the smallest tile of an expert: some problems have more tokens of one expert."""
BEYOND_TILES = (17, 33, 65, 129)
"""Tokens beyond the usual tiles of an expert's rows."""
SLOW_TILES = 2
"""Number of tile edges drawn where calls are slow."""
MANY_EXPERTS = 128
"""Experts beyond which some problems have more."""
MANY_SLOTS = 8
"""Experts a token beyond which some problems have more."""
PAIRS = 16
"""Pairs of a token and an expert from which on four experts of a few have tokens, nearly always."""
MOST_WEIGHTS = 8_000_000
"""Most weights of a problem with many experts, or many experts a token; making more takes long."""
FAST_WORK = 100_000
"""Work of a problem from which on calls are fast: torch takes little longer for the problems here,
Triton's interpreter a second."""
WEIGHTS = 4
"""What making and widening an expert's weights costs, in multiplications of a token by it."""
RARELY, SELDOM, OFTEN = 16, 8, 4
"""One problem in this number is beyond the work: where only many experts are, where calls are slow,
and where even few experts are."""
MOST_FIXED = 129
"""Most tokens of a problem that is the same in each run, apart from the longest."""
LONG_TOKENS = 4096
"""Tokens beyond which one call of a run has more."""
FEW_SIZES = 3
"""Sizes of problems beyond the work, the smallest ones: some of them are no squares."""
REACHED = 4
"""Part of the work from which on problems are drawn too rarely."""


@dataclass(frozen=True)
class Floor:
    """What one problem beyond the work has.

    Attributes:
        experts, top_k, tokens: values of these axes that it may have, each with any other.
    """

    experts: tuple[int, ...]
    top_k: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def units(self) -> int:
        """Multiplications of a token by an expert's weights that the least of them costs."""
        return WEIGHTS * self.experts[0] + self.tokens[0] * self.top_k[0]

    def most_weights(self, axes: Axes) -> int:
        """Return how many weights an expert may have with padding, which is no part of a floor."""
        return min(axes.max_work // self.units, MOST_WEIGHTS // self.experts[-1])


def expert_floors(axes: Axes, each: int) -> dict[str, Floor]:
    """Return floors of experts that may be drawn, by name.

    Args:
        axes: what may be drawn.
        each: weights of an expert of the smallest size.
    """
    experts = sorted(axes.allows("num_experts"))
    slots = sorted(axes.allows("top_k"))
    tokens = sorted(filter(None, axes.allows("num_tokens")))
    found = {}
    several = [n for n in experts if n >= max(LEAST_EXPERTS, slots[0])][:2]
    if several:
        fitting = [k for k in slots if k <= several[0]]
        # With 16 pairs and more than two for each expert, hashing leaves an expert of four without
        # a token in about one problem of twenty-five.
        enough = [t for t in tokens if t * fitting[0] >= max(PAIRS, 2 * several[0])]
        found["experts"] = Floor(tuple(several), tuple(fitting), tuple(enough[:3] or tokens[-1:]))
    few = [n for n in experts if n >= slots[0]][:2]
    fast = axes.max_work >= FAST_WORK
    beyond = [t for t in tokens if t in BEYOND_TILES[: None if fast else SLOW_TILES]]
    beyond = beyond or [t for t in tokens if TILE_ROWS < t <= BEYOND_TILES[-1]]
    if few and beyond:
        fitting = [k for k in slots if k <= few[0]]
        found["rows"] = Floor(tuple(few), tuple(fitting[:2]), tuple(beyond))
    return found | (_of_many(experts, slots, tokens, each) if fast else {})


def _of_many(
    experts: Sequence[int], slots: Sequence[int], tokens: Sequence[int], each: int
) -> dict[str, Floor]:
    """Return the floors of many experts a token, and of many experts, as far as memory allows."""
    found: dict[str, Floor] = {}
    few = tuple([t for t in tokens if t >= TILE_ROWS // 2][:4] or tokens[:4])
    if not few:
        return found
    affordable = [n for n in experts if n * each <= MOST_WEIGHTS]
    many = [k for k in slots if MANY_SLOTS < k <= max(affordable, default=0)]
    if many:
        # Enough experts for the most: a floor of one number each would be one more choice.
        room = [n for n in affordable if n >= many[-1]][:2]
        found["slots"] = Floor(tuple(room), tuple(many), few)
    of_many = [n for n in affordable if n > MANY_EXPERTS and n >= slots[0]]
    if of_many:
        fitting = tuple(k for k in slots if k <= of_many[0])
        found["many"] = Floor(tuple(of_many), fitting, few)
    return found


def few_sizes(axes: Axes) -> int:
    """Return how many sizes problems beyond the work have."""
    return FEW_SIZES if axes.max_work >= FAST_WORK else 1


def beyond_the_work(axes: Axes, each: int) -> st.SearchStrategy[Floor | None]:
    """Draw a floor that problems within the work rarely reach; mostly None.

    Args:
        axes: what may be drawn.
        each: weights of an expert of the smallest size.
    """
    floors = expert_floors(axes, each)
    rare = {
        name: floor
        for name, floor in floors.items()
        if REACHED * floor.units * each > axes.max_work
    }
    if not rare:
        return st.none()
    fast = axes.max_work >= FAST_WORK
    dear = "experts" in rare or "rows" in rare
    # Where even four experts are beyond the work, all problems within it have one or two, and a
    # quarter beyond it is little. Where only hundreds are, the others judge well without.
    share = (OFTEN if fast else SELDOM) if dear else RARELY
    # Twice as many of these: some have all tokens on one expert, or few rows.
    again = (floor for name, floor in rare.items() if name in ("experts", "rows"))
    found = [*rare.values(), *again]
    return sampled((*[None] * (share - 1) * len(found), *found))


def floor_problems(axes: Axes) -> list[MoEProblem]:
    """Return one problem of each floor, the most that it asks for, on the smallest size.

    They are the same in each run: nothing is drawn.
    """
    axes = axes.restricted()[0]
    chosen = {name: values[0] for name, values in axes.values.items() if values}
    chosen |= {name: v for name, v in axes.simplest.items() if v in axes.values.get(name, ())}
    multiple = MULTIPLES.get(chosen["quantisation"][0], 1)
    sizes = [size for size in axes.allows("sizes") if not any(n % multiple for n in size)]
    if not sizes:
        return []
    size = min(sizes, key=lambda size: size[0] * size[1])
    products = 3 if ACTIVATIONS[chosen["activation"]].gated else 2
    found = []
    for name, floor in expert_floors(axes, products * size[0] * size[1]).items():
        # Of many experts the most, since ids of more than a byte are what fails.
        experts = floor.experts[-1 if name == "many" else 0]
        # The most slots of the fewest experts: each has tokens, whatever the hash.
        most = max(k for k in floor.top_k if k <= experts)
        tokens = min(floor.tokens[-1], MOST_FIXED)
        values = {"sizes": size, "num_experts": experts, "top_k": most, "num_tokens": tokens}
        found.append(moe_example({**chosen, **values}))
    return found


def long_problems(axes: Axes, device: str = "cpu") -> tuple[MoEProblem, ...]:
    """Return a call of more tokens than are drawn, on the smallest size; none where calls are slow.

    Args:
        axes: what may be drawn.
        device: ``"cpu"`` or ``"cuda"``.
    """
    axes = axes.restricted()[0]
    tokens = [n for n in axes.allows("num_tokens") if n > LONG_TOKENS]
    if not tokens or (device == "cpu" and axes.max_work < FAST_WORK):
        return ()
    fixed = floor_problems(axes)
    if not fixed:
        return ()
    slots = [k for k in axes.allows("top_k") if k <= fixed[0].num_experts]
    few = sorted(slots)[: 1 if device == "cpu" else 2]
    count = min(tokens) if device == "cpu" else max(tokens)
    return (replace(fixed[0], num_tokens=count, top_k=few[-1]),)


def edges_of_experts(problem: MoEProblem, *_: int) -> dict[str, bool]:
    """Return which structural edges a call of experts crosses."""
    pairs = problem.num_tokens * problem.top_k
    spread = problem.assignment not in ("one_expert", "sparse")
    return {
        "several_experts": spread and problem.here >= LEAST_EXPERTS and pairs >= PAIRS,
        "rows_beyond_a_tile": pairs > TILE_ROWS * problem.num_experts,
        "several_slots": problem.top_k > 1,
    }


def edges_owed_by_experts(axes: Axes) -> tuple[str, ...]:
    """Return the edges that some problems must cross of what may be drawn."""
    experts, slots = axes.allows("num_experts"), axes.allows("top_k")
    most = max(axes.allows("num_tokens"))
    spread = set(axes.allows("assignment")) - {"one_expert", "sparse"}
    owed = {
        "several_experts": spread and max(experts) >= LEAST_EXPERTS and most * max(slots) >= PAIRS,
        "rows_beyond_a_tile": most * max(slots) > TILE_ROWS * min(experts),
        "several_slots": max(slots) > 1,
    }
    return tuple(name for name, claimed in owed.items() if claimed)
