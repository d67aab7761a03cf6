"""What the Triton MoE is compared with: FlashInfer's CUTLASS MoE, and torch's grouped products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...impl.targets.optional import missing, require
from ...reference.tensors.moe_inputs import MoEInputs
from .gpu import Call

CUTLASS, GROUPED = "FlashInfer CUTLASS", "torch grouped_mm"
LARGEST = 8192
"""Tokens that FlashInfer tunes its products for, and all smaller powers of two."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One call, in bfloat16, of swiglu with gate rows first.

    Attributes:
        hidden: [tokens, hidden].
        w13, w2: [experts, 2 * inter, hidden] and [experts, hidden, inter].
        ids, weights: [tokens, top_k], int32 and float32.
    """

    hidden: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def inputs(self) -> MoEInputs:
        """What an implementation takes."""
        return MoEInputs(
            self.hidden, self.w13, self.w2, self.ids, self.weights, out_dtype=torch.bfloat16
        )


Prepared = Callable[[Batch], Call]


@dataclass(frozen=True)
class Other:
    """A contender.

    Attributes:
        absent: says why it is not one here; None if it is.
        prepare: takes w13 and w2 and gives what makes a call of a batch.
    """

    absent: Callable[[], str | None]
    prepare: Callable[[torch.Tensor, torch.Tensor], Prepared]


def _cutlass_module() -> Any:  # noqa: ANN401  flashinfer's JitSpec
    major, minor = torch.cuda.get_device_capability()
    generators = require("flashinfer.jit.fused_moe", "flashinfer")
    generate = getattr(generators, f"gen_cutlass_fused_moe_sm{major}{minor}_module", None)
    return None if generate is None else generate()


def cutlass_absent() -> str | None:
    """Return why FlashInfer's MoE is no contender; its module is built beforehand or not at all."""
    reason = missing("flashinfer.jit.fused_moe", "flashinfer")
    if reason is not None:
        return reason
    module = _cutlass_module()
    if module is None:
        return "this release has no CUTLASS MoE for this chip"
    if not (module.is_aot or module.jit_library_path.exists()):
        return (
            f"{module.jit_library_path} is not built (182 objects on Hopper): call "
            "flashinfer.fused_moe.cutlass_fused_moe once, with FLASHINFER_WORKSPACE_BASE as here"
        )
    return None


def cutlass(w13: torch.Tensor, w2: torch.Tensor) -> Prepared:
    """Prepare FlashInfer's MoE: its gate rows are the second half of the first weights."""
    fused = require("flashinfer.fused_moe", "flashinfer").cutlass_fused_moe
    autotune = require("flashinfer.autotuner", "flashinfer").autotune
    gate, up = w13.chunk(2, dim=1)
    swapped = torch.cat((up, gate), dim=1)
    tuned: set[int] = set()

    def make(batch: Batch) -> Call:
        call = functools.partial(
            fused,
            batch.hidden,
            batch.ids,
            batch.weights,
            swapped,
            w2,
            torch.bfloat16,
            quant_scales=[],
            output=torch.empty_like(batch.hidden),
            tune_max_num_tokens=LARGEST,
        )
        if not tuned:
            with autotune(True):  # noqa: FBT003  its name moved between releases
                call()
            tuned.add(batch.hidden.shape[0])
        return call

    return make


def grouped_absent() -> str | None:
    """Return why torch's grouped products are no contender; None if they are."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    return None


def grouped(w13: torch.Tensor, w2: torch.Tensor) -> Prepared:
    """Prepare torch's grouped products, with sorting and all else around them as torch does it."""

    def make(batch: Batch) -> Call:
        return functools.partial(_grouped, batch, w13, w2)

    return make


def _grouped(batch: Batch, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    tokens, top_k = batch.ids.shape
    ids, order = batch.ids.flatten().sort(stable=True)
    # Where each expert's rows end; counting them would wait for the GPU.
    experts = torch.arange(len(w13), dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    product = torch.nn.functional.grouped_mm
    projected = product(batch.hidden[order // top_k], w13.mT, offs=ends)
    gate, up = projected.chunk(2, dim=1)
    y = product(torch.nn.functional.silu(gate) * up, w2.mT, offs=ends)
    scattered = torch.empty_like(y)
    scattered[order] = y
    weighted = scattered.view(tokens, top_k, -1) * batch.weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(torch.bfloat16)


OTHERS = {CUTLASS: Other(cutlass_absent, cutlass), GROUPED: Other(grouped_absent, grouped)}
