"""Laws of routing. Scores that a kernel cannot tell apart may be ranked either way."""

from __future__ import annotations

from ...reference import RouteProblem
from ..subject import Subject
from ..verdict import Verdict
from .law import ROUTE, Law
from .routes import judge_route


def parity(subject: Subject, problem: RouteProblem) -> Verdict:
    """Check that no better expert was left out, and the weights of those that were taken."""
    inputs = subject.materialise(problem)
    return judge_route(subject, inputs, subject.attend(problem, inputs))


LAWS = (
    Law(
        "routing_parity",
        ROUTE,
        parity,
        "each token goes to distinct experts, no better one is left out, and the weights are "
        "those that belong to them",
        weight=3.0,
    ),
)
