"""The table of operations for whatever draws problems, in the parent process with Hypothesis.

What the isolated worker needs to know of an operation stands in ``reference.operations`` and
``verdicts.operations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from ...reference import Problem
from ...reference.operations import Table
from . import real_layers as layers
from . import sizes
from .attention_strategies import (
    attention_problems,
    exact_where_allowed,
    long_axes,
    merge_problems,
    metadata_problems,
)
from .axis_values import Axes
from .floors import edges_of_experts, edges_owed_by_experts, floor_problems, long_problems
from .longest import full_batches, longest, of_hidden_tiles, of_one_sign
from .metadata.planning import many_tiles, plan_problems
from .metadata.preparation import batch_problems, few_rows, narrow_tables
from .metadata.steps import steps_problems
from .metadata.strategies import (
    context_parallel_problems,
    slots_problems,
)
from .moe_strategies import (
    batched_problems,
    full_experts,
    lengths_of_batched,
    moe_problems,
    more_rows,
    route_problems,
    size_of_batched,
)
from .pairs import Taken, kinds_of_features, pairs_of_features
from .quantising.norm_strategies import norm_problems
from .quantising.rope_strategies import rope_problems
from .quantising.strategies import quantize_problems, rearrange_problems
from .real_drawing import many_values, row_values, wide_problems
from .simplifying import (
    Cheap,
    Fails,
    on_few_pages,
    simpler_batch,
    simpler_batched,
    simpler_merge,
    simpler_paged_batch,
    simpler_values,
)


def _as_it_is(problem: Problem, *_: object) -> Problem:
    return problem


def _nothing(*_: object, **__: object) -> None:
    return None


def _no_others(*_: object) -> Iterator[Problem]:
    return iter(())


def _none_wide(axes: Axes) -> Sequence[Problem]:
    del axes
    return ()


def _none_full(axes: Axes) -> Mapping[str, Sequence[Problem]]:
    del axes
    return {}


def _wide(axes: Axes) -> Sequence[Problem]:
    return [*wide_problems(axes), *of_hidden_tiles(axes), *of_one_sign(axes)]


def _regimes(problem: Problem, axes: Axes) -> Sequence[str]:
    del problem
    return axes.values.get("regime", ())


def _no_edges(*_: object) -> dict[str, bool]:
    return {}


def _none_covered(axes: Axes, taken: Taken) -> list[Any]:
    del axes, taken
    return []


def _none_owed(axes: Axes) -> tuple[str, ...]:
    del axes
    return ()


def _several_requests(axes: Axes) -> tuple[str, ...]:
    # Axes without phases say nothing about requests.
    several = "phase" in axes.values and axes.max_requests != 1
    return ("several_requests",) if several else ()


@dataclass(frozen=True)
class Real:
    """What to know of values that models have, see ``real_drawing``.

    Attributes:
        many: values that many families have, with the share of problems that has each.
        values: the values of each row that may be drawn, by axis.
    """

    many: Callable[[Axes], Mapping[tuple[str, str], float]]
    values: Callable[[Axes], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Light:
    """What a problem has at most; 0 for any."""

    max_work: int
    max_requests: int = 0
    max_steps: int = 0

    def limit(self, axes: Axes) -> Axes:
        """Return axes within these limits."""
        work = min(axes.max_work, self.max_work)
        return replace(
            axes, max_work=work, max_requests=self.max_requests, max_steps=self.max_steps
        )


@dataclass(frozen=True)
class Space:
    """What drawing, simplifying and measuring need to know of an operation's problems.

    Attributes:
        strategy: Hypothesis's, for what may be drawn.
        size: the size of a problem, in words.
        simplify: a simpler problem that still fails, see ``simplify.simplify``.
        on_fewer_pages: the same problem on fewer pages, where it has any.
        regimes: value regimes that one drawn structure may be tried with.
        timed: the problem on which a call is timed, made of the simplest supported one.
        larger: one of several times the work, for a second timing; None if there is none.
        is_small: whether a counterexample is as small as the score counts; None where it is not
            counted.
        fixed: axes that ``--only`` adds no other values to.
        lengths: lengths of a problem by name, the one that matters most first.
        edges: which structural edges a problem crosses, given the keys of a tile and of a split.
        owed: edges that some problems of a run must cross, of what may be drawn.
        long: axes of long requests, from those of an implementation's other problems, its tile, its
            split and whether it is slow; None where it needs none.
        longest: the very long problems of a law, of axes and a device; None where the operation
            has none.
        no_longest: why there is no such problem where ``longest`` returns none.
        kinds: a few problems that cover each feature, the same in each run.
        pairs: problems that cover pairs of features, the same in each run.
        wide: problems that are rarely drawn: more keys, which show what hides many, or fewer.
        full: batches that fill a GPU, by what they are: of each kind the first one that an
            implementation takes is judged.
        real: what models have: the floors of a run ask for some; None where nothing is known.
        fitted: a problem with other values than it was drawn with, as it would be drawn with them.
        light: limits of the problems of a gate over many implementations, where all laws of one
            draw the same few of them: its answers are integers, of which each bit is judged. None
            where each law draws its own.
    """

    strategy: Callable[[Axes], st.SearchStrategy[Any]]
    size: Callable[[Any], str]
    simplify: Callable[[Any, Axes, Fails, Cheap], Problem] = _as_it_is
    on_fewer_pages: Callable[[Any, Axes], Iterator[Any]] = _no_others
    regimes: Callable[[Any, Axes], Sequence[str]] = _regimes
    timed: Callable[[Any], Problem] = _as_it_is
    larger: Callable[[Any], Problem | None] = _nothing
    is_small: Callable[[Any], bool] | None = None
    fixed: tuple[str, ...] = ()
    lengths: Callable[[Any], dict[str, int]] = sizes.lengths_of_tokens
    edges: Callable[[Any, int, int], dict[str, bool]] = _no_edges
    owed: Callable[[Axes], Sequence[str]] = _none_owed
    long: Callable[..., Axes | None] = _nothing
    longest: Callable[[Axes, str], Sequence[Problem]] | None = None
    no_longest: str = ""
    kinds: Callable[[Axes, Taken], list[Any]] = _none_covered
    pairs: Callable[[Axes, Taken], list[Any]] = _none_covered
    wide: Callable[[Axes], Sequence[Problem]] = _none_wide
    full: Callable[[Axes], Mapping[str, Sequence[Problem]]] = _none_full
    real: Real | None = None
    fitted: Callable[[Any], Problem] = _as_it_is
    light: Light | None = None


def _attention(**differing: Any) -> Space:  # noqa: ANN401
    """Return the entry of an operation of attention over pages, with what differs."""
    return replace(
        Space(
            attention_problems,
            sizes.of_pages,
            simpler_paged_batch,
            on_few_pages,
            exact_where_allowed,
            sizes.more_requests,
            sizes.more_keys,
            sizes.is_on_few_pages,
            lengths=sizes.lengths_of_batch,
            edges=sizes.edges_of_batch,
            long=long_axes,
            longest=longest,
            no_longest="its requests have as many queries as keys",
            owed=_several_requests,
            kinds=kinds_of_features,
            pairs=pairs_of_features,
            wide=_wide,
            full=full_batches,
            real=Real(many_values, row_values),
        ),
        **differing,
    )


OPERATIONS = Table("kernelproof.properties.space.operations.OPERATIONS", {
    "paged_attention": _attention(),
    "ragged_attention": _attention(
        size=sizes.of_batch, simplify=simpler_batch,
        on_fewer_pages=_no_others, is_small=sizes.is_one_request,
        lengths=sizes.lengths_of_ragged,
    ),
    "merge_state": Space(
        merge_problems, sizes.of_states,
        simpler_merge, timed=sizes.some_tokens, larger=sizes.more_tokens,
    ),
    "append_paged_kv": _attention(
        larger=sizes.more_requests, fixed=("k_scale", "v_scale"),
    ),
    "build_metadata": Space(
        metadata_problems, sizes.of_steps,
        lengths=sizes.lengths_of_steps,
    ),
    "slice_context_parallel": Space(
        context_parallel_problems,
        lambda problem: sizes.of_batch(problem.whole),
        lengths=lambda problem: sizes.lengths_of_batch(problem.whole),
        edges=lambda problem, *blocks: sizes.edges_of_batch(problem.whole, *blocks),
    ),
    "map_slots": Space(
        slots_problems, sizes.of_steps,
        lengths=sizes.lengths_of_steps, light=Light(400_000),
    ),
    "prepare_batch": Space(
        batch_problems, sizes.of_steps,
        lengths=sizes.lengths_of_steps, fitted=few_rows, wide=narrow_tables,
        light=Light(24, 4, 2),
    ),
    "prepare_steps": Space(
        steps_problems, sizes.of_batches,
        lengths=sizes.lengths_of_batches,
    ),
    "plan": Space(
        plan_problems, sizes.of_plan,
        lengths=sizes.lengths_of_plan, wide=many_tiles, light=Light(20_000),
    ),
    "route": Space(
        partial(layers.of_models, strategy=route_problems),
        sizes.of_experts, simpler_values, timed=sizes.some_tokens, larger=sizes.more_tokens,
        real=Real(layers.many_values, layers.row_values),
    ),
    "moe": Space(
        partial(layers.of_models, strategy=moe_problems),
        sizes.of_experts, simpler_values, timed=sizes.some_tokens, larger=sizes.more_tokens,
        edges=edges_of_experts, owed=edges_owed_by_experts, longest=long_problems,
        wide=floor_problems, real=Real(layers.many_values, layers.row_values),
    ),
    "batched_moe": Space(
        batched_problems, size_of_batched,
        simpler_batched, timed=full_experts, larger=more_rows, lengths=lengths_of_batched,
    ),
    "quantize": Space(
        quantize_problems, sizes.of_matrix,
        simpler_values, timed=sizes.some_tokens, larger=sizes.more_tokens,
        lengths=sizes.lengths_of_matrix,
    ),
    "norm_and_quantize": Space(
        norm_problems, sizes.of_matrix,
        simpler_values, timed=sizes.some_tokens, larger=sizes.more_tokens,
        lengths=sizes.lengths_of_matrix,
    ),
    "rearrange": Space(
        rearrange_problems, sizes.of_weights,
        lengths=sizes.lengths_of_weights, light=Light(40_000),
    ),
    "rope_and_append": Space(
        rope_problems, sizes.of_batch,
        timed=sizes.more_requests, larger=sizes.more_requests, lengths=sizes.lengths_of_batch,
    ),
})  # fmt: skip


def simplify(problem: Problem, axes: Axes, fails: Fails, cheap: Cheap) -> Problem:
    """Return a simple problem that still fails, after few failures.

    Args:
        problem: the problem that fails.
        axes: what may be asked for.
        fails: judges a problem.
        cheap: tells whether a problem that passes has cost little so far.

    Returns:
        The last problem that ``fails`` said True to; ``problem`` itself if there was none.
    """
    return OPERATIONS[problem.operation].simplify(problem, axes, fails, cheap)


def on_fewer_pages(problem: Problem, axes: Axes) -> Iterator[Any]:
    """Yield the same problem on larger pages, the smallest first, if it has more than a few.

    Pages are drawn before lengths, so Hypothesis ends at pages of one key and as many of them as
    there are keys. One page of 128 says more than 66 of one.
    """
    return OPERATIONS[problem.operation].on_fewer_pages(problem, axes)
