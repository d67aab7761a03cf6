"""Routing: every method against plain loops, ties, groups, and the comparison of routings."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    METHODS,
    ROUTING_NAMES,
    Arithmetic,
    Routing,
    compare_routing,
    route,
)

FLOAT32 = torch.float32


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def softmax(row: list[float]) -> list[float]:
    terms = [math.exp(x - max(row)) for x in row]
    return [term / sum(terms) for term in terms]


def by_loops(
    row: list[float],
    top_k: int,
    method: str,
    bias: list[float] | None = None,
    groups: tuple[int, int] = (1, 1),
    masked: float = -math.inf,
) -> tuple[list[int], list[float]]:
    """Route one token, written from the definitions and without the oracle's table."""
    experts = range(len(row))
    if method in ("default", "renormalize_naive"):
        scores = softmax(row)
    elif method in ("sigmoid", "sigmoid_renorm", "deepseek_v3", "minimax2"):
        scores = [sigmoid(x) for x in row]
    elif method == "deepseek_v4":
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in row]
    else:
        scores = list(row)
    ranking = [scores[e] + (bias[e] if bias else 0.0) for e in experts]
    size = len(row) // groups[0]
    of_group = []
    for group in range(groups[0]):
        members = sorted(ranking[group * size : (group + 1) * size], reverse=True)
        two = method == "deepseek_v3" or bias is not None
        of_group.append(sum(members[: 2 if two else 1]))
    chosen = sorted(range(groups[0]), key=lambda group: (-of_group[group], group))[: groups[1]]
    ranking = [ranking[e] if e // size in chosen else masked for e in experts]
    ids = sorted(experts, key=lambda e: (-ranking[e], e))[:top_k]
    if method == "sparsemixer":
        near = [
            [
                e
                for e in experts
                if e not in ids[:slot]
                and row[ids[slot]] - row[e] <= 0.02 * max(abs(row[e]), row[ids[slot]])
            ]
            for slot in range(top_k)
        ]
        return ids, [
            1 / sum(math.exp(row[e] - row[taken]) for e in each)
            for taken, each in zip(ids, near, strict=True)
        ]
    if method == "renormalize":
        return ids, softmax([row[e] for e in ids])
    if method in ("llama4", "topk_sigmoid"):
        return ids, [sigmoid(row[e]) for e in ids]
    weights = [scores[e] for e in ids]
    if method in ("renormalize_naive", "sigmoid_renorm", "deepseek_v3", "minimax2", "deepseek_v4"):
        weights = [weight / sum(weights) for weight in weights]
    return ids, weights


def draw(tokens: int, experts: int, seed: int = 0, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(tokens, experts, generator=generator)).to(dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_methods_are_what_plain_loops_say(method: str, dtype: torch.dtype, with_bias: bool) -> None:
    with_bias &= method != "sparsemixer"  # which has none
    logits, bias = draw(7, 12, dtype=dtype), draw(1, 12, seed=1)[0] if with_bias else None
    found = route(logits, 3, method=method, bias=bias, scaling_factor=2.5)
    assert found.topk_ids.dtype == torch.int32
    assert found.topk_weights.dtype == torch.float64
    for token, row in enumerate(logits.double().tolist()):
        ids, weights = by_loops(row, 3, method, None if bias is None else bias.tolist())
        assert found.topk_ids[token].tolist() == ids
        wanted = [2.5 * weight for weight in weights]
        assert found.topk_weights[token].tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("method", ["deepseek_v3", "default", "sigmoid_renorm"])
@pytest.mark.parametrize("masked_groups", ["-inf", "zero"])
@pytest.mark.parametrize("shift", [None, 0.0, -3.0])
def test_groups_are_what_plain_loops_say(
    method: str, masked_groups: str, shift: float | None
) -> None:
    logits = draw(9, 16)
    bias = None if shift is None else draw(1, 16, seed=2)[0] + shift
    found = route(
        logits,
        4,
        method=method,
        bias=bias,
        num_groups=4,
        topk_groups=2,
        masked_groups=masked_groups,
    )
    masked = 0.0 if masked_groups == "zero" else -math.inf
    given = None if bias is None else bias.tolist()
    for token, row in enumerate(logits.double().tolist()):
        ids, weights = by_loops(row, 4, method, given, (4, 2), masked)
        assert found.topk_ids[token].tolist() == ids
        assert found.topk_weights[token].tolist() == pytest.approx(weights, rel=1e-12)


def test_a_case_by_hand() -> None:
    logits = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)]], dtype=torch.float64)
    default = route(logits, 2, method="default")
    assert default.topk_ids.tolist() == [[2, 1]]
    assert default.topk_weights[0].tolist() == pytest.approx([5 / 8, 2 / 8])
    for method in ("renormalize", "renormalize_naive"):
        weights = route(logits, 2, method=method).topk_weights[0].tolist()
        assert weights == pytest.approx([5 / 7, 2 / 7])
    assert route(logits, 1, method="llama4").topk_weights.tolist() == [[pytest.approx(5 / 6)]]
    plain = route(logits, 2, method="topk").topk_weights[0].tolist()
    assert plain == pytest.approx([math.log(5.0), math.log(2.0)])


def test_masking_by_zero_lets_masked_experts_in_where_scores_are_negative() -> None:
    logits = torch.tensor([[4.0, 3.0, -4.0, -4.0]])
    bias = torch.tensor([-1.5, -1.5, -3.0, -3.0])  # every biased score is negative
    options: dict[str, Any] = {"method": "deepseek_v3", "num_groups": 2, "topk_groups": 1}
    inside = route(logits, 2, bias=bias, **options)
    assert inside.topk_ids.tolist() == [[0, 1]]
    outside = route(logits, 2, bias=bias, masked_groups="zero", **options)
    assert outside.topk_ids.tolist() == [[2, 3]]


def test_the_bias_selects_and_does_not_weigh() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 10.0])
    found = route(logits, 2, method="deepseek_v3", bias=bias)
    assert found.topk_ids.tolist() == [[2, 0]]
    scores = [sigmoid(0.0), sigmoid(2.0)]
    wanted = [score / sum(scores) for score in scores]
    assert found.topk_weights[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("method", METHODS)
def test_ties_go_to_the_lowest_index(method: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]])
    assert route(logits, 4, method=method).topk_ids.tolist() == [[1, 2, 4, 0]]


def test_all_negative_logits_and_a_constant_shift() -> None:
    logits = draw(5, 8).double()
    for method in ("default", "renormalize", "renormalize_naive"):
        here, there = (route(x, 2, method=method) for x in (logits, logits - 100))
        assert torch.equal(here.topk_ids, there.topk_ids)
        torch.testing.assert_close(here.topk_weights, there.topk_weights, rtol=1e-12, atol=0)


def test_what_underflows_has_weight_zero_and_no_nan() -> None:
    logits = torch.full((1, 4), -1e4)
    found = route(logits, 2, method="deepseek_v3")
    assert found.topk_weights.tolist() == [[0.0, 0.0]]
    ruled_out = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert route(ruled_out, 2).topk_weights.tolist() == [[1.0, 0.0]]


def test_no_tokens() -> None:
    found = route(torch.zeros(0, 4), 2)
    assert found.topk_ids.shape == found.topk_weights.shape == (0, 2)
    assert compare_routing(found, torch.zeros(0, 4), 2).right


def test_every_name_elsewhere_is_a_method() -> None:
    for names in ROUTING_NAMES.values():
        assert set(names.values()) <= set(METHODS)
    # vLLM's Renormalize is FlashInfer's RenormalizeNaive (vllm-project/vllm#43223).
    assert ROUTING_NAMES["vllm"]["Renormalize"] == ROUTING_NAMES["flashinfer"]["RenormalizeNaive"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "softmax"}, "method is 'softmax'; it must be one of default, renormalize"),
        ({"top_k": 0}, "top_k is 0; it must be from 1 to 8"),
        ({"top_k": 9}, "top_k is 9; it must be from 1 to 8"),
        ({"num_groups": 4}, "num_groups is 4 and topk_groups None: give both"),
        ({"num_groups": 3, "topk_groups": 1}, "num_groups is 3, which does not divide the 8"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups is 5; it must be from 1 to 4"),
        ({"num_groups": 4, "topk_groups": 1, "top_k": 3}, "top_k is 3, but 1 groups of 2 experts"),
        (
            {"num_groups": 4, "topk_groups": 2, "method": "renormalize"},
            "method 'renormalize' ranks by logits",
        ),
        ({"masked_groups": "nan"}, "masked_groups is 'nan'"),
        ({"bias": torch.zeros(3)}, "bias must be 8 finite numbers"),
        ({"scaling_factor": math.inf}, "scaling_factor is inf"),
        ({"compute_dtype": torch.float16}, "compute_dtype is torch.float16"),
        ({"method": ["default"]}, r"method is \['default'\]; it must be one of"),
        ({"scaling_factor": "1"}, "scaling_factor is '1', not a number"),
        ({"scaling_factor": None}, "scaling_factor is None, not a number"),
        ({"bias": torch.zeros(8, device="meta")}, "bias is on the device 'meta'"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    given = {"top_k": 2, "method": "deepseek_v3", **options}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        route(torch.zeros(2, 8), **given)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 8, device="meta"), "logits is on the device 'meta', where a tensor has no"),
        (torch.zeros(2, 8).to_sparse(), "logits has the layout torch.sparse_coo"),
        (torch.zeros(2, 8).to(torch.complex64), "logits must have a floating dtype"),
        (torch.zeros(8), "logits must be .tokens, experts."),
    ],
)
def test_logits_without_values_to_read_are_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(logits, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, r"logits\[1, 2\] is nan"), (math.inf, r"logits\[1, 2\] is inf")],
)
def test_logits_without_an_order_are_refused(value: float, message: str) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 2] = value
    with pytest.raises(ValueError, match=message):
        route(logits, 2)
    logits[1] = -math.inf
    with pytest.raises(ValueError, match=r"logits\[1\] are all minus infinity"):
        route(logits, 2)


# Comparing routings


def in_float32(logits: torch.Tensor, top_k: int, method: str, **options: Any) -> Routing:  # noqa: ANN401
    """Route as a kernel does, in float32; torch breaks ties as it likes."""
    found = route(logits.float(), top_k, method=method, compute_dtype=FLOAT32, **options)
    return Routing(found.topk_ids.flip(1), found.topk_weights.flip(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spread", [0.0, 1e-7, 1.0, 30.0])
def test_honest_float32_routings_are_right(method: str, spread: float) -> None:
    logits = spread * draw(40, 32, seed=3)
    options: dict[str, Any] = {"method": method, "scaling_factor": 2.5}
    if METHODS[method].score == "sigmoid":
        options["bias"] = 0.1 * draw(1, 32, seed=4)[0]
    if method == "deepseek_v3":
        options |= {"num_groups": 8, "topk_groups": 4}
    found = in_float32(logits, 4, **options)
    compared = compare_routing(found, logits, 4, **options)
    assert compared.right
    size = 1 + float(logits.abs().max())  # exponents are rounded in proportion to the logits
    assert (compared.bound <= 1e-5 * size * (1 + compared.expected.abs())).all()
    stored = found._replace(topk_weights=found.topk_weights.bfloat16())
    assert compare_routing(stored, logits, 4, **options).right


@pytest.mark.parametrize("method", METHODS)
def test_any_choice_among_equal_scores_is_right(method: str) -> None:
    logits = torch.zeros(1, 6)
    weights = route(logits, 2, method=method).topk_weights
    for ids in ([0, 1], [5, 2], [3, 4]):
        found = Routing(torch.tensor([ids]), weights.float())
        assert compare_routing(found, logits, 2, method=method).right


def test_a_tie_of_groups_may_go_either_way_but_not_both() -> None:
    logits = torch.zeros(1, 8)
    options: dict[str, Any] = {"method": "deepseek_v3", "num_groups": 4, "topk_groups": 2}
    half = torch.tensor([[0.25] * 4])
    for ids, right in (([0, 1, 6, 7], True), ([2, 3, 4, 5], True), ([0, 2, 4, 6], False)):
        compared = compare_routing(Routing(torch.tensor([ids]), half), logits, 4, **options)
        assert compared.ids_right.tolist() == [right]


def test_near_ties_below_a_kernels_rounding_may_go_either_way() -> None:
    # In float32 all of these sigmoids are 1.
    logits = torch.tensor([[30.0, 31.0, 32.0, 0.0]])
    found = Routing(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
    assert compare_routing(found, logits, 2, method="sigmoid_renorm").right
    assert not compare_routing(found, logits, 2, method="renormalize").ids_right.any()


def test_tanh_sigmoids_are_allowed_where_they_are_declared() -> None:
    logits = torch.tensor([[-12.0, -13.0, -14.0]])
    scores = 0.5 * torch.tanh(0.5 * logits) + 0.5
    found = Routing(torch.tensor([[0, 1]]), scores[:, :2])
    options: dict[str, Any] = {"method": "sigmoid"}
    assert compare_routing(found, logits, 2, arithmetic=Arithmetic(sigmoid="tanh"), **options).right
    assert not compare_routing(found, logits, 2, **options).weights_right.any()


def _wrong(name: str, found: Routing, logits: torch.Tensor) -> Routing:
    ids, weights = found.topk_ids.clone(), found.topk_weights.clone()
    if name == "second best":
        ranked = logits.argsort(dim=1, descending=True)
        return Routing(ranked[:, 1:4], weights)
    if name == "an expert twice":
        ids[:, 1] = ids[:, 0]
    if name == "out of range":
        ids[:, 2] = 32
    if name == "weights of other slots":
        weights = weights.flip(1)
    if name == "not renormalised":
        weights = route(logits, 3, method="default").topk_weights
    if name == "not scaled":
        weights = weights / 2.5
    if name == "bf16 softmax":
        weights = 2.5 * torch.softmax(logits.gather(1, ids.long()).bfloat16(), dim=1)
        weights = weights.double() * (1 + 2.0**-10)
    return Routing(ids, weights.float())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("second best", "ids_right"),
        ("an expert twice", "ids_right"),
        ("out of range", "ids_right"),
        ("weights of other slots", "weights_right"),
        ("not renormalised", "weights_right"),
        ("not scaled", "weights_right"),
        ("bf16 softmax", "weights_right"),
    ],
)
def test_wrong_routings_are_wrong(name: str, part: str) -> None:
    logits = draw(16, 32, seed=5)
    options: dict[str, Any] = {"method": "renormalize", "scaling_factor": 2.5}
    found = route(logits, 3, **options)
    assert compare_routing(found, logits, 3, **options).right
    compared = compare_routing(_wrong(name, found, logits), logits, 3, **options)
    assert not getattr(compared, part).any()
    assert not compared.right


def test_slots_of_experts_that_are_masked_out_are_right() -> None:
    logits = torch.tensor([[1.0, -torch.inf, -torch.inf, 0.5]])
    found = route(logits, 3, method="topk")
    assert found.topk_weights[0, 2] == -torch.inf
    assert compare_routing(found, logits, 3, method="topk").right


def test_too_many_groups_alike_are_refused_in_words() -> None:
    options: dict[str, Any] = {"method": "deepseek_v3", "num_groups": 32, "topk_groups": 16}
    logits = torch.zeros(1, 64)
    found = route(logits, 4, **options)
    with pytest.raises(ValueError, match="32 groups of token 0 cannot be told apart, of which 16"):
        compare_routing(found, logits, 4, **options)


def test_a_routing_of_another_shape_is_refused() -> None:
    logits = torch.zeros(2, 4)
    found = Routing(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"topk_ids has shape \(2, 3\)"):
        compare_routing(found, logits, 2)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"found must be a Routing\(topk_ids, topk_weights\), not NoneType"),
        (([[0, 1]], [[0.5, 0.5]]), "found must be a Routing.*, not tuple"),
        (Routing([[0, 1]], torch.ones(1, 2)), "topk_ids must be a tensor .*, not list"),  # type: ignore[arg-type]
        (Routing(torch.ones(1, 2), torch.ones(1, 2)), "topk_ids must hold integers"),
        (
            Routing(torch.zeros(1, 2).int(), torch.ones(1, 2).int()),
            "topk_weights must have a floating dtype",
        ),
        (
            Routing(torch.zeros(1, 2, device="meta").int(), torch.ones(1, 2)),
            "topk_ids is on the device 'meta'",
        ),
    ],
)
def test_what_is_no_routing_is_refused(found: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=message):
        compare_routing(found, torch.zeros(1, 4), 2)


def test_best_comes_first() -> None:
    weights = route(draw(4, 16), 6, method="default").topk_weights
    for row in weights.tolist():
        assert all(left >= right for left, right in pairwise(row))
