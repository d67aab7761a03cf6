"""How tight the bound is: errors of honest kernels lie within it, and not far below.

A bound that nobody exceeds may still be too loose to see a bug. The honest controls of the seeded
suite, which round as real kernels do, are compared with the oracle on fixed problems; what counts
is a problem's worst element, as a share of that element's bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kernelproof.ci.bench.results import Requirement, Results, Table
from kernelproof.impl.protocol import Implementation
from kernelproof.properties.seeded.honest import bf16_probabilities, float32
from kernelproof.properties.verdicts.comparison import within
from kernelproof.reference import AttentionProblem, materialise
from kernelproof.reference.oracle import bounded_attention
from kernelproof.reference.problems import ATTENTION_REGIMES
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.tensors.values import choose
from kernelproof.tests.bench.times import torch_threads

MEDIAN = (0.1, 0.6)
"""Between these lies the median worst share of an honest bfloat16 kernel on iid values."""
FEWEST_KEYS, MOST_KEYS, MOST_QUERIES = 16, 600, 4
HEAD_DIMS = ((64, 64), (128, 128), (80, 80), (96, 96), (16, 16), (192, 128), (256, 256))
GROUPS = (1, 4, 8, 3, 2, 5, 7)
PAGE_SIZES = (16, 1, 64, 5)
SHARE_OF_OTHERS = 4
"""Rows that are printed for information have this many times fewer problems."""


@dataclass
class Row:
    """One line of the table: the worst shares of each problem, for out and for lse."""

    dtype: str
    probabilities: str
    regime: str
    out: list[float] = field(default_factory=list)
    lse: list[float] = field(default_factory=list)
    broken: str = ""  # a wrong shape or a NaN: no share describes it

    @property
    def largest(self) -> float:
        """The largest share of all; infinite where something was not comparable."""
        return float("inf") if self.broken else max([*self.out, *self.lse], default=0.0)


def measure(problems: int) -> Results:
    """Compare both kernels on ``problems`` iid bfloat16 problems, and on fewer of other kinds."""
    fewer = max(1, problems // SHARE_OF_OTHERS)
    rows: list[Row] = []
    with torch_threads(1):  # these tensors are small, and one thread adds in one order
        for dtype in ("bfloat16", "float16", "float32"):
            count = problems if dtype == "bfloat16" else fewer
            rows += _compare(dtype, "iid", count)
        for regime in ATTENTION_REGIMES:
            if regime != "iid":
                rows += _compare("bfloat16", regime, fewer)
    return Results("tightness", (_table(rows),), tuple(_requirements(rows)), _notes(rows))


def make_problem(index: int, dtype: str, regime: str) -> AttentionProblem:
    """Return problem ``index``: every row of it sees at least ``FEWEST_KEYS`` keys."""

    def pick(tag: str, low: int, high: int) -> int:
        return low + choose(index, tag, 0, high - low + 1)

    queries = pick("queries", 1, MOST_QUERIES)
    qk, vo = HEAD_DIMS[pick("dims", 0, len(HEAD_DIMS) - 1)]
    return AttentionProblem(
        query_lens=(queries, 1),
        seq_lens=(pick("keys", FEWEST_KEYS + queries - 1, MOST_KEYS), FEWEST_KEYS),
        num_kv_heads=pick("heads", 1, 2),
        group_size=GROUPS[pick("group", 0, len(GROUPS) - 1)],
        head_dim_qk=qk,
        head_dim_vo=vo,
        dtype=dtype,
        page_size=PAGE_SIZES[pick("page", 0, len(PAGE_SIZES) - 1)],
        causal=True,
        regime=regime,
        seed=index,
    )


def _compare(dtype: str, regime: str, problems: int) -> list[Row]:
    rows = [Row(dtype, "float32", regime)]
    kernels: list[Implementation] = [float32]
    if dtype != "float32":  # in that dtype "rounded to the inputs' dtype" is not rounded at all
        rows.insert(0, Row(dtype, dtype, regime))
        kernels.insert(0, bf16_probabilities)
    for index in range(problems):
        inputs = materialise(make_problem(index, dtype, regime))
        if not isinstance(inputs, PagedAttentionInputs):  # pragma: no cover  for the type checker
            raise TypeError
        for row, kernel in zip(rows, kernels, strict=True):
            bounded = bounded_attention(inputs, kernel.arithmetic)
            for name, actual in zip(("out", "lse"), kernel(inputs), strict=True):
                expected, bound = getattr(bounded.expected, name), getattr(bounded.bound, name)
                verdict = within(name, actual, expected, bound)
                if verdict.ratio is None:
                    row.broken = row.broken or f"problem {index}: {verdict.message}"
                    continue
                shares: list[float] = getattr(row, name)
                shares.append(verdict.ratio)
    return rows


def _table(rows: Sequence[Row]) -> Table:
    return Table(
        "Worst error over bound of each problem: median, 90 %, largest",
        ("dtype", "probabilities", "values", "problems",
         "out", "90 %", "max", "lse", "90 %", "max"),
        tuple(
            (row.dtype, row.probabilities, row.regime, len(row.out),
             *_summary(row.out), *_summary(row.lse))
            for row in rows
        ),
    )  # fmt: skip


def _summary(shares: Sequence[float]) -> tuple[float, float, float]:
    if not shares:
        return float("nan"), float("nan"), float("nan")
    ordered = sorted(shares)
    return statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]


def _requirements(rows: Sequence[Row]) -> list[Requirement]:
    tight = next(row for row in rows if row.probabilities == "bfloat16" and row.regime == "iid")
    median = _summary(tight.out)[0]
    found = [
        Requirement(
            "median, iid values, bfloat16 probabilities", median, low=MEDIAN[0], high=MEDIAN[1]
        )
    ]
    for probabilities in ("bfloat16", "float16", "float32"):
        largest = max(row.largest for row in rows if row.probabilities == probabilities)
        found.append(
            Requirement(f"largest, {probabilities} probabilities, any values", largest, high=1.0)
        )
    return found


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(
        f"{row.dtype}, {row.probabilities} probabilities, {row.regime}: {row.broken}"
        for row in rows
        if row.broken
    )
