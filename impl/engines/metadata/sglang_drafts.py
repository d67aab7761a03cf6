"""SGLang's Triton kernels that prepare requests whose drafts are verified, and drafted anew."""

from __future__ import annotations

import torch

from ....reference import BatchProblem
from ....reference.tensors.preparation import BatchInputs
from ..sglang_calls import stubs
from ..sources import load
from ..vllm_stubs import Unused
from .batches import MOST_DECODED, builder, few_tokens, keeps_tokens, next_power_of_two, scratch
from .sglang_batches import MOST_SLOTS, PAD_FILE, other_pool

EAGLE_FILE = "sglang.kernels.ops.speculative.eagle"
LOCS_FILE = "sglang.kernels.ops.speculative.cache_locs"
TREE_FILE = "sglang.kernels.ops.speculative.spec_tree"
RECONSTRUCT_FILE = "sglang.kernels.ops.speculative.reconstruct_tree"
PACK_FILE = "sglang.kernels.ops.speculative.pack_verify_mask"
TREES = {"tree_positions": "kept", "first_children": "kept", "next_siblings": "kept"}
"""Outputs of kernels that build trees, beside their masks."""
HEADS, CHANNELS = 2, 3
"""Heads and channels of the tensors whose tokens are padded."""


def _stubs() -> dict[str, dict[str, object]]:
    """Stand in for the rest of SGLang, on a machine for which it has Triton's kernels only."""
    found = stubs()
    other = dict.fromkeys(("is_cpu", "is_cuda", "is_musa", "is_npu", "is_xpu"), lambda: False)
    used = {**other, "next_power_of_2": next_power_of_two}
    anything: dict[str, object] = {"__getattr__": lambda _: Unused()}
    names = ("sgl_kernel", "sglang.srt.platforms", "sglang.srt.platforms.interface")
    return {
        **found,
        **dict.fromkeys((*names, "sgl_kernel.speculative"), anything),
        "sglang.srt.utils": {**found["sglang.srt.utils"], **used},
    }


def _rows_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return rows [..., heads, channels] of int64, different ones, of tokens [...]."""
    places = torch.arange(HEADS * CHANNELS, device=tokens.device).view(HEADS, CHANNELS)
    return tokens.long()[..., None, None] * places.numel() + places


def _tokens_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose rows these are.

    Raises:
        RuntimeError: a head or a channel is another token's.
    """
    tokens = rows[..., 0, 0] // (HEADS * CHANNELS)
    if not torch.equal(_rows_of(tokens), rows):
        message = "heads and channels of one row are of different tokens"
        raise RuntimeError(message)
    return tokens.to(torch.int32)


def _verified(problem: BatchProblem) -> str | bool:
    """Whether requests have few tokens, of which a program pads each; a reason where not."""
    if not any(len(news) for news, _ in problem.steps) or not problem.shape[-1]:
        return "a batch has a request, and a row a token"
    return few_tokens(problem)


@builder(
    "sglang-pad-draft-query",
    PAD_FILE,
    "pad_draft_extend_query",
    {"padded_tokens": "kept"},
    more=_verified,
)
def pad_draft_query(inputs: BatchInputs) -> None:
    """Copy the queries of drafts into a row for each request, those of two heads."""
    rows = inputs.buffer[: len(inputs.rows)]
    padded = _rows_of(rows)
    with load(PAD_FILE, stubs) as kernels:
        kernels.pad_draft_extend_query(
            q=_rows_of(inputs.tokens),
            padded_q=padded,
            seq_lens_q=inputs.query_start_loc.diff(),
            cu_seqlens_q=inputs.query_start_loc,
        )
    rows.copy_(_tokens_of(padded))


@builder(
    "sglang-unpad-draft-output",
    PAD_FILE,
    "unpad_draft_extend_output",
    {"accepted_tokens": "kept"},
    more=few_tokens,
)
def unpad_draft_output(inputs: BatchInputs) -> None:
    """Copy the outputs of accepted drafts out of a row for each request."""
    accepted, padded = _accepted(inputs), _padded(inputs, inputs.tokens)
    total = int(accepted.sum())
    with load(PAD_FILE, stubs) as kernels:
        found = kernels.unpad_draft_extend_output(
            raw_out=_rows_of(padded),
            cu_seqlens_q=torch.nn.functional.pad(accepted.cumsum(0), (1, 0)).int(),
            seq_lens_q=accepted,
            sum_seq_lens_q=total,
            unpad_output_buffer=_rows_of(inputs.buffer),
        )
    inputs.buffer[:total] = _tokens_of(found)


@builder(
    "sglang-pad-sequence",
    PAD_FILE,
    "pad_sequence_with_mask",
    {"padded_tokens": "zero_tails"},
    more=_verified,
)
def pad_sequence(inputs: BatchInputs) -> None:
    """Copy tokens into a row for each request, with zeros behind them, beside a mask."""
    rows, news = inputs.buffer[: len(inputs.rows)], inputs.query_start_loc.diff()
    with load(PAD_FILE, stubs) as kernels:
        _, padded, mask = kernels.pad_sequence_with_mask(
            input_emb=_rows_of(inputs.tokens).flatten(1),
            offsets=inputs.query_start_loc[:-1],
            lengths=news,
            max_len=rows.shape[1],
        )
    places = torch.arange(rows.shape[1], device=news.device)
    if not torch.equal(mask.view(rows.shape), places < news.unsqueeze(1)):
        message = "the mask is not that of the tokens of each request"
        raise RuntimeError(message)
    blank = torch.where(mask.view(*rows.shape, 1, 1), 0, _rows_of(rows * 0))
    rows.copy_(_tokens_of(padded.view(*rows.shape, HEADS, CHANNELS) + blank))


def _padded(inputs: BatchInputs, values: torch.Tensor) -> torch.Tensor:
    """Return values of new tokens in a row for each request, with -1 behind them."""
    news = inputs.query_start_loc.diff()
    padded = values.new_full((len(news), max([1, *news.tolist()])), -1)
    request = torch.arange(len(news), device=news.device).repeat_interleave(news)
    place = torch.arange(len(request), device=news.device) - inputs.query_start_loc[request]
    padded[request, place] = values
    return padded


def _accepted(inputs: BatchInputs) -> torch.Tensor:
    """Return how many new tokens of each request are accepted."""
    return inputs.query_start_loc.diff() - inputs.rejected


def _samples(problem: BatchProblem) -> str | bool:
    """Whether each request has few tokens, and keeps one; a reason where not."""
    if not all(new for news, _ in problem.steps for new in news):
        return "each request has a new token"
    kept = keeps_tokens(problem)
    return few_tokens(problem) if kept is True else kept


def _alike(problem: BatchProblem) -> str | bool:
    """Whether all requests of each batch have as many new tokens, and keep one, or a reason."""
    if any(len(set(news)) != 1 for news, _ in problem.steps):
        return "all requests of a batch have as many new tokens"
    return _samples(problem)


@builder(
    "sglang-bonus-tokens",
    EAGLE_FILE,
    "fill_bonus_tokens_func",
    {"last_tokens": "kept"},
    more=_samples,
)
def bonus_tokens(inputs: BatchInputs) -> None:
    """Copy the last accepted token of each request."""
    padded = _padded(inputs, inputs.tokens)
    with load(EAGLE_FILE, _stubs) as kernels:
        kernels.fill_bonus_tokens_func(
            padded, _accepted(inputs), inputs.buffer, padded.shape[1], len(padded)
        )


def _some_tokens(problem: BatchProblem) -> str | bool:
    few = few_tokens(problem)
    return all(news for news, _ in problem.steps) or "a batch has a request" if few is True else few


@builder(
    "sglang-accepted-slots",
    EAGLE_FILE,
    "fill_accept_out_cache_loc_func",
    {"accepted_tokens": "kept"},
    more=_some_tokens,
)
def accepted_slots(inputs: BatchInputs) -> None:
    """Copy what an index chooses of all new tokens: slots, to SGLang."""
    places = torch.arange(len(inputs.tokens), device=inputs.tokens.device)
    index = _padded(inputs, places)
    columns = torch.arange(index.shape[1], device=index.device)
    index[columns >= _accepted(inputs).unsqueeze(1)] = -1
    with load(EAGLE_FILE, _stubs) as kernels:
        kernels.fill_accept_out_cache_loc_func(
            index.flatten(), inputs.tokens, inputs.buffer, index.numel()
        )


@builder(
    "sglang-verify-commit",
    EAGLE_FILE,
    "prepare_verify_commit_outputs",
    {"last_tokens": "kept", "accepted_seq_lens": "kept", "token_indices_to_sample": "kept"},
    more=_alike,
)
def verify_commit(inputs: BatchInputs) -> None:
    """Return what is committed of a batch whose requests have as many tokens each."""
    requests, accepted = len(inputs.rows), _accepted(inputs)
    width = len(inputs.tokens) // requests
    index = torch.arange(len(inputs.tokens), device=accepted.device).view(requests, width)
    with load(EAGLE_FILE, _stubs) as kernels:
        lengths, bonus, _, (correct, select, ids) = kernels.prepare_verify_commit_outputs(
            inputs.tokens, index, accepted, inputs.seq_lens - width, width, mamba_track_interval=2
        )
    if not (torch.equal(correct, accepted - 1) and torch.equal(ids, inputs.tokens.long())):
        message = "accepted drafts, or the tokens, are others than those that were given"
        raise RuntimeError(message)
    found = {
        "last_tokens": bonus,
        "accepted_seq_lens": lengths,
        "token_indices_to_sample": select,
    }
    inputs.buffer[:requests] = found[inputs.output].int()


@builder(
    "sglang-draft-extend-inputs",
    EAGLE_FILE,
    "prepare_draft_extend_inputs",
    {"token_indices_to_sample": "kept"},
    more=_alike,
)
def draft_extend_inputs(inputs: BatchInputs) -> None:
    """Return the last accepted token of each request, of as many each."""
    requests, accepted = len(inputs.rows), _accepted(inputs)
    with load(EAGLE_FILE, _stubs) as kernels:
        _, select, _ = kernels.prepare_draft_extend_inputs(
            accepted, inputs.tokens, len(inputs.tokens) // requests
        )
    inputs.buffer[:requests] = select.int()


@builder(
    "sglang-extend-locs",
    LOCS_FILE,
    "assign_extend_cache_locs",
    {"slot_mapping": "kept"},
    sized=True,
)
def extend_locs(inputs: BatchInputs) -> None:
    """Copy the slots of new tokens from a table of slots."""
    requests = len(inputs.rows)
    with load(LOCS_FILE, _stubs) as kernels:
        kernels.assign_extend_cache_locs[(requests,)](
            inputs.rows.long(),
            inputs.token_table,
            (inputs.seq_lens - inputs.query_start_loc.diff()).long(),
            inputs.seq_lens.long(),
            inputs.buffer,
            inputs.token_table.shape[1],
            next_power_of_two(requests),
        )


@builder(
    "sglang-extend-locs-uniform",
    LOCS_FILE,
    "assign_extend_cache_locs_uniform",
    {"slot_mapping": "kept"},
    more=_alike,
    sized=True,
)
def extend_locs_uniform(inputs: BatchInputs) -> None:
    """Copy slots of another pool, by its pages, of as many tokens of each request."""
    requests, size = len(inputs.rows), inputs.page_size
    width = len(inputs.tokens) // requests
    pages = other_pool(inputs, 1)
    virtual, positions = (torch.zeros_like(inputs.tokens, dtype=torch.int64) for _ in range(2))
    other = torch.zeros_like(virtual)
    starts = (inputs.seq_lens - width).long()
    # A page of the other pool is another one, and the kernel maps it back.
    offsets = inputs.token_table % size
    table = ((inputs.token_table // size) ^ 1) * size + offsets
    anchors = torch.zeros_like(starts)
    with load(LOCS_FILE, _stubs) as kernels:
        kernels.assign_extend_cache_locs_uniform[(requests,)](
            inputs.rows.long(),
            table,
            starts,
            virtual,
            table.shape[1],
            width,
            full_v2p=pages,
            swa_v2p=pages,
            full_out=inputs.buffer,
            swa_out=other,
            PAGE_SIZE=size,
            num_v_pages=MOST_SLOTS,
            num_swa_pages=MOST_SLOTS,
            positions_out=positions,
            anchor_src=starts,
            anchor_out=anchors,
            anchor_stride=1,
        )
    news = torch.arange(width, device=starts.device)
    if not (
        torch.equal(positions.view(requests, width), starts.unsqueeze(1) + news)
        and torch.equal(other, inputs.buffer[: len(other)])
        and torch.equal(anchors, starts)
    ):
        message = "positions, anchors or slots of the second pool are others"
        raise RuntimeError(message)


def _few_drafts(problem: BatchProblem) -> str | bool:
    return problem.drafts <= MOST_DECODED or f"at most {MOST_DECODED} tokens are drafted"


@builder(
    "sglang-draft-locs",
    LOCS_FILE,
    "assign_draft_cache_locs_contiguous_func",
    {"query_slots": "kept"},
    more=_few_drafts,
    sized=True,
)
def draft_locs(inputs: BatchInputs) -> None:
    """Copy the slots behind each request's accepted tokens, for two drafts at once if it is so."""
    each, requests = 1 + inputs.num_drafts, len(inputs.rows)
    ends = (inputs.seq_lens - inputs.rejected).long()
    topk = 1 + (each % 2 == 0)
    positions = torch.zeros(requests * topk, dtype=torch.int64, device=ends.device)
    threefold = torch.zeros((3, requests * topk), dtype=torch.int64, device=ends.device)
    with load(LOCS_FILE, _stubs) as kernels:
        kernels.assign_draft_cache_locs_contiguous_func(
            inputs.rows.long(),
            inputs.token_table,
            ends,
            inputs.buffer,
            topk,
            each // topk,
            positions=positions,
            mrope=threefold,
        )
    if not all(torch.equal(each, ends.repeat_interleave(topk)) for each in (positions, *threefold)):
        message = "positions of drafts are not behind the accepted tokens"
        raise RuntimeError(message)


class _Tree:
    """What SGLang's kernels write of trees of one width, the output that is asked for included."""

    def __init__(self, inputs: BatchInputs) -> None:
        tokens, self.requests = len(inputs.tokens), len(inputs.rows)
        self.width = tokens // self.requests
        self.lengths = (inputs.seq_lens - self.width).long()
        names = (*TREES, "index")
        links = {name: scratch(inputs, name, tokens, torch.int64) for name in names}
        for name in ("first_children", "next_siblings"):
            links[name][:tokens] = -1  # the callers' buffers begin with it
        self.positions, self.children, self.siblings, self.index = links.values()

    def check(self) -> None:
        """Check the numbers of tokens, which are those of the batch."""
        if not torch.equal(self.index, torch.arange(len(self.index), device=self.index.device)):
            message = "tokens of the tree are not numbered as those of the batch"
            raise RuntimeError(message)


def _build_tree(inputs: BatchInputs, mask: torch.Tensor, mode: int) -> None:
    """Launch the kernel that builds trees, which chooses drafts of groups by their parents."""
    tree = _Tree(inputs)
    requests, width = tree.requests, tree.width
    parents = inputs.parents.view(requests, width).long()
    # A token's group is that of its parent's children; each has a place of its own in the group.
    chosen = parents[:, 1:] * width + torch.arange(1, width, device=parents.device)
    groups = torch.full((requests, width + 1), -1, device=parents.device, dtype=torch.long)
    groups[:, 1:width] = chosen
    with load(TREE_FILE, _stubs) as kernels:
        kernels.sgl_build_tree_kernel_efficient_triton[(requests,)](
            groups,
            chosen.contiguous(),
            tree.lengths,
            tree.lengths.cumsum(0) - tree.lengths,
            mask,
            tree.positions,
            tree.index,
            tree.children,
            tree.siblings,
            topk=width,
            depth=width,
            draft_token_num=width,
            tree_mask_mode=mode,
            batch_size=requests,
            parent_list_stride=groups.stride(0),
            selected_index_stride=width - 1,
        )
    tree.check()


@builder(
    "sglang-build-tree",
    TREE_FILE,
    "sgl_build_tree_kernel_efficient_triton",
    {"tree_mask": "kept", **TREES},
    more=_alike,
)
def build_tree(inputs: BatchInputs) -> None:
    """Write trees of new tokens, with masks of these only."""
    squares = len(inputs.tokens) ** 2 // len(inputs.rows)
    _build_tree(inputs, scratch(inputs, "tree_mask", squares, torch.bool), 1)


@builder(
    "sglang-build-tree-full",
    TREE_FILE,
    "sgl_build_tree_kernel_efficient_triton",
    {"tree_mask": "kept"},
    more=_alike,
)
def build_tree_full(inputs: BatchInputs) -> None:
    """Write trees of new tokens, with masks of all keys."""
    width = len(inputs.tokens) // len(inputs.rows)
    counts = (inputs.seq_lens * width).tolist()
    whole = torch.ones(sum(counts), dtype=torch.bool, device=inputs.tokens.device)
    _build_tree(inputs, whole, 0)
    rows = [mask.view(width, -1) for mask in whole.split(counts)]
    if not all(row[:, :-width].all() for row in rows):
        message = "a new token does not see a key before the tree"
        raise RuntimeError(message)
    found = torch.cat([row[:, -width:].flatten() for row in rows])
    inputs.buffer[: len(found)] = found


@builder(
    "sglang-reconstruct-tree",
    RECONSTRUCT_FILE,
    "_reconstruct_tree_mask_kernel",
    TREES,
    more=_alike,
)
def reconstruct_tree(inputs: BatchInputs) -> None:
    """Write trees of new tokens from their masks."""
    tree = _Tree(inputs)
    with load(RECONSTRUCT_FILE, _stubs) as kernels:
        getattr(kernels, "_reconstruct_tree_mask_kernel")[(tree.requests,)](  # noqa: B009
            _tree_masks(inputs),
            tree.lengths,
            tree.positions,
            tree.index,
            tree.children,
            tree.siblings,
            n=tree.width,
            BLOCK_N=next_power_of_two(tree.width),
        )
    tree.check()


def _tree_masks(inputs: BatchInputs) -> torch.Tensor:
    """Return which new tokens each one sees, of requests with as many each."""
    width = len(inputs.tokens) // len(inputs.rows)
    parents = inputs.parents.view(-1, width).long()
    masks = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    requests = torch.arange(len(parents), device=parents.device)
    for token in range(1, width):
        masks[:, token] |= masks[requests, parents[:, token]]
    return masks.flatten()


def _is_chain(problem: BatchProblem) -> str | bool:
    return "its tokens are a chain" if problem.is_tree else _alike(problem)


@builder(
    "sglang-chain-tree",
    EAGLE_FILE,
    "build_chain_tree",
    {"slot_mapping": "kept", "tree_mask": "kept", **TREES},
    more=_is_chain,
    sized=True,
)
def chain_tree(inputs: BatchInputs) -> None:
    """Return the tree of a chain of drafts, with their slots and tokens."""
    requests = len(inputs.rows)
    tokens = inputs.tokens.view(requests, -1)
    squares = tokens.numel() * tokens.shape[1]
    with load(EAGLE_FILE, _stubs) as kernels:
        mask, positions, index, children, siblings, found, slots, _ = kernels.build_chain_tree(
            tokens[:, 0],
            tokens[:, 1:],
            (inputs.seq_lens - tokens.shape[1]).long(),
            scratch(inputs, "tree_mask", squares, torch.bool),
            inputs.rows.long(),
            inputs.token_table,
            with_mrope=True,
        )
    places = torch.arange(len(found), device=found.device)
    if not (torch.equal(found, inputs.tokens) and torch.equal(index.flatten(), places)):
        message = "tokens of the chain, or their numbers, are not those of the batch"
        raise RuntimeError(message)
    built = {
        "slot_mapping": slots,
        "tree_mask": mask,
        "tree_positions": positions,
        "first_children": children,
        "next_siblings": siblings,
    }[inputs.output]
    inputs.buffer[: built.numel()] = built.flatten()


@builder(
    "sglang-pack-verify-mask",
    PACK_FILE,
    "pack_verify_mask_into",
    {"packed_mask": "kept"},
    more=_alike,
)
def pack_verify_mask(inputs: BatchInputs) -> None:
    """Pack masks of all keys into bits, of as many new tokens of each request."""
    width = len(inputs.tokens) // len(inputs.rows)
    sizes = (inputs.seq_lens * width + 7) // 8
    with load(PACK_FILE, _stubs) as kernels:
        kernels.pack_verify_mask_into(
            inputs.mask,
            torch.nn.functional.pad(inputs.seq_lens.cumsum(0), (1, 0)).int(),
            torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
            inputs.buffer,
            batch_size=len(inputs.rows),
            query_width=width,
            max_kv_len=int(inputs.seq_lens.max()),
        )


def _branched(problem: BatchProblem) -> str | bool:
    """Whether a batch has a request, and something is drafted of each; a reason where not."""
    if not all(keys for _, keys in problem.steps) or not problem.drafts:
        return "a batch has a request, and drafts a token"
    return _few_drafts(problem)


def _draft_decode(inputs: BatchInputs, table: torch.Tensor, **options: object) -> None:
    """Launch the kernel for all steps of the drafter, of which the last has all others' entries."""
    (count, window, sinks), steps = inputs.branches, inputs.num_drafts
    requests = len(inputs.rows)
    ends = (inputs.seq_lens - inputs.rejected).long()
    seen = ends.clamp(max=window + sinks) if window else ends
    lengths = seen.repeat_interleave(count)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    branches = torch.arange(len(starts), device=ends.device)
    sizes = {"draft_kv_indices": int(starts[-1]) + len(lengths) * steps,
             "draft_kv_indptr": len(starts)}  # fmt: skip
    written = {name: scratch(inputs, name, size, torch.int32).repeat(steps, 1)
               for name, size in sizes.items()}  # fmt: skip
    indices, indptr = written.values()
    indptr[:, 0] = 0  # the backend's buffer begins with it, and the kernel leaves it
    before = indices[0].clone()
    blocks = 2 if "NUM_STEPS" in options else 1
    with load(LOCS_FILE, _stubs) as kernels:
        kernels.generate_draft_decode_kv_indices[(steps * blocks, requests, count)](
            inputs.rows.long(),
            table,
            ends,
            indices,
            indptr,
            ends.repeat_interleave(count),
            table.stride(0),
            indices.shape[1],
            indptr.shape[1],
            next_power_of_two(requests),
            next_power_of_two(steps),
            next_power_of_two(requests * count),
            inputs.page_size,
            window,
            sinks,
            **options,
        )
    inputs.buffer.copy_(written[inputs.output][-1])
    place = torch.arange(int((lengths + steps).sum()), device=ends.device)
    place -= (starts[:-1] + branches[:-1] * steps).repeat_interleave(lengths + steps)
    for step in range(1, steps):
        wanted = before.clone()
        of_step = place < (lengths + step).repeat_interleave(lengths + steps)
        entries = indices[-1, : len(place)][of_step]
        wanted[: len(entries)] = entries
        found = indptr[step - 1, : len(starts)], indices[step - 1]
        if not (torch.equal(found[0], starts + branches * step) and torch.equal(found[1], wanted)):
            message = f"step {step} of {steps} sees other keys than the last one does"
            raise RuntimeError(message)


DRAFT_DECODE = {"draft_kv_indices": "kept", "draft_kv_indptr": "kept"}
"""What the drafter's steps are given of a batch."""


@builder(
    "sglang-draft-kv-indices",
    LOCS_FILE,
    "generate_draft_decode_kv_indices",
    DRAFT_DECODE,
    more=_branched,
    sized=True,
)
def draft_kv_indices(inputs: BatchInputs) -> None:
    """Copy the slots that each branch sees from a table of slots, by one program a branch."""
    _draft_decode(inputs, inputs.token_table)


@builder(
    "sglang-draft-kv-indices-of-pages",
    LOCS_FILE,
    "NUM_STEPS",
    DRAFT_DECODE,
    more=_branched,
    sized=True,
)
def draft_kv_indices_of_pages(inputs: BatchInputs) -> None:
    """Compute them from pages of another pool, by several programs a branch."""
    _draft_decode(
        inputs,
        inputs.block_table ^ 1,
        NUM_STEPS=inputs.num_drafts,
        ENTRY_PAGE_SIZE=inputs.page_size,
        v2p=other_pool(inputs, 1),
        TRANSLATE=True,
    )
