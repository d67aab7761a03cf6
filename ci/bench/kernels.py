"""``kernelproof bench kernels``: the Triton kernels against FlashInfer's, in one run on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import torch

from ...impl.targets.exceptions import sentence_of
from ...impl.targets.target import installed_version
from ...reference import build_metadata, paged_attention
from . import kernels_flashinfer as flashinfer
from . import kernels_metadata as metadata
from . import kernels_moe as experts
from .gpu import Call, copy_bandwidth, matrix_rate, race, require_gpu
from .kernels_cases import (
    DECODES,
    DRAFTS,
    PREFILLS,
    TARGET_DECODES,
    TARGET_PREFILLS,
    TARGET_VERIFIES,
    VERIFIES,
    Case,
    Pool,
)
from .results import Cell, Requirement, Results, Table

if TYPE_CHECKING:
    from ...reference.tensors.inputs import PagedAttentionInputs

ATTENTION, VERIFY, METADATA, MOE = PARTS = ("attention", "verify", "metadata", "moe")
DECODE_TO_FLASHINFER, PREFILL_TO_FA3 = 0.85, 0.6  # of a verify step as of a decode
TRITON = "Triton"
CHECKED_QUERIES = 16
KINDS: dict[str, Callable[[int], bool]] = {
    "decode": lambda queries: queries == 1,
    f"verify of {DRAFTS} tokens": lambda queries: queries == DRAFTS,
    "prefill": lambda queries: queries > DRAFTS,
}
"""Kinds of case, by the query tokens of a request."""
TOLERANCE = 0.02
"""Far more than the rounding of bfloat16 outputs of unit variance, far less than a wrong answer."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of each contender on one case."""

    case: Case
    times: dict[str, float]

    def best_of_flashinfer(self) -> float | None:
        """Return the time of FlashInfer's better backend; None without FlashInfer."""
        others = [time for name, time in self.times.items() if name != TRITON]
        return min(others) if others else None

    def ratio(self, other: str = "") -> float | None:
        """Return Triton's speed over another's, or over FlashInfer's better backend's."""
        time = self.times.get(other) if other else self.best_of_flashinfer()
        return None if time is None else time / self.times[TRITON]

    @property
    def bandwidth(self) -> float:
        """Bytes a second that Triton moved, counting each once."""
        return self.case.bytes_moved / self.times[TRITON] * 1e3

    @property
    def rate(self) -> float:
        """Operations a second that Triton did."""
        return self.case.operations / self.times[TRITON] * 1e3


def measure(*, quick: bool, only: Collection[str] = PARTS) -> Results:
    """Time kernels.

    Args:
        quick: only the cases of the requirements.
        only: which of ``PARTS``.

    Raises:
        MachineError: there is no GPU.
        RuntimeError: Kernelproof's own kernel computes something else.
    """
    require_gpu()
    notes = [_device()]
    reason = flashinfer.absent()
    if reason is None:
        notes.append(f"FlashInfer {installed_version('flashinfer-python')}")
    else:
        notes.append(f"FlashInfer is not compared with: {reason}")
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    notes += [
        f"a copy within the device moves {bandwidth / 1e9:.0f} GB/s, read and written",
        f"a bfloat16 matrix product of 8192 by 8192 by 8192 runs at {rate / 1e12:.0f} TFLOP/s",
    ]
    tables: list[Table] = []
    requirements: list[Requirement] = []
    timed = _timed(quick=quick, only=only)
    if timed:
        absent: dict[str, str] = {}
        if reason is None:
            click.echo("building FlashInfer's modules", err=True)
            absent = flashinfer.build(timed, quick=quick)
        failed: dict[str, str] = {}
        pool = Pool.of(timed)
        with_it = reason is None
        measured = [_measure(case, pool, absent, failed, with_flashinfer=with_it) for case in timed]
        why_not = {**absent, **failed}
        notes += [f"{name} was not timed: {why}" for name, why in why_not.items()]
        tables += _tables(measured, bandwidth, rate)
        requirements += _requirements(measured)
    if METADATA in only:
        built, wanted = metadata.measure()
        tables.append(built)
        requirements += wanted
    if MOE in only:
        of_experts, wanted, more = experts.measure(rate, quick=quick)
        tables.append(of_experts)
        requirements += wanted
        notes += more
    return Results("kernels", tuple(tables), tuple(requirements), tuple(notes))


def contenders(
    case: Case,
    batches: list[PagedAttentionInputs],
    absent: dict[str, str],
    failed: dict[str, str],
    *,
    with_flashinfer: bool,
) -> dict[str, list[Call]]:
    """Return the calls of each contender, one a batch; the first is Kernelproof's own.

    A call of FlashInfer that raises or computes something else is none.

    Args:
        case: what they do.
        batches: what they do it on.
        absent: why a contender is none, by its name.
        failed: takes why a contender is none of this case, by both.
        with_flashinfer: whether FlashInfer's calls are among them.

    Raises:
        RuntimeError: Kernelproof's own kernel computes something else.
    """
    from ...impl.triton.attention import paged, split_kv

    ours = split_kv if case.queries <= DRAFTS else paged
    racing: dict[str, list[Call]] = {TRITON: [functools.partial(ours, batch) for batch in batches]}
    check(batches[0], {TRITON: racing[TRITON][0]})
    for name, make in (flashinfer.contenders(case, batches) if with_flashinfer else {}).items():
        if name in absent:
            continue
        try:
            calls = make()
            check(batches[0], {name: calls[0]})
        except Exception as error:  # noqa: BLE001  whatever another's kernel raises
            failed[f"{name}, {case},"] = sentence_of(error)
        else:
            racing[name] = calls
    return racing


def check(batch: PagedAttentionInputs, calls: dict[str, Call]) -> None:
    """Compare the last queries of the last request with the oracle.

    Raises:
        RuntimeError: a contender is off by more than ``TOLERANCE``.
    """
    last = batch.metadata
    queries = int(last.qo_indptr[-1] - last.qo_indptr[-2])
    count = min(queries, CHECKED_QUERIES)
    alone = build_metadata(
        [count], last.seq_lens[-1:].tolist(), batch.block_table[-1:].cpu(), last.page_size
    ).to(batch.q.device)
    expected = paged_attention(
        batch.q[-count:], batch.k_cache, batch.v_cache, alone, sm_scale=batch.sm_scale
    ).out
    for name, call in calls.items():
        found = call()
        out = found if isinstance(found, torch.Tensor) else found[0]  # type: ignore[index]
        error = float((out[-count:] - expected).abs().max())
        if not error <= TOLERANCE:
            message = f"{name} is {error:.3g} off the oracle"
            raise RuntimeError(message)


def _timed(*, quick: bool, only: Collection[str]) -> tuple[Case, ...]:
    chosen = {ATTENTION: (*DECODES, *PREFILLS), VERIFY: VERIFIES}
    if quick:
        chosen = {ATTENTION: (*TARGET_DECODES, *TARGET_PREFILLS), VERIFY: TARGET_VERIFIES}
    return tuple(case for part, cases in chosen.items() if part in only for case in cases)


def _measure(
    case: Case,
    pool: Pool,
    absent: dict[str, str],
    failed: dict[str, str],
    *,
    with_flashinfer: bool,
) -> Measured:
    batches = pool.batches(case)
    times = race(contenders(case, batches, absent, failed, with_flashinfer=with_flashinfer))
    click.echo(
        f"{case}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()), err=True
    )
    return Measured(case, times)


def _tables(measured: list[Measured], bandwidth: float, rate: float) -> list[Table]:
    """Make a table of decodes, one of verify steps and one of prefills, of those that there are."""
    decodes, verifies, prefills = (
        [each for each in measured if of(each.case.queries)] for of in KINDS.values()
    )
    tables = [
        _decode_table(name, each, bandwidth)
        for name, each in zip(KINDS, (decodes, verifies), strict=False)
        if each
    ]
    return [*tables, *([_prefill_table(prefills, rate)] if prefills else [])]


def _decode_table(name: str, decodes: list[Measured], bandwidth: float) -> Table:
    return _table(
        f"{name}, ms a call; ratio: the time of FlashInfer's better backend over Triton's",
        decodes,
        {
            "ratio": lambda each: each.ratio(),
            "GB/s": lambda each: each.bandwidth / 1e9,
            "of copy": lambda each: each.bandwidth / bandwidth,
        },
    )


def _prefill_table(prefills: list[Measured], rate: float) -> Table:
    return _table(
        "prefill, ms a call; ratios: FlashInfer's time over Triton's",
        prefills,
        {
            "to fa2": lambda each: each.ratio(flashinfer.FA2),
            "to fa3": lambda each: each.ratio(flashinfer.FA3),
            "TFLOP/s": lambda each: each.rate / 1e12,
            "of matrix": lambda each: each.rate / rate,
        },
    )


def _table(
    title: str,
    measured: list[Measured],
    figures: dict[str, Callable[[Measured], float | None]],
) -> Table:
    """Make a table with a column for each contender and figure that there is."""
    names = list(dict.fromkeys(name for each in measured for name in each.times))
    shown = {
        name: figure
        for name, figure in figures.items()
        if any(figure(each) is not None for each in measured)
    }
    rows: list[tuple[Cell, ...]] = [
        (
            each.case.heads,
            each.case.requests,
            each.case.keys,
            *(each.times.get(name, math.nan) for name in names),
            *(math.nan if (found := figure(each)) is None else found for figure in shown.values()),
        )
        for each in measured
    ]
    return Table(title, ("heads", "batch", "keys", *names, *shown), tuple(rows))


def _requirements(measured: list[Measured]) -> list[Requirement]:
    better = "to FlashInfer's better backend"
    wanted = []
    for cases, other, name, low in (
        (TARGET_DECODES, "", f"decode {better}", DECODE_TO_FLASHINFER),
        (TARGET_VERIFIES, "", f"verify {better}", DECODE_TO_FLASHINFER),
        (TARGET_PREFILLS, flashinfer.FA3, "prefill to fa3", PREFILL_TO_FA3),
    ):
        for each in measured:
            ratio = each.ratio(other)
            if each.case in cases and ratio is not None:
                what = f"{name}, {each.case.requests} of {each.case.keys} keys, {each.case.heads}"
                wanted.append(Requirement(what, ratio, low=low))
    return wanted


def _device() -> str:
    major, minor = torch.cuda.get_device_capability()
    triton = installed_version("triton")
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, triton {triton}"
