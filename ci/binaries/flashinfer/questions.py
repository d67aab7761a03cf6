"""The kinds of call that a release is asked about, and the calls that each kind is asked by.

A kind of call is a ``Feature``, as the support rules know it. Which kernel is selected depends on
more: on the batch, the lengths and the number of KV heads, so that each kind is several calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ....impl.gating import Feature

BACKEND = "trtllm-gen"
OPERATIONS = ("paged_attention", "ragged_attention", "mla")
"""The operations of attention."""
MOE, GEMM = "moe", "gemm"
HALF, BRAIN, EIGHT, FOUR = "float16", "bfloat16", "float8_e4m3fn", "nvfp4"
SAME = ((BRAIN, BRAIN), (HALF, HALF), (EIGHT, EIGHT))
PAIRS = (*SAME, (EIGHT, FOUR), (BRAIN, EIGHT), (HALF, EIGHT), (BRAIN, FOUR))
"""Dtypes of queries and cache that are asked about together."""
HEAD_DIMS = (64, 80, 128, 256, 512)
RAGGED_HEAD_DIMS = ((192, 128), (128, 128), (64, 64), (256, 256))
LATENT_HEAD_DIMS = ((576, 512), (320, 256))
LATENT_HEADS = (1, 2, 4, 8, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128)
"""Numbers of heads of latent attention, for which the kernels' tiles decide."""
ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "silu", "gelu", "relu", "relu2", "identity")
ROUTINGS = (
    *("default", "renormalize", "renormalize_naive", "deepseek_v3", "llama4", "topk"),
    *("sigmoid", "sigmoid_renorm", "minimax2"),
)
HIDDEN = {
    "none": HALF,
    "fp8_per_tensor": EIGHT,
    "fp8_block": EIGHT,
    "mxfp8": "mxfp8",
    "nvfp4": FOUR,
    "mxfp4": BRAIN,
    "mxfp8_mxfp4": "mxfp8",
    "w4a16": BRAIN,
    "w4a8": EIGHT,
}
"""Dtypes of hidden states beside bfloat16, by the quantisations of a MoE's weights for which
trtllm-gen has a function. bfloat16 stands for the dtype of the kernels: engines quantise before."""
MOE_FUNCTIONS: Mapping[str, str] = {
    "none": "trtllm_bf16_moe",
    "fp8_per_tensor": "trtllm_fp8_per_tensor_scale_moe",
    "fp8_block": "trtllm_fp8_block_scale_moe",
    "mxfp8": "trtllm_fp8_block_scale_moe",
    "nvfp4": "trtllm_fp4_block_scale_moe",
    "mxfp4": "trtllm_fp4_block_scale_moe",
    "mxfp8_mxfp4": "trtllm_fp4_block_scale_moe",
    "w4a16": "trtllm_mxint4_block_scale_moe",
    "w4a8": "trtllm_fp4_block_scale_moe",
}
"""FlashInfer's function by the quantisation of the weights. W4A16 is MXINT4, and W4A8 is MXFP4 with
hidden states in FP8 that have one scale."""
GEMM_FUNCTIONS: Mapping[str, str] = {
    "nvfp4": "mm_fp4",
    "mxfp8": "mm_mxfp8",
    "fp8_block": "gemm_fp8_nt_groupwise",
    "fp8_per_tensor": "mm_fp8",
}
"""FlashInfer's function by the quantisation of a GEMM's weight, of those that trtllm-gen has."""
GEMM_TOKENS = (1, 16, 128, 4096)
GEMM_SIZES = ((4096, 6144), (7168, 2048), (2048, 4096), (14336, 4096))
"""Channels of a token that a GEMM takes, and that it gives."""
MOE_TOKENS = (1, 64, 4096)
MOE_SIZES = (
    (8, 2, 4096, 1792),
    (128, 8, 2048, 768),
    (256, 8, 7168, 2048),
)
"""Experts, experts a token, hidden and intermediate size, as in Mixtral, Qwen3 and DeepSeek-V3."""
MOST_LOCAL_EXPERTS = 32
"""Experts of one rank: more are spread over ranks."""


@dataclass(frozen=True)
class Call:
    """One call of a kind.

    Attributes:
        batch: number of requests.
        query_len: query tokens of each request.
        kv_len: keys of the longest request, an argument of the call.
        kv_heads: number of KV heads.
    """

    batch: int
    query_len: int
    kv_len: int
    kv_heads: int

    def __str__(self) -> str:
        """Return it in words."""
        words = f"batch {self.batch}, {self.query_len} query tokens, {self.kv_len} keys"
        return f"{words}, {self.kv_heads} KV heads"


@dataclass(frozen=True)
class MoeCall:
    """One call of a kind of MoE.

    Attributes:
        tokens: number of tokens.
        num_experts: experts over all ranks.
        local_experts: experts of the rank that is asked about.
        top_k: experts a token.
        hidden_size, intermediate_size: channels of a token, and of an expert's inner layer.
    """

    tokens: int
    num_experts: int
    local_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    def __str__(self) -> str:
        """Return it in words."""
        here = f", {self.local_experts} of them here" * (self.local_experts < self.num_experts)
        return (
            f"{self.tokens} tokens, {self.num_experts} experts{here}, top {self.top_k}, "
            f"{self.hidden_size} x {self.intermediate_size} channels"
        )


@dataclass(frozen=True)
class GemmCall:
    """One call of a kind of GEMM.

    Attributes:
        tokens: number of tokens.
        hidden_size, intermediate_size: channels of a token that it takes, and that it gives.
    """

    tokens: int
    hidden_size: int
    intermediate_size: int

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.tokens} tokens, {self.hidden_size} to {self.intermediate_size} channels"


AnyCall = Call | MoeCall | GemmCall


def can_be_asked(feature: Feature) -> bool:
    """Whether the API of trtllm-gen has arguments for a kind of call."""
    if feature.operation == GEMM:
        return (
            feature.backend == BACKEND
            and feature.q_dtype in (BRAIN, HALF)
            and feature.quantisation in GEMM_FUNCTIONS
        )
    if feature.operation == MOE:
        return (
            feature.backend == BACKEND
            and feature.q_dtype in (BRAIN, HIDDEN.get(feature.quantisation))
            and feature.quantisation in HIDDEN
            and feature.activation in ACTIVATIONS
            and feature.routing in ROUTINGS
        )
    return (
        feature.operation in OPERATIONS
        and feature.backend == BACKEND
        and {feature.q_dtype, feature.kv_dtype} <= {HALF, BRAIN, EIGHT, FOUR}
        and feature.q_dtype != FOUR
        and feature.phase != "mixed"
        and not (feature.soft_cap or feature.ragged_queries or feature.kv_storage)
        and (feature.mask == "causal" or (feature.mask == "none" and not feature.window))
        and feature.padding == "none"
    )


def calls_of(feature: Feature) -> tuple[AnyCall, ...]:
    """Return the calls that a kind is asked by."""
    if feature.operation == MOE:
        return tuple(_moe_calls(feature))
    if feature.operation == GEMM:
        return tuple(_gemm_calls(feature))
    tokens = feature.query_len
    if feature.operation == "mla":
        # From 33 heads on, whether there is a kernel depends on the batch and on the length.
        sizes = product((1, 8, 64, 256), (16, 1024, 32768))
        return tuple(Call(batch, tokens, keys, 1) for batch, keys in sizes)
    few = 8 if feature.group_size <= 8 else 2  # noqa: PLR2004  as many query heads as models have
    if feature.operation == "ragged_attention":
        return tuple(Call(4, new, keys, few) for new, keys in ((128, 128), (512, 1024)))
    if feature.phase == "prefill":
        lengths = ((128, 128), (16, 16), (512, 4096))
        return tuple(Call(4, new, keys, few) for new, keys in lengths)
    shapes = ((8, 1024, few), (1, 16, few), (256, 1024, few), (1, 32768, few), (64, 4096, 1))
    return tuple(Call(batch, tokens, keys, heads) for batch, keys, heads in shapes)


def _moe_calls(feature: Feature) -> Iterator[MoeCall]:
    """Yield the calls of a kind of MoE: sizes that it states are those of all of them."""
    stated = (feature.num_experts, feature.top_k, feature.hidden_size, feature.intermediate_size)
    top_k = 1 if feature.routing == "llama4" else 0
    sizes = dict.fromkeys(
        tuple(mine or each for mine, each in zip(stated, usual, strict=True))
        for usual in ((each[0], top_k or each[1], *each[2:]) for each in MOE_SIZES)
    )
    for tokens, (experts, chosen, hidden, inner) in product(MOE_TOKENS, sizes):
        local = next(each for each in range(MOST_LOCAL_EXPERTS, 0, -1) if experts % each == 0)
        yield MoeCall(tokens, experts, local, chosen, hidden, inner)


def _gemm_calls(feature: Feature) -> Iterator[GemmCall]:
    stated = (feature.hidden_size, feature.intermediate_size)
    sizes = dict.fromkeys(
        tuple(mine or each for mine, each in zip(stated, usual, strict=True))
        for usual in GEMM_SIZES
    )
    for tokens, (taken, given) in product(GEMM_TOKENS, sizes):
        yield GemmCall(tokens, taken, given)


def kinds(operation: str = "") -> Iterator[Feature]:
    """Yield all kinds of call of attention, or of MoE or GEMMs, that a release is asked about."""
    if operation == MOE:
        yield from _moe_kinds()
        return
    if operation == GEMM:
        for quantisation, dtype in product(GEMM_FUNCTIONS, (BRAIN, HALF)):
            yield Feature(GEMM, BACKEND, q_dtype=dtype, quantisation=quantisation)
        return
    groups, tokens = (1, 2, 4, 5, 8, 12, 16, 32, 64), (1, 2, 4, 8, 16)
    yield from _paged("decode", (16, 64, 128), groups, tokens, windows=(False, True))
    yield from _paged("decode", (1, 8, 32, 256), (1, 5, 8), (1, 4), windows=(False,))
    yield from _paged("decode", (64,), (20, 24, 40), (1, 4), windows=(False,))
    yield from _paged("prefill", (1, 16, 64, 128), (1, 5, 8), (1,), windows=(False, True))
    # With a window and without the causal mask, kernels that mask nothing are selected: a launch
    # then says nothing of the window.
    for (query, value), (q, kv), group, (window, mask) in product(
        RAGGED_HEAD_DIMS, SAME, (1, 4), ((False, "causal"), (True, "causal"), (False, "none"))
    ):
        yield _feature(
            "ragged_attention",
            phase="prefill",
            head_dim_qk=query,
            head_dim_vo=value,
            q_dtype=q,
            kv_dtype=kv,
            group_size=group,
            window=window,
            mask=mask,
        )
    for (query, value), page, (q, kv), heads, count in product(
        LATENT_HEAD_DIMS, (1, 16, 32, 64, 128), (*SAME, (BRAIN, EIGHT)), LATENT_HEADS, (1, 2, 4, 8)
    ):
        yield _feature(
            "mla",
            head_dim_qk=query,
            head_dim_vo=value,
            q_dtype=q,
            kv_dtype=kv,
            page_size=page,
            group_size=heads,
            query_len=count,
        )


def _paged(
    phase: str,
    pages: tuple[int, ...],
    groups: tuple[int, ...],
    tokens: tuple[int, ...],
    *,
    windows: tuple[bool, ...],
) -> Iterator[Feature]:
    for dim, page, (q, kv), group, count, window in product(
        HEAD_DIMS, pages, PAIRS, groups, tokens, windows
    ):
        yield _feature(
            "paged_attention",
            phase=phase,
            head_dim_qk=dim,
            q_dtype=q,
            kv_dtype=kv,
            page_size=page,
            group_size=group,
            query_len=count,
            window=window,
        )


def _moe_kinds() -> Iterator[Feature]:
    for (quantisation, own), activation, routing in product(HIDDEN.items(), ACTIVATIONS, ROUTINGS):
        # Quantised hidden states are the same call as bfloat16 ones, which an engine quantises.
        for dtype in (BRAIN, HALF) if own == HALF else (BRAIN,):
            yield Feature(
                MOE,
                BACKEND,
                q_dtype=dtype,
                quantisation=quantisation,
                activation=activation,
                routing=routing,
            )


def _feature(operation: str, **fields: Any) -> Feature:  # noqa: ANN401  fields by name
    return Feature(operation, BACKEND, kv_layout="HND", **fields)
