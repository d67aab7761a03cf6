"""Reads of a list of kernels whether it has any for a kind of call, where nothing can be built.

That is weaker than a selection and misleads both ways: the host may take no kernel that is listed,
and may take one of other types than those that it is called with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....impl.gating import Feature
from .asking import Answer, Selection
from .kernels import Kernel, KernelList
from .questions import calls_of

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
Key = tuple[int, str, str, str, str, str, bool]


def list_kernels(
    kernels: KernelList, features: Sequence[Feature], chips: Sequence[int]
) -> Iterator[Selection]:
    """Yield for each kind of call and chip whether some kernel is listed for it."""
    listed: dict[Key, Kernel] = {}
    for sm in chips:
        for kernel in kernels.kernels:
            if kernel.runs_on(sm):
                listed.setdefault(_offered(kernel, sm), kernel)
    for sm in chips:
        for feature in features:
            found = listed.get(_wanted(feature, sm))
            call = calls_of(feature)[0]
            answer = Answer(call, kernel=found.name) if found else Answer(call, error=ABSENT)
            yield Selection(feature, sm, (answer,))


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
