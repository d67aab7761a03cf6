"""The events of a run, for the code that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..findings.report import Finding, ImplementationReport, LawReport
from ..verdicts.verdict import Verdict
from .module_plan import Chosen


class Progress:
    """Receives what a run does, for display. The methods are called from several threads."""

    def planned(
        self, reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen]
    ) -> None:
        """Receive the modules that were chosen, once all implementations were surveyed.

        The reports of those that cannot be judged say why. Where one takes long to survey, the
        call does not wait for it.
        """

    def building(self, name: str, done: int, modules: int) -> None:
        """Receive how many modules of an implementation are built, of how many."""

    def prepared(self, report: ImplementationReport, planned: int) -> None:
        """Receive an implementation that is about to be judged on ``planned`` problems."""

    def skipped(self, report: ImplementationReport) -> None:
        """Receive an implementation that cannot be judged here; the report says why."""

    def judged(self, name: str, count: int) -> None:
        """Receive a number of judged problems."""

    def law_begun(self, name: str, law: str) -> None:
        """Receive a search under a law that begins: in a first module, or in all."""

    def law_ended(self, name: str, law: str) -> None:
        """Receive the end of such a search."""

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        """Receive the result of a law, in all modules."""

    def failing(self, name: str, law: str, verdict: Verdict) -> None:
        """Receive a confirmed failure whose shrinking takes long, for each try costs a process."""

    def found(self, finding: Finding) -> None:
        """Receive a finding."""
