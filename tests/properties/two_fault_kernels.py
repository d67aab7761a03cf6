"""Kernels with two independent faults each, and what is true of each fault alone.

``PAIRS`` are for development, ``KEPT_ASIDE`` were made with them and are measured at the end only.
"""

# ruff: noqa: ANN401, ARG001, ARG005  kernels of any operation; parts take what they need of a call
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernelproof.impl import Implementation, implementation
from kernelproof.properties.seeded.appending import addresses, rounded, write
from kernelproof.properties.seeded.honest import merge_states
from kernelproof.properties.seeded.kernels import (
    HONEST,
    attend,
    first_position,
    gather_pages,
    key_counts,
    page_ids,
)
from kernelproof.properties.seeded.moe import kernels as experts

Pair = tuple[torch.Tensor, torch.Tensor]
WRONG = 1.5
"""Factor of an answer that is plainly wrong."""
LONG, WIDE = 64, 128


@dataclass(frozen=True)
class Fault:
    """One fault of a kernel.

    Attributes:
        name: of it.
        operation: of the kernel.
        triggered: whether a call may show it.
        names: what a true condition may speak of, beside sizes.
        features: that an implementation must declare for it to be drawn.
        inputs: what the kernel takes its inputs for.
        stages: of the honest kernel that are replaced.
        answer: what becomes of the answer.
    """

    name: str
    operation: str
    triggered: Callable[[Any], bool]
    names: frozenset[str]
    features: tuple[str, ...] = ()
    inputs: Callable[[Any], Any] = lambda inputs: inputs
    stages: dict[str, Any] = field(default_factory=dict)
    answer: Callable[[Any, Any], Any] = lambda inputs, answer: answer


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, operation: str, names: str, triggered: Callable[[Any], bool], **parts: Any
) -> None:
    FAULTS[name] = Fault(name, operation, triggered, frozenset(names.split()), **parts)


def attention(name: str, names: str, triggered: Callable[[Any], bool], **parts: Any) -> None:
    fault(name, "paged_attention", names, triggered, **parts)


def wrong_where(condition: Callable[[Any], bool]) -> dict[str, Any]:
    """Return a fault that makes the whole output wrong."""

    def answer(inputs: Any, given: Any) -> Any:
        if not condition(inputs):
            return given
        if isinstance(given, tuple):
            return given[0] * WRONG, given[1]
        return given * WRONG

    return {"answer": answer}


def _interleaved(qo: int, kv: int) -> torch.Tensor:
    return torch.arange(qo) % kv


def _from_start(request: Any, inputs: Any) -> int:
    return 0 if request.causal else first_position(request, inputs)


def _without_tail(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q[..., :WIDE] @ k[..., :WIDE].transpose(-1, -2)


def _prefill_late(request: Any, inputs: Any) -> int:
    late = request.causal and request.num_queries > 1
    return first_position(request, inputs) - (1 if late else 0)


def _early_in_last_page(request: Any, inputs: Any) -> int:
    inside = request.num_keys % inputs.metadata.page_size and request.causal
    return first_position(request, inputs) - (1 if inside else 0)


def _as_nhd(cache: torch.Tensor, pages: torch.Tensor, inputs: Any) -> torch.Tensor:
    if inputs.kv_layout == "NHD":
        return gather_pages(cache, pages, inputs)
    chosen = cache[pages]
    count, heads, size, dim = chosen.shape
    return chosen.reshape(count, size, heads, dim).flatten(0, 1)


def _in_order(inputs: Any) -> list[torch.Tensor]:
    return [each.sort().values for each in page_ids(inputs)]


def _only_one_tile(inputs: Any) -> list[int]:
    return [min(count, LONG) for count in key_counts(inputs)]


def _groups_of_two(qo: int, kv: int) -> torch.Tensor:
    group = 1 << ((qo // kv).bit_length() - 1)
    return (
        (torch.arange(qo) // group).clamp(max=kv - 1)
        if group * kv != qo
        else (torch.arange(qo) // (qo // kv))
    )


def _last_request_wrong(inputs: Any, given: Pair) -> Pair:
    starts = inputs.metadata.qo_indptr.tolist()
    out = given[0].clone()
    if len(starts) > 2:
        out[starts[-2] :] *= WRONG
    return out, given[1]


def _nan_of_empty(inputs: Any, given: Pair) -> Pair:
    out, starts = given[0].clone(), inputs.metadata.qo_indptr.tolist()
    for index, count in enumerate(key_counts(inputs)):
        if not count:
            out[starts[index] : starts[index + 1]] = torch.nan
    return out, given[1]


attention(
    "window",
    "window_left",
    lambda p: p.window_left >= 0,
    stages={"window": lambda position, key, left: key > position - left},
)
attention(
    "cap",
    "logits_soft_cap",
    lambda p: p.logits_soft_cap > 0,
    inputs=lambda i: replace(i, logits_soft_cap=0.0),
)
attention("sinks", "sinks", lambda p: p.sinks, inputs=lambda i: replace(i, sinks=None))
attention(
    "sinks_prefill",
    "sinks most_queries",
    lambda p: p.sinks and p.most_queries > 1,
    stages={"sinks": lambda i, r: i.sinks if r.num_queries == 1 else None},
)
attention(
    "interleaved",
    "group_size num_kv_heads",
    lambda p: p.group_size > 1 and p.num_kv_heads > 1,
    stages={"heads": _interleaved},
)
attention(
    "from_start",
    "causal unequal_lengths earlier_keys",
    lambda p: p.causal and any(t and t != s for t, s in zip(p.query_lens, p.seq_lens, strict=True)),
    stages={"position": _from_start},
)
attention(
    "page_1",
    "page_size",
    lambda p: p.page_size == 1,
    **wrong_where(lambda i: i.metadata.page_size == 1),
)
attention(
    "wide",
    "head_dim_qk head_dim_vo values_in_keys",
    lambda p: p.head_dim_qk > WIDE,
    stages={"dot": _without_tail},
)
attention(
    "sm_scale",
    "sm_scale",
    lambda p: p.sm_scale is not None,
    inputs=lambda i: replace(i, sm_scale=i.q.shape[-1] ** -0.5),
)
attention("k_scale", "k_scale", lambda p: p.k_scale != 1, inputs=lambda i: replace(i, k_scale=1.0))
attention("v_scale", "v_scale", lambda p: p.v_scale != 1, inputs=lambda i: replace(i, v_scale=1.0))
attention(
    "mask",
    "custom_mask",
    lambda p: p.custom_mask,
    features=("custom_mask",),
    inputs=lambda i: replace(i, custom_mask=None),
)
attention("empty", "empty_requests seq_lens", lambda p: p.empty_requests, answer=_nan_of_empty)
attention("lse_2", "", lambda p: True, answer=lambda i, given: (given[0], given[1] * 1.4427))
attention(
    "strided_q",
    "strided_q",
    lambda p: p.strided_q,
    **wrong_where(lambda i: i.q.stride(0) > i.q.shape[1] * i.q.shape[2]),
)
attention(
    "strided_kv",
    "strided_kv kv_views",
    lambda p: p.strided_kv or bool(p.kv_views),
    **wrong_where(lambda i: not i.k_cache.is_contiguous()),
)
attention(
    "groups",
    "group_size num_kv_heads",
    lambda p: p.group_size & (p.group_size - 1) > 0 and p.num_kv_heads > 1,
    stages={"heads": _groups_of_two},
)
attention(
    "hnd",
    "kv_layout num_kv_heads page_size",
    lambda p: p.kv_layout == "HND" and p.num_kv_heads > 1 and p.page_size > 1,
    stages={"gather": _as_nhd},
)
attention(
    "bfloat16",
    "dtype",
    lambda p: p.dtype == "bfloat16",
    **wrong_where(lambda i: i.q.dtype == torch.bfloat16),
)
attention("long", "", lambda p: p.most_keys > LONG, stages={"counts": _only_one_tile})
attention(
    "last_page",
    "causal partial_last_page page_size",
    lambda p: p.causal and p.partial_last_page,
    stages={"position": _early_in_last_page},
)
attention("full", "causal", lambda p: not p.causal, **wrong_where(lambda i: not i.causal))
attention("order", "page_order", lambda p: p.page_order > 0, stages={"pages": _in_order})
attention("several", "num_requests", lambda p: p.num_requests > 1, answer=_last_request_wrong)
attention(
    "prefill",
    "causal most_queries",
    lambda p: p.causal and p.most_queries > 1,
    stages={"position": _prefill_late},
)
attention(
    "alibi",
    "alibi",
    lambda p: p.alibi,
    features=("alibi",),
    inputs=lambda i: replace(i, alibi_slopes=None),
)
# The causal mask hides what the window would.
attention(
    "window_right",
    "window_right causal",
    lambda p: p.window_right >= 0,
    features=("window_right",),
    inputs=lambda i: replace(i, window_right=-1),
)


def merge(name: str, names: str, triggered: Callable[[Any], bool], **parts: Any) -> None:
    fault(name, "merge_state", names, triggered, **parts)


def _nan_where_empty(inputs: Any, given: Pair) -> Pair:
    empty = given[1].isneginf().unsqueeze(-1)
    return torch.where(empty, torch.nan, given[0]), given[1]


merge("all_empty", "empty num_states", lambda p: p.empty != "none", answer=_nan_where_empty)
merge(
    "third_state",
    "num_states",
    lambda p: p.num_states >= 3,
    inputs=lambda i: replace(i, outs=i.outs[:2], lses=i.lses[:2]),
)
merge(
    "wide_states",
    "head_dim",
    lambda p: p.head_dim >= WIDE,
    **wrong_where(lambda i: i.outs.shape[-1] >= WIDE),
)
merge(
    "half_states",
    "dtype",
    lambda p: p.dtype == "float16",
    **wrong_where(lambda i: i.outs.dtype == torch.float16),
)


def moe(name: str, names: str, triggered: Callable[[Any], bool], **parts: Any) -> None:
    fault(name, "moe", names, triggered, **parts)


def _without_last(inputs: Any) -> Any:
    if inputs.topk_ids.shape[1] == 1:
        return inputs
    weights = inputs.topk_weights.clone()
    weights[:, -1] = 0
    return replace(inputs, topk_weights=weights)


moe(
    "relu2",
    "activation",
    lambda p: p.activation == "relu2",
    inputs=lambda i: replace(i, activation="relu") if i.activation == "relu2" else i,
)
moe("last_expert", "top_k num_experts", lambda p: p.top_k > 1, inputs=_without_last)
moe(
    "biases",
    "biases",
    lambda p: p.biases,
    features=("moe_biases",),
    inputs=lambda i: replace(i, w13_bias=None, w2_bias=None),
)
moe(
    "strided_hidden",
    "strided_hidden",
    lambda p: p.strided_hidden,
    features=("strided_hidden",),
    **wrong_where(lambda i: i.hidden.stride(0) > i.hidden.shape[1]),
)
moe(
    "on_input",
    "weights_on_input",
    lambda p: p.weights_on_input,
    features=("weights_on_input",),
    inputs=lambda i: replace(i, weights_on_input=False),
)
moe(
    "bfloat16_experts",
    "dtype",
    lambda p: p.dtype == "bfloat16",
    **wrong_where(lambda i: i.hidden.dtype == torch.bfloat16),
)


def append(name: str, names: str, triggered: Callable[[Any], bool], **parts: Any) -> None:
    fault(name, "append_paged_kv", names, triggered, **parts)


def _drops_new(inputs: Any, keep: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Leave out new tokens: they are written as zeros."""
    kept = keep(inputs.metadata.qo_indptr).view(-1, 1, 1)
    return replace(inputs, k=torch.where(kept, inputs.k, 0.0), v=torch.where(kept, inputs.v, 0.0))


def _last_of_requests(starts: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(int(starts[-1]), dtype=torch.bool)
    counts = starts.diff()
    kept[(starts[1:] - 1)[counts > 0].long()] = True
    return kept


append(
    "append_hnd",
    "kv_layout",
    lambda p: p.kv_layout == "HND",
    inputs=lambda i: replace(i, k=i.k * (WRONG if i.kv_layout == "HND" else 1)),
)
append(
    "append_last",
    "most_queries",
    lambda p: p.most_queries > 1,
    inputs=lambda i: _drops_new(i, _last_of_requests),
)
append(
    "append_strided",
    "strided_kv kv_views",
    lambda p: p.strided_kv,
    inputs=lambda i: replace(i, v=i.v * (1 if i.v_cache.is_contiguous() else WRONG)),
)
append(
    "append_pages",
    "page_size",
    lambda p: p.page_size >= 16,
    inputs=lambda i: replace(i, k=i.k * (WRONG if i.metadata.page_size >= 16 else 1)),
)


def computed(inputs: Any, stages: dict[str, Any]) -> Any:
    """Return the honest answer, but for these stages."""
    if hasattr(inputs, "q"):
        return attend(inputs, replace(HONEST, **stages))
    if hasattr(inputs, "outs"):
        return merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    if hasattr(inputs, "topk_ids"):
        return experts.apply(inputs)
    return write(inputs, *addresses(inputs), rounded(inputs))


def kernel_of(name: str, faults: Sequence[Fault]) -> Implementation:
    """Return a kernel with these faults, and no other."""
    stages = {name: each for one in faults for name, each in one.stages.items()}

    def kernel(inputs: Any) -> Any:
        seen = inputs
        for one in faults:
            seen = one.inputs(seen)
        answer = computed(seen, stages)
        for one in faults:
            answer = one.answer(inputs, answer)
        return answer

    features = tuple(dict.fromkeys(name for one in faults for name in one.features))
    return implementation(faults[0].operation, name=name, features=features)(kernel)  # type: ignore[arg-type]


PAIRS = (
    ("window", "cap"), ("window", "sinks"), ("interleaved", "cap"), ("from_start", "page_1"),
    ("wide", "sinks_prefill"), ("sm_scale", "k_scale"), ("mask", "window"), ("empty", "cap"),
    ("lse_2", "window"), ("strided_q", "groups"), ("hnd", "long"), ("bfloat16", "sinks"),
    ("last_page", "v_scale"), ("full", "interleaved"), ("order", "strided_kv"),
    ("relu2", "last_expert"), ("biases", "strided_hidden"), ("all_empty", "third_state"),
    ("append_hnd", "append_last"), ("long", "k_scale"),
)  # fmt: skip
KEPT_ASIDE = (
    ("alibi", "page_1"), ("lse_2", "interleaved"), ("several", "sm_scale"),
    ("prefill", "bfloat16"), ("window_right", "wide"), ("mask", "sinks"), ("long", "groups"),
    ("on_input", "bfloat16_experts"), ("wide_states", "half_states"),
    ("append_strided", "append_pages"),
)  # fmt: skip


def title(pair: Sequence[str]) -> str:
    """Return the name of the kernel with these faults."""
    return "_and_".join(pair)


for _pair in (*PAIRS, *KEPT_ASIDE, *((name,) for name in FAULTS)):
    globals()[title(_pair)] = kernel_of(title(_pair), [FAULTS[name] for name in _pair])
