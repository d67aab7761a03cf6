"""Every seed of a search draws all kinds of problems early on, and the same ones each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kernelproof.properties.space import attention_strategies, moe_strategies, rounds
from kernelproof.properties.space.axes import Axes, all_axes, has
from kernelproof.properties.space.profiles import PROFILES, Profile
from kernelproof.properties.space.rounds import draw_problems, most_rounds
from kernelproof.reference import METHODS, AttentionProblem, MergeProblem, Problem, RouteProblem

QUICK = PROFILES["quick"]
SEEDS = range(8)
EARLY = 90
"""Problems of which each kind must be among: attention has 26 features, half of them at a time."""
SHARE = 0.07
"""Of the early problems of all seeds, that are of a kind at the least."""
Kinds = dict[str, Callable[[Any], bool]]
Look = Callable[[Problem], None]


def axes_of(operation: str) -> Axes:
    return Axes(operation, all_axes(operation), QUICK.max_work)


def hides_a_key(problem: AttentionProblem) -> bool:
    """Whether the sliding window hides a key from a query that there is."""
    return problem.window_left >= 0 and any(
        t and s > problem.window_left + 1
        for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)
    )


def switched_on(operation: str, names: tuple[str, ...], off: object) -> Kinds:
    """Return a kind of each feature that an operation has."""
    axes = all_axes(operation)

    def on(name: str) -> Callable[[Any], bool]:
        return lambda problem: not has(problem, name, getattr(off, name))

    return {name: on(name) for name in names if len(axes[name]) > 1}


ATTENTION: Kinds = {
    "a window that hides a key": hides_a_key,
    "a second tile of keys": lambda p: max(p.seq_lens, default=0) > 64,
    "a row that sees no key": lambda p: p.rows_without_keys,
    "several requests": lambda p: len(p.seq_lens) > 1,
}
KINDS: dict[str, Kinds] = {
    operation: switched_on(operation, attention_strategies.FEATURES, attention_strategies.OFF)
    for operation in ("paged_attention", "ragged_attention", "append_paged_kv")
}
KINDS["paged_attention"] |= ATTENTION | {"a quantised cache": lambda p: p.kv_cache}
KINDS["ragged_attention"] |= ATTENTION
KINDS["moe"] = switched_on("moe", moe_strategies.FEATURES, moe_strategies.OFF)
KINDS["moe"] |= {"quantised weights": lambda p: p.quantized}
KINDS["route"] = {
    "a bias": lambda p: p.bias,
    "groups": lambda p: p.num_groups > 1,
    "a scale": lambda p: p.scaling_factor != 1,
}


@pytest.mark.parametrize("operation", KINDS)
def test_every_seed_soon_draws_every_kind(operation: str) -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        drawn = draw_problems(axes_of(operation), QUICK, seed, EARLY)
        counts = {
            kind: sum(map(bool, map(is_one, drawn))) for kind, is_one in KINDS[operation].items()
        }
        assert [kind for kind, count in counts.items() if not count] == [], seed
        total += Counter(counts)
    assert min(total.values()) >= SHARE * EARLY * len(SEEDS), total


def test_every_seed_soon_draws_most_methods_of_routing() -> None:
    for seed in SEEDS:
        drawn = draw_problems(axes_of("route"), QUICK, seed, EARLY)
        methods = {problem.method for problem in drawn if isinstance(problem, RouteProblem)}
        assert len(methods) >= len(METHODS) - 2, seed


def test_the_same_seed_draws_the_same_problems_and_none_twice() -> None:
    axes = axes_of("paged_attention")
    drawn = draw_problems(axes, QUICK, 0, EARLY)
    assert len({problem.id for problem in drawn}) == EARLY
    assert draw_problems(axes, QUICK, 0, EARLY // 3) == drawn[: EARLY // 3]
    assert draw_problems(axes, QUICK, 1, EARLY) != drawn


def test_a_space_of_few_problems_is_drawn_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [MergeProblem(num_states=number) for number in (1, 2, 3)]
    seeds: list[int] = []

    def show_the_same(_axes: Axes, _profile: Profile, seed: int, look: Look) -> bool:
        seeds.append(seed)
        assert len(seeds) <= most_rounds(EARLY)  # or it would go on for ever
        for problem in few if len(seeds) > 9 else few[:2]:  # a round of nothing new is no end
            look(problem)
        return False

    monkeypatch.setattr(rounds, "draw_round", show_the_same)
    assert draw_problems(axes_of("merge_state"), QUICK, 0, EARLY) == few
    assert len(set(seeds)) == len(seeds)
