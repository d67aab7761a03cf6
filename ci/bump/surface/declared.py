"""What changed of what releases declare, of their binaries, and of what the support rules say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....impl.gating import Target, load_rules
from ....impl.gating.rules import Rule
from ...support.rows import CUDA, TRITON, Matrix, Row, all_rows, differences, matrix_of
from ..verdicts.findings import Chip, Finding, finding
from ..verdicts.verdict import chip_name

Declarations = Mapping[str, Any]
EMPTY_IF_UNREAD = ("xqa", "fa3", "fmha_runner", "dispatch", "activations", "backend_choices")
"""Sections in which a release that is written otherwise leaves nothing."""
CHECKS = ("jit_filters", "fmha_runner")
"""Sections of what is refused otherwise: a check that is gone refuses nothing."""


@dataclass(frozen=True)
class Item:
    """Something that a release declares.

    Attributes:
        name: the name that findings use.
        values: chips, or what else it covers; None where the release does not say.
        section: the section of the declarations.
        module: the module that was imported to learn it; empty if none was.
        api: callable whose decorator it is of; empty if it is of none.
    """

    name: str
    values: frozenset[Any] | None
    section: str
    module: str = ""
    api: str = ""


def compared(
    items: Callable[[Declarations], Iterable[Item]],
    baseline: Declarations,
    candidate: Declarations,
) -> Iterator[tuple[str, frozenset[Any], frozenset[Any]]]:
    """Return the names of what the baseline declares, with both sides' values.

    What the candidate has no more has no values. What it does not say, or could not be asked, is
    left out.
    """
    old, new = _by_name(items(baseline)), _by_name(items(candidate))
    for name, before in sorted(old.items()):
        after = new.get(name)
        if after is None and not _unread(before, candidate) and _gone(before, baseline, candidate):
            after = Item(name, frozenset(), before.section)
        if before.values is not None and after is not None and after.values is not None:
            yield name, before.values, after.values


def _by_name(items: Iterable[Item]) -> dict[str, Item]:
    found: dict[str, Item] = {}
    for each in items:
        if each.values is not None or each.name not in found:
            found[each.name] = each
    return found


def _unread(item: Item, declared: Declarations) -> bool:
    """Whether a release could not be asked for an item, so that its absence means nothing."""
    empty = item.section in EMPTY_IF_UNREAD and not declared[item.section]
    return empty or item.section in CHECKS or item.module in declared["not_imported"]


def _gone(item: Item, baseline: Declarations, candidate: Declarations) -> bool:
    """Whether a decorated callable is gone, or the backend of one that is still decorated.

    One that is there without its decorator is restricted no more, or in another way.
    """
    if not item.api:
        return True
    decorated = [each for each in candidate["capabilities"] if each["api"] == item.api]
    if decorated:
        # Where the decorators' source is read instead, a backend may be missed.
        return bool(decorated[0]["how"] == "asked")
    offered = _offered(baseline).intersection(item.api.split("."))
    return bool(offered) and offered.isdisjoint(_offered(candidate))


def _offered(declared: Declarations) -> set[str]:
    return {name for names in declared["exports"].values() for name in names}


def chip_items(declared: Declarations) -> Iterator[Item]:
    """Return the chips of each thing that declares chips."""
    for each in declared["capabilities"]:
        api, section = each["api"], "capabilities"
        yield Item(api, _set(each["common"]), section, api=api)
        for backend, chips in each["backends"].items():
            yield Item(f"{api} with {backend}", _set(chips), section, api=api)
    for each in declared["runners"]:
        module = _module(each["source"])
        yield Item(f"runner {each['runner']}", _set(each["chips"]), "runners", module)
    for each in declared["configs"]:
        module = _module(each["source"])
        yield Item(f"config {each['config']}", _set(each["chips"]), "configs", module)
    for each in declared["jit_filters"]:
        if each["generator"]:
            name = f"compiler filter of {each['generator']}"
            yield Item(name, _set(each["chips"]), "jit_filters")
    built = map(int, declared["fused_moe_modules"]["modules"])
    yield Item("modules of cutlass_fused_moe", _set(built), "fused_moe_modules")
    cubins = map(int, declared["compatible_cubins"].get("chips", {}))
    yield Item("binaries of trtllm-gen attention", _set(cubins), "compatible_cubins")


def value_items(declared: Declarations) -> Iterator[Item]:
    """Return what is declared of head dims, dtypes, backends and activations, on no single chip."""
    for part in ("xqa", "fa3"):
        for name, values in declared[part].items():
            if isinstance(values, list | None):
                yield Item(f"{part} {name.replace('_', ' ')}", _texts(values), part)
    for name, each in declared["backend_choices"].items():
        module = f"flashinfer.{name.partition('.')[0]}"
        choices = frozenset(each["choices"])
        yield Item(f"backends of {name}", choices, "backend_choices", module)
    for section, label in (
        ("activations", "activations of {} MoE"),
        ("fmha_runner", "trtllm-gen attention: {}"),
        ("dispatch", "templates {}"),
    ):
        for name, each in declared[section].items():
            yield Item(label.format(name), _texts(each["values"]), section)


def _set(values: Iterable[int] | None) -> frozenset[int] | None:
    return None if values is None else frozenset(values)


def _texts(values: Iterable[object] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(map(str, values))


def _module(source: str) -> str:
    """Return the module of a place such as ``flashinfer/fused_moe/core.py:316``."""
    path = source.partition(":")[0].removesuffix(".py").removesuffix("/__init__")
    return path.replace("/", ".")


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


SAID = {
    "chips": ("{} declares {}", "{} no longer declares {}", "do not use {} on {}"),
    "values": ("{}: has {}", "{}: has no more {}", "do not ask {} for {}"),
}
"""Sentences by what an item covers: what it gained, what it lost, and what follows from a loss."""


def declared_findings(
    baseline: Declarations, candidate: Declarations, chips: Sequence[Chip]
) -> Iterator[Finding]:
    """Compare what two releases declare, for these chips."""
    numbers = {chip for chip in chips if isinstance(chip, int)}
    for name, old, new in compared(chip_items, baseline, candidate):
        yield from _covered("chips", name, old, new, numbers)
    for name, old, new in compared(value_items, baseline, candidate):
        yield from _covered("values", name, old, new, old | new)
    yield from _artifacts(baseline, candidate, chips)


def _covered(
    what: str, name: str, old: frozenset[Any], new: frozenset[Any], asked: Collection[Any]
) -> Iterator[Finding]:
    """Compare the chips, or the values, that an item covers; only those asked about count."""
    gains, loses, follows = SAID[what]
    losing = "internals-lost" if name.startswith(INTERNALS) else "declared-lost"
    for change, changed, said in (
        (losing, old - new, loses),
        ("declared-gained", new - old, gains),
    ):
        found = sorted(changed.intersection(asked))
        if found:
            listed = ", ".join(map(chip_name, found) if what == "chips" else found)
            more: dict[str, Any] = {"chips": tuple(found)} if what == "chips" else {}
            yield finding(
                change,
                name,
                said.format(name, listed),
                rule=follows.format(name, listed) if change == "declared-lost" else "",
                baseline={what: sorted(old)},
                candidate={what: sorted(new)},
                count=1 if what == "chips" else len(found),
                **more,
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
