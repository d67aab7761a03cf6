"""vLLM's Triton experts: ``fused_moe_kernel`` for both products, with its choice of blocks.

``moe_align_block_size`` is a CUDA operator of vLLM's, and so are the activation and the sum of each
token's experts: torch computes what these give (``vllm_stubs.align``, ``impl.torch.moe_rows``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch

from ...reference import Arithmetic, MoEProblem, QuantizedMatrix
from ...reference.tensors.moe_inputs import MoEInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import first_reason
from ..targets.target import Target
from ..torch.moe_layouts import codes_of, zero_points_of
from ..torch.moe_rows import Rows, activated
from .claims import refused_experts
from .sources import Stubs, implementation, known, load, unavailable
from .vllm_stubs import stubs

FILE = "vllm.model_executor.layers.fused_moe.fused_moe"
TOKENS = (1, 3, 16, 33, 48, 65, 80, 97, 112, 129, 160, 513, 528)
"""Among these are every choice of blocks, and numbers that are 1, multiples of 16 and neither."""


class Form(NamedTuple):
    """What the matrices of a call are to the kernel.

    Attributes:
        name: the name by which vLLM chooses blocks for it; None for numbers.
        flags: arguments of the launcher; none for numbers.
        weights: gives a matrix's scales as the kernel takes them.
        rows: gives codes and scales of the activation's results [rows, inter].
        stubs: modules that stand in for the rest of vLLM.
        blocks: sizes in the place of those that vLLM chooses.
    """

    name: str | None = None
    flags: Mapping[str, object] = {}
    weights: Callable[[torch.Tensor | QuantizedMatrix], torch.Tensor | None] = lambda _: None
    rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] = lambda x: (x, None)
    stubs: Stubs = stubs
    blocks: Mapping[str, int] = {}


OF_NUMBERS = "invoke_fused_moe_triton_kernel"
IN_GROUPS = "invoke_fused_moe_wna16_triton_kernel"
"""Names of the launchers: of ``fused_moe_kernel``, and of ``fused_moe_kernel_gptq_awq``."""
FLAGS = dict.fromkeys(
    ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"),
    False,
)
NUMBERS = Form()


def refusal(problem: MoEProblem, target: Target) -> bool | str:
    """Return why the kernel does not take a call, whatever its weights are; True if it does."""
    return first_reason(
        (not problem.num_tokens, "without tokens vLLM launches nothing"),
        (problem.assignment == "masked", "ids are those of experts, never -1"),
        (problem.weights_on_input and problem.biases,
         "a weight of the input multiplies the bias too"),
    ) or refused_experts(problem, target) or unavailable(FILE, target) or True  # fmt: skip


def compile_key(problem: MoEProblem) -> Hashable:
    """Name the kernels' constants, and what Triton compiles for: 1, and multiples of 16."""
    pairs = problem.num_tokens * problem.top_k
    bounds = (4, 8, 16) if problem.quantized else ()
    blocks = tuple(problem.num_tokens > most for most in (*bounds, 32, 64, 96, 128, 512))
    return (
        problem.dtype, problem.quantized, problem.biases, problem.weights_on_input,
        problem.top_k, problem.gated, problem.hidden % 16 == 0, problem.inter % 16 == 0,
        problem.expert_parallel, blocks,
        pairs == 1, pairs % 16 == 0, 4 * pairs <= problem.num_experts,
    )  # fmt: skip


def _kernels(problem: MoEProblem) -> Iterator[MoEProblem]:
    for tokens in TOKENS:
        yield replace(problem, num_tokens=tokens, token_ids=())


kernel = functools.partial(
    implementation,
    "moe",
    provider="vllm",
    compile_key=compile_key,
    kernels=_kernels,
    build_ahead="cuda",
    build_minutes=0.3,
    build_compilers=1,
)
"""``implementation``, with what the adapters to ``fused_moe_kernel`` declare alike."""
FEATURES = ("moe_biases", "expert_parallel", "weights_on_input", "large_rows")
ROUNDED = Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True)


@kernel(
    name="vllm-fused-moe",
    supports=refusal,
    features=(*FEATURES, "large_weights", ALGEBRA),
    arithmetic=ROUNDED,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Align pairs of tokens and experts, multiply, activate, multiply again, and add up."""
    return multiplied(inputs, codes_of(inputs.hidden), None, NUMBERS)


def multiplied(
    inputs: MoEInputs, hidden: torch.Tensor, scale: torch.Tensor | None, form: Form
) -> torch.Tensor:
    """Call the kernel for both products of a call, whose hidden states may have scales."""
    w13, w2 = codes_of(inputs.w13), codes_of(inputs.w2)
    ids, weights = inputs.topk_ids, inputs.topk_weights
    tokens, top_k = ids.shape
    count = inputs.num_experts or w13.shape[0]
    local = None
    if w13.shape[0] < count:
        local = torch.full((count,), -1, dtype=torch.int32, device=ids.device)
        here = slice(inputs.expert_offset, inputs.expert_offset + w13.shape[0])
        local[here] = torch.arange(w13.shape[0], dtype=torch.int32, device=ids.device)
    with load(FILE, form.stubs) as kernels, scalars_as_bounds(hidden):
        choose = kernels.get_default_config
        config = choose(
            **known(
                choose,
                M=tokens,
                E=w13.shape[0],
                N=w2.shape[2],
                K=hidden.shape[1],
                topk=top_k,
                dtype=form.name,
                is_marlin=False,
                block_shape=form.flags.get("block_shape"),
            )
        )
        config = {**config, **form.blocks}
        blocks = _blocks(kernels, config, ids, count, local, form.flags)
        call = _Call(kernels, config, weights, blocks, inputs.out_dtype, form.flags)
        on_input = inputs.weights_on_input
        first = call.product(
            (hidden, scale),
            (w13, form.weights(inputs.w13), zero_points_of(inputs.w13)),
            inputs.w13_bias,
            top_k=top_k,
            weigh=on_input,
        )
        rows = Rows(ids, ids, ids.flatten(), weights, ids)  # no row has an activation of its own
        middle = activated(inputs, first.flatten(0, 1).float(), rows).to(inputs.out_dtype)
        second = call.product(
            form.rows(middle),
            (w2, form.weights(inputs.w2), zero_points_of(inputs.w2)),
            inputs.w2_bias,
            top_k=1,
            weigh=not on_input,
        )
    return second.float().sum(dim=1).to(inputs.out_dtype)


def _blocks(
    kernels: ModuleType,
    config: dict[str, int],
    ids: torch.Tensor,
    count: int,
    local: torch.Tensor | None,
    flags: Mapping[str, object],
) -> tuple[torch.Tensor | None, ...]:
    """Return sorted pairs, the experts of blocks, and the number of sorted pairs."""
    tokens, top_k = ids.shape
    if hasattr(kernels, "_prepare_expert_assignment"):
        prepare = kernels._prepare_expert_assignment  # noqa: SLF001  as fused_experts_impl does
        found = prepare(ids, config, tokens, top_k, count, local, **known(prepare, **flags))
    else:
        found = kernels.moe_align_block_size(ids, config["BLOCK_SIZE_M"], count, local)
    return tuple(found)


class _Call(NamedTuple):
    """What both products of a call share."""

    kernels: ModuleType
    config: dict[str, int]
    weights: torch.Tensor
    blocks: tuple[torch.Tensor | None, ...]
    dtype: torch.dtype
    flags: Mapping[str, object]

    def product(
        self,
        x: tuple[torch.Tensor, torch.Tensor | None],
        w: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        bias: torch.Tensor | None,
        *,
        top_k: int,
        weigh: bool,
    ) -> torch.Tensor:
        """Multiply rows by their experts' weights, each with their scales: [tokens, top_k, n]."""
        shape = (*self.weights.shape, w[0].shape[1])
        out = torch.full(shape, torch.nan, dtype=self.dtype, device=self.weights.device)
        name = IN_GROUPS if self.flags.get("use_int4_w4a16") is not None else OF_NUMBERS
        launch = getattr(self.kernels, name, None) or self.kernels.invoke_fused_moe_kernel
        launch(
            **known(
                launch,
                A=x[0],
                B=w[0],
                C=out,
                A_scale=x[1],
                B_scale=w[1],
                B_zp=w[2],
                B_bias=bias,
                topk_weights=self.weights,
                mul_routed_weight=weigh,
                top_k=top_k,
                config=self.config,
                sorted_token_ids=self.blocks[0],
                expert_ids=self.blocks[1],
                num_tokens_post_padded=self.blocks[2],
                compute_type=getattr(self.kernels.tl, str(self.dtype).removeprefix("torch.")),
                **{**FLAGS, "block_shape": None, **self.flags},
            )
        )
        return out
