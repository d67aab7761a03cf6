"""What is known of published calls: settled findings, and arithmetic that no schema says."""

from __future__ import annotations

import re
from dataclasses import dataclass

SEEN = "<=0.7.2.post1"
"""Releases up to the last one in which all of them were read or seen: later ones may differ."""


@dataclass(frozen=True)
class On:
    """What a finding was seen on.

    Attributes:
        chip: compute capability of the device, times ten; 0 of a CPU, on which none is known.
        release: version of FlashInfer.
    """

    chip: int
    release: str

    def is_of(self, releases: str) -> bool:
        """Whether the release is one of these; one without a version is of none."""
        # Imported here: a worker that has a release imports this module too.
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            return SpecifierSet(releases).contains(Version(self.release), prereleases=True)
        except InvalidVersion:
            return False


@dataclass(frozen=True)
class Known:
    """A finding that is settled.

    Attributes:
        names: pattern of the calls' names.
        laws: the laws that they break.
        reason: what is wrong, and where that was read.
        like: what a finding's sentence begins with.
        below: the compute capability, times ten, from which on they do not.
        releases: the releases in which they do.
    """

    names: re.Pattern[str]
    laws: tuple[str, ...]
    reason: str
    like: str = ""
    below: int = 1000
    releases: str = SEEN

    def explains(self, name: str, law: str, why: str, on: On) -> bool:
        """Whether it is why a call breaks a law there."""
        if law not in self.laws or not why.startswith(self.like):
            return False
        if not 0 < on.chip < self.below or self.names.fullmatch(name) is None:
            return False
        return on.is_of(self.releases)


KNOWN = (
    Known(
        re.compile(r"(silu|gelu|gelu_tanh)_and_mul"),
        ("strides",),
        "rows that are further apart are read as dense, without an error: the launcher passes a"
        " pointer and the last size only (csrc/activation.cu)",
    ),
    Known(
        re.compile(r"fused_rmsnorm_silu|layernorm(_quant)?"),
        ("strides",),
        "rows that are further apart are read as dense, without an error: the launcher asks for a"
        " dense last axis only (csrc/rmsnorm_silu.cu, csrc/norm.cu)",
    ),
    Known(
        re.compile(r"xqa|trtllm_batch_decode_with_kv_cache:trtllm_batch_decode"),
        ("strides",),
        "queries are read as dense, and strides of the cache are counted in whole heads by a"
        " division that drops the rest (csrc/xqa/mha.cu), without an error",
    ),
    Known(
        re.compile(r"(fp4|mxfp4|nvfp4|mxfp8)_quantize|silu_and_mul_scaled_nvfp4_experts_quantize"),
        ("parity", "repeats", "graph", "order", "rows", "empty"),
        "before SM100 the kernel's body is compiled to nothing (quantization.cuh): what is returned"
        " is memory as it was allocated, without an error",
        below=100,
    ),
    Known(
        re.compile("fp8_blockscale_gemm_sm90"),
        ("parity",),
        "scales of FP8 inputs, in the call's own words of shape (M, K // 128), are read column by"
        " column: with these laid out so in the same shape the answer is right (seen on SM90)",
        like="elements: 0:",
    ),
    Known(
        re.compile("fp8_blockscale_gemm_sm90"),
        ("rows",),
        "scales of FP8 inputs are read column by column, so that rows have those of others",
    ),
    Known(
        re.compile("fp8_blockscale_gemm_sm90"),
        ("strides",),
        "its launcher passes pointers only: rows that are further apart are read as dense, without"
        " an error (csrc/fp8_blockscale_gemm_sm90_binding.cu)",
    ),
    Known(
        re.compile("rope_quantize_fp8_append_paged_kv_cache"),
        ("parity",),
        "its reference appends a key's part without RoPE before that with it; the kernel has them"
        " the other way round (pos_enc.cuh)",
        like="elements: argument paged_kv_cache.0:",
    ),
    Known(
        re.compile("rope_quantize_fp8_append_paged_kv_cache"),
        ("strides",),
        "the strides of the cache of keys serve for that of values too (csrc/rope.cu)",
    ),
    Known(
        re.compile("rope_quantize_fp8_append_paged_kv_cache"),
        ("outside",),
        "the strides of the cache of keys serve for that of values too (csrc/rope.cu)",
        like="it writes outside of paged_kv_cache.1",
    ),
    Known(
        re.compile("(mla_)?rope_quantize_fp8(_append_paged_kv_cache)?|decode_cp_a2a_alltoall"),
        ("crashes",),
        "of some sizes its kernel ends with a misaligned address, where no error says which sizes"
        " it takes (seen on SM90)",
        like="it loses the device: AcceleratorError: CUDA error: misaligned address",
    ),
    Known(
        re.compile("bmm_fp8|mm_bf16:gemm_bf16"),
        ("strides",),
        "cuBLASLt's launchers pass pointers and sizes only: rows that are further apart are read"
        " as dense, without an error (csrc/bmm_fp8.cu, csrc/mm_bf16_cublaslt.cu)",
    ),
    Known(
        re.compile(r"SegmentGEMMWrapper\.run:segment_gemm_run"),
        ("strides",),
        "rows of x and weights that are further apart are read as dense, without an error: leading"
        " dimensions follow from the sizes (triton/gemm.py)",
    ),
    Known(
        re.compile(r"SegmentGEMMWrapper\.run:segment_gemm_run"),
        ("empty",),
        "it ends with an illegal access, not with an answer or an error (seen on SM90)",
        like="it loses the device: AcceleratorError: CUDA error: an illegal memory access",
    ),
    Known(
        re.compile("selective_state_update"),
        ("parity", "strides"),
        "its words promise the shape of x; of x without heads it returns an axis of one head too",
        like="shape: 0:",
    ),
    Known(
        re.compile("gated_delta_rule_decode_pretranspose:gdn_decode"),
        ("inputs",),
        "its words have the state updated in place, and its template an output of its own",
        like="it changes its input state",
    ),
    Known(
        re.compile("mono_moe"),
        ("parity",),
        "its reference has the second half of the first weights as gate; the template's text and"
        " the kernel have the first",
        like="elements: 0:",
    ),
)
"""Findings that are settled."""


@dataclass(frozen=True)
class Arithmetic:
    """Roundings of a call's kernel that its reference has not.

    Attributes:
        text: what they are, and where that was read.
        partials: whether sums of some of the terms are kept in the inputs' format of 16 bits.
        twice: whether numbers are rounded to that format before they become codes.
        unordered: whether places that it selects are in no order.
    """

    text: str
    partials: bool = False
    twice: bool = False
    unordered: bool = False


NONE = Arithmetic("")
ARITHMETIC = {
    # threadblock_sync_state of cascade.cuh
    "merge_states": Arithmetic("partial results in 16 bits", partials=True),
    # generalLayerNorm of norm.cuh
    "layernorm_quant": Arithmetic("in 16 bits before its codes", twice=True),
    # topk.py: without ``sorted`` nothing promises an order.
    "top_k_page_table_transform": Arithmetic("in no order", unordered=True),
    "top_k_ragged_transform": Arithmetic("in no order", unordered=True),
}
"""Calls whose kernels are known to round or to order what their references do not, by name."""


def known_text(name: str, law: str, why: str, on: On) -> str:
    """Return why a call breaks a law; empty if that is not known."""
    return next((each.reason for each in KNOWN if each.explains(name, law, why, on)), "")
