"""Which compiled MoE kernels a problem needs, and which kernels belong together.

A module is what a problem's options and the sizes of its matrices decide. How many tokens and
experts there are, and how many of them a token goes to, decides which of its kernels are called.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from ...reference import MoEProblem
from .moe_blocks import SINGLE, block_rows
from .moe_call import CHANNELS
from .moe_sort import CHUNK, LEAST_CHUNK, LEAST_EXPERTS
from .support import next_power_of_two

DIVISORS = (16, 32, 64, 128)
"""Divisors of sizes that specialise a kernel: alignment, and the columns of tiles, which a size
that is a multiple fills."""
SLOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 22)
"""Experts a token, as models and problems have them: adding their outputs is unrolled."""
EXPERTS = (
    (1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (32, 0), (64, 0), (128, 0), (256, 0), (512, 0),
    (1024, 0), (64, 32),
)  # fmt: skip
"""Experts, and how many of them this rank has where it does not have all."""
TOKENS = tuple(2**power for power in range(15))
"""Among these with these numbers of experts is every way of sorting, and every block of rows."""
FAR = 2**30
"""Elements of all weights from which on an expert's stride may be beyond int32, and passed so."""
MOST_WEIGHTS = 2**25
"""Elements of the experts of a problem that stands for a kernel, of which making FP8 ones takes 20
bytes each: sorting does not ask for sizes, and is built with smaller ones."""
NO_BATCH: dict[str, Any] = {
    name: getattr(MoEProblem(), name)
    for name in ("num_tokens", "num_experts", "top_k", "local_experts", "expert_offset",
                 "assignment", "regime", "interleaved", "strided_hidden", "seed", "token_ids")
}  # fmt: skip
"""Fields that no module depends on."""


def compile_key(problem: MoEProblem) -> Hashable:
    """Name the compiled kernels of a problem: their constants, and the sizes' divisors."""
    far = problem.here * problem.hidden * problem.inter >= FAR
    return (*module_fields(problem), far, problem.top_k, *_batch(problem))


def kernels(problem: MoEProblem) -> Iterator[MoEProblem]:
    """Return problems that between them call every kernel of a problem's module."""
    module = replace(problem, **NO_BATCH)
    most = max(MOST_WEIGHTS // ((2 + module.gated) * module.hidden * module.inter), 1)
    seen: set[Hashable] = set()
    shards = [each for each in EXPERTS if not (each[1] and module.identity_experts)]
    for (experts, local), tokens in itertools.product(shards, TOKENS):
        made = replace(module, num_tokens=tokens, num_experts=experts, local_experts=local)
        if experts <= most and (key := _batch(made)) not in seen:
            seen.add(key)
            yield made
    for top_k in SLOTS[1:]:
        yield replace(module, num_experts=max(SLOTS), top_k=top_k)


def module_fields(problem: MoEProblem) -> tuple[Hashable, ...]:
    """Return what distinguishes one module from another."""
    divides = [size % each == 0 for size in (problem.hidden, problem.inter) for each in DIVISORS]
    return (
        problem.dtype, problem.activation, problem.quantized, problem.quantized_hidden,
        problem.biases, problem.weights_on_input, problem.shared_experts,
        problem.identity_experts > 0,
        problem.numbers_of_each, *divides,
        min(next_power_of_two(problem.hidden), CHANNELS),
    )  # fmt: skip


def _batch(problem: MoEProblem) -> tuple[Hashable, ...]:
    """Return how pairs of tokens and experts are sorted; those of shared experts, too."""
    pairs = problem.num_tokens * problem.top_k
    single = problem.dtype == "float32" and not problem.quantized_hidden
    found = (*_sorting(pairs, pairs / problem.num_experts, problem.here, single=single),)
    if not problem.shared_experts:
        return found
    shared = problem.num_tokens * problem.shared_experts
    return *found, *_sorting(shared, problem.num_tokens, problem.shared_experts, single=single)


def _sorting(pairs: int, rows: float, experts: int, *, single: bool) -> tuple[int, int, int]:
    chunk = max(next_power_of_two(pairs), LEAST_CHUNK)
    return (
        next_power_of_two(max(experts, LEAST_EXPERTS)),
        SINGLE.m if single else block_rows(rows),
        min(chunk, 2 * CHUNK),
    )
