"""Values of MoE problems: hidden states, weights, ids, routing weights and logits by regime.

A value belongs to a token's identity, an expert's global id, a row and a column: it stays the same
when batches, shards and inter change around it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..problems.moe import MoEProblem, RouteProblem
from .values import bell, bits, choose, integers, power_of_two_at_least, stream

ROWS_AN_EXPERT = 2**18
UP_ROWS = 2**17
"""Row numbers of an expert's up rows begin here, those of its gate rows at 0."""
SHARED = 2**12
"""Pseudo ids of shared experts begin here: there are no more experts in a test."""
OUTLIER, SATURATED = 16.0, 16.0
"""Factors of an outlier channel, and of all hidden states where gates are to saturate."""
ONE_SIGN = 128.0
"""Factor of hidden states of one sign, in formats with float32's exponents."""
EXACT_GATE = 128.0
"""A gate beyond which sigmoid and the normal distribution are exactly 1: silu(128) is 128."""
EXACT_COLUMNS = 3
"""Numbers in a row of w2 on the exact grid that are not 0: sums then stay within 8 bits."""
GATE_LIKE = ("silu", "gelu", "gelu_tanh")
LOGIT_SPREAD = 2.0
DOMINANT, ALL_NEGATIVE, SATURATING = 24.0, -200.0, 64.0
"""A dominant logit; the shift of negative ones; logits whose sigmoids are 1 or nearly 0."""
FAINT = (6, 80)
"""What a token's logits lie below 0, least and most: its sigmoids are tiny, and numbers still."""
TABLE_ROWS = 4099
"""Rows of a table of experts that differ: a prime, so that no power of two is between equals."""
MOST_OF_ONE_SIGN = 16
"""Most by which all logits of a token lie on one side of 0."""
TRAINED_BIAS = 7.0
"""Mean of a trained bias: those of DeepSeek-V3 have several units, and differ by tenths."""
NEGATIVE_BIAS = -2.0
"""Makes every biased sigmoid negative, where groups masked by 0 or by -inf differ."""


class ExpertValues(NamedTuple):
    """Weights [experts, rows, columns] and biases [experts, rows], float32."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor
    w2_bias: torch.Tensor


def hidden_values(problem: MoEProblem, device: torch.device) -> torch.Tensor:
    """Make hidden states [tokens, hidden], float32."""
    rows = torch.tensor(problem.ids, dtype=torch.int64, device=device)
    key = stream(problem.seed, "hidden")
    if problem.regime == "exact_grid":
        return 2 * integers(key, rows, problem.hidden, 0, 1) - 1
    values = bell(key, rows, problem.hidden)
    if problem.regime == "one_sign":
        values = values.abs() * one_sign_size(problem)
    if problem.regime == "saturated":
        values *= SATURATED
    elif problem.regime == "outlier_channels":
        values[:, choose(problem.seed, "outlier", 0, problem.hidden)] *= OUTLIER
    return values


def largest_hidden(problem: MoEProblem) -> float:
    """Bound |hidden|: what one scale for all tokens goes by, be they few or many."""
    if problem.regime == "exact_grid":
        return 1.0
    sizes = {"saturated": SATURATED, "outlier_channels": OUTLIER}
    sizes["one_sign"] = one_sign_size(problem)
    return 4.0 * sizes.get(problem.regime, 1.0)


def one_sign_size(problem: MoEProblem) -> float:
    """Return the factor of hidden states that are all positive.

    The intermediate is of its square: in half of the problems in bfloat16 or float32 it is beyond
    what float16 holds.
    """
    wide = problem.dtype != "float16" and choose(problem.seed, "one_sign", 0, 2)
    return ONE_SIGN if wide else 1.0


def expert_values(
    problem: MoEProblem, device: torch.device, *, shared: bool = False
) -> ExpertValues:
    """Make the weights of this rank's experts, or of the shared ones; gate rows come first."""
    first = SHARED if shared else problem.expert_offset
    count = problem.shared_experts if shared else problem.here
    experts = torch.arange(first, first + count, device=device).unsqueeze(1) * ROWS_AN_EXPERT
    gates = torch.arange(problem.inter, device=device)
    of_13 = torch.cat([gates, gates + UP_ROWS]) if problem.gated else gates
    rows_13 = (experts + of_13).flatten()
    rows_2 = (experts + torch.arange(problem.hidden, device=device)).flatten()
    make = _exact_weights if problem.regime == "exact_grid" else _bell_weights
    w13, w2, w13_bias, w2_bias = make(problem, rows_13, rows_2)
    shape = (count, len(of_13), problem.hidden)
    values = ExpertValues(
        w13.view(shape),
        w2.view(count, problem.hidden, problem.inter),
        w13_bias.view(shape[:2]),
        w2_bias.view(count, problem.hidden),
    )
    if problem.interleaved:
        return values._replace(w13=_interleaved(values.w13), w13_bias=_interleaved(values.w13_bias))
    return values


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Bring [experts, gates then ups, ...] into the order gate 0, up 0, gate 1, up 1, ..."""
    gates, ups = rows.chunk(2, dim=1)
    return torch.stack([gates, ups], dim=2).flatten(1, 2)


def _bell_weights(problem: MoEProblem, rows_13: torch.Tensor, rows_2: torch.Tensor) -> ExpertValues:
    seed = problem.seed
    w13 = bell(stream(seed, "w13"), rows_13, problem.hidden)
    w2 = bell(stream(seed, "w2"), rows_2, problem.inter)
    w13 /= power_of_two_at_least(math.sqrt(problem.hidden))
    if problem.regime == "one_sign":
        # Sums grow with their length: outputs would be too large for float16.
        w13, w2 = w13.abs(), w2.abs() / power_of_two_at_least(problem.inter)
    else:
        w2 /= power_of_two_at_least(math.sqrt(problem.inter))
    return ExpertValues(
        w13,
        w2,
        bell(stream(seed, "w13_bias"), rows_13, 1) / 2,
        bell(stream(seed, "w2_bias"), rows_2, 1) / 2,
    )


def _exact_weights(
    problem: MoEProblem, rows_13: torch.Tensor, rows_2: torch.Tensor
) -> ExpertValues:
    """Make sparse weights: every product, activation and sum has at most 8 significant bits.

    Gates are +-128, where a sigmoid is 1 or nearly 0; ups and arguments of relu are at most 3;
    a row of w2 has three numbers that are not 0.
    """
    seed = problem.seed
    is_gate = rows_13 % ROWS_AN_EXPERT < UP_ROWS
    large = is_gate if problem.gated else torch.full_like(is_gate, problem.activation in GATE_LIKE)
    single = large | (problem.activation == "relu2")
    first = _signs(stream(seed, "w13"), rows_13, problem.hidden, 1)
    second = _signs(stream(seed, "w13 too"), rows_13, problem.hidden, 1)
    w13 = torch.where(first != 0, first, second.masked_fill(single.unsqueeze(1), 0.0))
    w13 *= torch.where(large, EXACT_GATE, 1.0).unsqueeze(1)
    unit = EXACT_GATE if problem.gated or problem.activation in GATE_LIKE else 1.0
    w13_bias = 2 * integers(stream(seed, "w13_bias"), rows_13, 1, 0, 1) - 1
    return ExpertValues(
        w13,
        _signs(stream(seed, "w2"), rows_2, problem.inter, EXACT_COLUMNS),
        w13_bias.masked_fill(large.unsqueeze(1), 0.0),
        unit * (2 * integers(stream(seed, "w2_bias"), rows_2, 1, 0, 1) - 1),
    )


def _signs(key: int, rows: torch.Tensor, columns: int, count: int) -> torch.Tensor:
    """Make [rows, columns] zeros with 1 or -1 in up to ``count`` columns of each row."""
    hashes = bits(key, rows, count)
    found = torch.zeros((len(rows), columns), device=rows.device)
    # One at a time: which of two values a GPU scatters to one place last is anybody's guess.
    for each in hashes.split(1, dim=1):
        found.scatter_(1, (each >> 1) % columns, (2 * (each % 2) - 1).to(found.dtype))
    return found


def swiglu_numbers(problem: MoEProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Make alpha, beta and limit [experts], those that the call gives, float32.

    The limit is within what gates and ups are of: 0.5 to 3. The beta of situ is a soft limit, too.
    """
    experts = torch.arange(problem.here, device=device) + problem.expert_offset
    if not problem.numbers_of_each:
        experts = torch.zeros_like(experts)
    found = {}
    ranges = {"alpha": (3, 8), "beta": (-2, 4), "limit": (2, 12)}
    if problem.activation == "situ":
        ranges["beta"] = ranges["limit"]
    for name in problem.numbers_given:
        low, high = ranges[name]
        found[name] = integers(stream(problem.seed, name), experts, 1, low, high).flatten() / 4
    return found


def assignment(problem: MoEProblem, device: torch.device) -> torch.Tensor:
    """Choose the experts of each token: int32 [tokens, top_k], ids of all ranks."""
    tokens = torch.tensor(problem.ids, dtype=torch.int64, device=device)
    experts, top_k = problem.num_experts + problem.identity_experts, problem.top_k
    slots = torch.arange(top_k, device=device)
    key = stream(problem.seed, "assignment")
    if problem.assignment == "balanced":
        ids = (tokens.unsqueeze(1) * top_k + slots) % experts
    elif problem.assignment == "duplicates":
        ids = bits(key, tokens, top_k) % experts
    else:
        one = problem.assignment == "one_expert"
        ranks = bits(key, torch.zeros_like(tokens) if one else tokens, experts)
        if problem.assignment == "sparse":
            few = max(top_k, experts // 4)
            zero = torch.zeros(1, dtype=torch.int64, device=device)
            used = bits(key, zero, experts).argsort(dim=1, stable=True)[0, :few]
            ids = used[ranks[:, used].argsort(dim=1, stable=True)[:, :top_k]]
        else:
            ids = ranks.argsort(dim=1, stable=True)[:, :top_k]
    if problem.assignment == "masked":
        ids = ids.masked_fill(bits(stream(problem.seed, "masked"), tokens, top_k) % 3 == 0, -1)
    return ids.to(torch.int32)


def routing_weights(problem: MoEProblem, device: torch.device) -> torch.Tensor:
    """Make routing weights, float32 [tokens, top_k], positive except for requested zeros."""
    tokens = torch.tensor(problem.ids, dtype=torch.int64, device=device)
    hashes = bits(stream(problem.seed, "topk_weights"), tokens, problem.top_k)
    if problem.regime == "exact_grid":
        if problem.weights_on_input:
            return torch.ones_like(hashes, dtype=torch.float32)
        return torch.where(hashes % 2 == 0, 0.5, 1.0).to(torch.float32)
    # Twenty bits, so that a quarter and three quarters of a weight are exact.
    weights = ((hashes >> 12).to(torch.float32) + 2.0**18) * 2.0**-20
    weights /= power_of_two_at_least(problem.top_k)
    if problem.regime == "zero_weights":
        weights = weights.masked_fill(hashes % 3 == 0, 0.0)
    elif problem.regime == "dominant_expert":
        chosen = hashes.argmax(dim=1, keepdim=True)
        dominant = torch.zeros_like(weights).scatter_(1, chosen, 1.0)
        weights = torch.where(dominant > 0, 1.0 + weights, weights * 2.0**-10)
    return weights


def gain_values(problem: MoEProblem, device: torch.device) -> torch.Tensor:
    """Make the gain [hidden] of an expert's norm, float32: around 1, a few of them negative."""
    rows = torch.arange(problem.hidden, device=device)
    return 1.0 + bell(stream(problem.seed, "output_norm"), rows, 1).flatten() / 2


def gate_values(problem: MoEProblem, device: torch.device) -> torch.Tensor:
    """Make what gates shared experts [tokens, 1 or experts], float32.

    Weights of a gate are up to 1, and 0 for a token in eight; logits are of both signs, and large
    where values are to saturate.
    """
    tokens = torch.tensor(problem.ids, dtype=torch.int64, device=device)
    columns = problem.shared_experts if problem.shared_gate.endswith("_each") else 1
    key = stream(problem.seed, "shared_gate")
    if problem.shared_gate.startswith("logits"):
        spread = SATURATED if problem.regime == "saturated" else LOGIT_SPREAD
        return spread * bell(key, tokens, columns)
    hashes = bits(key, tokens, columns)
    weights = ((hashes >> 12).to(torch.float32) + 1.0) * 2.0**-20
    return weights.masked_fill(hashes % 8 == 0, 0.0)


def logit_values(problem: RouteProblem, device: torch.device) -> torch.Tensor:
    """Make logits [tokens, experts] in the problem's dtype."""
    tokens = torch.tensor(problem.ids, dtype=torch.int64, device=device)
    key = stream(problem.seed, "logits")
    experts = problem.num_experts + problem.shared_experts
    values = LOGIT_SPREAD * bell(key, tokens, experts)
    if problem.regime == "ties":
        values = integers(key, tokens, experts, -3, 3) / 2
    elif problem.regime == "all_negative":
        values += ALL_NEGATIVE
    elif problem.regime == "saturated":
        values *= SATURATING / LOGIT_SPREAD
    elif problem.regime == "faint_scores":
        values -= integers(stream(problem.seed, "faint"), tokens, 1, *FAINT)
    elif problem.regime == "dominant_expert":
        values.scatter_(1, bits(stream(problem.seed, "dominant"), tokens, 1) % experts, DOMINANT)
    elif problem.regime in ("negative", "positive"):
        level = integers(stream(problem.seed, "level"), tokens, 1, 0, MOST_OF_ONE_SIGN)
        values = values.abs() + level
        values = -values if problem.regime == "negative" else values
    elif problem.regime == "exact_grid":
        # Distances of 128: a softmax is one-hot, a sigmoid 1 or nearly 0.
        ranks = bits(key, tokens, experts).argsort(dim=1, stable=True).argsort(dim=1)
        values = EXACT_GATE * (ranks.to(torch.float32) - experts // 2)
    return values.to(getattr(torch, problem.dtype))


def scale_values(problem: RouteProblem, device: torch.device) -> torch.Tensor:
    """Make the factors [experts] on the experts' weights, float32 from 0.5 to 1.5."""
    rows = torch.arange(problem.num_experts, device=device)
    return 1 + bell(stream(problem.seed, "expert scales"), rows, 1).flatten() / 8


def table_values(problem: RouteProblem, device: torch.device) -> torch.Tensor:
    """Make the experts [vocabulary, top_k] of each token id, int32, distinct in each row."""
    # Rows come again: to hash a million entries takes longer than to route.
    experts, count = problem.num_experts, min(problem.hash_vocabulary, TABLE_ROWS)
    numbers = bits(stream(problem.seed, "expert table"), torch.arange(count, device=device), 2)
    strides = [n for n in range(1, experts + 1) if math.gcd(n, experts) == 1]
    stride = torch.tensor(strides, device=device)[numbers[:, 1:] % len(strides)]
    slots = torch.arange(problem.top_k, device=device)
    rows = ((numbers[:, :1] + stride * slots) % experts).to(torch.int32)
    times = -(-problem.hash_vocabulary // count)
    return rows.repeat(times, 1)[: problem.hash_vocabulary]


def vocabulary_ids(problem: RouteProblem, device: torch.device) -> torch.Tensor:
    """Make the token ids [tokens], int64: the first and the last of the vocabulary among them."""
    tokens = torch.tensor(problem.ids, dtype=torch.int64, device=device)
    ids = bits(stream(problem.seed, "input ids"), tokens, 1).flatten() % problem.hash_vocabulary
    ids = ids.where(tokens % 5 != 0, problem.hash_vocabulary - 1)
    return ids.where(tokens % 5 != 1, 0)


def bias_values(problem: RouteProblem, device: torch.device) -> torch.Tensor:
    """Make the bias [experts]: its differences are of the scores' size, so that it decides."""
    rows = torch.arange(problem.num_experts, device=device)
    values = bell(stream(problem.seed, "bias"), rows, 1).flatten() / 4
    if problem.bias_values != "spread":
        values = TRAINED_BIAS + values if problem.bias_values == "trained" else 0 * values
        return values.to(getattr(torch, problem.bias_dtype))
    if problem.regime == "negative_scores":
        values += NEGATIVE_BIAS
    elif problem.regime == "ties":
        values = (values * 4).round() / 4
    return values.to(getattr(torch, problem.bias_dtype))
