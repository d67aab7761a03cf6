"""Problems: frozen, JSON-serialisable descriptions of one call.

A problem holds no tensor: ``reference.materialise`` makes its tensors, with the same bits
everywhere.
"""

from __future__ import annotations

from .attention import (
    ATTENTION_OPERATIONS,
    ATTENTION_REGIMES,
    EXACT_GAP,
    EXACT_KEYS,
    EXACT_RANKS,
    KV_VIEWS,
    LARGEST_EXACT_QUERY,
    LEAST_EXACT_SCALE,
    MAX_REQUESTS,
    AttentionProblem,
)
from .base import DTYPES, MAX_SEQ_LEN, BaseProblem
from .batched_moe import BatchedMoEProblem
from .context_parallel import ContextParallelProblem
from .merge import CONTEXTS, EMPTY_STATES, LSE_LAYOUTS, MERGE_REGIMES, STATE_STRIDES, MergeProblem
from .metadata import MetadataProblem
from .moe import MoEProblem, RouteProblem
from .norm_quantize import NormQuantizeProblem
from .plan import PlanProblem
from .preparation import BatchProblem
from .quantize import QUANTIZE_REGIMES, QuantizeProblem
from .rearrange import RearrangeProblem
from .rope_append import RopeAppendProblem
from .slots import SlotsProblem
from .steps import StepsProblem

Problem = (
    AttentionProblem
    | MergeProblem
    | MetadataProblem
    | ContextParallelProblem
    | SlotsProblem
    | BatchProblem
    | StepsProblem
    | PlanProblem
    | RouteProblem
    | MoEProblem
    | BatchedMoEProblem
    | QuantizeProblem
    | NormQuantizeProblem
    | RearrangeProblem
    | RopeAppendProblem
)

__all__ = [
    "ATTENTION_OPERATIONS",
    "ATTENTION_REGIMES",
    "CONTEXTS",
    "DTYPES",
    "EMPTY_STATES",
    "EXACT_GAP",
    "EXACT_KEYS",
    "EXACT_RANKS",
    "KV_VIEWS",
    "LARGEST_EXACT_QUERY",
    "LEAST_EXACT_SCALE",
    "LSE_LAYOUTS",
    "MAX_REQUESTS",
    "MAX_SEQ_LEN",
    "MERGE_REGIMES",
    "QUANTIZE_REGIMES",
    "STATE_STRIDES",
    "AttentionProblem",
    "BaseProblem",
    "BatchProblem",
    "BatchedMoEProblem",
    "ContextParallelProblem",
    "MergeProblem",
    "MetadataProblem",
    "MoEProblem",
    "NormQuantizeProblem",
    "PlanProblem",
    "Problem",
    "QuantizeProblem",
    "RearrangeProblem",
    "RopeAppendProblem",
    "RouteProblem",
    "SlotsProblem",
    "StepsProblem",
]
