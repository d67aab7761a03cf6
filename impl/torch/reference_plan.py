"""The oracle's plan as an implementation: on which the laws of planning can be tried anywhere."""

from __future__ import annotations

import torch

from ...reference.tensors import planner
from ...reference.tensors.plan import PlanInputs
from ..protocol import implementation


@implementation("plan", name="reference-plan")
def plan(inputs: PlanInputs) -> torch.Tensor:
    """Plan as the oracle does."""
    return planner.plan(inputs)
