"""Hang and crash controls of experts and routers: loads that never come, checks that abort."""

from __future__ import annotations

import ctypes
import os
import time

import torch

from ....impl.torch.moe import scores_of
from ....reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ..catalogue import SeededBug, seeded
from .kernels import TILE, apply, count_of, local_ids
from .routing_bugs import Routed, routed

BUGS: list[SeededBug] = []
MOE, ROUTE = "moe", "route"
EXIT_STATUS = 9


def rows_of_experts(inputs: MoEInputs) -> torch.Tensor:
    """Count the rows [experts] that each of this rank's experts gets."""
    ids = local_ids(inputs)
    return ids[ids >= 0].bincount(minlength=count_of(inputs))


@seeded(BUGS, MOE, "parity", control="hang", model="flashinfer#3279")
def waits_for_idle_expert(inputs: MoEInputs) -> torch.Tensor:
    """Wait for ever for the tile of an expert without a token, between two that have some."""
    busy = rows_of_experts(inputs).nonzero().flatten()
    while bool((busy.diff() > 1).any()):
        time.sleep(1)
    return apply(inputs)


@seeded(BUGS, MOE, "parity", control="hang", model="flashinfer#3971")
def spins_on_second_tile(inputs: MoEInputs) -> torch.Tensor:
    """Loop for ever if an expert has more rows than a tile holds."""
    most = int(rows_of_experts(inputs).max())
    while most > TILE:
        pass
    return apply(inputs)


@seeded(BUGS, MOE, "parity", control="crash", model="sglang#38780")
def aborts_on_no_tokens(inputs: MoEInputs) -> torch.Tensor:
    """Abort, as a failed check in C++ does, if there is no token."""
    if not len(inputs.topk_ids):
        os.abort()
    return apply(inputs)


@seeded(BUGS, MOE, "parity", control="crash", features=("duplicate_ids",))
def segfaults_on_duplicate_ids(inputs: MoEInputs) -> torch.Tensor:
    """Write to address 0 if an expert appears twice in a token's slots."""
    ids = inputs.topk_ids.sort(dim=1).values
    if bool((ids.diff(dim=1) == 0).any()):
        ctypes.memset(0, 0, 1)
    return apply(inputs)


@seeded(BUGS, ROUTE, "routing_parity", control="hang")
def seeks_threshold_between_ties(inputs: RouteInputs) -> Routed:
    """Look for ever for a threshold that just top_k scores reach, if the next one equals the last.

    As a radix selection does that has no end but success.
    """
    scores = scores_of(inputs.method, inputs.logits.float())
    ranking = (scores if inputs.bias is None else scores + inputs.bias).sort(dim=1).values
    experts = ranking.shape[1]
    if inputs.top_k < experts:
        edge = ranking[:, experts - inputs.top_k - 1 : experts - inputs.top_k + 1]
        while bool((edge.diff(dim=1) == 0).any()):
            time.sleep(1)
    return routed(inputs)


@seeded(BUGS, ROUTE, "routing_parity", control="crash")
def exits_on_masked_groups(inputs: RouteInputs) -> Routed:
    """End the process without clean-up if a group of experts is masked with minus infinity."""
    groups, kept = inputs.num_groups or 1, inputs.topk_groups or 1
    if kept < groups and inputs.masked_groups == "-inf":
        os._exit(EXIT_STATUS)
    return routed(inputs)
