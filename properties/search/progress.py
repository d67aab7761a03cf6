"""What a run says while it goes on, to whoever shows it."""

from __future__ import annotations

from ..findings.report import Finding, ImplementationReport, LawReport


class Progress:
    """Receives what a run does, for display. The methods are called from several threads."""

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

    def found(self, finding: Finding) -> None:
        """Take note of a finding."""
