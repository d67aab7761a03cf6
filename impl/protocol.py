"""The protocol between the suite and what it tests."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, runtime_checkable
from typing import Protocol as Typing

import torch

from .. import __version__
from ..fixtures.suggestions import did_you_mean
from ..reference import Arithmetic, Problem
from ..reference.operations import OPERATIONS as ORACLES
from ..reference.validation import flag_of
from .features import FEATURES, ROUTES, UNDEFINED, drawn_features, inexpressible
from .targets.backends import BACKENDS, COMPILERS, KERNELPROOF
from .targets.refusal import Refusal
from .targets.target import Target, distribution_of, installed_version

if TYPE_CHECKING:
    from .gating import Feature

Operation = Literal[
    "paged_attention",
    "ragged_attention",
    "merge_state",
    "append_paged_kv",
    "build_metadata",
    "slice_context_parallel",
    "map_slots",
    "prepare_batch",
    "prepare_steps",
    "plan",
    "route",
    "moe",
    "batched_moe",
    "quantize",
    "norm_and_quantize",
    "rearrange",
    "rope_and_append",
]

OPERATIONS = tuple(ORACLES)
"""Names of all operations, as ``Operation`` has them."""

EVERY_RULE = "*"
"""Name for all support rules in a list of those that are not asked: nothing is refused."""

HIDDEN_KEYS = ("any", "finite")
"""What pages behind every query's window may hold: anything, NaN included, or finite numbers."""
FINITE_HIDDEN_KEYS = (
    'declares hidden_keys="finite": pages behind every window must hold finite numbers, so that an '
    "engine may not free and reuse them uncleared"
)
"""The claim of an implementation with ``hidden_keys="finite"``, as reports print it."""
UNDEFINED_ROWS = (
    f"declares {UNDEFINED}: rows of out and lse that see no key hold anything, so that an engine "
    "may neither read nor merge them"
)
"""The claim of an implementation with that feature, as reports print it."""

COMPILERS_A_BUILD = 4
"""Most compilers of one module: a module of FlashInfer has only two to eight sources."""

ENGINE_LINE = re.compile(r"\S+\.\w+:\d+")
"""A file and a line of an engine, as a reason for an unset flag."""

Supports = Callable[[Any, Target], "bool | str"]
"""Takes a problem of the implementation's own operation: the protocol refuses any other before."""
CompileKey = Callable[[Any], Hashable]
Kernels = Callable[[Any], Iterable[Problem]]
Library = Callable[[Any], tuple[str, bool]]


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
        """Return tensors that may hold anything before a run."""


@runtime_checkable
class ExactSession(Session, Typing):
    """A session that takes the exact lengths of its keys after the plan, as they become known late.

    An engine whose host runs ahead plans with bounds: what the pages of a request have room for, or
    lengths with draft tokens that may be rejected. ``publish`` gets the exact lengths, int32
    [requests], on the device, each at most the planned one. Runs and replays attend to these keys,
    on the planned pages, until the next plan.
    """

    def publish(self, seq_lens: torch.Tensor) -> None:
        """Write the exact lengths to where runs read them."""


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
    compile_key: CompileKey | None
    kernels: Kernels | None = None
    backend: str = ""
    build_ahead: bool | str = False
    build_minutes: float = 1.0
    build_compilers: int = COMPILERS_A_BUILD
    library: Library | None = None
    tile: int = 0
    split: int = 0
    decodes: bool = False
    session: Callable[[], Session] | None = None
    wide_arithmetic: Sequence[tuple[int, Arithmetic]] = ()
    declared_provider: str | None = None
    hidden_keys: str = "any"
    chosen_backend: Callable[[Target], str] | None = None
    ruled_as: Mapping[str, Any] = field(default_factory=dict)
    unset_flags: Mapping[str, str] = field(default_factory=dict)
    runs: frozenset[str] = frozenset()

    @property
    def provider(self) -> str:
        """Distribution that it comes from; "" for code that no distribution installed."""
        # Found when it is asked for: reading what is installed takes a fifth of a second.
        if self.declared_provider is None:
            return distribution_of(getattr(self.function, "__module__", ""))
        return self.declared_provider

    @property
    def compiler(self) -> str:
        """Distribution that compiles its kernels when they are called; "" where none does."""
        return COMPILERS.get(self.backend or self.provider, "")

    @property
    def provider_version(self) -> str | None:
        """Installed version of its provider; None where there is none."""
        if self.provider == KERNELPROOF:
            return __version__
        return installed_version(self.provider) if self.provider else None

    @property
    def claims(self) -> tuple[str, ...]:
        """Return what it needs of callers beyond the operation's contract, a sentence each."""
        undefined = (UNDEFINED_ROWS,) if UNDEFINED in self.features else ()
        return ((FINITE_HIDDEN_KEYS,) if self.hidden_keys == "finite" else ()) + undefined

    @property
    def declares(self) -> frozenset[str]:
        """Everything that a law may need of it: features, ``"writes_out"``, ``"session"``."""
        more = {"writes_out": self.writes_out, "session": self.session is not None}
        return self.features.union(name for name, has in more.items() if has)

    def arithmetic_of(self, head_dim_vo: int) -> Arithmetic:
        """Return the arithmetic for values with this number of channels."""
        found = self.arithmetic
        for channels, wide in self.wide_arithmetic:
            if head_dim_vo >= channels:
                found = wide
        return found

    def backend_on(self, target: Target) -> str:
        """Name the backend of which the support rules are asked on a machine; "" for none."""
        return self.chosen_backend(target) if self.chosen_backend else self.backend

    def builds_ahead(self, device: str) -> bool:
        """Whether modules are built before the first problem on a device, "cpu" or "cuda"."""
        return self.build_ahead in (True, device)

    def problems_of_module(self, problem: Problem) -> Iterable[Problem]:
        """Return problems that between them call every kernel of this problem's module."""
        return self.kernels(problem) if self.kernels else (problem,)

    def module_of(self, problem: Problem) -> str:
        """Name the module that this problem needs; empty where no call compiles."""
        if self.compile_key is None or problem.operation != self.operation:
            return ""
        return repr(self.compile_key(next(iter(self.problems_of_module(problem)))))

    def library_of(self, problem: Problem) -> tuple[str, bool]:
        """Name what is compiled for this problem's module, and say whether it exists."""
        if self.library is not None:
            return self.library(next(iter(self.problems_of_module(problem))))
        return f"{self.name} {self.module_of(problem)}", False

    def __call__(self, inputs: Any) -> Any:  # noqa: ANN401  each operation has its own record
        """Run on the inputs of one problem."""
        return self.function(inputs)

    def refusal(
        self, problem: Problem, target: Target, *, without_rules: Collection[str] = ()
    ) -> Refusal | None:
        """Return why this problem is not for this implementation; None if it is.

        Args:
            problem: the call.
            target: the machine.
            without_rules: ids of support rules that are not asked, or ``EVERY_RULE``.
        """
        if problem.operation != self.operation:
            reason = f"{self.name} implements {self.operation}, not {problem.operation}"
            return Refusal(reason, "operation", problem.operation)
        if (of_features := self._refusal_of_features(problem)) is not None:
            return of_features
        answer = True if self.supports is None else self.supports(problem, target)
        if answer is not True:
            if isinstance(answer, Refusal) and answer:
                return answer
            return Refusal(answer or f"{self.name}.supports said no", "supports")
        if not self.backend_on(target) or EVERY_RULE in without_rules:
            return None
        # Imported when it is asked: a kernel that names no backend does not need `packaging`.
        from .gating import decide, load_rules

        book = load_rules().without(frozenset(without_rules)) if without_rules else None
        return decide(self.feature_of(problem, target), target, book=book).refusal

    def _refusal_of_features(self, problem: Problem) -> Refusal | None:
        for feature in drawn_features(problem):
            if feature not in self.features:
                reason = f"{self.name} does not name the feature {feature}"
                return Refusal(reason, "feature", feature)
        for feature, where in inexpressible(problem).items():
            if feature in self.features:
                return Refusal(f"{feature} is judged {where}", "feature", feature)
        return None

    def feature_of(self, problem: Problem, target: Target) -> Feature:
        """Return what the support rules are asked about a call of it on a machine."""
        from .gating.of_problem import feature_of

        asked = replace(problem, **self.ruled_as) if self.ruled_as else problem
        return feature_of(asked, self.backend_on(target), decodes=self.decodes)


def _of_type(kind: type, *more: None) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:  # noqa: ANN401  an option of any kind
        if isinstance(value, kind) or (value is None and more):
            return value
        raise TypeError

    return checked


def _callable(value: object) -> object:
    if value is None or callable(value):
        return value
    raise TypeError


def _names(value: Collection[str]) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise TypeError
    return frozenset(map(_of_type(str), value))


def _flag(value: object) -> bool:
    if (flag := flag_of(value)) is None:
        raise TypeError
    return flag


def _integer(value: int) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: float) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise TypeError
    return float(value)


def _pairs(value: Iterable[Any]) -> tuple[tuple[int, Arithmetic], ...]:
    arithmetic = _of_type(Arithmetic)
    return tuple((_integer(channels), arithmetic(wide)) for channels, wide in value)


def _lines_by_flag(value: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(_of_type(Mapping, None)(value) or {})
    if not all(ENGINE_LINE.search(_of_type(str)(line)) for line in found.values()):
        raise ValueError
    return found


_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "name": (_of_type(str), "str"),
    **dict.fromkeys(("features", "runs"), (_names, "a collection of names")),
    "provider": (_of_type(str, None), "str"),
    "backend": (lambda value: _of_type(str, None)(value) or "", "str"),
    "unset_flags": (_lines_by_flag, "a mapping of flags to an engine's FILE:LINE"),
    "ruled_as": (lambda value: dict(_of_type(Mapping, None)(value) or {}), "a mapping"),
    "arithmetic": (lambda value: _of_type(Arithmetic, None)(value) or Arithmetic(), "Arithmetic"),
    "wide_arithmetic": (_pairs, "pairs of a number of channels and an Arithmetic"),
    **dict.fromkeys(
        ("supports", "compile_key", "kernels", "library", "session", "chosen_backend"),
        (_callable, "callable"),
    ),
    **dict.fromkeys(("writes_out", "decodes"), (_flag, "True or False")),
    **dict.fromkeys(("tile", "split", "build_compilers"), (_integer, "int")),
    "build_minutes": (_number, "a number"),
}
"""Conversion of each option of an implementation, and what the option must be, for messages."""


def _converted(option: str, value: Any) -> Any:  # noqa: ANN401  an option of any kind
    if option not in _KINDS:
        return value
    convert, expected = _KINDS[option]
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        message = f"{option} is {value!r}; it must be {expected}"
        raise TypeError(message) from error


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in types of Python's own; refuse what reports would stumble over."""
    found = {option: _converted(option, value) for option, value in options.items()}
    name = found["name"]
    if not name.isprintable():
        message = f"name is {name!r}; it must hold no control characters"
        raise ValueError(message)
    if not name.strip():
        message = f"name is {name!r}; it must not be empty"
        raise ValueError(message)
    if ROUTES in found["features"]:  # the bound follows from the word
        found["arithmetic"] = replace(found["arithmetic"], routing="accumulate")
    return found


def implementation(
    operation: Operation,
    *,
    name: str,
    supports: Supports | None = None,
    features: Collection[str] = (),
    arithmetic: Arithmetic | None = None,
    wide_arithmetic: Sequence[tuple[int, Arithmetic]] = (),
    writes_out: bool = False,
    compile_key: CompileKey | None = None,
    kernels: Kernels | None = None,
    backend: str = "",
    build_ahead: bool | Literal["cpu", "cuda"] = False,
    build_minutes: float = 1.0,
    build_compilers: int = COMPILERS_A_BUILD,
    library: Library | None = None,
    tile: int = 0,
    split: int = 0,
    decodes: bool = False,
    session: Callable[[], Session] | None = None,
    provider: str | None = None,
    hidden_keys: Literal["any", "finite"] = "any",
    chosen_backend: Callable[[Target], str] | None = None,
    ruled_as: Mapping[str, Any] | None = None,
    unset_flags: Mapping[str, str] | None = None,
    runs: Collection[str] = (),
) -> Callable[[Callable[[Any], Any]], Implementation]:
    """Make an implementation of a function, for use as a decorator.

    Args:
        operation: one of ``OPERATIONS``. The function takes one record whose attributes are the
            oracle's parameters and ``out_dtype`` (``PagedAttentionInputs`` and its siblings in
            ``kernelproof.impl``); it returns what the oracle returns: AttentionOutput or a tuple
            (out, lse) with a natural-log lse that may be None; (k_cache, v_cache) for
            append_paged_kv; a BatchMetadata, or any object with its attributes, for
            build_metadata; Routing or a tuple (topk_ids, topk_weights) for route; a tensor
            [tokens, hidden] for moe.
        name: how reports call it; unique within a run.
        supports: ``supports(problem, target)`` gives True, or the reason why not. It must be a
            pure function: the suite also probes it to learn which problems to draw. Like
            ``compile_key`` and ``kernels`` it is asked about problems of ``operation`` only.
        features: optional features that it has, of ``FEATURES``.
        arithmetic: what it rounds where; the error bound follows. float32 throughout if None.
        wide_arithmetic: where another kernel rounds otherwise: from how many channels of the values
            on it does, in ascending order, and what it rounds.
        writes_out: whether it writes into ``inputs.out`` and ``inputs.lse`` (moe: ``inputs.out``),
            which are poisoned and fenced. It may then return None. If it writes no LSE, it returns
            ``(inputs.out, None)``.
        compile_key: gives the key of what a first call compiles for a problem: a module, or a
            kernel of one; that call's time does not count against the deadline.
        kernels: where a module has several kernels, among which lengths and counts choose: gives
            for a problem others that between them call all of its module's. The first one's key
            names the module: it must be the same for each problem of it.
        backend: what the support rules (``kernelproof.impl.gating``) call it, one of
            ``backends.BACKENDS``. Where it is given, the rules decide what ``supports`` lets pass,
            and all of it where there is no ``supports``; a kernel that no rule is about leaves
            it empty.
        build_ahead: its modules take long to compile: the suite chooses a few of them that cover
            pairs of what they differ in, and builds these in parallel before the first problem.
            ``"cuda"``: only there.
        build_minutes: minutes that one processor core takes to build such a module, roughly. A
            profile builds fewer of the modules that take many.
        build_compilers: number of compilers that building one module keeps busy, if it may.
        library: gives for a problem the name of what is compiled for its module, and whether that
            exists on this machine. Implementations with the same name share it; without it, none
            does.
        tile: most keys that one iteration of its loop over keys handles; 0 if unknown. Problems
            with more keys cross a tile's edge.
        split: keys of the shortest part of a request that it reduces by itself and merges with
            other parts; 0 if it does not split, or unknown. Problems with twice as many keys are
            split.
        decodes: its calls are decodes to the support rules, whatever number of query tokens a
            request has; without it, several tokens are a prefill's.
        session: makes a ``Session``, where planning and running are calls of their own; it may be
            a ``GraphSession``, a ``ScratchSession`` and an ``ExactSession`` besides.
        provider: the distribution that it comes from, whose version decides what it does, such as
            "flashinfer-python" for an adapter to it. If None, the one that installed the
            function's module, or "" where there is none.
        hidden_keys: what pages of a cache may hold that lie behind every query's window: ``"any"``
            thing, NaN included, as engines that free and reuse them leave it; ``"finite"`` where
            the kernel multiplies it by 0. Every report says so.
        chosen_backend: names the backend on a machine, where a call chooses it by the chip; then
            ``backend`` stays empty.
        ruled_as: fields of a problem of which the support rules are asked another value: the one
            that the library is called with, such as ``{"q_dtype": ""}`` where queries in FP8 are
            handed over in 16 bits.
        unset_flags: constexprs of a Triton kernel that no caller sets in such calls, each with the
            engine's line that shows it: ``{"USE_TD": "vllm/v1/attention/triton_attn.py:123"}``. A
            second share of the kernel's lines leaves out what needs them, and so does the floor;
            the first share counts all.
        runs: names of its kernels, without arguments and those of templates. A call that launches
            others, and none of these, is a FAIL of kind backend: on a GPU, and in Triton's
            interpreter. If there are none, its ``backend`` says what kernels it has.

    Raises:
        TypeError: an option of another type.
        ValueError: an empty name, an unknown operation, feature, backend or ``hidden_keys``, a
            backend twice, or no number of compilers, minutes or keys.
    """
    given = _checked(locals())
    tile, split, build_compilers = given["tile"], given["split"], given["build_compilers"]
    build_minutes, features = given["build_minutes"], given["features"]
    if operation not in OPERATIONS:
        meant = did_you_mean(str(operation), OPERATIONS)
        message = f"operation is {operation!r}; {meant}it must be one of {', '.join(OPERATIONS)}"
        raise ValueError(message)
    if backend and backend not in BACKENDS:
        meant = did_you_mean(str(backend), BACKENDS)
        message = f"backend is {backend!r}; {meant}it must be one of {', '.join(BACKENDS)}"
        raise ValueError(message)
    if backend and chosen_backend:
        message = f"backend is {backend!r} and there is a chosen_backend; name one of the two"
        raise ValueError(message)
    if build_ahead not in (False, True, "cpu", "cuda"):
        message = f"build_ahead is {build_ahead!r}; it must be True, False, 'cpu' or 'cuda'"
        raise ValueError(message)
    if hidden_keys not in HIDDEN_KEYS:
        message = f"hidden_keys is {hidden_keys!r}; it must be one of {', '.join(HIDDEN_KEYS)}"
        raise ValueError(message)
    if build_compilers < 1 or not 0 < build_minutes < math.inf:
        message = (
            f"build_compilers is {build_compilers} and build_minutes {build_minutes}; they must be "
            "at least 1, and above 0"
        )
        raise ValueError(message)
    if tile < 0 or split < 0:
        message = f"tile is {tile} and split {split}; they must be numbers of keys, or 0"
        raise ValueError(message)
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        meant = did_you_mean(str(unknown[0]), FEATURES)
        page = "`kernelproof list --markdown fields.md` writes what each of them means"
        message = f"features names {unknown}; {meant}{page}"
        raise ValueError(message)

    given["declared_provider"] = given.pop("provider")

    def decorate(function: Callable[[Any], Any]) -> Implementation:
        return Implementation(function=function, **given)

    return decorate
