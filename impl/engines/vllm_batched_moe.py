"""vLLM's batched experts: ``batched_triton_kernel`` for both products, on rows by expert.

As ``BatchedTritonExperts`` calls it: what is between the products holds zeros behind the counts.
The activation, and quantising its results to FP8, are CUDA operators of vLLM's: torch computes what
these give.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any

import torch

from ...reference import Arithmetic, BatchedMoEProblem, QuantizedMatrix
from ...reference.tensors.batched_moe import BatchedMoEInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.target import Target
from ..torch.batched_moe import options_of
from ..torch.moe import activated, of_expert
from .claims import refused_experts, wrong_here
from .sources import Stubs, implementation, known, load, missing_file, says, unavailable
from .vllm_stubs import MOE, QUANTISATION, Unused, stubs

FILE = (f"{MOE}.experts.fused_batched_moe", f"{MOE}.fused_batched_moe")
BLOCK = 128
LARGEST = 448.0
LEAST_SCALE = 1 / (LARGEST * 512)
"""Smallest scale: that of a token or a block whose numbers are all zeros, or nearly."""
DESCRIBED = 16
"""Bytes of which a row that a tensor descriptor describes is a multiple."""
NOT_YET = dict.fromkeys(
    ("use_w8a16", "use_int8_w8a16"),
    "vllm/model_executor/layers/fused_moe/experts/fused_batched_moe.py:798 of vllm 0.33.0",
)
"""Flags of int8 weights beside numbers, which vLLM's assertion keeps from its batched experts."""
FP8 = ("fp8_tensor", "fp8_channel", "fp8_block")


def batched_stubs() -> Mapping[str, Mapping[str, object]]:
    """Return what stands in for the rest of vLLM, with what this file alone imports."""
    found = {name: dict(module) for name, module in stubs().items()}
    unused = {
        f"{MOE}.activation": ("apply_moe_activation_masked_supported",),
        f"{MOE}.topk_weight_and_reduce": ("TopKWeightAndReduceDelegate",),
        f"{MOE}.utils": ("_validate_scale_shape", "group_broadcast"),
        f"{QUANTISATION}.quant_utils": ("group_broadcast",),
    }
    for name, attributes in unused.items():
        found.setdefault(name, {}).update(dict.fromkeys(attributes, Unused()))
    found[f"{MOE}.utils"]["normalize_batched_scales_shape"] = lambda scales, _: scales
    found["vllm.triton_utils"]["use_tensor_descriptor"] = lambda *_: False
    return found


def batched_stubs_with_descriptors() -> Mapping[str, Mapping[str, object]]:
    """Return the same where VLLM_TRITON_USE_TD asks for tensor descriptors."""
    usual = batched_stubs()
    units = {**usual["vllm.triton_utils"], "use_tensor_descriptor": lambda *_: True}
    return {**usual, "vllm.triton_utils": units}


def _supports(problem: BatchedMoEProblem, target: Target) -> bool | str:
    refused = refused_experts(problem, target) or wrong_here(target, problem.quantized)
    return refused or unavailable(FILE, target) or True


def _supports_numbers(problem: BatchedMoEProblem, target: Target) -> bool | str:
    return "weights are quantised" if problem.quantized else _supports(problem, target)


def _supports_rows(problem: BatchedMoEProblem, target: Target) -> bool | str:
    if not says(FILE, "USE_TD"):
        return missing_file(FILE) or "this release has no tensor descriptors for batched experts"
    size = 4 if problem.dtype == "float32" else 2
    if problem.hidden * size % DESCRIBED or problem.inter * size % DESCRIBED:
        return f"vLLM reads by pointers where rows are no multiples of {DESCRIBED} bytes"
    return _supports_numbers(problem, target)


def _supports_fp8(problem: BatchedMoEProblem, target: Target) -> bool | str:
    if problem.quantized not in FP8:
        return "weights are in FP8"
    if not problem.quantized_hidden:
        return "hidden states are in FP8 as weights are"
    return _supports(problem, target)


def _compile_key(problem: BatchedMoEProblem) -> Hashable:
    """Name the kernels' constants, and what Triton compiles for."""
    return (
        problem.dtype,
        problem.quantized,
        problem.gated,
        problem.hidden,
        problem.inter,
        problem.most_rows,
        problem.num_experts,
    )


batched = functools.partial(
    implementation,
    "batched_moe",
    provider="vllm",
    arithmetic=Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True),
    compile_key=_compile_key,
    unset_flags=NOT_YET,
)
"""``implementation``, with what the adapters to batched experts declare alike."""


@batched(name="vllm-batched-moe", supports=_supports_numbers, features=(ALGEBRA,))
def experts(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Multiply, activate, and multiply again."""
    return _run(inputs)


@batched(name="vllm-batched-moe-td", supports=_supports_rows, features=(ALGEBRA,))
def descriptors(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Do the same where hidden states and weights are read by tensor descriptors."""
    return _run(inputs, batched_stubs_with_descriptors)


@batched(
    name="vllm-batched-moe-fp8",
    supports=_supports_fp8,
    features=("fp8_weights", "quantized_hidden"),
    arithmetic=Arithmetic(
        projections="inputs", intermediate="float8_e4m3fn", partial_outputs=True
    ),
)  # fmt: skip
def experts_fp8(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Multiply in FP8, activate, quantise with a scale a tensor, row or block, multiply again."""
    return _run(inputs)


def _run(inputs: BatchedMoEInputs, stands_in: Stubs = batched_stubs) -> torch.Tensor:
    hidden, w13, w2, counts = inputs.tensors()
    dtype = inputs.out_dtype
    with load(FILE, stands_in) as kernels, scalars_as_bounds(counts):
        call = _Call(kernels, inputs)
        first = call.product(hidden, w13)
        middle = first.new_zeros((*first.shape[:2], call.inter))
        options = options_of(inputs)
        for expert, count in enumerate(counts.tolist()):
            rows = activated(options, first[expert, :count].float(), expert)
            middle[expert, :count] = rows.to(dtype)
        return call.product(call.as_hidden(middle), w2)


class _Call:
    """What both products of a call share."""

    def __init__(self, kernels: ModuleType, inputs: BatchedMoEInputs) -> None:
        self._kernels, self._inputs = kernels, inputs
        w2 = inputs.w2
        codes = w2 if isinstance(w2, torch.Tensor) else w2.codes
        self._scales = "" if isinstance(w2, torch.Tensor) else w2.format.scales
        self._block = [BLOCK, BLOCK] if self._scales == "block" else None
        hidden = inputs.hidden
        self._rows = (hidden if isinstance(hidden, torch.Tensor) else hidden.codes).shape[1]
        experts, channels, self.inter = codes.shape
        # The file of the other experts, where the choice of blocks stands.
        home = sys.modules[kernels.try_get_optimal_moe_config.__module__]
        self._config = home.get_default_config(
            **known(
                home.get_default_config,
                M=self._rows,
                E=experts,
                N=self.inter,
                K=channels,
                topk=1,
                dtype="fp8_w8a8" if self._scales else None,
                is_marlin=False,
                block_shape=self._block,
            )
        )

    def as_hidden(self, middle: torch.Tensor) -> Any:  # noqa: ANN401  numbers, or codes with scales
        """Quantise what is between the products as the hidden states are."""
        hidden = self._inputs.hidden
        if isinstance(hidden, torch.Tensor):
            return middle
        scale, values = self._inputs.intermediate_scale, middle.float()
        if scale is not None:
            scales = torch.tensor([of_expert(scale, e) for e in range(len(values))])
            scales = scales.to(values.device).view(-1, 1, 1)
        else:
            size = BLOCK if self._scales == "block" else self.inter
            parts = [part.abs().amax(dim=2) for part in values.split(size, dim=2)]
            scales = (torch.stack(parts, dim=2) / LARGEST).clamp(min=LEAST_SCALE)
        spread = scales
        if self._scales == "block":
            spread = scales.repeat_interleave(BLOCK, dim=2)[:, :, : self.inter]
        codes = (values / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return hidden._replace(codes=codes, scales=scales)

    def product(
        self, x: torch.Tensor | QuantizedMatrix, w: torch.Tensor | QuantizedMatrix
    ) -> torch.Tensor:
        """Multiply each expert's rows by its weights: [experts, rows, channels]."""
        numbers, x_scales = _parts(x)
        weights, w_scales = _parts(w)
        counts, dtype = self._inputs.counts, self._inputs.out_dtype
        if x_scales is not None and x_scales.dim() < 3:  # noqa: PLR2004  [experts, rows, columns]
            few = x_scales.expand(len(counts)) if not x_scales.dim() else x_scales
            x_scales = few.reshape(len(counts), -1, 1)
        if w_scales is not None and w_scales.dim() == 2:  # noqa: PLR2004  one a row
            w_scales = w_scales.unsqueeze(2)
        out = torch.full(
            (*numbers.shape[:2], weights.shape[1]), torch.nan, dtype=dtype, device=counts.device
        )
        launch = self._kernels.invoke_moe_batched_triton_kernel
        launch(
            **known(
                launch,
                A=numbers.contiguous(),
                B=weights,
                C=out,
                expert_num_tokens=counts,
                compute_type=getattr(self._kernels.tl, str(dtype).removeprefix("torch.")),
                A_scale=x_scales,
                B_scale=w_scales,
                B_zp=None,
                use_fp8_w8a8=bool(self._scales),
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                config=self._config,
                per_act_token_quant=self._scales == "channel",
                block_shape=self._block,
            )
        )
        return out


def _parts(
    matrix: torch.Tensor | QuantizedMatrix,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return numbers or codes, and the scales of codes."""
    if isinstance(matrix, torch.Tensor):
        return matrix, None
    return matrix.codes, matrix.scales
