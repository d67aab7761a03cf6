"""Axes of problems of metadata, and the simplest problem with one value of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....reference import BatchProblem, ContextParallelProblem, SlotsProblem
from ....reference.attention.preparation import OUTPUTS, RESTS
from ....reference.problems.plan import FAMILIES
from ....reference.problems.steps import ENGINES

CONTEXT_PARALLEL_AXES: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 2, 3, 4, 8, 16, 64),
    "world": (2, 1, 3, 4, 8),
    "interleave": (1, 2, 3, 4, 16),
    "page_order": (0, 1),
}
SLOTS_AXES: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 2, 3, 4, 16, 64),
    "world": (1, 2, 3, 4, 8),
    "interleave": (1, 2, 4, 16),
    "spare_slots": (0, 1, 7, 1100),
    "first_page": (0, 2**27, 2**30),
}
"""Values by axis. Spare slots beyond 1024 are more than one block of the engines' kernels; page
2**27 of 16 tokens has slots that do not fit into int32."""
BATCH_AXES: dict[str, tuple[Any, ...]] = {
    "outputs": tuple(
        (output, rest)
        for output in OUTPUTS
        for rest in RESTS
        if OUTPUTS[output].is_table or rest != "zero_tails"
    ),
    "page_size": (1, 2, 4, 16, 64, 3),
    "window_left": (-1, 0, 5, 128),
    "spare_entries": (0, 1, 7, 1100),
}
"""Values by axis. Spare entries beyond 1024 are more than one block of the engines' kernels."""
STEPS_AXES: dict[str, tuple[Any, ...]] = {
    "engine": tuple(ENGINES),
    "page_size": (1, 2, 4, 16, 64, 3),
}
CHIPS = (132, 148, 16, 108, 78, 40, 58, 72, 114, 128, 142, 188, 8, 33, 200)
"""Multiprocessors: H100, B200, a MIG slice, A100, H20, T4, L4, A10, H100 PCIe, RTX 4090, L40S, RTX
PRO 6000, and of chips that there are not."""
PLAN_AXES: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "graph": (False, True),
    "page_size": (1, 16, 64, 8, 128),
    "multiprocessors": CHIPS,
}
SHIFTED = ("hidden_state_mapping",)
"""Outputs that no drafter without hidden states has."""


def context_parallel_example(chosen: Mapping[str, Any]) -> ContextParallelProblem:
    """Return the simplest problem with these values; an interleave needs a page it divides."""
    page_size, interleave = chosen["page_size"], chosen["interleave"]
    fits = page_size if page_size % interleave == 0 else interleave
    return ContextParallelProblem((1, 2), (3, 5), **{**chosen, "page_size": fits})


def slots_example(chosen: Mapping[str, Any]) -> SlotsProblem:
    """Return the simplest problem with these values; an interleave needs a page it divides."""
    page_size, interleave = chosen["page_size"], chosen["interleave"]
    fits = page_size if page_size % interleave == 0 else interleave
    return SlotsProblem((((1, 2), (3, 5)),), **{**chosen, "page_size": fits})


def batch_example(chosen: Mapping[str, Any]) -> BatchProblem:
    """Return the simplest problem with these values."""
    values = {name: value for name, value in chosen.items() if name != "outputs"}
    output, rest = chosen["outputs"]
    world = 2 if output == "local_seq_lens" else 1
    steps = (((1, 2), (3, 5)),)
    if is_verified(output):
        steps = (((2, 2), (3, 5)),)
        values |= {"rejected": ((0, 1),), "drafts": 1, "is_shifted": output in SHIFTED}
    return BatchProblem(output, steps, rest=rest, world=world, **values)


def is_verified(output: str) -> bool:
    """Whether batches of drafts are drawn for an output."""
    return OUTPUTS[output].is_drafted or output == "slot_mapping"
