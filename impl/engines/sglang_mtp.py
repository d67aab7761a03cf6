"""SGLang's ``unified_attention_3d_mtp``: drafts of a chain on AMD's chips, by Triton kernels.

Its function takes one shape only, bfloat16 queries, and asks a GPU how many processors it has; a
stand-in for torch answers that, and calls the queries' own dtype bfloat16.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from . import sglang_calls as sglang
from .claims import by_slots
from .sources import load, unavailable

FILE = sglang.file_of("unified_attention_3d_mtp")
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


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    dims = problem.head_dim_qk, problem.head_dim_vo
    for holds, why in (
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
    ):  # fmt: skip
        if holds:
            return why
    if target.device != "cpu":
        return Refusal("it is launched with AMD's options", "device", "a CPU")
    return unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return problem.dtype, problem.num_kv_heads, problem.strided_q, problem.kv_layout


@sglang.kernel(
    "paged_attention",
    name="sglang-unified-attention-3d-mtp",
    supports=_supports,
    features=("fp8_kv", "host_bounds"),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_compile_key,
    tile=TILE,
    split=TILE,
)
def attend(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``unified_attention_3d_mtp_func``."""
    form = inputs.kv_format
    assert form is not None  # noqa: S101  for mypy: ``_supports`` asks for FP8
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
        load(FILE, _stubs) as kernels,
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
