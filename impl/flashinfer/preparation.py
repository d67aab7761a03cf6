"""FlashInfer's own functions that prepare a batch, and those that lay out weights and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...reference import Arithmetic, BatchProblem, RearrangeProblem
from ...reference.tensors.preparation import BatchInputs
from ...reference.tensors.rearrange import RearrangeInputs
from ..protocol import Implementation, implementation
from ..targets.backends import FLASHINFER
from ..targets.optional import missing, require
from ..targets.refusal import Refusal
from ..targets.target import Target
from .backends import Backend, one_module
from .claims import Refuses, offered, unavailable
from .libraries import library_named
from .moe import CUTLASS
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


FP4, EXPERTS = "flashinfer.quantization.fp4_quantization", "flashinfer.fused_moe.prepare"
FP4_MODULE = Backend(
    "fp4",
    Arithmetic(),
    compile_key=one_module("fp4-quantization"),
    library=library_named("fp4_quantization_{sm}"),
    build_ahead=True,
)
LEAST_SM = {"fp4": 90, "cutlass": 89}
"""The oldest chip that FlashInfer builds a module for."""


def _arranger(
    arrangement: str, module: str, function: str, backend: Backend | None = None
) -> Callable[[Callable[[RearrangeInputs], Any]], Implementation]:
    """Make an implementation of a function that makes one order, for use as a decorator.

    Args:
        arrangement: the order.
        module: FlashInfer's module.
        function: its name there.
        backend: what is compiled for its CUDA kernel; None: it is made of torch's operations.
    """
    is_there = offered(module, function)

    def supports(problem: RearrangeProblem, target: Target) -> Refusal | str | bool:
        if lacking := is_there(problem, target):
            return lacking
        if problem.arrangement != arrangement:
            return f"{function} makes {arrangement}"
        if backend is None:
            return True
        if absent := unavailable(problem, target):
            return absent
        least = LEAST_SM[backend.backend]
        if target.sm is not None and target.sm < least:
            return f"FlashInfer builds this for no chip older than SM{least}"
        return True

    def decorate(called: Callable[[RearrangeInputs], Any]) -> Implementation:
        name = f"flashinfer-{function.replace('_', '-')}".removesuffix("-for-sm90-mixed-gemm")
        built: dict[str, Any] = {}
        if backend is not None:
            built = {
                each: getattr(backend, each)
                for each in ("compile_key", "library", "build_ahead", "build_minutes")
            }
        declared = implementation(
            "rearrange", name=name, provider=FLASHINFER, supports=supports, **built
        )
        return declared(called)

    return decorate


@_arranger("scales_128x4", FP4, "block_scale_interleave", FP4_MODULE)
def block_scales(inputs: RearrangeInputs) -> Any:  # noqa: ANN401  untyped
    """Lay scales out as tensor cores read them."""
    return require(FP4, "flashinfer").block_scale_interleave(inputs.x)


@_arranger("rows", FP4, "shuffle_matrix_a")
def shuffled_rows(inputs: RearrangeInputs) -> Any:  # noqa: ANN401  untyped
    """Shuffle the rows of weights as trtllm-gen reads them."""
    return require(FP4, "flashinfer").shuffle_matrix_a(inputs.x, inputs.tile)


@_arranger("rows_128x4", FP4, "shuffle_matrix_sf_a", FP4_MODULE)
def shuffled_scales(inputs: RearrangeInputs) -> Any:  # noqa: ANN401  untyped
    """Shuffle the rows of scales as trtllm-gen reads them, and lay them out."""
    return require(FP4, "flashinfer").shuffle_matrix_sf_a(inputs.x, inputs.tile)


@_arranger("scales_64x128", EXPERTS, "interleave_moe_scales_for_sm90_mixed_gemm")
def moe_scales(inputs: RearrangeInputs) -> Any:  # noqa: ANN401  untyped
    """Fold scales as the experts of mixed formats read them on SM90."""
    module = require(EXPERTS, "flashinfer")
    return module.interleave_moe_scales_for_sm90_mixed_gemm(inputs.x, inputs.group)


@_arranger("int4_mixed", EXPERTS, "interleave_moe_weights_for_sm90_mixed_gemm", CUTLASS)
def moe_weights(inputs: RearrangeInputs) -> Any:  # noqa: ANN401  untyped
    """Interleave int4 weights as the experts of mixed formats read them on SM90."""
    module = require(EXPERTS, "flashinfer")
    return module.interleave_moe_weights_for_sm90_mixed_gemm(inputs.x, "int4")
