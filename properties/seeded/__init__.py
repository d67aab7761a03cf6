"""Seeded bugs: implementations with one known fault each, and honest ones without any.

They prove that the laws work: ``kernelproof score`` runs every law on each of them. A law that
kills no bug proves nothing, and a law that accuses an honest control is wrong. Faults are modelled
on public reports of serving stacks and kernel libraries.
"""

from __future__ import annotations

from . import (
    context_parallel_bugs,
    far_bugs,
    fp4_quantize_bugs,
    honest,
    merge_bugs,
    metadata_bugs,
    mx_quantize_bugs,
    norm_bugs,
    phase_bugs,
    plan_bugs,
    preparation_bugs,
    quantize_bugs,
    rearrange_bugs,
    rope_bugs,
    slack_bugs,
    slots_bugs,
    steps_bugs,
)
from .append import bugs as append_bugs
from .append import code_bugs as append_code_bugs
from .attention import (
    exact_bugs,
    feature_bugs,
    format_bugs,
    graph_bugs,
    hidden_bugs,
    launch_bugs,
    mask_bugs,
    memory_bugs,
    mla_bugs,
    option_bugs,
    padding_bugs,
    paging_bugs,
    process_bugs,
    quantised_bugs,
    reuse_bugs,
    scale_bugs,
    scratch_bugs,
    session_bugs,
    shape_bugs,
    soak_bugs,
    stateful_bugs,
    tensor_cores,
    verify_bugs,
    view_bugs,
)
from .catalogue import SeededBug
from .moe import (
    batched_bugs,
    expert_bugs,
    identity_bugs,
    router_value_bugs,
    routing_bugs,
    rule_bugs,
    size_bugs,
    sorting_bugs,
    width_bugs,
)
from .moe import bugs as moe_bugs
from .moe import honest as moe_honest
from .moe import process_bugs as moe_process_bugs
from .moe import quantised_bugs as moe_quantised_bugs
from .moe import real_bugs as moe_real_bugs
from .moe import stateful_bugs as moe_stateful_bugs
from .moe import weight_format_bugs as moe_weight_format_bugs

BUGS: tuple[SeededBug, ...] = (
    *option_bugs.BUGS,
    *feature_bugs.BUGS,
    *paging_bugs.BUGS,
    *memory_bugs.BUGS,
    *stateful_bugs.BUGS,
    *reuse_bugs.BUGS,
    *quantised_bugs.BUGS,
    *scale_bugs.BUGS,
    *tensor_cores.BUGS,
    *format_bugs.BUGS,
    *merge_bugs.BUGS,
    *metadata_bugs.BUGS,
    *phase_bugs.BUGS,
    *context_parallel_bugs.BUGS,
    *slots_bugs.BUGS,
    *preparation_bugs.BUGS,
    *steps_bugs.BUGS,
    *plan_bugs.BUGS,
    *quantize_bugs.BUGS,
    *mx_quantize_bugs.BUGS,
    *fp4_quantize_bugs.BUGS,
    *norm_bugs.BUGS,
    *rearrange_bugs.BUGS,
    *rope_bugs.BUGS,
    *append_bugs.BUGS,
    *append_code_bugs.BUGS,
    *session_bugs.BUGS,
    *mask_bugs.BUGS,
    *mla_bugs.BUGS,
    *shape_bugs.BUGS,
    *soak_bugs.BUGS,
    *graph_bugs.BUGS,
    *verify_bugs.BUGS,
    *padding_bugs.BUGS,
    *slack_bugs.BUGS,
    *far_bugs.BUGS,
    *hidden_bugs.BUGS,
    *scratch_bugs.BUGS,
    *view_bugs.BUGS,
    *launch_bugs.BUGS,
    *exact_bugs.BUGS,
    *moe_bugs.BUGS,
    *sorting_bugs.BUGS,
    *expert_bugs.BUGS,
    *moe_quantised_bugs.BUGS,
    *moe_stateful_bugs.BUGS,
    *routing_bugs.BUGS,
    *rule_bugs.BUGS,
    *moe_weight_format_bugs.BUGS,
    *router_value_bugs.BUGS,
    *identity_bugs.BUGS,
    *size_bugs.BUGS,
    *batched_bugs.BUGS,
    *moe_real_bugs.BUGS,
    *width_bugs.BUGS,
)
"""Wrong answers: each must be killed by at least one law."""
PROCESS_CONTROLS: tuple[SeededBug, ...] = (
    *process_bugs.BUGS,
    *soak_bugs.PROCESS_CONTROLS,
    *moe_process_bugs.BUGS,
)
"""Hangs and crashes: each must become a verdict, and end nothing but its own worker."""
HONEST: tuple[SeededBug, ...] = (
    *honest.CONTROLS,
    *context_parallel_bugs.CONTROLS,
    *slots_bugs.CONTROLS,
    *far_bugs.CONTROLS,
    *preparation_bugs.CONTROLS,
    *steps_bugs.CONTROLS,
    *plan_bugs.CONTROLS,
    *quantize_bugs.CONTROLS,
    *mx_quantize_bugs.CONTROLS,
    *fp4_quantize_bugs.CONTROLS,
    *norm_bugs.CONTROLS,
    *rearrange_bugs.CONTROLS,
    *rope_bugs.CONTROLS,
    *session_bugs.CONTROLS,
    *mla_bugs.CONTROLS,
    *format_bugs.CONTROLS,
    *soak_bugs.CONTROLS,
    *tensor_cores.CONTROLS,
    *graph_bugs.CONTROLS,
    *padding_bugs.CONTROLS,
    *slack_bugs.CONTROLS,
    *hidden_bugs.CONTROLS,
    *launch_bugs.CONTROLS,
    *exact_bugs.CONTROLS,
    *append_bugs.CONTROLS,
    *moe_honest.CONTROLS,
    *moe_weight_format_bugs.CONTROLS,
    *size_bugs.CONTROLS,
    *batched_bugs.CONTROLS,
    *width_bugs.CONTROLS,
)
"""Right answers by unusual ways: no law may accuse one."""
CATALOGUE: tuple[SeededBug, ...] = (*BUGS, *PROCESS_CONTROLS, *HONEST)

__all__ = ["BUGS", "CATALOGUE", "HONEST", "PROCESS_CONTROLS", "SeededBug"]
