"""The axes of each operation and its simplest problems, for whatever asks what is supported.

No Hypothesis here: the isolated worker asks. How problems are drawn is in ``space.operations``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....reference import MergeProblem, MetadataProblem, PlanProblem, Problem, StepsProblem
from ....reference.operations import Table
from ..attention_axes import (
    APPEND_AXES,
    ATTENTION_AXES,
    MERGE_AXES,
    RAGGED_AXES,
    attention_example,
)
from ..metadata.axes import (
    BATCH_AXES,
    CONTEXT_PARALLEL_AXES,
    PLAN_AXES,
    SLOTS_AXES,
    STEPS_AXES,
    batch_example,
    context_parallel_example,
    slots_example,
)
from ..moe_axes import (
    BATCHED_AXES,
    MOE_AXES,
    ROUTE_AXES,
    batched_example,
    moe_example,
    route_example,
)
from ..quantising.axes import QUANTIZE_AXES, quantize_example
from ..quantising.norm_axes import NORM_AXES, norm_example
from ..quantising.rearrange_axes import REARRANGE_AXES, rearrange_example
from ..quantising.rope_axes import ROPE_AXES, rope_example


@dataclass(frozen=True)
class Examples:
    """The values that an operation's problems may have, and the simplest problem with some.

    Attributes:
        axes: values by axis, simplest first; empty where problems are drawn whole.
        simplest: the simplest problem with one value of each axis.
    """

    axes: Mapping[str, tuple[Any, ...]]
    simplest: Callable[[Mapping[str, Any]], Problem]


EXAMPLES = Table("kernelproof.properties.space.surveying.examples.EXAMPLES", {
    "paged_attention": Examples(ATTENTION_AXES, partial(attention_example, "paged_attention")),
    "ragged_attention": Examples(RAGGED_AXES, partial(attention_example, "ragged_attention")),
    "merge_state": Examples(MERGE_AXES, lambda chosen: MergeProblem(**chosen)),
    "append_paged_kv": Examples(APPEND_AXES, partial(attention_example, "append_paged_kv")),
    "build_metadata": Examples({}, lambda _: MetadataProblem()),
    "slice_context_parallel": Examples(CONTEXT_PARALLEL_AXES, context_parallel_example),
    "map_slots": Examples(SLOTS_AXES, slots_example),
    "prepare_batch": Examples(BATCH_AXES, batch_example),
    "prepare_steps": Examples(STEPS_AXES, lambda chosen: StepsProblem(**chosen)),
    "plan": Examples(PLAN_AXES, lambda chosen: PlanProblem(**chosen)),
    "route": Examples(ROUTE_AXES, route_example),
    "moe": Examples(MOE_AXES, moe_example),
    "batched_moe": Examples(BATCHED_AXES, batched_example),
    "quantize": Examples(QUANTIZE_AXES, quantize_example),
    "norm_and_quantize": Examples(NORM_AXES, norm_example),
    "rearrange": Examples(REARRANGE_AXES, rearrange_example),
    "rope_and_append": Examples(ROPE_AXES, rope_example),
})  # fmt: skip
