"""Which calls a law has made: the problems that were really judged, whatever was drawn.

A law may add a window to the problem that it is given, take one request of it, or order its pages
otherwise. Each call passes here, so that no law has to say so itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch

from ...reference import Problem, problem_from_json
from .verdict import Verdict

MOST_KEPT = 64
"""Most different calls kept of one law; the first ones and the last one are what is shown."""
MOST_SHOWN = 4
"""Most calls that a message describes."""


class Asked(NamedTuple):
    """A call.

    Attributes:
        number: the number of the call, from 1.
        problem: the problem that was asked.
        given: what its inputs were, by field: numbers as they are, tensors by dtype and shape.
    """

    number: int
    problem: Problem
    given: Mapping[str, str]


class Calls:
    """The calls of the law that judges now, in this process.

    Attributes:
        count: how many there were.
        kept: those that differ from the one before.
    """

    def __init__(self) -> None:
        self.count, self.kept = 0, list[Asked]()

    def begin(self) -> None:
        """Forget the calls of the law before."""
        self.count = 0
        self.kept.clear()

    def note(self, problem: Problem, inputs: object) -> None:
        """Record a call that is about to be made."""
        self.count += 1
        asked = Asked(self.count, problem, _given(inputs))
        if len(self.kept) >= MOST_KEPT:
            self.kept.pop()
        if not self.kept or self.kept[-1][1:] != asked[1:]:
            self.kept.append(asked)


CALLS = Calls()
"""The calls of this process, which judges one problem at a time."""


def with_calls(verdict: Verdict, given: Problem) -> Verdict:
    """Return a finding that shows the calls that it compares, where they differ from the problem.

    Args:
        verdict: the verdict of a law.
        given: the problem that the law was given.
    """
    if not verdict.bad:
        return verdict
    calls = _compared(verdict)
    if not calls or all(each.problem == given and each.given == calls[0].given for each in calls):
        return verdict
    shown = [
        {
            "call": each.number,
            "problem": each.problem.to_json(),
            "changes": changes(each, given, calls[0]),
            "fields": _fields(each.problem, given) or _inputs(each, given, calls[0]),
        }
        for each in (calls if len(calls) <= MOST_SHOWN else [*calls[: MOST_SHOWN - 1], calls[-1]])
    ]
    said = "; ".join(f"call {each['call']}: {each['changes']}" for each in shown)
    what = _titles.get(len(calls), f"{len(calls)} calls, the last one compared with the others")
    return replace(verdict, message=f"{verdict.message}\n{what}: {said}", compared=shown)


_titles = {1: "judged", 2: "compared"}


def _compared(verdict: Verdict) -> list[Asked]:
    """Return the calls until a verdict was reached, those of its own problems where it has any."""
    until = [each for each in CALLS.kept if not verdict.at_call or each.number <= verdict.at_call]
    if len(verdict.compared) > 1:
        wanted = [problem_from_json(each["problem"]) for each in verdict.compared]
        found = (next((call for call in until if call.problem == each), None) for each in wanted)
        return [call for call in found if call is not None]
    if verdict.about:
        about = problem_from_json(verdict.about)
        own = next((i for i, each in enumerate(until) if each.problem == about), 0)
        # What comes before it was compared, and found to be right.
        return until[own:] if own < len(until) - 1 else [*until[:1], *until[own:]][-2:]
    return until


def changes(call: Asked, given: Problem, first: Asked) -> str:
    """Return in words how a call differs from the problem that the law was given."""
    problem = call.problem
    if type(problem) is not type(given):
        return repr(problem)
    differ = _fields(problem, given)
    if differ:
        said = ", ".join(f"{name}={getattr(problem, name)!r}" for name in differ)
        return f"the problem with {said}"
    other = ", ".join(f"{name} {call.given[name]}" for name in _inputs(call, given, first))
    return f"the problem, given {other}" if other else "the problem"


def _fields(problem: Problem, given: Problem) -> list[str]:
    """Return the fields in which two problems differ; none of problems of two kinds."""
    if type(problem) is not type(given):
        return []
    names = [each.name for each in fields(problem)]
    return [name for name in names if getattr(problem, name) != getattr(given, name)]


def _inputs(call: Asked, given: Problem, first: Asked) -> list[str]:
    """Return the inputs that a call has otherwise than the first one, outputs left out."""
    known = ("out", "lse", *_fields(call.problem, given))
    return [
        name
        for name, value in call.given.items()
        if name not in known and first.given.get(name) != value
    ]


def _given(inputs: object) -> dict[str, str]:
    """Describe a call's inputs without reading any tensor: a GPU may be busy with them."""
    if not is_dataclass(inputs):
        return {}
    found = {}
    for each in fields(inputs):
        value = getattr(inputs, each.name, None)
        if isinstance(value, torch.Tensor):
            found[each.name] = f"{str(value.dtype)[6:]}{list(value.shape)}"
            if not value.is_contiguous():
                found[each.name] += f" with strides {value.stride()}"
        elif value is None or isinstance(value, bool | int | float | str):
            found[each.name] = repr(value)
    return found


def compared(*problems: Problem) -> Sequence[Mapping[str, Any]]:
    """Return what a verdict says that was made with these problems, the calls of a law."""
    return tuple({"problem": each.to_json()} for each in problems)
