"""The space of problems: which values each axis may take, simplest first.

``supports`` of an implementation is a predicate, and few implementations support everything:
drawing from the whole space and throwing away what is refused would judge next to nothing. So the
axes are narrowed first, by asking about the simplest problem with each single value changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...impl.targets.refusal import Refusal
from ...reference import AttentionProblem, MergeProblem, MetadataProblem, Problem
from ...reference.formats.kv_format import FP8
from ...reference.problems import ATTENTION_REGIMES, EMPTY_STATES, MERGE_REGIMES
from ...reference.problems.base import DTYPES
from ...reference.problems.cache_names import (
    KV_CACHES,
    cache_fits,
    element_of,
    multiples_of,
    query_dtypes,
)
from .moe_axes import MOE_AXES, ROUTE_AXES, TOGETHER, moe_example, route_example

HEAD_DIMS: tuple[tuple[int, ...], ...] = (
    (16, 16),
    (32, 32),
    (24, 40),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (512, 512),
    (24, 16, 0),
    (576, 512, 0),
    (576, 512, 128),
)
"""Channels of queries and keys, and of values. A third number says that values are the keys' first
channels (``values_in_keys``), for so many query heads with the scale of DeepSeek's layers, or for
any number of heads where it is 0."""
DEEPSEEK_SCALE = 192**-0.5
"""Of 128 + 64 channels, as before the projections were absorbed; CUTLASS knows no other."""
PAIR = 2
CACHES = tuple((name, q_dtype) for name in KV_CACHES for q_dtype in query_dtypes(name))
"""Formats of the cache, each with the dtypes of queries that may meet it."""
IN_FP8 = (FP8[0], FP8[0])
"""Cache and queries of kernels that compute in FP8."""
PHASES: dict[str, tuple[int, int]] = {
    "decode": (1, 3),
    "prefill": (3, 3),
    "chunk": (2, 5),
    "no_query": (0, 3),
    "no_keys": (1, 0),
    "surplus": (3, 2),
}
"""Kinds of request and an example (query_len, seq_len) of each."""

ATTENTION_AXES: dict[str, tuple[Any, ...]] = {
    "phase": tuple(PHASES),
    "dtype": DTYPES,
    "causal": (False, True),
    "head_dims": HEAD_DIMS,
    "num_kv_heads": (1, 2, 3, 4, 8),
    "group_size": (1, 2, 3, 4, 5, 6, 7, 8, 16),
    "page_size": (1, 2, 3, 4, 8, 16, 32, 64, 128, 256),
    "kv_layout": ("NHD", "HND"),
    "page_order": (0, 1),
    "shared_prefix_pages": (0, 1, 2),
    "window_left": (-1, 0, 1, 2, 7, 15, 16, 63, 127, 128),
    "logits_soft_cap": (0.0, 30.0, 5.0, 1.0),
    "sm_scale": (None, 1.0, 0.25, 0.05),
    "k_scale": (1.0, 0.5, 2.0, 1.25),
    "v_scale": (1.0, 0.5, 2.0, 1.25),
    "sinks": (False, True),
    "custom_mask": (False, True),
    "per_head_scales": (False, True),
    "caches": CACHES,
    "q_scale": (1.0, 0.5, 2.0, 16.0),
    "strided_q": (False, True),
    "strided_kv": (False, True),
    "regime": ATTENTION_REGIMES,
}
MERGE_AXES: dict[str, tuple[Any, ...]] = {
    "num_states": (2, 1, 3, 4, 7),
    "dtype": DTYPES,
    "head_dim": (4, 16, 64, 80, 128, 256),
    "empty": EMPTY_STATES,
    "regime": MERGE_REGIMES,
}
FREE = ("phase", "dtype", "causal", "kv_layout", "num_states", "activation", "method")
"""Axes on which the simplest supported problem is looked for in every combination."""
FIELDS = {
    "head_dims": ("head_dim_qk", "head_dim_vo"),
    "caches": ("kv_cache", "q_dtype"),
    **TOGETHER,
}
"""Fields of the axes that have two each."""
LIMITS = ("page_size", "head_dims", "head_dim", "sizes", "num_experts", "groups")
"""Axes whose simplest value many kernels do not have: the next ones are tried in turn."""
OPTIONAL = ("head_dims", "caches", "quantisation")
"""Axes with values that some kernels do not name the feature of, whatever the others are."""


@dataclass(frozen=True)
class Axes:
    """What may be drawn for one operation.

    Attributes:
        operation: of the problems.
        values: allowed values by axis, simplest first.
        max_work: most work of one problem, see ``AttentionProblem.work``.
        refused: axis and value of what narrowing removed, with the implementation's reason.
        simplest: one value each, together the simplest problem that is supported.
        restrictions: axes and the values that they are drawn from, one of these at a time; nothing
            where all of ``values`` may be combined. See ``modules``.
    """

    operation: str
    values: Mapping[str, tuple[Any, ...]]
    max_work: int
    refused: Mapping[str, str] = field(default_factory=dict)
    simplest: Mapping[str, Any] = field(default_factory=dict)
    restrictions: tuple[Mapping[str, tuple[Any, ...]], ...] = ()

    def restricted(self) -> list[Axes]:
        """Give the axes of each restriction, or these where there is none."""
        parts = [
            replace(self, values={**self.values, **part}, restrictions=())
            for part in self.restrictions
        ]
        return parts or [self]

    def allows(self, name: str) -> tuple[Any, ...]:
        """Give the values of an axis."""
        return self.values[name]


def all_axes(operation: str) -> dict[str, tuple[Any, ...]]:
    """Give every value of every axis of an operation's problems."""
    if operation == "merge_state":
        return dict(MERGE_AXES)
    if operation == "build_metadata":
        return {}
    if operation == "route":
        return dict(ROUTE_AXES)
    if operation == "moe":
        return dict(MOE_AXES)
    axes = dict(ATTENTION_AXES)
    if operation != "paged_attention":
        axes["head_dims"] = tuple(
            dims for dims in HEAD_DIMS if "values_in_keys" not in head_fields(dims)
        )
    if operation == "ragged_attention":
        for name in ("page_size", "kv_layout", "page_order", "shared_prefix_pages", "caches",
                     "q_scale"):  # fmt: skip
            axes[name] = axes[name][:1]
    if operation == "append_paged_kv":
        axes["phase"] = ("decode", "prefill", "chunk", "no_query")
        # Appending reads no query and computes nothing: these would only repeat problems.
        kept = ("phase", "dtype", "head_dims", "num_kv_heads", "page_size", "kv_layout",
                "page_order", "strided_kv", "regime")  # fmt: skip
        axes = {name: values if name in kept else values[:1] for name, values in axes.items()}
        axes["caches"] = tuple((name, "") for name in KV_CACHES if element_of(name) in ("", *FP8))
        axes["k_scale"] = axes["v_scale"] = (1.0, 0.5, 2.0)
    return axes


def example(operation: str, chosen: Mapping[str, Any]) -> Problem:
    """Give the simplest problem with these values."""
    if operation == "merge_state":
        return MergeProblem(**chosen)
    if operation == "build_metadata":
        return MetadataProblem()
    if operation == "route":
        return route_example(chosen)
    if operation == "moe":
        return moe_example(chosen)
    fields = dict(chosen)
    query_len, seq_len = PHASES[fields.pop("phase")]
    fields |= head_fields(fields.pop("head_dims"))
    kv_cache, q_dtype = fields.pop("caches")
    if operation == "append_paged_kv" and (fields["k_scale"], fields["v_scale"]) != (1.0, 1.0):
        kv_cache = kv_cache or FP8[0]
    if fields["q_scale"] != 1 and not q_dtype:
        kv_cache = q_dtype = FP8[0]
    fields |= {"kv_cache": kv_cache, "q_dtype": q_dtype}
    if not cache_fits(kv_cache, fields):
        fields |= {"head_dim_qk": 64, "head_dim_vo": 64, "values_in_keys": False}
        fields["page_size"] = multiples_of(kv_cache).get("page_size", fields["page_size"])
    if fields["regime"] == "exact_grid":
        fields["logits_soft_cap"], fields["v_scale"] = 0.0, 1.0
    # A batch without a token is another matter: a request without a query has company.
    company = ((), ()) if query_len else ((1,), (seq_len,))
    return AttentionProblem(
        operation=operation,
        query_lens=(query_len, *company[0]),
        seq_lens=(seq_len, *company[1]),
        **fields,
    )


def has(problem: Problem, axis: str, value: Any) -> bool:  # noqa: ANN401  a value of any axis
    """Tell whether a problem has a value of an axis or of a field; it has no phase."""
    if axis == "head_dims":
        fields = head_fields(value)
    else:
        fields = dict(zip(FIELDS[axis], value, strict=True)) if axis in FIELDS else {axis: value}
    return all(getattr(problem, name, None) == each for name, each in fields.items())


def head_fields(dims: Sequence[int]) -> dict[str, Any]:
    """Give the fields of a problem that one of ``HEAD_DIMS`` stands for."""
    found: dict[str, Any] = {"head_dim_qk": dims[0], "head_dim_vo": dims[1]}
    if len(dims) > PAIR:
        found |= {"values_in_keys": True, "num_kv_heads": 1}
        found |= {"group_size": dims[2], "sm_scale": DEEPSEEK_SCALE} if dims[2] else {}
    return found


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
        operation: of its problems.
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
    tried = [*_spread(bases, free), *quantised[:1]]
    questions = [
        (name, value, {**base, name: value})
        for base in tried
        for name, values in axes.items()
        for value in values
    ]
    replies = probe([example(operation, chosen) for _, _, chosen in questions])
    supported: dict[str, set[int]] = {name: set() for name in axes}
    refused: dict[str, str] = {}
    for (name, value, _), reason in zip(questions, replies, strict=True):
        if reason is None:
            supported[name].add(axes[name].index(value))
        else:
            refused.setdefault(f"{name}={value}", reason)
    _add_caches_of_other_dims(operation, axes, bases[0], supported, probe)
    values = {
        name: tuple(value for i, value in enumerate(axes[name]) if i in supported[name])
        for name in axes
    }
    for name, kept in values.items():
        for value in kept:
            refused.pop(f"{name}={value}", None)
    return Axes(operation, values, max_work, refused, bases[0])


def _bases(
    operation: str, axes: Mapping[str, tuple[Any, ...]], probe: Probe
) -> list[dict[str, Any]]:
    """Give the simplest supported combinations of values, with the least of all limits."""
    simplest = {name: values[0] for name, values in axes.items()}
    free = [name for name in FREE if name in axes]
    said: set[Refusal | None] = set()
    not_named: set[object] = set()
    for limited in _starts(axes):
        optional = tuple(limited.get(name) for name in OPTIONAL)
        if optional in not_named:
            continue
        combinations = [
            {**simplest, **limited, **dict(zip(free, values, strict=True))}
            for values in itertools.product(*(axes[name] for name in free))
        ]
        answers = probe([example(operation, chosen) for chosen in combinations])
        bases = [chosen for chosen, reason in zip(combinations, answers, strict=True) if not reason]
        if bases:
            return bases
        if all(refusal and refusal.code == "feature" for refusal in answers):
            not_named.add(optional)
        elif not ("caches" in limited or "quantisation" in limited):
            said |= set(answers)
        elif len(said) == 1 and said == set(answers):
            break  # the reason has nothing to do with the cache
    return []


def _starts(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Give the limits in every combination, then for the few kernels that need quantised ones."""
    limits = [name for name in LIMITS if name in axes]
    found = [dict(zip(limits, limit, strict=True))
             for limit in itertools.product(*(axes[name] for name in limits))]  # fmt: skip
    yield from found
    if IN_FP8 in axes.get("caches", ()):
        yield from ({**start, "caches": IN_FP8} for start in found)
    for values in ({}, {"regime": "exact_grid"}):  # which a kernel's own quantising leaves alone
        for pair in axes.get("quantisation", ())[1:]:
            yield from ({**start, "quantisation": pair, **values} for start in found)


def _add_caches_of_other_dims(
    operation: str,
    axes: Mapping[str, tuple[Any, ...]],
    base: Mapping[str, Any],
    supported: Mapping[str, set[int]],
    probe: Probe,
) -> None:
    """Ask again about refused caches, with each other head dim: few kernels have nvfp4 at 64."""
    dims = [axes["head_dims"][i] for i in sorted(supported.get("head_dims", ()))]
    left = [i for i in range(len(axes.get("caches", ()))) if i not in supported["caches"]]
    asked = [(i, {**base, "caches": axes["caches"][i], "head_dims": dim})
             for i in left for dim in dims]  # fmt: skip
    replies = probe([example(operation, chosen) for _, chosen in asked])
    for (i, _), reason in zip(asked, replies, strict=True):
        if reason is None:
            supported["caches"].add(i)


def _spread(bases: Sequence[dict[str, Any]], free: Sequence[str]) -> list[dict[str, Any]]:
    """Give a few bases among which every supported value of every free axis occurs."""
    chosen: list[dict[str, Any]] = []
    for name in free:
        for value in dict.fromkeys(base[name] for base in bases):
            # A window may be supported with causal alone: a base of each kind is asked about it.
            found = next(base for base in bases if base[name] == value)
            if found not in chosen:
                chosen.append(found)
    return chosen


def resized(axes: Axes, max_work: int) -> Axes:
    """Give the same axes with another limit of work."""
    return replace(axes, max_work=max_work)
