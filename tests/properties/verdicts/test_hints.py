"""Findings name the one classic fault that gives all of their wrong elements, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.impl.protocol import Implementation
from kernelproof.impl.registry import find_implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.search.confirmation import Confirmation, Failure
from kernelproof.properties.seeded import BUGS
from kernelproof.properties.seeded.kernels import attend
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem

SAID = "one fault explains all wrong elements: "
PAGED = AttentionProblem(
    query_lens=(5, 3),
    seq_lens=(37, 21),
    num_kv_heads=2,
    group_size=4,
    page_size=8,
    causal=True,
    k_scale=0.75,
    v_scale=1.5,
)
RAGGED = replace(PAGED, operation="ragged_attention")
DECODE = replace(PAGED, query_lens=(1, 1, 1), seq_lens=(37, 21, 6), causal=False)
ONE_KEY = "rows do not see their own key (the mask is shifted)"
SEEDED = {
    "lse-base-2": (RAGGED, "the lse is divided by ln 2 (the base of the logarithm)"),
    "lse-heads-first": (
        PAGED,
        "the lse is transposed: [heads, tokens] in memory",
    ),
    "k-scale-ignored": (RAGGED, "k_scale is not applied"),
    "ragged-v-scale-dropped": (replace(RAGGED, kv_cache="float8_e4m3fn"), "v_scale is not applied"),
    "scales-dropped-for-fp8": (
        replace(PAGED, kv_cache="float8_e4m3fn"),
        "neither k_scale nor v_scale is applied",
    ),
    "q-scale-dropped": (
        replace(PAGED, kv_cache="float8_e4m3fn", q_dtype="float8_e4m3fn", q_scale=0.5),
        "q_scale is not applied",
    ),
    "window-off-by-one": (replace(PAGED, window_left=6), "window_left keeps one key too few"),
    "right-window-off-by-one": (
        replace(RAGGED, causal=False, window_left=6, window_right=2),
        "window_right keeps one key too many",
    ),
    "last-page-off-by-one": (PAGED, ONE_KEY),
    "first-table-for-all": (PAGED, "each request reads the pages of the first one"),
    "full-last-part": (
        replace(DECODE, seq_lens=(4096, 21, 6), page_size=64),
        "the last tile of 64 keys is left out",
    ),
}
"""Seeded bugs of classic faults: a problem on which each is wrong, and its fault in words."""
UNRELATED = {
    "soft-cap-skipped": replace(PAGED, logits_soft_cap=2.0),
    "heads-interleaved": PAGED,
    "causal-from-start": PAGED,
    "scales-swapped": PAGED,
    "strides-ignored": replace(PAGED, strided_kv=True),
    "lse-is-maximum": RAGGED,
    "group-size-power-of-two": replace(PAGED, group_size=3),
}
"""Seeded bugs of other faults, and a problem on which each is wrong."""


class Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def judged(made: Implementation, problem: AttentionProblem) -> Verdict:
    return find_law("parity").check(Subject(made, Target(), Anywhere()), problem)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """Ask once about each bug, with three seeds."""
    references = {bug.name: bug.reference for bug in BUGS}
    asked = {name: problem for name, (problem, _) in SEEDED.items()} | UNRELATED
    return {
        f"{name} {seed}": judged(find_implementation(references[name]), replace(problem, seed=seed))
        for name, problem in asked.items()
        for seed in range(3)
    }


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_named(name: str, verdicts: dict[str, Verdict]) -> None:
    for seed in range(3):
        verdict = verdicts[f"{name} {seed}"]
        assert (verdict.status, verdict.kind) == ("FAIL", "numeric")
        assert verdict.message.partition(SAID)[2] == SEEDED[name][1]


def test_a_search_asks_for_no_explanation() -> None:
    """A worker names no fault of what is drawn and shrunk: that costs as much as the search."""
    (made,) = (each.reference for each in BUGS if each.name == "k-scale-ignored")
    subject = Subject(find_implementation(made), Target(), Anywhere(), explains=False)
    verdict = find_law("parity").check(subject, RAGGED)
    assert (verdict.kind, SAID in verdict.message) == ("numeric", False)


@pytest.mark.parametrize("name", UNRELATED)
def test_another_fault_gets_no_hint(name: str, verdicts: dict[str, Verdict]) -> None:
    for seed in range(3):
        verdict = verdicts[f"{name} {seed}"]
        assert verdict.bad
        assert SAID not in verdict.message


@pytest.mark.parametrize(
    ("name", "kept"), [("last-page-off-by-one", [ONE_KEY]), ("causal-from-start", [])]
)
def test_a_fault_explains_the_problem_as_it_was_drawn_too(name: str, kept: list[str]) -> None:
    """On two keys both bugs look like two faults."""
    (made,) = (find_implementation(bug.reference) for bug in BUGS if bug.name == name)

    class Runner:
        def judge(self, problem: AttentionProblem, **_: bool) -> Verdict:
            return judged(made, problem)

    small = judged(made, replace(PAGED, query_lens=(1,), seq_lens=(2,)))
    assert small.faults == [ONE_KEY, "the last key of each request is left out"]
    plain, drawn = small.explained_by([]), Failure(PAGED, judged(made, PAGED))
    explained = Confirmation(cast("Any", Runner())).explained_as_drawn(small, drawn)
    assert explained == plain.explained_by(kept)
    assert plain.message == small.message.partition(f"; {SAID}")[0]


def kernel(
    change: Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Implementation:
    """Return a right kernel whose answer, out in float32, is changed."""

    def changed(inputs: Any) -> Any:  # noqa: ANN401
        out, lse = change(inputs, *attend(replace(inputs, out_dtype=torch.float32)))
        return out.to(inputs.out_dtype), lse

    return implementation("paged_attention", name="mine")(changed)


def cut(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Take the upper half of the bits of float32 for a bfloat16."""
    del inputs
    return (out.view(torch.int32) & -0x10000).view(torch.float32), lse


def swapped(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Write the rows of three requests of one query token to each other's places."""
    del inputs
    return out[[1, 1, 0]], lse[[1, 1, 0]]


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (lambda _, out, lse: (out, lse * 0.6931471805599453), PAGED,
         "the lse is multiplied by ln 2 (the base of the logarithm)"),
        (lambda _, out, lse: (out.roll(-1, 1), lse.roll(-1, 1)), PAGED,
         "out has the values of the next head"),
        (lambda _, out, lse: (out.roll(1, 1), lse), PAGED,
         "out has the values of the previous head"),
        (lambda _, out, lse: (out.roll(1, 0), lse.roll(1, 0)), PAGED,
         "out has the values of the previous row"),
        (swapped, DECODE, "rows hold the answers to another request's rows"),
        (cut, replace(PAGED, dtype="bfloat16"), "out is truncated, not rounded, to 16 bits"),
        (lambda inputs, *_: attend(replace(inputs, sm_scale=1.0)), PAGED,
         "sm_scale is not applied"),
        (lambda _, out, lse: (out * math.nan, lse - math.inf), replace(PAGED, window_left=0),
         f"window_left keeps one key too few, or {ONE_KEY}"),
    ],
)  # fmt: skip
def test_faults_of_an_answer_are_named(change: Any, problem: AttentionProblem, hint: str) -> None:  # noqa: ANN401
    verdict = judged(kernel(change), problem)
    assert verdict.bad
    assert verdict.message.partition(SAID)[2] == hint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_honest_kernel_gets_no_hint(dtype: str) -> None:
    verdict = judged(kernel(lambda _, out, lse: (out, lse)), replace(PAGED, dtype=dtype))
    assert (verdict.status, verdict.message) == ("PASS", "")
