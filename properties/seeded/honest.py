"""Honest controls: right answers by the ways that real kernels take. No law may accuse one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ...impl import Target
from ...impl.features import CONTEXT, INF_MARKS, LSE_VIEWS, MASKS, STATES
from ...reference import Arithmetic, AttentionProblem, Problem
from ...reference.formats.cache_elements import CACHE_FEATURES
from ...reference.tensors.inputs import (
    AppendInputs,
    AttentionInputs,
    MergeInputs,
    MetadataInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from .append_codes import (
    has_four_bits,
    is_record,
    of_rows,
    record,
    tile_scales,
    write_codes,
    write_records,
)
from .appending import (
    Caches,
    addresses,
    codes_of,
    codes_with_zero_points,
    has_zero_points,
    pairs_of,
    rounded,
    scales_of,
    write,
    write_pairs,
    write_scaled,
)
from .catalogue import SeededBug, seeded
from .decoding import widened, widened_rows
from .kernels import (
    HONEST,
    Request,
    Stages,
    State,
    assemble,
    attend,
    close,
    finite,
    scan,
    to_codes,
)

CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
EVERYTHING = (
    "custom_mask",
    "tree",
    "per_head_scales",
    "different_kv_strides",
    "window_right",
    "alibi",
    "causal_by_request",
    "output_scale",
    "mask_by_head",
    *MASKS,
    "kv_views",
    "strided_channels",
    "output_divisor",
    "two_sided_window",
    "spans_in_window",
)
QUANTISED = (*CACHE_FEATURES, "fp8_q")
PLAIN = AttentionProblem()
OPTIONS = ("k_scale", "v_scale", "sm_scale", "logits_soft_cap", "sinks")
SPLITS = 3
PARTS = 4


@seeded(CONTROLS, "paged_attention", control="honest", features=(*EVERYTHING, "large_tensors"))
def float32(inputs: PagedAttentionInputs) -> Pair:
    """Loop over tiles of keys in float32."""
    return attend(inputs)


@seeded(CONTROLS, "paged_attention", control="honest", features=(*EVERYTHING, *QUANTISED))
def quantised_float32(inputs: PagedAttentionInputs) -> Pair:
    """Widen quantised caches to float32, then loop over tiles of keys."""
    return attend(widened(inputs))


@seeded(
    CONTROLS,
    "paged_attention",
    control="honest",
    features=QUANTISED,
    arithmetic=Arithmetic(probabilities="inputs"),
)
def quantised_rounded(inputs: PagedAttentionInputs) -> Pair:
    """Widen quantised caches, and round probabilities to the queries' dtype before V."""
    dtype = inputs.q.dtype if inputs.kv_format else inputs.v_cache.dtype
    stages = replace(HONEST, probabilities=lambda rounded, _: _rounded(rounded, dtype))
    return attend(widened(inputs), stages)


@seeded(
    CONTROLS,
    "paged_attention",
    control="honest",
    features=(*QUANTISED, "per_head_scales"),
    arithmetic=Arithmetic(probabilities="inputs", dequantized="inputs"),
)
def quantised_in_inputs_dtype(inputs: PagedAttentionInputs) -> Pair:
    """Widen quantised caches to the queries' dtype, scaled in it, before anything is multiplied."""
    dtype = inputs.q.dtype if inputs.kv_format else inputs.v_cache.dtype
    stages = replace(HONEST, probabilities=lambda rounded, _: _rounded(rounded, dtype))
    if inputs.kv_format is None or dtype.itemsize == 1:
        return attend(widened(inputs), stages)
    plain = widened(inputs)

    def scaled(cache: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        by_head = torch.as_tensor(scale, dtype=torch.float32)
        if by_head.dim():
            by_head = by_head.view((1, -1, 1) if inputs.kv_layout == "NHD" else (-1, 1, 1))
        return (cache.to(dtype).float() * by_head).to(dtype).float()

    keys, values = scaled(plain.k_cache, plain.k_scale), scaled(plain.v_cache, plain.v_scale)
    return attend(replace(plain, k_cache=keys, v_cache=values, k_scale=1.0, v_scale=1.0), stages)


def _without_scales(problem: Problem, target: Target) -> bool | str:
    del target
    assert isinstance(problem, AttentionProblem)  # noqa: S101  of paged_attention
    used = [name for name in OPTIONS if getattr(problem, name) != getattr(PLAIN, name)]
    return f"no {used[0]}" if used else True


@seeded(
    CONTROLS,
    "paged_attention",
    control="honest",
    features=QUANTISED,
    supports=_without_scales,
)
def without_scales(inputs: PagedAttentionInputs) -> Pair:
    """Refuse every scale, cap and sink, as plain references do, and be right otherwise."""
    default = 1.0 / math.sqrt(inputs.q.shape[-1])
    plain = replace(widened(inputs), k_scale=1.0, v_scale=1.0, sm_scale=default)
    return attend(replace(plain, logits_soft_cap=0.0, sinks=None))


@seeded(CONTROLS, "ragged_attention", control="honest", features=EVERYTHING)
def ragged_float32(inputs: RaggedAttentionInputs) -> Pair:
    """Loop over tiles of keys in float32."""
    return attend(inputs)


@seeded(CONTROLS, "ragged_attention", control="honest", features=(*EVERYTHING, "fp8_kv", "fp8_q"))
def ragged_quantised(inputs: RaggedAttentionInputs) -> Pair:
    """Widen keys, values and queries in FP8 to float32, then loop over tiles of keys."""
    return attend(widened_rows(inputs))


@seeded(
    CONTROLS,
    "ragged_attention",
    control="honest",
    features=("fp8_kv", "fp8_q"),
    arithmetic=Arithmetic(probabilities="inputs"),
)
def ragged_quantised_rounded(inputs: RaggedAttentionInputs) -> Pair:
    """Widen FP8, and round probabilities to the queries' dtype before V."""
    dtype = inputs.q.dtype if inputs.v.dtype.itemsize == 1 else inputs.v.dtype
    stages = replace(HONEST, probabilities=lambda rounded, _: _rounded(rounded, dtype))
    return attend(widened_rows(inputs), stages)


def _rounded(probabilities: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return probabilities.to(dtype).float()


@seeded(
    CONTROLS,
    "paged_attention",
    control="honest",
    features=EVERYTHING,
    arithmetic=Arithmetic(probabilities="inputs"),
)
def bf16_probabilities(inputs: PagedAttentionInputs) -> Pair:
    """Round probabilities to V's dtype before they multiply V, but not in the row sum."""
    return attend(inputs, replace(HONEST, probabilities=_rounded))


@seeded(CONTROLS, "paged_attention", control="honest")
def split_kv(inputs: PagedAttentionInputs) -> Pair:
    """Attend to parts of the keys and merge the partial states, with a base-2 LSE inside."""
    return _split(inputs, SPLITS)


@seeded(
    CONTROLS,
    "paged_attention",
    control="honest",
    arithmetic=Arithmetic(
        probabilities="inputs",
        row_sum="probabilities",
        partial_outputs=True,
        merged_outputs=PARTS // 2,
        tanh="approximate",
    ),
)
def as_flashinfer(inputs: PagedAttentionInputs) -> Pair:
    """Round as FlashInfer's FA2: sums of rounded probabilities, parts in the output's dtype.

    So are the outputs of every second part, which are merged first.
    """
    stages = replace(HONEST, probabilities=_rounded, summed=_rounded, cap=_approximate_cap)
    return _split(inputs, PARTS, stages, rows=PARTS // 2)


def _approximate_cap(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Bend logits with a tanh of which half of a float32's digits are right."""
    if not soft_cap:
        return logits
    return soft_cap * torch.tanh(logits / soft_cap).to(torch.float16).float()


def _split(inputs: AttentionInputs, splits: int, stages: Stages = HONEST, *, rows: int = 0) -> Pair:
    """Attend to parts and merge them; with rows each row's first, rounding all that is merged."""

    def one(request: Request) -> Pair:
        step = max(1, -(-request.num_keys // splits))
        starts = range(0, max(request.num_keys, 1), step)
        parts = [
            _base_2(scan(request, inputs, stages, keys=slice(a, min(a + step, request.num_keys))))
            for a in starts
        ]
        if rows:
            parts = [(out.to(inputs.out_dtype).float(), lse) for out, lse in parts]
            merged = [_base_2(_merged(parts[row::rows])) for row in range(min(rows, len(parts)))]
            parts = [(out.to(inputs.out_dtype).float(), lse) for out, lse in merged]
        return close(_merged(parts), request, inputs)

    return assemble(inputs, one)


def _merged(parts: list[Pair]) -> State:
    """Merge outputs with their base-2 LSEs."""
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    largest = lses.amax(dim=0)
    weights = torch.exp2(lses - finite(largest))
    return State((weights * outs).sum(dim=0), weights.sum(dim=0), largest * math.log(2.0))


def _base_2(state: State) -> Pair:
    out = state.weighted / torch.where(state.total == 0, 1.0, state.total)
    return out, state.largest * math.log2(math.e) + torch.log2(state.total)


@seeded(CONTROLS, "paged_attention", control="honest")
def strided_outputs(inputs: PagedAttentionInputs) -> Pair:
    """Return views that are not contiguous."""
    out, lse = attend(inputs)
    wide = out.new_full((*out.shape[:-1], 2 * out.shape[-1] + 1), torch.nan)
    wide[..., 1::2] = out
    heads_first = lse.new_full((lse.shape[1] + 3, lse.shape[0]), torch.nan)
    heads_first[: lse.shape[1]] = lse.transpose(0, 1)
    return wide[..., 1::2], heads_first[: lse.shape[1]].transpose(0, 1)


@seeded(CONTROLS, "paged_attention", control="honest", writes_out=True)
def given_outputs(inputs: PagedAttentionInputs) -> None:
    """Write into the buffers that it is given."""
    out, lse = attend(inputs)
    if inputs.out is not None and inputs.lse is not None:
        inputs.out.copy_(out)
        inputs.lse.copy_(lse)


@seeded(
    CONTROLS,
    "merge_state",
    control="honest",
    features=(*STATES.values(), CONTEXT, LSE_VIEWS, INF_MARKS, "output_scale"),
)
def merge(inputs: MergeInputs) -> Pair:
    """Merge all states at once in float32."""
    return merge_within(inputs, inputs.context_tokens)


def merge_within(inputs: MergeInputs, context_tokens: int | None) -> Pair:
    """Merge with the first state of this many tokens, of all of them if None."""
    outs, lses = torch.stack(inputs.states), inputs.lses
    if inputs.inf_marks_empty:
        lses = torch.where(lses == torch.inf, -torch.inf, lses)
    if context_tokens is not None:
        lses = lses.clone()
        outs[0, context_tokens:], lses[0, context_tokens:] = 0.0, -torch.inf
    if inputs.output_scale is None:
        return merge_states(outs, lses, inputs.out_dtype)
    out, lse = merge_states(outs, lses, torch.float32)
    return to_codes(out, inputs.output_scale).to(inputs.out_dtype), lse


def merge_states(outs: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype) -> Pair:
    """Merge outs [states, tokens, heads, dim] by natural-log lses [states, tokens, heads]."""
    largest = lses.amax(dim=0)
    weights = torch.exp(lses - finite(largest))
    total = weights.sum(dim=0)
    merged = (weights.unsqueeze(-1) * outs.float()).sum(dim=0)
    merged = merged / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return merged.to(dtype), largest + torch.log(total)


@dataclass(frozen=True)
class Built:
    """What the builders here return: the tensors of a BatchMetadata, unchecked."""

    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    seq_lens: torch.Tensor


def page_counts(inputs: MetadataInputs) -> torch.Tensor:
    """Count each request's pages."""
    return (inputs.seq_lens + inputs.page_size - 1) // inputs.page_size


def build(inputs: MetadataInputs, counts: torch.Tensor | None = None) -> Built:
    """Build a batch's metadata, with other page counts where a bug gives them."""
    counts = page_counts(inputs) if counts is None else counts
    columns = torch.arange(inputs.block_table.shape[1])
    last = torch.where(inputs.seq_lens > 0, (inputs.seq_lens - 1) % inputs.page_size + 1, 0)
    return Built(
        cumulative(inputs.query_lens),
        cumulative(counts),
        inputs.block_table[columns < counts.unsqueeze(1)],
        last.int(),
        inputs.seq_lens.clone(),
    )


@dataclass(frozen=True)
class Phase(Built):
    """The requests of one phase, and the two cumulative sums that trtllm-gen kernels take."""

    cum_seq_lens_q: torch.Tensor
    cum_pages_kv: torch.Tensor


@dataclass(frozen=True)
class Phased(Built):
    """A batch and its two phases."""

    decodes: Phase
    prefills: Phase


def num_decodes_of(inputs: MetadataInputs) -> int:
    """Count the decodes at the head of a batch, which all have as many queries as the first.

    A batch of nothing but decodes and padding is all decodes.
    """
    lengths: list[int] = inputs.query_lens.tolist()
    if not lengths or lengths[0] > inputs.decode_threshold:
        return 0
    if inputs.decode_threshold == 1:
        return next((i for i, t in enumerate(lengths) if t > 1), len(lengths))
    if all(t in (lengths[0], 0) for t in lengths):
        return len(lengths)
    return next(i for i, t in enumerate(lengths) if t != lengths[0])


def split(built: Built, num_decodes: int) -> Phased:
    """Cut a batch into its phases, each counting from its own first token and page."""
    requests = len(built.seq_lens)
    return Phased(
        **vars(built),
        decodes=_phase(built, 0, num_decodes),
        prefills=_phase(built, num_decodes, requests),
    )


def _phase(built: Built, start: int, stop: int) -> Phase:
    tokens, pages = built.qo_indptr[start : stop + 1], built.paged_kv_indptr[start : stop + 1]
    return Phase(
        qo_indptr=tokens - tokens[0],
        paged_kv_indptr=pages - pages[0],
        paged_kv_indices=built.paged_kv_indices[int(pages[0]) : int(pages[-1])],
        paged_kv_last_page_len=built.paged_kv_last_page_len[start:stop],
        seq_lens=built.seq_lens[start:stop],
        cum_seq_lens_q=tokens - tokens[0],
        cum_pages_kv=pages - pages[0],
    )


def cumulative(counts: torch.Tensor) -> torch.Tensor:
    """Return the indptr of counts: cumulative sums from 0."""
    zero = counts.new_zeros(1, dtype=torch.int32)
    return torch.cat([zero, counts.cumsum(0, dtype=torch.int32)])


class Buffers:
    """Persistent buffers, as CUDA graphs need them: results are views of their beginnings."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def store(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy values into the buffer of this name, which grows where it must."""
        buffer = self.view(name, len(values))
        buffer.copy_(values)
        return buffer

    def view(self, name: str, count: int) -> torch.Tensor:
        """Return the first elements of a buffer, with whatever an earlier batch left there."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            buffer = torch.full((2 * count + 8,), -1, dtype=torch.int32)
            self._buffers[name] = buffer
        return buffer[:count]


_persistent = Buffers()


@seeded(CONTROLS, "build_metadata", control="honest")
def persistent_metadata(inputs: MetadataInputs) -> Built:
    """Fill persistent buffers and return views of them."""
    return Built(**{name: _persistent.store(name, t) for name, t in vars(build(inputs)).items()})


_persistent_phases = Buffers()


@seeded(CONTROLS, "build_metadata", control="honest", features=("phases",))
def phased_metadata(inputs: MetadataInputs) -> Phased:
    """Fill persistent buffers and cut views of them into decodes and prefills."""
    stored = {name: _persistent_phases.store(name, t) for name, t in vars(build(inputs)).items()}
    return split(Built(**stored), num_decodes_of(inputs))


@seeded(
    CONTROLS,
    "append_paged_kv",
    control="honest",
    features=(
        "fp8_kv", "nvfp4_kv", "interleaved_v_scales", "per_token_head_kv", "int4_kv",
        "zero_point_kv", "mla", "fp8_ds_mla", "different_kv_strides", "kv_views",
        "strided_channels",
    ),
)  # fmt: skip
def append(inputs: AppendInputs) -> Caches:
    """Write new keys and values into their slots, as the cache holds them."""
    if is_record(inputs):
        return write_records(inputs, record(inputs.k, tile_scales(inputs.k)))
    if has_four_bits(inputs):
        return write_codes(inputs, *of_rows(inputs))
    if has_zero_points(inputs):
        pairs = pairs_of(inputs)
        return write_pairs(inputs, codes_with_zero_points(inputs, pairs), pairs)
    if inputs.kv_cache_sf is not None:
        scales = scales_of(inputs)
        return write_scaled(inputs, codes_of(inputs, scales), scales)
    return write(inputs, *addresses(inputs), rounded(inputs))
