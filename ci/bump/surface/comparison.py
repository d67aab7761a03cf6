"""What changed of what serving engines use: names, parameters, enums, refusals, constants."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ....properties.verdicts.text import count_of
from ..verdicts.findings import Finding, finding

Declarations = Mapping[str, Any]
Parameter = Mapping[str, str]
POSITIONAL_ONLY = "positional_only"
POSITIONAL = (POSITIONAL_ONLY, "positional_or_keyword")


def surface_findings(baseline: Declarations, candidate: Declarations) -> Iterator[Finding]:
    """Compare two releases' surfaces, as ``impl.flashinfer_declarations`` collects them."""
    old, new = baseline["signatures"], candidate["signatures"]
    gone = [name for name in sorted(old) if name not in new and _imports(candidate, name)]
    whole: dict[str, list[str]] = {}
    for name in gone:  # a class once, not each of its methods
        module, owner = name.split(".")[:2]
        left = owner in candidate["exports"].get(module, {})
        whole.setdefault(name if left else f"{module}.{owner}", []).append(name)
    yield from _removed(old, whole)
    known = old.keys() | {name for name in new if not _imports(baseline, name)}
    yield from _callables(old, new, known)
    yield from name_findings(baseline, candidate)


def called_findings(baseline: Declarations, candidate: Declarations) -> Iterator[Finding]:
    """Compare what adapters call of two releases, as ``callables_of`` reads it."""
    old, new = ({**each["signatures"]} for each in (baseline, candidate))
    yield from _removed(old, {name: [name] for name in sorted(old.keys() - new.keys())})
    # Of a constant, an instance or an inherited method no parameters are known.
    compared = [name for name in new if "parameters" in new[name]]
    compared = [name for name in compared if "parameters" in old.get(name, new[name])]
    yield from _callables(old, {name: new[name] for name in compared}, old.keys())


def _callables(
    old: Mapping[str, Any], new: Mapping[str, Any], known: Collection[str]
) -> Iterator[Finding]:
    """Compare parameters; a callable that is not known of the baseline is new."""
    for name in sorted(new):
        if name not in old:
            if name not in known:
                required = [each["name"] for each in new[name]["parameters"] if _required(each)]
                yield finding(
                    "callable-added",
                    name,
                    f"{name} is new; it needs {listed(required)}",
                    baseline={"signature": "not there"},
                    candidate=_told(new[name]),
                )
        else:
            yield from _parameters(name, old[name], new[name])


def _removed(old: Mapping[str, Any], whole: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Return callables that are gone, by what they are called together."""
    for subject, names in whole.items():
        yield finding(
            "callable-removed",
            subject,
            f"{subject} is gone: who imports or calls it fails",
            rule=f"stop using {subject} before the bump",
            baseline={name: _told(old[name])["signature"] for name in names},
            candidate={subject: "gone"},
        )


def _imports(declared: Declarations, name: str) -> bool:
    """Whether the module of a callable did import, so that its absence means something."""
    module = f"flashinfer.{name.partition('.')[0]}"
    return module not in declared["not_imported"]


class _Change(NamedTuple):
    """A change of a callable's parameters, which becomes a finding.

    Attributes:
        change, message, rule, detail: those of the finding.
        summed: parameters or positions that it sums up.
    """

    change: str
    message: str
    rule: str = ""
    detail: str = ""
    summed: int = 1


def _parameters(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Finding]:
    before, after = old["parameters"], new["parameters"]
    sides: dict[str, Any] = {"baseline": _told(old), "candidate": _told(new)}
    for compare in (_by_position, _by_name, _open_ended):
        for change, message, rule, detail, summed in compare(name, before, after):
            more = {"rule": rule, "detail": detail, "count": summed}
            yield finding(change, name, message, **more, **sides)


def _by_position(
    name: str, before: Sequence[Parameter], after: Sequence[Parameter]
) -> Iterator[_Change]:
    old, new = positional_names(before), positional_names(after)
    rest = next(iter(_of_kind(before, "var_positional")), "")
    at = moved_positions(before, after)
    taken = [f"position {i} was of *{rest}, now {new[i]}" for i in at if i >= len(old)]
    moved = [f"position {i} was {old[i]}, now {new[i]}" for i in at if i < len(old)]
    rule = ""
    if moved:
        rule = f"pass the parameters of {name} by keyword from position {moved[0].split()[1]} on"
    elif taken:
        most = f"no more than {count_of(len(old), 'value')}" if old else "nothing"
        rule = f"pass {most} by position to {name}"
    moved += taken
    if moved:
        more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
        rule = f"{rule}, and accept this finding"
        yield _Change("positional-meaning", f"{name}: {moved[0]}{more}", rule, summed=len(moved))
    lost = old[len(new) :]
    if lost and not moved:
        absorbed = next((p["name"] for p in after if p["kind"] == "var_positional"), "")
        how = f"*{absorbed} takes what comes by position" if absorbed else "by position they raise"
        yield _Change(
            "positional-refused",
            f"{name} turned keyword-only from position {len(new)} on: {listed(lost)}; {how}",
            f"pass the parameters of {name} by keyword from position {len(new)} on",
            summed=len(lost),
        )


def moved_positions(before: Sequence[Parameter], after: Sequence[Parameter]) -> list[int]:
    """Return the positions, from 0 on, whose value another parameter takes now."""
    old, new = positional_names(before), positional_names(after)
    renamed = renamed_parameters(before, after)
    moved = [
        i
        for i, (one, other) in enumerate(zip(old, new, strict=False))
        if one != other and renamed.get(one) != other
    ]
    taken = range(len(old), len(new)) if _of_kind(before, "var_positional") else ()
    return [*moved, *taken]


def _by_name(
    name: str, before: Sequence[Parameter], after: Sequence[Parameter]
) -> Iterator[_Change]:
    old = {each["name"]: each for each in before if not _is_open(each)}
    new = {each["name"]: each for each in after if not _is_open(each)}
    hidden = bool(_of_kind(after, "var_keyword"))
    renamed = renamed_parameters(before, after)
    for one, other in renamed.items():
        if old[one]["kind"] != POSITIONAL_ONLY:  # else nobody names it
            rule = f"call it {other} from the candidate on, {one} before"
            said = f"{name}: {one} is called {other} now"
            yield _Change("parameter-renamed", said, rule, other)
    for one, was in old.items():
        if one not in new and one not in renamed and not hidden:  # **kwargs may still take it
            said = f"{name}: the parameter {one} is gone"
            yield _Change("parameter-removed", said, f"do not pass {one} to {name}", one)
        if one in new and _unnamed(was, new[one], hidden=hidden):
            said = f"the parameter {one} is taken by position alone: a call that names it raises"
            rule = f"pass {one} of {name} by position"
            yield _Change("parameter-removed", f"{name}: {said}", rule, one)
    added = [each for each in new if each not in old and each not in renamed.values()]
    for one in added:
        if _required(new[one]):
            said = f"{name}: the parameter {one} is new and has no default"
            yield _Change("parameter-required", said, f"pass {one} to {name}", one)
    optional = [each for each in added if not _required(new[each])]
    if optional:
        said = f"{name} takes {listed(optional)} too"
        yield _Change("parameter-added", said, summed=len(optional))
    yield from _defaults(name, old, new)


def _unnamed(old: Parameter, new: Parameter, *, hidden: bool) -> bool:
    """Whether a call that names a parameter now raises, because it became positional-only.

    Where ``**kwargs`` takes the name, the value is still wanting.
    """
    became = old["kind"] != POSITIONAL_ONLY and new["kind"] == POSITIONAL_ONLY
    return became and (_required(new) or not hidden)


def _open_ended(
    name: str, before: Sequence[Parameter], after: Sequence[Parameter]
) -> Iterator[_Change]:
    """Return ``*args`` and ``**kwargs`` that are gone: they took what no parameter stands for."""
    for one in _of_kind(before, "var_positional"):
        if not _of_kind(after, "var_positional"):
            most = count_of(len(positional_names(after)), "value")
            said = f"{name}: *{one} is gone: with more than {most} by position it raises"
            rule = f"pass no more than {most} by position to {name}"
            yield _Change("positional-refused", said, rule, f"*{one}")
    for one in _of_kind(before, "var_keyword"):
        if not _of_kind(after, "var_keyword"):
            said = f"**{one} is gone: a call that names anything else than its parameters raises"
            rule = f"name nothing but the parameters of {name}"
            yield _Change("parameter-removed", f"{name}: {said}", rule, f"**{one}")


def _defaults(
    name: str, old: Mapping[str, Parameter], new: Mapping[str, Parameter]
) -> Iterator[_Change]:
    for one in old.keys() & new.keys():
        if _required(new[one]) and not _required(old[one]):
            was = old[one]["default"]
            said = f"{name}: the parameter {one} had the default {was} and has none"
            yield _Change("parameter-required", said, f"pass {one} to {name}", one)
    changed = [
        f"{one} was {old[one]['default']}, now {new[one]['default']}"
        for one in old
        if one in new
        and {"default"} <= old[one].keys() & new[one].keys()
        and old[one]["default"] != new[one]["default"]
    ]
    if changed:
        rule = f"pass what matters of {name} rather than leave it to the default"
        said = f"{name}: {'; '.join(changed)}"
        yield _Change("default-changed", said, rule, summed=len(changed))


def renamed_parameters(
    before: Sequence[Parameter], after: Sequence[Parameter]
) -> Mapping[str, str]:
    """Return parameters of which only the name changed: the one before is the same, or renamed."""
    old, new = [each["name"] for each in before], [each["name"] for each in after]
    gone = [each["name"] for each in before if each["name"] not in new and not _is_open(each)]
    come = [name for name in new if name not in old]
    found: dict[str, str] = {}
    for one in gone:
        here = before[old.index(one)]
        previous = _previous(old, one)
        for other in come:
            there = after[new.index(other)]
            alike = {k: v for k, v in here.items() if k != "name"} == {
                k: v for k, v in there.items() if k != "name"
            }
            in_place = found.get(previous, previous) == _previous(new, other)
            if alike and in_place and _kindred(one, other):
                found[one] = other
                come.remove(other)
                break
    return found


def _previous(names: Sequence[str], name: str) -> str:
    """Return the name before another; empty for the first."""
    at = names.index(name)
    return names[at - 1] if at else ""


def _kindred(one: str, other: str) -> bool:
    """Whether two names share a word: a name that is quite another is another parameter."""
    return bool(set(one.split("_")) & set(other.split("_")))


def positional_names(parameters: Sequence[Parameter]) -> list[str]:
    """Return the names of parameters that a call may pass by position."""
    return _of_kind(parameters, *POSITIONAL)


def _of_kind(parameters: Sequence[Parameter], *kinds: str) -> list[str]:
    return [each["name"] for each in parameters if each["kind"] in kinds]


def _is_open(parameter: Parameter) -> bool:
    """Separate ``*args`` and ``**kwargs`` from parameters."""
    return parameter["kind"].startswith("var_")


def _required(parameter: Parameter) -> bool:
    return "default" not in parameter and not _is_open(parameter)


def _told(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a signature as Python writes it, and its place."""
    if "parameters" not in entry:
        return {"signature": "there", "source": entry["source"]}
    parts, keyword_only = list[str](), False
    kinds = [each["kind"] for each in entry["parameters"]]
    for each, following in zip(entry["parameters"], [*kinds, ""][1:], strict=True):
        kind = each["kind"]
        if kind == "keyword_only" and not keyword_only:
            keyword_only = True
            if not any(part.startswith("*") for part in parts):
                parts.append("*")
        mark = {"var_positional": "*", "var_keyword": "**"}.get(kind, "")
        default = f"={each['default']}" if "default" in each else ""
        parts.append(f"{mark}{each['name']}{default}")
        if kind == POSITIONAL_ONLY != following:
            parts.append("/")
    return {"signature": f"({', '.join(parts)})", "source": entry["source"]}


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
