"""Kernelproof's own Triton MoE: sorting, two grouped products, and sums in a fixed order.

A module is what a problem's options and the sizes of its matrices decide. How many tokens and
experts there are, and how many of them a token goes to, decides which of its kernels are called.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic, MoEProblem
from ...reference.tensors.moe_inputs import MoEInputs
from ..features import ALGEBRA, MOE_FEATURES
from ..gating.rules import version_matches
from ..targets.target import Target
from .moe_blocks import SINGLE, block_rows
from .moe_call import CHANNELS, run_experts
from .moe_sort import CHUNK, LEAST_CHUNK, LEAST_EXPERTS
from .support import kernel, next_power_of_two, unavailable

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


ARITHMETIC = Arithmetic(
    accumulate="float32",
    intermediate="inputs",
    partial_outputs=True,
    fp8_products="fixed_point",
    tanh="sigmoid",
)
"""The intermediate is stored in the dtype of the hidden states (FP8 ones: with a scale for each
tile of a row; int8 ones: in two bytes), each slot's output in that of the result.
(Not so in the interpreter, for bfloat16.) Where both operands are FP8, Hopper's tensor cores sum in
fixed point."""
BUILD_MINUTES = 0.4
"""Minutes of a core to build a module: 30 modules took 43 s of 16 cores on an H200."""
WITH_GATHER = ">=3.3.dev0"
NOT_READ = (
    "nvfp4_weights", "mxfp4_weights", "mxfp8_weights", "int4_weights", "int4_zero_points",
    "nvfp4_gate_up_scales", "one_product", "padded_widths",
)  # fmt: skip
"""Features of ``moe`` that these kernels do not have."""
FEATURES = (
    *(name for name in MOE_FEATURES if name not in NOT_READ),
    "large_weights",
    "large_rows",
    "nan_codes",
    ALGEBRA,
)


def _supports(_: MoEProblem, target: Target) -> bool | str:
    absent = unavailable(target)
    if absent is None and target.triton and not version_matches(target.triton, WITH_GATHER):
        return f"sorting needs tl.gather, which Triton has from 3.3 on; this is {target.triton}"
    return absent or True


@kernel(
    "moe",
    name="triton-moe",
    supports=_supports,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=compile_key,
    kernels=kernels,
    build_minutes=BUILD_MINUTES,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts to tokens in four or five launches, twice as many where some are shared.

    None of them waits for the host.

    Args:
        inputs: the arguments of ``reference.moe``; float32, float16 or bfloat16, strided or not;
            e4m3 and int8 weights with scales by tensor, row or block of 128 (of e4m3: powers of
            two as well), and hidden states likewise.
            Where hidden states are FP8, so is the intermediate.

    Returns:
        [tokens, hidden] in ``out_dtype``: ``out`` where it is given.
    """
    return run_experts(inputs)
