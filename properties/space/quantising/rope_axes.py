"""Axes of problems of turning and appending, and the simplest problem with one value of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....reference import RopeAppendProblem
from ....reference.problems import QUANTIZE_REGIMES
from ....reference.problems.rope_append import INDEX_DTYPES, ROPE_CODES, ROPE_DTYPES

TURNING = (
    (64, 0, False), (128, 0, False), (32, 32, False), (32, 96, False), (64, 64, False),
    (16, 0, False), (6, 3, False), (64, 512, True), (32, 64, True), (2, 5, True),
)  # fmt: skip
"""Channels that turn and that do not, and whether keys hold the values."""
HEAD_COUNTS = ((1, 1), (4, 1), (2, 2), (6, 2), (5, 1), (3, 3), (16, 2),
               (32, 8), (128, 1))  # fmt: skip
"""Heads of queries, and of keys and values; MLA has one of the latter."""
SCALES = ((1.0, 1.0, 1.0), (0.25, 2.0, 2.0), (0.0372, 0.11, 0.11), (1.0, 0.5, 0.037),
          (2.0**-12, 17.0, 2.0**10), (7.0, 15.0, 15.0))  # fmt: skip
"""Scales of queries, keys and values: powers of two, others, equal and unlike ones.

Quotients by 7 and 15 are exact ties where rows are: a reciprocal moves some of these aside.
"""
ROPE_AXES: dict[str, tuple[Any, ...]] = {
    "turning": TURNING,
    "head_counts": HEAD_COUNTS,
    "dtype": ROPE_DTYPES,
    "codes": ROPE_CODES,
    "quantised_q": (True, False),
    "interleaved": (False, True),
    "kv_layout": ("NHD", "HND"),
    "page_size": (16, 1, 64, 8, 5),
    "scales": SCALES,
    "shift": (0, 3, 300, 5000),
    "index_dtype": INDEX_DTYPES,
    "skipped": (False, True),
    "spare_channels": (0, 16, 5),
    "strided_kv": (False, True),
    "regime": QUANTIZE_REGIMES,
}
"""Values by axis, simplest first."""


def rope_fields(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a problem with one value of each axis, as far as these go together."""
    values = {n: v for n, v in chosen.items() if n not in ("turning", "head_counts", "scales")}
    values["rope_dim"], values["plain_dim"], latent = chosen["turning"]
    values["num_qo_heads"], values["num_kv_heads"] = chosen["head_counts"]
    values["quantised_q"] &= values["codes"] != ""
    if latent:
        values |= {"latent": True, "num_kv_heads": 1, "kv_layout": "NHD", "strided_kv": False}
    used = values["quantised_q"], values["codes"] != "", values["codes"] != "" and not latent
    names = ("q_scale", "k_scale", "v_scale")
    scales = zip(names, chosen["scales"], used, strict=True)
    return values | {name: scale if is_used else 1.0 for name, scale, is_used in scales}


def rope_example(chosen: Mapping[str, Any]) -> RopeAppendProblem:
    """Return the simplest problem with one value of each axis: three tokens of two requests."""
    return RopeAppendProblem((2, 1), (5, 3), **rope_fields(chosen))
