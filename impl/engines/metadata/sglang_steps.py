"""SGLang's builders in sequence, as scheduler and backends call them, over buffers that persist.

Its pool has a row for each request, with the slots of its keys: those of new keys follow from the
last slot that the row holds and from free pages, and everything else is read from the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....reference import StepsProblem
from ....reference.problems.steps import Request
from ....reference.tensors.steps import StepInputs, StepsInputs
from ...gpu.triton_interpreter import scalars_as_bounds
from ...targets.refusal import Refusal
from ...targets.target import Target
from ..sglang_calls import stubs
from ..sources import Names, load
from .batches import lacks, launched, next_power_of_two
from .sglang_batches import INDICES_FILE, METADATA_FILE, PAD_FILE, POSITIONS_FILE

POOL_FILE = "sglang.kernels.ops.memory.common"
PAGES_FILE = "sglang.kernels.ops.memory.allocator"
KERNELS: Mapping[str, Names] = {
    "write_req_to_token_pool_triton": POOL_FILE,
    "get_last_loc_triton": POOL_FILE,
    "alloc_extend_kernel": PAGES_FILE,
    "alloc_decode_kernel": PAGES_FILE,
    "compute_position_kernel": POSITIONS_FILE,
    "normal_decode_set_metadata": METADATA_FILE,
    "draft_extend_set_metadata": METADATA_FILE,
    "create_flashinfer_kv_indices_triton": INDICES_FILE,
    "seqlens_expand_kernel": PAD_FILE,
}
"""What a release must have, with its files."""


def _supports(problem: StepsProblem, target: Target) -> Refusal | str | bool:
    if lacking := lacks(KERNELS, target):
        return lacking
    if problem.engine != "sglang":
        return "keeps SGLang's buffers"
    if problem.page_size & (problem.page_size - 1):
        return "a page has a power of two keys"
    return True


class _Scheduler:
    """What a scheduler and its backend keep between steps."""

    def __init__(self, inputs: StepsInputs) -> None:
        self.buffers = {each.name: each.tensor for each in inputs.buffers}
        self.size = inputs.page_size
        self.pool = torch.zeros(
            (inputs.rows, inputs.columns * self.size),
            dtype=torch.int32,
            device=self.buffers["positions"].device,
        )

    def _long(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.pool.device)

    def allocate(self, requests: Sequence[Request], pool: Any, allocator: Any) -> None:  # noqa: ANN401
        """Write the slots of new keys, and those of a new request's shared ones, into the pool."""
        size, out = self.size, self.buffers["slot_mapping"].fill_(-1)
        rows = self._long([request.row for request in requests])
        before = self._long([request.computed for request in requests])
        keys = self._long([request.keys for request in requests])
        free = self._long([
            page for r in requests for page in r.pages[-(-r.computed // size) : -(-r.keys // size)]
        ] + [0])  # fmt: skip
        last = pool.get_last_loc_triton(self.pool, rows, before)
        grid, constants = (len(requests),), (next_power_of_two(len(requests)), size)
        if all(request.new == 1 and request.held for request in requests):
            allocator.alloc_decode_kernel[grid](keys, last, free, out, *constants)
        else:
            allocator.alloc_extend_kernel[grid](before, keys, last, free, out, *constants)
        prefixes = [self._prefix(request) for request in requests]
        pointers = torch.tensor([each.data_ptr() for each in prefixes], dtype=torch.uint64)
        pool.write_req_to_token_pool_triton[grid](
            self.pool, rows, pointers.to(self.pool.device), before, keys, keys - before, out,
            self.pool.stride(0),
        )  # fmt: skip

    def _prefix(self, request: Request) -> torch.Tensor:
        """Return the slots of computed keys: of a request that goes on, those in its row."""
        if request.held:
            return self.pool[request.row, : request.computed].long()
        pages = self._long(request.pages[: request.computed // self.size]).unsqueeze(1)
        return (pages * self.size + torch.arange(self.size, device=pages.device)).flatten()

    def describe(self, step: StepInputs, positions: Any, metadata: Any) -> None:  # noqa: ANN401
        """Build positions, lengths and the table of pages, of a batch that may be padded."""
        buffers, batch = self.buffers, step.batch
        news, requests = batch.query_start_loc.diff(), len(batch.rows)
        positions.compute_position_kernel[(requests,)](
            buffers["positions"],
            buffers["query_starts"],
            batch.seq_lens - news,
            news,
            True,  # noqa: FBT003  a constant of the kernel
        )
        table = buffers["page_table"][:requests]
        lengths: dict[str, Any] = {
            "cache_seqlens_int32": buffers["seq_lens"][:requests],
            "cu_seqlens_k": buffers["kv_indptr"][: requests + 1],
            "page_table": table,
            "req_to_token": self.pool,
            "req_pool_indices": batch.rows.long(),
            "seq_lens": batch.seq_lens.long(),
            "page_size": self.size,
        }
        if all(request.new == 1 for request in step.requests):
            metadata.normal_decode_set_metadata(
                **lengths, max_seq_pages=table.shape[1], seq_len_delta=0
            )
        else:
            metadata.draft_extend_set_metadata(
                **lengths,
                cu_seqlens_q=torch.zeros_like(batch.query_start_loc),
                extend_seq_lens=news.long(),
            )

    def index(self, step: StepInputs, indices: Any, pad: Any) -> None:  # noqa: ANN401  modules
        """Build slots of all keys, and how many keys each new token sees, from what is built."""
        buffers, batch = self.buffers, step.batch
        news, requests = batch.query_start_loc.diff(), len(batch.rows)
        indices.create_flashinfer_kv_indices_triton[(requests,)](
            self.pool,
            batch.rows.long(),
            buffers["seq_lens"][:requests].long(),
            buffers["kv_indptr"],
            None,
            buffers["kv_indices"],
            self.pool.stride(0),
        )
        pad.seqlens_expand_kernel[(requests,)](
            news,
            buffers["seq_lens"],
            batch.query_start_loc,
            buffers["token_seq_lens"],
            requests,
            BLOCK=next_power_of_two(int(news.max())),
        )


@launched(
    "prepare_steps",
    name="sglang-steps",
    provider="sglang",
    supports=_supports,
    compile_key=lambda problem: problem.page_size,
)
def steps(inputs: StepsInputs) -> dict[str, torch.Tensor]:
    """Prepare each step from what the steps before have left in SGLang's pool and buffers."""
    scheduler = _Scheduler(inputs)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in scheduler.buffers}
    with (
        load(POOL_FILE, stubs) as pool,
        load(PAGES_FILE, stubs) as allocator,
        load(POSITIONS_FILE, stubs) as positions,
        load(METADATA_FILE, stubs) as metadata,
        load(INDICES_FILE, stubs) as indices,
        load(PAD_FILE, stubs) as pad,
        scalars_as_bounds(scheduler.buffers["slot_mapping"]),
    ):
        for step in inputs.steps:
            scheduler.allocate(step.requests, pool, allocator)
            scheduler.describe(step, positions, metadata)
            scheduler.index(step, indices, pad)
            for name, buffer in scheduler.buffers.items():
                found[name].append(buffer.clone())
    return {name: torch.stack(each) for name, each in found.items()}
