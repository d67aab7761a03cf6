"""SGLang's attention of drafts: split verification, and AMD's ``unified_attention_3d_mtp``.

The latter takes bfloat16 queries only, and asks a GPU how many processors it has: a stand-in for
torch answers that, and calls the queries' own dtype bfloat16.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target, UnsupportedError
from . import sglang_calls as sglang
from .claims import by_slots
from .sources import load, unavailable

FILE = sglang.file_of("verify_splitkv")
GROUPED_FILE = sglang.file_of("verify_mla")
LEAST_SPLIT = 32
"""Keys of the shortest part, ``_MIN_BLOCK_KV``."""
GROUPED_SPLIT = 64
"""Keys of the shortest part of ``verify_mla``, where keys have other channels than 64."""
LEAST_CHANNELS = 9
"""Channels of a part of a head from which on its power of two is one that ``tl.dot`` takes."""
LARGEST_TILE = 2**20
"""Elements of the largest tensor of Triton's: of drafts by drafts by channels."""


def _refusal(problem: AttentionProblem) -> str | None:
    lengths = zip(problem.query_lens, problem.seq_lens, strict=True)
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (not problem.uniform_queries, "each request has the same number of drafts"),
        (not problem.causal, "drafts are a chain"),
        (any(t >= s for t, s in lengths), "a verified request has a prefix"),
        (problem.window_left >= 0 or problem.sinks or problem.logits_soft_cap,
         "SGLang takes its extend kernel for windows, sinks and soft caps"),
        (any(scale not in (0.5, 1, 2) for scale in (problem.k_scale, problem.v_scale)),
         "scales are the prefix's: new keys would be rounded by another than a power of two"),
    ) or sglang.pool_refusal(problem)  # fmt: skip


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.head_dim_qk != problem.head_dim_vo:
        return "keys and values have one head dim"
    return _refusal(problem) or unavailable(FILE, target) or True


def _supports_grouped(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    rotary = problem.head_dim_qk - problem.head_dim_vo
    drafts, group = _padded(problem.most_queries), problem.group_size
    return first_reason(
        (rotary < 0, "values have no more channels than keys"),
        (problem.head_dim_vo < LEAST_CHANNELS or 0 < rotary < LEAST_CHANNELS,
         f"tl.dot takes {LEAST_CHANNELS} channels or more, which are padded to 16"),
        (problem.num_kv_heads > 1 and group != _padded(group),
         "query heads of a key-value head are a power of two where there are several of these"),
        (drafts**2 * _padded(problem.head_dim_qk) > LARGEST_TILE,
         "a tile has drafts by drafts by channels"),
    ) or _refusal(problem) or unavailable(GROUPED_FILE, target) or True  # fmt: skip


def _padded(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def _compile_key(problem: AttentionProblem) -> Hashable:
    return *sglang.strides_key(problem), problem.page_size, _padded(problem.most_queries)


@sglang.kernel(
    "paged_attention",
    name="sglang-verify-splitkv",
    supports=_supports,
    features=("large_caches", ALGEBRA),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_compile_key,
    tile=32,
    split=LEAST_SPLIT,
)
def verify(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``verify_splitkv_fwd``, whose scratch holds NaN before, as it may."""
    call, (requests, heads, kv_heads, head_dim, drafts) = _call(inputs)
    with load(FILE, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
        # What is read without being written must show: SGLang keeps its buffers from call to call.
        scratch = kernels._get_vk(  # noqa: SLF001  verify_splitkv_fwd makes them so
            requests,
            heads,
            kv_heads,
            head_dim,
            inputs.head_dim_vo,
            drafts,
            inputs.q.device,
            n_splits=kernels.choose_n_splits(len(call["kv_indices"]) / requests),
        )
        scratch.att_out.fill_(torch.nan)
        scratch.att_lse.fill_(torch.nan)
        return _ran(kernels.verify_splitkv_fwd(**call), inputs)


@sglang.kernel(
    "paged_attention",
    name="sglang-verify-mla",
    supports=_supports_grouped,
    features=("mla", "large_caches", ALGEBRA),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", partial_outputs=True),
    compile_key=_compile_key,
    tile=GROUPED_SPLIT,
    split=GROUPED_SPLIT,
)
def verify_grouped(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``verify_shared_kv_fwd``, whose scratch holds NaN before.

    SGLang stores outputs of parts in bfloat16, as its queries are; here in the queries' dtype.
    """
    call, (requests, heads, kv_heads, head_dim, drafts) = _call(inputs)
    with load(GROUPED_FILE, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
        scratch = kernels._get_vmla(  # noqa: SLF001  verify_shared_kv_fwd makes them so
            requests,
            heads,
            head_dim,
            inputs.head_dim_vo,
            drafts,
            inputs.q.device,
            heads // kv_heads,
        )
        scratch.att_out = torch.full_like(scratch.att_out, torch.nan, dtype=inputs.q.dtype)
        scratch.att_lse.fill_(torch.nan)
        return _ran(kernels.verify_shared_kv_fwd(**call), inputs)


def _call(inputs: PagedAttentionInputs) -> tuple[dict[str, Any], tuple[int, int, int, int, int]]:
    """Return the arguments, and requests, heads, key-value heads, channels and drafts."""
    lengths, queries = inputs.metadata.seq_lens, inputs.metadata.qo_indptr.diff()
    prefix, drafts = lengths - queries, int(queries.max())
    k, v = (sglang.pool(cache, inputs.kv_layout) for cache in (inputs.k_cache, inputs.v_cache))
    new = sglang.slots(inputs, prefix, queries)
    call = {
        "q_extend": inputs.q, "k_extend": k[new] * inputs.k_scale,
        "v_extend": v[new] * inputs.v_scale, "o_extend": inputs.out, "k_buffer": k, "v_buffer": v,
        "qo_indptr": inputs.metadata.qo_indptr, "kv_indptr": sglang.indptr(prefix),
        "kv_indices": sglang.slots(inputs, torch.zeros_like(prefix), prefix), "custom_mask": None,
        "is_causal": True, "mask_indptr": None, "max_len_extend": drafts,
        "k_scale": inputs.k_scale, "v_scale": inputs.v_scale, "sm_scale": inputs.sm_scale,
        "max_bs": len(lengths),
    }  # fmt: skip
    return call, (len(lengths), inputs.q.shape[1], k.shape[1], inputs.q.shape[2], drafts)


def _ran(ran: bool, inputs: PagedAttentionInputs) -> sglang.Pair:  # noqa: FBT001
    """Return what a kernel wrote, which says whether it did."""
    if not ran:
        message = "SGLang took its extend kernel for this call"
        raise UnsupportedError(message)
    return inputs.out, None


MTP = sglang.file_of("unified_attention_3d_mtp")
HEAD_DIM, PAGE, GROUP = 256, 16, 16
"""Channels of a head, keys of a page, and query heads of a key-value head: all that it takes."""
DRAFTS = range(2, 5)
"""Query tokens of the longest request."""
TILE = 32
MOST_KV_HEADS = 2
"""Key-value heads of the only model that has this shape, Qwen3.5-397B-A17B, on one GPU."""
LEAST_KEYS = 513
"""Keys of the longest request for which SGLang takes this function: one part would write no sum."""
PROCESSORS = 4
"""Processors of the GPU, which decide how many parts there are: 8, where an MI350X has up to 64."""
AITER = "aiter.ops.triton.utils"


class _Torch(ModuleType):
    """torch, as the file sees it on an AMD GPU with queries of bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("torch")
        found = SimpleNamespace(multi_processor_count=PROCESSORS)
        self.bfloat16 = dtype
        self.cuda = SimpleNamespace(get_device_properties=lambda _: found)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any of torch's
        return getattr(torch, name)


def _stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for AITER and the rest of SGLang, without its assembly kernel."""
    parts = AITER.split(".")
    found: dict[str, dict[str, object]] = {
        ".".join(parts[:n]): {} for n in range(1, len(parts) + 1)
    }
    found[f"{AITER}._triton"] = {}
    found[f"{AITER}._triton.kernel_repr"] = {"make_kernel_repr": lambda _name, _keys: None}
    found[f"{AITER}.types"] = {"e4m3_dtype": torch.float8_e4m3fn}
    found[f"{sglang.HOMES[0]}.vattn_asm_gfx950"] = {}
    found["sglang.srt.utils"] = {
        "get_hip_version": lambda: (0, 0, 0), "is_gfx95_supported": lambda: False
    }  # fmt: skip
    return found


def _supports_mtp(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    dims = problem.head_dim_qk, problem.head_dim_vo
    wrong = first_reason(
        (problem.kv_cache != "float8_e4m3fn", "its cache is FP8 (e4m3)"),
        (dims != (HEAD_DIM, HEAD_DIM) or problem.group_size != GROUP,
         f"heads have {HEAD_DIM} channels, and {GROUP} share keys"),
        (problem.num_kv_heads > MOST_KV_HEADS,
         f"the model that it is for has {MOST_KV_HEADS} key-value heads or one"),
        (problem.page_size != PAGE, f"pages have {PAGE} keys"),
        (problem.most_queries not in DRAFTS, "2 to 4 drafts are verified"),
        (problem.more_queries_than_keys, "drafts are keys"),
        (not problem.causal, "drafts are a chain"),
        (problem.window_left >= 0 or problem.sinks or problem.logits_soft_cap,
         "SGLang takes AITER's kernel for windows, sinks and soft caps"),
    )  # fmt: skip
    if wrong is None and target.device != "cpu":
        return Refusal("it is launched with AMD's options", "device", "a CPU")
    return wrong or unavailable(MTP, target) or True


def _mtp_key(problem: AttentionProblem) -> Hashable:
    return problem.dtype, problem.num_kv_heads, problem.strided_q, problem.kv_layout


@sglang.kernel(
    "paged_attention",
    name="sglang-unified-attention-3d-mtp",
    supports=_supports_mtp,
    features=("fp8_kv", "host_bounds", "large_caches", ALGEBRA),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_mtp_key,
    tile=TILE,
    split=TILE,
)
def mtp(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``unified_attention_3d_mtp_func``."""
    form = inputs.kv_format
    assert form is not None  # noqa: S101  for mypy: ``_supports_mtp`` asks for FP8
    k, v = (
        form.view(by_slots(each, inputs.kv_layout)) for each in (inputs.k_cache, inputs.v_cache)
    )
    scales = [
        inputs.q.new_tensor([each], dtype=torch.float32)
        for each in (inputs.k_scale, inputs.v_scale)
    ]
    # Whole tiles of a table are read; what is behind a request's pages is garbage.
    table = torch.nn.functional.pad(inputs.block_table, (0, TILE // PAGE), value=-1)
    with (
        load(MTP, _stubs) as kernels,
        scalars_as_bounds(inputs.q),
        mock.patch.object(kernels, "torch", _Torch(inputs.q.dtype)),
    ):
        kernels.unified_attention_3d_mtp_func(
            q=inputs.q,
            k=k,
            v=v,
            out=inputs.out,
            cu_seqlens_q=inputs.metadata.qo_indptr,
            seqused_k=inputs.metadata.seq_lens.long(),
            max_seqlen_q=min(inputs.max_q_len, DRAFTS[-1]),
            max_seqlen_k=max(inputs.max_kv_len, LEAST_KEYS),
            softmax_scale=inputs.sm_scale,
            block_table=table,
            k_descale=scales[0],
            v_descale=scales[1],
        )
    return inputs.out, None
