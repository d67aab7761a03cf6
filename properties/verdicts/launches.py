"""Which kernels a call under test launched, by name.

On a GPU torch's profiler names them (CUPTI), in one call of each specialisation: what is compiled
for a step of it, its optional features and its size. A call of Triton kernels has the
specialisation of what Triton launched, and their names come from there too. Whatever the profiler
fails in is a sentence of the report, and never a verdict.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

from ...impl import Implementation, Target
from ...impl.features import drawn_features
from ...impl.gpu import launch_names
from ...impl.targets.exceptions import message_of
from ...impl.targets.kernel_names import Claim, Unclaimed, kernels_in, unclaimed
from ...reference import Problem

SIZE_BASE = 4
"""Ratio between the work of two neighbouring sizes."""
MOST_CHARACTERS = 4_000
"""Most characters of a kernel's name that are kept: CUTLASS has longer ones."""
MOST_KERNELS = 200
"""Most kernels of a call that are kept."""
MOST_TRIES = 3
"""Calls of a specialisation in which names are looked for, where none is seen."""
_QUIET = {"KINETO_LOG_LEVEL": "99", "TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""Without these the profiler writes a line each time, and CUPTI ends and begins anew, which calls
that replay a recorded graph do not survive everywhere."""
CUDA = "CUDA"
"""The name of the device of what a GPU did, not the host."""
OPERATIONS_THAT_ATTEND = ("paged_attention", "ragged_attention")

Profiled = AbstractContextManager[list[str]]
"""A context whose list holds the names of all kernels once it has ended."""


class Specialised(Protocol):
    """What a call compiled or tuned in passing, see ``specialising.Call``."""

    tuned: bool


Told = Callable[[Specialised], None]
"""Is told, at the end of a call, what it has compiled."""


@contextmanager
def profiled() -> Iterator[list[str]]:
    """Name the kernels that a GPU runs within a with block; the list is filled at its end.

    Raises:
        Exception: whatever the profiler raises, before the block or behind it.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    names: list[str] = []
    torch.cuda.synchronize()  # what makes the tensors of the call is no part of it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile: Any = torch.autograd.profiler.profile(
            use_cpu=False, use_device="cuda", use_kineto=True
        )
        profile.__enter__()
    try:
        yield names
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profile.__exit__(None, None, None)
        names += [
            event.name()
            for event in profile.kineto_results.events()
            if event.device_type().name == CUDA
        ]


@dataclass
class Launches:
    """Names the kernels of calls, those of each specialisation once.

    Attributes:
        claim: what the implementation says of them.
        module_of: names what is compiled for a problem.
        profiler: names kernels; None where nothing but Triton can.
        known: specialisations whose kernels are known, and are as claimed.
        calls: those whose kernels were named now, as JSON, by specialisation.
        called: specialisations of all calls.
        seconds: seconds that it took.
        why: why the profiler cannot be used; empty if it can.
        wrong: the first call whose kernels are not what is claimed.
    """

    claim: Claim
    module_of: Callable[[Problem], str]
    profiler: Callable[[], Profiled] | None = None
    known: set[str] = field(default_factory=set)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    called: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0
    why: str = ""
    wrong: Unclaimed | None = None
    _tried: dict[str, int] = field(default_factory=dict)
    _learned: set[str] = field(default_factory=set)

    def begin(self, known: Collection[str]) -> None:
        """Forget the calls of an earlier case."""
        self.known.update(known)
        self._learned.clear()
        self.calls, self.called, self.seconds, self.wrong = {}, {}, 0.0, None

    def to_json(self) -> dict[str, Any]:
        """Return what was seen in this case as JSON; nothing where nothing was."""
        if not (self.called or self.why):
            return {}
        return {
            "calls": list(self.calls.values()),
            "called": list(self.called),
            "known": sorted(self._learned),
            "seconds": self.seconds,
            "why": self.why,
        }

    @contextmanager
    def of(self, step: str, problem: Problem) -> Iterator[Told]:
        """Name the kernels of a call that is made, and waited for, within a with block.

        Yields:
            What is to be told of the call, at its end, what it has compiled; a call that fails ends
            without.
        """
        about = _about(step, problem, self.module_of)
        key = _digest(about)
        profile = self._start(key)
        launch_names.begin()
        ended: list[Specialised] = []
        try:
            yield ended.append
        finally:
            begun = perf_counter()
            names = self._stop(profile)
            if ended and not ended[0].tuned:  # what it tunes by is no part of it
                self._note(key, about, names)
            self.seconds += perf_counter() - begun

    def _start(self, key: str) -> tuple[Profiled, list[str]] | None:
        if self.profiler is None or self.why or key in self.known:
            return None
        if self._tried.get(key, 0) >= MOST_TRIES:
            return None
        begun = perf_counter()
        self._tried[key] = self._tried.get(key, 0) + 1
        try:
            profile = self.profiler()
            return profile, profile.__enter__()
        except Exception as error:  # noqa: BLE001  of CUPTI, of whatever release
            self.why = f"torch's profiler raised {type(error).__name__}: {message_of(error)}"
            return None
        finally:
            self.seconds += perf_counter() - begun

    def _stop(self, profile: tuple[Profiled, list[str]] | None) -> list[str]:
        if profile is None:
            return []
        try:
            profile[0].__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001  as above
            # Where the GPU has faulted, the call has failed, not the profiler.
            if not isinstance(error, torch.AcceleratorError):
                self.why = f"torch's profiler raised {type(error).__name__}: {message_of(error)}"
            return []
        return profile[1]

    def _note(self, key: str, about: dict[str, Any], names: Sequence[str]) -> None:
        """Note the kernels of a call that has ended."""
        jitted = launch_names.launched()
        # Of Triton, what differs is what it has compiled.
        compiled = {name: about[name] for name in ("step", "module")}
        own = _digest({**compiled, "triton": sorted(jitted)}) if jitted else key
        found = kernels_in([*names, *(name for name, _ in jitted if name not in names)])
        kernels = [name[:MOST_CHARACTERS] for name in found[:MOST_KERNELS]]
        if not kernels and self.profiler is None:
            return
        self.called[own] = None
        if own in self.known and not names:
            return
        if names:
            self._tried.pop(key, None)
        elif not kernels and (tried := self._tried.get(key, 0)) < MOST_TRIES:
            if tried and not self.why:  # none was seen: another call is tried, which may not come
                self.calls.setdefault(own, {**about, "id": own, "kernels": []})
            return
        self.calls[own] = {**about, "id": own, "kernels": kernels}
        wrong = unclaimed(self.claim, kernels, launch_names.ever())
        if wrong is None:
            learned = {own, key} if names or not kernels else {own}
            self.known |= learned
            self._learned |= learned
        else:
            self.wrong = self.wrong or wrong


def _about(step: str, problem: Problem, module_of: Callable[[Problem], str]) -> dict[str, Any]:
    """Return what a call is, as far as kernels differ by it."""
    module = ""
    with suppress(Exception):  # a key that raises is found elsewhere
        module = module_of(problem)
    return {
        "step": step,
        "module": module,
        "features": sorted(drawn_features(problem)),
        "size": int(math.log(max(problem.work, 1), SIZE_BASE)),
    }


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:10]


def claim_of(implementation: Implementation, target: Target) -> Claim:
    """Return what an implementation says of the kernels that its calls launch."""
    return Claim(
        implementation.backend_on(target),
        implementation.compiler,
        implementation.runs,
        implementation.operation in OPERATIONS_THAT_ATTEND,
    )


def launches_of(implementation: Implementation, target: Target) -> Launches | None:
    """Return what names the kernels of an implementation's calls; None where nothing can.

    On a CPU these are the kernels that it names itself, in Triton's interpreter.
    """
    if target.device != "cuda" and not implementation.runs:
        return None
    profiler = profiled if target.device == "cuda" else None
    return Launches(claim_of(implementation, target), implementation.module_of, profiler)
