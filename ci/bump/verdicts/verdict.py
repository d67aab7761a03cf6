"""From findings to a verdict, by the written rules (``policy.RULES``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....impl.targets.capability import capability_name
from ....properties.verdicts.text import count_of
from ...console.errors import CONFORMING, MACHINE, NONCONFORMING
from .findings import BLOCK, CONDITION, Chip, Finding, chip_order
from .policy import Policy

BUMP, CONDITIONS, NO = "bump", "bump with conditions", "do not bump"
UNDECIDED = "undecided"
VERDICTS = (BUMP, CONDITIONS, NO, UNDECIDED)
EXIT_CODES = {BUMP: CONFORMING, CONDITIONS: NONCONFORMING, NO: NONCONFORMING, UNDECIDED: MACHINE}
"""A condition is work to be done with the bump: it counts until the policy accepts its finding."""
RAN, COMPILED, DECLARED = "run", "compiled", "declared"
EVIDENCE = (DECLARED, COMPILED, RAN)
"""On what a chip's verdict stands, weakest first: the release's declarations and the support
rules, compiled modules too, calls on the chip itself too."""


@dataclass(frozen=True)
class Condition:
    """Something to do, or to keep to, with the bump.

    Attributes:
        rule: what.
        findings: ids of those that ask for it.
    """

    rule: str
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {"rule": self.rule, "findings": list(self.findings)}


@dataclass(frozen=True)
class ChipVerdict:
    """The verdict for one chip.

    Attributes:
        chip: compute capability times ten, or ``"cpu"``.
        verdict: one of ``VERDICTS``.
        evidence: one of ``EVIDENCE``.
        blocked_by: ids of the findings that block.
        conditions: the conditions of a bump, or of one that is blocked once it is not.
    """

    chip: Chip
    verdict: str
    evidence: str
    blocked_by: tuple[str, ...]
    conditions: tuple[Condition, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "chip": self.chip,
            "name": chip_name(self.chip),
            "verdict": self.verdict,
            "evidence": self.evidence,
            "blocked_by": list(self.blocked_by),
            "conditions": [each.to_json() for each in self.conditions],
        }


@dataclass(frozen=True)
class Verdict:
    """The verdict.

    Attributes:
        verdict: one of ``VERDICTS``.
        message: the message in one sentence.
        chips: the chips in their order.
        conditions: the conditions of all chips, those of the whole first.
    """

    verdict: str
    message: str
    chips: tuple[ChipVerdict, ...]
    conditions: tuple[Condition, ...] = ()

    @property
    def exit_code(self) -> int:
        """The command's."""
        return EXIT_CODES[self.verdict]


def decide(
    findings: Sequence[Finding],
    evidence: dict[Chip, str],
    policy: Policy,
    *,
    baseline: str,
    failures: Sequence[str] = (),
    ended: bool = False,
) -> Verdict:
    """Decide on a bump.

    Args:
        findings: the findings with their actions, see ``Policy.apply``.
        evidence: the chips that are asked about, and what is known of each, of ``EVIDENCE``.
        policy: the policy whose chips count.
        baseline: its version, for chips that stay with it.
        failures: why something could not be learned that a verdict needs; sentences.
        ended: whether somebody ended the comparison, who then decides nothing by it.
    """
    chips = tuple(
        _chip(
            chip,
            [
                each
                for each in findings
                if each.concerns(chip) and not policy.accepts_on(each, chip)
            ],
            evidence[chip],
            undecided=bool(failures) or ended,
            ended=ended,
        )
        for chip in sorted(evidence, key=chip_order)
    )
    counted = [each for each in chips if not policy.required or each.chip in policy.required]
    verdicts = {each.verdict for each in counted}
    missing = [chip for chip in policy.required if chip not in evidence]
    if verdicts == {NO} and not ended:
        verdict = NO
    elif UNDECIDED in verdicts or not counted or missing or ended:
        verdict = UNDECIDED
    else:
        verdict = verdicts.pop() if len(verdicts) == 1 else CONDITIONS
    conditions = _conditions_of_all(counted, verdict, baseline)
    why = _why(verdict, counted, conditions, failures, missing)
    return Verdict(verdict, f"{verdict.upper()}: {why}", chips, conditions)


def _chip(
    chip: Chip, here: Sequence[Finding], evidence: str, *, undecided: bool, ended: bool
) -> ChipVerdict:
    blocking = tuple(each.id for each in here if each.action == BLOCK)
    rules: dict[str, list[str]] = {}
    for each in here:
        if each.action == CONDITION:
            rules.setdefault(each.rule or each.message, []).append(each.id)
    conditions = tuple(Condition(rule, tuple(ids)) for rule, ids in rules.items())
    if blocking and not ended:  # else the whole is undecided, and so is each chip of it
        verdict = NO
    elif undecided:
        verdict = UNDECIDED
    else:
        verdict = CONDITIONS if conditions else BUMP
    return ChipVerdict(chip, verdict, evidence, blocking, conditions)


def _conditions_of_all(
    chips: Sequence[ChipVerdict], verdict: str, baseline: str
) -> tuple[Condition, ...]:
    found: dict[str, dict[str, None]] = {}
    staying = [each for each in chips if each.verdict == NO]
    if verdict == CONDITIONS and staying:
        names = ", ".join(chip_name(each.chip) for each in staying)
        ids = dict.fromkeys(name for each in staying for name in each.blocked_by)
        found[f"stay with {baseline} on {names}"] = ids
    for each in chips:
        for condition in each.conditions:
            found.setdefault(condition.rule, {}).update(dict.fromkeys(condition.findings))
    return tuple(Condition(rule, tuple(ids)) for rule, ids in found.items())


def _why(
    verdict: str,
    chips: Sequence[ChipVerdict],
    conditions: Sequence[Condition],
    failures: Sequence[str],
    missing: Sequence[Chip],
) -> str:
    if verdict == UNDECIDED:
        lacking = [f"nothing is known of {chip_name(chip)}" for chip in missing]
        return "; ".join([*failures, *lacking]) or "no chip was asked about"
    blocking = len({name for each in chips for name in each.blocked_by})
    where = ", ".join(chip_name(each.chip) for each in chips)
    sentence = {
        BUMP: f"nothing stands against it on {where}",
        CONDITIONS: f"{count_of(len(conditions), 'condition')} on {where}",
        NO: f"{count_of(blocking, 'finding')} against it on {where}",
    }[verdict]
    return sentence + (f"; {failures[0]}" if failures else "")


def chip_name(chip: Chip) -> str:
    """Return the name of a chip as reports print it."""
    return capability_name(chip if isinstance(chip, int) else None)
