"""The law of sensitivity: every option that is ignored is named, and NaN is no ignored option."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.impl.features import MOE_FEATURES
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded.kernels import attend
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, MoEProblem, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.tensors.moe_inputs import MoEInputs

Pair = tuple[torch.Tensor, torch.Tensor]
SINKS = AttentionProblem(seq_lens=(6,), sinks=True)


class Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def judged(kernel: Callable[[PagedAttentionInputs], Pair], problem: AttentionProblem) -> Verdict:
    made = implementation("paged_attention", name="mine")(kernel)
    return find_law("sensitivity").check(Subject(made, Target(), Anywhere()), problem)


def without(**options: Any) -> Callable[[PagedAttentionInputs], Pair]:  # noqa: ANN401  any option
    return lambda inputs: attend(replace(inputs, **options))


def test_every_ignored_option_is_named_also_those_that_the_problem_does_not_use() -> None:
    ignoring = without(window_left=-1, logits_soft_cap=0.0, sinks=None)
    for problem in (SINKS, AttentionProblem(seq_lens=(6,)), replace(SINKS, logits_soft_cap=1.0)):
        verdict = judged(ignoring, problem)
        assert (verdict.status, verdict.kind) == ("FAIL", "insensitive")
        named = verdict.message.partition(" are ignored: ")[0].split(", ")
        assert sorted(named) == ["logits_soft_cap", "sinks", "window_left"]


def test_an_option_that_moves_the_answer_to_infinity_is_not_ignored() -> None:
    """As a sink far above all logits in SGLang's extend: its LSE is wrong, which parity says."""

    def overflowing(inputs: PagedAttentionInputs) -> Pair:
        out, lse = attend(inputs)
        return out, lse if inputs.sinks is None else torch.full_like(lse, torch.inf)

    one_key = replace(SINKS, seq_lens=(1,))  # of which no window hides any
    assert judged(overflowing, one_key).status == "PASS"


def test_one_ignored_option_is_named_alone() -> None:
    verdict = judged(without(sinks=None), SINKS)
    assert verdict.message.startswith("sinks = True in place of False moves the oracle's ")
    assert "ignored" not in verdict.message
    assert judged(attend, SINKS).status == "PASS"


@pytest.mark.parametrize("with_sinks", [True, False])
def test_nan_is_called_nan(with_sinks: bool) -> None:
    def breaks(inputs: PagedAttentionInputs) -> Pair:
        out, lse = attend(inputs)
        wrong = (inputs.sinks is not None) == with_sinks
        return (out * torch.nan, lse * torch.nan) if wrong else (out, lse)

    verdict = judged(breaks, SINKS)
    assert (verdict.status, verdict.kind) == ("FAIL", "nan")
    # Where the answer to the given problem is right, the verdict names the one that is wrong.
    assert (verdict.about is None) == with_sinks


def test_an_ignored_option_is_named_as_data() -> None:
    assert judged(without(sinks=None), SINKS).ignored == ("sinks",)
    assert judged(attend, SINKS).ignored == ()


def test_a_wrong_answer_that_stays_or_moves_too_little_accuses_no_option() -> None:
    """An option is ignored where the answer is right without it, and stays the same with it."""

    def zeros(inputs: PagedAttentionInputs) -> Pair:
        out, lse = attend(inputs)
        return torch.zeros_like(out), torch.zeros_like(lse)

    def shrunk(inputs: PagedAttentionInputs) -> Pair:
        out, lse = attend(inputs)
        return out / 8, lse / 8

    def lse_of_zeros(inputs: PagedAttentionInputs) -> Pair:
        out, lse = attend(inputs)
        return out, torch.zeros_like(lse)

    for kernel in (zeros, shrunk, lse_of_zeros):
        verdict = judged(kernel, replace(SINKS, window_left=2, logits_soft_cap=1.0))
        assert (verdict.status, verdict.kind) == ("FAIL", "numeric")
        assert verdict.ignored == ()
        assert "ignored" not in verdict.message


def experts_judged(kernel: Callable[[MoEInputs], torch.Tensor], problem: MoEProblem) -> Verdict:
    decorate = implementation("moe", name="mine", features=MOE_FEATURES)
    subject = Subject(decorate(kernel), Target(), Anywhere())
    return find_law("moe_sensitivity").check(subject, problem)


def test_options_of_experts_that_are_honoured_are_not_called_ignored() -> None:
    problem = MoEProblem(num_tokens=4, biases=True, interleaved=True, shared_experts=1, hidden=32)

    def unbiased(inputs: MoEInputs) -> torch.Tensor:
        return oracle.experts(
            replace(inputs, w13_bias=None, w2_bias=None, interleaved=False)
        ).float()

    verdict = experts_judged(unbiased, problem)
    assert set(verdict.ignored) == {"biases", "interleaved"}
    assert verdict.message.startswith("biases, interleaved are ignored: ")
    for wrong in (
        lambda inputs: oracle.experts(inputs).float() / 8,
        lambda inputs: torch.zeros_like(oracle.experts(inputs).float()),
    ):
        verdict = experts_judged(wrong, problem)
        assert (verdict.status, verdict.kind, verdict.ignored) == ("FAIL", "numeric", ())
        assert "ignored" not in verdict.message


LONG = AttentionProblem(
    query_lens=(8,), seq_lens=(40,), head_dim_qk=32, head_dim_vo=32, sinks=True, causal=True
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "more",
    [
        {"alibi": True, "dtype": "bfloat16"},
        {"custom_mask": True, "causal": False},
        {"logits_soft_cap": 4.0, "window_left": 5},
        {"k_scale": 2.0, "v_scale": 0.5},
    ],
)
def test_honoured_options_of_kernels_that_are_wrong_are_not_called_ignored(
    more: dict[str, Any], seed: int
) -> None:
    """Another option is lost, or all is rounded, so that honoured ones move the answer too little.

    A mask that is ignored lets more keys in, beside which a sink weighs less, for example.
    """

    def coarse(inputs: PagedAttentionInputs) -> Pair:
        out, lse = attend(inputs)
        return (out * 4).round() / 4, (lse * 4).round() / 4

    lost: dict[str, dict[str, Any]] = {
        "alibi": {"alibi_slopes": None},
        "custom_mask": {"custom_mask": None},
        "logits_soft_cap": {"logits_soft_cap": 0.0},
        "k_scale": {"k_scale": 1.0},
    }
    name = next(iter(more))
    problem = replace(LONG, **more, seed=seed)
    verdict = judged(without(**lost[name]), problem)
    assert set(verdict.ignored) <= {name}
    assert (verdict.kind == "insensitive") == bool(verdict.ignored)
    for kernel in (coarse, without(sinks=torch.tensor([0.5]))):
        verdict = judged(kernel, problem)
        assert verdict.kind in ("", "numeric")
        assert verdict.ignored == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_that_moves_too_little_is_a_numeric_finding_on_the_call_that_is_wrong(
    dtype: str,
) -> None:
    def wide(inputs: PagedAttentionInputs) -> Pair:
        window = inputs.window_left
        out, lse = attend(replace(inputs, window_left=-1 if window < 0 else window + 8))
        return out.to(inputs.out_dtype), lse

    problem = replace(LONG, sinks=False, dtype=dtype)
    verdict = judged(wide, problem)
    assert (verdict.status, verdict.kind, verdict.ignored) == ("FAIL", "numeric", ())
    assert verdict.message.startswith("with window_left = 20: out[")
    assert verdict.about is not None
    assert verdict.about["window_left"] == 20


def test_experts_that_move_too_little_are_not_called_insensitive() -> None:
    def half_a_bias(inputs: MoEInputs) -> torch.Tensor:
        bias = None if inputs.w13_bias is None else inputs.w13_bias / 2
        return oracle.experts(replace(inputs, w13_bias=bias)).float()

    problem = MoEProblem(num_tokens=4, biases=True, hidden=32)
    verdict = experts_judged(half_a_bias, replace(problem, seed=3))
    assert (verdict.status, verdict.kind, verdict.ignored) == ("FAIL", "numeric", ())


@pytest.mark.parametrize("keys", [3, 6, 12])
def test_a_window_that_is_too_wide_is_not_called_ignored(keys: int) -> None:
    """Of few keys it hides none, so that nothing moves: with more keys something does."""

    def wide(inputs: PagedAttentionInputs) -> Pair:
        window = inputs.window_left
        return attend(replace(inputs, window_left=-1 if window < 0 else window + 8))

    verdict = judged(wide, AttentionProblem(seq_lens=(keys,), head_dim_qk=32, head_dim_vo=32))
    assert (verdict.status, verdict.kind, verdict.ignored) == ("FAIL", "numeric", ())
