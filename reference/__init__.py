"""The oracle: attention, merging and metadata by definition, and bounds on what may differ.

It imports torch and the standard library, nothing else. The default arithmetic is float64.
"""

from __future__ import annotations

from .append import append_paged_kv
from .arithmetic import UNIT_ROUNDOFF, Arithmetic, unit_roundoff
from .attention import AttentionOutput, paged_attention, ragged_attention
from .bounds import attention_error_bound, ragged_attention_error_bound
from .materialise import materialise
from .merge import merge_error_bound, merge_states
from .metadata import BatchMetadata, build_metadata
from .phases import slice_phases, split_decodes_and_prefills
from .problem_json import problem_from_json
from .problems import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    Problem,
)

__all__ = [
    "UNIT_ROUNDOFF",
    "Arithmetic",
    "AttentionOutput",
    "AttentionProblem",
    "BatchMetadata",
    "MergeProblem",
    "MetadataProblem",
    "Problem",
    "append_paged_kv",
    "attention_error_bound",
    "build_metadata",
    "materialise",
    "merge_error_bound",
    "merge_states",
    "paged_attention",
    "problem_from_json",
    "ragged_attention",
    "ragged_attention_error_bound",
    "slice_phases",
    "split_decodes_and_prefills",
    "unit_roundoff",
]
