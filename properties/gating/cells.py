"""The cells of the support table that one implementation can try on a machine, on both sides.

A cell is a simple call with one thing about it changed, and of two things where a rule needs both:
FP8 queries *and* a window. Which side it is on, the rules say; nothing here runs a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...impl import Target
from ...impl.gating import Feature, Rule, RuleBook, decide
from ...impl.gating.of_problem import feature_of
from ...impl.gating.refusals import refusing
from ...reference import AttentionProblem, MergeProblem, MetadataProblem, Problem
from ..space.attention_axes import CACHES, HEAD_DIMS, MERGE_AXES
from ..space.axes import Probe
from . import moe_cells

SUPPORTED, REFUSED = "supported", "refused"
Change = tuple[str, str, Mapping[str, Any]]
"""What a change is about, what it is called, and the fields that it sets."""

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Query and sequence lengths of a batch."""
Lengths = Mapping[str, tuple[Pair, ...]]

LENGTHS: Lengths = {
    "decode": (((1, 1, 1), (300, 64, 5)), ((1,), (300,))),
    "prefill": (((300, 17), (300, 97)), ((300,), (300,))),
    "mixed": (((1, 300), (97, 300)),),
}
"""Of small calls, by phase: longer than a window, than a tile of 256, and not."""
ON_CPU: Lengths = {
    **LENGTHS,
    "prefill": (((140, 17), (140, 97)), ((140,), (140,))),
    "mixed": (((1, 140), (97, 140)),),
}
"""Shorter ones, where a call costs more."""
DTYPES = ("bfloat16", "float16", "float32")
GROUP_SIZES = (1, 3, 4, 5, 6, 7, 8, 12, 16, 32)
PAGE_SIZES = (1, 8, 32, 64, 128, 256)
BASES: Mapping[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "head_dims": ((128, 128), (64, 64), (16, 16)),
    "page_size": (16, 64, 1),
    "kv_layout": ("NHD", "HND"),
    "group_size": (2, 8, 1),
    "causal": (True, False),
}
"""Simple calls, the most usual first."""
LATENT: Mapping[str, tuple[Any, ...]] = {
    **BASES,
    "head_dims": ((576, 512),),
    "page_size": (64, 32),
    "group_size": (16, 128),
    "values_in_keys": (True,),
}
"""Of multi-head latent attention."""
WITHOUT_PAGES = ("page_size", "kv_layout")


@dataclass(frozen=True)
class Cell:
    """One call on one side of the table.

    Attributes:
        title: what is special about it.
        problem: the call.
        feature: the question that it asks of the rules.
        side: ``SUPPORTED`` or ``REFUSED``.
        rules: ids of all rules that refuse it, or of the one that allows it.
        called: what may become of it, of ``rules.CALLED``.
        number: its place among the cells of its implementation.
    """

    title: str
    problem: Problem
    feature: Feature
    side: str
    rules: tuple[str, ...]
    called: tuple[str, ...]
    number: int = 0


def cells_of(
    operation: str, backend: str, target: Target, book: RuleBook, probe: Probe
) -> list[Cell]:
    """Give the cells that an implementation can express.

    Args:
        operation, backend: of the implementation.
        target: the machine; its release of FlashInfer decides which rules hold.
        book: of rules.
        probe: asks the implementation whether it can express problems, whatever the rules say.
    """
    found: list[Cell] = []

    def judged(title: str, problem: Problem) -> Cell | None:
        return _cell(title, problem, backend, target, book)

    lengths = LENGTHS if target.device == "cuda" else ON_CPU
    for base_title, base in _bases(_simple_calls(operation, lengths), judged, probe):
        one_scale = isinstance(base, AttentionProblem) and base.values_in_keys
        changes = _changes(operation, v_scale=0.5 if one_scale else 2.0)
        singles = list(_changed(base_title, base, [(each,) for each in changes]))
        cells = [cell for cell in itertools.starmap(judged, [(base_title, base), *singles]) if cell]
        cells = _expressible(cells, probe)
        if cells[0].side == REFUSED:
            # Everything is refused, mostly by the same rule: once is enough.
            cells = [cells[0], *_one_a_rule(cells[1:], set(cells[0].rules))]
        shown = {rule for cell in cells for rule in cell.rules}
        pairs = _changed(
            base_title,
            base,
            [pair for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]],
        )
        more = [
            cell
            for cell in itertools.starmap(judged, pairs)
            if cell is not None and not set(cell.rules) <= shown
        ]
        found += [*cells, *_one_a_rule(_expressible(more, probe), shown)]
    once = {cell.problem: cell for cell in found}.values()
    return [replace(cell, number=number) for number, cell in enumerate(once)]


def _cell(
    title: str, problem: Problem, backend: str, target: Target, book: RuleBook
) -> Cell | None:
    """Say on which side a call is; None where no rule speaks of it."""
    feature = feature_of(problem, backend)
    refusals = refusing(feature, target, book=book)
    if refusals:
        called = tuple(dict.fromkeys(word for rule in refusals for word in rule.called))
        return Cell(title, problem, feature, REFUSED, _ids(refusals), called)
    decision = decide(feature, target, book=book)
    if not decision.supported:
        return None
    return Cell(title, problem, feature, SUPPORTED, (decision.rule,), ("right",))


def _ids(rules: Sequence[Rule]) -> tuple[str, ...]:
    return tuple(rule.id for rule in rules)


def _expressible(cells: Sequence[Cell], probe: Probe) -> list[Cell]:
    reasons = probe([cell.problem for cell in cells])
    return [cell for cell, reason in zip(cells, reasons, strict=True) if reason is None]


def _one_a_rule(cells: Sequence[Cell], shown: set[str]) -> Iterator[Cell]:
    """Give one cell for each rule that is not shown yet, one of which fewest others speak."""
    left = {rule for cell in cells for rule in cell.rules} - shown
    for cell in sorted(cells, key=lambda each: len(each.rules)):
        if left & set(cell.rules):
            left -= set(cell.rules)
            yield cell


def _bases(
    simple: Iterable[tuple[str, Sequence[Problem]]],
    judged: Callable[[str, Problem], Cell | None],
    probe: Probe,
) -> Iterator[tuple[str, Problem]]:
    """Give a simple call of each phase: one that is supported if there is any, else refused."""
    for title, candidates in simple:
        cells = [cell for each in candidates if (cell := judged(title, each))]
        cells = _expressible(cells, probe)
        chosen = next((cell for cell in cells if cell.side == SUPPORTED), None) or next(
            iter(cells), None
        )
        if chosen is not None:
            yield title, chosen.problem


def _simple_calls(operation: str, lengths: Lengths) -> Iterator[tuple[str, list[Problem]]]:
    if operation in ("route", "moe"):
        yield from moe_cells.simple_calls(operation)
    elif operation == "merge_state":
        dims = MERGE_AXES["head_dim"]
        yield (
            "merge",
            [
                MergeProblem(num_tokens=9, num_heads=4, head_dim=dim, dtype=dtype)
                for dtype in DTYPES
                for dim in (128, *dims)
            ],
        )
    elif operation == "build_metadata":
        yield "metadata", [MetadataProblem(steps=(((1, 17), (97, 300)),), page_size=16)]
    else:
        phases = lengths if operation != "append_paged_kv" else {"append": lengths["mixed"]}
        for phase, pairs in phases.items():
            yield phase, list(_simple_attention(operation, pairs))


def _simple_attention(operation: str, lengths: Sequence[Pair]) -> Iterator[Problem]:
    fixed = WITHOUT_PAGES if operation == "ragged_attention" else ()
    values = {name: each[:1] if name in fixed else each for name, each in BASES.items()}
    if operation == "append_paged_kv":
        values["causal"] = (False,)
    spaces = [values, LATENT] if operation == "paged_attention" else [values]
    for space, (query_lens, seq_lens) in itertools.product(spaces, lengths):
        for chosen in itertools.product(*space.values()):
            given = dict(zip(space, chosen, strict=True))
            given["head_dim_qk"], given["head_dim_vo"] = given.pop("head_dims")
            yield AttentionProblem(
                operation=operation,
                query_lens=query_lens,
                seq_lens=seq_lens,
                num_kv_heads=2 - ("values_in_keys" in space),
                **given,
            )


def _changes(operation: str, *, v_scale: float) -> list[Change]:
    """Give everything that may be changed about a simple call, as far as rules may speak of it."""
    if operation in ("route", "moe"):
        return moe_cells.changes(operation)
    dtypes: list[Change] = [("dtype", each, {"dtype": each}) for each in DTYPES]
    if operation == "merge_state":
        dims = MERGE_AXES["head_dim"]
        return [*dtypes, *(("dims", f"head dim {d}", {"head_dim": d}) for d in dims)]
    if operation == "build_metadata":
        return []
    plain = [dims for dims in HEAD_DIMS if len(dims) == 2]  # noqa: PLR2004  not latent attention's
    found = [
        *dtypes,
        *(
            ("dims", f"head dims {qk}x{vo}", _head_dims(operation, qk, vo))
            for qk, vo in (*plain, (192, 192), (128, 64))
        ),
    ]
    if operation != "ragged_attention":
        found += [("page", f"page size {size}", {"page_size": size}) for size in PAGE_SIZES]
        found += [("layout", each, {"kv_layout": each}) for each in ("NHD", "HND")]
        found += [("cache", *_cache(*pair, v_scale)) for pair in CACHES if pair[0]]
    if operation == "append_paged_kv":
        return found
    return [
        *found,
        *(("group", f"group size {size}", {"group_size": size}) for size in GROUP_SIZES),
        ("window", "window", {"window_left": 127}),
        # A cap of 30, as models have it, is within the bound of FP8 where logits are small.
        ("cap", "soft cap", {"logits_soft_cap": 1.0}),
        ("sinks", "sinks", {"sinks": True}),
        ("mask", "no mask", {"causal": False}),
        ("mask", "custom mask", {"causal": False, "custom_mask": True}),
    ]


def _head_dims(operation: str, qk: int, vo: int) -> dict[str, Any]:
    """Give the fields of head dims; caches of two widths can have one stride in one allocation."""
    dims: dict[str, Any] = {"head_dim_qk": qk, "head_dim_vo": vo}
    return {**dims, "strided_kv": True} if qk != vo and operation == "paged_attention" else dims


def _cache(kv_cache: str, q_dtype: str, v_scale: float) -> tuple[str, dict[str, Any]]:
    """Give the title and the fields of a quantised cache; a scale that is lost shows."""
    fields = {"kv_cache": kv_cache, "q_dtype": q_dtype, "k_scale": 0.5, "v_scale": v_scale}
    title = f"KV {kv_cache}"
    return (f"Q {q_dtype}, {title}" if q_dtype else title), fields


def _changed(
    title: str, base: Problem, changes: Sequence[tuple[Change, ...]]
) -> Iterator[tuple[str, Problem]]:
    """Give the calls that differ from a base by each of some sets of changes, where there are."""
    for some in changes:
        fields = {name: value for _, _, given in some for name, value in given.items()}
        try:
            problem = replace(base, **fields)
        except ValueError:  # no call is like that, such as nvfp4 with 24 channels
            continue
        if problem != base:
            yield f"{title}, {', '.join(name for _, name, _ in some)}", problem
