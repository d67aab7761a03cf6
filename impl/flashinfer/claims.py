"""Reasons why an adapter refuses a problem, for all adapters to choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...reference import AttentionProblem, MergeProblem
from ..targets.optional import absent, missing, require
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target

MOST_DRAFTS = 16
"""Most query tokens of a request with which calls that decode are made."""
Refuses = Callable[[Any, Target], "str | None"]
"""Takes a problem and a machine; returns the reason why not, None where there is none."""


def either(*refusals: Refuses) -> Refuses:
    """Ask several in turn; the first reason counts."""

    def refuses(problem: Any, target: Target) -> str | None:  # noqa: ANN401  of any operation
        return next((why for each in refusals if (why := each(problem, target))), None)

    return refuses


def unavailable(_: object, target: Target) -> Refusal | None:
    """Return the reason why FlashInfer's CUDA kernels cannot be called."""
    absent = missing("flashinfer", "flashinfer")
    if absent is None and target.device != "cuda":
        return Refusal("FlashInfer's CUDA kernels need a GPU", "device", "a GPU")
    return absent


def needing(module: str, distribution: str) -> Refuses:
    """Refuse machines without a module that FlashInfer needs for a call, and imports without."""
    return lambda *_: absent(module, distribution)


def offered(module: str, name: str) -> Refuses:
    """Refuse where a module of FlashInfer lacks a name, as it does where an import of it failed."""

    def refuses(*_: object) -> Refusal | None:
        if missing(module, "flashinfer") or hasattr(require(module, "flashinfer"), name):
            return missing(module, "flashinfer")
        reason = f"{module} of the installed flashinfer-python has no {name}"
        return Refusal(reason, "package", module)

    return refuses


def one_query_token(who: str) -> Refuses:
    """Refuse requests of more query tokens, or of none."""

    def refuses(problem: AttentionProblem, _: Target) -> str | None:
        several = any(length != 1 for length in problem.query_lens)
        return f"{who} one query token a request" if several else None

    return refuses


def few_query_tokens(
    who: str, *, uniform: bool = True, surplus: bool = False, least: int = 1
) -> Refuses:
    """Refuse what is no verify: requests of fewer than ``least`` tokens, or of many.

    Where ``uniform``, so are requests of different numbers of tokens; unless ``surplus``, requests
    of more tokens than they have keys.
    """

    def refuses(problem: AttentionProblem, _: Target) -> str | None:
        lengths = problem.query_lens
        return first_reason(
            (uniform and not problem.uniform_queries, f"{who} equally many tokens of each request"),
            (min(lengths, default=1) < least, f"{who} one query token a request or more"),
            (max(lengths, default=1) > MOST_DRAFTS, f"{who} at most {MOST_DRAFTS} query tokens"),
            (
                problem.most_queries > 1 and not (problem.causal or problem.tree),
                f"{who} several query tokens under a causal mask",
            ),
            (
                not surplus and problem.most_queries > 1 and problem.more_queries_than_keys,
                f"{who} no more queries than keys",
            ),
        )

    return refuses


def no_more_queries_than_keys(who: str, *, causal: bool = False) -> Refuses:
    """Refuse requests of more query tokens than keys; where ``causal``, only under that mask."""

    def refuses(problem: AttentionProblem, _: Target) -> str | None:
        more = problem.rows_without_keys if causal else problem.more_queries_than_keys
        return f"{who} no more queries than keys{' under a causal mask' * causal}" if more else None

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
