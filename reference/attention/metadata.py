"""Batch metadata of paged attention: how tokens and pages belong to requests.

The conventions are FlashInfer's (``qo_indptr``, ``paged_kv_indptr``, ``paged_kv_indices``,
``paged_kv_last_page_len``) as vLLM's and SGLang's builders fill them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..validation import (
    check_indptr,
    check_lengths,
    check_values,
    host_integers,
    host_integers_of,
)


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """Which tokens and pages belong to which request. R requests, int32 tensors.

    Attributes:
        qo_indptr: [R + 1]; request i owns query tokens ``qo_indptr[i]:qo_indptr[i + 1]``.
        paged_kv_indptr: [R + 1]; request i owns entries ``paged_kv_indptr[i]:[i + 1]`` of the next.
        paged_kv_indices: [pages of the batch]; physical page ids.
        paged_kv_last_page_len: [R]; keys on the last page, 1 to page_size; 0 for an empty request.
        seq_lens: [R]; keys of each request, its own query tokens included.
        page_size: keys a page.

    Raises:
        ValueError: the tensors contradict each other (checked here where they are on the CPU, and
            by every function of the oracle wherever they are: reading a GPU tensor would wait).
    """

    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int

    def __post_init__(self) -> None:
        """Validate at once where that costs no device synchronisation."""
        if all(getattr(tensor, "is_cpu", True) for tensor in self.tensors().values()):
            self.validate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the five tensors by field name."""
        return {
            "qo_indptr": self.qo_indptr,
            "paged_kv_indptr": self.paged_kv_indptr,
            "paged_kv_indices": self.paged_kv_indices,
            "paged_kv_last_page_len": self.paged_kv_last_page_len,
            "seq_lens": self.seq_lens,
        }

    @property
    def num_requests(self) -> int:
        """R, the number of requests."""
        return self.seq_lens.shape[0]

    @property
    def cum_seq_lens_q(self) -> torch.Tensor:
        """[R + 1] int32, cumulative query *tokens* from 0 (trtllm-gen's name of qo_indptr)."""
        return self.qo_indptr - self.qo_indptr[0]

    @property
    def cum_pages_kv(self) -> torch.Tensor:
        """[R + 1] int32, cumulative *pages* from 0 (trtllm-gen calls it ``cum_seq_lens_kv``)."""
        return self.paged_kv_indptr - self.paged_kv_indptr[0]

    def slot_mapping(self) -> torch.Tensor:
        """Return the slot of each new token in a paged cache: [tokens] int64, page * size + offset.

        The new tokens of a request are its last keys, one for each of its query tokens.
        """
        tokens = torch.arange(int(self.qo_indptr[-1]), device=self.qo_indptr.device)
        request = torch.searchsorted(self.qo_indptr[1:].long(), tokens, right=True)
        position = self.seq_lens[request] - self.qo_indptr[request + 1] + tokens
        page = self.paged_kv_indptr[request] + position // self.page_size
        slots = self.paged_kv_indices[page].long() * self.page_size
        return slots + position % self.page_size

    def to(self, device: torch.device | str) -> BatchMetadata:
        """Copy the tensors to a device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return BatchMetadata(**moved, page_size=self.page_size)

    def validate(self, num_tokens: int | None = None, num_pages: int | None = None) -> None:
        """Check the whole of it, against a token count and a cache size where given.

        Raises:
            ValueError: names the tensor and the position.
        """
        self.checked(num_tokens, num_pages)

    def checked(
        self, num_tokens: int | None = None, num_pages: int | None = None
    ) -> dict[str, list[int]]:
        """Check as ``validate`` does, and give the five tensors as lists by field name."""
        for name, tensor in self.tensors().items():
            if not isinstance(tensor, torch.Tensor):
                message = f"{name} must be an int32 tensor, not {type(tensor).__name__}"
                raise ValueError(message)
        if not isinstance(self.page_size, int) or self.page_size < 1:
            message = f"page_size is {self.page_size!r}; it must be a positive integer"
            raise ValueError(message)
        fields = host_integers_of(self.tensors())
        requests = len(fields["seq_lens"])
        for name, length in (
            ("qo_indptr", requests + 1),
            ("paged_kv_indptr", requests + 1),
            ("paged_kv_last_page_len", requests),
        ):
            if len(fields[name]) != length:
                message = (
                    f"{name} has {len(fields[name])} entries; seq_lens has {requests} requests, "
                    f"so it needs {length}"
                )
                raise ValueError(message)
        check_indptr("qo_indptr", fields["qo_indptr"], num_tokens, "query tokens")
        check_lengths("seq_lens", fields["seq_lens"])
        indices = fields["paged_kv_indices"]
        check_indptr("paged_kv_indptr", fields["paged_kv_indptr"], len(indices), "paged_kv_indices")
        for position, (seq_len, last, start, end) in enumerate(
            zip(
                fields["seq_lens"],
                fields["paged_kv_last_page_len"],
                fields["paged_kv_indptr"],
                fields["paged_kv_indptr"][1:],
                strict=False,
            )
        ):
            self._check_request(position, seq_len, last, end - start)
        check_page_ids("paged_kv_indices", indices, num_pages)
        return fields

    def _check_request(self, position: int, seq_len: int, last: int, pages: int) -> None:
        expected_last = last_page_len(seq_len, self.page_size)
        if last != expected_last:
            message = (
                f"seq_lens[{position}] is {seq_len} with page_size {self.page_size}, so "
                f"paged_kv_last_page_len[{position}] must be {expected_last}, not {last}"
            )
            raise ValueError(message)
        expected_pages = -(-seq_len // self.page_size)
        if pages != expected_pages:
            message = (
                f"seq_lens[{position}] is {seq_len} with page_size {self.page_size}: that is "
                f"{expected_pages} pages, but paged_kv_indptr gives request {position} {pages}"
            )
            raise ValueError(message)


def last_page_len(seq_len: int, page_size: int) -> int:
    """Count the keys on the last page: 0 for no keys, else 1 to page_size."""
    return (seq_len - 1) % page_size + 1 if seq_len else 0


def check_page_ids(name: str, page_ids: list[int], num_pages: int | None) -> None:
    """Check that page ids are not negative and lie inside the cache."""
    if not page_ids or (min(page_ids) >= 0 and (num_pages is None or max(page_ids) < num_pages)):
        return
    for position, page in enumerate(page_ids):
        if page < 0 or (num_pages is not None and page >= num_pages):
            size = "a cache" if num_pages is None else f"a cache of {num_pages} pages"
            message = f"{name}[{position}] is page {page}, outside {size}"
            raise ValueError(message)


def build_metadata(
    query_lens: torch.Tensor | Sequence[int],
    seq_lens: torch.Tensor | Sequence[int],
    block_table: torch.Tensor | Sequence[Sequence[int]],
    page_size: int,
) -> BatchMetadata:
    """Build the metadata of a batch from its lengths and block table.

    Args:
        query_lens: [R], query tokens of each request (0 is allowed).
        seq_lens: [R], keys of each request, its query tokens included (fewer is allowed: the
            surplus query rows see no key).
        block_table: [R, max pages], physical page ids; entries past ``ceil(seq_len / page_size)``
            are garbage and never read.
        page_size: keys a page.

    Returns:
        BatchMetadata on the block table's device (the CPU for a nested list).

    Raises:
        ValueError: a negative or overflowing length, a block table too narrow for a request, a
            negative page id among those that are read; the argument and position are named.
    """
    if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
        message = f"page_size is {page_size!r}; it must be a positive integer"
        raise ValueError(message)
    queries = host_integers("query_lens", query_lens)
    keys = host_integers("seq_lens", seq_lens)
    check_lengths("query_lens", queries)
    check_lengths("seq_lens", keys)
    if len(queries) != len(keys):
        message = f"query_lens has {len(queries)} requests, but seq_lens has {len(keys)}"
        raise ValueError(message)
    table = table_rows(block_table)
    if len(table) != len(keys):
        message = f"block_table has {len(table)} rows, but seq_lens has {len(keys)} requests"
        raise ValueError(message)
    indices: list[int] = []
    counts = [-(-length // page_size) for length in keys]
    for request, (row, pages) in enumerate(zip(table, counts, strict=True)):
        if len(row) < pages:
            message = (
                f"block_table[{request}] has {len(row)} entries, but seq_lens[{request}] = "
                f"{keys[request]} needs {pages} pages of {page_size}"
            )
            raise ValueError(message)
        used = host_integers(f"block_table[{request}]", row[:pages])
        check_page_ids(f"block_table[{request}]", used, None)
        indices.extend(used)
    device = block_table.device if isinstance(block_table, torch.Tensor) else torch.device("cpu")

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return BatchMetadata(
        qo_indptr=int32([0, *accumulate(queries)]),
        paged_kv_indptr=int32([0, *accumulate(counts)]),
        paged_kv_indices=int32(indices),
        paged_kv_last_page_len=int32([last_page_len(length, page_size) for length in keys]),
        seq_lens=int32(keys),
        page_size=page_size,
    )


def check_metadata(metadata: object) -> None:
    """Refuse what is no metadata of a batch."""
    if not isinstance(metadata, BatchMetadata):
        message = f"metadata must be a BatchMetadata, not {type(metadata).__name__}"
        raise ValueError(message)


def table_rows(block_table: torch.Tensor | Sequence[Sequence[int]]) -> list[list[int]]:
    """Bring a block table to the host, row by row; ValueError if it is none."""
    if isinstance(block_table, torch.Tensor):
        if block_table.dim() != 2 or block_table.dtype.is_floating_point:  # noqa: PLR2004
            message = (
                "block_table must be an integer tensor [requests, pages], not "
                f"{block_table.dtype} {tuple(block_table.shape)}"
            )
            raise ValueError(message)
        check_values("block_table", block_table)
        return block_table.tolist()
    if not isinstance(block_table, Sequence) or isinstance(block_table, (str, bytes)):
        message = f"block_table is {block_table!r}; it must be a tensor or rows of page ids"
        raise ValueError(message)
    for position, row in enumerate(block_table):
        if not isinstance(row, Sequence):
            message = f"block_table[{position}] is {row!r}; it must be a row of page ids"
            raise ValueError(message)
    return [list(row) for row in block_table]
