"""What a pytest run consists of: an item for each implementation, law and configuration.

Implementations are asked first, by an isolated worker, never in the process that runs pytest. What
they say is JSON-able: under xdist one process asks, and the others must come to the same items in
the same order.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ...impl import ImplementationNotFoundError, Target
from ...impl.registry import resolve_name
from ...impl.targets.registrations import Registration
from ..findings.corpus import open_corpus, read_corpus
from ..findings.ledger import Ledger, LedgerError
from ..findings.names import shared_names, with_reference
from ..findings.not_run import Reason, reason_of
from ..findings.report import ImplementationReport
from ..isolation.workers import Deadlines, Worker
from ..laws import laws_of
from ..search.candidate import Candidate
from ..search.costs import CostsError, keep_costs, read_costs
from ..search.preparation import survey, usable
from ..space.axes import Axes
from ..space.profiles import Cost, Profile
from ..space.restrictions import WHOLE_SPACE, Only
from ..worker.requests import Address, HarnessError
from .xdist_lock import SuiteRefusedError

LEAST_OF_A_PART = 2
"""Fewest problems of a law for each part of what an implementation supports."""
COMPILED = ("dtype", "head_dims", "head_dim")
"""Axes whose values make a kernel compile anew, coarsest first."""


@dataclass(frozen=True)
class Configuration:
    """Values of axes that make a kernel compile anew: fixed in one item, all others are drawn.

    Attributes:
        fixed: value by axis; nothing for an implementation that declares no ``compile_key``.
    """

    fixed: Mapping[str, str | int | tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the end of an item's id, such as ``bfloat16-192x128``."""
        return "-".join(_word(value) for value in self.fixed.values())


EVERYTHING = Configuration()


@dataclass(frozen=True)
class Surveyed:
    """What is known of an implementation before it is judged.

    Attributes:
        name: the name as it was asked for; ids begin with it.
        reference: MODULE:NAME.
        label: its own name.
        operation: what it implements; empty if that could not be found out.
        error: why it cannot be imported or asked.
        left_out: whether that is said, and costs the run nothing: a distribution registers it.
        unsupported: why the rules refuse it where it supports nothing here.
        reason: code of that refusal, and what is needed.
        configurations: the configurations that its items are restricted to, one by one.
        stored: case files that are replayed first.
    """

    name: str
    reference: str
    label: str = ""
    operation: str = ""
    error: str = ""
    left_out: bool = False
    unsupported: str = ""
    reason: Reason = ("", "")
    configurations: tuple[Configuration, ...] = (EVERYTHING,)
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What is known of all implementations of a run.

    Attributes:
        target: where they are to run, see ``Target``.
        seed: the seed of every search.
        implementations: the implementations in the order of their items.
    """

    target: Mapping[str, Any]
    seed: int
    implementations: tuple[Surveyed, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Survey:
        """Read back what ``to_json`` wrote."""
        return msgspec.convert(data, cls)


@dataclass(frozen=True)
class Item:
    """One test: a law's search within a configuration, or the replay of a stored case.

    Attributes:
        implementation: the implementation that it belongs to.
        law: the law to be judged; empty where the implementation could not even be asked.
        configuration: the configuration within which problems are drawn.
        case: the file to replay instead of a search.
    """

    implementation: Surveyed
    law: str = ""
    configuration: Configuration = EVERYTHING
    case: str = ""

    @property
    def id(self) -> str:
        """Return what selects this item on pytest's command line."""
        words = [self.law, self.configuration.id]
        if self.case:
            stem = Path(self.case).stem
            words = ["corpus", stem.removeprefix(f"{self.implementation.label}-")]
        return "-".join(filter(None, [self.implementation.name, *words]))


def items_of(survey: Survey) -> list[Item]:
    """Return all items of a run: stored cases first, for they once failed."""
    found = [Item(each, case=case) for each in survey.implementations for case in each.stored]
    for each in survey.implementations:
        found += _searches(each)
    return found


def _searches(surveyed: Surveyed) -> Iterable[Item]:
    if surveyed.error:
        return [Item(surveyed)]
    return [
        Item(surveyed, law.name, configuration)
        for law in laws_of(surveyed.operation)
        for configuration in surveyed.configurations
    ]


def _word(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(set(value)) == 1 else "x".join(map(str, value))


@dataclass(frozen=True)
class Choices:
    """What was asked for on pytest's command line.

    Attributes:
        implementations: MODULE:NAME or registered names; everything registered if none.
        operation: the operation of plain functions.
        profile: how hard to look.
        device: ``"cpu"`` or ``"cuda"``.
        seed: the seed of the search.
        expectations: the ledger, see ``load_ledger``.
        cases: folder of cases that are replayed, and to which findings are written.
        examples: where failing examples are shared, see ``open_examples``.
        only: the part of the space of problems that is searched.
        costs: file of cost classes; they are measured if None.
        allow_incomplete: whether a law that ran out of time below its floor is skipped, not failed.
        distrust: whether processes in which no implementation is loaded judge.
    """

    implementations: tuple[str, ...]
    operation: str | None
    profile: Profile
    device: str
    seed: int
    expectations: str | None
    cases: Path
    examples: str = ""
    only: Only = WHOLE_SPACE
    costs: Path | None = None
    allow_incomplete: bool = False
    distrust: bool = False

    def read_costs(self) -> dict[str, Cost]:
        """Read the cost classes that were given.

        Raises:
            CostsError: see ``costs.read_costs``; the option is named.
        """
        try:
            return read_costs(self.costs, self.profile, self.device) if self.costs else {}
        except CostsError as error:
            message = f"--costs {error}"
            raise CostsError(message) from error

    def keep_cost(self, candidate: Candidate) -> None:
        """Write the cost class of an implementation beside the cases."""
        costs = {candidate.name: candidate.cost}
        keep_costs(self.cases, self.profile, self.device, costs)


def take_survey(worker: Worker, choices: Choices, ledger: Ledger) -> Survey:
    """Ask about every implementation.

    Raises:
        SuiteRefusedError: there is no such device, or an implementation that was asked for by name
            cannot be found, imported or asked.
    """
    target = _target(worker, choices)
    seed = choices.seed
    if choices.profile.explore and not seed:
        seed = secrets.randbelow(2**31)
    broken: list[Registration] = []
    names = list(choices.implementations)
    if not names:
        names, broken = usable(lambda: nullcontext(worker), choices.device)
    found = []
    for name in dict.fromkeys(names):
        surveyed = _ask(worker, name, choices, ledger, target)
        if surveyed.error and choices.implementations:
            why = surveyed.error.strip().splitlines()[0]
            message = f"--impl {name}: {why}"
            raise SuiteRefusedError(message)
        found.append(surveyed)
    shared = shared_names((each.label, each.reference) for each in found if each.label)
    found = [
        replace(each, label=with_reference(each.label, each.reference))
        if each.label in shared
        else each
        for each in found
    ]
    found += [
        Surveyed(each.name, each.reference, error=each.text, left_out=True) for each in broken
    ]
    return Survey(target.to_json(), seed, tuple(found))


def _target(worker: Worker, choices: Choices) -> Target:
    """Describe the device as a worker sees it: here, nothing may touch it."""
    outcome = worker.run({"task": "target", "device": choices.device}, Deadlines(run=60.0))
    result = outcome.result or {}
    if "error" in result:
        raise SuiteRefusedError(str(result["error"]))
    if outcome.status != "done":
        why = (outcome.detail or outcome.kind).strip().splitlines()[-1]
        message = f"--device {choices.device}: {why}"
        raise SuiteRefusedError(message)
    return Target(**result)  # type: ignore[arg-type]  # what Target.to_json gave


def _ask(worker: Worker, name: str, choices: Choices, ledger: Ledger, target: Target) -> Surveyed:
    try:
        reference = resolve_name(name)
    except ImplementationNotFoundError as error:
        return Surveyed(name, name, error=error.why)
    address = Address(reference, choices.operation, choices.device)
    report = ImplementationReport(name, reference)
    try:
        axes = survey(worker, address, choices.profile.max_work, report, choices.only)
    except HarnessError as error:
        return Surveyed(name, reference, error=str(error))
    parts: tuple[Configuration, ...] = (EVERYTHING,)
    if axes is not None and report.declared["compiles"] and not report.declared["build_ahead"]:
        parts = configurations(axes, choices.profile)
    return Surveyed(
        name,
        reference,
        label=report.name,
        operation=report.operation,
        error=report.error,
        unsupported=report.refusal or "",
        reason=reason_of(report.refusal) if report.refusal else ("", ""),
        configurations=parts,
        stored=tuple(map(str, _stored(reference, report.name, choices, ledger, target))),
    )


def configurations(axes: Axes, profile: Profile) -> tuple[Configuration, ...]:
    """Split what an implementation supports by what makes it compile anew.

    By as many axes as leave each part a few problems of a profile: a first call costs a compile
    that a quick look cannot afford for every head dim.
    """
    names = [name for name in COMPILED if name in axes.values]
    while True:
        parts = list(itertools.product(*(axes.values[name] for name in names)))
        if len(names) < 2 or len(parts) * LEAST_OF_A_PART <= profile.problems:  # noqa: PLR2004
            return tuple(Configuration(dict(zip(names, part, strict=True))) for part in parts)
        names.pop()


def _stored(
    reference: str, label: str, choices: Choices, ledger: Ledger, target: Target
) -> list[Path]:
    """Find the cases of an implementation: its own folder's, the ledger's, the shipped ones."""
    entries = [
        entry
        for entry in ledger.entries
        if entry.applies_to(label, target) and (choices.profile.explore or not entry.quarantine)
    ]
    try:
        own = read_corpus(choices.cases)
        shipped = open_corpus(
            ledger, forget=choices.expectations == "none", explore=choices.profile.explore
        )
    except LedgerError as error:
        message = f"--kernelproof-cases: {error}"
        raise SuiteRefusedError(message) from error
    paths = [
        *(case.path for case in own if case.is_of(reference)),
        *(entry.case for entry in entries if entry.case),
        *(case.path for case in shipped if case.is_of(reference)),
    ]
    found: dict[Path, Path] = {}
    for path in paths:
        found.setdefault(path.resolve(), path)
    return list(found.values())
