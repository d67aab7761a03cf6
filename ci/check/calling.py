"""``kernelproof.check``: what the command of that name does, for tests and notebooks."""

from __future__ import annotations

import inspect
import io
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fixtures.suggestions import did_you_mean
from ...impl import BUILT_IN, OPERATIONS, Implementation, find_implementation, implementation
from ...impl.protocol import Operation
from ...properties.findings.files import OutputError
from ...properties.findings.report import INTERRUPTED, Finding
from ...properties.isolation.process import end_servers
from ...properties.isolation.supervisor import SCRATCH
from ...properties.laws import find_law
from ...properties.space.profiles import PROFILES
from ..console.errors import CONFORMING, MachineError, UsageRefusedError
from ..console.lines import note
from ..console.outputs import Outputs
from ..console.rendering import render
from ..console.selection import check_implementations
from ..console.terminal import PLAIN_WIDTH, plain_console
from ..options import DEVICES, FOLDER
from ..reports.display import print_outline
from ..reports.html_report import MARKS, TONES
from ..reports.json_report import to_json
from ..reports.outline import filled, sized
from ..reports.run_outline import outline_of, print_summary
from ..reports.summary import WORDS, Summary, new_findings
from .carrying import CALLS, CarryError, reference_of, written
from .checking import Request, judge

USUAL: Operation = "paged_attention"
"""Operation of a plain function where none is named."""
WRONG = ("Verdict", "Errors", "New findings", "Incomplete")
"""Headings of the parts of a report that say why it is not conforming."""
CLAIMS = tuple(name for name in inspect.signature(implementation).parameters if name != "operation")
"""Options of ``implementation`` that a plain function may be given."""


class FindingsError(AssertionError):
    """A check that is not conforming; the message says what is wrong or missing."""


@dataclass(frozen=True, repr=False)
class Report:
    """What ``kernelproof.check`` has learned; as text it is what the command prints.

    Attributes:
        summary: the summary of the run, as all reports are made of it.
    """

    summary: Summary

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings that no ledger entry explains, one for each cause.

        Each has ``law``, ``problem``, ``verdict`` (with ``status``, ``kind`` and ``message``) and
        ``replay``, the command that judges its problem again.
        """
        reports = self.summary.report.implementations
        return tuple(cause.finding for each in reports for cause in new_findings(each))

    @property
    def verdict(self) -> str:
        """The verdict: "conforming", "nonconforming", "incomplete" or "error"."""
        return self.summary.verdict

    @property
    def exit_code(self) -> int:
        """The exit code of the command, 0 where nothing is wrong or missing."""
        return self.summary.code

    def raise_for_findings(self) -> None:
        """Raise unless the exit code is 0: what was not judged is no pass.

        Raises:
            AssertionError: the verdict, with what is wrong or missing.
        """
        __tracebackhide__ = True
        if self.exit_code != CONFORMING:
            text = io.StringIO()
            parts = outline_of(self.summary, whole=False)
            print_outline(plain_console(text), [part for part in parts if part.heading in WRONG])
            raise FindingsError(text.getvalue().strip())

    def to_json(self) -> dict[str, Any]:
        """Return what ``kernelproof check --json`` writes."""
        return to_json(self.summary)

    def __str__(self) -> str:
        """Return the lines that the command prints."""
        text = io.StringIO()
        print_summary(plain_console(text), self.summary)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        """Return the verdict."""
        return f"<kernelproof.Report {self.summary.sentence}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return render(
            "notebook.html.jinja",
            mark=MARKS[self.verdict],
            tone=TONES[self.verdict],
            verdict=WORDS[self.verdict],
            sentence=self.summary.sentence.removeprefix(f"{WORDS[self.verdict]}: "),
            outline=filled(outline_of(self.summary, whole=False))[1:],
            wrong=WRONG,
            shown=lambda text: sized(text, PLAIN_WIDTH),
        )


def check(
    fn: Callable[[Any], Any] | str,
    operation: Operation | None = None,
    profile: str = "quick",
    *,
    device: str = "cpu",
    seed: int = 0,
    laws: Sequence[str] = (),
    minutes: float | None = None,
    allow_incomplete: bool = False,
    reuse: bool = True,
    **claims: Any,  # noqa: ANN401  those of implementation
) -> Report:
    """Check an implementation against the laws, from a test or a notebook.

    It runs in processes of its own, as under ``kernelproof check``: a function of a module that can
    be imported by its name, any other by its source with all that it uses. What is found is kept
    in the folder ``.kernelproof``, so that its replay commands work. Progress goes to standard
    error. Ctrl-C ends the run and raises KeyboardInterrupt.

    Args:
        fn: a function of one record of inputs, plain or decorated by ``implementation``, or a name
            of ``kernelproof list``, or MODULE:NAME of something decorated.
        operation: the operation of a plain function; "paged_attention" if None.
        profile: "quick", "gate" or "nightly".
        device: "cpu" or "cuda".
        seed: the same one draws the same problems.
        laws: names of laws to run; all of the operation if empty.
        minutes: most minutes of the run; as for the command if None.
        allow_incomplete: whether too little that was judged is no failure.
        reuse: whether what passed in the last such check is not asked again, where nothing has
            changed since.
        claims: options of ``implementation`` for a plain function, such as ``supports=``.

    What MODULE:NAME stands for is imported in another process: where that fails, the verdict is
    "error".

    Raises:
        ValueError: an argument that names nothing, or a function that cannot be taken to another
            process; it is named.
        TypeError: a claim of another type, or one that does not exist.
        RuntimeError: the device is not there.
    """
    if Path(tempfile.gettempdir()).name.startswith(SCRATCH):
        message = (
            "kernelproof.check is called by a module that a worker of it imports: call it in a "
            'function, a test, or under `if __name__ == "__main__":`'
        )
        raise RuntimeError(message)
    laws = (laws,) if isinstance(laws, str) else tuple(laws or ())
    _refuse("operation", USUAL if operation is None else operation, OPERATIONS)
    _refuse("profile", profile, PROFILES)
    _refuse("device", device, DEVICES.choices)
    _check_numbers(seed, minutes)
    for name, value in (("allow_incomplete", allow_incomplete), ("reuse", reuse)):
        if not isinstance(value, bool):
            message = f"{name} is {value!r}; it must be True or False"
            raise ValueError(message)
    _check_laws(laws, _operation_of(fn, operation))
    try:
        reference, plain = _found(fn, operation, claims)
        request = Request(
            (reference,),
            profile,
            device,
            seed,
            jobs=None,
            modules=None,
            laws=laws,
            only=(),
            outputs=Outputs(),
            expectations=None,
            cases=FOLDER,
            command=f"kernelproof.check({reference!r}, {operation or USUAL!r}, {profile!r})",
            operation=plain,
            minutes=minutes,
            allow_incomplete=allow_incomplete,
            reuse=reuse,
            called=True,
        )
        summary = _judged(request)
    except (CarryError, UsageRefusedError, OutputError) as error:
        raise ValueError(str(error)) from None
    except MachineError as error:
        raise RuntimeError(str(error)) from None
    return Report(summary)


def _judged(request: Request) -> Summary:
    """Return the summary of a run; nothing is left of one that Ctrl-C has ended."""
    try:
        summary = judge(request)
    except KeyboardInterrupt:  # the second one
        end_servers()
        raise
    if summary.report.ended == INTERRUPTED:
        end_servers()
        raise KeyboardInterrupt
    return summary


def _refuse(name: str, value: object, known: Sequence[str] | dict[str, Any]) -> None:
    if not isinstance(value, str) or value not in known:
        meant = did_you_mean(str(value), known)
        message = f"{name} is {value!r}; {meant}it must be one of {', '.join(known)}"
        raise ValueError(message)


def _operation_of(fn: object, operation: Operation | None) -> str | None:
    """Return the operation of what is checked; None where only a worker knows it."""
    if isinstance(fn, str) and fn in BUILT_IN:
        fn = find_implementation(fn)
    if isinstance(fn, Implementation):
        return fn.operation
    return operation if isinstance(fn, str) else operation or USUAL


def _check_laws(names: Sequence[str], operation: str | None) -> None:
    try:
        laws = [find_law(str(name)) for name in names]
    except LookupError as error:
        message = f"laws: {error.args[0]}"
        raise ValueError(message) from None
    for law in laws:
        if operation is not None and operation not in law.operations:
            message = f"laws: {law.name} does not speak of {operation}"
            raise ValueError(message)


def _check_numbers(seed: int, minutes: float | None) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        message = f"seed is {seed!r}; it must be a number from 0 on"
        raise ValueError(message)
    number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
    if minutes is not None and not (number and 0 < minutes <= math.inf):
        message = f"minutes is {minutes!r}; it must be above 0"
        raise ValueError(message)


def _found(
    fn: Callable[[Any], Any] | str, operation: Operation | None, claims: dict[str, Any]
) -> tuple[str, str | None]:
    """Return how a worker finds what is checked, and the operation of a plain function.

    Raises:
        ValueError: it cannot be found, or is none.
        TypeError: it is nothing to call, or a claim does not fit.
    """
    for name in claims:
        if name not in CLAIMS:
            meant = did_you_mean(name, CLAIMS)
            message = f"check has no option {name!r}; {meant}claims are {', '.join(CLAIMS)}"
            raise TypeError(message)
    if isinstance(fn, (str, Implementation)):
        named = fn if isinstance(fn, str) else fn.name
        if claims:
            message = f"{named} is declared already: {next(iter(claims))} belongs there"
            raise TypeError(message)
        if isinstance(fn, str):
            check_implementations([fn])
            return fn, operation
        if operation not in (None, fn.operation):
            message = f"operation is {operation!r}, and {named} implements {fn.operation}"
            raise ValueError(message)
        return reference_of(fn) or written(fn, CALLS), None
    if not callable(fn):
        message = f"fn is {fn!r}; it must be a function, an implementation or a name"
        raise TypeError(message)
    if operation is None:
        operation = USUAL
        note(f"{getattr(fn, '__name__', fn)} is checked as {USUAL}: operation= names another one")
    if not claims and (reference := reference_of(fn)):
        return reference, operation
    name = str(getattr(fn, "__name__", type(fn).__name__))
    name = name.strip("<>")  # of a lambda
    return written(implementation(operation, **{"name": name, **claims})(fn), CALLS), None
