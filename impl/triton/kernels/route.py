"""Routing as one Triton kernel: scores, groups, the best experts and their weights.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen, and memory read in pieces of two bytes.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .device_functions import device_function


def _softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)) to a few last bits, however small it is."""
    # log(1 + e) = 2 artanh(e / (2 + e)), as a series: hardware's logarithm has an absolute error.
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = z * z
    series = 1.0 / 17.0 + s * (1.0 / 19.0 + s * (1.0 / 21.0 + s * (1.0 / 23.0)))
    series = 1.0 / 9.0 + s * (1.0 / 11.0 + s * (1.0 / 13.0 + s * (1.0 / 15.0 + s * series)))
    series = 1.0 + s * (1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * series)))
    return tl.maximum(x, 0.0) + 2.0 * z * series


softplus = device_function(_softplus)


def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


sigmoid = device_function(_sigmoid)


def _best(scores: tl.tensor, left: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return the number [rows] of the largest score among those left; of equals, the lowest.

    NaN is below every number: one is found whatever the scores are, so that ids are experts'.

    Args:
        scores: [rows, columns].
        left: [rows, columns], which are there.
        number: [1, columns], of the columns.
    """
    numbers = tl.where(left & (scores == scores), scores, float("-inf"))  # noqa: PLR0124  no NaN is
    largest = tl.max(numbers, axis=1)
    is_best = left & (numbers == largest[:, None])
    return tl.min(tl.where(is_best, number, 2**30), axis=1)


best = device_function(_best)


def _scores(x: tl.tensor, is_expert: tl.tensor, SCORE: tl.constexpr) -> tl.tensor:
    """Return the scores [tokens, experts] of logits."""
    if SCORE == "softmax":
        largest = tl.max(tl.where(is_expert, x, float("-inf")), axis=1)
        exponential = tl.where(is_expert, tl.exp(x - largest[:, None]), 0.0)
        scores = exponential / tl.sum(exponential, axis=1)[:, None]
    elif SCORE == "sigmoid":
        scores = sigmoid(x)
    elif SCORE == "sqrt_softplus":
        scores = tl.sqrt(softplus(x))
    else:
        scores = x
    return scores


scores_of = device_function(_scores)


def _of_best_groups(
    ranking: tl.tensor,
    left: tl.tensor,
    expert: tl.tensor,
    group: tl.tensor,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return which experts [TOKENS, experts] belong to the best groups.

    Args:
        ranking, left: [TOKENS, experts], the scores with bias, and which experts there are.
        expert, group: [1, experts], their numbers and those of their groups.
        GROUPS, TOPK_GROUPS, BEST_OF_GROUP, TOKENS, COLUMNS: the same as in ``_route``.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    of_group = tl.full((TOKENS, COLUMNS), float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        inside = left & (group == number)
        first = best(ranking, inside, expert)
        score = tl.sum(tl.where(expert == first[:, None], ranking, 0.0), axis=1)
        if BEST_OF_GROUP > 1:
            second = best(ranking, inside & (expert != first[:, None]), expert)
            score += tl.sum(tl.where(expert == second[:, None], ranking, 0.0), axis=1)
        of_group = tl.where(column == number, score[:, None], of_group)
    of_group = tl.where(
        of_group >= float("-inf"), of_group, float("-inf")
    )  # NaN is no group's best
    groups_left = (column < GROUPS) & (of_group >= float("-inf"))
    allowed = left & (expert < 0)
    for _ in tl.static_range(TOPK_GROUPS):
        chosen = best(of_group, groups_left, column)
        groups_left = groups_left & (column != chosen[:, None])
        allowed = allowed | (group == chosen[:, None])
    return allowed


of_best_groups = device_function(_of_best_groups)


def _near_share(x: tl.tensor, left: tl.tensor, value: tl.tensor, jitter: tl.tensor) -> tl.tensor:
    """Return the share [tokens] of a logit in the softmax over what is left and near it."""
    distance = value[:, None] - x
    near = left & (distance <= 2.0 * jitter * tl.maximum(tl.abs(x), value[:, None]))
    return 1.0 / tl.sum(tl.where(near, tl.exp(-distance), 0.0), axis=1)


near_share = device_function(_near_share)


def _weighed_slots(
    found: tl.tensor, is_slot: tl.tensor, floor: tl.tensor, WEIGHT: tl.constexpr
) -> tl.tensor:
    """Return the weights [tokens, slots] of what was found: scores, or logits, or weights."""
    if WEIGHT == "renormalize":
        total = tl.sum(tl.where(is_slot, found, 0.0), axis=1) + floor
        weight = found / total[:, None]
    elif WEIGHT == "softmax":
        largest = tl.max(tl.where(is_slot, found, float("-inf")), axis=1)
        exponential = tl.where(is_slot, tl.exp(found - largest[:, None]), 0.0)
        weight = exponential / tl.sum(exponential, axis=1)[:, None]
    elif WEIGHT == "sigmoid":
        weight = sigmoid(found)
    else:
        weight = found
    return weight


weighed_slots = device_function(_weighed_slots)


def _route(
    logits: tl.tensor,  # [tokens, experts]
    bias: tl.tensor | None,  # [experts]
    expert_scales: tl.tensor | None,  # [experts] float32
    expert_table: tl.tensor | None,  # [vocabulary, TOP_K] int32
    input_ids: tl.tensor | None,  # [tokens] int64
    ids: tl.tensor,  # [tokens, TOP_K + SHARED] int32
    weights: tl.tensor,  # [tokens, TOP_K + SHARED] float32
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    group_size: tl.tensor,
    floor: tl.tensor,
    jitter: tl.tensor,
    scaling_factor: tl.tensor,
    masked: tl.tensor,
    logits_token: tl.tensor,
    logits_expert: tl.tensor,
    bias_expert: tl.tensor | None,
    SCORE: tl.constexpr,
    WEIGHT: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    OF_EACH: tl.constexpr,
    SHARED: tl.constexpr,
    TABLE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
) -> None:
    """Route TOKENS tokens; EXPERTS, SLOTS and GROUP_COLUMNS are counts rounded up to powers of two.

    SCORE, WEIGHT and BEST_OF_GROUP are as in ``reference``; ``masked`` is the score of an expert
    in a group that was not chosen. OF_EACH are the experts that each group gives, 0 where the best
    groups are chosen. SHARED experts follow the routed ones. TABLE: experts are the table's.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    expert = tl.arange(0, EXPERTS)[None, :]
    is_expert = expert < num_experts
    row = token.to(tl.int64)
    x = tl.load(
        logits + (row * logits_token)[:, None] + expert * logits_expert,
        mask=is_token[:, None] & (expert < num_experts + SHARED),
        other=0.0,
    ).to(tl.float32)
    scores = scores_of(x, expert < num_experts + SHARED, SCORE)
    ranking = scores
    if bias is not None:
        added = tl.load(bias + expert * bias_expert, mask=is_expert, other=0.0)
        ranking = scores + added.to(tl.float32)

    left = is_expert & (token[:, None] >= 0)
    group = expert // group_size
    if GROUPS > 1 and OF_EACH == 0:
        allowed = of_best_groups(
            ranking, left, expert, group, GROUPS, TOPK_GROUPS, BEST_OF_GROUP, TOKENS, GROUP_COLUMNS
        )
        ranking = tl.where(allowed, ranking, masked)

    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.full((TOKENS, SLOTS), 0, tl.int32)
    of_found = tl.full((TOKENS, SLOTS), 0.0, tl.float32)
    for number in tl.static_range(TOP_K):
        if TABLE:
            entry = tl.load(input_ids + row, mask=is_token, other=0) * TOP_K + number
            taken = tl.load(expert_table + entry, mask=is_token, other=0)
        elif OF_EACH > 0:
            taken = best(ranking, left & (group == number // OF_EACH), expert)
        else:
            taken = best(ranking, left, expert)
        is_taken = expert == taken[:, None]
        weighed = scores if WEIGHT == "score" or WEIGHT == "renormalize" else x  # noqa: PLR1714
        value = tl.sum(tl.where(is_taken, weighed, 0.0), axis=1)
        if WEIGHT == "sparsemixer":
            value = near_share(x, left, value, jitter)
        left = left & (expert != taken[:, None])
        found = tl.where(slot == number, taken[:, None], found)
        of_found = tl.where(slot == number, value[:, None], of_found)
    for number in tl.static_range(SHARED):
        weighed = scores if WEIGHT == "score" or WEIGHT == "renormalize" else x  # noqa: PLR1714
        value = tl.sum(tl.where(expert == num_experts + number, weighed, 0.0), axis=1)
        found = tl.where(slot == TOP_K + number, num_experts + number, found)
        of_found = tl.where(slot == TOP_K + number, value[:, None], of_found)
    is_slot = slot < TOP_K + SHARED
    weight = weighed_slots(of_found, is_slot, floor, WEIGHT)
    target = (row * (TOP_K + SHARED))[:, None] + slot
    is_stored = is_token[:, None] & is_slot
    if expert_scales is not None:
        weight = weight * tl.load(expert_scales + found, mask=is_stored, other=0.0)
    tl.store(ids + target, found, mask=is_stored)
    tl.store(weights + target, weight * scaling_factor, mask=is_stored)


route = triton.jit(
    _route, do_not_specialize=("num_tokens", "num_experts", "group_size", "logits_token")
)
