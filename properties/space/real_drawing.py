"""Drawing a row of what models have: which rows may be drawn, how often, on how many heads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ...reference import AttentionProblem
from .attention_axes import APPEND_AXES, ATTENTION_AXES, RAGGED_AXES, attention_example
from .axis_values import Axes
from .longest import BEHIND_AN_EDGE
from .real_values import MANY, Real, rows_of

OTHERS = 7
"""Problems that are drawn without a row of the table for each one with a row."""
LEAST_KEYS = 4
"""Keys of a request that a row must leave room for within the work of a problem."""
AXES = {"paged_attention": ATTENTION_AXES, "ragged_attention": RAGGED_AXES,
        "append_paged_kv": APPEND_AXES}  # fmt: skip
WIDE = {"window_left": 1, "chunk": 0}
"""Axes whose values hide keys of long requests only, and what a request has besides at least."""

LEAST_WIDE = 512
"""Window from which on requests that are drawn rarely reach beyond it."""

WINDOWED = (
    "window_left", "window_right", "logits_soft_cap", "sinks", "causal", "causal_by_request",
    "custom_mask", "mask_pattern", "mask_by_head", "spans", "chunk", "window_dilation",
    "sink_tokens", "logits_bias", "alibi", "alibi_function",
)  # fmt: skip
"""Axes of masks and logits, of which a row has one value each."""


def row_of(axes: Axes, number: int) -> Real | None:
    """Return the row of a value of the axis ``real``."""
    return rows_of(axes.operation)[number - 1] if number else None


def real_rows(axes: Axes) -> st.SearchStrategy[int]:
    """Draw the number of a row, or mostly 0: rows by how many families have them."""
    numbers, rows = fitting(axes), rows_of(axes.operation)
    return weighted(numbers, tuple(len(rows[number - 1].families) for number in numbers))


@functools.lru_cache(maxsize=1024)
def weighted(
    numbers: tuple[int, ...], families: tuple[int, ...], others: int = OTHERS
) -> st.SearchStrategy[int]:
    """Draw one of some rows, or mostly 0: each as often as its number of families says."""
    if not numbers:
        return st.just(0)
    # Of a long list, Hypothesis draws the first values more often than others: two short ones.
    # A row stands here once for each family that has it; parts of about the square root of its
    # length are drawn evenly, then an entry of a part.
    each = [number for number, n in zip(numbers, families, strict=True) for _ in range(n)]
    size = max(1, round(len(each) ** 0.5))
    parts = [st.sampled_from(each[start : start + size]) for start in range(0, len(each), size)]
    row = st.sampled_from(parts).flatmap(_itself)
    return st.sampled_from((*(st.just(0),) * others, row)).flatmap(_itself)


def _itself(strategy: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    return strategy


def fitting(axes: Axes) -> tuple[int, ...]:
    """Return the numbers of the rows that have no value which may not be drawn here.

    A value that no axis lists is one of its row, which narrowing has asked about; where an axis has
    a single value left, something asks for that value.
    """
    values = axes.values.get("real", ())
    if len(values) < 2 or axes.edges:  # noqa: PLR2004  none but 0
        return ()
    usual = AXES[axes.operation]
    names = ("head_dims", "page_size", *(WINDOWED if axes.operation != "append_paged_kv" else ()))
    allowed = tuple(
        (name, axes.values[name])
        for name in names
        if name in axes.values and axes.values[name] != usual[name]
    )
    groups = axes.values.get("group_size", ())
    return _fitting(axes.operation, values, allowed, groups, axes.max_work, axes.max_heads)


@functools.lru_cache(maxsize=1024)
def _fitting(
    operation: str,
    numbers: tuple[int, ...],
    allowed: tuple[tuple[str, tuple[Any, ...]], ...],
    groups: tuple[int, ...],
    work: int,
    heads: int,
) -> tuple[int, ...]:
    found = []
    for number in filter(None, numbers):
        real = rows_of(operation)[number - 1]
        values = real.values(operation)
        group = real.groups[0]
        fits = all(
            # A narrowed axis decides for its own values only. A window of 1,023 that no axis lists
            # was asked about with its row.
            values[name] in left or (len(left) > 1 and values[name] not in AXES[operation][name])
            for name, left in allowed
            if name in values
        )
        alone = len(groups) == 1 and group not in groups and operation != "append_paged_kv"
        affordable = LEAST_KEYS * _work_of_a_key(real) <= work
        if fits and not alone and affordable and not 0 < heads < group:
            found.append(number)
    return tuple(found)


def _work_of_a_key(real: Real) -> int:
    """Count the work of a key of a decode on the fewest heads of a row."""
    return real.kv_heads[0] * sum(real.head_dims[:2]) * (real.groups[0] + 8)


def affords(axes: Axes, real: Real, keys: int) -> bool:
    """Whether a decode of this many keys is within the work on the fewest heads of a row."""
    return keys * _work_of_a_key(real) <= axes.max_work


def page_of(axes: Axes, real: Real | None) -> int:
    """Return the keys a page of a row; 0 where there is none, or any page will do."""
    return real.page_size if real is not None and axes.operation != "ragged_attention" else 0


def heads_of(axes: Axes, real: Real | None, drawn: dict[str, Any], keys: int = 0) -> dict[str, Any]:
    """Return head dims and head counts of a row: as many heads as were drawn, if it has them.

    A request of this many keys is within the work, or has the fewest heads.
    """
    if real is None:
        return drawn
    keys = max(LEAST_KEYS, keys)
    fields = real.problem_fields(axes.operation)
    channels = fields["head_dim_qk"] + fields["head_dim_vo"]

    def most(name: str, values: tuple[int, ...], each: int, heads: int) -> int:
        affordable = axes.max_work // (keys * each)
        few = axes.max_heads // heads if axes.max_heads else drawn[name]
        fewer = [n for n in values if n <= min(drawn[name], affordable, few)]
        return max(fewer, default=values[0])

    # Appending has no query heads; the group that was drawn stays for the work it stands for.
    append = axes.operation == "append_paged_kv"
    group = drawn["group_size"] if append else real.groups[0]
    kv_heads = most("num_kv_heads", real.kv_heads, channels * (group + 8), group)
    if kv_heads == 1 and not append:
        group = most("group_size", real.groups, 2 * channels, 1)
    found = {"num_kv_heads": kv_heads, "group_size": group}
    same = {name: fields[name] for name in ("head_dim_qk", "head_dim_vo")}
    latent = {"values_in_keys": fields["values_in_keys"]} if fields.get("values_in_keys") else {}
    scale = {"sm_scale": fields["sm_scale"]} if latent and fields.get("sm_scale") else {}
    return {**found, **same, **latent, **scale}


def mask_of(axes: Axes, real: Real | None, heads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of masks and logits that a row has, and its scale where it has one."""
    if real is None or axes.operation == "append_paged_kv":
        return {}
    scale = {name: heads[name] for name in ("sm_scale",) if name in heads}
    return {**{name: real.fields[name] for name in WINDOWED}, **scale}


def wide_problems(axes: Axes) -> list[AttentionProblem]:
    """Return one request beyond each window and chunk that many families have, on few heads.

    They are the same in each run: nothing is drawn.
    """
    if axes.operation == "append_paged_kv" or not {"decode", "chunk"} & set(axes.allows("phase")):
        return []
    axes = axes.restricted()[0]
    many, found = many_values(axes), dict[tuple[str, int], AttentionProblem]()
    for number in fitting(axes):
        fields = rows_of(axes.operation)[number - 1].fields
        for name, more in WIDE.items():
            place = (name, fields[name])
            if fields[name] < LEAST_WIDE or (name, str(fields[name])) not in many:
                continue
            problem = _wide(axes, number, fields[name] + more + BEHIND_AN_EDGE)
            # The cheapest row of each window: these problems are added to every run, whatever its
            # time.
            if place not in found or problem.work < found[place].work:
                found[place] = problem
    return list(found.values())


def _wide(axes: Axes, number: int, keys: int) -> AttentionProblem:
    """Return a request of this many keys of a row, and the simplest values that it leaves open."""
    chosen = {name: values[0] for name, values in axes.values.items()}
    chosen |= {name: v for name, v in axes.simplest.items() if v in axes.values.get(name, ())}
    phase = "decode" if "decode" in axes.allows("phase") else "chunk"
    problem = attention_example(axes.operation, {**chosen, "phase": phase, "real": number})
    return replace(problem, query_lens=problem.query_lens[:1], seq_lens=(keys,))


def values_of(operation: str, real: Real) -> dict[str, Any]:
    """Return the values of a row that coverage counts, by axis; those of plain masks left out."""
    off = AXES[operation]
    found = {
        name: value
        for name, value in real.values(operation).items()
        if name in off and (name in ("head_dims", "page_size") or value != off[name][0])
    }
    if operation != "append_paged_kv" and len(real.groups) == 1:
        found["group_size"] = real.groups[0]
    return found


def row_values(axes: Axes) -> list[dict[str, Any]]:
    """Return what coverage counts of each row that may be drawn."""
    return [values_of(axes.operation, rows_of(axes.operation)[n - 1]) for n in fitting(axes)]


def many_values(axes: Axes) -> dict[tuple[str, str], float]:
    """Return the values that ten families have, of rows that may be drawn, and how often they are.

    Returns:
        The share of an implementation's problems that have each, by axis and value in words.
    """
    rows = fitting(axes)
    return dict(_many(axes.operation, rows))


@functools.lru_cache(maxsize=256)
def _many(operation: str, numbers: tuple[int, ...]) -> tuple[tuple[tuple[str, str], float], ...]:
    families: dict[tuple[str, str], set[str]] = {}
    weights: dict[tuple[str, str], int] = {}
    total = 0
    for number in numbers:
        real = rows_of(operation)[number - 1]
        total += len(real.families)
        for name, value in values_of(operation, real).items():
            families.setdefault((name, str(value)), set()).update(real.families)
            weights[name, str(value)] = weights.get((name, str(value)), 0) + len(real.families)
    return tuple(
        (key, weights[key] / total / (OTHERS + 1))
        for key, several in families.items()
        if len(several) >= MANY
    )
