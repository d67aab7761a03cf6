"""Answers that cannot be compared at all are the implementation's fault, under every law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import laws_of
from kernelproof.properties.verdicts.operations import OPERATIONS as ANSWERS
from kernelproof.properties.verdicts.subject import Stop, Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import (
    AttentionProblem,
    ContextParallelProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    Problem,
    RouteProblem,
)
from kernelproof.reference.operations import OPERATIONS

Change = Callable[[torch.Tensor], Any]
PROBLEMS: tuple[Problem, ...] = (
    AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=2),
    AttentionProblem("ragged_attention", query_lens=(2, 1), seq_lens=(5, 3)),
    MergeProblem(num_tokens=3, num_heads=2, head_dim=4),
    AttentionProblem("append_paged_kv", (2, 3), (5, 3), page_size=4),
    MetadataProblem(),
    ContextParallelProblem(),
    RouteProblem(4, 16, 2),
    MoEProblem(),
)
WRONG: dict[str, tuple[Change, str, str]] = {
    "device": (lambda t: torch.empty_like(t, device="meta"), "device", "is on meta"),
    "sparse": (lambda t: t.to_sparse(), "shape", "a torch.sparse_coo tensor"),
    "nested": (lambda t: torch.nested.as_nested_tensor([t, t]), "shape",
               "a nested tensor"),
    "complex": (lambda t: t.to(torch.complex64), "dtype", "torch.complex64"),
    "float8": (lambda t: t.float().to(torch.float8_e4m3fn), "dtype", "torch.float8_e4m3fn"),
    "flat": (lambda t: t.flatten()[:, None], "shape", ""),
    "scalar": (lambda t: t.float().sum(), "", ""),
    "none": (lambda _: None, "shape", ""),
    "numpy": (lambda t: t.float().numpy(), "shape", ""),
}  # fmt: skip


class _Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def right(problem: Problem, inputs: Any) -> Any:  # noqa: ANN401  any operation's
    answer = OPERATIONS[problem.operation].answer(inputs)
    if problem.operation == "moe":
        return answer.to(inputs.out_dtype)
    if problem.operation == "route":
        return answer.topk_ids.int(), answer.topk_weights.float()
    if ANSWERS[problem.operation].has_outputs:
        return answer.out.to(inputs.out_dtype), answer.lse.float()
    return answer


def with_one_wrong(answer: Any, change: Change) -> Any:  # noqa: ANN401
    """Change the first tensor of an answer."""
    if isinstance(answer, torch.Tensor):
        return change(answer)
    if hasattr(answer, "qo_indptr"):
        fields = {**answer.tensors(), "qo_indptr": change(answer.qo_indptr)}
        return SimpleNamespace(page_size=answer.page_size, **fields)
    return change(answer[0]), answer[1]


def verdicts(problem: Problem, change: Change) -> Iterator[tuple[str, Verdict]]:
    @implementation(problem.operation, name="wrong")
    def wrong(inputs: Any) -> Any:  # noqa: ANN401
        return with_one_wrong(right(problem, inputs), change)

    for law in laws_of(problem.operation):
        if law.needs:
            continue
        subject = Subject(wrong, Target.here("cpu"), _Anywhere())
        try:
            yield law.name, law.check(subject, problem)
        except Stop as stop:
            yield law.name, stop.verdict


@pytest.mark.filterwarnings("ignore")  # of sparse and nested tensors: torch calls them prototypes
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.operation)
def test_no_law_fails_on_it_and_the_law_of_parity_names_what_came(
    problem: Problem, what: str
) -> None:
    change, kind, said = WRONG[what]
    of = dict(verdicts(problem, change))
    parity = of[ANSWERS[problem.operation].law]
    assert parity.status == "FAIL"
    assert kind in ("", parity.kind), parity
    assert said in parity.message


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_is_a_crash_of_its_name(error: type[BaseException]) -> None:
    @implementation("merge_state", name="raises")
    def raises(inputs: Any) -> Any:  # noqa: ANN401
        del inputs
        raise error

    problem = MergeProblem()
    subject = Subject(raises, Target.here("cpu"), _Anywhere())
    with pytest.raises(Stop) as stopped:
        subject.run_operation(problem, subject.materialise(problem))
    found = stopped.value.verdict
    assert (found.status, found.kind, found.message) == ("CRASH", error.__name__, error.__name__)
