"""What an isolated worker learns of an implementation by asking it thousands of questions.

They are asked here and not by the parent, in whose one process Python runs one thread at a time:
of some 80 implementations on a GPU, its questions kept all workers waiting for most of a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...impl.targets.refusal import Refusal, most_telling
from ...reference import Problem, problem_from_json
from ..space.axes import narrow
from ..space.axis_values import Axes, tuples
from ..space.module_selection import find_modules
from ..verdicts.contained import Stop, contained
from ..verdicts.specialising import Stages
from ..verdicts.subject import Subject


def refusal_unless_raised(
    subject: Subject, problem: Problem, without_rules: Sequence[str], stages: Stages
) -> Refusal | None:
    """Return a refusal; where ``supports`` raises there is none, and a law finds that it does."""
    refusal = subject.implementation.refusal
    try:
        # Not the subject's, which describes what was raised: of thousands, that takes seconds.
        with stages.stage("supports"):
            return refusal(problem, subject.target, without_rules=without_rules)
    except BaseException:  # noqa: BLE001
        return None


def surveyed(subject: Subject, payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Learn which values of the payload's ``axes`` are supported.

    Returns:
        ``axes``, those that are supported, or None; ``refusal``, the most telling one, or None; and
        ``questions``, how many problems were asked about.
    """
    rules = payload.get("without_rules", ())
    telling: Refusal | None = None
    questions = 0

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        nonlocal telling, questions
        questions += len(problems)
        refusals = [refusal_unless_raised(subject, each, rules, stages) for each in problems]
        telling = most_telling([telling, *refusals])
        return refusals

    operation = subject.implementation.operation
    axes = narrow(operation, probe, payload["max_work"], axes=tuples(payload["axes"]))
    return {
        "axes": axes and axes.to_json(),
        "refusal": telling and telling.to_json(),
        "questions": questions,
    }


def keys_of(subject: Subject, problems: Sequence[Problem]) -> list[str | None]:
    """Return the key of the module of each problem; None for those that are refused.

    Raises:
        Stop: ``supports``, ``compile_key`` or ``kernels`` raised.
    """
    return [
        subject.module_of(each) or None if subject.supports(each) else None for each in problems
    ]


def libraries_of(subject: Subject, problems: Sequence[Problem]) -> list[tuple[str, bool]]:
    """Return what is compiled for the module of each problem, and whether it exists."""
    implementation = subject.implementation
    try:
        with contained("library raised "):
            named = [implementation.library_of(each) for each in problems]
            return [(str(name), bool(exists)) for name, exists in named]
    except Stop:  # it says what builds may share: without it, none does
        alone = replace(implementation, library=None)
        return [alone.library_of(each) for each in problems]


def selectable(subject: Subject, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modules that a run may choose from, see ``find_modules``; else the ``error``."""
    try:
        found = find_modules(
            Axes.from_json(payload["axes"]),
            partial(keys_of, subject),
            stored=[problem_from_json(each) for each in payload["stored"]],
            companions=payload["companions"],
            libraries=partial(libraries_of, subject),
        )
    except Stop as stop:
        return {"error": stop.verdict.message}
    return found.to_json()
