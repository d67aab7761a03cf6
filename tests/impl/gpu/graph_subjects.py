"""Implementations that the tests of graphs judge in a worker."""

from __future__ import annotations

from kernelproof.impl import implementation
from kernelproof.impl.gpu.cuda_graphs import Pair, Replays
from kernelproof.impl.triton.attention import ARITHMETIC, PAGED_FEATURES, paged
from kernelproof.impl.triton.graphs import TritonGraphSession
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

_replays = Replays(TritonGraphSession)


@implementation(
    "paged_attention",
    name="triton-attention-replayed",
    supports=paged.supports,
    features=tuple(name for name in PAGED_FEATURES if name != "custom_mask"),
    arithmetic=ARITHMETIC,
    session=TritonGraphSession,
)
def replayed(inputs: PagedAttentionInputs) -> Pair:
    """Attend as triton-attention-graph does, on a CPU too, where a replay is one more launch."""
    return _replays(inputs)
