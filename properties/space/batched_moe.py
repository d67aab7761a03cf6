"""Drawing problems of batched experts: counts from none to as many rows as there is room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ...reference import BatchedMoEProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.problems.base import DTYPES
from ...reference.problems.moe import MULTIPLES, SWIGLU_PARAMETERS
from .axis_values import Axes
from .floors import WEIGHTS
from .moe_axes import QUANTISATION, SIZES
from .sizes import COST_ROWS
from .strategy_helpers import LARGEST_SEED, one_of, sampled

BATCHED_AXES: dict[str, tuple[Any, ...]] = {
    "most_rows": (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256),
    "sizes": SIZES,
    "activation": tuple(ACTIVATIONS),
    "dtype": DTYPES,
    "biases": (False, True),
    "interleaved": (False, True),
    "swiglu_parameters": SWIGLU_PARAMETERS,
    "quantisation": QUANTISATION,
    "regime": ("iid", "outlier_channels", "saturated", "exact_grid"),
}
EXPERTS = (3, 2, 4, 1, 5, 8, 16, 32, 64)
"""Experts of a rank; several come before one, as only several have different counts."""


def batched_example(chosen: Mapping[str, Any]) -> BatchedMoEProblem:
    """Return the simplest problem with these values."""
    fields = dict(chosen)
    hidden, inter = fields.pop("sizes")
    quantized, quantized_hidden = fields.pop("quantisation")
    multiple = MULTIPLES.get(quantized, 1)
    if hidden % multiple or inter % multiple:
        hidden, inter = 64, 64
    activation = ACTIVATIONS[fields["activation"]]
    if (fields["interleaved"] and not activation.gated) or (
        fields["swiglu_parameters"] and activation.alpha is None
    ):
        fields["activation"] = "swiglu"
    most = fields["most_rows"]
    return BatchedMoEProblem(
        counts=(most, most // 2),
        hidden=hidden,
        inter=inter,
        quantized=quantized,
        quantized_hidden=quantized_hidden,
        **fields,
    )


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
