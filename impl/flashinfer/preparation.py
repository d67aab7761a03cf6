"""FlashInfer's own functions that prepare a batch: lengths, tokens' requests, packed masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...reference import BatchProblem
from ...reference.tensors.preparation import BatchInputs
from ..protocol import Implementation, implementation
from ..targets.backends import FLASHINFER
from ..targets.optional import missing, require
from ..targets.refusal import Refusal
from ..targets.target import Target
from .claims import Refuses, offered, unavailable
from .triton import unavailable as triton_unavailable

PAGE, PACKBITS = "flashinfer.page", "flashinfer.quantization.packbits"


def _builder(
    name: str, module: str, outputs: tuple[str, ...], refuses: Refuses
) -> Callable[[Callable[[BatchInputs], Mapping[str, torch.Tensor]]], Implementation]:
    """Make an implementation of a function that returns entries, for use as a decorator.

    Args:
        name: the implementation's name.
        module: FlashInfer's module.
        outputs: what the function returns; what lies behind the entries is kept.
        refuses: says why a machine cannot run it.
    """

    def supports(problem: BatchProblem, target: Target) -> Refusal | str | bool:
        if lacking := missing(module, "flashinfer"):
            return lacking
        if problem.output not in outputs or problem.rest != "kept":
            return "builds " + ", ".join(f"{output} (kept)" for output in outputs)
        return refuses(problem, target) or True

    def decorate(function: Callable[[BatchInputs], Mapping[str, torch.Tensor]]) -> Implementation:
        def built(inputs: BatchInputs) -> torch.Tensor:
            entries = function(inputs)[inputs.output]
            inputs.buffer[: len(entries)] = entries.to(inputs.buffer.dtype)
            return inputs.buffer

        declared = implementation(
            "prepare_batch", name=name, provider=FLASHINFER, supports=supports
        )
        return declared(built)

    return decorate


@_builder("flashinfer-seq-lens", PAGE, ("seq_lens",), offered(PAGE, "get_seq_lens"))
def seq_lens(inputs: BatchInputs) -> Mapping[str, torch.Tensor]:
    """Return lengths of requests from their pages and the keys of the last one."""
    size, keys = inputs.page_size, inputs.seq_lens
    last = torch.where(keys > 0, (keys - 1) % size + 1, 0)
    found = require(PAGE, "flashinfer").get_seq_lens(inputs.page_indptr, last, size)
    return {"seq_lens": found}


@_builder(
    "flashinfer-batch-indices-positions",
    PAGE,
    ("token_to_request", "positions"),
    triton_unavailable("flashinfer.triton.page"),
)
def batch_indices_positions(inputs: BatchInputs) -> Mapping[str, torch.Tensor]:
    """Return the request and the position of each new token, as append is given them."""
    page = require(PAGE, "flashinfer")
    requests, positions = page.get_batch_indices_positions(
        inputs.query_start_loc, inputs.seq_lens, len(inputs.tokens)
    )
    return {"token_to_request": requests, "positions": positions}


def _cannot_pack(problem: BatchProblem, target: Target) -> Refusal | str | None:
    """Return why bits are not packed."""
    empty = not all(any(n * s for n, s in zip(*step, strict=True)) for step in problem.steps)
    nothing = "a batch without a bit packs nothing" if empty else None
    return unavailable(problem, target) or nothing


@_builder("flashinfer-segment-packbits", PACKBITS, ("packed_mask",), _cannot_pack)
def segment_packbits(inputs: BatchInputs) -> Mapping[str, torch.Tensor]:
    """Return the bits of each request's mask, in whole bytes."""
    module = require(PACKBITS, "flashinfer")
    bits = inputs.query_start_loc.diff() * inputs.seq_lens
    indptr = torch.nn.functional.pad(bits.cumsum(0), (1, 0)).int()
    packed, _ = module.segment_packbits(inputs.mask, indptr, bitorder="little")
    return {"packed_mask": packed}
