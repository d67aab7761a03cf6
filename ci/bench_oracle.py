"""How fast and how large the oracle is, against what projects keep in its place."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..impl.flashinfer_trace import paged_decode
from ..impl.target import Target
from ..reference import (
    Arithmetic,
    AttentionProblem,
    attention_error_bound,
    materialise,
    paged_attention,
)
from ..reference.inputs import PagedAttentionInputs
from ..reference.oracle import judge_attention
from .bench_memory import Footprint, footprints, unmeasurable
from .bench_results import Requirement, Results, Table, torch_threads

ORACLE_TO_LOOP = 0.6
BOUND_TO_LOOP = 1.2
TRACE_TO_ORACLE = 5.0
PEAK_TO_READ = 3.0
ARITHMETIC = Arithmetic(probabilities="inputs")
TOLERANCE = 0.05
"""Far more than any of the references is off (bfloat16 outputs), far less than a wrong answer."""

LOOP, ORACLE, PASS, PAIR, TRACE = (
    "float32 loop",
    "oracle",
    "oracle and bound, one pass",
    "oracle, then its bound",
    "FlashInfer's trace reference",
)


@dataclass(frozen=True)
class Case:
    """A batch of equal requests: 32 query heads on 8 key-value heads of 128 channels, bfloat16."""

    name: str
    requests: int
    queries: int
    keys: int

    def problem(self) -> AttentionProblem:
        """Give the batch as a problem, its pages scattered."""
        return AttentionProblem(
            query_lens=(self.queries,) * self.requests,
            seq_lens=(self.keys,) * self.requests,
            num_kv_heads=8,
            group_size=4,
            head_dim_qk=128,
            head_dim_vo=128,
            dtype="bfloat16",
            page_size=16,
            page_order=1,
            causal=True,
        )


def measure(decode: Case, prefill: Case, *, threads: Sequence[int], repetitions: int) -> Results:
    """Time and weigh both cases; the requirements are about the first, for each thread count."""
    tables: list[Table] = []
    requirements: list[Requirement] = []
    notes = [_load(threads)]
    for case in (decode, prefill):
        inputs = _inputs(case)
        contenders = _contenders(inputs)
        _check_agreement(contenders)
        if case is decode:
            trace, note = _trace(case, inputs)
            contenders |= trace
            notes += [note] if note else []
        for count in threads:
            times = _times(contenders, count, repetitions if case is decode else 1)
            tables.append(_time_table(case, times, count))
            if case is decode:
                requirements += _time_requirements(times, count)
    notes += [unmeasurable()] if unmeasurable() else []
    sizes = {} if unmeasurable() else _footprints(decode, prefill)
    tables += [_memory_table(sizes)] if sizes else []
    requirements += [
        Requirement(f"peak memory of {name} to float64 inputs, {decode.name}", size.ratio,
                    high=PEAK_TO_READ)
        for (case_name, name), size in sizes.items()
        if case_name == decode.name
    ]  # fmt: skip
    return Results("oracle", tuple(tables), tuple(requirements), tuple(notes))


def float32_loop(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Attend as hand-written references do: request by request, each head with its own keys."""
    metadata, num_heads = inputs.metadata, inputs.q.shape[1]
    q_ends, page_ends = metadata.qo_indptr.tolist(), metadata.paged_kv_indptr.tolist()
    outs = []
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        q = inputs.q[q_ends[request] : q_ends[request + 1]].float()
        pages = metadata.paged_kv_indices[page_ends[request] : page_ends[request + 1]].long()
        k, v = (
            cache[pages].flatten(0, 1)[:seq_len].float().repeat_interleave(
                num_heads // cache.shape[2], dim=1
            )
            for cache in (inputs.k_cache, inputs.v_cache)
        )  # fmt: skip
        logits = torch.einsum("qhd,khd->hqk", q, k) * inputs.sm_scale
        if q.shape[0] > 1:
            future = torch.ones(logits.shape[1:], dtype=torch.bool)
            logits.masked_fill_(future.triu(seq_len - q.shape[0] + 1), -math.inf)
        outs.append(torch.einsum("hqk,khd->qhd", torch.softmax(logits, dim=-1), v))
    return torch.cat(outs)


def _inputs(case: Case) -> PagedAttentionInputs:
    inputs = materialise(case.problem())
    if not isinstance(inputs, PagedAttentionInputs):  # pragma: no cover  for the type checker
        raise TypeError
    return inputs


def _contenders(inputs: PagedAttentionInputs) -> dict[str, Callable[[], torch.Tensor]]:
    arguments = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata)
    scale = inputs.sm_scale

    def pair() -> torch.Tensor:
        out = paged_attention(*arguments, sm_scale=scale).out
        attention_error_bound(*arguments, sm_scale=scale, arithmetic=ARITHMETIC)
        return out

    return {
        LOOP: lambda: float32_loop(inputs),
        ORACLE: lambda: paged_attention(*arguments, sm_scale=scale).out,
        PASS: lambda: judge_attention(inputs, ARITHMETIC).expected.out,
        PAIR: pair,
    }


def _trace(
    case: Case, inputs: PagedAttentionInputs
) -> tuple[dict[str, Callable[[], torch.Tensor]], str]:
    refusal = paged_decode.refusal(case.problem(), Target.here("cpu"))
    if refusal is not None:
        return {}, f"Not compared with FlashInfer's trace reference: {refusal}."
    found: dict[str, Callable[[], torch.Tensor]] = {TRACE: lambda: paged_decode(inputs)[0]}
    _check_agreement({ORACLE: lambda: judge_attention(inputs, ARITHMETIC).expected.out} | found)
    return found, ""


def _check_agreement(contenders: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Refuse to time what computes something else; every contender is warm after it."""
    outs = {name: contender() for name, contender in contenders.items()}
    for name, out in outs.items():
        difference = float((out.double() - outs[ORACLE]).abs().max())
        if not difference <= TOLERANCE:
            message = f"{name} is {difference:.3g} off the oracle: their times do not compare"
            raise RuntimeError(message)


def _times(
    contenders: dict[str, Callable[[], torch.Tensor]], threads: int, repetitions: int
) -> dict[str, list[float]]:
    """Time the contenders in turn, so that whatever else the machine does meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch_threads(threads):
        for _ in range(repetitions):
            for name, contender in contenders.items():
                start = time.perf_counter()
                contender()
                times[name].append(time.perf_counter() - start)
    return times


def _load(threads: Sequence[int]) -> str:
    """Say how busy the machine is: shared processors and memory slow the contenders unequally."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"Before: {load:.1f} processes at work on {processors} processors."
    free = processors - load
    return busy if free >= max(threads) - 0.5 else f"{busy} These times are not to be relied on."


def _ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    """Give the median over repetitions: both were timed close to each other in each of them."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def _time_table(case: Case, times: dict[str, list[float]], threads: int) -> Table:
    rows = tuple(
        (
            name,
            1e3 * min(seconds),
            1e3 * statistics.median(seconds),
            _ratio(times, name, LOOP),
            _ratio(times, name, ORACLE),
        )
        for name, seconds in times.items()
    )
    title = f"{case.name}, {threads} thread{'s' * (threads > 1)}"
    return Table(title, ("what", "best ms", "median ms", "to the loop", "to the oracle"), rows)


def _time_requirements(times: dict[str, list[float]], threads: int) -> list[Requirement]:
    where = f"{threads} thread{'s' * (threads > 1)}"
    found = [
        Requirement(f"oracle to loop, {where}", _ratio(times, ORACLE, LOOP), high=ORACLE_TO_LOOP),
        *(
            Requirement(f"{name} to loop, {where}", _ratio(times, name, LOOP), high=BOUND_TO_LOOP)
            for name in (PASS, PAIR)
        ),
    ]
    if TRACE in times:
        found.append(
            Requirement(
                f"trace reference to oracle, {where}",
                _ratio(times, TRACE, ORACLE),
                low=TRACE_TO_ORACLE,
            )
        )
    return found


def _footprints(decode: Case, prefill: Case) -> dict[tuple[str, str], Footprint]:
    """Weigh both batches, and one long request: there no request's memory serves the next."""
    keys = min(decode.requests * decode.keys, 4096)
    single = Case(f"1 decode of {keys} keys", 1, 1, keys)
    names = [(case, name) for case in (decode, single, prefill) for name in (ORACLE, PASS)]
    sizes = footprints(
        [(case.problem(), ARITHMETIC if name == PASS else None) for case, name in names]
    )
    return {(case.name, name): size for (case, name), size in zip(names, sizes, strict=True)}


def _memory_table(sizes: dict[tuple[str, str], Footprint]) -> Table:
    return Table(
        "Peak memory, MiB, in a process of its own; inputs counted in float64",
        ("case", "what", "inputs", "peak", "ratio"),
        tuple(
            (case, name, size.read / 2**20, size.peak / 2**20, size.ratio)
            for (case, name), size in sizes.items()
        ),
    )
