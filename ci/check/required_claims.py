"""The claims that --require-claims names: values that an earlier run wrote down as claimed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...impl.targets.data_files import read_json
from ...properties.findings.names import without_reference
from ...properties.findings.report import ImplementationReport, RunReport
from ..console.errors import UsageRefusedError
from ..reports.claims import LostClaim

FLAG = "--require-claims"
OF_THIS_RUN = ("only", "time", "module")
"""Codes of refusals of everything by the run's own options, which no implementation is to answer
for."""


@dataclass(frozen=True)
class ClaimedOnce:
    """What a file says of one implementation: the values that it claimed, by axis."""

    name: str
    declared_name: str
    reference: str
    claimed: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class RequiredClaims:
    """The claims of a file.

    Attributes:
        path: the path of the file.
        implementations: the implementations that it knows the claims of.
    """

    path: Path
    implementations: Sequence[ClaimedOnce]

    def lost(self, report: RunReport, *, gate: bool) -> list[LostClaim]:
        """Return the values that were claimed once and are refused by this run.

        Args:
            report: the report of the run.
            gate: whether the run is of everything that is registered, so that an implementation of
                the file that it lacks is lost too.
        """
        lost: list[LostClaim] = []
        found: list[ClaimedOnce] = []
        for each in report.implementations:
            if (once := self._once(each, report)) is not None:
                found.append(once)
                lost += _refused_now(once, each)
        every = gate or not found
        missing = [each for each in self.implementations if every and each not in found]
        if report.interrupted or any(not each.operation for each in report.implementations):
            missing = []  # what is called so is not known of all
        why = f"{self.path} has its claims, and it is not among what this run judged"
        return [*lost, *(LostClaim(each.name, "", "", why) for each in missing)]

    def _once(self, report: ImplementationReport, run: RunReport) -> ClaimedOnce | None:
        """Return what was claimed once of the same reference, or else under the same name.

        A name that others have too, here or in the file, tells nothing but of those whose
        references are new or gone.
        """
        same = [each for each in self.implementations if each.reference == report.reference]
        if len(same) > 1:  # on several chips
            same = [each for each in same if each.name == report.name]
        if same:
            return same[0]
        known = {each.reference for each in self.implementations}
        here = {each.reference for each in run.implementations}
        name = report.declared_name
        new = {each.reference for each in run.implementations if each.declared_name == name} - known
        named = [each for each in self.implementations if each.declared_name == name]
        gone = [each for each in named if each.reference not in here]
        return gone[0] if len(gone) == 1 == len(new) else None


def _refused_now(once: ClaimedOnce, report: ImplementationReport) -> list[LostClaim]:
    if report.error or (report.refusal and report.refusal.code in OF_THIS_RUN):
        return []
    space = report.claimed_space or {}
    lost = []
    for axis, values in once.claimed.items():
        refused = space[axis].refused if axis in space else {}
        for value in values:
            why = report.refusal or refused.get(value)
            if why:
                lost.append(LostClaim(report.name, axis, value, str(why)))
    return lost


def read_claims(path: Path) -> RequiredClaims:
    """Read the claims of a JSON report.

    Raises:
        UsageRefusedError: it cannot be read, or holds no claims.
    """
    data = read_json(path, lambda message: UsageRefusedError(f"{FLAG} {message}"))
    every = data.get("implementations") if isinstance(data, dict) else None
    if not isinstance(every, list) or not every:
        raise _unfit(path, "it has no list of implementations")
    found = [_claimed_once(path, index, each) for index, each in enumerate(every)]
    known = [each for each in found if each is not None]
    if not known:
        raise _unfit(path, "no implementation in it has a claimed_space")
    return RequiredClaims(path, known)


def _claimed_once(path: Path, index: int, data: object) -> ClaimedOnce | None:
    """Return the claims of one implementation; None where it has none, as it refused all."""
    where = f"implementations[{index}]"
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise _unfit(path, f"{where} has no name")
    space = data.get("claimed_space")
    if space is None:
        return None
    if not isinstance(space, dict):
        raise _unfit(path, f"{where}.claimed_space is not a table")
    claimed = {
        axis: _values(path, f"{where}.claimed_space.{axis}", each) for axis, each in space.items()
    }
    name, reference = data["name"], str(data.get("reference", ""))
    declared = data.get("declared_name") or without_reference(name, reference)
    return ClaimedOnce(name, str(declared), reference, claimed)


def _values(path: Path, where: str, data: Any) -> list[str]:  # noqa: ANN401  JSON
    values = data.get("claimed") if isinstance(data, dict) else None
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise _unfit(path, f"{where}.claimed is not a list of texts")
    return values


def _unfit(path: Path, why: str) -> UsageRefusedError:
    return UsageRefusedError(f"{FLAG} {path}: not the JSON report of a run: {why}")
