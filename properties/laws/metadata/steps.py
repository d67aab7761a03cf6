"""The law of an engine's steps: nothing that a step leaves in a buffer is wrong in a later one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ....reference import StepsProblem
from ....reference.tensors.steps import prepared_steps
from ...verdicts.comparison import bitwise, fail
from ...verdicts.contained import Stop
from ...verdicts.subject import Subject
from ...verdicts.verdict import Verdict
from ..law import STEPS, Law


def _named(name: str, result: object) -> torch.Tensor | None:
    value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    return value if isinstance(value, torch.Tensor) else None


def parity(subject: Subject, problem: StepsProblem) -> Verdict:
    """Check every buffer after every step, the earliest step first."""
    inputs = subject.materialise(problem)
    expected = prepared_steps(inputs)
    result = subject.call(problem, inputs)
    found: dict[str, torch.Tensor] = {}
    for name, wanted in expected.items():
        value = subject.read(partial(_named, name), result)
        if value is None:
            message = f"the result has no tensor {name}: it is a {type(result).__name__}"
            raise Stop(fail("shape", message))
        found[name] = value = subject.usable(name, value)
        for what in ("dtype", "shape"):
            has, needs = getattr(value, what), getattr(wanted, what)
            if has != needs:
                raise Stop(fail(what, f"{name} has {what} {has}, not {needs}"))
    for number, step in enumerate(problem.steps):
        events = ", ".join(problem.events[: step.events])
        for name, wanted in expected.items():
            compared = bitwise(f"after {events}: {name}", found[name][number], wanted[number])
            if compared.bad:
                return compared
    return Verdict("PASS", ratio=0.0)


LAWS = (
    Law(
        "steps_parity",
        STEPS,
        parity,
        "each buffer of an engine is the oracle's after every step, whatever came before",
    ),
)
