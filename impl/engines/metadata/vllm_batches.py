"""vLLM's Triton kernels that prepare a batch before attention runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....reference import BatchProblem
from ....reference.tensors.preparation import BatchInputs
from ...gpu.triton_interpreter import scalar_conditions
from ..sources import load
from ..vllm_stubs import QUANTISATION, Unused, stubs
from .batches import NO_COLUMN, builder, few_tokens, next_power_of_two, scratch

BATCH_FILE = "vllm.v1.worker.gpu.input_batch"
TABLES_FILE = "vllm.v1.worker.gpu.block_table"
RANKS_FILE = "vllm.v1.worker.gpu.cp_utils"
REQUESTS_FILE = "vllm.v1.attention.ops.metadata"
FLASHINFER_FILE = "vllm.v1.attention.backends.flashinfer"
IMPORTED = (
    "flashinfer",
    "flashinfer.decode",
    "flashinfer.prefill",
    "flashinfer.utils",
    "vllm.config",
    "vllm.config.cache",
    "vllm.distributed.parallel_state",
    "vllm.platforms.interface",
    "vllm.utils.flashinfer",
    "vllm.utils.gpu_sync_debug",
    "vllm.utils.torch_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.attention.ops.dcp",
    "vllm.v1.attention.ops.merge_attn_states",
    "vllm.v1.kv_cache_interface",
    f"{QUANTISATION}.quant_utils",
)
"""Modules that vLLM's backend of FlashInfer imports, and its kernel never uses."""


def stubs_of_flashinfer() -> Mapping[str, Mapping[str, object]]:
    """Stand in for all that vLLM's backend of FlashInfer imports."""
    anything = {"__getattr__": lambda _: Unused()}
    return {**stubs(), **dict.fromkeys(IMPORTED, anything)}


@builder(
    "vllm-page-indices", FLASHINFER_FILE, "_copy_page_indices_kernel", {"page_indices": "kept"}
)
def page_indices(inputs: BatchInputs) -> None:
    """Copy the pages of requests whose rows stand in the batch's order."""
    table = inputs.block_table[inputs.rows.long()]
    with load(FLASHINFER_FILE, stubs_of_flashinfer) as kernels:
        getattr(kernels, "_copy_page_indices_kernel")[(len(table),)](  # noqa: B009
            inputs.buffer, table, table.stride(0), inputs.page_indptr, BLOCK_SIZE=1024
        )


@builder(
    "vllm-positions",
    BATCH_FILE,
    "_prepare_pos_seq_lens_kernel",
    {"positions": "kept", "seq_lens": "zero_rows"},
)
def positions(inputs: BatchInputs) -> None:
    """Write positions of new tokens and lengths of requests, which are zero behind the batch."""
    tokens = int(inputs.query_start_loc[-1])
    with load(BATCH_FILE, stubs) as kernels:
        kernels.prepare_pos_seq_lens(
            idx_mapping=inputs.rows,
            query_start_loc=inputs.query_start_loc,
            num_computed_tokens=inputs.computed,
            pos=scratch(inputs, "positions", tokens, torch.int64),
            seq_lens=scratch(inputs, "seq_lens", len(inputs.rows), torch.int32),
        )


@builder(
    "vllm-expanded-rows",
    BATCH_FILE,
    "_expand_idx_mapping_kernel",
    {"token_rows": "kept", "local_positions": "kept"},
)
def expanded_rows(inputs: BatchInputs) -> None:
    """Write the row of each token's request and its place among the request's new tokens."""
    longest = int(inputs.query_start_loc.diff().max()) if len(inputs.rows) else 1
    tokens = int(inputs.query_start_loc[-1])
    with load(BATCH_FILE, stubs) as kernels:
        getattr(kernels, "_expand_idx_mapping_kernel")[(len(inputs.rows),)](  # noqa: B009
            inputs.rows,
            scratch(inputs, "token_rows", tokens, torch.int32),
            scratch(inputs, "local_positions", tokens, torch.int32),
            inputs.query_start_loc,
            BLOCK_SIZE=next_power_of_two(longest),
        )


def _has_requests(problem: BatchProblem) -> str | bool:
    return all(keys for _, keys in problem.steps) or "a batch has a request"


@builder(
    "vllm-token-to-request",
    REQUESTS_FILE,
    "compute_token_to_req_indices",
    {"token_to_request": "zero_rows"},
    more=_has_requests,
)
def token_to_request(inputs: BatchInputs) -> None:
    """Write the request of each token, by a search for it."""
    tokens = int(inputs.query_start_loc[-1])
    with load(REQUESTS_FILE, stubs) as kernels, scalar_conditions(inputs.buffer):
        kernels.compute_token_to_req_indices(
            inputs.query_start_loc, inputs.buffer, tokens, len(inputs.buffer)
        )


def _is_decode(problem: BatchProblem) -> str | bool:
    few = few_tokens(problem)
    if few is not True:
        return few
    return _has_requests(problem) if problem.columns else NO_COLUMN


@builder(
    "vllm-token-seq-lens",
    REQUESTS_FILE,
    "_indexer_decode_metadata_kernel",
    {"token_seq_lens": "zero_rows"},
    more=_is_decode,
)
def token_seq_lens(inputs: BatchInputs) -> None:
    """Write how many keys each token sees, beside its pages and its request."""
    tokens, requests = int(inputs.query_start_loc[-1]), len(inputs.rows)
    table, capacity = inputs.block_table[inputs.rows.long()], len(inputs.buffer)
    others = torch.zeros((3, tokens + requests), dtype=torch.int32, device=table.device)
    pages = table.new_zeros((tokens, table.shape[1]))
    blocks = tokens - (tokens - capacity) // 256
    with load(REQUESTS_FILE, stubs) as kernels, scalar_conditions(inputs.buffer):
        getattr(kernels, "_indexer_decode_metadata_kernel")[(max(requests, blocks),)](  # noqa: B009
            inputs.query_start_loc,
            inputs.seq_lens,
            table,
            inputs.buffer,
            pages,
            *others,
            requests,
            tokens,
            capacity,
            table.stride(0),
            pages.stride(0),
            BLOCK_COLS=table.shape[1],
        )


def _several_ranks(problem: BatchProblem) -> str | bool:
    return problem.world > 1 or "asks for a rank's lengths where there are several"


@builder(
    "vllm-local-seq-lens",
    RANKS_FILE,
    "prepare_dcp_local_seq_lens",
    {"local_seq_lens": "zero_rows"},
    more=_several_ranks,
)
def local_seq_lens(inputs: BatchInputs) -> None:
    """Write how many keys of each request a rank holds."""
    with load(RANKS_FILE, stubs) as kernels:
        kernels.prepare_dcp_local_seq_lens(
            inputs.buffer,
            inputs.seq_lens,
            len(inputs.seq_lens),
            inputs.world,
            inputs.rank,
            inputs.interleave,
        )


def _known_table(problem: BatchProblem) -> str | bool:
    if not problem.columns:
        return NO_COLUMN
    return problem.window_left != 0 or "a window of no key before its own is none"


@builder(
    "vllm-block-table",
    TABLES_FILE,
    "_gather_block_tables_kernel",
    {"page_table": "zero_rows"},
    windows=True,
    more=_known_table,
    features=(),  # addresses of tables go to the kernel, which reads int32
)
def block_table(inputs: BatchInputs) -> None:
    """Gather the requests' rows of a block table, as for one group of layers."""
    device, buffer, rows = inputs.rows.device, inputs.buffer, inputs.rows.long()
    pages = torch.zeros((1, len(inputs.block_table)), dtype=torch.int32, device=device)
    pages[0, rows] = inputs.page_indptr.diff()

    def of_group(value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    with load(TABLES_FILE, stubs) as kernels, scalar_conditions(buffer):
        getattr(kernels, "_gather_block_tables_kernel")[(1, len(buffer))](  # noqa: B009
            inputs.rows,
            of_group(inputs.block_table.data_ptr(), torch.uint64),
            of_group(buffer.data_ptr(), torch.uint64),
            of_group(buffer.stride(0), torch.int64),
            pages,
            pages.stride(0),
            len(rows),
            inputs.computed,
            of_group(max(inputs.window_left, 0), torch.int32),
            of_group(inputs.page_size, torch.int32),
            MASK_SLIDING_WINDOW=inputs.window_left >= 0,
            BLOCK_SIZE=1024,
        )
