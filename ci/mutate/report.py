"""The results of a measurement with mutants: counts by operator and by law, survivors, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .judging import Answer, Clean, Judge
from .mutants import Mutant
from .operators import OPERATORS

STATUSES = ("refused", "unreached", "killed", "survived")
"""What may become of a mutant."""


@dataclass(frozen=True)
class Measurement:
    """What became of a sample of mutants.

    Attributes:
        judge: what judged them.
        profile: the profile, or ``tests``.
        made: the number of mutants that there are of the kernels that ran.
        idle: kernels of which no line ran, whose mutants are left out.
        clean: what the kernel as it is did.
        mutants: the sample.
        answers: the answer on each mutant, by its id.
        equivalents: an argument for each survivor that no input tells from the kernel, by its id.
    """

    judge: Judge
    profile: str
    made: int
    idle: Sequence[str]
    clean: Clean
    mutants: Sequence[Mutant]
    answers: Mapping[str, Answer]
    equivalents: Mapping[str, str]

    @property
    def judged(self) -> list[tuple[Mutant, Answer]]:
        """The mutants with an answer that counts."""
        found = [(each, self.answers.get(each.id)) for each in self.mutants]
        return [(each, answer) for each, answer in found if answer and answer.status in STATUSES]

    @property
    def errors(self) -> int:
        """How many mutants have no answer, though they were asked about."""
        return sum(answer.status == "error" for answer in self.answers.values())

    @property
    def survivors(self) -> list[Mutant]:
        """The mutants that survived."""
        return [each for each, answer in self.judged if answer.status == "survived"]

    def killed_of_reached(self, *, without_equivalents: bool = False) -> tuple[int, int]:
        """Return how many mutants were killed, of how many that were reached."""
        killed = sum(answer.status == "killed" for _, answer in self.judged)
        left = [
            each
            for each in self.survivors
            if not (without_equivalents and each.id in self.equivalents)
        ]
        return killed, killed + len(left)

    def counts(self, key: str) -> dict[str, dict[str, int]]:
        """Count what became of mutants, by a field of theirs."""
        found: dict[str, dict[str, int]] = {}
        for mutant, answer in self.judged:
            row = found.setdefault(getattr(mutant, key), dict.fromkeys(STATUSES, 0))
            row[answer.status] += 1
        return found

    @property
    def laws(self) -> dict[str, int]:
        """How many mutants each law killed, as the first one to do so."""
        killers = Counter(answer.law for _, answer in self.judged if answer.status == "killed")
        return dict(killers.most_common())

    @property
    def median_seconds(self) -> float | None:
        """Median seconds to the first finding of the killed mutants; None where none was killed."""
        killed = [answer.seconds for _, answer in self.judged if answer.status == "killed"]
        return median(killed) if killed else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        kernels = self.judge.kernels
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "implementation": kernels.name,
            "package": kernels.title,
            "files": list(kernels.files),
            "profile": self.profile,
            "tests": self.judge.tests,
            "laws": list(self.judge.laws),
            "seed": self.judge.seed,
            "made": self.made,
            "not_run": list(self.idle),
            "errors": self.errors,
            "left_out_laws": self.clean.without,
            "killed_of_reached": self.killed_of_reached(),
            "without_equivalents": self.killed_of_reached(without_equivalents=True),
            "median_seconds_to_first_finding": self.median_seconds,
            "by_operator": self.counts("operator"),
            "by_kernel": self.counts("kernel"),
            "by_law": self.laws,
            "mutants": [self._row(*each) for each in self.judged],
        }

    def _row(self, mutant: Mutant, answer: Answer) -> dict[str, Any]:
        row: dict[str, Any] = {"id": mutant.id, "kernel": mutant.kernel, "status": answer.status}
        if answer.status == "survived":
            row |= {"diff": mutant.diff, "message": answer.message}
            if mutant.id in self.equivalents:
                row["equivalent"] = self.equivalents[mutant.id]
        more = {
            "law": answer.law,
            "verdict": answer.verdict,
            "profile": answer.stage,
            "seconds": answer.seconds,
        }
        return row | {key: value for key, value in more.items() if value}


def print_report(out: Console, measured: Measurement) -> None:
    """Print the survivors, the tables, what was left out, and the sentence."""
    for mutant in measured.survivors:
        out.print(Text(f"survived: {mutant.id}  {mutant.kernel}  {mutant.file}", "bold"))
        out.print(Text(mutant.diff), soft_wrap=True)
        out.print(Text(measured.answers[mutant.id].message), soft_wrap=True)
        if mutant.id in measured.equivalents:
            out.print(Text(f"equivalent: {measured.equivalents[mutant.id]}"), soft_wrap=True)
        out.print()
    _print_tables(out, measured)
    if measured.idle:
        out.print(Text(f"not run, and left out: {', '.join(measured.idle)}"), soft_wrap=True)
    if measured.clean.without:
        told = "left out, as they accuse the kernel as it is: "
        out.print(Text(told + ", ".join(measured.clean.without)), soft_wrap=True)
    if measured.clean.lines is None:
        out.print("which lines ran is not known: all of them count as reached")
    if measured.errors:
        out.print(f"without an answer: {measured.errors}")
    told = f"{len(measured.judged)} of {measured.made} mutants judged: killed of the reached "
    told += share_of(*measured.killed_of_reached())
    if measured.equivalents:
        without = measured.killed_of_reached(without_equivalents=True)
        told += f", without equivalents {share_of(*without)}"
    if (seconds := measured.median_seconds) is not None:
        told += f"; median time to the first finding {seconds:.1f} s"
    out.print(Text(told, "bold"), soft_wrap=True)


def _print_tables(out: Console, measured: Measurement) -> None:
    by_operator = measured.counts("operator")
    table = Table("operator", *STATUSES, "killed of reached", box=box.SIMPLE)
    for name in (each for each in OPERATORS if each in by_operator):
        row = by_operator[name]
        share = share_of(row["killed"], row["killed"] + row["survived"])
        table.add_row(name, *(str(row[each]) for each in STATUSES), share)
    out.print(table)
    if measured.laws:
        table = Table("killed by", "mutants", box=box.SIMPLE)
        for law, count in measured.laws.items():
            table.add_row(law, str(count))
        out.print(table)


def share_of(part: int, whole: int) -> str:
    """Return a share in words and per cent."""
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "-"
