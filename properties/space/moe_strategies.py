"""Hypothesis strategies over MoE and batched problems; they shrink to one token and no feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from ...impl.features import LATER_ACTIVATIONS
from ...reference import METHODS, BatchedMoEProblem, MoEProblem, RouteProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.moe.weights import IN_BLOCKS, OF_128, SCALE_BLOCK
from ...reference.problems.moe import (
    MULTIPLES,
    PADDED_FORMATS,
    WITHOUT_SHARED,
    takes,
)
from .axis_values import Axes
from .floors import BEYOND_TILES, SELDOM, TILE_ROWS, WEIGHTS, beyond_the_work, few_sizes
from .moe_axes import (
    ROUTE_AXES,
    ROUTE_RULES,
    can_pad,
    filled,
    fitting_rules,
    method_fits,
)
from .sizes import COST_ROWS
from .strategy_helpers import LARGEST_SEED, features, one_of, sampled

FEATURES = (
    "biases",
    "interleaved",
    "swiglu_parameters",
    "expert_parallel",
    "weights_on_input",
    "shared_experts",
    "strided_hidden",
    "output_norm",
    "routed_scaling_factor",
    "shared_gate",
    "one_product",
    "identity_experts",
    "widths",
)
MOST_FEATURES = 5
OFF = SimpleNamespace(
    biases=False,
    interleaved=False,
    swiglu_parameters="",
    expert_parallel=False,
    weights_on_input=False,
    shared_experts=0,
    strided_hidden=False,
    output_norm="",
    routed_scaling_factor=1.0,
    shared_gate="",
    one_product=False,
    identity_experts=0,
    widths=(0, False),
)
MOST_RULES = 2
WITHOUT_RULES = SimpleNamespace(**{name: ROUTE_AXES[name][0] for name in ROUTE_RULES})
OPERANDS = (8, 40, 200)
"""Experts' weights, each as dear as four tokens, and tokens that a problem must have work for."""
MOST_PADDING = 4
"""Largest factor by which padding makes a problem larger whose smallest size is beyond the work."""
IDS_OF_A_BYTE, FEW_TOKENS = 256, 4
"""A quarter of the problems of routing has more experts than the first, and all may have as many
tokens as the second, whatever calls cost."""
MOSTLY_FEW = (False, False, False, True)
VANISHING = ("all_negative", "faint_scores")
"""Regimes that show how weights are divided by a sum of scores near 0, or of 0."""
TOKEN = 2
"""Multiplications of a token by experts that a problem with the fewest operands has room for."""


@st.composite
def moe_problems(draw: st.DrawFn, axes: Axes) -> MoEProblem:
    """Draw one call of experts."""
    fields: dict[str, Any] = {
        "activation": draw(one_of(_activations(axes))),
        "dtype": draw(one_of(axes.allows("dtype"))),
    }
    fields |= draw(features(axes, FEATURES, OFF, MOST_FEATURES))
    sharded = fields.pop("expert_parallel", False)
    padded = fields.get("widths", OFF.widths)[0]
    fields["quantized"], fields["quantized_hidden"] = draw(_mostly_first(_formats(axes, fields), 2))
    if sharded or fields["quantized_hidden"] or fields.get("one_product"):
        fields.pop("identity_experts", None)
    fields["assignment"] = draw(_mostly_first(axes.allows("assignment"), 1))
    fields["activation"] = draw(_activation(axes, fields))
    fields |= draw(_sums(axes, fields))
    products = 3 if ACTIVATIONS[fields["activation"]].gated else 2
    least = 2 * WEIGHTS * (1 + sharded + fields.get("shared_experts", 0))
    # The number of operands is drawn before the sizes: sizes first would leave most problems with
    # one expert and one token.
    operands = max(least, draw(sampled(OPERANDS)))
    sizes = draw(_sizes(axes, fields["quantized"]))
    if padded and fields["quantized"] in IN_BLOCKS:
        sizes = [size for size in sizes if not size[1] % SCALE_BLOCK] or sizes
    cheapest = sorted(sizes, key=lambda size: size[0] * size[1])[: few_sizes(axes)]
    floor = draw(beyond_the_work(axes, products * cheapest[0][0] * cheapest[0][1]))
    if 2 * WEIGHTS * products * cheapest[0][0] * cheapest[0][1] <= axes.max_work:
        cheapest = cheapest[:1]
    affordable = [] if floor else _affordable(sizes, operands * products, axes)
    affordable = affordable or [cheapest[0], *cheapest[: 1 if floor else None]]
    # One expert and a token show a table of scales that is read the wrong way round.
    of_blocks = fields["quantized"] in OF_128 and not floor
    both_ways = [size for size in sizes if of_blocks and _has_blocks_both_ways(size)]
    both_ways = 4 * _affordable(both_ways, (least // 2 + TOKEN) * products, axes)
    hidden, inter = draw(one_of([*affordable, *both_ways]))
    # Padding takes the room of further experts and tokens, and of none where there is no room.
    most = (floor.most_weights(axes) if floor else axes.max_work // least) // products
    if not floor and most < hidden * inter:
        most = MOST_PADDING * hidden * inter
    widths = fields.pop("widths", OFF.widths), axes.allows("widths")
    pad_to, fields["pad_states"] = _padding(*widths, fields["quantized"], hidden, inter, most)
    fields["pad_to"] = pad_to
    room = axes.max_work // (products * filled(hidden, pad_to) * filled(inter, pad_to))
    room -= WEIGHTS * fields.get("shared_experts", 0)
    experts = draw(
        one_of(
            floor.experts
            if floor
            else [n for n in axes.allows("num_experts") if 2 * WEIGHTS * n <= room]
            or axes.allows("num_experts")[:1]
        )
    )
    if sharded:
        experts = max(2, experts)
        fields |= draw(_shard(experts))
    anything = fields["assignment"] == "duplicates"
    # Ids that repeat may be more than there are experts; others may not.
    slots = [
        k for k in (floor.top_k if floor else axes.allows("top_k")) if anything or k <= experts
    ]
    if not slots:
        slots = list(axes.allows("top_k")[:1])
        experts = max(experts, slots[0])
    top_k = draw(one_of(slots))
    # What the weights cost is spent; tokens share the rest.
    room = max(1, room - WEIGHTS * experts)
    each = top_k + fields.get("shared_experts", 0)
    tokens = [n for n in axes.allows("num_tokens") if n * each <= room]
    tokens = list(floor.tokens) if floor else tokens
    return MoEProblem(
        num_tokens=draw(one_of(tokens or axes.allows("num_tokens")[:1])),
        hidden=hidden,
        inter=inter,
        num_experts=experts,
        top_k=top_k,
        regime=draw(one_of(axes.allows("regime"))),
        seed=draw(st.integers(0, LARGEST_SEED)),
        **fields,
    )


def _padding(
    drawn: tuple[int, bool],
    allowed: Sequence[tuple[int, bool]],
    quantized: str,
    hidden: int,
    inter: int,
    most: int,
) -> tuple[int, bool]:
    """Return the padding that was drawn, or another one where sizes or the work forbid that.

    Args:
        drawn: multiple that weights are padded to, and whether hidden states are.
        allowed: what may be drawn.
        quantized: format of the weights.
        hidden, inter: channels.
        most: numbers that an expert's matrix may have.
    """
    if not drawn[0]:
        return drawn
    wider = {}
    for each in (drawn, *allowed):
        wide = filled(hidden, each[0]), filled(inter, each[0])
        if can_pad(each[0], quantized, inter) and wide != (hidden, inter):
            wider[each] = wide[0] * wide[1]
    for each, numbers in wider.items():
        if numbers <= most and each[1] == drawn[1]:
            return each
    if wider and OFF.widths not in allowed:
        return min(wider, key=wider.__getitem__)
    # What alone is asked for is kept, though these sizes are multiples of it.
    fits = len({each[0] for each in allowed}) == 1 and can_pad(drawn[0], quantized, inter)
    return drawn if fits else OFF.widths


def _mostly_first(values: Sequence[Any], times: int) -> st.SearchStrategy[Any]:
    """Draw one of some values, the first as often as ``times`` as many others together."""
    # With times = 1 half of the draws are the first value, with 2 two thirds.
    first, *others = values
    return one_of([*[first] * max(1, times * len(others)), *others])


def _activation(axes: Axes, fields: dict[str, Any]) -> st.SearchStrategy[str]:
    """Draw another activation where what was drawn has no gate to interleave, or no alpha."""
    drawn = fields["activation"]
    fitting = [drawn]
    if given := fields.get("swiglu_parameters", ""):
        fitting = [name for name in axes.allows("activation") if takes(name, given)]
    elif fields.get("interleaved"):
        fitting = [name for name in axes.allows("activation") if ACTIVATIONS[name].gated]
    if given.startswith("each"):
        fields.pop("shared_experts", None)
    if not fitting:
        fields.pop("swiglu_parameters", None)
        fields.pop("interleaved", None)
    return one_of([drawn] if drawn in fitting or not fitting else fitting)


@st.composite
def _sums(draw: st.DrawFn, axes: Axes, fields: dict[str, Any]) -> dict[str, Any]:
    """Draw shared experts for what is of them, and let go of what nothing is left for."""
    found: dict[str, Any] = {}
    if fields.get("one_product") and fields.get("widths", OFF.widths) != OFF.widths:
        # There is no padding of one product: what another may be drawn of gives way.
        fields.pop("widths" if OFF.widths in axes.allows("widths") else "one_product")
    if fields.get("one_product"):
        return {"output_norm": "", **WITHOUT_SHARED}
    if fields.get("output_norm") and fields.get("weights_on_input"):
        kept = "weights_on_input" if len(axes.allows("weights_on_input")) == 1 else "output_norm"
        found |= {"output_norm": ""} if kept == "weights_on_input" else {"weights_on_input": False}
    several = [number for number in axes.allows("shared_experts") if number]
    each = fields.get("swiglu_parameters", "").startswith("each")
    if fields.get("shared_gate") and not fields.get("shared_experts"):
        if several and not each:
            found["shared_experts"] = draw(one_of(several))
        else:
            found["shared_gate"] = ""
    if found.get("shared_experts", fields.get("shared_experts")):
        found["shared_weight"] = draw(one_of(axes.allows("shared_weight")))
    return found


@st.composite
def _sizes(draw: st.DrawFn, axes: Axes, quantized: str) -> Sequence[tuple[int, int]]:
    """Return the sizes that a format may have; scales of blocks have several half of the time."""
    multiple = MULTIPLES.get(quantized, 1)
    sizes = [size for size in axes.allows("sizes") if not any(n % multiple for n in size)]
    if quantized in OF_128 and draw(st.booleans()):
        several = [size for size in sizes if max(size) > SCALE_BLOCK]
        # Both ways, in the first weights: a table that is read the wrong way round shows there.
        square = [size for size in several if _has_blocks_both_ways(size)]
        sizes = [*square, *several] or sizes
    return sizes or [(2 * multiple, 2 * multiple)]


def _activations(axes: Axes) -> list[str]:
    """Return the activations that may be drawn, those that a kernel names three times as often."""
    first, *others = axes.allows("activation")
    named = [each for each in others if each in LATER_ACTIVATIONS]
    return [first, *named, *others, *named]


def _formats(axes: Axes, fields: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Return the formats that go with padding, and with identity experts, if these were drawn."""
    formats: tuple[tuple[str, bool], ...] = axes.allows("quantisation")
    if fields.get("widths", OFF.widths)[0]:
        formats = tuple(each for each in formats if each[0] in PADDED_FORMATS) or formats
    if fields.get("identity_experts"):
        formats = tuple(each for each in formats if not each[1]) or formats
    return formats


def _has_blocks_both_ways(size: tuple[int, int]) -> bool:
    """Whether first weights with a gate have several blocks of rows, and of columns."""
    return size[0] > SCALE_BLOCK and 2 * size[1] > SCALE_BLOCK


@st.composite
def _shard(draw: st.DrawFn, experts: int) -> dict[str, int]:
    """Draw a rank's experts: one of equally large shards, or any range of them."""
    ranks = [n for n in (2, 4, 8) if not experts % n]
    if ranks and draw(sampled((True, True, False))):
        local = experts // draw(one_of(ranks))
        return {
            "local_experts": local,
            "expert_offset": local * draw(st.integers(0, experts // local - 1)),
        }
    local = draw(st.integers(1, experts - 1))
    return {"local_experts": local, "expert_offset": draw(st.integers(0, experts - local))}


def _affordable(
    sizes: Sequence[tuple[int, int]], operands: int, axes: Axes
) -> list[tuple[int, int]]:
    """Return the sizes at which this number of operands with a weight each is within the work."""
    return [size for size in sizes if operands * size[0] * size[1] <= axes.max_work]


@st.composite
def _rules(draw: st.DrawFn, axes: Axes, method: str) -> dict[str, Any]:
    """Draw rules of single families of models, few at a time, and a method that has them."""
    found: dict[str, Any] = {**vars(WITHOUT_RULES), "method": method}
    # Rules belong to families of models and exclude each other: two at a time at most, then a
    # method that has both, and none where no method has.
    found |= draw(features(axes, ROUTE_RULES, WITHOUT_RULES, MOST_RULES))
    fitting = [each for each in axes.allows("method") if method_fits({**found, "method": each})]
    if fitting and method not in fitting:
        found["method"] = draw(one_of(fitting))
    elif not fitting:  # rules that do not go together, or not with this kernel's methods
        found |= vars(WITHOUT_RULES)
    return found | fitting_rules(found)


@st.composite
def route_problems(draw: st.DrawFn, axes: Axes) -> RouteProblem:
    """Draw one call of routing."""
    fields: dict[str, Any] = {
        name: draw(one_of(axes.allows(name)))
        for name in ("method", "dtype", "bias", "scaling_factor", "masked_groups", "regime")
    }
    fields |= draw(_rules(axes, fields["method"]))
    if METHODS[fields["method"]].weight == "renormalize":
        # A third at most: only methods that divide by a sum can fail here.
        vanishing = [each for each in axes.allows("regime") if each in VANISHING]
        fields["regime"] = draw(one_of([fields["regime"]] * 4 + vanishing))
    groups = axes.allows("groups")
    if fields["best_of_each_group"]:
        groups = tuple((many, many) for many in dict(groups) if many > 1)
    elif fields["shared_experts"] or fields["hash_vocabulary"]:
        groups = ((1, 1),)
    fields["best_of_each_group"] &= bool(groups)
    groups = groups or ((1, 1),)
    if METHODS[fields["method"]].score == "logit":
        groups = tuple(pair for pair in groups if pair[0] == 1) or ((1, 1),)
    # Most routers have none.
    num_groups, of_groups = draw(one_of([*[pair for pair in groups if pair[0] == 1], *groups]))
    if num_groups > 1 and not fields["best_of_each_group"]:
        fields["group_score"] = draw(one_of(axes.allows("group_score")))
    if fields["bias"]:
        values = axes.allows("bias_values")
        # Groups tell a bias of zeros from none: experts alone are ranked as without one.
        zeros = [each for each in values if each == "zeros"] if num_groups > 1 else []
        fields["bias_values"] = draw(one_of([*values, *zeros, *zeros]))
        fields["bias_dtype"] = draw(one_of(axes.allows("bias_dtype")))
    fewest = max(2, num_groups) if num_groups > 1 else 1
    counts = [n for n in axes.allows("num_experts") if not n % num_groups and n >= fewest]
    # A router's work grows with experts times tokens. A quarter of the problems has many experts
    # all the same, with few tokens.
    few = [n for n in counts if n <= axes.max_work // 64] or counts[:1] or [4 * num_groups]
    many = [n for n in counts if n > IDS_OF_A_BYTE]
    experts = draw(one_of(many if many and draw(sampled(MOSTLY_FEW)) else few))
    within = of_groups * (experts // num_groups)
    step = num_groups if fields["best_of_each_group"] else 1
    slots = [k for k in axes.allows("top_k") if k <= within and not k % step]
    if not slots:
        slots = [step] if step > 1 else list(axes.allows("top_k")[:1])
        experts = num_groups * slots[0]
    if fields["hash_vocabulary"] * slots[-1] // 16 > axes.max_work:
        fields["hash_vocabulary"] = min(filter(None, axes.allows("hash_vocabulary")))
    each = 16 * (experts + slots[-1] + 2 * fields["shared_experts"])
    most = max(FEW_TOKENS, axes.max_work // each)
    tokens = [n for n in axes.allows("num_tokens") if n <= most]
    if most <= TILE_ROWS and draw(sampled((False,) * (SELDOM - 1) + (True,))):
        beyond = [n for n in axes.allows("num_tokens") if n in BEYOND_TILES]
        tokens = beyond[:2] or tokens  # it takes what it takes
    return RouteProblem(
        num_experts=experts,
        num_groups=num_groups,
        topk_groups=of_groups,
        top_k=draw(one_of(slots)),
        num_tokens=draw(one_of(tokens or axes.allows("num_tokens")[:1])),
        seed=draw(st.integers(0, LARGEST_SEED)),
        **fields,
    )


EXPERTS = (3, 2, 4, 1, 5, 8, 16, 32, 64)
"""Experts of a rank; several come before one, as only several have different counts."""


@st.composite
def batched_problems(draw: st.DrawFn, axes: Axes) -> BatchedMoEProblem:
    """Draw one call of batched experts."""
    fields: dict[str, Any] = {
        name: draw(one_of(axes.allows(name))) for name in ("activation", "dtype", "regime")
    }
    fields |= {
        name: draw(sampled((*[each[0]] * max(1, 2 * (len(each) - 1)), *each[1:])))
        for name in ("biases", "interleaved", "swiglu_parameters")
        if (each := axes.allows(name))
    }
    formats = axes.allows("quantisation")
    quantized, hidden_too = draw(one_of([*[formats[0]] * max(1, len(formats) - 1), *formats[1:]]))
    activation = ACTIVATIONS[fields["activation"]]
    if fields["interleaved"] and not activation.gated:
        fields["interleaved"] = axes.allows("interleaved")[0]
    if fields["swiglu_parameters"] and activation.alpha is None:
        fields["swiglu_parameters"] = axes.allows("swiglu_parameters")[0]
    multiple = MULTIPLES.get(quantized, 1)
    sizes = [size for size in axes.allows("sizes") if not any(n % multiple for n in size)]
    products = 3 if activation.gated else 2
    operands = draw(sampled((8, 40, 120)))
    affordable = [s for s in sizes if operands * products * s[0] * s[1] <= axes.max_work]
    hidden, inter = draw(one_of(affordable or sizes[:1] or [(2 * multiple, 2 * multiple)]))
    room = max(axes.max_work // (products * hidden * inter), 1)
    most = draw(
        one_of([n for n in axes.allows("most_rows") if n <= room] or axes.allows("most_rows")[:1])
    )
    experts = draw(one_of([n for n in EXPERTS if 2 * WEIGHTS * n <= room] or EXPERTS[:1]))
    share = max(1, (room - WEIGHTS * experts) // experts)
    counts: list[int] = []
    for _ in range(experts):
        count: int = draw(sampled((most, 0, 1, most - 1, most // 2)) | st.integers(0, most))
        counts.append(min(count, share))
    # One expert may have as many rows as there is room for, whatever the others cost.
    full = draw(st.integers(0, experts - 1))
    if most <= room:
        counts[full] = most if draw(st.booleans()) else counts[full]
    return BatchedMoEProblem(
        counts=tuple(counts),
        most_rows=most,
        hidden=hidden,
        inter=inter,
        quantized=quantized,
        quantized_hidden=hidden_too,
        seed=draw(st.integers(0, LARGEST_SEED)),
        **fields,
    )


def size_of_batched(problem: BatchedMoEProblem) -> str:
    """Return experts and rows in words."""
    rows = f"{sum(problem.counts)} rows, at most {problem.most_rows} each"
    return f"{problem.num_experts} experts with {rows}"


def lengths_of_batched(problem: BatchedMoEProblem) -> dict[str, int]:
    """Return rows of the fullest expert, the room for them, and experts."""
    most = {"rows": max(problem.counts), "most rows": problem.most_rows}
    return {**most, "experts": problem.num_experts}


def full_experts(problem: BatchedMoEProblem) -> BatchedMoEProblem:
    """Return the problem with ``COST_ROWS`` rows in each of two experts."""
    return replace(problem, most_rows=COST_ROWS, counts=(COST_ROWS, COST_ROWS))


def more_rows(problem: BatchedMoEProblem) -> BatchedMoEProblem:
    """Return the problem with ``COST_ROWS`` times as many rows."""
    counts = tuple(COST_ROWS * count for count in problem.counts)
    return replace(problem, most_rows=COST_ROWS * problem.most_rows, counts=counts)
