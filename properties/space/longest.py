"""One very long request of attention: a fault of many splits needs thousands of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...reference import AttentionProblem
from .attention_axes import attention_example
from .axis_values import Axes

BEHIND_AN_EDGE = 37
"""Keys behind a multiple of every tile: the last tile of a long request is not full."""
KEYS = {"cpu": 2**14, "cuda": 2**17}
"""Fewest keys of the longest request, by device."""
OF_FEW_QUERIES = ("decode", "verify", "chunk")
"""Phases whose requests may have one or two queries, and any number of keys."""
PAGES = (16, 32, 64)
"""Keys a page of a long request, where they may be drawn: single keys need a long page table."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "window_left": (-1,), "window_right": (-1,), "sm_scale": (None,), "custom_mask": (False,),
    "regime": ("iid",), "page_size": PAGES, "dtype": ("float32", "bfloat16", "float16"),
}  # fmt: skip
"""Values that show a lost key of many, where they may be drawn: first choices come first."""


def longest(axes: Axes, device: str = "cpu") -> AttentionProblem | None:
    """Return one long request on the fewest heads and channels; None where there is no such call.

    It is the same in each run: nothing is drawn.

    Args:
        axes: what may be drawn.
        device: ``"cpu"`` or ``"cuda"``.
    """
    axes = axes.restricted()[0]
    phases = [each for each in OF_FEW_QUERIES if each in axes.allows("phase")]
    verifies = [tokens for tokens in axes.allows("verify") if tokens > 0]
    if not phases and (not verifies or 0 in axes.allows("verify")):
        return None
    chosen = {name: _plainest(axes, name) for name in axes.values if axes.values[name]}
    chosen |= {"phase": phases[0] if phases else "decode"}
    problem = attention_example(axes.operation, chosen)
    queries = problem.query_lens[0]
    keys = KEYS[device] + BEHIND_AN_EDGE
    return replace(problem, query_lens=(queries,), seq_lens=(keys,))


def _plainest(axes: Axes, name: str) -> Any:  # noqa: ANN401  a value of any axis
    values = axes.allows(name)
    plain = next((each for each in PLAIN.get(name, ()) if each in values), None)
    if plain is not None or name in PLAIN:
        return plain if plain in values else values[0]
    simplest = axes.simplest.get(name)
    return simplest if simplest in values else values[0]
