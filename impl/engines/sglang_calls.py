"""What the adapters to SGLang's Triton kernels share: where a release keeps them, what they take.

SGLang calls its cache a pool: [slots, heads, channels], one slot a token, in pages of as many slots
as a page has keys. It tells a kernel the slot of every key of a request.
"""

from __future__ import annotations

import functools

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from .claims import by_slots
from .sources import implementation, load, says

SGLANG = "sglang"
HOMES = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
"""Packages of the kernels' files, the newest first: 0.5.22 has the first, 0.5.10 the second."""

Pair = tuple[torch.Tensor | None, torch.Tensor | None]
"""``inputs.out`` and ``inputs.lse``; None in place of an LSE that a kernel does not write."""

kernel = functools.partial(
    implementation, writes_out=True, provider=SGLANG, build_ahead="cuda", build_compilers=1
)
"""``implementation``, with what all of SGLang's kernels declare alike."""


def stubs() -> dict[str, dict[str, object]]:
    """Stand in for the rest of SGLang, on a machine without AMD's GPUs."""
    names = ("is_hip", "is_gfx95_supported", "is_gfx1250_supported")
    found: dict[str, object] = dict.fromkeys(names, lambda: False)
    found |= {"is_cuda": torch.cuda.is_available, "get_device_core_count": lambda _: 0}
    return {"sglang.srt.utils": found}


def file_of(name: str) -> tuple[str, ...]:
    """Return the dotted names of a kernels' file in the releases, the newest first."""
    return tuple(f"{home}.{name}" for home in HOMES)


def pool_refusal(problem: AttentionProblem) -> str | None:
    """Return why a cache is no pool of SGLang's; None if it is one."""
    if problem.page_size > 1 and (problem.kv_layout == "HND" or problem.strided_kv):
        return "the pool's slots lie one behind the other, each with all heads"
    return None


def pool(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """View a cache as [slots, heads, channels]."""
    paged = by_slots(cache, layout)
    return paged.view(-1, *paged.shape[2:])


MODIFIERS = file_of("score_mod")
"""The module of score modifiers."""


def bias_refusal(problem: AttentionProblem, file: tuple[str, ...]) -> str | None:
    """Return why a bias of logits is no ``relative_bias_score_mod``; None if it is one.

    Args:
        problem: the problem of attention.
        file: the kernels' file in the releases.
    """
    if not problem.logits_bias:
        return None
    if not says(file, "score_mod"):
        return "this release has no score modifiers"
    seen_both_ways = not problem.causal and max(problem.query_lens, default=0) > 1
    return "a bias by distance has none of later keys" if seen_both_ways else None


def bias_arguments(inputs: PagedAttentionInputs) -> dict[str, object]:
    """Return the score modifier that adds a bias, and its tensor [tokens, heads, distances].

    Inkling's layers have such a tensor: of each token and head a number for each distance, and none
    for those beyond.
    """
    if inputs.logits_bias is None:
        return {}
    queries, keys = (each.tolist() for each in inputs.lengths())
    bias = inputs.logits_bias
    room = bias.new_zeros((len(inputs.q), len(bias), max(keys)))
    token = start = 0
    for t, s in zip(queries, keys, strict=True):
        of_request = bias[:, start : start + t * s].reshape(len(bias), t, s)
        for row in range(t):
            near = s - t + row + 1
            # By distance: the row's own key first, then those before it.
            room[token + row, :, :near] = of_request[:, row, :near].flip(-1)
        token, start = token + t, start + t * s
    # As short as it can be: beyond its distances a layer has no bias.
    biased = room.ne(0).any(dim=0).any(dim=0).nonzero()
    room = room[..., : int(biased.max()) + 1 if len(biased) else 1].contiguous()
    with load(MODIFIERS, stubs) as modifiers:
        return {"score_mod": modifiers.relative_bias_score_mod, "aux_tensors": [room]}


def indptr(lengths: torch.Tensor) -> torch.Tensor:
    """Return [R + 1] int32, where each request begins and ends, of [R] lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def slots(inputs: PagedAttentionInputs, first: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return int64 slots of keys: of each request ``lengths`` [R], from key ``first`` [R] on."""
    request = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    position = torch.arange(len(request), device=lengths.device) - indptr(lengths)[request]
    position = position + first[request]
    size = inputs.metadata.page_size
    return inputs.block_table[request, position // size].long() * size + position % size


def strides_key(problem: AttentionProblem) -> tuple[object, ...]:
    """Return all that a call's dtypes, alignments and strides follow from."""
    return (
        problem.dtype, problem.num_kv_heads, problem.group_size, problem.head_dim_qk,
        problem.head_dim_vo, problem.values_in_keys, problem.strided_q, problem.strided_kv,
    )  # fmt: skip
