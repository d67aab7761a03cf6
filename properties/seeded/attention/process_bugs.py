"""Hang and crash controls: what a kernel can do to the process that runs it."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch

from ....reference.tensors.inputs import (
    AppendInputs,
    MergeInputs,
    MetadataInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..catalogue import SeededBug, seeded
from ..honest import Built, append, build, merge_states
from ..kernels import attend, key_counts

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
LONG_REQUEST = 16
LARGE_PAGE = 64
UNSUPPORTED_GROUPS = (5, 6, 7)
EXIT_STATUS = 7


@seeded(BUGS, PAGED, "parity", control="hang", model="vllm#38730")
def spins_on_long_request(inputs: PagedAttentionInputs) -> Pair:
    """Loop for ever if a request has more than 16 keys."""
    while max(key_counts(inputs), default=0) > LONG_REQUEST:
        pass
    return attend(inputs)


@seeded(BUGS, RAGGED, "parity", control="hang", model="flashinfer#3578")
def sleeps_in_window(inputs: RaggedAttentionInputs) -> Pair:
    """Sleep for ever if there is a window."""
    while inputs.window_left >= 0:
        time.sleep(1)
    return attend(inputs)


@seeded(BUGS, "merge_state", "parity", control="hang", model="flashinfer#3279")
def waits_with_lock_held(inputs: MergeInputs) -> Pair:
    """Wait for ever inside a C call that keeps Python's lock, if there are three states."""
    if len(inputs.outs) > 2:  # noqa: PLR2004  three or more
        while True:
            ctypes.PyDLL(None).pause()
    return merge_states(inputs.outs, inputs.lses, inputs.out_dtype)


@seeded(BUGS, PAGED, "parity", control="crash", model="flashinfer#4759")
def aborts_on_chunked_prefill(inputs: PagedAttentionInputs) -> Pair:
    """Abort if a request has several queries and more keys."""
    queries = inputs.metadata.qo_indptr.diff().tolist()
    if any(s > t > 1 for t, s in zip(queries, key_counts(inputs), strict=True)):
        os.abort()
    return attend(inputs)


@seeded(BUGS, PAGED, "parity", control="crash", model="flashinfer#4299")
def segfaults_on_large_page(inputs: PagedAttentionInputs) -> Pair:
    """Read from address 0 if pages hold 64 keys or more."""
    if inputs.metadata.page_size >= LARGE_PAGE:
        ctypes.string_at(0)
    return attend(inputs)


@seeded(BUGS, RAGGED, "parity", control="crash")
def exits_with_sinks(inputs: RaggedAttentionInputs) -> Pair:
    """End the process without clean-up if there are sinks."""
    if inputs.sinks is not None:
        os._exit(EXIT_STATUS)
    return attend(inputs)


@seeded(BUGS, "append_paged_kv", "append_parity", control="crash")
def leaves_on_second_layout(inputs: AppendInputs) -> Pair:
    """Raise SystemExit if the layout is HND."""
    if inputs.kv_layout == "HND":
        sys.exit("layout HND")
    return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything


@seeded(BUGS, PAGED, "parity", control="crash", model="flashinfer#3563")
def raises_on_group_size(inputs: PagedAttentionInputs) -> Pair:
    """Raise an exception at group sizes 5, 6 and 7, which it claims to support."""
    heads = inputs.k_cache.shape[2 if inputs.kv_layout == "NHD" else 1]
    group = inputs.q.shape[1] // heads
    if group in UNSUPPORTED_GROUPS:
        message = f"Unsupported group_size: {group}"
        raise ValueError(message)
    return attend(inputs)


@seeded(BUGS, PAGED, "parity", control="crash")
def workspace_of_terabytes(inputs: PagedAttentionInputs) -> Pair:
    """Allocate a workspace for 2^40 rows if a request has more than 16 keys."""
    if max(key_counts(inputs), default=0) > LONG_REQUEST:
        torch.empty(1 << 40, inputs.q.shape[-1])
    return attend(inputs)


@seeded(BUGS, "build_metadata", "metadata_parity", control="crash")
def killed_by_empty_batch(inputs: MetadataInputs) -> Built:
    """End by SIGKILL, as the kernel's out-of-memory killer does, if a batch is empty."""
    if not len(inputs.seq_lens):
        os.kill(os.getpid(), 9)
    return build(inputs)
