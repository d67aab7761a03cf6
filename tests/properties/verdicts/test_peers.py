"""Words for kernels whose calls have another contract: each excuses what it names, no more."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof import reference
from kernelproof.impl import (
    Implementation,
    MoEInputs,
    PagedAttentionInputs,
    Target,
    implementation,
)
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, MoEProblem, Problem, oracle
from kernelproof.reference.validation import KVLayout

PAGED = AttentionProblem(
    query_lens=(3, 1, 2),
    seq_lens=(3, 9, 7),
    num_kv_heads=2,
    page_size=4,
    page_order=1,
    causal=True,
    window_left=3,
)
WITHOUT_KEYS = replace(PAGED, query_lens=(3, 1, 2), seq_lens=(1, 0, 5), window_left=0)
"""Two rows of the first request are before its key, and the second request has none."""
EXPERTS = MoEProblem(num_tokens=5, num_experts=6, top_k=3, hidden=32, inter=16, seed=3)


class Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def judged(plugged_in: Implementation, problem: Problem, law: str = "parity") -> Verdict:
    subject = Subject(plugged_in, Target(), Anywhere())
    assert subject.refusal(problem) is None
    try:
        return find_law(law).check(subject, problem)
    except Stop as stop:
        return stop.verdict


def attended(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = oracle.attention(inputs)
    return out.to(inputs.out_dtype), lse.float()


# append_and_attend


def appending(
    *, shift: int = 0, values: bool = True, late: bool = False, once_more: bool = False
) -> Implementation:
    """Return a call that appends and attends; an argument makes it wrong."""

    @implementation("paged_attention", name="appends", features=("append_and_attend",))
    def call(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        before = attended(inputs)
        slots, size = inputs.metadata.slot_mapping() + shift, inputs.metadata.page_size
        place: Any = (slots // size, slots % size)
        if inputs.kv_layout == "HND":
            place = (place[0], slice(None), place[1])
        assert inputs.new_k is not None
        assert inputs.new_v is not None
        inputs.k_cache[place] = inputs.new_k
        if values:
            inputs.v_cache[place] = inputs.new_v
        after = attended(inputs)
        if once_more:
            old = set(range(len(inputs.k_cache))) - set((slots // size).tolist())
            inputs.k_cache[min(old)] = 0.0
        return before if late else after

    return call


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_call_may_append_and_attend(layout: KVLayout) -> None:
    for problem in (replace(PAGED, kv_layout=layout), replace(PAGED, kv_views="row")):
        declared = replace(appending(), features=frozenset({"append_and_attend", "kv_views"}))
        assert judged(declared, problem).status == "PASS"
    assert judged(appending(), PAGED, "inputs_unchanged").status == "PASS"
    assert judged(appending(), replace(PAGED, window_left=-1), "doubled_keys").vacuous


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ({"shift": -1}, "numeric", "k_cache does not hold what the call was to append of token 0"),
        ({"values": False}, "numeric", "v_cache does not hold .* \\(6 of 6 tokens\\)"),
        ({"late": True}, "nan", "is NaN"),
        (
            {"once_more": True},
            "wrote_outside",
            r"slot \d+ of page \d+ of k_cache, no new",
        ),
    ],
)
def test_a_call_that_appends_wrongly_is_found(
    fault: dict[str, Any], kind: str, message: str
) -> None:
    found = judged(appending(**fault), replace(PAGED, page_order=3))
    assert (found.status, found.kind) == ("FAIL", kind)
    assert re.search(message, found.message)


def test_it_is_judged_where_each_query_brings_a_key() -> None:
    for problem in (WITHOUT_KEYS, replace(PAGED, kv_cache="float8_e4m3fn")):
        features = frozenset({"append_and_attend", "fp8_kv"})
        refusal = replace(appending(), features=features).refusal(problem, Target())
        assert str(refusal).startswith("append_and_attend is judged")


# router_logits

Router = Callable[[MoEInputs], tuple[torch.Tensor, torch.Tensor]]


def routing(router: Router) -> Implementation:
    """Return experts that route by themselves."""

    @implementation("moe", name="routes", features=("router_logits",))
    def call(inputs: MoEInputs) -> torch.Tensor:
        ids, weights = router(inputs)
        args = inputs.hidden, inputs.w13, inputs.w2, ids.int(), weights
        return reference.moe(*args, activation=inputs.activation).to(inputs.out_dtype)

    return call


def logits_of(inputs: MoEInputs) -> tuple[torch.Tensor, int]:
    assert inputs.router_logits is not None
    return inputs.router_logits, inputs.topk_ids.shape[1]


def right(inputs: MoEInputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits, k = logits_of(inputs)
    routed = reference.route(logits, k)
    return routed.topk_ids, routed.topk_weights.float()


def of_all(inputs: MoEInputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits, k = logits_of(inputs)
    weights, ids = logits.softmax(1).topk(k, dim=1)
    return ids, weights


def one_less(inputs: MoEInputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits, k = logits_of(inputs)
    largest, ids = logits.topk(k, dim=1)
    return ids, torch.nn.functional.pad(largest[:, :-1].softmax(1), (0, 1))


def in_16_bits(inputs: MoEInputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits, k = logits_of(inputs)
    largest, ids = logits.topk(k, dim=1)
    return ids, largest.bfloat16().softmax(1).float()


def given(inputs: MoEInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.topk_ids, inputs.topk_weights


def test_experts_may_route_by_themselves() -> None:
    for problem in (EXPERTS, replace(EXPERTS, regime="dominant_expert"), replace(EXPERTS, top_k=1)):
        assert judged(routing(right), problem).status == "PASS"
    assert judged(routing(right), EXPERTS, "expert_order").status == "PASS"


@pytest.mark.parametrize("router", [of_all, one_less, in_16_bits, given])
def test_experts_that_route_wrongly_are_found(router: Router) -> None:
    assert judged(routing(router), EXPERTS).status == "FAIL"


def test_what_a_softmax_gives_is_all_that_is_asked() -> None:
    assert routing(right).arithmetic.routing == "accumulate"
    refused = {"regime": "zero_weights"}, {"assignment": "duplicates"}, {"weights_on_input": True}
    for change in refused:
        features = frozenset({"router_logits", "duplicate_ids", "weights_on_input"})
        declared = replace(routing(right), features=features)
        refusal = declared.refusal(replace(EXPERTS, **change), Target())
        assert str(refusal).startswith("router_logits is judged")


# undefined_without_keys


def undefined(
    *, shift: int = 0, features: tuple[str, ...] = ("undefined_without_keys",)
) -> Implementation:
    """Return attention that gives NaN in rows without keys; ``shift`` makes its window wrong."""

    @implementation("paged_attention", name="undefined", features=features)
    def call(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        window = max(inputs.window_left - shift, -1)
        out, lse = attended(replace(inputs, window_left=window, causal=inputs.causal))
        unseen = oracle.attention(replace(inputs, sinks=None, window_left=window)).lse.isneginf()
        return out.masked_fill(unseen[..., None], torch.nan), lse.masked_fill(unseen, torch.nan)

    return call


def test_rows_without_keys_may_be_undefined() -> None:
    for problem in (WITHOUT_KEYS, replace(WITHOUT_KEYS, sinks=True)):
        assert judged(undefined(), problem).status == "PASS"
        assert judged(undefined(features=()), problem).kind == "nan"
    assert judged(undefined(), WITHOUT_KEYS, "well_formed").status == "PASS"
    (claim,) = undefined().claims
    assert "rows of out and lse that see no key hold anything" in claim


def test_other_rows_stay_defined() -> None:
    assert judged(undefined(shift=1), PAGED).status == "FAIL"
    everywhere = implementation(
        "paged_attention", name="nan", features=("undefined_without_keys",)
    )(lambda inputs: tuple(each * torch.nan for each in attended(inputs)))
    assert judged(everywhere, WITHOUT_KEYS).kind == "nan"
