"""A cause under examination: what its problems need, whether it is sure, and what else it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....reference import AttentionProblem, Problem
from ...findings.causes import ANSWER_KINDS
from ...findings.ledger import holds
from ...findings.relations import RELATIONS
from ...verdicts.verdict import Verdict
from .ablation import WINDOWS, Fails, Needs, conditions_of, lacking, with_lengths

SEEDS = 4
"""Number of other tensor values with which a cause is tried."""
REPEATED = 3
"""Fewest of these SEEDS values with which the problem of a cause must fail."""
MANY = 0.3
"""Share of passing problems among those with a cause's values, above which another condition is
sought."""
CHANCE = 0.01
"""Highest accepted probability that all failing problems meet a condition by chance."""
MOST = 2
"""Largest number of further conditions of one cause."""


@dataclass
class Fault:
    """A cause under examination.

    Attributes:
        problem, verdict: the smallest that fails for it.
        needs: the needs of that problem, and of others that were found to fail for the same.
        symptoms: how problems fail for it, see ``symptom``.
        more: further conditions, which evidence asks for.
    """

    problem: Problem
    verdict: Verdict
    needs: Needs
    symptoms: set[str]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """What problems need, as a predicate."""
        return {**self.needs.values, **self.more}

    def widen(self, problem: Problem, symptom: str) -> None:
        """Take another problem, which fails for the same, into the conditions."""
        fields = {n: each | {getattr(problem, n)} for n, each in self.needs.fields.items()}
        passing = {n: each - fields[n] for n, each in self.needs.passing.items()}
        structure = {
            name: wanted
            for name, wanted in self.needs.structure.items()
            if holds(problem, {name: wanted})
        }
        self.needs = replace(self.needs, fields=fields, passing=passing, structure=structure)
        self.symptoms.add(symptom)


def symptom(verdict: Verdict) -> str:
    """Return what is wrong in words that two verdicts on one fault share; empty if nothing is."""
    if not verdict.bad:
        return ""
    if verdict.status == "FAIL" and verdict.kind in ANSWER_KINDS:
        where = verdict.element["where"] if verdict.element else ""
        return f"answer {where.partition('[')[0]}".strip()
    return f"{verdict.status} {verdict.kind}".strip()


def needs_all(problem: Problem, fault: Fault, fails: Fails) -> bool:
    """Whether a problem passes without any one of the conditions of a cause that it has."""
    needs, looked = fault.needs, False
    for name in needs.fields:
        changed = lacking(problem, name, needs)
        if changed is None or fails(changed) is not False:
            return False
        looked = True
    for name, wanted in needs.structure.items():
        if holds(problem, {name: wanted}):
            changed = undone(problem, name, wanted)
            if changed is not None and fails(changed) is not False:
                return False
            looked = looked or changed is not None
    return looked


def undone(problem: Problem, name: str, wanted: Any) -> Problem | None:  # noqa: ANN401
    """Return a batch without one of its properties, or below a size; None where that is unknown."""
    if not isinstance(problem, AttentionProblem):
        return None
    pairs = list(zip(problem.query_lens, problem.seq_lens, strict=True))
    least = wanted["min"] if isinstance(wanted, dict) else 0
    size = problem.page_size
    changed = {
        "most_keys": [(t, min(s, least - 1)) for t, s in pairs],
        "most_queries": [(min(t, least - 1), s) for t, s in pairs],
        "num_requests": pairs[: least - 1],
        "empty_requests": [(t, max(s, 1)) for t, s in pairs],
        "rows_without_keys": [(t, max(s, t)) for t, s in pairs],
        "more_queries_than_keys": [(t, max(s, t)) for t, s in pairs],
        "earlier_keys": [(t, min(s, t) if t else s) for t, s in pairs],
        "unequal_lengths": [(t, t or s) for t, s in pairs],
        "partial_last_page": [(t, -(-s // size) * size) for t, s in pairs],
    }.get(name)
    return None if not changed or changed == pairs else with_lengths(problem, changed)


def imposed(problems: Sequence[Problem], fault: Fault) -> list[Problem]:
    """Return problems that were drawn, with the fields that a cause needs."""
    made: list[Problem] = []
    needs = {name: sorted(each, key=str) for name, each in fault.needs.fields.items()}
    for number, problem in enumerate(problems if needs else ()):
        values = {name: each[number % len(each)] for name, each in needs.items()}
        try:
            made.append(replace(problem, **values))
        except (ValueError, TypeError):
            continue
    return made


VISIBLE = {"regime", "dtype"}
"""Fields that a fault may need to be seen only."""


def alike(one: Fault, other: Fault) -> bool:
    """Whether two causes lie in the same fields and sizes, or one in some of the other's fields.

    What hides a key may be a window, by itself or beside the causal mask: the smallest problems of
    one fault need more or fewer fields, by their lengths.
    """
    mine, others = one.needs.fields.keys(), other.needs.fields.keys()
    if not mine and not others:
        return one.needs.structure.keys() == other.needs.structure.keys()
    # Subsets count only with a common symptom, else a fault of windows would swallow one of windows
    # beside sinks.
    within = bool(one.symptoms & other.symptoms) and (mine <= others or others <= mine)
    return bool(mine & others - VISIBLE) and (within or mine ^ others <= VISIBLE)


SHOWS = {*VISIBLE, *WINDOWS, "causal", "custom_mask", "mask_pattern", "tree", "alibi"}
"""Fields beside which a fault of another one shows: by them the places of keys matter."""


def share_option(one: Fault, other: Fault) -> bool:
    """Whether two causes show alike and lie in one field, beside fields that show it only."""
    mine, others = one.needs.fields.keys(), other.needs.fields.keys()
    shared = mine & others - VISIBLE and mine ^ others <= SHOWS
    return bool(shared) and bool(one.symptoms & other.symptoms)


def merge(one: Fault, other: Fault) -> None:
    """Take what both causes need for what one of them does."""
    # What only one of them needs was a circumstance.
    both = one.needs.fields.keys() & other.needs.fields.keys()
    fields = {name: one.needs.fields[name] | other.needs.fields[name] for name in both}
    passing = {
        name: (one.needs.passing[name] | other.needs.passing[name]) - fields[name] for name in both
    }
    structure: dict[str, Any] = {}
    for name in one.needs.structure.keys() & other.needs.structure.keys():
        wanted = (one.needs.structure[name], other.needs.structure[name])
        structure[name] = (
            min(wanted, key=lambda each: each["min"]) if isinstance(wanted[0], dict) else True
        )
    one.needs = replace(one.needs, fields=fields, passing=passing, structure=structure)
    one.symptoms |= other.symptoms


def is_certain(fault: Fault, fails: Fails) -> bool:
    """Whether a cause's problem fails with other values, and passes with them without a need.

    An error near its bound comes and goes with the values, and what is taken away of a problem
    seems to matter by chance. A fault of a kernel stays.

    Args:
        fault: the cause.
        fails: whether a problem fails for this cause.
    """
    # Other seeds change the values and nothing else of a problem.
    repeated = sum(fails(each) is True for each in _reseeded(fault.problem))
    return repeated >= REPEATED and not any(
        fails(each) for changed in _lacking(fault) for each in _reseeded(changed)
    )


def _reseeded(problem: Problem) -> list[Problem]:
    return [replace(problem, seed=problem.seed + 1 + number) for number in range(SEEDS)]


def _lacking(fault: Fault) -> Iterator[Problem]:
    """Yield a cause's problem without one of its needs at a time."""
    problem, needs = fault.problem, fault.needs
    for name in needs.fields:
        if (changed := lacking(problem, name, needs)) is not None:
            yield changed
    for name, wanted in needs.structure.items():
        if (batch := undone(problem, name, wanted)) is not None:
            yield batch


def further_conditions(
    values: Mapping[str, Any],
    failing: Sequence[Problem],
    passing: Sequence[Problem],
    seen: Sequence[Problem],
) -> dict[str, Any]:
    """Return conditions that all failing problems meet and most of the passing ones do not.

    Args:
        values: what a problem needs as far as is known.
        failing: problems with these values that fail.
        passing: problems with these values that pass.
        seen: all problems, which tell how often a condition is met by chance.
    """
    more: dict[str, Any] = {}
    left = [*passing]
    while failing and len(more) < MOST and len(left) > MANY * (len(left) + len(failing)):
        best = max(
            (each for each in _common(failing) if each[0] not in values and each[0] not in more),
            # Relations of lengths follow from many sizes: a size comes first where both tell.
            key=lambda each: (
                sum(not holds(one, dict([each])) for one in left),
                each[0] not in RELATIONS,
            ),
            default=None,
        )
        if best is None:
            break
        # Accepted only if it halves what passes, and if all failures would hardly share it by
        # chance: where a share ``often`` of all problems has it, n failures do with probability
        # often**n.
        kept = [each for each in left if holds(each, dict([best]))]
        often = sum(holds(each, dict([best])) for each in seen) / max(len(seen), 1)
        if len(kept) > len(left) / 2 or often ** len(failing) > CHANCE:
            break
        more[best[0]], left = best[1], kept
    return more


def _common(failing: Sequence[Problem]) -> list[tuple[str, Any]]:
    """Return the properties that all failing problems have, and the least of their sizes."""
    found: list[tuple[str, Any]] = []
    for name, wanted in conditions_of(min(failing, key=lambda each: each.work)):
        if isinstance(wanted, dict):
            least = min(getattr(each, name) for each in failing)
            if least > 1:
                found.append((name, {"min": least}))
        elif all(holds(each, {name: wanted}) for each in failing):
            found.append((name, wanted))
    return found
