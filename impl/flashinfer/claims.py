"""Reasons why an adapter refuses a problem, for all adapters to choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...reference import AttentionProblem, MergeProblem
from ..targets.optional import missing
from ..targets.refusal import Refusal
from ..targets.target import Target

Refuses = Callable[[Any, Target], "str | None"]
"""Takes a problem and a machine; returns the reason why not, None where there is none."""


def first_reason(*conditions: tuple[object, str]) -> str | None:
    """Return the reason of the first condition that holds."""
    return next((why for holds, why in conditions if holds), None)


def either(*refusals: Refuses) -> Refuses:
    """Ask several in turn; the first reason counts."""

    def refuses(problem: Any, target: Target) -> str | None:  # noqa: ANN401  of any operation
        return next((why for each in refusals if (why := each(problem, target))), None)

    return refuses


def unavailable(_: object, target: Target) -> Refusal | None:
    """Return the reason why FlashInfer's CUDA kernels cannot be called."""
    absent = missing("flashinfer", "flashinfer")
    if absent is None and target.device != "cuda":
        return Refusal("FlashInfer's CUDA kernels need a GPU", "device")
    return absent


def one_query_token(who: str) -> Refuses:
    """Refuse requests of more query tokens, or of none."""

    def refuses(problem: AttentionProblem, _: Target) -> str | None:
        several = any(length != 1 for length in problem.query_lens)
        return f"{who} one query token a request" if several else None

    return refuses


def one_head_dim(what: str) -> Refuses:
    """Refuse keys and values of different numbers of channels."""

    def refuses(problem: AttentionProblem, _: Target) -> str | None:
        return what if problem.head_dim_qk != problem.head_dim_vo else None

    return refuses


def two_states(problem: MergeProblem, _: Target) -> str | None:
    """Refuse any other number of states."""
    if problem.num_states == 2:  # noqa: PLR2004
        return None
    return f"merge_state merges 2 states, not {problem.num_states}"


def no_tokens(problem: Any, _: Target) -> str | None:  # noqa: ANN401  routing, or experts
    """Refuse a call without a token."""
    return None if problem.num_tokens else "engines make no call without a token"
