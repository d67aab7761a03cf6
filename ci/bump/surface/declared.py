"""What changed of what releases declare, of their binaries, and of what the support rules say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....impl.gating import Target, load_rules
from ....impl.gating.rules import Rule
from ...support.rows import CUDA, TRITON, Matrix, Row, all_rows, differences, matrix_of
from ..verdicts.findings import Chip, Finding, finding
from ..verdicts.verdict import chip_name
from .declared_items import chip_items, compared, value_items

Declarations = Mapping[str, Any]
HANGS = "hangs"
SHORT_HASH = 7
"""Characters of a hash that a sentence shows."""
NONE = "none"
"""Name in place of the hash of an artifact that a side does not have."""
INTERNALS = ("compiler filter", "backends of", "templates")
"""First words of the names of what is read from a release's own code: what it calls need not
follow."""


def target_of(declared: Declarations, chip: Chip) -> Target:
    """Return a machine with a release: its own binaries' hashes decide, whatever its version is."""
    return Target(
        sm=chip if isinstance(chip, int) else None,
        flashinfer=declared["flashinfer"],
        cuda=CUDA if isinstance(chip, int) else None,
        triton=TRITON,
        artifacts=tuple(hashes(declared).items()),
    )


def hashes(declared: Declarations) -> dict[str, str]:
    """Return the hash of each artifact that a release downloads."""
    return {name: path.partition("/")[0] for name, path in declared["artifacts"]["paths"].items()}


def matrices(
    baseline: Declarations, candidate: Declarations, chips: Sequence[Chip]
) -> tuple[Matrix, Matrix]:
    """Decide every kind of call on every chip, with each release."""
    book = load_rules()
    made = [
        matrix_of(all_rows(), side["flashinfer"], [target_of(side, chip) for chip in chips], book)
        for side in (baseline, candidate)
    ]
    return made[0], made[1]


def declared_findings(
    baseline: Declarations, candidate: Declarations, chips: Sequence[Chip]
) -> Iterator[Finding]:
    """Compare what two releases declare, for these chips."""
    numbers = {chip for chip in chips if isinstance(chip, int)}
    for name, old, new in compared(chip_items, baseline, candidate):
        losing = "internals-lost" if name.startswith(INTERNALS) else "declared-lost"
        for change, lost in (
            (losing, (old - new) & numbers),
            ("declared-gained", (new - old) & numbers),
        ):
            if lost:
                verb = "declares" if change == "declared-gained" else "no longer declares"
                where = ", ".join(map(chip_name, sorted(lost)))
                yield finding(
                    change,
                    name,
                    f"{name} {verb} {where}",
                    chips=tuple(sorted(lost)),
                    rule=f"do not use {name} on {where}" if change == "declared-lost" else "",
                    baseline={"chips": sorted(old)},
                    candidate={"chips": sorted(new)},
                )
    yield from _values(baseline, candidate)
    yield from _artifacts(baseline, candidate, chips)


def _values(baseline: Declarations, candidate: Declarations) -> Iterator[Finding]:
    """Compare declared head dims, dtypes, backends and activations that are of no single chip."""
    for name, old, new in compared(value_items, baseline, candidate):
        losing = "internals-lost" if name.startswith(INTERNALS) else "declared-lost"
        for change, some, others in (
            (losing, old, new),
            ("declared-gained", new, old),
        ):
            found = sorted(some - others)
            if found:
                listed = ", ".join(found)
                verb = "has" if change == "declared-gained" else "has no more"
                yield finding(
                    change,
                    name,
                    f"{name}: {verb} {listed}",
                    rule=f"do not ask {name} for {listed}" if change == "declared-lost" else "",
                    baseline={"values": sorted(old)},
                    candidate={"values": sorted(new)},
                    count=len(found),
                )


def _artifacts(
    baseline: Declarations, candidate: Declarations, chips: Sequence[Chip]
) -> Iterator[Finding]:
    old, new = hashes(baseline), hashes(candidate)
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, NONE), new.get(name, NONE)
        same = before == after
        bad = [
            rule.id
            for rule in _hash_rules(name)
            if any(_holds(rule, baseline, chip) for chip in chips)
        ]
        known = f"known of it: {', '.join(bad)}" if bad else "no fault of it is known"
        said = f"is still {_short(after)}: what is known still holds ({known})"
        if before == NONE:
            said = f"is new: {_short(after)}, of which nothing is known"
        elif after == NONE:
            said = f"was {_short(before)}, and is there no more: what was known is lifted ({known})"
        elif not same:
            said = (
                f"was {_short(before)}, now {_short(after)}: what was known is lifted ({known}), "
                "and nothing is known of the new binaries"
            )
        yield finding(
            "artifact-same" if same else "artifact-changed",
            name,
            f"{name} {said}",
            baseline={"hash": before, "known": bad},
            candidate={"hash": after},
        )


def _hash_rules(name: str) -> list[Rule]:
    return [rule for rule in load_rules().rules if name in rule.artifacts]


def _holds(rule: Rule, declared: Declarations, chip: Chip) -> bool:
    return rule.applies_to(target_of(declared, chip), hashes(declared)) and bool(
        not rule.chips or (chip if isinstance(chip, int) else None) in rule.chips
    )


def _short(value: str) -> str:
    return value[:SHORT_HASH]


def support_findings(made: tuple[Matrix, Matrix]) -> list[Finding]:
    """Return what the support rules say otherwise of the candidate.

    Of a release that they do not know they say nothing: that is one finding.
    """
    book = load_rules()
    version = made[1].version
    if not book.knows(version):
        message = f"the support rules know releases {book.oldest} to {book.newest}, not {version}"
        rule = f"add {version} to fixtures/support and run `kernelproof support --declared`"
        return [finding("release-unknown", version or "?", message, rule=rule)]
    found = []
    for each in differences(*made):
        lost = each.before.supported
        chips = tuple(_chip(sm) for sm in each.chips)
        where = ", ".join(map(chip_name, chips))
        name = _row_name(each.row)
        telling = each.after if lost else each.before
        told: Callable[[Any], dict[str, str]] = lambda d: {  # noqa: E731
            "status": d.status,
            "rule": d.rule,
            "reason": d.reason,
            "evidence": d.evidence,
        }
        found.append(
            finding(
                "support-lost" if lost else "support-gained",
                name,
                f"{name} on {where}: {'refused now' if lost else 'allowed now'}: {telling.reason}",
                chips=chips,
                rule=f"do not use {name} on {where}. {each.after.instead}" if lost else "",
                detail=where.replace(", ", "-"),
                baseline=told(each.before),
                candidate=told(each.after),
                entry=telling.rule,
                issue=telling.source if telling.source.startswith("http") else "",
            )
        )
    return found


def known_hangs(
    baseline: Declarations, candidate: Declarations, chips: Sequence[Chip]
) -> Iterator[Finding]:
    """Return the hangs of the candidate that the support rules know, by its binaries if known."""
    for rule in load_rules().rules:
        if rule.effect != "refuse" or HANGS not in rule.called:
            continue
        now = tuple(chip for chip in chips if _holds(rule, candidate, chip))
        before = [chip for chip in chips if _holds(rule, baseline, chip)]
        if not now:
            continue
        stays = set(now) <= set(before)
        where = ", ".join(map(chip_name, now))
        calls = f"{'/'.join(rule.backend)} ({', '.join(rule.operation)})"
        when = ", ".join(f"{name} {value}" for name, value in rule.when.items())
        yield finding(
            "hang-stays" if stays else "known-hang",
            rule.id,
            f"{calls} on {where}" + (f" with {when}" if when else "") + f": {rule.reason}",
            chips=now,
            rule=f"do not call {calls} on {where}" + (f" with {when}" if when else ""),
            baseline={"chips": before},
            candidate={"chips": list(now)},
            entry=rule.id,
            issue=rule.source if rule.source.startswith("http") else "",
            reason=rule.reason,
        )


def _row_name(row: Row) -> str:
    return f"{row.feature.operation} {row.feature.backend} {row.title}".strip()


def _chip(sm: int | None) -> Chip:
    return "cpu" if sm is None else sm


def features(made: tuple[Matrix, Matrix], chips: Sequence[Chip]) -> dict[str, Any]:
    """Return the matrix of chips and features: each cell with both sides and their evidence."""
    return {
        "chips": list(chips),
        "rules": {
            each.rule: each.reason
            for matrix in made
            for _, decisions in matrix.rows
            for each in decisions
            if each.rule and not each.supported
        },
        "rows": [
            {
                "title": row.title,
                "operation": row.feature.operation,
                "backend": row.feature.backend,
                "cells": [
                    {
                        "chip": chip,
                        "change": _change(one.supported, other.supported),
                        "baseline": _cell(one),
                        "candidate": _cell(other),
                    }
                    for chip, one, other in zip(chips, before, after, strict=True)
                ],
            }
            for (row, before), (_, after) in zip(made[0].rows, made[1].rows, strict=True)
        ],
    }


def _cell(decision: Any) -> dict[str, str]:  # noqa: ANN401  a Decision
    return {"status": decision.status, "evidence": decision.evidence, "rule": decision.rule}


def _change(before: bool, after: bool) -> str:  # noqa: FBT001  two columns
    if before == after:
        return "same"
    return "gained" if after else "lost"
