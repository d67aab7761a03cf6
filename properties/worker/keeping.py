"""Keeping the tensors of the call that a law finds wrong, for people who debug it.

A call's inputs, and the oracle's answer to them, are on disk before the kernel runs: they stay
where it hangs or kills its process.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...reference import Problem
from ...reference.attention.append_bounds import as_compared
from ...reference.operations import OPERATIONS as ORACLES
from ...reference.operations import operation_of
from ...reference.oracle import append, bounded_append
from ...reference.tensors.inputs import AppendInputs
from ..laws.metadata.builders import FIELDS, WRITTEN
from ..verdicts.appended import copied, judge_codes, judges_codes
from ..verdicts.comparison import Check, all_within, bitwise, unusable
from ..verdicts.operations import APPENDED, AS_READ, OPERATIONS, appended_caches
from ..verdicts.subject import Subject
from ..verdicts.text import compact

Named = dict[str, torch.Tensor]
CALL, ANSWER = "call.pt", "answer.pt"
"""Files of a folder: what is known before a call, and what came of it."""
VECTOR = "vector"
"""The name of an answer that is no buffer of the inputs."""
SURROUNDINGS = ("storages",)
"""Fields of a record that are no parameters of a kernel."""


@dataclass(frozen=True)
class Kept:
    """A call of a law.

    Attributes:
        number: which of the law's calls it was, from 1.
        operation: the operation that was called.
        session: whether a session ran it, which had planned before.
        writes_out: whether the answer is written into ``inputs.out`` and ``inputs.lse``.
        record: the inputs as a tree: tensors by name, numbers and texts, records by field.
        inputs: the tensors that ``record`` names.
        expected: the oracle's answer by tensor.
        bound: how far each element may be from it; a tensor without a bound is compared exactly.
        problem: the problem that was asked, which a law may have made of another one.
        result: what the kernel answered; None where it did not return.
        wrong: whether ``result`` is outside of the bound.
    """

    number: int
    operation: str
    session: bool
    writes_out: bool
    record: dict[str, Any]
    inputs: Named
    expected: Named
    bound: Named
    problem: str = ""
    result: Named | None = None
    wrong: bool = False


def read_kept(folder: Path) -> Kept | None:
    """Return the call that a worker has kept in a folder; None where the kernel was not called."""
    if not (folder / CALL).is_file():
        return None
    call = torch.load(folder / CALL, map_location="cpu", weights_only=True)
    call["record"] = json.loads(call["record"])
    if (folder / ANSWER).is_file():
        call |= torch.load(folder / ANSWER, map_location="cpu", weights_only=True)
    return Kept(**call)


class Keeper(Subject):
    """A subject whose first wrong call is kept in ``folder``, or else its last call."""

    folder: Path
    number = 0
    wrong = False

    def call(
        self,
        problem: Problem,
        inputs: Any,  # noqa: ANN401  any record
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Any:  # noqa: ANN401  any result
        """Run the implementation, and keep what it was given and what it gave."""
        self.number += 1
        # A plan has no answer; one that is not waited for must not be.
        if self.wrong or not wait or getattr(function, "__name__", "run") != "run":
            return super().call(problem, inputs, function, wait=wait)
        with self._stages.stage("judge"):
            expected, bound = self._expected(problem, inputs)
            # A call may write what it is judged by.
            before = copied(inputs) if judges_codes(inputs) else inputs
            named: Named = {}
            record = _tree(inputs, "", named)
            (self.folder / ANSWER).unlink(missing_ok=True)
            call = {
                "number": self.number,
                "operation": problem.operation,
                "session": function is not None,
                "problem": compact(problem),
                "writes_out": self.implementation.writes_out,
                "record": json.dumps(record),
                "inputs": named,
                "expected": expected,
                "bound": bound,
            }
            _save(call, self.folder / CALL)
        result = super().call(problem, inputs, function, wait=wait)
        with self._stages.stage("judge"):
            answer = self._answer(problem.operation, inputs, result)
            self.wrong = self._is_wrong(before, answer, expected, bound)
            _save({"result": answer, "wrong": self.wrong}, self.folder / ANSWER)
        return result

    def _expected(self, problem: Problem, inputs: Any) -> tuple[Named, Named]:  # noqa: ANN401
        """Return the oracle's answer and its bounds; nothing where the oracle refuses the call."""
        oracle, answers = ORACLES[operation_of(inputs)], OPERATIONS[problem.operation]
        if not answers.compared:
            return {}, {}
        try:
            if answers.judge_apart is not None:
                return _tensors(oracle.answer(inputs)._asdict()), {}
            if oracle.bounded is None:
                if not isinstance(inputs, AppendInputs):
                    found = oracle.answer(inputs)
                    return _buffer(problem.operation, found) or found.tensors(), {}
                coded = judges_codes(inputs)
                answer, bounds = (append(inputs), None) if coded else bounded_append(inputs)
                return _by_name(answer), _by_name(bounds or ())
            bounded = oracle.bounded(inputs, self.arithmetic_of(inputs))
        except (ValueError, RuntimeError):
            return {}, {}
        names = answers.outputs(inputs)
        expected = {name: getattr(bounded.expected, name) for name in names}
        bound = {name: getattr(bounded.bound, name) for name in names}
        if self.exact(problem):
            expected["out"] = expected["out"].to(inputs.out_dtype)
            bound["out"] = torch.zeros_like(bound["out"])
        return expected, bound

    def _answer(self, operation: str, inputs: Any, result: object) -> Named:  # noqa: ANN401
        """Return the tensors of an answer that can be compared."""
        answers = OPERATIONS[operation]
        if self.implementation.writes_out:
            lse = self.written_lse(result, getattr(inputs, "lse", None))
            found: Mapping[str, object] = {"out": inputs.out, "lse": lse}
        elif answers.has_pair:
            pair = self.read(answers.pair, result)
            found = {} if isinstance(pair, str) else dict(zip(answers.names, pair, strict=True))
        elif operation == "append_paged_kv":
            scaled = inputs.kv_cache_sf is not None
            caches = self.read(partial(appended_caches, scaled=scaled), result)
            found = {} if isinstance(caches, str) else self._appended(inputs, caches)
        else:
            fields = self.read(lambda value: {n: getattr(value, n, None) for n in FIELDS}, result)
            found = _buffer(operation, result) or fields
        kept = {
            name: each.detach().clone()
            for name, each in found.items()
            if isinstance(each, torch.Tensor) and unusable(name, each, self.target.device) is None
        }
        if answers.unused and "out" in kept:
            mask = answers.unused(inputs)
            if kept["out"].shape[:2] == mask.shape[:2]:
                kept["out"].masked_fill_(mask, 0)
        return kept

    def _appended(self, inputs: AppendInputs, caches: tuple[torch.Tensor, ...]) -> Named:
        """Return appended caches by name, with what is read from them where that is bounded."""
        device = self.target.device
        if all(unusable(*each, device) is None for each in zip(APPENDED, caches, strict=False)):
            caches = as_compared(caches, inputs.kv_format)
        return _by_name(caches)

    def _is_wrong(self, inputs: Any, answer: Named, expected: Named, bound: Named) -> bool:  # noqa: ANN401
        answers = OPERATIONS[operation_of(inputs)]
        if answers.judge_apart is not None:
            first, second = (answer.get(name) for name in answers.names)
            return (
                first is None
                or answers.judge_apart(self.implementation, inputs, (first, second)).bad
            )
        if judges_codes(inputs):
            return self._has_wrong_codes(inputs, answer)
        return self._is_off(answer, expected, bound)

    def _has_wrong_codes(self, inputs: AppendInputs, answer: Named) -> bool:
        caches = tuple(answer[name] for name in APPENDED if name in answer)
        found, given = ([(each.shape, each.dtype) for each in which]
                        for which in (caches, inputs.written))  # fmt: skip
        arithmetic = self.implementation.arithmetic_of(0)
        return found != given or judge_codes(inputs, caches, arithmetic).bad

    def _is_off(self, answer: Named, expected: Named, bound: Named) -> bool:
        for name, wanted in expected.items():
            got = answer.get(name)
            if got is None:
                if name != "lse":  # which may be left out
                    return True
                continue
            if name == "paged_kv_indices" and "no_host_sync" in self.implementation.features:
                got = answer[name] = got[: len(wanted)]
            if name in bound:
                if all_within([Check(name, got, wanted, bound[name])]).bad:
                    return True
            elif bitwise(name, got.double(), wanted.double()).bad or got.dtype != wanted.dtype:
                return True
        return False


def _tensors(fields: Mapping[str, torch.Tensor | None]) -> Named:
    return {name: each for name, each in fields.items() if each is not None}


def _buffer(operation: str, answer: object) -> Named:
    """Return an answer that is one tensor, or a mapping, by name; nothing of any other."""
    if isinstance(answer, Mapping):
        return dict(answer)
    return {WRITTEN.get(operation, VECTOR): answer} if isinstance(answer, torch.Tensor) else {}


def _by_name(caches: tuple[torch.Tensor, ...]) -> Named:
    return dict(zip((*APPENDED, *AS_READ), caches, strict=False))


def _save(data: Mapping[str, Any], path: Path) -> None:
    """Write a file whole: the kernel may end the process at any time."""
    draft = path.with_suffix(".draft")
    torch.save(data, draft)
    draft.replace(path)


def _tree(value: object, name: str, named: Named) -> Any:  # noqa: ANN401  JSON
    """Return a value as JSON, its tensors by names under which ``named`` has them.

    What has no such form, a function for example, is None.
    """
    if isinstance(value, torch.Tensor):
        for known, tensor in named.items():
            if tensor is value:
                return {"tensor": known}
        named[name] = value
        return {"tensor": name}
    if dataclasses.is_dataclass(value) or hasattr(value, "_asdict"):
        parts = {
            part: _tree(getattr(value, part), f"{name}.{part}".lstrip("."), named)
            for part in _parts(value)
        }
        return {"record": parts, **_keywords(value, parts)}
    if isinstance(value, tuple | list):
        return {"tuple": [_tree(v, f"{name}.{n}", named) for n, v in enumerate(value)]}
    return _plain(value)


def _plain(value: object) -> Any:  # noqa: ANN401  JSON
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value if isinstance(value, bool | int | float | str) else None


def _parts(value: Any) -> list[str]:  # noqa: ANN401  a record
    """Name a record's fields, and the properties that a kernel may read too."""
    fields = getattr(value, "_fields", None) or [each.name for each in dataclasses.fields(value)]
    properties = [
        name for name in dir(type(value)) if isinstance(getattr(type(value), name), property)
    ]
    return [name for name in (*fields, *properties) if name not in SURROUNDINGS]


def _keywords(value: Any, parts: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401  a record
    """Return the names of the options that a record's ``keywords()`` returns, if it has that."""
    if not hasattr(value, "keywords"):
        return {}
    return {"keywords": [name for name in value.keywords() if name in parts]}
