"""Names of the implementations of one run, none of which is another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import ImplementationReport


class Names:
    """The names of implementations while a run goes on, each of them of one implementation."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    def tell(self, name: str, reference: str) -> str:
        """Return the name; with where it comes from, if another implementation has it already."""
        owner = self._owners.setdefault(name, reference)
        return name if owner == reference else with_reference(name, reference)


def with_reference(name: str, reference: str) -> str:
    """Return the name of an implementation that shares it with another."""
    return f"{name} ({reference})"


def without_reference(name: str, reference: str) -> str:
    """Return the name that an implementation was declared with, of one that may have more."""
    return name.removesuffix(with_reference("", reference))


def shared_names(named: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names that several implementations have, of pairs of a name and MODULE:NAME."""
    owners: dict[str, set[str]] = {}
    for name, reference in named:
        owners.setdefault(name, set()).add(reference)
    return {name for name, of in owners.items() if len(of) > 1}


def tell_apart(reports: Sequence[ImplementationReport]) -> None:
    """Add its MODULE:NAME to the name of each report of one machine whose name others have too.

    While a run goes on, the first of them has the plain name, and which one is first is chance.
    """
    shared = shared_names((each.declared_name, each.reference) for each in reports)
    for report in reports:
        if (own := report.declared_name) in shared:
            report.name = with_reference(own, report.reference)
            for finding in report.findings:
                finding.implementation = report.name
