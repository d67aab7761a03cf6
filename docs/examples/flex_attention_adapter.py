"""An adapter to torch's FlexAttention, as it is written or compiled."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from kernelproof.impl import RaggedAttentionInputs, Target, implementation
from kernelproof.reference import Arithmetic, AttentionProblem

# A plain call then runs score_mod as it is written.
vars(flex)["_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"] = True
ROUNDED = Arithmetic(probabilities="inputs")


@functools.cache
def compiled() -> Any:  # noqa: ANN401  a function of these options
    """Compile at the first call, and not when this is imported."""
    return torch.compile(flex.flex_attention, dynamic=True)


def no_sinks(problem: AttentionProblem, _: Target) -> bool | str:
    """Refuse what it has no words for."""
    return "flex_attention has no sinks" if problem.sinks else True


@implementation("ragged_attention", name="my-flex", supports=no_sinks, arithmetic=ROUNDED)
def attend(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as it is written, with an LSE."""
    return by_request(inputs, with_lse=True)


@implementation(
    "ragged_attention",
    name="my-flex-compiled",
    supports=no_sinks,
    arithmetic=ROUNDED,
    compile_key=str,  # each problem has closures of its own
)
def attend_compiled(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend by compiled code, which gives no LSE on a CPU."""
    return by_request(inputs, with_lse=False)


def by_request(
    inputs: RaggedAttentionInputs, *, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend one request after the other; a row without keys gives 0 and -inf."""
    out = inputs.q.new_zeros(*inputs.q.shape[:2], inputs.v.shape[-1])
    lse = torch.full(inputs.q.shape[:2], -torch.inf)
    rows, keys = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    for request in range(len(rows) - 1):
        mine = slice(rows[request], rows[request + 1])
        theirs = slice(keys[request], keys[request + 1])
        if len(inputs.q[mine]) and len(inputs.k[theirs]):
            part = inputs.q[mine], inputs.k[theirs], inputs.v[theirs]
            out[mine], lse[mine] = one_request(inputs, *part, with_lse=with_lse)
    return out * float(inputs.v_scale), lse if with_lse else None


def one_request(
    inputs: RaggedAttentionInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and LSE of a request; mask and soft cap are functions that FlexAttention calls."""
    behind, left, cap = len(k) - len(q), inputs.window_left, inputs.logits_soft_cap

    def seen(
        _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        place = row + behind
        kept = key <= place if inputs.causal else key >= 0
        return kept & (key >= place - left) if left >= 0 else kept

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap) if cap else score

    options: dict[str, Any] = {
        "score_mod": capped,
        "block_mask": flex.create_block_mask(seen, None, None, len(q), len(k), device=q.device),
        "scale": inputs.sm_scale * float(inputs.k_scale),
        "enable_gqa": True,
    }
    heads_first = [each.transpose(0, 1)[None] for each in (q, k, v)]
    if not with_lse:
        return compiled()(*heads_first, **options)[0].transpose(0, 1), torch.zeros(len(q), 1)
    plain: Any = flex.flex_attention
    out, aux = plain(*heads_first, **options, return_aux=flex.AuxRequest(lse=True))
    return out[0].transpose(0, 1), aux.lse[0].T
