"""How fast and how large the oracle of experts is, against a loop over experts in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernelproof.ci.bench.results import Cell, Requirement, Results, Table
from kernelproof.properties.worker.recording import allocated
from kernelproof.reference import moe
from kernelproof.tests.bench.times import check_agreement, interleaved, load, milliseconds, ratio

FEW_TOKENS = 16
FEW_TO_LOOP, MANY_TO_LOOP = 1.2, 2.0
"""Up to 16 tokens, where both read weights most of the time; above, where they multiply."""
PEAK_TO_EXPERT = 1.0
TOLERANCE = 1e-3
"""Far more than float32 is off, far less than a wrong answer: outputs are of the size of 1."""
SEED = 0
LOOP, ORACLE = "float32 loop", "oracle"


@dataclass(frozen=True)
class Case:
    """Tokens that are routed to random experts, with gate and up rows (swiglu).

    Attributes:
        tokens: how many.
        top_k, experts: each token goes to top_k of the experts.
        hidden, inter: channels.
        dtype: of hidden states and weights.
    """

    tokens: int
    top_k: int = 8
    experts: int = 128
    hidden: int = 2048
    inter: int = 768
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> str:
        """What there is besides the tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.top_k} of {self.experts}, {self.hidden} by {self.inter}, {dtype}"

    @property
    def name(self) -> str:
        """All of it."""
        return f"{self.tokens} tokens, {self.shape}"

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights in float64."""
        return 8 * 3 * self.hidden * self.inter

    @property
    def most_to_loop(self) -> float:
        """What is required of the oracle's time."""
        return FEW_TO_LOOP if self.tokens <= FEW_TOKENS else MANY_TO_LOOP


SHAPES = {
    "8-of-128": Case(1),
    "2-of-8": Case(1, top_k=2, experts=8, hidden=4096, inter=14336),
}
TOKENS = (1, 4, 16, 64, 256, 1024)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Weights(NamedTuple):
    """Of a shape's experts: w13 [experts, 2 * inter, hidden] and w2 [experts, hidden, inter]."""

    w13: torch.Tensor
    w2: torch.Tensor


class Batch(NamedTuple):
    """Hidden states [tokens, hidden], and ids and routing weights [tokens, top_k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def measure(
    cases: Sequence[Case], *, threads: Sequence[int], repetitions: int, seconds: float
) -> Results:
    """Time and weigh the cases; float32 weights are timed, but nothing is required of them.

    There the loop reads the weights as they are, and has but half the bytes of float64 to move.
    """
    tables, requirements, notes = [], [], [load(threads)]
    for shape in dict.fromkeys(case.shape for case in cases):
        of_shape = [case for case in cases if case.shape == shape]
        weights = weights_of(of_shape[0])
        for count in threads:
            where = f"{count} thread{'s' * (count > 1)}"
            rows: list[tuple[Cell, ...]] = []
            for case in of_shape:
                contenders = contenders_of(weights, batch_of(case))
                check_agreement(contenders, ORACLE, TOLERANCE)
                times = interleaved(contenders, count, repetitions, seconds)
                found = ratio(times, ORACLE, LOOP)
                _, loop = milliseconds(times, LOOP)
                _, oracle = milliseconds(times, ORACLE)
                rows.append((case.tokens, len(times[ORACLE]), loop, oracle, found))
                if case.dtype != torch.float32:
                    name = f"oracle to loop, {where}, {case.name}"
                    requirements.append(Requirement(name, found, high=case.most_to_loop))
            columns = ("tokens", "repetitions", f"{LOOP} ms", f"{ORACLE} ms", "ratio")
            tables.append(Table(f"{shape}, {where}, medians", columns, tuple(rows)))
        del weights
    table, required = _memory(cases)
    tables.append(table)
    requirements += required
    return Results("experts", tuple(tables), tuple(requirements), tuple(notes))


def float32_loop(weights: Weights, batch: Batch) -> torch.Tensor:
    """Apply experts as hand-written references do: expert by expert, its weights in float32."""
    hidden = batch.hidden.float()
    out = torch.zeros_like(hidden)
    for expert in range(len(weights.w13)):
        tokens, slots = (batch.ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = (hidden[tokens] @ weights.w13[expert].float().T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ weights.w2[expert].float().T
        out.index_add_(0, tokens, y * batch.weights[tokens, slots, None])
    return out


def contenders_of(weights: Weights, batch: Batch) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the loop and the oracle on the same call."""
    hidden, ids, routing = batch
    return {
        LOOP: lambda: float32_loop(weights, batch),
        ORACLE: lambda: moe(hidden, *weights, ids, routing),
    }


def weights_of(case: Case) -> Weights:
    """Make random weights that keep the variance."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty((case.experts, rows, columns), dtype=case.dtype)
        for expert in made:  # whose float32 numbers are all that is held beside them
            expert.copy_(torch.randn((rows, columns), generator=generator) / math.sqrt(columns))
        return made

    return Weights(normal(2 * case.inter, case.hidden), normal(case.hidden, case.inter))


def batch_of(case: Case) -> Batch:
    """Make random tokens, and send each to top_k random experts."""
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn((case.tokens, case.hidden), generator=generator).to(case.dtype)
    scores = torch.randn((case.tokens, case.experts), generator=generator).softmax(dim=1)
    weights, ids = scores.topk(case.top_k, dim=1)
    return Batch(hidden, ids.to(torch.int32), weights)


def peaks(cases: Sequence[Case]) -> list[int]:
    """Return the most bytes that the oracle's tensors take beyond its inputs on each case."""
    return [allocated(contenders_of(weights_of(c), batch_of(c))[ORACLE]) for c in cases]


def _memory(cases: Sequence[Case]) -> tuple[Table, list[Requirement]]:
    largest: dict[str, Case] = {}
    for case in cases:
        if case.tokens >= largest.get(case.shape, case).tokens:
            largest[case.shape] = case
    sizes = dict(zip(largest.values(), peaks(list(largest.values())), strict=True))
    rows = tuple(
        (case.name, case.expert_bytes / 2**20, size / 2**20, size / case.expert_bytes)
        for case, size in sizes.items()
    )
    columns = ("case", "an expert in float64", "peak", "ratio")
    title = "Most memory of tensors beyond the inputs, MiB"
    required = [
        Requirement(
            f"peak memory beyond the inputs to an expert in float64, {case.name}",
            size / case.expert_bytes,
            high=PEAK_TO_EXPERT,
        )
        for case, size in sizes.items()
    ]
    return Table(title, columns, rows), required
