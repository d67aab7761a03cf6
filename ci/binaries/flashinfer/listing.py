"""Reads of a list of kernels whether it has any for a kind of call, where nothing can be built.

That is weaker than a selection and misleads both ways: the host may take no kernel that is listed,
and may take one of other types than those that it is called with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ....impl.gating import Feature
from .asking import Answer, Selection
from .kernels import Kernel, KernelList
from .questions import GEMM, MOE, calls_of

LISTED = "listed"
"""The level of such an answer, below all levels of evidence."""
NAMES = {
    "bfloat16": "DATA_TYPE_BF16",
    "float16": "DATA_TYPE_FP16",
    "float8_e4m3fn": "DATA_TYPE_E4M3",
    "nvfp4": "DATA_TYPE_E2M1",
}
"""The list's name of a type."""
SEPARATE, PAGED = "0", "2"
"""Layouts of queries, keys and values: FlashInfer's ``QkvLayout``."""
CONTEXT = "0"
"""The kernel type of prefill: FlashInfer's ``FmhaKernelType``."""
ABSENT = "the list has no kernel of these types and head dims for this chip"
MOE_TYPES = {
    "none": "Bfloat16Bfloat16",
    "fp8_per_tensor": "E4m3E4m3",
    "fp8_block": "E4m3E4m3",
    "mxfp8": "MxE4m3MxE4m3",
    "nvfp4": "E2m1E2m1",
    "mxfp4": "MxE2m1Bfloat16",
    "mxfp8_mxfp4": "MxE2m1MxE4m3",
    "w4a16": "MxInt4Bfloat16",
    "w4a8": "MxE2m1E4m3",
}
"""Types of weights and hidden states in the names of GEMMs, by the quantisation of the weights."""
MOE_ACTIVATIONS = {
    "swiglu": "swiGlu",
    "swiglu_oai": "swiGlu",
    "geglu": "geGlu",
    "relu2": "relu2",
    "identity": "",
}
"""What the names of first GEMMs say of their activation."""
MOE_BLOCKS = "dsFp8"
"""Part of the names of GEMMs with DeepSeek's scales of blocks; SwiGLU is another kernel then."""
_GEMM = re.compile(r"(?:bmm|gemm)_[^_]+_([^_]+)_")
Key = tuple[int, str, str, str, str, str, bool]


def list_kernels(
    kernels: KernelList, features: Sequence[Feature], chips: Sequence[int]
) -> Iterator[Selection]:
    """Yield for each kind of call and chip whether some kernel is listed for it.

    All kinds are of attention, or all of MoE, or all of GEMMs.
    """
    if any(each.operation in (MOE, GEMM) for each in features):
        yield from _list_gemms(kernels, features, chips)
        return
    listed: dict[Key, Kernel] = {}
    for sm in chips:
        for kernel in kernels.kernels:
            if kernel.runs_on(sm):
                listed.setdefault(_offered(kernel, sm), kernel)
    for sm in chips:
        for feature in features:
            yield _said(feature, sm, listed.get(_wanted(feature, sm)))


def _said(feature: Feature, sm: int, found: Kernel | None) -> Selection:
    call = calls_of(feature)[0]
    answer = Answer(call, kernel=found.name) if found else Answer(call, error=ABSENT)
    return Selection(feature, sm, (answer,))


def _list_gemms(
    kernels: KernelList, features: Sequence[Feature], chips: Sequence[int]
) -> Iterator[Selection]:
    """Yield the same of GEMMs: of MoE, whether a first one with its activation is listed."""
    for sm in chips:
        here = [each for each in kernels.kernels if each.runs_on(sm)]
        for feature in features:
            found = next((each for each in here if _multiplies(each.name, feature)), None)
            yield _said(feature, sm, found)


def _multiplies(name: str, feature: Feature) -> bool:
    types, activation = _GEMM.match(name), MOE_ACTIVATIONS.get(feature.activation)
    if types is None or types[1] != MOE_TYPES[feature.quantisation] or activation is None:
        return False
    blocks = feature.quantisation == "fp8_block"
    if (MOE_BLOCKS in name) != blocks:
        return False
    if feature.operation == GEMM:
        return feature.q_dtype == "bfloat16"
    if blocks:
        return activation == "swiGlu"
    said = next((each for each in MOE_ACTIVATIONS.values() if each and each in name), "")
    return feature.q_dtype != "float16" and said == activation


def _offered(kernel: Kernel, sm: int) -> Key:
    column = kernel.fields
    names = ("mDataTypeQ", "mDataTypeKv", "mHeadDimQk", "mHeadDimV", "mQkvLayout")
    q, kv, query, value, layout = (column[name] for name in names)
    return sm, q, kv, query, value, layout, column["mKernelType"] == CONTEXT


def _wanted(feature: Feature, sm: int) -> Key:
    layout = SEPARATE if feature.operation == "ragged_attention" else PAGED
    dims = str(feature.head_dim_qk), str(feature.head_dim_vo)
    types = NAMES[feature.q_dtype], NAMES[feature.kv_dtype]
    return sm, *types, *dims, layout, feature.phase == "prefill"
