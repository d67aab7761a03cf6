"""vLLM's Triton experts: ``fused_moe_kernel`` for both products, with its choice of blocks.

``moe_align_block_size`` is a CUDA operator of vLLM's, and so are the activation and the sum of each
token's experts: torch computes what these give (``vllm_stubs.align``, ``impl.torch.moe_rows``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch

from ...reference import Arithmetic, MoEProblem
from ...reference.tensors.moe_inputs import MoEInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..protocol import implementation
from ..targets.target import Target
from ..torch.moe_rows import Rows, activated
from .claims import wrong_here
from .sources import known, load, unavailable
from .vllm_stubs import stubs

FILE = "vllm.model_executor.layers.fused_moe.fused_moe"
TOKENS = (1, 3, 16, 33, 48, 65, 80, 97, 112, 129, 160, 513, 528)
"""Among these are every choice of blocks, and numbers that are 1, multiples of 16 and neither."""


def _supports(problem: MoEProblem, target: Target) -> bool | str:
    if not problem.num_tokens:
        return "without tokens vLLM launches nothing"
    if problem.assignment == "masked":
        return "ids are those of experts, never -1"
    if problem.dtype == "float32" and target.device != "cpu":
        return "a GPU multiplies float32 as TF32, which bounds of experts cannot say"
    if problem.weights_on_input and problem.biases:
        return "a weight of the input multiplies the bias too"
    return wrong_here(target, problem.dtype) or unavailable(FILE, target) or True


def _compile_key(problem: MoEProblem) -> Hashable:
    """Name the kernels' constants, and what Triton compiles for: 1, and multiples of 16."""
    pairs = problem.num_tokens * problem.top_k
    blocks = tuple(problem.num_tokens > most for most in (32, 64, 96, 128, 512))
    return (
        problem.dtype, problem.biases, problem.weights_on_input, problem.top_k, problem.gated,
        problem.hidden % 16 == 0, problem.inter % 16 == 0, problem.expert_parallel, blocks,
        pairs == 1, pairs % 16 == 0, 4 * pairs <= problem.num_experts,
    )  # fmt: skip


def _kernels(problem: MoEProblem) -> Iterator[MoEProblem]:
    for tokens in TOKENS:
        yield replace(problem, num_tokens=tokens, token_ids=())


@implementation(
    "moe",
    name="vllm-fused-moe",
    provider="vllm",
    supports=_supports,
    features=("moe_biases", "expert_parallel", "weights_on_input"),
    arithmetic=Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True),
    compile_key=_compile_key,
    kernels=_kernels,
    build_ahead="cuda",
    build_minutes=0.3,
    build_compilers=1,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Align pairs of tokens and experts, multiply, activate, multiply again, and add up."""
    hidden, w13, w2, ids, weights = inputs.tensors()
    tokens, top_k = ids.shape
    count = inputs.num_experts or w13.shape[0]
    local = None
    if w13.shape[0] < count:
        local = torch.full((count,), -1, dtype=torch.int32, device=ids.device)
        here = slice(inputs.expert_offset, inputs.expert_offset + w13.shape[0])
        local[here] = torch.arange(w13.shape[0], dtype=torch.int32, device=ids.device)
    with load(FILE, stubs) as kernels, scalars_as_bounds(hidden):
        choose = kernels.get_default_config
        config = choose(**known(
            choose, M=tokens, E=w13.shape[0], N=w2.shape[2], K=hidden.shape[1], topk=top_k,
            dtype=None, is_marlin=False,
        ))  # fmt: skip
        call = _Call(kernels, config, weights, _blocks(kernels, config, ids, count, local))
        on_input = inputs.weights_on_input
        first = call.product(hidden, w13, inputs.w13_bias, top_k=top_k, weigh=on_input)
        rows = Rows(ids, ids, ids.flatten(), weights, ids)  # no row has an activation of its own
        middle = activated(inputs, first.flatten(0, 1).float(), rows).to(hidden.dtype)
        second = call.product(middle, w2, inputs.w2_bias, top_k=1, weigh=not on_input)
    return second.float().sum(dim=1).to(inputs.out_dtype)


def _blocks(
    kernels: ModuleType,
    config: dict[str, int],
    ids: torch.Tensor,
    count: int,
    local: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return sorted pairs, the experts of blocks, and the number of sorted pairs."""
    tokens, top_k = ids.shape
    if hasattr(kernels, "_prepare_expert_assignment"):
        prepare = kernels._prepare_expert_assignment  # noqa: SLF001  as fused_experts_impl does
        found = prepare(ids, config, tokens, top_k, count, local)
    else:
        found = kernels.moe_align_block_size(ids, config["BLOCK_SIZE_M"], count, local)
    return tuple(found)


class _Call(NamedTuple):
    """What both products of a call share."""

    kernels: ModuleType
    config: dict[str, int]
    weights: torch.Tensor
    blocks: tuple[torch.Tensor | None, ...]

    def product(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        top_k: int,
        weigh: bool,
    ) -> torch.Tensor:
        """Multiply rows by their experts' weights: [tokens, top_k, channels] in x's dtype."""
        out = x.new_full((*self.weights.shape, w.shape[1]), torch.nan)
        launch = getattr(self.kernels, "invoke_fused_moe_triton_kernel", None)
        launch = launch or self.kernels.invoke_fused_moe_kernel
        launch(**known(
            launch,
            A=x, B=w, C=out, A_scale=None, B_scale=None, B_zp=None, B_bias=bias,
            topk_weights=self.weights, mul_routed_weight=weigh, top_k=top_k, config=self.config,
            sorted_token_ids=self.blocks[0], expert_ids=self.blocks[1],
            num_tokens_post_padded=self.blocks[2],
            compute_type=getattr(self.kernels.tl, str(x.dtype).removeprefix("torch.")),
            use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False,
            per_channel_quant=False, block_shape=None,
        ))  # fmt: skip
        return out
