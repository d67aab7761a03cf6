"""Optional features of problems: drawn for implementations that name them."""

from __future__ import annotations

from ..reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    QuantizeProblem,
    RouteProblem,
    SlotsProblem,
)
from ..reference.formats.cache_elements import SCALE_LAYOUTS
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
E8M0_SCALES, SWIZZLED_SCALES = "e8m0_scales", "swizzled_scales"
"""Features of quantisers whose scales are codes, and lie in tiles."""
E2M1_CODES, E4M3_SCALES, POWER_RULES = "e2m1_codes", "e4m3_scales", "power_rules"
"""Features of quantisers to four bits."""
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
INT64_INPUTS = "int64_inputs"
"""Feature of builders that take lengths, rows and tables in int64."""
REFUSES = "refuses_malformed"
"""Feature of builders that raise an error at what no batch has."""
INTERPRETED = "interpreted"
"""What laws may need where Triton's interpreter runs the kernels; no feature to declare."""
DRAWN = {
    "custom_mask": "a mask of each query row and key, `inputs.custom_mask`",
    "per_head_scales": "`inputs.k_scale` and `inputs.v_scale` are tensors, one for each head",
    "fp8_kv": "FP8 caches, as `inputs.kv_format` says; of ragged_attention FP8 `k` and `v`",
    "nvfp4_kv": "NVFP4 caches with block scales, `inputs.kv_cache_sf`",
    "per_token_head_kv": "`inputs.kv_cache_sf` has a scale for each token and head of a quantised "
    "cache; append_paged_kv writes and returns them",
    "int4_kv": "INT4 caches with zero points in the lowest bits of their scales",
    "zero_point_kv": "caches with zero points beside the scales, in the model's dtype",
    "fp8_ds_mla": "with `mla`: records of bytes, and `inputs.v_cache` is `inputs.k_cache`",
    "nvfp4_ds_mla": "with `mla`: records of bytes, and `inputs.v_cache` is `inputs.k_cache`",
    "interleaved_v_scales": "with `nvfp4_kv`: V's block scales lie in trtllm-gen's order",
    "fp8_q": "FP8 queries with `inputs.q_scale`",
    "mla": "multi-head latent attention: one key-value head, and `inputs.v_cache` is a view of the "
    "first channels of `inputs.k_cache`",
    "different_kv_strides": "K and V have rows and pages of strides of their own",
    "window_right": "`inputs.window_right`",
    "tree": "a request's query tokens are a draft tree: `inputs.tree_mask`, and an "
    "`inputs.custom_mask` with all keys",
    "alibi": "`inputs.alibi_slopes`",
    "causal_by_request": "`inputs.causal` is a tensor, one for each request",
    "output_scale": "FP8 outputs with `inputs.output_scale`, of merges too",
    "mask_by_head": "with `custom_mask`: one of each key-value head, [kv_heads, sum of T_i * S_i]",
    "image_spans": "`inputs.spans`",
    "chunked_attention": "`inputs.attention_chunk_size`",
    "dilated_window": "`inputs.window_dilation`",
    "sink_tokens": "`inputs.sink_tokens`",
    "logits_bias": "`inputs.logits_bias`",
    "alibi_sqrt": "with `alibi`: an `inputs.alibi_function` of `sqrt`",
    "kv_views": "K and V are views of one allocation, in one row, interleaved by page, slot or "
    "head, or between the pages of other layers; axes of size 1 have any stride",
    "strided_channels": "K and V have channels with a stride of 2",
    "output_divisor": "an `inputs.output_divisor` of outputs of any dtype",
    "two_sided_window": "an `inputs.window_right` that is `inputs.window_left`",
    "spans_in_window": "with `image_spans`: `inputs.spans_in_window`",
    "padded_states": "merge_state: `inputs.outs` lies in wider rows",
    "different_state_strides": "merge_state: `inputs.states`, each with strides of its own",
    CONTEXT: "merge_state: a first state that not all tokens have, `inputs.context_tokens`",
    LSE_VIEWS: "lses of merge_state, and an `inputs.lse` to write, are views of [states, heads, "
    "tokens], or of wider rows",
    INF_MARKS: "merge_state: an lse of inf, too, is that of a state of no keys, as "
    "FlashAttention 2 gives it",
    "renormalise_floor": "an `inputs.renormalise_floor` other than 1e-20",
    "expert_scales": "`inputs.expert_scales`",
    "best_of_each_group": "`inputs.best_of_each_group`",
    "joint_shared_experts": "route: `inputs.shared_experts`, mostly with a floor of 0",
    "hash_routing": "`inputs.expert_table` and `inputs.input_ids`",
    "sparsemixer": "an `inputs.method` of that name, and `inputs.jitter`",
    "bf16_bias": "an `inputs.bias` in bfloat16",
    "group_score": "an `inputs.group_score` other than what the method and the bias say",
    "moe_biases": "`inputs.w13_bias` and `inputs.w2_bias`",
    "interleaved_w13": "the rows of gate and up alternate in `inputs.w13`",
    "expert_parallel": "an offset of the first expert, ids of other ranks, and -1",
    "weights_on_input": "the weights of routing scale the input, not the output",
    "shared_experts": "moe: experts that all tokens go to",
    "duplicate_ids": "a token may go to one expert twice",
    "fp8_weights": "FP8 weights, a QuantizedMatrix",
    "nvfp4_weights": "NVFP4 weights, a QuantizedMatrix",
    "mxfp4_weights": "MXFP4 weights, a QuantizedMatrix",
    "int8_weights": "INT8 weights, a QuantizedMatrix",
    "ue8m0_scales": "with `fp8_weights`: blocks with e8m0 scales",
    "mxfp8_weights": "MXFP8 weights, a QuantizedMatrix",
    "int4_weights": "INT4 weights, a QuantizedMatrix",
    "int4_zero_points": "with `int4_weights`: `zero_points`",
    "nvfp4_gate_up_scales": "with `nvfp4_weights`: global scales [experts, 2] of `inputs.w13`",
    "quantized_hidden": "hidden states are a QuantizedMatrix too",
    "swiglu_parameters": "alpha, beta and limit other than the activation's own, all or some, "
    "numbers or tensors",
    "strided_hidden": "hidden states lie in wider rows",
    "swiglu_step": "the activation of this name",
    "situ": "the activation of this name",
    "geglu1": "the activation of this name",
    "output_norm": "`inputs.output_norm_eps` and, in part, `inputs.output_norm_gain`",
    "routed_scaling_factor": "one other than 1",
    "shared_gate": "with `shared_experts`: a gate of theirs",
    "one_product": "there is no second product, and `inputs.w2` is empty",
    "identity_experts": "`inputs.identity_experts`",
    "padded_widths": "weights, and it may be hidden states, are wider than `inputs.hidden_size` "
    "and `inputs.inter_size`, with zeros behind these; the result has `hidden_size` channels",
    E8M0_SCALES: "quantize: scales are uint8 codes of powers of two",
    SWIZZLED_SCALES: "with scales of a byte: `inputs.scale_layout` is `swizzled`",
    E2M1_CODES: "quantize: codes are e2m1, two a uint8, the even channel in the low nibble",
    E4M3_SCALES: "with `e2m1_codes`: float8_e4m3fn scales beside `inputs.global_scale`",
    POWER_RULES: "with `e2m1_codes` and `e8m0_scales`: another `inputs.to.power_rule` than `up`",
    FAR_SLOTS: "map_slots and prepare_batch: page ids whose slots do not fit into int32",
}
"""Optional features by name, each with what a call has then; they are drawn only where named.
Quantised caches come with ``inputs.kv_format`` and ``inputs.kv_cache_sf``."""
PROMISED = {
    "nondeterministic": "repeated calls may differ within the bound, as with atomics: they are not "
    "compared bitwise",
    "phases": "build_metadata: the result has `decodes` and `prefills`, each with "
    "`cum_seq_lens_q` and `cum_pages_kv` besides",
    "no_host_sync": "build_metadata: a call never waits for the GPU; as the host cannot know how "
    "many pages there are, `paged_kv_indices` may be longer than `paged_kv_indptr[-1]`",
    INT64_INPUTS: "builders of metadata, slots and batches: lengths, rows and tables may be int64",
    REFUSES: "build_metadata: a negative length, a negative page, and more keys than a row of the "
    "block table has pages for raise an error that names the argument",
    "large_weights": "moe: nothing is read of experts that no token goes to, so that weights may "
    "be larger than memory",
    "large_tensors": "attention and append_paged_kv: no offset of a page or a row is of 32 bits; "
    "only the batch's own pages and rows are read, or slots of new tokens written",
    "large_caches": "as `large_tensors`, of pages only",
    "large_rows": "no offset of a row is of 32 bits: a token's, a state's, a request's in a block "
    "table",
    "large_workspaces": "the same of the rows of `impl.gpu.workspaces`",
    "guarded_sums": "route: weights are finite where scores add up to nothing without a floor",
    "host_bounds": "attention reads `inputs.max_q_len` and `inputs.max_kv_len`: they are made "
    "larger than the truth",
    "slot_mapping": "append_paged_kv takes slots from `inputs.slot_mapping`, where -1 stands at "
    "tokens that are not written",
    "batch_invariant": "attention: a request has the same bits alone and in any batch",
    "unread_hidden_keys": "what no query of the call may see (behind every window, masked from all "
    "rows, past a length, in the tail of a page, their scales too) never changes the result, "
    "whatever bytes lie there, NaN included",
    "padded_rows": "attention: queries, block tables, and `k` and `v` of ragged_attention have "
    "rows behind those that `qo_indptr` and `kv_indptr` name, which are not read; out and lse have "
    "as many as the queries",
    "unread_padding": "moe: what lies behind `hidden_size` and `inter_size` never changes the "
    "result",
    "nan_codes": "codes of NaN in FP8 caches, weights and block scales, of either sign, are NaN",
    ALGEBRA: "a Triton kernel's answer is the operation's where each of its floats is computed in "
    "float64: no polynomial stands for an exponential, nothing is added to a denominator, no "
    "factor is rounded on the host",
    APPENDS: "paged_attention: the call writes `inputs.new_k` and `inputs.new_v`, [tokens, "
    "kv_heads, head_dim], into the slots of `inputs.metadata.slot_mapping()`, which hold NaN "
    "before, and then attends; it writes nothing else into the caches",
    ROUTES: "moe: the call takes `inputs.router_logits`, float32 [tokens, experts], and routes by "
    "the method `renormalize`, with as many experts a token as `inputs.topk_ids` has columns; "
    "these ids and their weights are others",
    UNDEFINED: "attention: rows that see no key hold anything",
}
"""What an implementation may say of its calls by a word in ``features``, and what it then says."""
FEATURES = {**DRAWN, **PROMISED}
"""What an implementation may opt into, by name, and what each means."""


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
    if isinstance(problem, QuantizeProblem):
        return _of_quantising(problem)
    return _of_others(problem)


def _of_others(problem: Problem) -> list[str]:
    if isinstance(problem, SlotsProblem):
        last = (problem.first_page + PAGES) * problem.page_size
        return [FAR_SLOTS] if last > INT32_SLOTS else []
    return _of_merging(problem) if isinstance(problem, MergeProblem) else []


def _of_quantising(problem: QuantizeProblem) -> list[str]:
    needs = {
        E8M0_SCALES: problem.scale_format == "e8m0",
        SWIZZLED_SCALES: problem.scale_layout == "swizzled",
        E2M1_CODES: problem.codes == "e2m1",
        E4M3_SCALES: problem.scale_format == "e4m3",
        POWER_RULES: problem.power_rule != "up",
    }
    return [name for name, needed in needs.items() if needed]


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
