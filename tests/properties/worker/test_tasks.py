"""What the worker says of errors of the GPU that come up late."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kernelproof.properties.isolation.workers import LAST_REPLY
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker import tasks

FAULT = "CUDA error: an illegal memory access was encountered\nSearch for it"


class Stages:
    """Nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Be in a stage."""
        return nullcontext()


def asked(
    monkeypatch: pytest.MonkeyPatch, answer: Verdict | Exception, *, gpu_works: bool
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
        raise RuntimeError(FAULT)

    class Subject:
        seconds, calls = 0.0, 1

        def refusal(self, _problem: object) -> None:
            """Claim every problem."""

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(tasks, "subject_of", lambda *_: Subject())
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
        def materialise(problem: int) -> int:
            made.append(problem)
            if problem == 2 or (problem == 3 and not gpu_works):
                raise error
            return problem

        @staticmethod
        def call(_problem: int, _inputs: int) -> None:
            """End at once."""

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


def test_the_next_module_is_built_in_another_process_where_the_gpu_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = built(monkeypatch, RuntimeError(FAULT), gpu_works=False)
    assert result[LAST_REPLY]
