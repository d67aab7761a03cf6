"""Answers that cannot be compared at all are the implementation's fault, under every law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import find_law, laws_of
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.operations import OPERATIONS as ANSWERS
from kernelproof.properties.verdicts.snapshot import tensors_of
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import (
    AttentionProblem,
    BatchedMoEProblem,
    BatchMetadata,
    BatchProblem,
    ContextParallelProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    PlanProblem,
    Problem,
    QuantizeProblem,
    RouteProblem,
    SlotsProblem,
    StepsProblem,
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
    SlotsProblem(),
    PlanProblem(),
    BatchProblem(),
    StepsProblem(events=("arrive 3", "run 0", "run 0")),
    RouteProblem(4, 16, 2),
    MoEProblem(),
    BatchedMoEProblem(counts=(2, 1), most_rows=3),
    QuantizeProblem(codes="int8"),
)


class Answering(torch.Tensor):
    """A tensor that answers every question by itself, and wrongly."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:  # noqa: ANN401
        message = "no such question"
        raise RuntimeError(message)


class Unread(tuple[Any, ...]):
    """A pair that cannot be counted."""

    __slots__ = ()

    def __len__(self) -> int:
        message = "no length"
        raise RuntimeError(message)


class Unspeakable(BaseException):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    kept = tensor.clone()
    kept.untyped_storage().resize_(0)
    return kept


WRONG: dict[str, tuple[Change, str, str]] = {
    "device": (lambda t: torch.empty_like(t, device="meta"), "device", "is on meta"),
    "sparse": (lambda t: t.to_sparse(), "shape", "a torch.sparse_coo tensor"),
    "nested": (lambda t: torch.nested.as_nested_tensor([t, t]), "shape",
               "a nested tensor"),
    "complex": (lambda t: t.to(torch.complex64), "dtype", "torch.complex64"),
    "float8": (lambda t: t.float().to(torch.float8_e4m3fn), "dtype", "torch.float8_e4m3fn"),
    "bits": (lambda t: torch.empty(t.shape, dtype=torch.bits8), "dtype", "torch.bits8"),
    "subclass": (lambda t: t.as_subclass(Answering), "shape", "is a Answering, no plain"),
    "freed": (without_memory, "shape", "has no memory behind its"),
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
    if problem.operation == "route":  # the oracle refuses NaN, which has no rank
        inputs = replace(inputs, logits=inputs.logits.nan_to_num())
    answer = OPERATIONS[problem.operation].answer(inputs)
    if problem.operation in ("moe", "batched_moe"):
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
    if isinstance(answer, dict):
        return {**answer, "positions": change(answer["positions"])}
    if hasattr(answer, "qo_indptr"):
        fields = {**answer.tensors(), "qo_indptr": change(answer.qo_indptr)}
        return SimpleNamespace(page_size=answer.page_size, **fields)
    return change(answer[0]), answer[1]


def verdicts(problem: Problem, change: Change) -> Iterator[tuple[str, Verdict]]:
    operation: Any = problem.operation

    @implementation(operation, name="wrong")
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


@pytest.mark.parametrize(
    "problem",
    [each for each in PROBLEMS if each.operation != "append_paged_kv"],  # which returns its inputs
    ids=lambda problem: problem.operation,
)
def test_tensors_that_only_look_unusual_are_compared(problem: Problem) -> None:
    def unusual(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.nn.Parameter(tensor, requires_grad=False)
        return torch.nn.Parameter(torch._neg_view(-tensor))

    assert {name for name, verdict in verdicts(problem, unusual) if verdict.bad} == set()


def of_call(function: Callable[[Any], Any], problem: Problem) -> Verdict:
    """Return the verdict of the law of parity on a call."""
    operation: Any = problem.operation
    made = implementation(operation, name="faulty")(function)
    law = find_law(ANSWERS[problem.operation].law)
    subject = Subject(made, Target.here("cpu"), _Anywhere())
    with pytest.raises(Stop) as stopped:
        law.check(subject, problem)
    return stopped.value.verdict


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, Unspeakable])
def test_what_is_no_exception_is_a_crash_of_its_name(error: type[BaseException]) -> None:
    def raises(inputs: Any) -> Any:  # noqa: ANN401
        del inputs
        raise error

    found = of_call(raises, MergeProblem())
    assert (found.status, found.kind) == ("CRASH", error.__name__)
    unread = ": its message cannot be read, which raises KeyboardInterrupt"
    assert found.message == error.__name__ + (unread if error is Unspeakable else "")


def _unreadable(*_: object) -> bool:
    message = "not to be asked"
    raise RuntimeError(message)


Words: Any = type("Words", (str,), {"strip": _unreadable, "splitlines": _unreadable})
OF_A_STRANGE_KIND: dict[str, tuple[BaseException, str]] = {
    "truth": (type("Odd", (Exception,), {"__bool__": _unreadable})("why"), "Odd: why"),
    "message": (type("Odd", (Exception,), {"__str__": lambda _: Words("why")})(), "Odd: why"),
    "name": (type("A\nCONFORMING\x1b[1m", (Exception,), {})(), "A\\nCONFORMING\\x1b[1m"),
    "long": (type("X" * 10_000, (Exception,), {})(), "X" * 100),
}
ODD_SYNTAX = SyntaxError("odd", (None, -5, 10**9, "\x00", "x", object()))  # type: ignore[arg-type]
OF_A_STRANGE_KIND["fields"] = (ODD_SYNTAX, "SyntaxError: odd")


@pytest.mark.parametrize("what", OF_A_STRANGE_KIND)
def test_an_exception_of_a_strange_kind_is_a_crash_that_can_be_printed(what: str) -> None:
    error, said = OF_A_STRANGE_KIND[what]

    def raises(inputs: Any) -> Any:  # noqa: ANN401
        del inputs
        raise error

    found = of_call(raises, MergeProblem())
    assert found.status == "CRASH"
    assert found.kind.isprintable()
    assert found.message.startswith(said)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.operation)
def test_a_result_whose_own_methods_raise_is_a_crash_that_says_so(problem: Problem) -> None:
    class Lazy:
        def __getattr__(self, name: str) -> int:
            raise KeyboardInterrupt(name)

    found = of_call(lambda _: Unread((0, 0)), problem)
    pair = problem.operation not in (
        "build_metadata",
        "slice_context_parallel",
        "map_slots",
        "prepare_batch",
        "prepare_steps",
        "plan",
        "moe",
        "batched_moe",
    )
    if pair:
        assert (found.status, found.kind) == ("CRASH", "RuntimeError")
        assert found.message == "its result raised RuntimeError: no length"
    assert found.bad
    found = of_call(lambda _: Lazy(), problem)
    assert found.status in ("CRASH", "FAIL"), found


def emptied(inputs: Any) -> None:  # noqa: ANN401
    for field in fields(inputs):
        object.__delattr__(inputs, field.name)


SPOILT: dict[str, Callable[[Any], Any]] = {
    "shape": lambda inputs: next(iter(tensors_of(inputs).values())).resize_(0),
    "record": emptied,
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.operation)
def test_inputs_that_are_no_more_what_they_were_are_a_finding_under_any_law(
    problem: Problem, how: str
) -> None:
    def spoils(inputs: Any) -> Any:  # noqa: ANN401
        answer = right(problem, inputs)
        SPOILT[how](inputs)
        return answer

    found = of_call(spoils, problem)
    assert (found.status, found.kind) == ("FAIL", "mutated_input")
    assert "another shape or other memory" in found.message


def raising(*_: object) -> None:
    raise Unspeakable


class Planned:
    """A session that keeps a copy of its batch."""

    def plan(self, inputs: Any) -> None:  # noqa: ANN401
        copies = {name: each.clone() for name, each in inputs.metadata.tensors().items()}
        self._metadata = BatchMetadata(**copies, page_size=inputs.metadata.page_size)

    def run(self, inputs: Any) -> Any:  # noqa: ANN401
        return right(ATTENTION, replace(inputs, metadata=self._metadata))


SESSIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raising, "making a session raised Unspeakable"),
    "empty": (object, "making a session raised TypeError: object has no method plan"),
    "property": (type("Odd", (Planned,), {"run": property(raising)}), "making a session raised"),
    "scratch": (type("Odd", (Planned,), {"scratch": raising}), "its scratch raised Unspeakable"),
}
ATTENTION = PROBLEMS[0]


@pytest.mark.parametrize("which", SESSIONS)
def test_sessions_that_raise_are_crashes_of_the_law_of_sessions(which: str) -> None:
    session, said = SESSIONS[which]

    @implementation("paged_attention", name="odd", session=session)
    def odd(inputs: Any) -> Any:  # noqa: ANN401
        return right(ATTENTION, inputs)

    subject = Subject(odd, Target.here("cpu"), _Anywhere())
    with pytest.raises(Stop) as stopped:
        raise Stop(find_law("life_cycle").check(subject, ATTENTION))
    found = stopped.value.verdict
    assert found.status == "CRASH"
    assert said in found.message
