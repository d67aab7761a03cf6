"""What the worker says of errors of the GPU that come up late."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import implementation
from kernelproof.properties.isolation.workers import LAST_REPLY
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker import integrity, tasks
from kernelproof.reference import MergeProblem

FAULT = "CUDA error: an illegal memory access was encountered\nSearch for it"


class Stages:
    """Nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Be in a stage."""
        return nullcontext()


def asked(
    monkeypatch: pytest.MonkeyPatch,
    answer: Verdict | Exception,
    *,
    gpu_works: bool,
    fault: str = FAULT,
) -> dict[str, Any]:
    """Judge on a GPU that works or not, by a law that gives this answer."""

    class Law:
        @staticmethod
        def check(_subject: object, _problem: object) -> Verdict:
            if isinstance(answer, Exception):
                raise answer
            return answer

    def ones(*_: object, **__: object) -> Any:  # noqa: ANN401
        if gpu_works:
            return torch.zeros(1)
        raise RuntimeError(fault)

    class Subject:
        seconds, calls, interpreted = 0.0, 1, False

        def refusal(self, _problem: object) -> None:
            """Claim every problem."""

        def as_launched(self, verdict: Verdict) -> Verdict:
            """Know nothing of kernels."""
            return verdict

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(tasks, "_UNTOUCHED", integrity.snapshot())
    monkeypatch.setattr(tasks, "subject_of", lambda *_: Subject())
    monkeypatch.setattr(tasks, "_names_of", lambda *_: None)
    monkeypatch.setattr(tasks, "find_law", lambda _: Law)
    monkeypatch.setattr(tasks, "problem_from_json", lambda _: None)
    return tasks.handle({"task": "judge", "device": "cuda", "law": "", "problem": {}}, Stages())


def test_a_verdict_on_a_gpu_that_works_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for status in ("PASS", "CRASH"):
        result = asked(monkeypatch, Verdict(status), gpu_works=True)
        assert result["status"] == status
        assert LAST_REPLY not in result


@pytest.mark.parametrize("answer", [Verdict("PASS"), RuntimeError(FAULT)], ids=["pass", "raise"])
def test_an_error_after_the_call_is_the_call_s(
    monkeypatch: pytest.MonkeyPatch, answer: Verdict | Exception
) -> None:
    result = asked(monkeypatch, answer, gpu_works=False)
    assert (result["status"], result["kind"]) == ("CRASH", "RuntimeError")
    assert result["message"] == (
        "the GPU failed after the call had ended: "
        "CUDA error: an illegal memory access was encountered"
    )
    assert result[LAST_REPLY], "nothing else can be judged by this process"


def test_a_gpu_that_others_have_filled_works(monkeypatch: pytest.MonkeyPatch) -> None:
    full = "CUDA error: out of memory"
    result = asked(monkeypatch, Verdict("PASS"), gpu_works=False, fault=full)
    assert result["status"] == "PASS"
    assert LAST_REPLY not in result


def test_what_a_law_itself_does_wrong_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="of ours"):
        asked(monkeypatch, RuntimeError("a fault of ours"), gpu_works=True)


def built(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, gpu_works: bool
) -> tuple[dict[str, Any], list[int]]:
    """Build a module of three kernels on a GPU that works or not after the second one's error."""
    made: list[int] = []

    def ones(*_: object, **__: object) -> Any:  # noqa: ANN401
        if gpu_works:
            return torch.zeros(1)
        raise RuntimeError(FAULT)

    class Subject:
        class implementation:  # noqa: N801  as the subject has it
            @staticmethod
            def problems_of_module(_problem: object) -> list[int]:
                return [1, 2, 3]

        @staticmethod
        def try_call(problem: int) -> None:
            made.append(problem)
            if problem == 2 or (problem == 3 and not gpu_works):
                raise error

        @staticmethod
        def device_works() -> bool:
            return gpu_works

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(tasks, "subject_of", lambda *_: Subject())
    monkeypatch.setattr(tasks, "problem_from_json", lambda _: None)
    return tasks.handle({"task": "build", "device": "cuda", "problem": {}}, Stages()), made


@pytest.mark.parametrize("error", [RuntimeError(FAULT), MemoryError("no room")], ids=str)
def test_a_kernel_that_fails_leaves_the_others_of_its_module_to_be_built(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    result, made = built(monkeypatch, error, gpu_works=True)
    assert made == [1, 2, 3]
    assert result["kernels"] == 3
    assert result["stopped"]["status"] == "CRASH"
    assert LAST_REPLY not in result


def test_what_writes_into_buffers_is_timed_and_built_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @implementation("merge_state", name="writes", writes_out=True)
    def writes(inputs: Any) -> Any:  # noqa: ANN401
        inputs.out.zero_()
        inputs.lse.zero_()

    monkeypatch.setattr(tasks, "_implementation", lambda *_: writes)
    request = {"device": "cpu", "implementation": "writes", "problem": MergeProblem().to_json()}
    assert tasks.cost(request, Stages())["seconds"] > 0
    assert tasks.build(request, Stages()) == {"kernels": 1}


def test_waiting_to_make_tensors_is_not_taken_off_the_seconds_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @implementation("merge_state", name="sleeps")
    def sleeps(inputs: Any) -> Any:  # noqa: ANN401
        time.sleep(0.01)
        return inputs.outs[0], inputs.lses[0]

    materialise, seconds = Subject.materialise, 0.0

    def slowly(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        nonlocal seconds
        seconds += 1.0  # as on a busy machine
        return materialise(*arguments, **options)

    monkeypatch.setattr(tasks, "_implementation", lambda *_: sleeps)
    monkeypatch.setattr(tasks, "waited", lambda: seconds)
    monkeypatch.setattr(Subject, "materialise", slowly)
    request = {"device": "cpu", "implementation": "sleeps", "problem": MergeProblem().to_json()}
    assert tasks.cost(request, Stages())["undisturbed"] >= 0.01


def test_the_next_module_is_built_in_another_process_where_the_gpu_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = built(monkeypatch, RuntimeError(FAULT), gpu_works=False)
    assert result[LAST_REPLY]


@pytest.mark.parametrize(
    ("error", "replaced", "said"),
    [
        (TypeError("no"), "to", "the process does not work since torch.Tensor.to changed: "),
        (KeyboardInterrupt("no"), "", "raised outside of its call: "),
        (TypeError("no"), "", ""),
    ],
)
def test_an_error_of_the_suite_is_the_implementation_s_where_that_has_caused_it(
    error: BaseException, replaced: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What tests before this one have changed is nobody's here.
    monkeypatch.setattr(tasks, "_UNTOUCHED", integrity.snapshot())
    if replaced:
        monkeypatch.setattr(torch.Tensor, replaced, None)
    with pytest.raises(Stop if said else type(error)) as raised, tasks.attributed():
        raise error
    if isinstance(raised.value, Stop):
        assert raised.value.verdict.status == "CRASH"
        assert raised.value.verdict.message == f"{said}{type(error).__name__}: no"


def test_code_of_another_is_not_run_where_torch_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_UNTOUCHED", {})
    monkeypatch.setattr(tasks, "_latest", "")
    asked = [
        {"task": "describe", "device": "cpu", "operation": None, "implementation": name}
        for name in ("kernelproof.impl.torch.sdpa:paged", "kernelproof.impl.torch.sdpa:ragged")
    ]
    for each in asked:  # what imports change is no fault
        assert "error" not in tasks.handle(each, Stages())
    monkeypatch.setattr(torch.Tensor, "all", lambda *_: True)
    assert "error" not in tasks.handle(asked[1], Stages()), "it may have its reasons"
    with pytest.raises(tasks.SpoiledError, match=r"ragged has changed torch\.Tensor\.all"):
        tasks.handle(asked[0], Stages())


def test_odd_names_and_libraries_that_raise_are_no_failure_of_the_suite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(problem: object) -> tuple[str, bool]:
        raise KeyboardInterrupt(problem)

    made = implementation("merge_state", name="odd", library=raises)(lambda _: None)
    odd = replace(made, name="odd \ud800")
    monkeypatch.setattr(tasks, "_implementation", lambda *_: odd)
    asked = {"device": "cpu", "implementation": "odd:odd"}
    said = tasks.handle({**asked, "task": "describe"}, Stages())
    assert said["name"] == r"odd \ud800"
    problems = [MergeProblem().to_json()]
    named = tasks.handle({**asked, "task": "libraries", "problems": problems}, Stages())
    assert [exists for _, exists in named["libraries"]] == [False]
