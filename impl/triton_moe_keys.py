"""Which compiled MoE kernels a problem needs, and which kernels belong together.

A module is what a problem's options and the sizes of its matrices decide. How many tokens and
experts there are, and how many of them a token goes to, decides which of its kernels are called.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from ..reference import MoEProblem, Problem
from .triton_moe_blocks import LEAST_M, SINGLE, block_rows
from .triton_moe_call import CHANNELS
from .triton_moe_sort import CHUNK, LEAST_CHUNK, LEAST_EXPERTS
from .triton_support import next_power_of_two

DIVISORS = (16, 32, 64, 128)
"""Of the sizes: alignment, and the columns of tiles, which a size that is a multiple fills."""
SLOTS = (1, 2, 3, 4, 6, 8)
"""Experts a token, as models have them: adding their outputs is unrolled."""
EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = tuple(2**power for power in range(15))
"""Among these with these numbers of experts is every way of sorting, and every block of rows."""
MOST_WEIGHTS = 2**27
"""Elements of the experts of a problem that stands for a kernel: sorting does not ask for sizes."""
NO_BATCH: dict[str, Any] = {
    name: getattr(MoEProblem(), name)
    for name in ("num_tokens", "num_experts", "top_k", "local_experts", "expert_offset",
                 "assignment", "regime", "interleaved", "strided_hidden", "seed", "token_ids")
}  # fmt: skip
"""Fields that no module depends on."""


def compile_key(problem: Problem) -> Hashable:
    """Name the compiled kernels of a problem: their constants, and the sizes' divisors."""
    if not isinstance(problem, MoEProblem):
        return None
    return (*_module(problem), problem.top_k, *_batch(problem))


def kernels(problem: Problem) -> Sequence[Problem]:
    """Give problems that between them call every kernel of a problem's module."""
    if not isinstance(problem, MoEProblem):
        return [problem]
    return _kernels(replace(problem, **NO_BATCH))


@functools.lru_cache(maxsize=512)
def _kernels(module: MoEProblem) -> tuple[MoEProblem, ...]:
    found: dict[Hashable, MoEProblem] = {}
    each_expert = (2 + module.gated) * module.hidden * module.inter
    most = max(MOST_WEIGHTS // each_expert, 1)
    for experts, tokens in itertools.product(EXPERTS, TOKENS):
        if experts <= most:
            made = replace(module, num_tokens=tokens, num_experts=experts)
            found.setdefault(compile_key(made), made)
    slots = [replace(module, num_experts=max(SLOTS), top_k=top_k) for top_k in SLOTS[1:]]
    return *found.values(), *slots


def _module(problem: MoEProblem) -> tuple[Hashable, ...]:
    divides = [size % each == 0 for size in (problem.hidden, problem.inter) for each in DIVISORS]
    return (
        problem.dtype, problem.activation, problem.quantized, problem.quantized_hidden,
        problem.biases, problem.weights_on_input, problem.shared_experts,
        problem.swiglu_parameters == "each", *divides,
        min(next_power_of_two(problem.hidden), CHANNELS),
    )  # fmt: skip


def _batch(problem: MoEProblem) -> tuple[Hashable, ...]:
    """Give how pairs of tokens and experts are sorted; where some are shared, those of them too."""
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
        SINGLE.m if single else max(block_rows(rows), LEAST_M),
        min(chunk, 2 * CHUNK),
    )
