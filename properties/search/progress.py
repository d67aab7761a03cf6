"""What a run says while it goes on, to whoever shows it."""

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
        """Take note that all implementations were surveyed, and of the modules that were chosen.

        The reports of those that cannot be judged say why. Where one takes long to survey, the
        call does not wait for it.
        """

    def building(self, name: str, done: int, modules: int) -> None:
        """Take note of how many modules of an implementation are built, of how many."""

    def prepared(self, report: ImplementationReport, planned: int) -> None:
        """Take note of an implementation that is about to be judged on ``planned`` problems."""

    def skipped(self, report: ImplementationReport) -> None:
        """Take note of an implementation that cannot be judged here; the report says why."""

    def judged(self, name: str, count: int) -> None:
        """Take note of ``count`` judged problems."""

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        """Take note of a law that has ended."""

    def failing(self, name: str, law: str, verdict: Verdict) -> None:
        """Take note of a failure that is confirmed, and will take long to be made smaller."""

    def found(self, finding: Finding) -> None:
        """Take note of a finding."""
