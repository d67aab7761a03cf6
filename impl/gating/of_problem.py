"""The gating question that a problem asks."""

from __future__ import annotations

from ...reference import AttentionProblem, MergeProblem, Problem
from .feature import Feature


def feature_of(problem: Problem, backend: str) -> Feature:
    """Give the feature that one call of a backend on a problem needs.

    A batch with both decodes (one query a request) and longer requests is mixed.
    """
    if isinstance(problem, MergeProblem):
        return Feature(
            problem.operation, backend, head_dim_qk=problem.head_dim, q_dtype=problem.dtype
        )
    if not isinstance(problem, AttentionProblem):
        return Feature(problem.operation, backend)
    kinds = {"decode" if length <= 1 else "prefill" for length in problem.query_lens}
    return Feature(
        "mla" if problem.values_in_keys else problem.operation,
        backend,
        phase="mixed" if len(kinds) > 1 else next(iter(kinds), "decode"),
        head_dim_qk=problem.head_dim_qk,
        head_dim_vo=problem.head_dim_vo,
        q_dtype=problem.q_dtype or problem.dtype,
        kv_dtype=problem.kv_element,
        kv_storage=problem.kv_storage,
        kv_layout=problem.kv_layout,
        page_size=problem.page_size,
        group_size=problem.group_size,
        window=problem.window_left >= 0,
        soft_cap=bool(problem.logits_soft_cap),
        sinks=problem.sinks,
        mask="custom" if problem.custom_mask else "causal" if problem.causal else "none",
    )
