"""The decision: whether a kind of call may run on a machine, and what to use where it may not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..targets.backends import BACKENDS, OWN_BACKENDS
from ..targets.capability import capability_name
from ..targets.refusal import Code, Refusal
from ..targets.target import Target, UnsupportedError
from .book import Index, RuleBook, index_of, load_rules
from .explanation import why_unknown
from .feature import AUTO, BACKEND_ALIASES, FLOAT_DTYPES, Feature, with_fields, wrong
from .knowledge import known
from .rules import LEVELS, Rule

LATENT_OR_NOT = ("paged_attention", "mla")
"""Operations that problems of one implementation may be of."""
PREFERENCE = {
    "paged_attention": ("trtllm-gen", "xqa", "fa3", "fa2", "cuda-core", "triton"),
    "ragged_attention": ("fa3", "fa2", "cutlass", "triton"),
    "mla": ("trtllm-gen", "cutlass", "fa3", "fa2", "xqa"),
    "merge_state": ("cuda", "triton"),
    "append_paged_kv": ("cuda", "triton"),
    "build_metadata": ("triton", "reference"),
    "route": ("trtllm-gen", "cuda", "reference"),
    "moe": (
        "trtllm-gen",
        "cutlass",
        "cute-dsl",
        "b12x",
        "deep-gemm",
        "engine-triton",
        "marlin",
        "triton",
    ),
    "gemm": ("trtllm-gen",),
    "quantize": ("cuda", "triton"),
    "norm_and_quantize": ("cuda", "triton"),
    "rope_and_append": ("cuda", "triton"),
}
"""Backends that serve, the fastest first: what ``auto`` tries and what a refusal offers."""
PAGED = ("paged_attention", "append_paged_kv")
PAGE_SIZES = (16, 32, 64)
MOST_ALTERNATIVES = 3
SUPPORTED = "supported"
DOUBT = "nobody knows whether this development release is from before this ended: "


class Ruling(NamedTuple):
    """The rule that decides, before anything is said of it."""

    status: str
    rule: Rule | None
    feature: Feature
    note: str = ""
    book: RuleBook = RuleBook(())
    backends: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Decision:
    """What the rules say of a feature on a target.

    Attributes:
        status: ``"supported"``, ``"refused"``, or ``"unknown"`` where no rule speaks of it, which
            ``require`` refuses too.
        rule: id of the deciding rule; empty where there is none.
        source: who says so: a URL, or a file of a release.
        evidence: the level of what it rests on, of ``rules.LEVELS``; empty if unknown.
        feature: what was asked; with the backend that was chosen, where it was ``"auto"``.
        target: where.
        ruling: what it was made from.
    """

    status: str
    rule: str
    source: str
    evidence: str
    feature: Feature
    target: Target
    ruling: Ruling = field(repr=False, compare=False)

    @property
    def reason(self) -> str:
        """Why, in a sentence or two, and of which part of the call or which backend that is."""
        return self.ruling.note + self.why

    @cached_property
    def why(self) -> str:
        """Why, in a sentence or two, whatever it is said of."""
        ruling = self.ruling
        if ruling.rule is None:
            return why_unknown(ruling.feature, self.target, ruling.book)
        advice = ruling.rule.advice
        return f"{ruling.rule.reason}; {advice}" if advice else ruling.rule.reason

    @cached_property
    def alternatives(self) -> tuple[Feature, ...]:
        """What ``decide`` supports on the same target instead, the most useful first."""
        if self.supported:
            return ()
        ruling = self.ruling
        return _alternatives(self.feature, index_of(ruling.book, self.target), ruling.backends)

    @property
    def supported(self) -> bool:
        """Whether it may run."""
        return self.status == SUPPORTED

    @property
    def refusal(self) -> Refusal | None:
        """The refusal of an implementation that asks the rules; None where they support it."""
        if self.supported:
            return None
        rule = f" ({self.rule})" if self.rule else ""
        # After one such refusal a survey asks about no other problem.
        code: Code = "rules" if self._may_allow_others else "machine"
        return Refusal(f"the support rules: {self.reason}{rule}", code, self.rule)

    @property
    def _may_allow_others(self) -> bool:
        """Whether a rule allows any call of this backend on the target, latent or not."""
        operation, backend = self.feature.operation, self.feature.backend
        permissions = index_of(self.ruling.book, self.target).permissions
        return any(
            (each, of) in permissions
            for each in (LATENT_OR_NOT if operation in LATENT_OR_NOT else (operation,))
            for of in (_offered(each, self.ruling.backends) if backend == AUTO else (backend,))
        )

    def __str__(self) -> str:
        """Return the text that ``require`` raises with."""
        where = describe(self.target)
        if self.supported:
            return f"{self.feature} is supported on {where} ({self.evidence}: {self.source})"
        said = f"{self.feature} is {self.status} on {where}: {self.reason}"
        if self.source:
            said += f" ({self.source})"
        return f"{said}. {self.instead}"

    @property
    def instead(self) -> str:
        """What to use instead, or that there is nothing, in words."""
        if self.supported:
            return ""
        if not self.alternatives:
            return "No alternative is supported there"
        best = self.alternatives[0].differences(self.feature)
        return "Use " + ", ".join(f"{name}={value!r}" for name, value in best.items())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "status": self.status,
            "reason": self.reason,
            "rule": self.rule,
            "source": self.source,
            "evidence": self.evidence,
            "alternatives": [each.to_json() for each in self.alternatives],
            "feature": self.feature.to_json(),
            "target": self.target.to_json(),
        }


def describe(target: Target) -> str:
    """Return a machine in words: SM103 with flashinfer-python 0.6.7."""
    version = target.flashinfer
    has = f"flashinfer-python {version}" if version else "no flashinfer-python"
    return f"{capability_name(target.sm)} with {has}"


def decide(
    feature: Feature,
    target: Target,
    *,
    book: RuleBook | None = None,
    backends: Collection[str] | None = None,
) -> Decision:
    """Decide whether a kind of call may run on a machine.

    Args:
        feature: what is asked.
        target: the machine; it need not be this one.
        book: the book of rules; the shipped ones if None.
        backends: the backends that may be chosen and offered; all if None.

    Raises:
        ValueError: a version of the target is none by PEP 440, or there is no such backend.
        RulesError: the shipped rules cannot be read.
    """
    book = book or load_rules()
    names = None if backends is None else _known(backends)
    ruling = _rule_on(feature, index_of(book, target), names)
    rule = ruling.rule
    chosen = ruling.feature if feature.backend == AUTO and ruling.status == SUPPORTED else feature
    return Decision(
        status=ruling.status,
        rule=rule.id if rule else "",
        source=rule.source if rule else "",
        evidence=_evidence(chosen, ruling, target),
        feature=chosen if chosen.phase == feature.phase else with_fields(chosen, phase="mixed"),
        target=target,
        ruling=ruling._replace(book=book, backends=names),
    )


def _evidence(feature: Feature, ruling: Ruling, target: Target) -> str:
    """Return the level that all of a call has: of a mixed batch, each of its phases."""
    if ruling.rule is None:
        return ""
    mixed = feature.phase == "mixed" and ruling.status == SUPPORTED
    levels = []
    for phase in ("decode", "prefill") if mixed else (ruling.feature.phase,):
        found = known(ruling.rule, with_fields(ruling.feature, phase=phase), target)
        levels.append(max((each.level for each in found), key=LEVELS.index))
    return min(levels, key=LEVELS.index)


def refusing(feature: Feature, target: Target, *, book: RuleBook | None = None) -> tuple[Rule, ...]:
    """Return every rule that refuses a call, of which ``decide`` quotes one.

    Of a mixed batch, those that refuse either of its phases.

    Args:
        feature: what is asked, of a backend.
        target: the machine.
        book: the book of rules; the shipped ones if None.

    Raises:
        ValueError: a version of the target is none by PEP 440.
        RulesError: the shipped rules cannot be read.
    """
    tests = index_of(book or load_rules(), target).refusals
    phases = ("decode", "prefill") if feature.phase == "mixed" else (feature.phase,)
    found = {
        rule: None
        for phase in phases
        for rule, holds in tests.get((feature.operation, feature.backend), ())
        if holds(with_fields(feature, phase=phase))
    }
    return tuple(found)


def require(
    feature: Feature,
    target: Target,
    *,
    book: RuleBook | None = None,
    allow_unknown: bool = False,
    backends: Collection[str] | None = None,
) -> Decision:
    """Fail fast where a kind of call may not run.

    Args:
        feature, target, book: see ``decide``.
        allow_unknown: let pass what no rule speaks of.
        backends: the backends that the caller has, and may be answered with; by default all that
            are not Kernelproof's own (``triton``, ``reference``), which an engine lacks. A feature
            that names another one is refused.

    Raises:
        UnsupportedError: it is refused or unknown; the text names an alternative.
        ValueError, RulesError: see ``decide``.
    """
    names = engine_backends(feature) if backends is None else _known(backends)
    decision = decide(feature, target, book=book, backends=names)
    if feature.backend not in (AUTO, *names):
        message = (
            f"{feature} is not among the backends that were given ({', '.join(names)}). "
            f"{_choice(feature, target, book, names)}"
        )
        raise UnsupportedError(message)
    if decision.supported or (allow_unknown and decision.status == "unknown"):
        return decision
    raise UnsupportedError(str(decision))


def engine_backends(feature: Feature) -> tuple[str, ...]:
    """Return what ``require`` answers with by default: of our own, only what a feature names."""
    return tuple(each for each in BACKENDS if each not in OWN_BACKENDS or each == feature.backend)


def _choice(feature: Feature, target: Target, book: RuleBook | None, names: Sequence[str]) -> str:
    """Return what to use in place of a backend that the caller does not have."""
    best = decide(with_fields(feature, backend=AUTO), target, book=book, backends=names)
    if best.supported:
        return f"Use backend={best.feature.backend!r}"
    return best.instead


def _known(backends: Collection[str]) -> tuple[str, ...]:
    """Return backends by their names; refuse what is none."""
    given = (backends,) if isinstance(backends, str) else tuple(backends)
    names = tuple(BACKEND_ALIASES.get(each, each) for each in given)
    for each in names:
        if each not in BACKENDS:
            raise ValueError(wrong("backend", each, BACKENDS))
    return names


def _offered(operation: str, backends: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the backends of an operation that may be chosen, the fastest first."""
    every = PREFERENCE[operation]
    if backends is None:
        return every
    return tuple(each for each in every if each in backends)


def _rule_on(feature: Feature, index: Index, backends: tuple[str, ...] | None = None) -> Ruling:
    """Find the rule that decides, or none."""
    if feature.backend == AUTO:
        return _best(feature, index, backends)
    if feature.phase == "mixed":
        return _both_phases(feature, index)
    key = (feature.operation, feature.backend)
    for rule, holds in index.refusals.get(key, ()):
        if holds(feature):
            return Ruling("refused", rule, feature)
    for rule, holds in index.doubts.get(key, ()):
        if holds(feature):
            return Ruling("unknown", rule, feature, DOUBT)
    for rule, holds in index.permissions.get(key, ()):
        if holds(feature):
            return Ruling(SUPPORTED, rule, feature)
    return Ruling("unknown", None, feature)


def _best(feature: Feature, index: Index, backends: tuple[str, ...] | None) -> Ruling:
    """Decide for the first backend that is supported."""
    rulings = []
    offered = _offered(feature.operation, backends)
    if not offered:
        note = f"none of these backends has {feature.operation}: {', '.join(backends or ())}; "
        return Ruling("unknown", None, feature, note)
    for backend in offered:
        ruling = _rule_on(with_fields(feature, backend=backend), index)
        if ruling.status == SUPPORTED:
            return ruling
        rulings.append(ruling)
    # A refusal says more than that no rule speaks of it.
    said = next((each for each in rulings if each.status == "refused"), rulings[0])
    note = f"no backend is supported; of {said.feature.backend}: {said.note}"
    return said._replace(note=note)


def _both_phases(feature: Feature, index: Index) -> Ruling:
    """Decide for a batch of decodes and prefills: both must be supported."""
    for phase in ("decode", "prefill"):
        ruling = _rule_on(with_fields(feature, phase=phase), index)
        if ruling.status != SUPPORTED:
            return ruling._replace(note=f"the {phase} part of a mixed batch: {ruling.note}")
    return ruling


def _alternatives(
    feature: Feature, index: Index, backends: tuple[str, ...] | None
) -> tuple[Feature, ...]:
    """Return what is supported instead; another cache format only where nothing else helps."""
    offered = _offered(feature.operation, backends)
    for candidates in (_other_kernels(feature, offered), _other_formats(feature, offered)):
        found: dict[Feature, None] = {}
        for other in candidates:
            if other.backend not in (AUTO, *offered):  # it is offered in no shape
                continue
            if other != feature and _rule_on(other, index, backends).status == SUPPORTED:
                found[other] = None
                if len(found) == MOST_ALTERNATIVES:
                    break
        if found:
            return tuple(found)
    return ()


def _other_kernels(feature: Feature, offered: Sequence[str]) -> Iterator[Feature]:
    """Return other kernels for the same numbers, then other shapes of the same cache."""
    for backend in offered:
        yield with_fields(feature, backend=backend)
    if feature.query_len > 1 or feature.ragged_queries:
        yield with_fields(feature, phase="prefill")
    if feature.operation not in PAGED:
        return
    if feature.kv_storage:
        yield with_fields(feature, kv_storage="")
    for page_size in PAGE_SIZES:
        yield with_fields(feature, page_size=page_size)
    for layout in ("NHD", "HND"):
        yield with_fields(feature, kv_layout=layout)


def _other_formats(feature: Feature, offered: Sequence[str]) -> Iterator[Feature]:
    """Return wider formats of queries and cache, with the same backend and then with others."""
    if feature.operation not in PAGED:
        return
    q_dtype = feature.q_dtype if feature.q_dtype in FLOAT_DTYPES else "bfloat16"
    for kv_dtype in ("float8_e4m3fn", q_dtype):
        wider = with_fields(feature, q_dtype=q_dtype, kv_dtype=kv_dtype, kv_storage="")
        yield wider
        for backend in offered:
            yield with_fields(wider, backend=backend)
