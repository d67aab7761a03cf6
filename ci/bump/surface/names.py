"""What changed of enums, public names, refusals and constants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....properties.verdicts.text import count_of
from ..verdicts.findings import Finding, finding

Declarations = Mapping[str, Any]
ORDINARY = {"self", "args", "out", "q", "k", "v", "backend", "mask", "input", "key", "value"}
"""Parameters that are words of any sentence."""
MOST_NAMES = 12
"""Names that a sentence lists."""


def name_findings(baseline: Declarations, candidate: Declarations) -> Iterator[Finding]:
    """Compare all of them."""
    yield from _enums(baseline["enums"], candidate["enums"])
    yield from _names(baseline, candidate)
    yield from _refusals(baseline, candidate)
    yield from _constants(baseline["constants"], candidate["constants"])


def _enums(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Finding]:
    for name in sorted({*old, *new}):
        before = old.get(name, {}).get("members", {})
        after = new.get(name, {}).get("members", {})
        sides: dict[str, Any] = {"baseline": before, "candidate": after}
        moved = [
            f"{member} was {before[member]}, now {after[member]}"
            for member in before
            if member in after and before[member] != after[member]
        ]
        reused = [
            f"{number} meant {member} and means {other} now"
            for member, number in before.items()
            for other, same in after.items()
            if same == number and other != member and after.get(member) != number
        ]
        if moved or reused:
            yield finding(
                "enum-number-moved",
                name,
                f"{name}: {'; '.join([*moved, *reused])}",
                rule=f"take members of {name} by name from the release that is installed, "
                "never by number",
                count=len({*moved, *reused}),
                **sides,
            )
        gone = [member for member in before if member not in after]
        if gone:
            yield finding(
                "enum-member-removed",
                name,
                f"{name} has no {listed(gone)} any more",
                rule=f"do not name {listed(gone)} of {name}",
                count=len(gone),
                **sides,
            )
        come = [member for member in after if member not in before]
        if come:
            yield finding(
                "enum-member-added",
                name,
                f"{name} has {listed(come)} too",
                count=len(come),
                **sides,
            )


def _names(baseline: Declarations, candidate: Declarations) -> Iterator[Finding]:
    old, new = baseline["exports"], candidate["exports"]
    for module in sorted(old.keys() & new.keys()):
        label = f"flashinfer.{module}".rstrip(".")
        pairs = (
            ("name-removed", old[module], new[module], "offers no {} any more"),
            ("name-added", new[module], old[module], "offers {} too"),
        )
        for change, some, others, said in pairs:
            names = [name for name in some if name not in others]
            if names:
                at = "baseline" if change == "name-removed" else "candidate"
                yield finding(
                    change,
                    label,
                    f"{label} {said.format(listed(names))}",
                    rule=f"import none of them from {label}" if change == "name-removed" else "",
                    count=len(names),
                    **{at: {name: some[name] for name in names}},
                )
    for module in sorted(old.keys() - new.keys()):
        label = f"flashinfer.{module}".rstrip(".")
        why = candidate["not_imported"].get(label, "there is no such module")
        yield finding(
            "name-removed", label, f"{label} does not import: {why}", baseline=old[module]
        )


def _refusals(baseline: Declarations, candidate: Declarations) -> Iterator[Finding]:
    """Compare what callables refuse in words, and name the parameters that are spoken of."""
    old, new = baseline["refusals"], candidate["refusals"]
    for name in sorted(old.keys() & new.keys()):
        before = {each["message"]: each for each in old[name]}
        after = {each["message"]: each for each in new[name]}
        pairs = (
            ("refusal-added", after, before, "what it did not say before"),
            ("refusal-removed", before, after, "no more what it said before"),
        )
        for change, some, others, said in pairs:
            found = {message: some[message] for message in some if message not in others}
            if found:
                spoken = _spoken_of(baseline["signatures"], name, list(found))
                of = f" of {', '.join(spoken)}" if spoken else ""
                at = "candidate" if change == "refusal-added" else "baseline"
                first = next(iter(found))
                yield finding(
                    change,
                    name,
                    f"{name} says{of} {said}, {count_of(len(found), 'sentence')} such as: {first}",
                    count=len(found),
                    **{at: {m: f"{each['when']} ({each['source']})" for m, each in found.items()}},
                )


def _spoken_of(signatures: Mapping[str, Any], name: str, messages: Sequence[str]) -> list[str]:
    """Name the parameters of a callable that sentences speak of."""
    taken = {
        parameter["name"]
        for qualified, entry in signatures.items()
        if qualified == name or qualified.startswith(f"{name}.")
        for parameter in entry["parameters"]
    }
    words = {word for message in messages for word in re.findall(r"\w+", message)}
    return sorted((taken & words) - ORDINARY)


def _constants(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Finding]:
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name].get("text"), new[name].get("text")
        if before != after:
            yield finding(
                "constant-changed",
                name,
                f"{name} was {before}, now {after} ({new[name].get('source', '')})",
                baseline={name: before},
                candidate={name: after},
            )


def listed(names: Sequence[str]) -> str:
    """List names in a sentence, the first of many."""
    more = len(names) - MOST_NAMES
    told = ", ".join(names[:MOST_NAMES])
    return (f"{told} and {more} more" if more > 0 else told) or "nothing"
