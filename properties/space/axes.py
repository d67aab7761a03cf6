"""The space of problems: which values each axis may take, simplest first.

``supports`` of an implementation is a predicate, and few implementations support everything:
drawing from the whole space and throwing away what is refused would judge next to nothing. So the
axes are narrowed first, by asking about the simplest problem with each single value changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...impl.targets.refusal import OF_THE_MACHINE, Refusal
from ...reference import AttentionProblem, Problem
from ...reference.formats.cache_elements import FP8
from .attention_axes import PHASES, head_fields
from .axis_values import FIELDS, NO_FIELDS, Axes
from .given_lengths import LENGTHS, with_lengths, without_lengths
from .moe_axes import ROUTE_RULES
from .real_values import rows_of
from .surveying.examples import EXAMPLES
from .surveying.wide_starts import wide_start

__all__ = [
    "FIELDS",
    "FREE",
    "Axes",
    "Probe",
    "all_axes",
    "example",
    "fields_of",
    "has",
    "keeps",
    "narrow",
    "resized",
]

IN_FP8 = (FP8[0], FP8[0])
"""Cache and queries of kernels that compute in FP8."""
FREE = (
    "phase", "dtype", "causal", "kv_layout", "num_states", "activation", "method", "outputs",
    "engine", "family",
)  # fmt: skip
"""Axes on which the simplest supported problem is looked for in every combination."""
LIMITS = ("page_size", "head_dims", "group_size", "head_dim", "sizes", "num_experts", "groups")
"""Axes whose simplest value many kernels do not have: the next ones are tried in turn."""
FEW = {"group_size": 2, "sizes": 16, "num_experts": 11}
"""Values of a limit that are tried, where that is not all: a kernel of groups has each above 1."""
OF_QUANTISED = {"num_experts": (8, 256)}
"""Values of a limit that are tried with quantised weights: such kernels are made for models, and
each of these limits is tried with every quantisation."""
OF_RULES = (2, 16, 128)
"""Numbers of experts that are tried with each rule of single families, for kernels that have no
routing but theirs."""
OF_ONE_SHAPE = {"page_size": (16, 64), "caches": (("", ""), (FP8[0], ""))}
"""Values that are tried with each group size, for kernels that are made for one model's heads."""
MOST_PLAIN, MOST_ASKED = 6_000, 60_000
"""Questions about simple combinations before those near to what models have are asked about, and
most of them: a question takes up to half a millisecond."""
OPTIONAL = ("head_dims", "caches", "quantisation", "fp4", "scale_layout", *ROUTE_RULES)
"""Axes with values that some kernels do not name the feature of, whatever the others are."""

WITH_OTHERS = {"caches": ("head_dims",), "tree": ("verify", "group_size")}
"""Axes whose values some kernels take beside a few values of others only: nvfp4 caches at few head
dims, draft trees from a number of query rows on."""


def all_axes(operation: str) -> dict[str, tuple[Any, ...]]:
    """Return every value of every axis of an operation's problems."""
    return dict(EXAMPLES[operation].axes)


def example(operation: str, chosen: Mapping[str, Any]) -> Problem:
    """Return the simplest problem with these values."""
    made = EXAMPLES[operation].simplest(without_lengths(chosen))
    lengths = {name: chosen[name] for name in LENGTHS if name in chosen}
    return with_lengths(made, lengths, all_new=chosen.get("phase") == "prefill")


def fields_of(axis: str, value: Any) -> dict[str, Any]:  # noqa: ANN401  a value of any axis
    """Return the fields of a problem that a value of an axis, or of a field, stands for."""
    if axis == "head_dims":
        return head_fields(value)
    return dict(zip(FIELDS[axis], value, strict=True)) if axis in FIELDS else {axis: value}


def has(problem: Problem, axis: str, value: Any) -> bool:  # noqa: ANN401  a value of any axis
    """Whether a problem has a value of an axis or of a field; it has no phase."""
    return all(getattr(problem, n, None) == each for n, each in fields_of(axis, value).items())


def keeps(axes: Axes, problem: Problem, before: Problem) -> bool:
    """Whether a problem differs from another only in values that its axes have.

    Where an axis has all of its values, other numbers will do too: a length may be any.
    """
    every = all_axes(axes.operation)
    for axis, allowed in axes.values.items():
        if axis in NO_FIELDS or len(allowed) == len(every.get(axis, ())):
            continue
        names = FIELDS.get(axis, (axis,))
        new, old = ([getattr(each, name, None) for name in names] for each in (problem, before))
        if new != old and (new[0] if len(names) == 1 else tuple(new)) not in allowed:
            return False
    return True


Probe = Callable[[Sequence[Problem]], "list[Refusal | None]"]
"""Returns the refusal of each problem, None for those that are supported."""


def narrow(
    operation: str,
    probe: Probe,
    max_work: int,
    *,
    axes: Mapping[str, tuple[Any, ...]] | None = None,
) -> Axes | None:
    """Learn which values an implementation supports, by asking; None if nothing at all.

    Args:
        operation: the operation of its problems.
        probe: asks it.
        max_work: see ``Axes``.
        axes: values that may be drawn, simplest first; all of the operation's if None.
    """
    axes = all_axes(operation) if axes is None else axes
    if not axes:
        return None if probe([example(operation, {})])[0] else Axes(operation, {}, max_work, {})
    bases = _bases(operation, axes, probe)
    if not bases:
        return None
    free = [name for name in FREE if name in axes]
    # A value is in if any of a few supported bases stays supported with it; scales, and FP8
    # queries, may be supported with quantised caches alone.
    caches = [{**bases[0], "caches": pair} for pair in axes.get("caches", ()) if pair[0]]
    answers = probe([example(operation, chosen) for chosen in caches])
    quantised = [chosen for chosen, reason in zip(caches, answers, strict=True) if not reason]
    # One value is changed at a time, beside a few supported bases: all combinations would be
    # millions of questions. What a kernel supports only in combination is found by ``WITH_OTHERS``,
    # or remains unknown and is said to be refused.
    tried = [*_spread(bases, free), *quantised[:1]]
    questions = [
        (name, value, {**base, name: value})
        for base in tried
        for name, values in axes.items()
        for value in values
    ]
    asked = [example(operation, chosen) for _, _, chosen in questions]
    replies = probe(asked)
    supported: dict[str, set[int]] = {name: set() for name in axes}
    refused: dict[str, str] = {}
    for (name, value, _), problem, reason in zip(questions, asked, replies, strict=True):
        if reason is None and _of_another(problem, name, value):
            continue
        if reason is None:
            supported[name].add(axes[name].index(value))
        else:
            refused.setdefault(f"{name}={value}", reason)
    _add_with_others(operation, axes, bases[0], supported, probe)
    values = {
        name: tuple(value for i, value in enumerate(axes[name]) if i in supported[name])
        for name in axes
    }
    for name, kept in values.items():
        for value in kept:
            refused.pop(f"{name}={value}", None)
    if "verify" in values:  # a phase that does not mix is not drawn, and not refused
        values["phase"] = _phases_that_mix(values)
    alone = _takes_one_request(example(operation, bases[0]), probe)
    return Axes(operation, values, max_work, refused, bases[0], max_requests=int(alone))


def _of_another(problem: Problem, name: str, value: Any) -> bool:  # noqa: ANN401  any axis
    """Whether an example could not have a value, so that it says nothing about it."""
    if isinstance(problem, AttentionProblem):
        return _of_other_dims(problem, name, value)
    # It has more experts where a token goes to more than the value, say.
    return name not in NO_FIELDS and not has(problem, name, value)


def _of_other_dims(problem: AttentionProblem, name: str, value: Any) -> bool:  # noqa: ANN401  any axis
    """Whether an example could not have these head dims, as its cache has records of others.

    Nor may a cache leave a row of models without its own.
    """
    if name == "real" and value:
        wanted = rows_of(problem.operation)[value - 1].problem_fields(problem.operation)
        return any(getattr(problem, field) != each for field, each in wanted.items())
    if name != "head_dims":
        return False
    return problem.cache_entry.record is not None and not has(problem, name, value)


def _takes_one_request(problem: Problem, probe: Probe) -> bool:
    """Whether an implementation refuses a batch of this problem's request twice."""
    if not isinstance(problem, AttentionProblem) or problem.num_requests != 1:
        return False
    twice = replace(problem, query_lens=2 * problem.query_lens, seq_lens=2 * problem.seq_lens)
    return probe([twice])[0] is not None


def _phases_that_mix(values: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the phases that requests of one batch may have of a kernel with these values.

    One that takes equally many query tokens a request has several by the axis ``verify`` only:
    batches of chunks and prefills, which it takes one by one, would be refused.
    """
    phases = values["phase"]
    few = tuple(phase for phase in phases if PHASES[phase][0] <= 1)
    uniform = len(values["verify"]) > 1 and "verify" not in phases
    return few if uniform and few else phases


def _bases(
    operation: str, axes: Mapping[str, tuple[Any, ...]], probe: Probe
) -> list[dict[str, Any]]:
    """Return the simplest supported combinations of values, with the least of all limits."""
    simplest = {name: values[0] for name, values in axes.items()}
    free = [name for name in FREE if name in axes]
    not_named: set[object] = set()
    asked, wide_asked = 0, False
    for limited in _starts(axes):
        # Plain starts are nearly free for kernels that take them. Those that take none would be
        # asked about thousands before the anchors of models, one of which they mostly take.
        if asked > MOST_PLAIN and not wide_asked:
            wide_asked = True
            if found := _wide_bases(operation, axes, free, probe):
                return found
        if asked > MOST_ASKED:
            break
        optional = tuple(limited.get(name) for name in OPTIONAL)
        if optional in not_named:
            continue
        # There are many caches: a kernel that needs one decodes or prefills.
        values_of = {**axes, "phase": axes["phase"][:2]} if "caches" in limited else axes
        combinations = [
            {**simplest, **limited, **dict(zip(free, values, strict=True))}
            for values in itertools.product(*(values_of[name] for name in free))
        ]
        answers = probe([example(operation, chosen) for chosen in combinations])
        asked += len(combinations)
        bases = [chosen for chosen, reason in zip(combinations, answers, strict=True) if not reason]
        if bases:
            return bases
        if any(refusal and refusal.code in OF_THE_MACHINE for refusal in answers):
            return []
        # The refusals name a feature that this limit asks for, so that other heads or sizes beside
        # it are not asked about.
        if all(refusal and refusal.code == "feature" for refusal in answers):
            not_named.add(optional)
    return [] if wide_asked else _wide_bases(operation, axes, free, probe)


def _wide_bases(
    operation: str, axes: Mapping[str, tuple[Any, ...]], free: Sequence[str], probe: Probe
) -> list[dict[str, Any]]:
    """Return supported combinations of uncommon values; none where there is none among many."""
    found = wide_start(operation, axes, probe, example)
    if found is None:
        return []
    found = _simplified(operation, axes, found, probe)
    others = [
        {**found, **dict(zip(free, values, strict=True))}
        for values in itertools.product(*(axes[name] for name in free))
    ]
    answers = probe([example(operation, chosen) for chosen in others])
    bases = [chosen for chosen, reason in zip(others, answers, strict=True) if not reason]
    return [found, *(base for base in bases if base != found)]


def _simplified(
    operation: str, axes: Mapping[str, tuple[Any, ...]], chosen: dict[str, Any], probe: Probe
) -> dict[str, Any]:
    """Return a supported combination with the simplest value of each axis that still is."""
    for name, values in axes.items():
        # One axis after another, once: the result is simple, not the simplest of all.
        simpler = sorted(values, key=math.prod) if name == "sizes" else list(values)
        asked = [{**chosen, name: value} for value in simpler[: simpler.index(chosen[name])]]
        problems = [example(operation, each) for each in asked]
        for each, problem, refusal in zip(asked, problems, probe(problems), strict=True):
            if refusal is None and (name in NO_FIELDS or has(problem, name, each[name])):
                chosen = each
                break
    return chosen


def _starts(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Return the limits in every combination, then for the few kernels that need quantised ones.

    These are many, and are tried with a query head for each key-value head only.
    """
    limits = [name for name in LIMITS if name in axes]
    tried = [axes[name][: FEW.get(name)] for name in limits]
    found = [dict(zip(limits, limit, strict=True)) for limit in itertools.product(*tried)]
    yield from found
    yield from _of_rules(axes, found)
    shapes = [start for start in found if start.get("page_size") in OF_ONE_SHAPE["page_size"]]
    found = [start for start in found if start.get("group_size", 1) == 1]
    caches = [pair for pair in axes.get("caches", ())[1:] if pair != IN_FP8]
    for pair in ([IN_FP8] if IN_FP8 in axes.get("caches", ()) else []) + caches:
        yield from ({**start, "caches": pair} for start in found)
    found = [
        start
        for start in found
        if all(start.get(name, few[0]) in few for name, few in OF_QUANTISED.items())
    ]
    for values in ({}, {"regime": "exact_grid"}):  # which a kernel's own quantising leaves alone
        for pair in axes.get("quantisation", ())[1:]:
            yield from ({**start, "quantisation": pair, **values} for start in found)
    for pair in OF_ONE_SHAPE["caches"]:
        if pair in axes.get("caches", ()):
            yield from _with_each_group(axes, [{**start, "caches": pair} for start in shapes])
    if "e8m0" in axes.get("scale_format", ()):  # of a kernel that quantises to mxfp8 only
        mx = itertools.product(axes["scale_layout"], axes["floor"])
        names = "scale_layout", "floor"
        of_mx = {"scale_format": "e8m0", "blocks": (1, 32, None)}
        yield from ({**of_mx, **dict(zip(names, each, strict=True))} for each in mx)
    yield from _of_fused(axes)
    if "fp4" in axes:  # of a kernel that quantises to four bits only
        for fp4 in axes["fp4"][1:]:
            block = (1, 16, None) if fp4 == "e4m3" else (1, 32, None)
            layouts = itertools.product((axes["scale_layout"][0], "swizzled"), axes["floor"])
            yield from (
                {"fp4": fp4, "blocks": block, "scale_layout": layout, "floor": floor}
                for layout, floor in layouts
            )
    if "method" in axes:  # routers of one model have one number of experts, and of a token's
        numbers = itertools.product(axes["num_experts"], axes["top_k"])
        yield from ({"groups": (1, 1), "num_experts": n, "top_k": k} for n, k in numbers)


def _of_fused(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Return starts of norms that quantise, which mostly take one kind of scales only.

    And of kernels that turn and append: of MLA only, or with queries that keep their dtype.
    """
    names = "quantised_q", "turning"
    for each in itertools.product(*(axes.get(name, ()) for name in names)):
        yield dict(zip(names, each, strict=True))
    if "gamma_offset" not in axes:
        return
    of_norms = "residual", "scale_format", "scale_layout", "floor"
    for residual in axes["residual"]:
        yield from (
            {"residual": residual, "blocks": each} for each in axes["blocks"] if each[2] == 1
        )
    for each in itertools.product(*(axes[name] for name in of_norms)):
        yield {"blocks": (1, 128, None), **dict(zip(of_norms, each, strict=True))}


def _of_rules(
    axes: Mapping[str, tuple[Any, ...]], starts: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Return starts with the rules of routing and the top_k of single families."""
    of_models = [start for start in starts if start.get("num_experts") in OF_RULES]
    alone = [start for start in of_models if start.get("groups") == (1, 1)]
    rules = [name for name in ROUTE_RULES if name in axes]
    if not rules:
        return
    for top_k in axes["top_k"]:
        yield from ({**start, "top_k": top_k} for start in alone)
        for rule in rules:
            several = of_models if rule == "best_of_each_group" else alone
            made = ({rule: value, "top_k": top_k} for value in axes[rule][1:])
            yield from ({**start, **chosen} for chosen in made for start in several)


def _with_each_group(
    axes: Mapping[str, tuple[Any, ...]], starts: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Return starts with the group sizes that are not tried before."""
    alone = [start for start in starts if start.get("group_size") == 1]
    for group in axes.get("group_size", ())[FEW["group_size"] :]:
        yield from ({**start, "group_size": group} for start in alone)


def _add_with_others(
    operation: str,
    axes: Mapping[str, tuple[Any, ...]],
    base: Mapping[str, Any],
    supported: Mapping[str, set[int]],
    probe: Probe,
) -> None:
    """Ask again about values that were all refused, or caches, beside values of other axes."""
    for name, others in WITH_OTHERS.items():
        values = axes.get(name, ())
        left = [i for i in range(len(values)) if i not in supported[name]]
        # Where one is taken, others are refused for what they are; caches differ in their needs.
        if not left or (name != "caches" and max(supported[name], default=0) > 0):
            continue
        first = probe([example(operation, {**base, name: values[i]}) for i in left])
        left = [
            i for i, said in zip(left, first, strict=True) if not said or said.code != "feature"
        ]
        beside = [[axes[other][i] for i in sorted(supported.get(other, ()))] for other in others]
        chosen = [dict(zip(others, each, strict=True)) for each in itertools.product(*beside)]
        asked = [(i, {**base, name: values[i], **each}) for i in left for each in chosen]
        replies = probe([example(operation, each) for _, each in asked])
        supported[name].update(
            i for (i, _), reason in zip(asked, replies, strict=True) if reason is None
        )


def _spread(bases: Sequence[dict[str, Any]], free: Sequence[str]) -> list[dict[str, Any]]:
    """Return a few bases among which every supported value of every free axis occurs."""
    chosen = list(bases[:1])  # the simplest, also where no axis is free
    for name in free:
        for value in dict.fromkeys(base[name] for base in bases):
            # A window may be supported with causal alone: a base of each kind is asked about it.
            found = next(base for base in bases if base[name] == value)
            if found not in chosen:
                chosen.append(found)
    return chosen


def resized(axes: Axes, max_work: int) -> Axes:
    """Return the same axes with another limit of work."""
    return replace(axes, max_work=max_work)
