"""Drawing a router, or experts, that models have: which rows, how often, and at which sizes.

Experts of models are dear: 128 of 2,048 x 768 are 600 million weights. A row is drawn whole where
the work of a problem allows it, or with the share of ``inter`` that a rank has. Otherwise it keeps
its experts and slots, and its sizes are what is left of them beyond whole tiles: of 256, or of the
largest smaller tile that the work allows. Weights of many experts may cost more than a problem's
work, up to ``EXPERTS_WORK``: an implementation computes with those of its tokens only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from ...reference import MoEProblem, RouteProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.problems.moe import MULTIPLES, WITHOUT_SHARED, takes
from .axis_values import Axes
from .floors import MANY_EXPERTS, WEIGHTS
from .moe_axes import MOE_AXES, ROUTE_AXES, can_pad, filled
from .real_drawing import weighted
from .real_values import MANY, Layer, layers_of

OTHERS = 3
"""Problems that are drawn without a row of the table for each one with a row."""
AXES = {"route": ROUTE_AXES, "moe": MOE_AXES}
EXPERTS_WORK = 3_200_000
"""Most work of the weights of a row whose experts a problem's own work leaves no room for."""
MOST_PAIRS = 32
"""Most tokens times slots beside such weights, and thus most experts that have a token."""
TILES = (256, 128, 64, 32, 16)
"""Tiles beyond whole ones of which a row's sizes are drawn where they are too dear."""
RARELY = 16
"""One problem in this number has all experts beyond its work, where they may be other ranks': some
have many experts without a row, too, as a floor."""
OF_RANKS = (1, 2, 4, 8)
"""Ranks among which the columns of an expert are shared."""
RANKS = (2, 4, 8, 16, 32, 64)
"""Ranks among which the experts are shared, where a problem is of one rank."""
ALWAYS = ("num_experts", "top_k", "method", "activation")
"""Values that coverage counts whatever they are: of the others, those that are not the simplest."""
Routed = TypeVar("Routed", RouteProblem, MoEProblem)
Size = tuple[int, int]


@st.composite
def of_models(
    draw: st.DrawFn,
    axes: Axes,
    strategy: Callable[[Axes], st.SearchStrategy[RouteProblem] | st.SearchStrategy[MoEProblem]],
) -> RouteProblem | MoEProblem:
    """Draw a problem, some with a row of what models have in place of their own values.

    Of a list, Hypothesis draws the last values less often than others: one problem in eight or so.
    """
    drawn: st.SearchStrategy[Any] = strategy(axes)
    problem: RouteProblem | MoEProblem = draw(drawn)
    numbers = fitting(axes)
    rows = layers_of(axes.operation)
    families = tuple(len(rows[number - 1].families) for number in numbers)
    number = draw(weighted(numbers, families, OTHERS))
    # The row replaces values after everything was drawn, so that the problem without it stays what
    # Hypothesis shrinks to.
    if not number or problem.work > axes.max_work:  # a problem beyond the work shows what it is for
        return problem
    if isinstance(problem, RouteProblem):
        return _router(axes, problem, rows[number - 1])
    return _experts(axes, problem, rows[number - 1])


def _router(axes: Axes, problem: RouteProblem, layer: Layer) -> RouteProblem:
    fields = dict(layer.fields)
    each = 16 * (fields["num_experts"] + fields["top_k"])
    fields["num_tokens"] = _tokens(axes, problem, axes.max_work // each)
    found = _with(problem, fields)
    return found if found.work <= max(axes.max_work, problem.work) else problem


def _experts(axes: Axes, problem: MoEProblem, layer: Layer) -> MoEProblem:
    """Return a problem with the experts of a row; as it is where its features do not allow them."""
    fields: dict[str, Any] = {**layer.fields, **_options(axes, problem, layer)}
    found = _sharded(axes, layer, fields, problem)
    if found is None:
        return problem
    (hidden, inter), shard = found
    parameters = fields.setdefault("swiglu_parameters", problem.swiglu_parameters)
    each_its_own = parameters.startswith("each") and fields["shared_experts"]
    if each_its_own or not takes(fields["activation"], parameters):
        fields["swiglu_parameters"] = ""
    if not ACTIVATIONS[fields["activation"]].gated:
        fields["interleaved"] = False
    slots = fields["top_k"] + fields["shared_experts"]
    here = shard["local_experts"] or fields["num_experts"]
    units = WEIGHTS * (here + fields["shared_experts"]) + slots
    wide = _padding(problem, fields, found[0], axes.max_work // (units * _products(fields)))
    each = _products(fields) * math.prod(wide)
    left = axes.max_work // each - WEIGHTS * (here + fields["shared_experts"])
    # Tokens times slots that the work leaves besides the weights.
    pairs = left if left >= slots else min(axes.max_work // each, MOST_PAIRS)
    tokens = _tokens(axes, problem, max(1, pairs // slots))
    fields |= {**shard, "hidden": hidden, "inter": inter, "num_tokens": tokens}
    made = _with(problem, fields)
    if (made.pad_to, made.pad_states) not in axes.allows("widths"):
        return problem
    off = ("interleaved", "swiglu_parameters", "shared_experts")
    return made if all(getattr(made, name) in axes.allows(name) for name in off) else problem


def _padding(problem: MoEProblem, fields: dict[str, Any], size: Size, most: int) -> Size:
    """Return a row's sizes with a problem's padding; let go of that beyond ``most`` numbers."""
    hidden, inter = size
    wide = filled(hidden, problem.pad_to), filled(inter, problem.pad_to)
    quantized = fields.get("quantized", problem.quantized)
    one_product = fields.get("one_product", problem.one_product)
    if can_pad(problem.pad_to, quantized, inter) and math.prod(wide) <= most and not one_product:
        return wide
    fields |= {"pad_to": 0, "pad_states": False}
    return size


def _with(problem: Routed, fields: Mapping[str, Any]) -> Routed:
    """Return a problem with these fields: without its rarer options where they do not go together.

    As it is where it cannot have them at all.
    """
    defaults = {each.name: each.default for each in dataclasses.fields(problem)}
    plain = {name: defaults[name] for name in problem.later_fields}
    return _made(problem, fields) or _made(problem, {**plain, **fields}) or problem


def _made(problem: Routed, fields: Mapping[str, Any]) -> Routed | None:
    try:
        return replace(problem, **fields)
    except ValueError:
        return None


def _options(axes: Axes, problem: MoEProblem, layer: Layer) -> dict[str, Any]:
    """Return options of a row that may be drawn: formats of weights half of the time.

    Shared experts come with the gate that they have in a row, or not at all.
    """
    found: dict[str, Any] = {name: getattr(problem, name) for name in WITHOUT_SHARED}
    shared = {name: layer.options.get(name, off) for name, off in WITHOUT_SHARED.items()}
    if all(value in axes.allows(name) for name, value in shared.items()):
        found |= shared
    parameters = layer.options.get("swiglu_parameters", "")
    if parameters and parameters in axes.allows("swiglu_parameters"):
        found["swiglu_parameters"] = parameters
    form = layer.options.get("quantized")
    pair = (form, problem.quantized_hidden)
    # The seed decides instead of a draw: another draw would move all choices behind it, and
    # problems kept from earlier runs would no longer be reproduced.
    wanted = form and problem.seed % 2 and pair in axes.allows("quantisation")
    return {**found, "quantized": form if wanted else problem.quantized}


def _sharded(
    axes: Axes, layer: Layer, fields: Mapping[str, Any], problem: MoEProblem | None
) -> tuple[Size, dict[str, int]] | None:
    """Return sizes of a row, and which of its experts are a rank's; None where none are affordable.

    A problem without other ranks has all experts if they are affordable, and some such problems
    beyond the work. Otherwise experts are shared among so few ranks that there is room for sizes of
    several tiles of 16, if any number is enough.
    """
    shared = True in axes.allows("expert_parallel")
    experts, found = fields["num_experts"], None
    if (problem is None or not problem.expert_parallel) and False in axes.allows("expert_parallel"):
        # Again by the seed, for the same reason.
        rare = problem is not None and problem.seed % RARELY == 0 and experts > MANY_EXPERTS
        beyond = not shared or rare
        found = _sized(axes, layer, fields, experts, EXPERTS_WORK if beyond else 0)
        if found is not None:
            return found, {"local_experts": 0, "expert_offset": 0}
    if not shared:
        return None
    shard: dict[str, int] = {}
    for ranks in [n for n in RANKS if experts % n == 0]:
        local = experts // ranks
        shard = {"local_experts": local,
                 "expert_offset": local * ((problem.seed if problem else 0) % ranks)}  # fmt: skip
        found = _sized(axes, layer, fields, local)
        if found is not None and min(found) > TILES[-2]:
            break
    return None if found is None else (found, shard)


def _sized(
    axes: Axes, layer: Layer, fields: Mapping[str, Any], here: int, beyond: int = 0
) -> Size | None:
    """Return the first sizes of a row that are supported and affordable; None where none are.

    Args:
        axes: what may be drawn.
        layer: the row.
        fields: the fields of the problem.
        here: its experts.
        beyond: most work of the weights of the smallest sizes, where it is more than a problem's.
    """
    shared = fields["shared_experts"]
    made, pairs = WEIGHTS * (here + shared), fields["top_k"] + shared
    multiple = MULTIPLES.get(fields["quantized"], 1)
    smallest = min(axes.allows("sizes"), key=math.prod)
    for hidden, inter in (*_candidates(layer), smallest):
        each = _products(fields) * hidden * inter
        least = min(hidden, inter) <= TILES[-1] or (hidden, inter) == smallest
        most = max(axes.max_work, beyond if least else 0)
        if hidden % multiple or inter % multiple or not _supported(axes, (hidden, inter)):
            continue
        fits = (made + pairs) * each + 1 <= axes.max_work
        if fits or (made * each <= most > axes.max_work and pairs * each <= axes.max_work):
            return hidden, inter
    return None


def _candidates(layer: Layer) -> Iterator[Size]:
    """Yield sizes of a row: whole, a rank's, and what is left beyond ever smaller tiles."""
    hidden, inter = layer.sizes
    yield from ((hidden, inter // n) for n in OF_RANKS if inter % n == 0)
    yield from ((hidden % tile or tile, inter % tile or tile) for tile in TILES)


def _supported(axes: Axes, size: Size) -> bool:
    """Whether sizes are such as an implementation supports, from those that it was asked about."""
    several = axes.allows("sizes")
    if len(several) == 1:
        return size in several
    for n, found, usual in zip(
        size, zip(*several, strict=True), zip(*MOE_AXES["sizes"], strict=True), strict=True
    ):
        unlimited = max(found) == max(usual)
        if n % math.gcd(*found) or n < min(found) or not (unlimited or n <= max(found)):
            return False
    return True


def _products(fields: Mapping[str, Any]) -> int:
    return 3 if ACTIVATIONS[fields["activation"]].gated else 2


def _tokens(axes: Axes, problem: RouteProblem | MoEProblem, most: int) -> int:
    """Return the tokens that were drawn, or the most that a row leaves room for."""
    if problem.num_tokens <= most:
        return problem.num_tokens
    values: tuple[int, ...] = axes.allows("num_tokens")
    return max((n for n in values if 0 < n <= most), default=values[0])


def fitting(axes: Axes) -> tuple[int, ...]:
    """Return the numbers of the rows that have no value which may not be drawn here.

    A value that no axis lists is one of its row, which narrowing has asked about; where an axis has
    a single value left, something asks for that value.
    """
    numbers = axes.values.get("real", ())
    if len(numbers) < 2:  # noqa: PLR2004  none but 0
        return ()
    usual = AXES[axes.operation]
    left = tuple(
        (name, values)
        for name, values in axes.values.items()
        if name in usual and (name == "sizes" or values != usual[name])
    )
    return _fitting(axes.operation, tuple(numbers), left, axes.max_work)


@functools.lru_cache(maxsize=1024)
def _fitting(
    operation: str,
    numbers: tuple[int, ...],
    left: tuple[tuple[str, tuple[Any, ...]], ...],
    max_work: int,
) -> tuple[int, ...]:
    axes = Axes(operation, {**AXES[operation], **dict(left)}, max_work)
    return tuple(
        number for number in numbers if number and _fits(axes, layers_of(operation)[number - 1])
    )


def _fits(axes: Axes, layer: Layer) -> bool:
    usual = AXES[axes.operation]
    for name, value in layer.values.items():
        values = axes.allows(name)
        listed = value in values or (len(values) > 1 and value not in usual[name])
        if values != usual[name] and not listed:
            return False
    if axes.operation == "route":
        each: int = 16 * (layer.fields["num_experts"] + layer.fields["top_k"])
        return each <= axes.max_work
    return _plain(axes, layer) is not None


def _plain(axes: Axes, layer: Layer) -> Size | None:
    """Return the sizes of a row without its options; None where none are affordable."""
    first = axes.allows("quantisation")[0][0]
    fields = {**layer.fields, "shared_experts": axes.allows("shared_experts")[0],
              "quantized": first}  # fmt: skip
    found = _sharded(axes, layer, fields, None)
    return None if found is None else found[0]


def values_of(axes: Axes, layer: Layer) -> dict[str, Any]:
    """Return the values of a row that coverage counts, by axis or field; simplest ones left out."""
    usual = AXES[axes.operation]
    found = {
        name: value
        for name, value in layer.values.items()
        if name in ALWAYS or value != usual[name][0]
    }
    shared = {name: layer.options[name] for name in WITHOUT_SHARED if name in layer.options}
    if all(value in axes.allows(name) for name, value in shared.items()):
        found |= shared
    if axes.operation == "moe" and (sizes := _plain(axes, layer)) is not None:
        pairs = zip(("hidden", "inter"), sizes, layer.sizes, strict=True)
        found |= {name: real for name, drawn, real in pairs if drawn == real}
    return found


def row_values(axes: Axes) -> list[dict[str, Any]]:
    """Return what coverage counts of each row that may be drawn."""
    rows = layers_of(axes.operation)
    return [values_of(axes, rows[number - 1]) for number in fitting(axes)]


def many_values(axes: Axes) -> dict[tuple[str, str], float]:
    """Return the values that ten families have, of rows that may be drawn, and how often they are.

    Returns:
        The share of an implementation's problems that have each, by axis and value in words.
    """
    families: dict[tuple[str, str], set[str]] = {}
    weights: dict[tuple[str, str], int] = {}
    rows = [layers_of(axes.operation)[number - 1] for number in fitting(axes)]
    total = sum(len(layer.families) for layer in rows)
    for layer in rows:
        for name, value in values_of(axes, layer).items():
            families.setdefault((name, str(value)), set()).update(layer.families)
            weights[name, str(value)] = weights.get((name, str(value)), 0) + len(layer.families)
    return {
        key: weights[key] / total / (OTHERS + 1)
        for key, several in families.items()
        if len(several) >= MANY
    }
