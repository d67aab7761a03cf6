"""torch's scaled_dot_product_attention backend by backend, as each is: no row is zeroed here.

``sdpa`` gives it three axes, for which torch has no fused kernel, and zeroes rows without keys:
engines and tests use that as a reference. Here a request has four axes, as models call it, and what
a backend gives for a row without keys is judged. Keys and values of one request at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...reference import AttentionProblem
from ...reference.tensors.inputs import RaggedAttentionInputs
from ..protocol import Implementation, Supports, implementation
from ..targets.backends import TORCH
from ..targets.refusal import Refusal
from ..targets.target import Target
from .rounding import rounds_twice
from .sdpa import ARITHMETIC, mask_of

CHANNELS = 8
"""Channels that head dims of the fused CUDA kernels are multiples of."""
MOST_CHANNELS, MOST_OLDER_CUDNN_CHANNELS = 256, 128
"""Channels of a head at most: of flash attention and of cuDNN on SM90, and of cuDNN elsewhere."""
LEAST_CUDNN_KEYS = 2
"""Keys of a request for which cuDNN's backend has a kernel, at least."""
HOPPER = 90
"""Compute capability, times ten, on which cuDNN's wide heads were tried."""
FIRST_FUSED_SM = 80
"""Compute capability, times ten, from which flash attention and cuDNN are offered."""


def _of_any(problem: AttentionProblem) -> tuple[tuple[object, str], ...]:
    return (
        (problem.logits_soft_cap, "scaled_dot_product_attention has no logits soft cap"),
        (problem.sinks, "scaled_dot_product_attention has no attention sinks"),
        (
            rounds_twice(problem.v_scale, problem.dtype),
            f"v_scale {problem.v_scale} on a {problem.dtype} output would round it twice",
        ),
    )


def _one_head_dim(problem: AttentionProblem) -> tuple[object, str]:
    return problem.head_dim_qk != problem.head_dim_vo, "keys and values have one head dim"


def _of_flash(problem: AttentionProblem, target: Target) -> tuple[tuple[object, str], ...]:
    if target.device == "cpu":
        return (_one_head_dim(problem),)
    return (
        (problem.dtype == "float32", "flash attention takes 16 bits only on a GPU"),
        (problem.window_left >= 0, "flash attention takes no mask but the causal one on a GPU"),
        (problem.head_dim_qk > MOST_CHANNELS, f"head dims are at most {MOST_CHANNELS} on a GPU"),
        _one_head_dim(problem),
    )


def _of_efficient(problem: AttentionProblem, _: Target) -> tuple[tuple[object, str], ...]:
    dims = (problem.head_dim_qk, problem.head_dim_vo)
    return ((any(dim % CHANNELS for dim in dims), f"head dims are multiples of {CHANNELS}"),)


def _of_cudnn(problem: AttentionProblem, target: Target) -> tuple[tuple[object, str], ...]:
    dims = (problem.head_dim_qk, problem.head_dim_vo)
    most = MOST_CHANNELS if target.sm == HOPPER else MOST_OLDER_CUDNN_CHANNELS
    return (
        (problem.dtype == "float32", "cuDNN's attention takes 16 bits only"),
        (any(dim % CHANNELS for dim in dims), f"head dims are multiples of {CHANNELS}"),
        (max(dims) > most, f"head dims are at most {most}"),
        (min(filter(None, problem.seq_lens), default=LEAST_CUDNN_KEYS) < LEAST_CUDNN_KEYS,
         "cuDNN's attention has no kernel for a single key"),
    )  # fmt: skip


Reasons = Callable[[AttentionProblem, Target], tuple[tuple[object, str], ...]]
BACKENDS: dict[str, tuple[SDPBackend | None, Reasons | None]] = {
    "default": (None, None),
    "math": (SDPBackend.MATH, None),
    "flash": (SDPBackend.FLASH_ATTENTION, _of_flash),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, _of_efficient),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, _of_cudnn),
}
"""Backends by the last word of the implementation's name, and why each refuses problems; None for
the one that torch chooses."""
OF_A_GPU = frozenset({"efficient", "cudnn"})
"""Backends that torch has for a GPU only."""


def _supports(name: str) -> Supports:
    def supports(problem: AttentionProblem, target: Target) -> Refusal | bool | str:
        if name in OF_A_GPU and target.device == "cpu":
            return Refusal(f"torch has no {name} backend on a CPU", "device", "a GPU")
        if name == "default" and target.device == "cpu":
            # Both of a CPU's backends are judged by their names: this one would double the work.
            return Refusal("on a CPU torch chooses math or flash", "device", "a GPU")
        if name in {"flash", "cudnn"} and target.sm is not None and target.sm < FIRST_FUSED_SM:
            return Refusal(f"torch's {name} backend needs SM80", "device", "SM80")
        reasons = BACKENDS[name][1]
        refusals = (*_of_any(problem), *(reasons(problem, target) if reasons else ()))
        return next((reason for refused, reason in refusals if refused), True)

    return cast("Supports", supports)


def _attend(inputs: RaggedAttentionInputs, *, name: str) -> tuple[torch.Tensor, None]:
    """Call torch for each request that has queries and keys; there is no call for others."""
    out = inputs.q.new_zeros((*inputs.q.shape[:2], inputs.head_dim_vo))
    requests = zip(
        itertools.pairwise(inputs.qo_indptr.tolist()),
        itertools.pairwise(inputs.kv_indptr.tolist()),
        strict=True,
    )
    backend = BACKENDS[name][0]
    for request, ((first, last), (start, stop)) in enumerate(requests):
        if first == last or start == stop:
            continue
        q, k, v = (
            each.transpose(0, 1).unsqueeze(0)
            for each in (inputs.q[first:last], inputs.k[start:stop], inputs.v[start:stop])
        )
        with nullcontext() if backend is None else sdpa_kernel(backend):
            attended = scaled_dot_product_attention(
                q,
                *_of_heads(k, v, q.shape[1] // k.shape[1], name),
                **_masked(inputs, last - first, stop - start, request, name),
                scale=inputs.sm_scale * float(inputs.k_scale),
                enable_gqa=q.shape[1] != k.shape[1] and name != "efficient",
            )
        out[first:last] = attended[0].transpose(0, 1)
    return (out * float(inputs.v_scale)).to(inputs.out_dtype), None


def _of_heads(
    k: torch.Tensor, v: torch.Tensor, group: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values; of each query's head where the backend knows no groups."""
    if name != "efficient" or group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _masked(
    inputs: RaggedAttentionInputs, queries: int, length: int, request: int, name: str
) -> dict[str, Any]:
    """Return the arguments that say who sees whom, as a model gives them: a mask where it must.

    A triangle that ends at the last key is torch's own kind of mask, for which it calls flash
    attention whatever backend is the default: only that backend is given it.
    """
    if inputs.window_left < 0:
        if not inputs.causal:
            return {}
        if queries == length:
            return {"is_causal": True}
        if name == "flash" and inputs.q.is_cuda:
            # Importing it loads torch's compiler and triton: seconds, which a CPU need not spend.
            from torch.nn.attention.bias import causal_lower_right

            return {"attn_mask": causal_lower_right(queries, length)}
    return {"attn_mask": mask_of(inputs, queries, length, request)}


def _implementation(name: str) -> Implementation:
    return implementation(
        "ragged_attention",
        name=f"torch-sdpa-{name}",
        provider=TORCH,
        supports=_supports(name),
        # No features: a causal mask and a window leave rows without keys, and little is drawn.
        arithmetic=ARITHMETIC,
    )(functools.partial(_attend, name=name))


default, math_backend, flash, efficient, cudnn = map(_implementation, BACKENDS)
