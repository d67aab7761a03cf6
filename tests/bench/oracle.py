"""How fast and how large the oracle is, against what projects keep in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernelproof.ci.bench.results import Requirement, Results, Table
from kernelproof.impl.flashinfer.trace import paged_decode
from kernelproof.impl.targets.target import Target
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    attention_error_bound,
    materialise,
    paged_attention,
)
from kernelproof.reference.oracle import bounded_attention
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.tests.bench.memory import Footprint, footprints, unmeasurable
from kernelproof.tests.bench.times import (
    Contenders,
    check_agreement,
    interleaved,
    load,
    milliseconds,
    ratio,
)

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
        """Return the batch as a problem, its pages scattered."""
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
    notes = [load(threads)]
    for case in (decode, prefill):
        inputs = _inputs(case)
        contenders = _contenders(inputs)
        check_agreement(contenders, ORACLE, TOLERANCE)
        if case is decode:
            trace, note = _trace(case, inputs)
            contenders |= trace
            notes += [note] if note else []
        for count in threads:
            times = interleaved(contenders, count, repetitions if case is decode else 1)
            tables.append(_time_table(case, times, count))
            if case is decode:
                requirements += _time_requirements(times, count)
    notes += [unmeasurable()] if unmeasurable() else []
    sizes = {} if unmeasurable() else _footprints(decode, prefill)
    tables += [_memory_table(sizes)] if sizes else []
    requirements += [
        Requirement(
            f"peak memory of {name} to float64 inputs, {decode.name}", size.ratio, high=PEAK_TO_READ
        )
        for (case_name, name), size in sizes.items()
        if case_name == decode.name
    ]
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
            cache[pages]
            .flatten(0, 1)[:seq_len]
            .float()
            .repeat_interleave(num_heads // cache.shape[2], dim=1)
            for cache in (inputs.k_cache, inputs.v_cache)
        )
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


def _contenders(inputs: PagedAttentionInputs) -> Contenders:
    arguments = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata)
    scale = inputs.sm_scale

    def pair() -> torch.Tensor:
        out = paged_attention(*arguments, sm_scale=scale).out
        attention_error_bound(*arguments, sm_scale=scale, arithmetic=ARITHMETIC)
        return out

    return {
        LOOP: lambda: float32_loop(inputs),
        ORACLE: lambda: paged_attention(*arguments, sm_scale=scale).out,
        PASS: lambda: bounded_attention(inputs, ARITHMETIC).expected.out,
        PAIR: pair,
    }


def _trace(case: Case, inputs: PagedAttentionInputs) -> tuple[Contenders, str]:
    refusal = paged_decode.refusal(case.problem(), Target.here("cpu"))
    if refusal is not None:
        return {}, f"Not compared with FlashInfer's trace reference: {refusal}."
    found: Contenders = {TRACE: lambda: paged_decode(inputs)[0]}
    answer = {ORACLE: lambda: bounded_attention(inputs, ARITHMETIC).expected.out}
    check_agreement(answer | found, ORACLE, TOLERANCE)
    return found, ""


def _time_table(case: Case, times: dict[str, list[float]], threads: int) -> Table:
    rows = tuple(
        (
            name,
            *milliseconds(times, name),
            ratio(times, name, LOOP),
            ratio(times, name, ORACLE),
        )
        for name in times
    )
    title = f"{case.name}, {threads} thread{'s' * (threads > 1)}"
    return Table(title, ("what", "best ms", "median ms", "to the loop", "to the oracle"), rows)


def _time_requirements(times: dict[str, list[float]], threads: int) -> list[Requirement]:
    where = f"{threads} thread{'s' * (threads > 1)}"
    found = [
        Requirement(f"oracle to loop, {where}", ratio(times, ORACLE, LOOP), high=ORACLE_TO_LOOP),
        *(
            Requirement(f"{name} to loop, {where}", ratio(times, name, LOOP), high=BOUND_TO_LOOP)
            for name in (PASS, PAIR)
        ),
    ]
    if TRACE in times:
        found.append(
            Requirement(
                f"trace reference to oracle, {where}",
                ratio(times, TRACE, ORACLE),
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
