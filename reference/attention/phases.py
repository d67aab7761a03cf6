"""The phases of a mixed batch: decodes first, then prefills, as serving stacks order them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..validation import INT32_MAX, check_lengths, checked_integer, checked_number, host_integers
from .metadata import BatchMetadata, check_metadata


def slice_phases(metadata: BatchMetadata, num_decodes: int) -> tuple[BatchMetadata, BatchMetadata]:
    """Split a batch whose first ``num_decodes`` requests are decodes into its two phases.

    Each phase is rebased: its indptrs start at 0 and index its own tokens and its own
    ``paged_kv_indices``. ``cum_seq_lens_q`` and ``cum_pages_kv`` follow from each.

    Raises:
        ValueError: ``num_decodes`` outside 0 to the number of requests.
    """
    check_metadata(metadata)
    requests = metadata.num_requests
    num_decodes = checked_integer("num_decodes", num_decodes)
    if not 0 <= num_decodes <= requests:
        message = f"num_decodes is {num_decodes}; the batch has {requests} requests"
        raise ValueError(message)
    return (
        _slice_requests(metadata, 0, num_decodes),
        _slice_requests(metadata, num_decodes, requests),
    )


def _slice_requests(metadata: BatchMetadata, start: int, end: int) -> BatchMetadata:
    qo_indptr = metadata.qo_indptr[start : end + 1]
    page_indptr = metadata.paged_kv_indptr[start : end + 1]
    first, last = int(page_indptr[0]), int(page_indptr[-1])
    return BatchMetadata(
        qo_indptr=qo_indptr - qo_indptr[0],
        paged_kv_indptr=page_indptr - page_indptr[0],
        paged_kv_indices=metadata.paged_kv_indices[first:last].clone(),
        paged_kv_last_page_len=metadata.paged_kv_last_page_len[start:end].clone(),
        seq_lens=metadata.seq_lens[start:end].clone(),
        page_size=metadata.page_size,
    )


def split_decodes_and_prefills(
    query_lens: torch.Tensor | Sequence[int],
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """Find where the decodes of a reordered batch end (vLLM's convention: decodes come first).

    Args:
        query_lens: [R], query tokens of each request.
        decode_threshold: a request of at most this many query tokens is a decode.
        require_uniform: all decodes must have the first request's length. A batch of nothing but
            that length and zeros (padding rows of a CUDA graph) is all decodes.

    Returns:
        (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens).

    Raises:
        ValueError: a negative length, or a ``decode_threshold`` below 0.
    """
    lengths = host_integers("query_lens", query_lens)
    check_lengths("query_lens", lengths)
    threshold = checked_number("decode_threshold", decode_threshold)
    if not threshold.is_integer():
        message = f"decode_threshold is {decode_threshold!r}, not an integer"
        raise ValueError(message)
    decode_threshold = int(threshold)
    if decode_threshold < 0 or decode_threshold > INT32_MAX:
        message = f"decode_threshold is {decode_threshold}; it must lie in 0 to {INT32_MAX}"
        raise ValueError(message)
    num_decodes = _count_decodes(lengths, decode_threshold, require_uniform=require_uniform)
    decode_tokens = sum(lengths[:num_decodes])
    return (
        num_decodes,
        len(lengths) - num_decodes,
        decode_tokens,
        sum(lengths) - decode_tokens,
    )


def _count_decodes(lengths: list[int], threshold: int, *, require_uniform: bool) -> int:
    if not lengths or lengths[0] > threshold:
        return 0
    if max(lengths) <= threshold and (threshold <= 1 or not require_uniform):
        return len(lengths)
    if require_uniform:
        if all(length in (lengths[0], 0) for length in lengths):
            return len(lengths)
        is_decode = [length == lengths[0] for length in lengths]
    else:
        is_decode = [length <= threshold for length in lengths]
    return is_decode.index(False) if False in is_decode else len(lengths)
