"""The Triton MoE against FlashInfer's CUTLASS MoE, and torch's grouped products, in one run."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import product

import click
import torch

from ...impl.triton.moe import experts as triton_experts
from ...reference import moe
from . import kernels_moe_others as others
from .gpu import Call, race, turns
from .kernels_moe_others import Batch, Prepared
from .results import Cell, Requirement, Table

TO_FLASHINFER = 0.7
TRITON = "Triton"
SEED = 0
MOST_SETS = 8
CHECKED_TOKENS = 4
TOLERANCE = 0.02
"""Share of the largest output: far more than roundings to bfloat16, far less than a wrong answer.
"""
ELEMENT_SIZE = 2


@dataclass(frozen=True)
class Case:
    """Tokens that are routed to random experts, in bfloat16, with gate and up rows (swiglu).

    Attributes:
        tokens: how many.
        top_k, experts: each token goes to top_k of the experts.
        hidden, inter: channels.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int

    @property
    def name(self) -> str:
        """The shape, without tokens."""
        return f"{self.top_k} of {self.experts}, {self.hidden} by {self.inter}"

    @property
    def operations(self) -> int:
        """Of both products: 2 a multiplication and addition."""
        return 2 * self.tokens * self.top_k * 3 * self.hidden * self.inter

    @property
    def bytes_read(self) -> int:
        """Of weights, as many experts as random tokens use on average."""
        used = self.experts * (1 - (1 - self.top_k / self.experts) ** self.tokens)
        return int(used * 3 * self.hidden * self.inter * ELEMENT_SIZE)


SHAPES = ((8, 128, 2048, 768), (2, 8, 4096, 14336))
TOKENS = tuple(2**power for power in range(14))
TARGET_TOKENS = tuple(tokens for tokens in TOKENS if tokens >= 1024)  # noqa: PLR2004  the requirement's
CASES = tuple(Case(tokens, *shape) for shape, tokens in product(SHAPES, TOKENS))
TARGETS = tuple(case for case in CASES if case.tokens in TARGET_TOKENS)
"""What the requirement is about."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of each contender on one case."""

    case: Case
    times: dict[str, float]

    def ratio(self, other: str) -> float | None:
        """Return Triton's speed over another's; None where that was not measured."""
        time = self.times.get(other)
        return None if time is None else time / self.times[TRITON]

    @property
    def rate(self) -> float:
        """Operations a second that Triton did."""
        return self.case.operations / self.times[TRITON] * 1e3

    @property
    def bandwidth(self) -> float:
        """Bytes of weights a second that Triton read, counting each once."""
        return self.case.bytes_read / self.times[TRITON] * 1e3


@dataclass(frozen=True, eq=False)
class Weights:
    """Of a shape's experts: w13 [experts, 2 * inter, hidden] and w2 [experts, hidden, inter]."""

    w13: torch.Tensor
    w2: torch.Tensor

    @classmethod
    def of(cls, case: Case, device: str = "cuda") -> Weights:
        """Make random ones that keep the variance."""
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(*shape: int) -> torch.Tensor:
            empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return empty.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)

        w13 = normal(case.experts, 2 * case.inter, case.hidden)
        return cls(w13, normal(case.experts, case.hidden, case.inter))


def batches(case: Case, weights: Weights) -> list[Batch]:
    """Return sets of tokens with experts of their own, so that no call finds its weights in L2."""
    device = weights.w13.device
    made = []
    for seed in range(turns(case.bytes_read, MOST_SETS)):
        generator = torch.Generator(device).manual_seed(seed)
        hidden = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device=device)
        scores = torch.rand(case.tokens, case.experts, generator=generator, device=device)
        chosen, ids = scores.topk(case.top_k, dim=1)
        made.append(
            Batch(
                hidden.normal_(generator=generator),
                weights.w13,
                weights.w2,
                ids.to(torch.int32),
                chosen / chosen.sum(dim=1, keepdim=True),
            )
        )
    return made


def check(batch: Batch, calls: dict[str, Call]) -> None:
    """Compare the last tokens with the oracle.

    Raises:
        RuntimeError: a contender is off by more than ``TOLERANCE``.
    """
    last = slice(-CHECKED_TOKENS, None)
    expected = moe(batch.hidden[last], batch.w13, batch.w2, batch.ids[last], batch.weights[last])
    for name, call in calls.items():
        found = call()
        out = found[0] if isinstance(found, list) else found
        if not isinstance(out, torch.Tensor):
            message = f"{name} gave {type(out).__name__}"
            raise TypeError(message)
        error = float((out[last] - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            message = f"{name} is {error:.3g} of the largest output off the oracle"
            raise RuntimeError(message)


def measure(rate: float, *, quick: bool) -> tuple[Table, list[Requirement], list[str]]:
    """Time all contenders on every case.

    Args:
        rate: the rate of a large matrix product, in operations a second.
        quick: only the cases of the requirement.

    Raises:
        RuntimeError: a contender computes something else.
    """
    reasons = {name: other.absent() for name, other in others.OTHERS.items()}
    notes = [f"{name} is not compared with: {why}" for name, why in reasons.items() if why]
    there = [name for name, why in reasons.items() if why is None]
    measured: list[Measured] = []
    for shape in SHAPES:
        cases = [case for case in (TARGETS if quick else CASES) if case in _of_shape(shape)]
        weights = Weights.of(cases[0])
        prepared = {name: others.OTHERS[name].prepare(weights.w13, weights.w2) for name in there}
        # From the largest batch down: what is tuned there is tuned for the smaller ones too.
        found = [_measure(case, weights, prepared) for case in reversed(cases)]
        measured += reversed(found)
        del weights, prepared
        torch.cuda.empty_cache()
    wanted = [
        Requirement(
            f"MoE to {others.CUTLASS}, {each.case.tokens} tokens, {each.case.name}",
            ratio,
            low=TO_FLASHINFER,
        )
        for each in measured
        if each.case in TARGETS and (ratio := each.ratio(others.CUTLASS)) is not None
    ]
    return _table(measured, there, rate), wanted, notes


def _of_shape(shape: tuple[int, int, int, int]) -> set[Case]:
    return {Case(tokens, *shape) for tokens in TOKENS}


def _measure(case: Case, weights: Weights, prepared: dict[str, Prepared]) -> Measured:
    sets = batches(case, weights)
    racing: dict[str, list[Call]] = {
        TRITON: [functools.partial(triton_experts, batch.inputs) for batch in sets],
        **{name: [make(batch) for batch in sets] for name, make in prepared.items()},
    }
    check(sets[0], {name: calls[0] for name, calls in racing.items()})
    times = race(racing)
    click.echo(
        f"{case}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()), err=True
    )
    return Measured(case, times)


def _table(measured: list[Measured], there: list[str], rate: float) -> Table:
    columns = ("experts", "tokens", TRITON, *there, *(f"to {name}" for name in there),
               "TFLOP/s", "of matrix", "GB/s of weights")  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            each.case.name, each.case.tokens, each.times[TRITON],
            *(each.times[name] for name in there), *(each.ratio(name) or 0.0 for name in there),
            each.rate / 1e12, each.rate / rate, each.bandwidth / 1e9,
        )
        for each in measured
    ]  # fmt: skip
    return Table("MoE, ms a call; ratios: the other's time over Triton's", columns, tuple(rows))
