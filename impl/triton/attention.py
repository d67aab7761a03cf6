"""Kernelproof's own Triton attention: mixed batches in one launch, over pages or ragged keys."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...reference import Arithmetic, AttentionOutput, AttentionProblem, BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..features import ALGEBRA
from ..targets.target import Target
from .attention_call import Call
from .attention_keys import compile_key, kernels, split_kernels, split_key
from .blocks import FEWEST_KEYS, LARGEST_TILE
from .support import kernel, unavailable

ARITHMETIC = Arithmetic(accumulate="float32", probabilities="inputs")
"""Probabilities are rounded to V's dtype for the second product (not in the interpreter); to q's,
to which they are widened without an error, where K and V are quantised."""
FEATURES = ("custom_mask", "tree", "per_head_scales", "large_tensors", ALGEBRA)
PAGED_FEATURES = (*FEATURES, "fp8_kv", "nvfp4_kv", "nan_codes")
LARGEST_HEAD_DIM = 512
BUILD_MINUTES = 0.2
"""Minutes of a core to build a module: 60 modules took 46 s of 16 cores on an H200."""


def _supports(problem: AttentionProblem, target: Target) -> bool | str:
    for name in ("head_dim_qk", "head_dim_vo"):
        dim = getattr(problem, name)
        if dim % 8 or dim > LARGEST_HEAD_DIM:
            return f"{name} must be a multiple of 8 up to {LARGEST_HEAD_DIM}, not {dim}"
    return unavailable(target) or True


attention_kernel = functools.partial(
    kernel,
    supports=_supports,
    features=PAGED_FEATURES,
    arithmetic=ARITHMETIC,
    compile_key=compile_key,
    kernels=kernels,
    build_minutes=BUILD_MINUTES,
    tile=LARGEST_TILE,
)
"""``kernel``, with what the forms of attention declare alike."""


class TritonSession:
    """Metadata that were copied to the device once, for any number of launches."""

    def __init__(self) -> None:
        self._metadata: BatchMetadata | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Copy a batch's metadata to where its queries are."""
        tensors = {
            name: tensor.to(inputs.q.device, copy=True)
            for name, tensor in inputs.metadata.tensors().items()
        }
        self._metadata = BatchMetadata(**tensors, page_size=inputs.metadata.page_size)

    def publish(self, seq_lens: torch.Tensor) -> None:
        """Write exact lengths to where a launch reads them."""
        self._planned().seq_lens.copy_(seq_lens)

    def run(self, inputs: PagedAttentionInputs) -> AttentionOutput:
        """Attend to the planned batch in one launch."""
        return Call(replace(inputs, metadata=self._planned())).attend()

    def _planned(self) -> BatchMetadata:
        if self._metadata is None:
            message = "run and publish come after plan"
            raise ValueError(message)
        return self._metadata


@attention_kernel(
    "paged_attention", name="triton-attention", writes_out=True, session=TritonSession
)
def paged(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend a mixed batch of prefills and decodes in one launch.

    Args:
        inputs: q [tokens, qo_heads, head_dim_qk] in float32, float16 or bfloat16 and both caches,
            NHD or HND, strided or not, in q's dtype or as ``kv_format`` says: FP8 or NVFP4, which
            are widened to q's dtype in registers; ``out`` and ``lse`` are written where they are
            given.

    Returns:
        out [tokens, qo_heads, head_dim_vo] in ``out_dtype`` and the natural-log lse
        [tokens, qo_heads] in float32.
    """
    return Call(inputs).attend()


@attention_kernel(
    "paged_attention",
    name="triton-attention-split-kv",
    writes_out=True,
    compile_key=split_key,
    kernels=split_kernels,
    build_minutes=2 * BUILD_MINUTES,
    split=FEWEST_KEYS,
)
def split_kv(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend in two launches: to ranges of each request's keys, then merge the partial states.

    Decodes of long sequences fill a GPU this way. Shapes and dtypes are those of ``paged``.
    """
    call = Call(inputs)
    return call.attend_split(call.num_splits())


@attention_kernel(
    "ragged_attention",
    name="triton-ragged-attention",
    features=(*FEATURES, "fp8_kv"),
    writes_out=True,
)
def ragged(inputs: RaggedAttentionInputs) -> AttentionOutput:
    """Attend requests whose keys lie one after another: the same kernel, without pages.

    Args:
        inputs: q [tokens, qo_heads, head_dim_qk], k [keys, kv_heads, head_dim_qk] and v [keys,
            kv_heads, head_dim_vo] in float32, float16 or bfloat16; k and v in FP8, too.

    Returns:
        As ``paged``.
    """
    return Call(inputs).attend()
