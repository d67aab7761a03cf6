"""Optional features of problems: drawn for implementations that name them."""

from __future__ import annotations

from ..reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    RouteProblem,
    SlotsProblem,
)
from ..reference.formats.cache_elements import CACHE_FEATURES, SCALE_LAYOUTS
from ..reference.moe.weights import WEIGHT_FORMATS
from ..reference.problems.cache_names import layout_of
from ..reference.tensors.slots import PAGES

LATER_ACTIVATIONS = ("swiglu_step", "situ", "geglu1")
"""Activations that are drawn only where named: kernels were written before they were here."""
MOE_FEATURES = (
    "moe_biases",
    "interleaved_w13",
    "expert_parallel",
    "weights_on_input",
    "shared_experts",
    "duplicate_ids",
    *dict.fromkeys(form.feature for form in WEIGHT_FORMATS.values()),
    "quantized_hidden",
    "swiglu_parameters",
    "strided_hidden",
    *LATER_ACTIVATIONS,
    "output_norm",
    "routed_scaling_factor",
    "shared_gate",
    "one_product",
    "identity_experts",
    "padded_widths",
)
"""Those of ``moe`` that are drawn only where named."""
ROUTE_FEATURES = (
    "renormalise_floor",
    "expert_scales",
    "best_of_each_group",
    "joint_shared_experts",
    "hash_routing",
    "sparsemixer",
)
"""Those of ``route``, which are drawn only where named."""
ROUTE_VALUES = {"bf16_bias": ("bias_dtype", "float32"), "group_score": ("group_score", "")}
"""Those of ``route`` that other values than one of a problem's field need."""
FLAGS = (
    "custom_mask",
    "per_head_scales",
    "different_kv_strides",
    "alibi",
    "causal_by_request",
    "mask_by_head",
    "two_sided_window",
    "spans_in_window",
)
"""Those of attention that are the name of a problem's field."""
STATES = {"padded": "padded_states", "different": "different_state_strides"}
"""Those of merging, by what they need of a problem's ``strides``."""
MASKS = {
    "image_spans": ("spans", ""),
    "chunked_attention": ("chunk", 0),
    "dilated_window": ("window_dilation", 1),
    "sink_tokens": ("sink_tokens", 0),
    "logits_bias": ("logits_bias", ""),
    "alibi_sqrt": ("alibi_function", "linear"),
}
"""Those of attention that other values than one of a problem's field need."""
CONTEXT = "context_tokens"
"""Feature of merging a first state that not all tokens have."""
LSE_VIEWS = "lse_views"
"""Feature of merging lses whose strides are not dense."""
INF_MARKS = "inf_marks_empty"
"""Feature of merging states of no keys whose lse is inf."""
FAR_SLOTS = "far_slots"
"""Feature of slots that do not fit into int32."""
INT32_SLOTS = 2**31
"""Slots that int32 can count."""
ALGEBRA = "float64_algebra"
"""Feature of a Triton kernel that is the operation's in float64, without what hides a rounding."""
APPENDS = "append_and_attend"
"""Feature of attention over pages whose calls append the new keys before they attend."""
ROUTES = "router_logits"
"""Feature of experts whose calls route by themselves."""
UNDEFINED = "undefined_without_keys"
"""Feature of attention that promises nothing of rows which see no key."""
INTERPRETED = "interpreted"
"""What laws may need where Triton's interpreter runs the kernels; no feature to declare."""
FEATURES = (
    "custom_mask",
    "per_head_scales",
    *CACHE_FEATURES,
    "fp8_q",
    "mla",
    "different_kv_strides",
    "window_right",
    "tree",
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
    *STATES.values(),
    CONTEXT,
    LSE_VIEWS,
    INF_MARKS,
    *ROUTE_FEATURES,
    *ROUTE_VALUES,
    *MOE_FEATURES,
    FAR_SLOTS,
    "nondeterministic",
    "phases",
    "no_host_sync",
    "large_weights",
    "large_tensors",
    "large_caches",
    "large_rows",
    "large_workspaces",
    "guarded_sums",
    "host_bounds",
    "slot_mapping",
    "batch_invariant",
    "unread_hidden_keys",
    "padded_rows",
    "unread_padding",
    "nan_codes",
    ALGEBRA,
    APPENDS,
    ROUTES,
    UNDEFINED,
)
"""What an implementation may opt into. Those before ``nondeterministic`` are drawn only where
named: quantised caches come with ``inputs.kv_format``, which says what they hold, and
``inputs.kv_cache_sf``, which ``per_token_head_kv`` has for each token and head (append_paged_kv
writes and returns them), FP8 queries with
``inputs.q_scale``; ``int4_kv`` has zero points in the lowest bits of these scales, and
``zero_point_kv`` has them beside the scales, in the model's dtype; ``fp8_kv`` and
``fp8_q`` of ragged_attention are FP8 ``inputs.k``, ``inputs.v`` and ``inputs.q``; ``fp8_ds_mla``
and ``nvfp4_ds_mla``, which need ``mla`` too, are records of bytes, and ``inputs.v_cache`` is
``inputs.k_cache``; ``mla`` is multi-head latent attention: there is one key-value head, and
``inputs.v_cache`` is a view of the first channels of ``inputs.k_cache``; ``different_kv_strides``:
K and V lie by themselves, in rows and pages of strides of their own; ``kv_views``: they are views
of one allocation, in one row, interleaved by page, slot or head, or between the pages of other
layers, and axes of size 1 have any stride; ``strided_channels``: channels have a stride of 2;
``window_right``: an
``inputs.window_right``; ``two_sided_window``: one that is ``inputs.window_left``;
``spans_in_window``: besides ``image_spans``, an ``inputs.spans_in_window``;
``alibi``: ``inputs.alibi_slopes``; ``output_scale``: an
``inputs.output_scale``, with outputs in FP8, of merges too; ``output_divisor``: an
``inputs.output_divisor`` of outputs of any dtype;
``causal_by_request``: ``inputs.causal`` is a tensor;
``tree``: the query tokens of a request are a draft tree, which ``inputs.tree_mask`` describes, and
``inputs.custom_mask`` with all keys; ``mask_by_head``: besides ``custom_mask``, one of each
key-value head, [kv_heads, sum of T_i * S_i]; ``image_spans``: ``inputs.spans``;
``chunked_attention``: an ``inputs.attention_chunk_size``; ``dilated_window``: an
``inputs.window_dilation``; ``sink_tokens``: ``inputs.sink_tokens``; ``logits_bias``: an
``inputs.logits_bias``; ``alibi_sqrt``: besides ``alibi``, an ``inputs.alibi_function`` of
``"sqrt"``. Of ``merge_state``: ``padded_states`` are outs in wider rows,
``different_state_strides`` give ``inputs.states``, each with strides of its own, and
``context_tokens`` is ``inputs.context_tokens``; ``lse_views``: lses are views of [states, heads,
tokens], or of wider rows; ``inf_marks_empty``: an lse of inf, too, is that of a state of no keys,
as FlashAttention 2 gives it. Of ``route``: ``renormalise_floor`` is an ``inputs.renormalise_floor``
other than 1e-20, ``expert_scales`` and ``best_of_each_group`` are inputs of these names;
``joint_shared_experts``: an ``inputs.shared_experts``, mostly with a ``renormalise_floor`` of 0;
``hash_routing``: ``inputs.expert_table`` and ``inputs.input_ids``; ``sparsemixer``: an
``inputs.method`` of that name, and ``inputs.jitter``; ``bf16_bias`` is an ``inputs.bias`` in
bfloat16, and ``group_score`` an ``inputs.group_score`` other than what the method and the bias say.
Of ``moe``: ``expert_parallel`` is an offset, ids of other ranks, and -1; ``fp8_weights``,
``nvfp4_weights``, ``mxfp4_weights``, ``int8_weights``, ``mxfp8_weights`` and ``int4_weights`` give
a QuantizedMatrix for weights, and ``quantized_hidden`` for hidden states too; ``swiglu_parameters``
are alpha, beta and limit other than the activation's own, all or some of them, numbers or tensors;
``ue8m0_scales`` are FP8 blocks with e8m0 scales, ``int4_zero_points`` come with its
``zero_points``, and ``nvfp4_gate_up_scales`` are global scales [experts, 2] of w13;
``swiglu_step``, ``situ`` and ``geglu1`` are the activations of these names; ``output_norm`` is an
``inputs.output_norm_eps`` and, in part, an ``inputs.output_norm_gain``; ``routed_scaling_factor``
is one other than 1; ``shared_gate`` is one of the shared experts, which ``shared_experts`` gives;
``one_product``: there is no second product, and ``inputs.w2`` is empty; ``identity_experts`` is an
``inputs.identity_experts``; ``padded_widths``: the weights' tensors, and it may be the hidden
states', are wider than ``inputs.hidden_size`` and ``inputs.inter_size``, with zeros behind these,
and the result has ``hidden_size`` channels. Of ``map_slots`` and ``prepare_batch``:
``far_slots`` are page ids whose slots do not fit into int32.

``nondeterministic`` says that repeated calls may differ within the bound (atomics), so that they
are not compared bitwise. ``phases`` and ``no_host_sync`` are of build_metadata: that the result has
``decodes`` and ``prefills``, each with ``cum_seq_lens_q`` and ``cum_pages_kv`` besides, and that a
call never waits for the GPU: as the host cannot know how many pages there are, its
``paged_kv_indices`` may then be longer than ``paged_kv_indptr[-1]``. ``large_weights`` is of moe: a
call reads nothing of experts that no token goes to, so that weights may be larger than memory;
``large_tensors`` is of attention and append_paged_kv: no offset of a page or a row is of 32 bits,
and nothing but the batch's own pages and rows is read, or slots of new tokens written;
``large_caches`` promises as much of pages only, and ``large_rows`` that no offset of a row is of 32
bits: a token's, a state's, that of a request in a block table; ``large_workspaces`` promises it of
the rows of ``impl.gpu.workspaces``. ``guarded_sums`` is of route: weights are finite where scores
add up to nothing and there is no floor. ``lse_views`` is of attention
that writes out, too: ``inputs.lse`` is such a view. ``padded_rows`` is of attention: queries, block
tables, and the keys and values of ragged_attention have rows behind those that ``qo_indptr`` and
``kv_indptr`` name, which are not read; out and lse have as many as the queries. ``host_bounds`` is
of attention: ``inputs.max_q_len`` and ``inputs.max_kv_len`` are read, so that they are made larger
than the truth. ``slot_mapping`` is of append_paged_kv: slots are taken from
``inputs.slot_mapping``, where -1 stands at tokens that are not written. ``batch_invariant`` is of
attention: the promise that a request has the same bits alone and in any batch, and
``unread_hidden_keys`` that what no query of the call may see (behind every window, masked from all
rows, past a length, in the tail of a page, their scales too) never changes the result, whatever
bytes lie there, NaN included. ``unread_padding`` is of moe, and promises the same of what lies
behind ``hidden_size`` and ``inter_size``. ``nan_codes`` promises that the codes of NaN in FP8
caches, weights and block scales, of either sign, are read as NaN. ``float64_algebra`` promises of a
Triton kernel that its answer is the operation's where each of its floats is computed in float64: no
polynomial stands for an exponential, nothing is added to a denominator, and no factor of its is
rounded on the host.

Three are words for kernels whose calls have another contract. ``append_and_attend`` is of
paged_attention: the call writes ``inputs.new_k`` and ``inputs.new_v``, [tokens, kv_heads,
head_dim], into the slots of ``inputs.metadata.slot_mapping()``, which hold NaN before, and then
attends; it writes nothing else into the caches. ``router_logits`` is of moe: the call takes
``inputs.router_logits``, float32 [tokens, experts], and routes by the method ``renormalize``, with
as many experts a token as ``inputs.topk_ids`` has columns; these ids and their weights are others.
``undefined_without_keys`` is of attention: rows that see no key hold anything."""


def drawn_features(problem: Problem) -> list[str]:
    """Name the features that a problem needs."""
    if isinstance(problem, AttentionProblem):
        return _of_attention(problem)
    if isinstance(problem, MoEProblem):
        return _of_experts(problem)
    if isinstance(problem, RouteProblem):
        return _of_routing(problem)
    if isinstance(problem, BatchedMoEProblem):
        return _of_experts(problem.rows)
    if isinstance(problem, SlotsProblem):
        last = (problem.first_page + PAGES) * problem.page_size
        return [FAR_SLOTS] if last > INT32_SLOTS else []
    return _of_merging(problem) if isinstance(problem, MergeProblem) else []


def inexpressible(problem: Problem) -> dict[str, str]:
    """Return, by feature, in which calls only it is judged, where this one is none of them."""
    if isinstance(problem, MoEProblem):
        odd = problem.assignment in ("duplicates", "masked") or problem.identity_experts
        if odd or problem.weights_on_input or problem.regime in ("zero_weights", "exact_grid"):
            return {ROUTES: "where weights of other experts each are a softmax, on the output"}
    if isinstance(problem, AttentionProblem) and problem.operation == "paged_attention":
        lengths = zip(problem.query_lens, problem.seq_lens, strict=True)
        shared = problem.shared_prefix_pages * problem.page_size
        if problem.kv_cache:
            return {APPENDS: "on caches in the model's dtype"}
        if any(t > s or (t and s - t < shared) for t, s in lengths):
            return {APPENDS: "where each query token brings a key of its own"}
    return {}


def _of_merging(problem: MergeProblem) -> list[str]:
    strides = [STATES[problem.strides]] if problem.strides else []
    lses = [LSE_VIEWS] if problem.lse_layout else []
    marks = [INF_MARKS] if problem.inf_marks_empty else []
    marks += ["output_scale"] if problem.output_scale is not None else []
    return [*strides, *([] if problem.context == "all" else [CONTEXT]), *lses, *marks]


def _of_attention(problem: AttentionProblem) -> list[str]:
    found = [name for name in FLAGS if getattr(problem, name)]
    found += ["mla"] if problem.values_in_keys else []
    found += ["output_scale"] if problem.output_scale is not None else []
    if problem.kv_views:
        found += ["strided_channels" if problem.kv_views == "channels" else "kv_views"]
    found += ["output_divisor"] if problem.output_divisor != 1 else []
    found += ["window_right"] if problem.window_right >= 0 else []
    found += ["tree"] if problem.tree else []
    found += [name for name, (field, off) in MASKS.items() if getattr(problem, field) != off]
    if not problem.kv_cache:
        return found
    layout = SCALE_LAYOUTS[layout_of(problem.kv_cache)]
    cache = [problem.cache_entry.feature, layout.feature, "fp8_q" if problem.q_dtype else ""]
    return [*found, *filter(None, cache)]


def _of_routing(problem: RouteProblem) -> list[str]:
    needs = (
        problem.renormalise_floor != problem.usual_floor,
        problem.expert_scales,
        problem.best_of_each_group,
        problem.shared_experts > 0,
        problem.hash_vocabulary > 0,
        problem.method == "sparsemixer",
    )
    found = [name for name, needed in zip(ROUTE_FEATURES, needs, strict=True) if needed]
    return found + [n for n, (field, off) in ROUTE_VALUES.items() if getattr(problem, field) != off]


def _of_experts(problem: MoEProblem) -> list[str]:
    needs = {
        "moe_biases": problem.biases,
        "interleaved_w13": problem.interleaved,
        "expert_parallel": problem.expert_parallel or problem.assignment == "masked",
        "weights_on_input": problem.weights_on_input,
        "shared_experts": problem.shared_experts > 0,
        "duplicate_ids": problem.assignment == "duplicates",
        **({WEIGHT_FORMATS[problem.quantized].feature: True} if problem.quantized else {}),
        "quantized_hidden": problem.quantized_hidden,
        "swiglu_parameters": bool(problem.swiglu_parameters),
        "strided_hidden": problem.strided_hidden,
        "output_norm": bool(problem.output_norm),
        "routed_scaling_factor": problem.routed_scaling_factor != 1,
        "shared_gate": bool(problem.shared_gate),
        "one_product": problem.one_product,
        **({problem.activation: True} if problem.activation in LATER_ACTIVATIONS else {}),
        "identity_experts": problem.identity_experts > 0,
        "padded_widths": problem.pad_to > 0,
    }
    return [name for name, needed in needs.items() if needed]
