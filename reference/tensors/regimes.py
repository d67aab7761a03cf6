"""Value regimes: what the tensors of a problem hold.

Values matter as much as tolerances: under iid values a dropped token hides in the noise of
thousands, under a dominant key everything but that key hides. Each regime shows other bugs.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple

import torch

from ..problems import (
    EXACT_GAP,
    EXACT_KEYS,
    EXACT_RANKS,
    MAX_SEQ_LEN,
    AttentionProblem,
    MergeProblem,
)
from .values import Part, bell, bells, bits, choose, integers, power_of_two_at_least, stream

ROWS_A_REQUEST = 2**20
DOMINANT_LOGIT = 12.0
"""Amount by which the dominant key's logit exceeds the others: e^12 = 160,000 keys' worth."""
SHIFTS = (2.0**17, 2.0**20)
"""Raw q k^T of shifted_logits: beyond the -5e4 that kernels have used for minus infinity, of the
raw product or, as in FlashInfer's decode, of the scaled one (flashinfer-ai/flashinfer#4267)."""
EXACT_SINK = -256.0
EDGES = (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, MAX_SEQ_LEN)
"""Keys at which pages and tiles of usual sizes begin and end, and the last key. They do not follow
the problem's own page size: the same keys in other pages must keep their values."""
NO_KEYS_OF_ITS_OWN = 2**11
"""Pseudo request number of shared prefixes."""
REMEMBERED = 16
"""Row numbers of queries or keys, the latest."""


class AttentionValues(NamedTuple):
    """Logical tensors, request after request: q [tokens, H, D], k [keys, K, D], v [keys, K, E]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attention_values(problem: AttentionProblem, device: torch.device) -> AttentionValues:
    """Make q, k and v of a problem in its dtype."""
    q_rows, k_rows = _rows(problem)
    qo_heads, kv_heads = problem.num_qo_heads, problem.num_kv_heads
    shapes = (
        ("q", q_rows, qo_heads, problem.head_dim_qk),
        ("k", k_rows, kv_heads, problem.head_dim_qk),
        ("v", k_rows, kv_heads, problem.head_dim_vo),
    )
    if problem.regime == "exact_grid":
        made = [
            torch.zeros(len(rows), heads * dim, device=device) for _, rows, heads, dim in shapes
        ]
    else:
        made = bells(
            [
                Part(stream(problem.seed, tag), rows, heads * dim)
                for tag, rows, heads, dim in shapes
            ],
            device,
        )
    drawn = AttentionValues(
        *(
            values.view(-1, heads, dim)
            for values, (_, _, heads, dim) in zip(made, shapes, strict=True)
        )
    )
    change = {
        "iid": _unchanged,
        "dominant_key": _dominant_key,
        "position_coded": _position_coded,
        "shifted_logits": _shifted_logits,
        "outlier_channels": _outlier_channels,
        "exact_grid": _exact_grid,
        "one_sign": _one_sign,
    }[problem.regime]
    values = change(problem, drawn, k_rows)
    if problem.values_in_keys:
        values = _values_in_keys(problem, values)
    dtype = getattr(torch, problem.dtype)
    return AttentionValues(values.q.to(dtype), values.k.to(dtype), values.v.to(dtype))


def _rows(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Number every query and key by request identity and position, on the host.

    Shared prefixes have one identity.
    """
    shared: tuple[int, ...] = ()
    if problem.shared_prefix_pages and problem.operation == "paged_attention":
        shared = tuple(
            problem.page_size * min(problem.shared_prefix_pages, length // problem.page_size)
            for length in problem.seq_lens
        )
    return numbered(problem.ids, problem.query_lens), numbered(
        problem.ids, problem.seq_lens, shared
    )


@functools.lru_cache(maxsize=REMEMBERED)
def numbered(
    ids: tuple[int, ...], lengths: tuple[int, ...], shared: tuple[int, ...] = ()
) -> torch.Tensor:
    """Return the row number of every token of requests of these lengths, some of them shared.

    Problems in a row have it in common: it is not to be changed.
    """
    firsts = [ROWS_A_REQUEST * identity for identity in ids]
    of_requests = [
        torch.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)
    ]
    for rows, count in zip(of_requests, shared, strict=False):
        rows[:count] = torch.arange(count) + NO_KEYS_OF_ITS_OWN * ROWS_A_REQUEST
    return torch.cat(of_requests) if of_requests else torch.empty(0, dtype=torch.int64)


def _positions(rows: torch.Tensor) -> torch.Tensor:
    """Return the position in its request of each row number."""
    return rows % ROWS_A_REQUEST


def _unchanged(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    del problem, rows
    return values


def _one_sign(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    """Make all numbers positive: what is cut off, and not rounded, adds up."""
    del problem, rows
    return AttentionValues(values.q.abs(), values.k.abs(), values.v.abs())


def _values_in_keys(problem: AttentionProblem, values: AttentionValues) -> AttentionValues:
    """Make V the first channels of K; a regime that says what V holds writes it into K.

    Queries are zero there, so that it does not move a logit.
    """
    q, k, v = values
    shared = slice(0, problem.head_dim_vo)
    if problem.regime == "position_coded":
        q[..., shared], k[..., shared] = 0.0, v
    elif problem.regime == "exact_grid":
        # The rank's digits stand in the first channels.
        # Of a record, the first channels that share no scale with these.
        block = problem.cache_entry.record.block if problem.cache_entry.record else 1
        first = -(-problem.exact_channels // block) * block
        shared = slice(first, problem.head_dim_vo)
        k[..., shared] = v[..., shared]
    return AttentionValues(q, k, k[..., : problem.head_dim_vo])


def _marked_channel(problem: AttentionProblem) -> int:
    """Choose the channel by which a regime moves logits: a rotary one, where V has the others.

    It is V's last one where V is all of K.
    """
    return problem.head_dim_qk - 1 if problem.values_in_keys else 0


def _dominant_key(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    """Return one key a request, at an edge of a page or tile, almost all the weight."""
    edge = EDGES[choose(problem.seed, "dominant", 0, len(EDGES))]
    factor = abs(problem.scale) * problem.k_scale or 1.0
    channel = _marked_channel(problem)
    values.q[..., channel] = 2.0
    values.k[..., channel] = 0.0
    marked = [
        end - length + min(edge, length - 1)
        for end, length in zip(accumulate(problem.seq_lens), problem.seq_lens, strict=True)
        if length
    ]
    device = values.k.device
    keys = torch.tensor(marked, dtype=torch.int64).to(device, non_blocking=True)
    mark = power_of_two_at_least(DOMINANT_LOGIT / 2.0 / factor)
    values.k[..., channel].index_fill_(0, keys, mark)
    if problem.shared_prefix_pages:
        # A shared page is written by its last owner: the mark must not depend on who that is.
        shared = rows >= NO_KEYS_OF_ITS_OWN * ROWS_A_REQUEST
        shared = shared.to(device, non_blocking=True)
        values.k[..., channel].masked_fill_(shared.unsqueeze(1), 0.0)
    return values


def _position_coded(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    """Attend almost evenly to values that spell out position and head: a wrong page shows."""
    positions = _positions(rows).to(values.v.device, non_blocking=True)
    channel = torch.arange(problem.head_dim_vo, device=positions.device)
    head = torch.arange(problem.num_kv_heads, device=positions.device)
    code = positions[:, None, None] * (2 * channel + 3) + 7 * head[:, None] + channel
    v = ((code % 61) - 30).to(torch.float32) / 8 + positions[:, None, None] / 1024.0
    return AttentionValues(values.q, values.k / 4, v.expand_as(values.v).contiguous())


def _shifted_logits(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    """Add one large constant to every raw logit: softmax does not see it, a sentinel does."""
    del rows
    sign = -1.0 if choose(problem.seed, "shift", 0, 3) else 1.0
    shift = SHIFTS[choose(problem.seed, "shift", 1, len(SHIFTS))]
    channel = _marked_channel(problem)
    values.q[..., channel] = 2.0**8
    values.k[..., channel] = sign * shift / 2.0**8
    return values


def _outlier_channels(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    """Scale one channel each of q, k and v by 32, as large models have them.

    Of quantised caches without block scales, so much that e4m3 saturates.
    """
    del rows
    entry = problem.cache_entry
    factor = 2.0**10 if entry.feature and not entry.scaled else 32.0
    channel = choose(problem.seed, "outlier", 0, problem.head_dim_qk)
    values.q[..., channel] *= 32.0
    values.k[..., (channel + 1) % problem.head_dim_qk] *= factor
    values.v[..., choose(problem.seed, "outlier", 1, problem.head_dim_vo)] *= factor
    return values


def _exact_grid(
    problem: AttentionProblem, values: AttentionValues, rows: torch.Tensor
) -> AttentionValues:
    """Rank the keys with such distances that softmax is one-hot: the output is a row of V.

    It begins with zeros.
    """
    rows = rows.to(values.k.device, non_blocking=True)
    positions = _positions(rows)
    if problem.kv_cache:
        _rank_in_digits(problem, values, positions)
    else:
        # A permutation of 0 to 4095, split into two parts that bfloat16 holds exactly.
        rank = (positions * 1365 + choose(problem.seed, "rank", 0, EXACT_RANKS)) % EXACT_RANKS
        rank = (rank ^ (rank >> 6)) * 2731 % EXACT_RANKS
        values.q[..., : problem.exact_channels] = power_of_two_at_least(problem.exact_gap)
        values.k[..., 0] = (rank // 16 * 16).to(torch.float32).unsqueeze(1)
        values.k[..., 1] = (rank % 16).to(torch.float32).unsqueeze(1)
    key = stream(problem.seed, "v")
    v = integers(key, rows, problem.num_kv_heads * problem.head_dim_vo, -60, 60) / 4
    return AttentionValues(values.q, values.k, v.view_as(values.v))


def _rank_in_digits(
    problem: AttentionProblem, values: AttentionValues, positions: torch.Tensor
) -> None:
    """Spell a permutation of 0 to 255 in digits that every quantised format holds exactly."""
    rank = (positions * 85 + choose(problem.seed, "rank", 0, EXACT_KEYS)) % EXACT_KEYS
    rank = (rank ^ (rank >> 3)) * 171 % EXACT_KEYS
    channel = 0
    weights = problem.exact_weights[: problem.head_dim_qk]
    for digit in range(4):
        unit = problem.exact_weights[0] * 4.0**digit
        repeats = round(unit / weights[channel]) if channel < len(weights) else 0
        end = min(channel + repeats, len(weights))
        for each in range(channel, end):
            values.q[..., each] = weights[each]
            values.k[..., each] = ((rank // 4**digit) % 4).to(torch.float32).unsqueeze(1)
        channel = end


def sink_values(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    """Make [qo_heads] float32 sinks; far below every logit on the exact grid, however long."""
    heads = torch.arange(problem.num_qo_heads, device=device)
    values = bell(stream(problem.seed, "sinks"), heads, 1).flatten() + 1.0
    return torch.full_like(values, EXACT_SINK) if problem.regime == "exact_grid" else values


def alibi_slopes(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    """Make [qo_heads] float32 slopes of ALiBi: 2^(-8 h / H) of the h-th of H heads, from 1."""
    heads = torch.arange(1, problem.num_qo_heads + 1, device=device)
    return torch.exp2(-8.0 * heads / problem.num_qo_heads)


def merge_values(problem: MergeProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make outs [states, tokens, heads, dim] and natural-log lses [states, tokens, heads]."""
    shape = (problem.num_states, problem.num_tokens, problem.num_heads)
    rows = torch.arange(shape[0] * shape[1] * shape[2], device=device)
    outs = bell(stream(problem.seed, "outs"), rows, problem.head_dim)
    outs = outs.view(*shape, problem.head_dim)
    lses = 2.0 * bell(stream(problem.seed, "lses"), rows, 1).view(shape)
    chosen = choose(problem.seed, "state", 0, problem.num_states)
    if problem.regime == "dominant_state":
        lses[chosen] += DOMINANT_LOGIT
    elif problem.regime == "shifted":
        lses -= SHIFTS[0]
    elif problem.regime == "exact_grid":
        ranks = (torch.arange(problem.num_states, device=device) - chosen) % problem.num_states
        lses = (-2 * EXACT_GAP * ranks).view(-1, 1, 1).expand(shape).to(torch.float32)
    empty = empty_states(problem, device)
    outs, lses = outs.masked_fill(empty.unsqueeze(-1), 0.0), lses.masked_fill(empty, -torch.inf)
    if problem.inf_marks_empty:
        marked = (bits(stream(problem.seed, "inf"), rows, 1) % 2 == 0).view(shape)
        lses = lses.masked_fill(empty & marked, torch.inf)
    # An engine's buffers hold what was there before.
    outs[0, problem.context_tokens :] = torch.nan
    lses[0, problem.context_tokens :] = torch.nan
    return outs, lses


def empty_states(problem: MergeProblem, device: torch.device) -> torch.Tensor:
    """Return the [states, tokens, heads] mask of states that are (0, -inf)."""
    shape = (problem.num_states, problem.num_tokens, problem.num_heads)
    key = stream(problem.seed, "empty")
    if problem.empty == "one" and problem.num_states > 1:
        rows = torch.arange(shape[1] * shape[2], device=device)
        which = bits(key, rows, 1).view(1, *shape[1:]) % problem.num_states
        return torch.arange(shape[0], device=device).view(-1, 1, 1) == which
    if problem.empty != "some":
        return torch.full(shape, problem.empty == "all", device=device)
    rows = torch.arange(shape[0] * shape[1] * shape[2], device=device)
    return (bits(key, rows, 1) % 4 == 0).view(shape)
