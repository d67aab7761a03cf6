"""The protocol between the suite and what it tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, runtime_checkable
from typing import Protocol as Typing

import torch

from ..reference import Arithmetic, AttentionProblem, Problem
from ..reference.cache_names import INTERLEAVED
from ..reference.kv_format import NVFP4
from .backends import BACKENDS
from .target import Target

OPERATIONS = (
    "paged_attention",
    "ragged_attention",
    "merge_state",
    "append_paged_kv",
    "build_metadata",
)
FEATURES = (
    "custom_mask",
    "per_head_scales",
    "fp8_kv",
    "nvfp4_kv",
    "interleaved_v_scales",
    "fp8_q",
    "mla",
    "nondeterministic",
    "phases",
    "no_host_sync",
)
"""What an implementation may opt into. The first seven are drawn only where named: quantised caches
come with ``inputs.kv_format``, which says what they hold, and ``inputs.kv_cache_sf``, FP8 queries
with ``inputs.q_scale``; ``mla`` is multi-head latent attention: there is one key-value head, and
``inputs.v_cache`` is a view of the first channels of ``inputs.k_cache``. ``nondeterministic`` says
that repeated calls may differ within the bound (atomics), so that they are not compared bitwise.
The others are of build_metadata: that the result has ``decodes`` and ``prefills``, each with
``cum_seq_lens_q`` and ``cum_pages_kv`` besides, and that a call never waits for the GPU: as the
host cannot know how many pages there are, its ``paged_kv_indices`` may then be longer than
``paged_kv_indptr[-1]``."""

EVERY_RULE = "*"
"""Stands for all support rules among those that are not asked: nothing is gated."""

NOT_NAMED = "does not name the feature"
"""What is said of a problem with a feature that an implementation did not opt into."""
Supports = Callable[[Problem, Target], "bool | str"]


class Session(Typing):
    """Attention that is planned once for a batch and run many times, as engines use it.

    ``plan`` gets the inputs of a call, with what describes the batch on the host: ``metadata`` and
    ``block_table``, or ``qo_indptr`` and ``kv_indptr`` of ragged keys. What it needs of them it
    must have copied when it returns. ``run`` gets the inputs of a call of the same shapes, whose
    description of the batch says nothing, and returns what the implementation's function does.

    A session may be planned again at any time, for another batch and in another dtype, also while
    earlier runs still wait for the GPU: these are runs of their own plans. Several sessions of one
    implementation live side by side. Keys and values may change in place between two runs.
    """

    def plan(self, inputs: Any) -> None:  # noqa: ANN401  each operation has its own record
        """Prepare for runs on a batch."""

    def run(self, inputs: Any) -> Any:  # noqa: ANN401
        """Attend to the batch that was planned."""


@runtime_checkable
class GraphSession(Session, Typing):
    """A session whose runs can be recorded once and replayed, as CUDA graphs are.

    ``capture`` records a run of the batch that was planned last, on inputs of such a run; it keeps
    none of their tensors. ``replay`` runs what was recorded on other values and on the batch that
    was planned last: with the same dtypes, options, strides and cache shapes, on any pages, with
    requests of any length, but with no more requests and query tokens than were captured. Between
    the two, plans and runs of other batches may have come. Its result is the caller's to keep.
    """

    def capture(self, inputs: Any) -> None:  # noqa: ANN401
        """Record a run."""

    def replay(self, inputs: Any) -> Any:  # noqa: ANN401
        """Run what was recorded."""


@runtime_checkable
class ScratchSession(Session, Typing):
    """A session that says which memory its runs use as scratch: the suite overwrites it.

    What runs leave there, and what plans keep there for them, is no scratch.
    """

    def scratch(self) -> Sequence[torch.Tensor]:
        """Give tensors that may hold anything before a run."""


@dataclass(frozen=True, eq=False)
class Implementation:
    """A named callable for one operation, see ``implementation``."""

    operation: str
    name: str
    function: Callable[[Any], Any]
    supports: Supports | None
    features: frozenset[str]
    arithmetic: Arithmetic
    writes_out: bool
    compile_key: Callable[[Problem], Hashable] | None
    backend: str = ""
    build_ahead: bool = False
    build_minutes: float = 1.0
    session: Callable[[], Session] | None = None

    def __call__(self, inputs: Any) -> Any:  # noqa: ANN401  each operation has its own record
        """Run on the inputs of one problem."""
        return self.function(inputs)

    def refusal(
        self, problem: Problem, target: Target, *, without_rules: Collection[str] = ()
    ) -> str | None:
        """Say why this problem is not for this implementation; None if it is.

        Args:
            problem: the call.
            target: the machine.
            without_rules: ids of support rules that are not asked, or ``EVERY_RULE``.
        """
        if problem.operation != self.operation:
            return f"{self.name} implements {self.operation}, not {problem.operation}"
        for feature in ("custom_mask", "per_head_scales"):
            if getattr(problem, feature, False) and feature not in self.features:
                return f"{self.name} {NOT_NAMED} {feature}"
        for feature in drawn_features(problem):
            if feature not in self.features:
                return f"{self.name} {NOT_NAMED} {feature}"
        answer = True if self.supports is None else self.supports(problem, target)
        if answer is not True:
            return answer or f"{self.name}.supports said no"
        if not self.backend or EVERY_RULE in without_rules:
            return None
        return _gate(problem, self.backend, target, without_rules)


def drawn_features(problem: Problem) -> list[str]:
    """Name the features that a problem's KV cache and queries need."""
    if not isinstance(problem, AttentionProblem):
        return []
    found = ["mla"] if problem.values_in_keys else []
    if not problem.kv_cache:
        return found
    found.append("nvfp4_kv" if problem.kv_element == NVFP4 else "fp8_kv")
    if problem.kv_cache == INTERLEAVED:
        found.append("interleaved_v_scales")
    return [*found, "fp8_q"] if problem.q_dtype else found


def _gate(
    problem: Problem, backend: str, target: Target, without_rules: Collection[str]
) -> str | None:
    """Say why the support rules refuse a problem; None if they do not."""
    # Imported when it is asked: a kernel that names no backend does not need `packaging`.
    from .gating import decide, load_rules
    from .gating.of_problem import feature_of

    book = load_rules().without(frozenset(without_rules)) if without_rules else None
    decision = decide(feature_of(problem, backend), target, book=book)
    if decision.supported:
        return None
    return f"the gate: {decision.reason}" + (f" ({decision.rule})" if decision.rule else "")


def implementation(
    operation: str,
    *,
    name: str,
    supports: Supports | None = None,
    features: Collection[str] = (),
    arithmetic: Arithmetic | None = None,
    writes_out: bool = False,
    compile_key: Callable[[Problem], Hashable] | None = None,
    backend: str = "",
    build_ahead: bool = False,
    build_minutes: float = 1.0,
    session: Callable[[], Session] | None = None,
) -> Callable[[Callable[[Any], Any]], Implementation]:
    """Make an implementation of a function, for use as a decorator.

    Args:
        operation: one of ``OPERATIONS``. The function takes one record whose attributes are the
            oracle's parameters (``kernelproof.reference.inputs``) and ``out_dtype``, and returns
            what the oracle returns: AttentionOutput or a tuple (out, lse) with a natural-log lse
            that may be None; (k_cache, v_cache) for append_paged_kv; a BatchMetadata, or any
            object with its attributes, for build_metadata.
        name: how reports call it; unique within a run.
        supports: ``supports(problem, target)`` gives True, or the reason why not. It must be a
            pure function: the suite also probes it to learn which problems to draw.
        features: optional features that it has, of ``FEATURES``.
        arithmetic: what it rounds where; the error bound follows. float32 throughout if None.
        writes_out: it writes into ``inputs.out`` and ``inputs.lse``, which are poisoned and fenced,
            and may return None.
        compile_key: gives the key of the module that a problem needs, where a first call compiles;
            that call's time does not count against the deadline.
        backend: what the support rules (``kernelproof.impl.gating``) call it, one of
            ``backends.BACKENDS``. Where it is given, the rules decide what ``supports`` lets pass,
            and all of it where there is no ``supports``; a kernel that no rule is about leaves
            it empty.
        build_ahead: its modules take long to compile: the suite chooses a few of them that cover
            pairs of what they differ in, and builds these in parallel before the first problem.
        build_minutes: of one processor core for one such module, roughly: of those that take many,
            a profile builds fewer.
        session: makes a ``Session``, where planning and running are calls of their own; it may be
            a ``GraphSession`` and a ``ScratchSession`` besides.

    Raises:
        ValueError: an unknown operation, feature or backend.
    """
    if operation not in OPERATIONS:
        message = f"operation is {operation!r}; it must be one of {', '.join(OPERATIONS)}"
        raise ValueError(message)
    if backend and backend not in BACKENDS:
        message = f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}"
        raise ValueError(message)
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        message = f"features names {unknown}; known features: {', '.join(FEATURES)}"
        raise ValueError(message)

    def decorate(function: Callable[[Any], Any]) -> Implementation:
        return Implementation(
            operation=operation,
            name=name,
            function=function,
            supports=supports,
            features=frozenset(features),
            arithmetic=arithmetic or Arithmetic(),
            writes_out=writes_out,
            compile_key=compile_key,
            backend=backend,
            build_ahead=build_ahead,
            build_minutes=build_minutes,
            session=session,
        )

    return decorate
