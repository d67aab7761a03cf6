"""vLLM's builders in sequence, as its model runner calls them, over buffers that persist.

Its own ``BlockTables`` keeps the pages of requests, the gathered tables and the slots; pages and
computed keys are staged on the host and written by a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....reference import StepsProblem
from ....reference.tensors.steps import StepInputs, StepsInputs
from ...gpu.triton_interpreter import scalar_conditions, scalars_as_bounds
from ...targets.refusal import Refusal
from ...targets.target import Target
from ..sources import load
from ..vllm_stubs import stubs
from .batches import lacks, launched
from .vllm_batches import (
    BATCH_FILE,
    FLASHINFER_FILE,
    REQUESTS_FILE,
    TABLES_FILE,
    stubs_of_flashinfer,
)

BUFFERS_FILE = "vllm.v1.worker.gpu.buffer_utils"
KERNELS = {
    "_apply_write_kernel": BUFFERS_FILE,
    "_num_dirty_rows": TABLES_FILE,
    "_gather_block_tables_kernel": TABLES_FILE,
    "_compute_slot_mappings_kernel": TABLES_FILE,
    "_prepare_pos_seq_lens_kernel": BATCH_FILE,
    "_post_update_kernel": BATCH_FILE,
    "_copy_page_indices_kernel": FLASHINFER_FILE,
    "compute_token_to_req_indices": REQUESTS_FILE,
}
"""What a release must have, with its files."""


def _on_device(content: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(content, dtype=dtype, device=device)


def _stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for vLLM where the host's memory is not the device's: its buffers are copied."""
    usual = stubs()
    others: dict[str, dict[str, object]] = {
        "vllm.utils.platform_utils": {"is_uva_available": lambda: False},
        "vllm.utils.torch_utils": {"async_tensor_h2d": _on_device},
    }
    return {**usual, **{name: {**usual[name], **more} for name, more in others.items()}}


def _supports(problem: StepsProblem, target: Target) -> Refusal | str | bool:
    if lacking := lacks(KERNELS, target):
        return lacking
    if problem.engine != "vllm":
        return "keeps vLLM's buffers"
    return True


class _Runner:
    """What a model runner keeps between its steps."""

    def __init__(self, inputs: StepsInputs, tables: Any, staged: Any) -> None:  # noqa: ANN401
        self.buffers = {each.name: each.tensor for each in inputs.buffers}
        device = self.buffers["positions"].device
        tokens = len(self.buffers["slot_mapping"])
        self.tables = tables.BlockTables(
            [inputs.page_size], inputs.rows, tokens, [inputs.columns], device
        )
        self.computed = staged.StagedWriteTensor(inputs.rows, torch.int32, device)
        self.buffers["page_table"] = self.tables.input_block_tables[0]
        self.buffers["slot_mapping"] = self.tables.slot_mappings[0]
        self.total = torch.zeros(inputs.rows, dtype=torch.int32, device=device)

    def admit(self, step: StepInputs) -> None:
        """Write the pages that requests have got, and the computed keys of those that are new."""
        for request in step.requests:
            pages = list(request.pages[request.held :])
            self.tables.append_block_ids(request.row, (pages,), overwrite=not request.held)
            if not request.held:
                self.computed.stage_write_elem(request.row, request.computed)
        self.tables.apply_staged_writes()
        self.computed.apply_write()

    def prepare(self, step: StepInputs, batches: Any) -> None:  # noqa: ANN401  its module
        """Build positions, lengths, the table of pages and slots."""
        rows, starts = step.batch.rows, step.batch.query_start_loc
        batches.prepare_pos_seq_lens(
            rows, starts, self.computed.gpu, self.buffers["positions"], self.buffers["seq_lens"]
        )
        self.tables.gather_block_tables(rows, len(rows) + step.padding)
        self.tables.compute_slot_mappings(
            rows, starts, self.buffers["positions"], len(self.buffers["slot_mapping"])
        )

    def update(self, step: StepInputs, batches: Any) -> None:  # noqa: ANN401  its module
        """Count the keys that are computed after the step, without rejected drafts."""
        rejected = [request.rejected for request in step.requests]
        none = torch.zeros_like(step.batch.rows)
        batches.post_update(
            idx_mapping=step.batch.rows,
            num_computed_tokens=self.computed.gpu,
            last_sampled_tokens=self.total,
            output_bin_counts=None,
            sampled_tokens=none.unsqueeze(1),
            num_sampled=none,
            num_rejected=torch.tensor(rejected, dtype=torch.int32, device=none.device),
            query_start_loc=step.batch.query_start_loc,
            all_token_ids=self.total.unsqueeze(1),
            total_len=self.total,
        )


@launched(
    "prepare_steps",
    name="vllm-steps",
    provider="vllm",
    supports=_supports,
    compile_key=lambda problem: problem.page_size,
)
def steps(inputs: StepsInputs) -> dict[str, torch.Tensor]:
    """Prepare each step from what the steps before have left in vLLM's buffers."""
    with (
        load(BUFFERS_FILE, _stubs) as staged,
        load(TABLES_FILE, _stubs) as tables,
        load(BATCH_FILE, _stubs) as batches,
        load(REQUESTS_FILE, _stubs) as requests,
        load(FLASHINFER_FILE, stubs_of_flashinfer) as flashinfer,
    ):
        runner = _Runner(inputs, tables, staged)
        buffers = runner.buffers
        found: dict[str, list[torch.Tensor]] = {name: [] for name in buffers}
        positions = buffers["positions"]
        with scalar_conditions(positions), scalars_as_bounds(positions):
            for step in inputs.steps:
                runner.admit(step)
                runner.prepare(step, batches)
                table, to_request = buffers["page_table"], buffers["token_to_request"]
                getattr(flashinfer, "_copy_page_indices_kernel")[(len(step.requests),)](  # noqa: B009
                    buffers["page_indices"], table, table.stride(0), step.batch.page_indptr,
                    BLOCK_SIZE=1024,
                )  # fmt: skip
                requests.compute_token_to_req_indices(
                    step.batch.query_start_loc, to_request, len(step.slots.positions),
                    len(to_request),
                )  # fmt: skip
                for name, buffer in buffers.items():
                    found[name].append(buffer.clone())
                runner.update(step, batches)
    return {name: torch.stack(each) for name, each in found.items()}
