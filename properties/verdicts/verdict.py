"""What a law says of an implementation on one problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...impl.gpu.kernel_lines import FileRecord

Status = Literal[
    "PASS", "FAIL", "HANG", "CRASH", "REJECTED", "UNSUPPORTED", "FLAKY", "KNOWN", "LOST"
]
BAD: tuple[Status, ...] = ("FAIL", "HANG", "CRASH", "REJECTED")
"""Statuses of a verdict that Hypothesis shrinks."""
FAIL_KINDS = (
    "numeric",
    "nan",
    "shape",
    "dtype",
    "device",
    "mutated_input",
    "wrote_outside",
    "read_outside",
    "nondeterministic",
    "insensitive",
    "host_sync",
    "backend",
)

MOST_FAULTS = 2
"""Most faults that explain a finding alike and are named; of more, none is."""
EXACTLY = "exactly"
"""The bound of an element of which every bit counts."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one law on one problem.

    Attributes:
        status: see the design's vocabulary.
        kind: one of ``FAIL_KINDS`` for a FAIL; the exception, signal or exit code of a CRASH; the
            code of the ``Refusal`` of an UNSUPPORTED.
        message: one or a few sentences with the evidence.
        ratio: the worst error over its bound, where a law measured one.
        vacuous: the law had nothing to judge on this problem, so it does not count as judged.
        seconds: time spent inside the implementation, compiling apart.
        calls: number of calls of the implementation in that time.
        waited: seconds that a problem waited for memory of the GPU that others use.
        trace: stack or stderr, where a process died or an exception came.
        about: the problem, as JSON, that the law made of the given one, where the implementation is
            wrong on that one.
        element: one wrong element of a FAIL, as text: ``where`` it stands, what was ``got`` and
            what ``expected``, and its ``bound``, ``EXACTLY`` where every bit counts.
        error_map: the worst error over its bound by token and head of a FAIL that compared
            elements, see ``error_map``; infinite for NaN, and where every bit counts.
        worst: up to ten wrong elements of a FAIL, the worst first: the same four as text, and
            ``at``, the element's place by axis (request, token, head, page, channel).
        ignored: the options that a FAIL of kind insensitive shows to be ignored: the answer stays
            the same, and is right where they are off.
        compared: the calls that a finding compared, where they are not the given problem's: their
            number, their ``problem`` as JSON, and their ``changes`` in words.
        at_call: number of calls made when a FAIL was found.
        interpreted: Triton's interpreter ran kernels of it, on a CPU.
        printed: the end of what the process of a finding printed in that case.
        faults: the classic faults, in words, each of which explains a FAIL; the message names them
            where they are few.
        kernels: what ran of the Triton kernels in each file, see ``kernel_lines``.
        launched: names of the kernels that its calls launched, see ``launches``.
    """

    status: Status
    kind: str = ""
    message: str = ""
    ratio: float | None = None
    vacuous: bool = False
    seconds: float = 0.0
    calls: int = 0
    trace: str = ""
    about: Mapping[str, Any] | None = None
    element: Mapping[str, str] | None = None
    error_map: Mapping[str, Any] | None = None
    worst: Sequence[Mapping[str, Any]] = ()
    printed: str = ""
    ignored: Sequence[str] = ()
    faults: Sequence[str] = ()
    interpreted: bool = False
    compared: Sequence[Mapping[str, Any]] = ()
    at_call: int = field(default=0, compare=False)
    waited: float = field(default=0.0, compare=False)
    kernels: Mapping[str, FileRecord] = field(default_factory=dict, compare=False)
    launched: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def bad(self) -> bool:
        """Whether this is a finding."""
        return self.status in BAD

    def is_like(self, other: Verdict) -> bool:
        """Whether another one speaks of the same bug; a HANG's kind is where its process began."""
        same_kind = self.kind == other.kind or self.status == "HANG" or not self.bad
        return self.status == other.status and same_kind

    def explained_by(self, faults: Sequence[str]) -> Verdict:
        """Return the verdict whose message names these faults, and none that it named before."""
        message = self.message.removesuffix(_named(self.faults)) + _named(faults)
        return replace(self, message=message, faults=faults)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        optional = (
            "about", "element", "error_map", "worst", "printed", "ignored", "interpreted", "waited",
            "compared", "at_call", "kernels", "faults", "launched",
        )  # fmt: skip
        return {name: value for name, value in vars(self).items() if value or name not in optional}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Read back what ``to_json`` wrote."""
        return cls(**data)


def _named(faults: Sequence[str]) -> str:
    named = 1 <= len(faults) <= MOST_FAULTS
    return f"; one fault explains all wrong elements: {', or '.join(faults)}" if named else ""


PASS = Verdict("PASS")
VACUOUS = Verdict("PASS", vacuous=True)
