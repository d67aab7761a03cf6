"""Triton kernels that read a few bytes behind an input, and answer right.

    kernelproof check tests/faults/overreads.py:four_bytes tests/faults/overreads.py:twelve_bytes \
        --device cuda --sanitizer memcheck --law parity --profile quick

finds both, each as a CRASH of the kind memcheck, and nothing in ``exact``; on a CPU the law
``touched_memory`` finds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernelproof.impl import Target, find_implementation, implementation
from kernelproof.impl.triton.support import unavailable
from kernelproof.reference import AttentionOutput, AttentionProblem
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

MOST = 16
SDPA = find_implementation("torch-sdpa-paged")


@triton.jit  # type: ignore[untyped-decorator]
def copy_end(
    source: tl.tensor,
    target: tl.tensor,
    count: tl.tensor,
    extra: tl.constexpr,
    most: tl.constexpr,
) -> None:
    """Copy the last bytes of a tensor, and ``extra`` bytes behind it."""
    offsets = tl.arange(0, 2 * most)
    read = offsets < most + extra
    values = tl.load(source + count - most + offsets, mask=read)
    tl.store(target + offsets, values, mask=read)


def _supports(problem: AttentionProblem, target: Target) -> bool | str:
    if problem.strided_q or not problem.num_tokens:
        return "queries lie one after another"
    return unavailable(target) or SDPA.refusal(problem, target) or True


def _attend(inputs: PagedAttentionInputs, extra: int) -> AttentionOutput:
    q = inputs.q.view(torch.uint8)
    scratch = torch.zeros(2 * MOST, dtype=torch.uint8, device=q.device)
    copy_end[(1,)](q, scratch, q.numel(), extra=extra, most=MOST)
    return AttentionOutput(*SDPA(inputs))


@implementation("paged_attention", name="reads-no-byte-behind", supports=_supports)
def exact(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Read what there is."""
    return _attend(inputs, 0)


@implementation("paged_attention", name="reads-four-bytes-behind", supports=_supports)
def four_bytes(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Read a word behind the queries."""
    return _attend(inputs, 4)


@implementation("paged_attention", name="reads-twelve-bytes-behind", supports=_supports)
def twelve_bytes(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Read three words behind the queries."""
    return _attend(inputs, 12)
