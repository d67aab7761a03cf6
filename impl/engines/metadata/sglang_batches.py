"""SGLang's Triton kernels that prepare a batch before attention runs."""

from __future__ import annotations

import torch

from ....reference import BatchProblem
from ....reference.attention.splits import planned
from ....reference.tensors.preparation import BatchInputs
from ..sglang_calls import file_of, stubs
from ..sources import load
from .batches import builder, next_power_of_two, scratch

INDICES_FILE = file_of("kv_indices")
POSITIONS_FILE = file_of("position")
METADATA_FILE = file_of("metadata")
PAD_FILE = file_of("pad")
READ_TABLE_FILE = "sglang.kernels.ops.kvcache.kv_read_table"
TRTLLM_TABLE_FILE = file_of("trtllm_mha_page_table")
TRTLLM_GRAPH_FILE = file_of("trtllm_mha_graph_metadata")
LENGTHS = {"seq_lens": "kept", "kv_indptr": "kept", "query_start_loc": "kept"}
"""Outputs of the fused kernels beside the table of pages."""
CLOSE = 1e-3
"""Distance of a number of programs from a whole one below which float32's logarithm may round to
either: a few units in the last place of a logarithm below 16, times some hundred cores."""
MOST_SLOTS = 2**20
"""Slots of a pool, a power of two above those that problems have."""


def is_power_of_two(problem: BatchProblem) -> str | bool:
    """Whether pages have a power of two keys; a reason where not."""
    size = problem.page_size
    return size & (size - 1) == 0 or "a page has a power of two keys"


@builder(
    "sglang-kv-indices",
    INDICES_FILE,
    "create_flashinfer_kv_indices_triton",
    {"kv_indices": "kept"},
    windows=True,
)
def kv_indices(inputs: BatchInputs) -> None:
    """Copy slots of keys from a table of slots, by one program a request."""
    _copy_slots(inputs, inputs.token_table)


@builder(
    "sglang-kv-indices-of-pages",
    INDICES_FILE,
    "TOKEN_BLOCK_PARALLEL",
    {"kv_indices": "kept"},
    windows=True,
    more=is_power_of_two,
)
def kv_indices_of_pages(inputs: BatchInputs) -> None:
    """Compute slots of keys from pages of another pool, by several programs a request."""
    _copy_slots(
        inputs,
        inputs.block_table ^ 1,
        blocks=2,
        ENTRY_PAGE_SIZE=inputs.page_size,
        token_mapping=other_pool(inputs, inputs.page_size),
    )


def other_pool(inputs: BatchInputs, bit: int) -> torch.Tensor:
    """Return the place of each slot, or page, in another pool: its number with one bit changed."""
    return torch.arange(MOST_SLOTS, device=inputs.buffer.device) ^ bit


def _copy_slots(
    inputs: BatchInputs, table: torch.Tensor, *, blocks: int = 0, **options: object
) -> None:
    grid = (len(inputs.rows), blocks) if blocks else (len(inputs.rows),)
    options |= {"TOKEN_BLOCK_PARALLEL": True} if blocks else {}
    windowed = inputs.window_left >= 0
    with load(INDICES_FILE, stubs) as kernels:
        kernels.create_flashinfer_kv_indices_triton[grid](
            table,
            inputs.rows.long(),
            (inputs.seq_lens - inputs.first_keys).long(),
            inputs.kv_indptr,
            inputs.first_keys if windowed else None,
            inputs.buffer,
            table.stride(0),
            **options,
        )


@builder(
    "sglang-chunked-kv-indices",
    INDICES_FILE,
    "create_chunked_prefix_cache_kv_indices",
    {"kv_indices": "kept"},
    windows=True,
    sized=True,
)
def chunked_kv_indices(inputs: BatchInputs) -> None:
    """Copy slots of keys from a table of slots, those of a chunk."""
    with load(INDICES_FILE, stubs) as kernels:
        kernels.create_chunked_prefix_cache_kv_indices[(len(inputs.rows),)](
            inputs.token_table,
            inputs.rows.long(),
            inputs.first_keys,
            inputs.seq_lens - inputs.first_keys,
            inputs.kv_indptr,
            inputs.buffer,
            inputs.token_table.stride(0),
        )


@builder(
    "sglang-flashmla-kv-indices",
    INDICES_FILE,
    "get_num_kv_index_blocks_flashmla",
    {"page_table": "kept"},
    more=is_power_of_two,
    sized=True,
)
def flashmla_kv_indices(inputs: BatchInputs) -> None:
    """Compute a table of pages from one of slots, by a program for 4096 keys."""
    buffer = inputs.buffer
    with load(INDICES_FILE, stubs) as kernels:
        blocks = kernels.get_num_kv_index_blocks_flashmla(buffer.shape[1], inputs.page_size)
        kernels.create_flashmla_kv_indices_triton[(len(inputs.rows), blocks)](
            inputs.token_table,
            inputs.rows.long(),
            inputs.seq_lens.long(),
            None,
            buffer,
            inputs.token_table.stride(0),
            buffer.stride(0),
            PAGED_SIZE=inputs.page_size,
        )


def _has_requests(problem: BatchProblem) -> str | bool:
    if not all(keys for _, keys in problem.steps):
        return "a batch has a request"
    return is_power_of_two(problem)


@builder(
    "sglang-positions",
    POSITIONS_FILE,
    "compute_position_kernel",
    {"positions": "kept", "query_starts": "kept"},
)
def positions(inputs: BatchInputs) -> None:
    """Write positions of new tokens, and where those of each request begin."""
    tokens, requests = int(inputs.query_start_loc[-1]), len(inputs.rows)
    news = inputs.query_start_loc.diff()
    with load(POSITIONS_FILE, stubs) as kernels:
        kernels.compute_position_kernel[(requests,)](
            scratch(inputs, "positions", tokens, torch.int64),
            scratch(inputs, "query_starts", requests, torch.int32),
            inputs.seq_lens - news,
            news,
            True,  # noqa: FBT003  a constant of the kernel
        )


@builder("sglang-seqlens-expand", PAD_FILE, "seqlens_expand_kernel", {"token_seq_lens": "kept"})
def token_seq_lens(inputs: BatchInputs) -> None:
    """Write how many keys each new token sees, by one block a request."""
    news = inputs.query_start_loc.diff()
    longest = int(news.max()) if len(news) else 1
    with load(PAD_FILE, stubs) as kernels:
        kernels.seqlens_expand_kernel[(len(news),)](
            news,
            inputs.seq_lens,
            inputs.query_start_loc,
            inputs.buffer,
            len(news),
            BLOCK=next_power_of_two(longest),
        )


def _lengths(inputs: BatchInputs, output: str, size: int) -> torch.Tensor:
    return scratch(inputs, output, size, torch.int32)[:size]


def _table(inputs: BatchInputs) -> torch.Tensor:
    if inputs.output == "page_table":
        return inputs.buffer[: len(inputs.rows)]
    return inputs.block_table.new_zeros((len(inputs.rows), inputs.block_table.shape[1]))


def _decode(inputs: BatchInputs, tokens: torch.Tensor, **options: object) -> None:
    table, requests = _table(inputs), len(inputs.rows)
    swa = {"swa_page_table": table} if "full_to_swa_index_mapping" in options else {}
    table = torch.zeros_like(table) if swa else table
    delta = int(inputs.seq_lens.min() > 0)  # lengths without a key that is written meanwhile
    skip = inputs.output == "seq_lens"
    with load(METADATA_FILE, stubs) as kernels:
        kernels.normal_decode_set_metadata(
            cache_seqlens_int32=_lengths(inputs, "seq_lens", requests),
            cu_seqlens_k=_lengths(inputs, "kv_indptr", requests + 1),
            page_table=table,
            req_to_token=tokens,
            req_pool_indices=inputs.rows.long(),
            max_seq_pages=table.shape[1],
            seq_lens=inputs.seq_lens.long() - delta,
            seq_len_delta=delta,
            page_size=inputs.page_size,
            skip_page_table=skip,
            **options,
            **swa,
        )
    if skip and table.any():
        message = "a table of pages was to be left, and is written"
        raise RuntimeError(message)


def _clear_numbers(problem: BatchProblem) -> str | bool:
    """Whether each logarithm is far from a whole number of programs, where roundings decide."""
    for news, keys in problem.steps:
        programs = planned(max(keys, default=1), problem.splits[3])
        if not news:
            return "a batch has a request"
        if 0 < abs(programs - round(programs)) < CLOSE:
            return "the logarithm of the longest request is rounded in float32"
    return True


@builder(
    "sglang-num-kv-splits",
    METADATA_FILE,
    "get_num_kv_splits_triton",
    {"num_kv_splits": "kept"},
    more=_clear_numbers,
)
def num_kv_splits(inputs: BatchInputs) -> None:
    """Write into how many parts the keys of each query are divided, and whether lengths differ."""
    requests = len(inputs.rows)
    uneven = torch.full((1,), -1, dtype=torch.int32, device=inputs.buffer.device)
    with load(METADATA_FILE, stubs) as kernels:
        kernels.get_num_kv_splits_triton[(1,)](
            inputs.buffer,
            inputs.seq_lens,
            requests,
            1 + inputs.num_drafts,
            *inputs.splits,
            MAX_NUM_SEQ=next_power_of_two(requests),
            uneven_batch_ptr=uneven,
        )
    longest, shortest = int(inputs.seq_lens.max()), int(inputs.seq_lens.min())
    if int(uneven) != (longest * 4 >= shortest * 5 and longest > shortest):
        message = f"lengths from {shortest} to {longest} are said to be uneven: {int(uneven)}"
        raise RuntimeError(message)


@builder(
    "sglang-decode-metadata",
    METADATA_FILE,
    "zero_tail",
    {"seq_lens": "kept", "kv_indptr": "kept", "page_table": "kept"},
    more=_has_requests,
)
def decode_metadata(inputs: BatchInputs) -> None:
    """Write lengths, where keys begin and a table of pages in one launch."""
    _decode(inputs, inputs.token_table)


@builder(
    "sglang-decode-metadata-zero-tail",
    METADATA_FILE,
    "zero_tail",
    {"page_table": "zero_tails"},
    more=_has_requests,
)
def decode_metadata_zero_tail(inputs: BatchInputs) -> None:
    """Write them with zeros behind the pages of each request, from virtual pages."""
    tokens, pages = inputs.token_table ^ inputs.page_size, other_pool(inputs, 1)
    others, second = pages.clone(), torch.full_like(_table(inputs), -1)
    others[::3] = -1  # pages that the other pool lacks, for which the kernel writes page 0
    _decode(inputs, tokens, zero_tail=True, full_v2p=pages, swa_page_table=second, swa_v2p=others)
    first = _table(inputs)
    if not torch.equal(second, torch.where((first ^ 1) % 3 == 0, 0, first)):
        message = "a page of the second pool is another one, or not page 0 where it has none"
        raise RuntimeError(message)


@builder(
    "sglang-decode-metadata-swa",
    METADATA_FILE,
    "zero_tail",
    {"page_table": "kept"},
    more=_has_requests,
)
def decode_metadata_swa(inputs: BatchInputs) -> None:
    """Write the table of pages of a pool for layers with a window, whose slots are others."""
    mapping = other_pool(inputs, inputs.page_size)
    tokens = inputs.token_table ^ inputs.page_size
    _decode(inputs, tokens, full_to_swa_index_mapping=mapping)


@builder(
    "sglang-swa-spec-page-table",
    METADATA_FILE,
    "prepare_swa_spec_page_table_triton",
    {"page_table": "kept"},
)
def swa_spec_page_table(inputs: BatchInputs) -> None:
    """Join two halves of each request's pages, for two drafts a request."""
    table, pages = inputs.block_table[inputs.rows.long()], inputs.page_indptr.diff()
    second = pages // 2
    first, width = pages - second, table.shape[1]
    places = first.unsqueeze(1) + torch.arange(width, device=table.device)
    later = table.gather(1, places.clamp(max=max(width - 1, 0)))
    joined = _table(inputs).repeat_interleave(2, dim=0)
    with load(METADATA_FILE, stubs) as kernels:
        kernels.prepare_swa_spec_page_table_triton(
            page_table_dst=joined,
            page_table_a=table,
            page_table_b=later.repeat_interleave(2, dim=0),
            seq_len_a=first,
            seq_len_b=second.repeat_interleave(2),
            speculative_num_draft_tokens=2,
        )
    if not torch.equal(joined[::2], joined[1::2]):
        message = "two drafts of one request have different pages"
        raise RuntimeError(message)
    _table(inputs).copy_(joined[::2])


def _draft_extend(inputs: BatchInputs, tokens: torch.Tensor, **swa: torch.Tensor) -> None:
    requests, table = len(inputs.rows), _table(inputs)
    with load(METADATA_FILE, stubs) as kernels:
        kernels.draft_extend_set_metadata(
            cache_seqlens_int32=_lengths(inputs, "seq_lens", requests),
            cu_seqlens_k=_lengths(inputs, "kv_indptr", requests + 1),
            cu_seqlens_q=_lengths(inputs, "query_start_loc", requests + 1),
            page_table=torch.zeros_like(table) if swa else table,
            req_to_token=tokens,
            req_pool_indices=inputs.rows.long(),
            seq_lens=inputs.seq_lens.long(),
            extend_seq_lens=inputs.query_start_loc.diff().long(),
            page_size=inputs.page_size,
            **swa,
        )


@builder(
    "sglang-draft-extend-metadata",
    METADATA_FILE,
    "draft_extend_set_metadata",
    {**LENGTHS, "page_table": "kept"},
    more=_has_requests,
)
def draft_extend_metadata(inputs: BatchInputs) -> None:
    """Write lengths, where keys and new tokens begin and a table of pages in one launch."""
    _draft_extend(inputs, inputs.token_table)


@builder(
    "sglang-draft-extend-metadata-swa",
    METADATA_FILE,
    "draft_extend_set_metadata",
    {"page_table": "kept"},
    more=_has_requests,
)
def draft_extend_metadata_swa(inputs: BatchInputs) -> None:
    """Write the table of pages of a pool for layers with a window, and two slots a request."""
    mapping = other_pool(inputs, inputs.page_size)
    slots = torch.arange(2 * len(inputs.rows), device=mapping.device)
    written = torch.zeros_like(slots)
    _draft_extend(
        inputs,
        inputs.token_table ^ inputs.page_size,
        full_to_swa_index_mapping=mapping,
        swa_page_table=_table(inputs),
        out_cache_loc=slots,
        swa_out_cache_loc=written,
    )
    if not torch.equal(written, mapping[slots]):
        message = "slots of new tokens are not those of the other pool"
        raise RuntimeError(message)


@builder(
    "sglang-trtllm-page-table",
    TRTLLM_TABLE_FILE,
    "build_trtllm_mha_page_table",
    {"page_table": "kept"},
    more=is_power_of_two,
    sized=True,
)
def trtllm_page_table(inputs: BatchInputs) -> None:
    """Write the table of pages of a pool for layers with a window, by a program for 4096 keys."""
    table = _table(inputs)
    with load(TRTLLM_TABLE_FILE, stubs) as kernels:
        kernels.build_trtllm_mha_page_table(
            req_to_token=inputs.token_table ^ inputs.page_size,
            req_pool_indices=inputs.rows.long(),
            cache_seqlens=inputs.seq_lens,
            page_table=torch.zeros_like(table),
            page_size=inputs.page_size,
            swa_page_table=table,
            full_to_swa=other_pool(inputs, inputs.page_size),
        )


def _trtllm_graph(inputs: BatchInputs, tokens: torch.Tensor, **swa: torch.Tensor) -> None:
    requests, table = len(inputs.rows), _table(inputs)
    starts = {
        name: _lengths(inputs, name, requests + 1) for name in ("kv_indptr", "query_start_loc")
    }
    for each in starts.values():
        each[0] = 0  # the backend's buffers begin with it, and the kernel leaves it
    with load(TRTLLM_GRAPH_FILE, stubs) as kernels:
        kernels.update_trtllm_mha_graph_metadata(
            req_pool_indices=inputs.rows.long(),
            seq_lens=inputs.seq_lens.long(),
            req_to_token=tokens,
            cache_seqlens=_lengths(inputs, "seq_lens", requests),
            cu_seqlens_k=starts["kv_indptr"],
            page_table=torch.zeros_like(table) if swa else table,
            bs=requests,
            seqlen_offset=0,
            max_seq_pages=table.shape[1],
            page_size=inputs.page_size,
            cu_seqlens_q=starts["query_start_loc"],
            qlens=inputs.query_start_loc.diff(),
            q_mode=kernels.Q_MODE_CUMSUM,
            **swa,
        )


@builder(
    "sglang-trtllm-graph-metadata",
    TRTLLM_GRAPH_FILE,
    "update_trtllm_mha_graph_metadata",
    {**LENGTHS, "page_table": "kept"},
    more=is_power_of_two,
)
def trtllm_graph_metadata(inputs: BatchInputs) -> None:
    """Write lengths, where keys and new tokens begin and a table of pages for a recorded graph."""
    _trtllm_graph(inputs, inputs.token_table)


@builder(
    "sglang-trtllm-graph-metadata-swa",
    TRTLLM_GRAPH_FILE,
    "update_trtllm_mha_graph_metadata",
    {"page_table": "kept"},
    more=is_power_of_two,
)
def trtllm_graph_metadata_swa(inputs: BatchInputs) -> None:
    """Write the table of pages of a pool for layers with a window, and two slots a request."""
    mapping = other_pool(inputs, inputs.page_size)
    slots = torch.arange(2 * len(inputs.rows), device=mapping.device)
    written = torch.ones(len(slots) + 1, dtype=slots.dtype, device=slots.device)
    _trtllm_graph(
        inputs,
        inputs.token_table ^ inputs.page_size,
        swa_mapping=mapping,
        swa_page_table=_table(inputs),
        out_cache_loc=slots,
        swa_out_cache_loc=written,
    )
    if len(slots) and not torch.equal(written, torch.cat([mapping[slots], slots[:1] * 0])):
        message = "slots of new tokens are not those of the other pool, with a zero behind them"
        raise RuntimeError(message)


def _read(inputs: BatchInputs, *, width: int, **options: object) -> None:
    """Launch the kernel whose functions compute in torch on a CPU."""
    if not len(inputs.rows) or not width:
        return
    with load(READ_TABLE_FILE, stubs) as kernels:
        getattr(kernels, "_launch")(  # noqa: B009
            req_to_token=inputs.token_table ^ inputs.page_size,
            req_pool_indices=inputs.rows.long(),
            v2p=other_pool(inputs, 1),
            page_size=inputs.page_size,
            max_items=width,
            out=inputs.buffer,
            **options,
        )


def _read_table(inputs: BatchInputs, *, zero_tail: bool) -> None:
    _read(
        inputs,
        width=inputs.buffer.shape[1],
        seq_lens=inputs.seq_lens.long(),
        out_stride=inputs.buffer.stride(0),
        row_starts=None,
        kv_start_idx=None,
        emit_per_token=False,
        zero_tail=zero_tail,
    )


@builder(
    "sglang-kv-read-table", READ_TABLE_FILE, "_launch", {"page_table": "kept"}, more=is_power_of_two
)
def kv_read_table(inputs: BatchInputs) -> None:
    """Write a table of physical pages."""
    _read_table(inputs, zero_tail=False)


@builder(
    "sglang-kv-read-table-zero-tail",
    READ_TABLE_FILE,
    "_launch",
    {"page_table": "zero_tails"},
    more=is_power_of_two,
)
def kv_read_table_zero_tail(inputs: BatchInputs) -> None:
    """Write a table of physical pages, with zeros behind those of each request."""
    _read_table(inputs, zero_tail=True)


@builder(
    "sglang-kv-read-stream",
    READ_TABLE_FILE,
    "_launch",
    {"kv_indices": "kept"},
    windows=True,
    more=is_power_of_two,
)
def kv_read_stream(inputs: BatchInputs) -> None:
    """Write the slots of all keys, from virtual pages."""
    _read(
        inputs,
        width=len(inputs.buffer),
        seq_lens=(inputs.seq_lens - inputs.first_keys).long(),
        out_stride=0,
        row_starts=inputs.kv_indptr,
        kv_start_idx=inputs.first_keys if inputs.window_left >= 0 else None,
        emit_per_token=True,
    )
