"""Makes the deck: the problems that ``check`` asks before a law draws its own.

    python -m kernelproof.ci.score.deck [OPERATION...]

For each operation, problems are drawn for the laws that killed its seeded bugs in the kept score,
and judged on these bugs. A greedy cover takes the problems that kill most for what they cost. Only
the half of the bugs whose hashed names are even takes part: on the other one the deck is measured,
see ``kernelproof bench first-finding``. Of laws that killed none of them, a problem is taken all
the same.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...fixtures import DECK, EVIDENCE
from ...properties.findings.report import ImplementationReport
from ...properties.isolation.machine import cores
from ...properties.isolation.workers import Deadlines, Worker, WorkerPool
from ...properties.laws import Law, find_law, laws_of
from ...properties.search.candidate import Candidate
from ...properties.search.deck import MOST_ENTRIES, NOT_DEALT, SCHEMA, DeckEntry, fitted
from ...properties.search.preparation import survey
from ...properties.seeded import BUGS, SeededBug
from ...properties.space.axes import Axes, all_axes
from ...properties.space.operations import OPERATIONS
from ...properties.space.profiles import PROFILES
from ...properties.space.rounds import draw_problems
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address, HarnessError, verdict_of
from ...reference import Problem
from ..bench.first_finding import HALVES, half_of

SEED = 60
"""Seed of the problems that are drawn; no run has it by default."""
MOST_WORK = 40_000
"""Work of a problem at most: implementations that count as slow take it too."""
POOL, MORE_FOR_A_BUG = 16, 2
"""Problems that are drawn for each law, and more for each bug that it kills."""
MOST_POOL = 110
MOST_LAWS = 4
"""Laws by which a bug is judged, those that kill most first."""
CALL_WORK = 20_000
"""Work that takes as long as whatever a call costs besides."""
WORTH = (1.0, 0.3, 0.1)
"""What it is worth to kill a bug for the first time, the second and the third: a fault that took no
part in making the deck is nearer to what several problems kill."""
LEAST_WORTH = 0.1
DEAR = ("soak", "far_pages", "far_tokens", "far_rows", "far_workspaces", "far_experts")
"""Laws of which no problem is asked early unless it kills: one takes as long as hundreds."""
DEADLINES = Deadlines(load=1200.0, materialise=600.0, run=20.0, judge=1200.0, supports=600.0)
"""Deadlines of each verdict. Nothing waits for a deck: on a loaded machine all but a kernel's own
run may take minutes, and one stage that overruns would end the work of an hour."""
ATTEMPTS = 3
"""Attempts to learn what a bug supports, whose import may overrun its deadline there."""
Pair = tuple[str, str]
"""A law and the id of a problem."""


@dataclass
class Trial:
    """Problems of one operation, by law and id, and what became of them.

    Attributes:
        problems: entries without kills.
        kills: names of the bugs that each has killed.
        calls: most calls that judging it took.
    """

    problems: dict[Pair, DeckEntry] = field(default_factory=dict)
    kills: dict[Pair, set[str]] = field(default_factory=lambda: defaultdict(set))
    calls: Counter[Pair] = field(default_factory=Counter)

    def cost(self, pair: Pair) -> float:
        """Return what judging a problem costs, in work: no clock, so that decks are the same."""
        return max(1, self.calls[pair]) * (CALL_WORK + self.problems[pair].problem.work)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    operations = sys.argv[1:] if arguments is None else arguments
    for operation in operations or OPERATIONS:
        entries = make_deck(operation, lambda line: print(line, file=sys.stderr, flush=True))
        write_deck(operation, entries)
    return 0


def write_deck(operation: str, entries: Iterable[DeckEntry], folder: Path = DECK) -> Path:
    """Write a deck, an entry a line, and return its file."""
    lines = [
        json.dumps({"law": e.law, "kills": list(e.kills), "problem": _brief(e.problem)})
        for e in entries
    ]
    text = f'{{"schema": "{SCHEMA}", "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    folder.mkdir(exist_ok=True)
    path = folder / f"{operation}.json"
    path.write_text(text, encoding="utf-8")
    return path


def bugs_of(operation: str) -> dict[str, SeededBug]:
    """Return the bugs from which the deck of an operation is made, by name."""
    return {
        bug.name: bug
        for bug in BUGS
        if bug.operation == operation and half_of(bug.name) == HALVES[0]
    }


def killers_of(operation: str, names: Collection[str]) -> dict[str, list[str]]:
    """Return the laws that killed each bug in the kept score, those first that kill most."""
    kept = json.loads((EVIDENCE / f"score-{operation}.json").read_text(encoding="utf-8"))
    laws = {each["name"]: each["laws"] for each in kept["bugs"] if each["name"] in names}
    often = Counter(law for those in laws.values() for law in those)
    # Hundreds of launches for one verdict are no quick look.
    return {
        name: sorted(set(those) - {*NOT_DEALT}, key=lambda law: (law == "soak", -often[law], law))[
            :MOST_LAWS
        ]
        for name, those in laws.items()
    }


def make_deck(
    operation: str, tell: Callable[[str], object] = lambda _: None, jobs: int = 0
) -> list[DeckEntry]:
    """Return the deck of an operation.

    Args:
        operation: the operation of its problems.
        tell: receives a line on each step.
        jobs: workers at a time; as many as there are cores if 0.
    """
    bugs = bugs_of(operation)
    killers = killers_of(operation, bugs)
    jobs = jobs or cores()
    trial = Trial()
    often = Counter(law for laws in killers.values() for law in laws)
    for law, count in often.items():
        most = min(MOST_POOL, POOL + MORE_FOR_A_BUG * count)
        add(trial, law, drawn_for(operation, find_law(law), most))
    tell(f"{operation}: {len(trial.problems)} problems on {len(bugs)} bugs")
    with open_pool("cpu", size=jobs) as pool:
        judge(trial, pool, [bugs[name] for name in killers], killers, jobs)
    chosen = with_every_law(operation, cover(trial))
    killed = {name for each in chosen for name in each.kills}
    tell(f"{operation}: {len(chosen)} entries kill {len(killed)} of {len(bugs)} bugs")
    return chosen


def add(trial: Trial, law: str, problems: Iterable[Any]) -> None:
    """Add problems that a law is to judge."""
    for problem in problems:
        trial.problems.setdefault((law, problem.id), DeckEntry(law, problem))


def drawn_for(operation: str, law: Law, most: int) -> list[Any]:
    """Draw problems as the search under a law does, for a kernel that claims everything."""
    space = Axes(operation, all_axes(operation), MOST_WORK)
    axes = space.within(law.looks_at)
    if axes is None:
        return []
    drawn = draw_problems(axes, PROFILES["gate"], SEED, most)
    return [problem for problem in drawn if problem.work <= MOST_WORK]


def judge(
    trial: Trial,
    pool: WorkerPool,
    bugs: Sequence[SeededBug],
    killers: Mapping[str, Sequence[str]],
    jobs: int,
) -> None:
    """Judge problems on bugs by the laws that kill these."""

    def judged(bug: SeededBug) -> dict[Pair, tuple[bool, int]]:
        entries = [e for e in trial.problems.values() if e.law in killers[bug.name]]
        return judged_on(pool, bug, entries)

    with ThreadPoolExecutor(jobs) as executor:
        for bug, verdicts in zip(bugs, executor.map(judged, bugs), strict=True):
            for pair, (bad, calls) in verdicts.items():
                trial.calls[pair] = max(trial.calls[pair], calls)
                if bad:
                    trial.kills[pair].add(bug.name)


def judged_on(
    pool: WorkerPool, bug: SeededBug, entries: Sequence[DeckEntry]
) -> dict[Pair, tuple[bool, int]]:
    """Return whether entries, or their nearest neighbours, kill a bug, and by how many calls."""
    address = Address(bug.reference, None, "cpu")
    verdicts: dict[Pair, tuple[bool, int]] = {}
    with pool.lease(bug.reference) as worker:
        candidate = Candidate(bug.name, address, _surveyed(worker, address, bug))
        laws = {each.law: find_law(each.law) for each in entries}
        for entry, problem in fitted(worker, candidate, laws, entries):
            verdict = verdict_of(worker.run(address.case(entry.law, problem), DEADLINES))
            verdicts[entry.law, entry.problem.id] = verdict.bad, verdict.calls
    return verdicts


def _surveyed(worker: Worker, address: Address, bug: SeededBug) -> Axes:
    """Return what a bug supports; what goes wrong is asked again in a fresh process."""
    for _ in range(ATTEMPTS):
        report = ImplementationReport(bug.name, bug.reference)
        try:
            axes = survey(worker, address, PROFILES["gate"].max_work, report)
        except HarnessError as error:
            report.error, axes = str(error), None
        if axes is not None:
            return axes
        worker.renew()
    message = f"{bug.name} cannot be judged: {report.error or report.refusal}"
    raise RuntimeError(message)


def cover(trial: Trial) -> list[DeckEntry]:
    """Return the entries that kill most for what they cost, the best one first."""
    chosen: list[Pair] = []
    killed: Counter[str] = Counter()

    def worth(pair: Pair) -> float:
        return sum(WORTH[killed[name]] for name in trial.kills[pair] if killed[name] < len(WORTH))

    left = sorted(pair for pair in trial.kills if trial.kills[pair])
    while left and len(chosen) < MOST_ENTRIES:
        best = max(left, key=lambda pair: worth(pair) / trial.cost(pair))
        if worth(best) < LEAST_WORTH:
            break
        left.remove(best)
        chosen.append(best)
        killed.update(trial.kills[best])
    return [
        replace(trial.problems[pair], kills=tuple(sorted(trial.kills[pair]))) for pair in chosen
    ]


def with_every_law(operation: str, chosen: Sequence[DeckEntry]) -> list[DeckEntry]:
    """Return entries with one more of each law that has none, and a second where there is room."""
    named = {each.law for each in chosen}
    drawn = [
        (law.name, drawn_for(operation, law, 3)[1:])  # the first one is the simplest
        for law in laws_of(operation)
        if law.name not in named and law.name not in (*DEAR, *NOT_DEALT)
    ]
    more = [DeckEntry(law, problems[0]) for law, problems in drawn if problems]
    second = [DeckEntry(law, problems[1]) for law, problems in drawn if len(problems) > 1]
    kept = chosen[: MOST_ENTRIES - len(more)]
    return [*kept, *more, *second][:MOST_ENTRIES]


def _brief(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON, without the fields that have their usual values."""
    usual = {each.name: each.default for each in fields(problem)}
    return {
        name: value
        for name, value in problem.to_json().items()
        if name not in usual or getattr(problem, name) != usual[name]
    }


if __name__ == "__main__":
    sys.exit(main())
