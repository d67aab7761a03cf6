"""SGLang's Triton experts: ``fused_moe_kernel``, the activation and the sum of a token's experts.

SGLang's alignment of pairs is a CUDA operator, as is what makes FP8 or int8 of numbers: torch
computes what these give. On Hopper the kernel swaps its operands where a block of FP8 has few rows
(``swap_ab``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch

from ....reference import MoEProblem, QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs
from ...features import ALGEBRA
from ...gpu.triton_interpreter import scalars_as_bounds
from ...targets.refusal import Refusal, first_reason
from ...targets.target import Target
from ...torch.moe_layouts import codes_of, scales_of, zero_points_of
from ...torch.moe_rows import Rows, activated
from ..claims import refused_experts, wrong_here
from ..sglang_calls import SGLANG, stubs
from ..sources import Stubs, load, says, unavailable
from ..vllm_moe import FEATURES as VLLM_FEATURES
from ..vllm_moe import ROUNDED, kernel
from ..vllm_stubs import Unused, align
from .grouped_weights import FEATURES as GROUP_FEATURES
from .grouped_weights import GROUPED, grouped, not_grouped
from .vllm_formats import GROUP, HOPPER, quantised_rows

FILE = "sglang.kernels.ops.moe.fused_moe_triton_kernels"
TOKENS = (1, 3, 16, 33, 65)
WRITTEN = {"swiglu": "silu", "geglu_tanh": "gelu"}
"""Activations of ``act_and_mul_triton``, by ours."""
QUANTISERS = (
    "scaled_fp8_quant",
    "per_token_quant_int8",
    "per_token_group_quant_int8",
    "sglang_per_token_group_quant_int8",
)
"""What the launcher makes codes with: it is given codes, which these return."""
LEAST_COLUMNS = 16
"""Columns of the smallest block that ``tl.dot`` multiplies."""
FEATURES = (*VLLM_FEATURES, "routed_scaling_factor")
DESCRIBED = 16
"""Bytes of which a row that a tensor descriptor describes is a multiple."""
LORA = dict.fromkeys(
    ("FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT"),
    "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe.py:911 of sglang 0.5.23",
)
"""Flags of outputs that are added to those of another call, which only LoRA's own calls set."""
SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 4}
"""Blocks without a GPU of FP8, of whose default ones one would hold a whole problem."""


def _refusal(problem: MoEProblem, target: Target) -> bool | str:
    return first_reason(
        (not problem.num_tokens, "without tokens SGLang launches nothing"),
        (problem.weights_on_input and problem.biases,
         "a weight of the input multiplies the bias too"),
    ) or refused_experts(problem, target) or unavailable(FILE, target) or True  # fmt: skip


def _other_weights(problem: MoEProblem, target: Target) -> bool | str:
    if not problem.quantized.startswith("fp8"):
        return "weights are FP8"
    if not problem.quantized_hidden:
        return "FP8 weights are multiplied by FP8 hidden states, which are to be given"
    return wrong_here(target, "float8_e4m3fn") or _refusal(problem, target)


def _not_swapped(problem: MoEProblem, target: Target) -> bool | str:
    if target.sm is not None and target.sm // 10 != HOPPER // 10:
        return Refusal("SGLang swaps the operands on Hopper only", "device", "sm_90")
    return _other_weights(problem, target)


def _compile_key(problem: MoEProblem) -> Hashable:
    pairs = problem.num_tokens * problem.top_k
    return (
        problem.dtype, problem.quantized, problem.biases, problem.weights_on_input, problem.top_k,
        problem.activation, problem.hidden, problem.inter, problem.num_tokens <= problem.here,
        problem.routed_scaling_factor,
        pairs == 1, pairs % 16 == 0,
    )  # fmt: skip


def _kernels(problem: MoEProblem) -> Iterator[MoEProblem]:
    for tokens in TOKENS:
        yield replace(problem, num_tokens=tokens, token_ids=())


moe = functools.partial(
    kernel,
    provider=SGLANG,
    compile_key=_compile_key,
    kernels=_kernels,
    build_minutes=0.2,
    unset_flags=LORA,
)
fp8 = functools.partial(
    moe,
    features=(*FEATURES, "fp8_weights", "quantized_hidden", "strided_hidden"),
    arithmetic=replace(ROUNDED, fp8_products="fixed_point"),
)


def _stubs(*, swapped: bool = False) -> dict[str, Mapping[str, object]]:
    """Stand in for the rest of SGLang."""
    quant = "sglang.kernels.ops.quantization"
    groups = ("per_token_group_quant", "sglang_per_token_group_quant")
    usual: dict[str, object] = {
        "cpu_has_amx_support": lambda: False, "is_cpu": lambda: False,
        "is_sm90_supported": lambda: swapped, "is_cuda": lambda: swapped,
    }  # fmt: skip
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
        f"{quant}.fp8_kernel": dict.fromkeys(
            ("scaled_fp8_quant", *(f"{name}_fp8" for name in groups)), Unused()
        ),
        f"{quant}.int8_kernel": dict.fromkeys(QUANTISERS, Unused()),
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
        "sglang.srt.environ": {"envs": Unused()},
        "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda _: 0},
        "sglang.srt.utils": {**stubs()["sglang.srt.utils"], **usual},
    }  # fmt: skip


def _swapped() -> dict[str, Mapping[str, object]]:
    return _stubs(swapped=True)


@moe(
    name="sglang-fused-moe",
    supports=_refusal,
    features=(*FEATURES, ALGEBRA),
    arithmetic=ROUNDED,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Multiply numbers, in SGLang's blocks where it was not tuned."""
    tokens, few = inputs.topk_ids.shape[0], codes_of(inputs.w13).shape[0]
    sizes = (16, 32, 64, 1) if tokens <= few else (64, 64, 32, 8)
    return _multiplied(inputs, _fitting(inputs, dict(zip(SMALL, sizes, strict=True))), {}, _stubs)


@fp8(name="sglang-fused-moe-fp8", supports=_other_weights)
def quantised(inputs: MoEInputs) -> torch.Tensor:
    """Multiply FP8 by FP8, with scales of tensors, of rows, or of 128 by 128."""
    return _quantised(inputs, _stubs)


def _not_described(problem: MoEProblem, target: Target) -> bool | str:
    if target.sm is not None and target.sm < HOPPER:
        return Refusal("SGLang reads by tensor descriptors from Hopper on", "device", "sm_90")
    if problem.quantized != "fp8_block":
        return "SGLang's sorted rows are FP8 in blocks of 128 by 128"
    if problem.hidden % DESCRIBED or problem.inter % DESCRIBED:
        return f"a tensor descriptor's rows are multiples of {DESCRIBED} bytes"
    if not says(FILE, "c_sorted"):
        return "this release sorts no rows"
    return _other_weights(problem, target)


@fp8(name="sglang-fused-moe-tma", supports=_not_described)
def described(inputs: MoEInputs) -> torch.Tensor:
    """Do the same by tensor descriptors, with rows between the products sorted by expert."""
    return _quantised(inputs, _stubs, in_order=True)


@fp8(name="sglang-fused-moe-fp8-swap-ab", supports=_not_swapped)
def swapped(inputs: MoEInputs) -> torch.Tensor:
    """Do the same with the weights as the first operand."""
    return _quantised(inputs, _swapped)


def _other_integers(problem: MoEProblem, target: Target) -> bool | str:
    if not problem.quantized.startswith("int8"):
        return "weights are int8"
    if problem.quantized == "int8_tensor":
        return "a scale is one of a channel, or of 128 by 128"
    if problem.quantized == "int8_block" and not problem.quantized_hidden:
        return "scales are of 128 by 128 beside int8 only"
    return _refusal(problem, target)


@moe(
    name="sglang-fused-moe-int8",
    supports=_other_integers,
    features=(*FEATURES, "int8_weights", "quantized_hidden", "strided_hidden", ALGEBRA),
    arithmetic=ROUNDED,
)
def int8(inputs: MoEInputs) -> torch.Tensor:
    """Multiply int8 by int8 or by numbers."""
    if isinstance(inputs.hidden, torch.Tensor):
        return _multiplied(inputs, _fitting(inputs, SMALL), {"use_int8_w8a16": True}, _stubs)
    return _quantised(inputs, _stubs)


def _not_in_groups(problem: MoEProblem, target: Target) -> bool | str:
    return not_grouped(problem) or _refusal(problem, target)


@moe(
    name="sglang-fused-moe-wna16",
    supports=_not_in_groups,
    features=(*GROUP_FEATURES, "routed_scaling_factor", ALGEBRA),
    arithmetic=GROUPED,
)
def in_groups(inputs: MoEInputs) -> torch.Tensor:
    """Multiply numbers by weights of 4 or 8 bits with a scale for each row and group."""
    given, flags = grouped(inputs)
    return _multiplied(given, _fitting(inputs, SMALL), flags, _stubs)


def _quantised(inputs: MoEInputs, stands_in: Stubs, *, in_order: bool = False) -> torch.Tensor:
    assert isinstance(inputs.w13, QuantizedMatrix)  # noqa: S101  supports said so
    form, config, group = inputs.w13.format, _fitting(inputs, SMALL), 0
    name = "use_int8_w8a8" if form.dtype == torch.int8 else "use_fp8_w8a8"
    flags: dict[str, object] = {name: True, "per_channel_quant": form.scales == "channel"}
    if form.in_blocks:
        group, flags["block_shape"] = GROUP, [GROUP, GROUP]
        config = {**SMALL, "BLOCK_SIZE_K": GROUP}
        if stands_in is _swapped:
            # In narrower blocks it indexes a scalar as if it had two axes: triton 3.9 refuses that.
            config["BLOCK_SIZE_N"] = 2 * GROUP
    given = inputs.intermediate_scale if form.scales == "tensor" else None
    rows = functools.partial(quantised_rows, dtype=form.dtype, group=group, given=given)
    return _multiplied(inputs, config, flags, stands_in, rows, in_order=in_order)


def _fitting(inputs: MoEInputs, blocks: dict[str, int]) -> dict[str, int]:
    """Return blocks that small problems fill without a GPU, for odd numbers of tokens.

    One of more columns holds all that a slow interpreter affords, and is never full.
    """
    if inputs.topk_ids.is_cuda or not inputs.topk_ids.shape[0] % 2:
        return blocks
    return {**blocks, "BLOCK_SIZE_K": LEAST_COLUMNS}


def _multiplied(
    inputs: MoEInputs,
    config: dict[str, int],
    flags: Mapping[str, object],
    stands_in: Stubs,
    rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] = lambda x: (x, None),
    *,
    in_order: bool = False,
) -> torch.Tensor:
    """Call the kernels, with ``rows`` to make codes and scales of the activation's results.

    With ``in_order``, rows between the products are sorted by expert, and read by descriptors.
    """
    hidden, ids = codes_of(inputs.hidden), inputs.topk_ids
    with load(FILE, stands_in) as kernels, scalars_as_bounds(hidden):
        local = ids - inputs.expert_offset
        local = torch.where((local >= 0) & (local < codes_of(inputs.w13).shape[0]), local, -1)
        blocks = _blocks(local, config, inputs)
        call = _Call(kernels, inputs, local, blocks, config, flags, in_order)
        try:
            first = call.product((hidden, _rows(inputs)), inputs.w13, inputs.w13_bias, first=True)
            middle = rows(call.activated(first.flatten(0, -2)))
            second = call.product(middle, inputs.w2, inputs.w2_bias, first=False)
        finally:  # descriptors by address: the next problem's weights may have the same
            getattr(kernels, "clear_b_tma_desc_cache", lambda: None)()
        out = torch.full_like(second[:, 0], torch.nan)
        kernels.moe_sum_reduce_triton(second, out, inputs.routed_scaling_factor)
    return out


def _rows(inputs: MoEInputs) -> torch.Tensor | None:
    """Return the scales of the hidden states, if they are codes."""
    if isinstance(inputs.hidden, torch.Tensor):
        return None
    scale = scales_of(inputs.hidden)
    return scale.unsqueeze(1) if scale.dim() == 1 else scale


def _blocks(
    local: torch.Tensor, config: Mapping[str, int], inputs: MoEInputs
) -> tuple[torch.Tensor, ...]:
    """Return sorted pairs, the experts of blocks, -1 first, and the number of sorted pairs."""
    count, size = codes_of(inputs.w13).shape[0] + 1, config["BLOCK_SIZE_M"]
    room = -(-local.numel() // size) + count
    found = [local.new_empty(n) for n in (room * size, room, 1)]
    align(local + 1, count, size, *found)
    return found[0], found[1] - 1, found[2]


class _Call(NamedTuple):
    """What both products of a call share."""

    kernels: ModuleType
    inputs: MoEInputs
    local: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    config: dict[str, int]
    flags: Mapping[str, object]
    in_order: bool

    def product(
        self,
        given: tuple[torch.Tensor, torch.Tensor | None],
        w: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
        *,
        first: bool,
    ) -> torch.Tensor:
        """Multiply rows by their experts' weights: [tokens, top_k, channels].

        Of the first product, in order: [sorted pairs, channels].
        """
        inputs, weights = self.inputs, self.inputs.topk_weights
        flags = dict(self.flags)
        rows: tuple[int, ...] = weights.shape
        if self.in_order:
            rows = (len(self.blocks[0]),) if first else rows
            flags |= {"b_use_tma": True, "c_sorted": first, "a_use_tma": not first}
        shape = (*rows, codes_of(w).shape[1])
        out = torch.full(shape, torch.nan, dtype=inputs.out_dtype, device=weights.device)
        none = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
        scales = None if isinstance(w, torch.Tensor) else scales_of(w)
        with ExitStack() as stack:
            for name in QUANTISERS:
                stack.enter_context(mock.patch.object(self.kernels, name, return_value=given))
            self.kernels.invoke_fused_moe_kernel(
                A=given[0],
                B=codes_of(w),
                bias=bias,
                C=out,
                A_scale=given[1],
                B_scale=scales,
                B_zp=zero_points_of(w),
                topk_weights=weights,
                topk_ids=self.local,
                sorted_token_ids=self.blocks[0],
                expert_ids=self.blocks[1],
                num_tokens_post_padded=self.blocks[2],
                mul_routed_weight=first == inputs.weights_on_input,
                top_k=weights.shape[1] if first else 1,
                config=self.config,
                compute_type=getattr(self.kernels.tl, str(out.dtype).removeprefix("torch.")),
                **{**dict.fromkeys(none, False), "per_channel_quant": False, **flags},
            )
        return out

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """Activate rows, by SGLang's kernel where it has the activation."""
        name = WRITTEN.get(self.inputs.activation)
        if name is None:
            ids = self.local
            rows = Rows(ids, ids, ids.flatten(), self.inputs.topk_weights, ids)
            return activated(self.inputs, x.float(), rows).to(x.dtype)
        out = x.new_full((x.shape[0], x.shape[1] // 2), torch.nan)
        self.kernels.act_and_mul_triton(
            x, out, self.config, self.local, self.blocks[1], self.in_order, activation=name
        )
        return out
