"""Combinations of values that a kernel of a narrow set of problems may start from.

They are tried where nothing simpler is supported. What a refusal says is not read: a kernel may
refuse everything else with one sentence. Kernels are made for models, so that each combination is
near what models have: an anchor, with up to two axes of other values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....impl.targets.refusal import Refusal
from ....reference import Problem
from ..moe_axes import LARGE_SIZES, SMALL_SIZES

MOST_ASKED = 75_000
"""Most problems that are asked about: attention's take half a millisecond each."""
BATCH = 2_000
"""Problems of one question."""
Value = tuple[str, Any]
"""An axis and a value of it."""
Chosen = dict[str, Any]
Probe = Callable[[Sequence[Problem]], "list[Refusal | None]"]

EXPERTS: tuple[tuple[int, int], ...] = (
    (8, 2), (256, 8), (8, 8), (64, 6), (128, 8), (16, 4), (1, 1), (32, 4), (64, 8), (384, 8),
    (512, 10), (128, 4), (128, 1), (16, 1), (160, 6), (896, 16), (288, 8), (32, 22),
)  # fmt: skip
"""Experts, and experts a token, that models have, and multiples of many numbers."""
DTYPES = ("bfloat16", "float16", "float32")
HEADS = (
    ((128, 128), 4), ((128, 128), 8), ((128, 128), 1), ((64, 64), 8), ((128, 128), 16),
    ((256, 256), 8), ((64, 64), 1), ((576, 512, 0), 16), ((192, 128), 1), ((256, 256), 1),
    ((576, 512, 0), 128), ((96, 96), 4), ((80, 80), 1), ((64, 64), 64), ((128, 128), 64),
)  # fmt: skip
"""Head dims, and query heads of a key-value head."""


def _product(**values: Sequence[Any]) -> list[Chosen]:
    """Return every combination of values; an axis of several values at a time has a tuple name."""
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _joined(pairs: Sequence[tuple[Any, ...]], *names: str) -> list[Chosen]:
    return [dict(zip(names, pair, strict=True)) for pair in pairs]


def _crossed(*parts: Sequence[Chosen]) -> list[Chosen]:
    found: list[Chosen] = []
    for each in itertools.product(*parts):
        merged: Chosen = {}
        for part in each:
            merged |= part
        found.append(merged)
    return found


ANCHORS: dict[str, list[Chosen]] = {
    "moe": _crossed(
        _product(dtype=DTYPES, sizes=(LARGE_SIZES, SMALL_SIZES)),
        _joined(EXPERTS, "num_experts", "top_k"),
    ),
    "route": _crossed(
        _product(dtype=DTYPES, method=("renormalize", "deepseek_v3")),
        _joined([(256, 8, (8, 4)), (64, 4, (8, 4)), *((*pair, (1, 1)) for pair in EXPERTS)],
                "num_experts", "top_k", "groups"),
    ),
}  # fmt: skip
"""What models have, by operation, the most frequent first."""
ATTENTION = _crossed(
    _product(causal=(True, False), kv_layout=("NHD", "HND"), dtype=DTYPES[:1]),
    _joined([(64, 8), (16, 1)], "page_size", "num_kv_heads"),
    _joined(HEADS, "head_dims", "group_size"),
)
PARTNERS = (
    "phase", "dtype", "num_kv_heads", "group_size", "caches", "window_left", "sinks",
    "logits_soft_cap",
)  # fmt: skip
"""Axes of attention of which two have other values than an anchor: there are too many pairs."""
FEW_ANCHORS = {"moe": 36, "route": 60}
"""Anchors with two axes of other values each: those of the first dtype."""
FEW_NUMBERS = 4
"""Values of an axis of numbers that are tried together with another axis's."""
OTHERS = 25
"""Such anchors of attention, whose axes are many."""


def anchors_of(operation: str, axes: Mapping[str, tuple[Any, ...]]) -> list[Chosen]:
    """Return the anchors of an operation, without values that may not be drawn, none twice."""
    known = ANCHORS.get(operation, ATTENTION)
    found: list[Chosen] = []
    for anchor in known:
        fitting = {name: v for name, v in anchor.items() if v in axes.get(name, ())}
        if fitting and fitting not in found:
            found.append(fitting)
    return found


def wide_start(
    operation: str,
    axes: Mapping[str, tuple[Any, ...]],
    probe: Probe,
    example: Callable[[str, Mapping[str, Any]], Problem],
) -> Chosen | None:
    """Return a supported combination of values; None where none of many is.

    Args:
        operation: the operation of its problems.
        axes: values that may be drawn, simplest first.
        probe: asks about problems.
        example: returns the simplest problem with some values.
    """
    # A batch of questions at a time: asking is a round trip to a worker, and most kernels are found
    # within the anchors themselves.
    simplest = {name: values[0] for name, values in axes.items()}
    anchors = anchors_of(operation, axes)
    not_named: set[Value] = set()
    asked = 0
    for tried in _batches(
        _near(axes, simplest, anchors, FEW_ANCHORS.get(operation, OTHERS)), not_named
    ):
        chosen = [{**simplest, **anchor, **dict(changed)} for anchor, changed in tried]
        answers = probe([example(operation, each) for each in chosen])
        for each, (_, changed), refusal in zip(chosen, tried, answers, strict=True):
            if refusal is None:
                return each
            # An anchor asks for no feature: what was changed is not named.
            if refusal.code == "feature" and len(changed) == 1:
                not_named.add(changed[0])
        asked += len(tried)
        if asked >= MOST_ASKED:
            break
    return None


Tried = tuple[Chosen, tuple[Value, ...]]


def _near(
    axes: Mapping[str, tuple[Any, ...]],
    simplest: Mapping[str, Any],
    anchors: Sequence[Chosen],
    few: int,
) -> Iterator[Tried]:
    """Return the anchors, then those with one other value, then a few of them with two."""
    yield from ((anchor, ()) for anchor in anchors)
    # Kernels that take nothing simple mostly need quantised operands: they are asked about first.
    names = sorted(axes, key=lambda name: name not in ("quantisation", "caches"))
    others = [(name, value) for name in names for value in axes[name] if name != "real"]
    for change in others:
        for anchor in anchors:
            if anchor.get(change[0], simplest[change[0]]) != change[1]:
                yield anchor, (change,)
    if "head_dims" in axes:
        pairs = [each for each in others if each[0] in PARTNERS]
    else:
        pairs = [(name, v) for name, values in axes.items() for v in _representative(values)]
    for anchor in anchors[:few]:
        left = [each for each in pairs if anchor.get(each[0], simplest[each[0]]) != each[1]]
        for one, other in itertools.combinations(left, 2):
            if one[0] != other[0]:
                yield anchor, (one, other)


def _representative(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all names, or a few of many numbers."""
    if len(values) <= 2 * FEW_NUMBERS or not all(isinstance(each, int | float) for each in values):
        return values
    # An even sample, the first value included.
    return values[:: -(-len(values) // FEW_NUMBERS)]


def _batches(tried: Iterator[Tried], not_named: set[Value]) -> Iterator[list[Tried]]:
    """Return what is tried in parts, without values that the answers before have ruled out."""
    while part := list(itertools.islice(tried, BATCH)):
        left = [each for each in part if not_named.isdisjoint(each[1])]
        if left:
            yield left
