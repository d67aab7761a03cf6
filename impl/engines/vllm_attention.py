"""vLLM's Triton attention: ``unified_attention`` with its 2D and its 3D kernel.

The 2D kernel attends to all keys of a request in one program, the 3D kernel to segments of them,
which ``reduce_segments`` merges. Up to 0.11 vLLM chooses between them by itself, and later by the
scratch that it is given.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import first_reason
from ..targets.target import Target, UnsupportedError
from .claims import by_slots, refused_attention, wrong_here
from .launch import why_not
from .sources import implementation, load, says, unavailable
from .vllm_stubs import KVQuantMode, stubs

MASKS = (
    "image_spans",
    "chunked_attention",
    "sink_tokens",
    "alibi_sqrt",
    "two_sided_window",
    "spans_in_window",
)
"""Optional features of problems that these arguments say."""


def _unsaid_mask(problem: AttentionProblem, *, causal: bool) -> str | None:
    """Return which masks the arguments cannot say; None if they say a problem's.

    Args:
        problem: the problem of attention.
        causal: whether all of its requests are.
    """
    return first_reason(
        (problem.chunk and not causal, "chunks hide earlier keys only"),
        (problem.chunk and problem.window_left >= 0, "a chunk is the window of the call"),
        (problem.chunk and problem.spans, "no model has chunks and ranges that see both ways"),
        (problem.chunk and problem.sink_tokens,
         "the first keys are those of a window, not a chunk"),
        (problem.window_left >= 0 and not causal and problem.sink_tokens,
         "a window with first keys has no right side"),
    )  # fmt: skip


def _mask_key(problem: AttentionProblem) -> tuple[Hashable, ...]:
    """Name what is compiled in."""
    kept = problem.sink_tokens > 0 and problem.window_left >= 0
    return problem.spans, problem.chunk, kept, problem.alibi_function, problem.spans_in_window


def _mask_arguments(inputs: PagedAttentionInputs) -> tuple[int, dict[str, Any]]:
    """Return how many keys before a query are seen, -1 for all, and the arguments beside it."""
    left, found = inputs.window_left, dict[str, Any]()
    lengths = inputs.metadata.seq_lens
    if inputs.spans is not None and inputs.spans.shape[1]:
        # vLLM's ranges are of tokens that are there, and end with their last one.
        start, stop = inputs.spans.unbind(-1)
        stop = torch.minimum(stop, lengths[:, None])
        found["mm_prefix_range"] = torch.stack((start, stop - 1), -1).int().contiguous()
        if inputs.spans_in_window:
            found["mm_prefix_clamp_sliding_window"] = True
    if inputs.attention_chunk_size:
        # A window of a whole number of chunks is that many chunks, less those looked back at.
        left, found["chunk_lookback"] = inputs.attention_chunk_size - 1, 0
    if inputs.sink_tokens and left >= 0:
        found["rswa_prefix_lens"] = torch.full_like(lengths, inputs.sink_tokens)
        found["rswa_window"] = left + 1
        left = -1  # a layer has either window
    if inputs.alibi_function == "sqrt":
        found["use_alibi_sqrt"] = True
    return left, found


NAME = "ops.triton_unified_attention"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")
SEGMENTS, INTERPRETED_SEGMENTS = 16, 4
"""Most parts of a request's keys, which the caller chooses: each is a program, slow interpreted."""
TILE, DECODE_TILE, LARGEST_TILE = 32, 16, 128
"""Keys of tiles: of the 2D kernel, of the 3D kernel, and of the 2D kernel on SM100."""
ARITHMETIC = Arithmetic(
    probabilities="inputs",
    operands="tfloat32",
    dequantized="inputs",
    tanh="sigmoid",
    row_scales="products",
)
"""``tl.dot`` takes TF32 of float32 on a GPU; a soft cap is 1 - 2 / (exp(2 x) + 1)."""
SCRATCH = ("output", "max", "expsum")
"""What the 3D kernel keeps of each segment of keys: the arguments ``softmax_segm_...``."""
ANY_REQUESTS = 2**30
"""Number of requests up to which the 3D kernel is asked for: more than any batch has."""
LARGE_HEAD = 256
"""Channels for which SM100 has larger tiles where requests have several queries."""
BY_TOKEN = {
    torch.int8: KVQuantMode.INT8_PER_TOKEN_HEAD,
    torch.float8_e4m3fn: KVQuantMode.FP8_PER_TOKEN_HEAD,
}
"""vLLM's quantisation modes of caches with a scale for each token and head, by dtype."""
IN_FP8 = tuple((f"float8_e4m3fn{storage}", "float8_e4m3fn") for storage in ("", " as uint8"))
"""Caches and queries of products in FP8."""
LEAST_IN_FP8 = 32
"""Channels, and keys of a tile, of a product in FP8."""
LEAST_TILE = 16
"""Keys that a descriptor reads at least: vLLM's pages are multiples of it."""
ALIGNED = 16
"""Bytes of which bases and strides of a descriptor are multiples."""
COLUMNS = 32
"""Columns by a multiple of which rows of a block table lie apart, as an engine's do: Triton
compiles for that."""


NO_BIAS = {"USE_QQ_BIAS": "vllm/v1/attention/backends/triton_attn.py:697 of vllm 0.33.0"}
"""The flag of biases between queries, which this call and the others in vLLM do not pass."""
NO_DESCRIPTORS = dict.fromkeys(
    ("USE_TD", "USE_TD_QO"), "vllm/v1/attention/backends/triton_attn.py:574 of vllm 0.33.0"
)
"""Flags of tensor descriptors, which that line sets on Intel's GPUs only."""
LATER: tuple[tuple[str, Callable[[AttentionProblem], bool], str], ...] = (
    ("USE_CAUSAL", lambda problem: not problem.causal, "causal attention only"),
    ("USE_PER_SEQ_CAUSAL", lambda problem: problem.causal_by_request,
     "one causal flag for all requests"),
    ("k_scale_cache", lambda problem: problem.cache_entry.scaled_by_token,
     "no scales of tokens and heads"),
    ("output_scale", lambda problem: problem.output_scale is not None, "no outputs in FP8"),
    ("MAX_MM_RANGES", lambda problem: bool(problem.spans), "no ranges that see both ways"),
    ("chunk_lookback", lambda problem: problem.chunk > 0, "no chunks"),
    ("rswa_window", lambda problem: problem.sink_tokens > 0, "no keys that a window never hides"),
    ("mm_prefix_clamp_sliding_window", lambda problem: problem.spans_in_window,
     "no ranges within a window"),
    ("sw_mask_v", lambda problem: problem.two_sided_window, "no window with two sides"),
    ("Q_IS_FP8", lambda problem: bool(problem.q_dtype), "no queries in FP8"),
    ("use_alibi_sqrt", lambda problem: problem.alibi_function == "sqrt", "no root of a distance"),
)  # fmt: skip
"""What older releases do not have: a word of the file, whose problems need it, and the reason."""


def _supports(problem: AttentionProblem, target: Target) -> bool | str:
    if any(t > s for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)):
        return "every query is one of the keys: a request has no more queries than keys"
    for word, needed, reason in LATER:
        if needed(problem) and not says(FILE, word):
            return f"this release has {reason}"
    if problem.window_left >= 0 and not (_all_causal(problem) or problem.two_sided_window):
        return "a window without a causal mask has two sides"
    unsaid = _unsaid_mask(problem, causal=_all_causal(problem))
    if unsaid:
        return unsaid
    linear = problem.alibi and problem.alibi_function == "linear"
    if linear and problem.sinks and max(problem.query_lens, default=0) > 1:
        return "ALiBi is counted from the first new token, which sinks know nothing of"
    wrong = refused_attention(problem) or _no_product(problem)
    return wrong or wrong_here(target, _in_fp8(problem)) or unavailable(FILE, target) or True


def _no_product(problem: AttentionProblem) -> str | None:
    """Return why queries in FP8 are not multiplied; None if they are, or there are none."""
    if not problem.q_dtype:
        return None
    return first_reason(
        ((problem.kv_cache, problem.q_dtype) not in IN_FP8,
         "queries in FP8 meet a cache in the FP8 of the platform, float8_e4m3fn"),
        (problem.head_dim_qk < LEAST_IN_FP8,
         f"a product in FP8 takes {LEAST_IN_FP8} channels or more"),
    )  # fmt: skip


def _supports_3d(problem: AttentionProblem, target: Target) -> bool | str:
    wrong = _supports(problem, target)
    if wrong is not True:
        return wrong
    return _takes_2d(problem, max(problem.query_lens, default=0), target) or True


def _takes_2d(problem: AttentionProblem, queries: int, target: Target) -> str:
    """Return why this release takes its 2D kernel though it has scratch; empty if it does not.

    Args:
        problem: the problem of the call.
        queries: most query tokens of a request, as the host says.
        target: machine.
    """
    why = why_not(FILE, "unified_attention", "use_3d", "seq_threshold_3D", {
        **scratch_is_given(problem),
        "max_seqlen_q": queries,
        "use_causal": problem.causal or problem.causal_by_request,
        "use_per_seq_causal": problem.causal_by_request,
        "use_mm_prefix": bool(problem.spans),
        "head_size": problem.head_dim_qk,
        "num_queries_per_kv": problem.group_size,
        "is_device_capability_family": lambda family: (target.sm or 0) // 10 == family // 10,
    })  # fmt: skip
    return why_2d(why)


def why_2d(why: str | None) -> str:
    """Return in words what ``why_not`` found; empty where the 3D kernel is taken."""
    if why == "":
        return "this release chooses between its 2D and 3D kernels by itself"
    return f"this release takes its 2D kernel: {why}" if why else ""


def scratch_is_given(problem: AttentionProblem) -> dict[str, Any]:
    """Return what ``why_not`` is to know of a call with scratch for each token."""
    tokens = sum(problem.query_lens)
    names = ("num_par_softmax_segments", *(f"softmax_segm_{each}" for each in SCRATCH))
    return {
        **dict.fromkeys(names, True),
        "softmax_segm_output.shape[0]": tokens,
        "q.shape[0]": tokens,
        "seq_threshold_3D": ANY_REQUESTS,
        "num_seqs": len(problem.query_lens),
        "is_batch_invariant": False,
        "BLOCK_Q": 1,
        "cdiv": lambda one, other: -(-one // other),
    }


def _by_descriptors(
    supports: Callable[[AttentionProblem, Target], Any], tile: int
) -> Callable[[AttentionProblem, Target], Any]:
    """Add to what is refused what tensor descriptors do not take."""

    def supports_descriptors(problem: AttentionProblem, target: Target) -> Any:  # noqa: ANN401
        if problem.empty_batch:
            return "engines make no call without a token"
        # The kernel asserts that a page has whole tiles.
        if problem.page_size < LEAST_TILE or problem.page_size % min(tile, problem.page_size):
            return f"a descriptor reads {LEAST_TILE} keys or {tile} of a page that has whole tiles"
        if problem.q_dtype and problem.page_size < LEAST_IN_FP8 and target.device != "cpu":
            return f"a product in FP8 takes {LEAST_IN_FP8} keys of a page or more"
        least = 1 if problem.cache_entry.dtype.itemsize == 1 else 2
        if problem.head_dim_qk * least % ALIGNED:
            return f"strides of a descriptor are multiples of {ALIGNED} bytes"
        if not says(FILE, "use_td") and says(FILE, "unified_attention"):
            return "this release has no tensor descriptors"
        return supports(problem, target)

    return supports_descriptors


def _in_fp8(problem: AttentionProblem) -> str:
    """Name what is FP8; empty if nothing is."""
    kv_cache = "" if problem.cache_entry.dtype == torch.int8 else problem.kv_cache
    return kv_cache or ("an output" if problem.output_scale is not None else "")


def _all_causal(problem: AttentionProblem) -> bool:
    return problem.causal and not problem.causal_by_request


def _compile_key(problem: AttentionProblem) -> Hashable:
    """Name the constants of the kernel; strides matter where they are no multiples of 16."""
    strides = (problem.strided_q, problem.strided_kv, problem.kv_layout, problem.kv_views)
    several = max(problem.query_lens, default=0) > 1
    return (
        problem.dtype, problem.kv_cache, problem.head_dim_qk, problem.num_kv_heads,
        problem.group_size, problem.page_size, problem.window_left, problem.causal, problem.sinks,
        problem.logits_soft_cap > 0, problem.alibi, strides if problem.head_dim_qk % 16 else None,
        several and problem.head_dim_qk == LARGE_HEAD, problem.causal_by_request,
        problem.output_scale is not None, problem.q_dtype, problem.two_sided_window,
        *_mask_key(problem),
    )  # fmt: skip


def _kernels(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """Yield batches of one request, of 2 and of 16: Triton compiles for 1 and multiples of 16."""
    for requests, length in itertools.product(
        (1, 2, 16), (1, 2) if problem.head_dim_qk == LARGE_HEAD else (1,)
    ):
        lengths = (length,) * requests
        yield replace(
            problem, query_lens=lengths, seq_lens=lengths, request_ids=(), shared_prefix_pages=0
        )


unified = functools.partial(
    implementation,
    "paged_attention",
    provider="vllm",
    features=(
        "fp8_kv",
        "large_caches",
        "fp8_q",
        "per_token_head_kv",
        "output_scale",
        "host_bounds",
        "alibi",
        "causal_by_request",
        "kv_views",
        *MASKS,
        ALGEBRA,
    ),
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=_compile_key,
    kernels=_kernels,
    build_ahead="cuda",
    build_minutes=0.05,
    build_compilers=1,
)


@unified(
    name="vllm-unified-attention",
    supports=_supports,
    tile=TILE,
    unset_flags={**NO_BIAS, **NO_DESCRIPTORS},
)
def attend_2d(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with the 2D kernel: no scratch is given."""
    return _attend(inputs)


@unified(
    name="vllm-unified-attention-3d",
    supports=_supports_3d,
    tile=DECODE_TILE,
    split=DECODE_TILE,
    unset_flags={**NO_BIAS, **NO_DESCRIPTORS},
)
def attend_3d(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with the 3D kernel, whose scratch holds NaN before."""
    return _attend_3d(inputs)


def scratch_for(inputs: PagedAttentionInputs, channels: int) -> dict[str, Any]:
    """Return the arguments that have vLLM take its 3D kernel: scratch that holds NaN, and room."""
    segments = SEGMENTS if inputs.q.is_cuda else INTERPRETED_SEGMENTS
    shape = (*inputs.q.shape[:2], segments)
    last = {"output": (1 << (channels - 1).bit_length(),)}
    return {
        "seq_threshold_3D": ANY_REQUESTS,
        "num_par_softmax_segments": segments,
        **{
            f"softmax_segm_{name}": inputs.q.new_full(
                (*shape, *last.get(name, ())), torch.nan, dtype=torch.float32
            )
            for name in SCRATCH
        },
    }


def padded_table(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Return the block table with room for whole tiles, and no more: its last row ends there.

    Other rows have room for a longer request; what is behind one's is garbage.
    """
    table, size = inputs.block_table, inputs.metadata.page_size
    tile = LARGEST_TILE if table.is_cuda else TILE
    pages = min(-(-inputs.max_kv_len // size), table.shape[1])  # the bound may be above the truth
    needed = -(-(-(-max(pages, 1) * size // tile) * tile) // size)
    stride = -(-needed // COLUMNS) * COLUMNS
    room = table.new_full((max(len(table) - 1, 0) * stride + needed,), -1)
    padded = room.as_strided((len(table), needed), (stride, 1))
    padded[:, :pages] = table[:, :pages]
    return padded


def _attend_3d(
    inputs: PagedAttentionInputs,
    **more: Any,  # noqa: ANN401  arguments of vLLM's
) -> tuple[torch.Tensor | None, None]:
    scratch = scratch_for(inputs, inputs.q.shape[2])
    # A bound that is larger than the truth must not choose the other kernel.
    inputs = replace(inputs, q_len_bound=0)
    result = _attend(inputs, **scratch, **more)
    if len(inputs.q) and scratch["softmax_segm_max"].isnan().all():
        message = "vLLM took its 2D kernel for this call"
        raise UnsupportedError(message)
    return result


@unified(name="vllm-unified-attention-td", supports=_by_descriptors(_supports, TILE), tile=TILE)
def attend_2d_td(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with the 2D kernel, which reads and writes by tensor descriptors."""
    return _attend(inputs, use_td=True)


@unified(
    name="vllm-unified-attention-3d-td", supports=_by_descriptors(_supports_3d, DECODE_TILE),
    tile=DECODE_TILE, split=DECODE_TILE,
)  # fmt: skip
def attend_3d_td(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with the 3D kernel, which reads and writes by tensor descriptors."""
    return _attend_3d(inputs, use_td=True)


def _attend(
    inputs: PagedAttentionInputs,
    **more: Any,  # noqa: ANN401  arguments of vLLM's
) -> tuple[torch.Tensor | None, None]:
    caches = [by_slots(each, inputs.kv_layout) for each in (inputs.k_cache, inputs.v_cache)]
    metadata = inputs.metadata
    scales: list[torch.Tensor | None] = [None, None]
    if inputs.kv_cache_sf is not None:
        of_tokens = [by_slots(each, inputs.kv_layout)[..., 0] for each in inputs.kv_cache_sf]
        more |= {"k_scale_cache": of_tokens[0], "v_scale_cache": of_tokens[1]}
        more["kv_quant_mode"] = BY_TOKEN[caches[0].dtype]
    elif inputs.kv_format is not None:
        caches = [inputs.kv_format.view(each) for each in caches]
        scales = [
            inputs.q.new_tensor(each, dtype=torch.float32)
            for each in (inputs.k_scale, inputs.v_scale)
        ]
        if says(FILE, "KVQuantMode"):
            more["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    out = inputs.out
    if inputs.output_scale is not None and out is not None:
        more["output_scale"] = inputs.q.new_tensor([inputs.output_scale], dtype=torch.float32)
    causal = inputs.causal
    causal = causal.int() if isinstance(causal, torch.Tensor) else causal
    left, structure = _mask_arguments(inputs)
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
        kernels.unified_attention(
            q=inputs.q,
            k=caches[0],
            v=caches[1],
            out=out,
            cu_seqlens_q=metadata.qo_indptr,
            max_seqlen_q=inputs.max_q_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=inputs.max_kv_len,
            softmax_scale=inputs.sm_scale,
            causal=causal,
            window_size=(left, 0 if causal is True else -1),
            block_table=padded_table(inputs),
            softcap=inputs.logits_soft_cap,
            q_descale=inputs.q.new_tensor(inputs.q_scale, dtype=torch.float32)
            if inputs.q.dtype.itemsize == 1
            else None,
            k_descale=scales[0],
            v_descale=scales[1],
            sinks=inputs.sinks,
            alibi_slopes=inputs.alibi_slopes,
            **structure,
            **more,
        )
    return inputs.out, None
