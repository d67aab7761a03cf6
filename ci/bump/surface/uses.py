"""Which changes of a release an engine's source uses, and where."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..verdicts.findings import MAYBE_USED, UNKNOWN_RECEIVER, UNUSED, USED, Finding
from .callables import parameters_of
from .comparison import moved_positions, positional_names, renamed_parameters
from .engine_files import FLASHINFER, EngineFile, read_engine
from .engine_modules import UNKNOWN, Engine, string
from .engine_names import ALL, CALL, COPY, IMPORT, NAME, NUMBER, TEXT, VALUE, Mention, Names
from .launching import ROUTED, WRAPPERS, names_of

MOST_PLACES = 5
"""Places that a finding names."""
UNSEEN = (VALUE, TEXT)
"""Kinds of mentions after which a call of any form may follow."""
Signature = Sequence[Mapping[str, str]]
Affected = Callable[[Mention], bool]
"""Whether a change is felt at a place that names the callable."""


@dataclass(frozen=True)
class Source:
    """The source of one engine.

    Attributes:
        path: the path as it was given.
        files: the files of Python in it.
    """

    path: Path
    files: tuple[EngineFile, ...]

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read it.

        Raises:
            UsageRefusedError: it cannot be read, or holds no Python.
        """
        found = read_engine(path)
        if path.is_dir():
            found = [replace(each, path=(path / each.path).as_posix()) for each in found]
        return cls(path, tuple(found))


def with_uses(
    findings: Sequence[Finding],
    sources: Sequence[Source],
    check: Callable[[], None] = lambda: None,
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Look for what findings are about in engines' sources.

    Args:
        findings: the findings of a comparison.
        sources: the sources of one or several engines.
        check: called for each file; may raise to end the search, which takes a minute.

    Returns:
        The findings, those of the surface with what uses them; and for the report what was read.
    """
    if not sources:
        return list(findings), []
    files = [each for source in sources for each in source.files]
    naming = {each.path for each in files if FLASHINFER.encode() in (each.data or b"")}
    asked = [each for each in findings if each.change in CHANGES_FELT]
    methods = {_words(each).pop() for each in asked if _is_method(each)}
    words = {word for each in asked if not _is_method(each) for word in _words(each)}
    names = Names(Engine(files), words, _ordinary(asked), methods, check)
    found = [
        replace(each, uses=_uses(each, names, naming)) if each.change in CHANGES_FELT else each
        for each in findings
    ]
    unparsed = {module.file.path: module.why for module in names.unparsed}
    return found, [
        {
            "path": str(source.path),
            "files": len(source.files),
            "naming": sum(each.path in naming for each in source.files),
            "unread": [
                {"file": each.path, "why": each.why or unparsed[each.path]}
                for each in source.files
                if each.why or each.path in unparsed
            ],
        }
        for source in sources
    ]


def _words(found: Finding) -> set[str]:
    """Return the last parts of the names that a finding is about."""
    if found.change in ENUM_CHANGES:
        return {found.subject, _snake(found.subject)}
    if found.change == "name-removed":
        return set()
    if CHANGES_FELT.get(found.change) is _launches:
        return set(names_of(found.subject))
    *_, owner, name = ["", *found.subject.split(".")]
    return {owner} if name == "__init__" else {name}


def _is_method(found: Finding) -> bool:
    is_of_class = found.subject.count(".") > 1 and not found.subject.endswith(".__init__")
    return is_of_class and found.change != "name-removed"  # whose subject is a module


def _ordinary(findings: Iterable[Finding]) -> set[str]:
    """Return public names that are gone: some are of no callable, such as ``logger``."""
    return {name for each in findings if each.change == "name-removed" for name in each.baseline}


def _uses(found: Finding, names: Names, naming: set[str]) -> dict[str, Any]:
    """Return what uses a change: the places, those beyond doubt first.

    Args:
        found: a finding.
        names: what the engines' sources name.
        naming: paths of the files that write FlashInfer's name.
    """
    owners = set(found.subject.split("."))
    near = {each.path for each in names.mentions if each.certain and each.name in owners}
    felt = CHANGES_FELT[found.change](found, names) if naming else []
    felt.sort(
        key=lambda each: (
            not each.certain,
            each.path not in near,
            each.path not in naming,
            each.kind != CALL,
            each.path,
            each.line,
        )
    )
    if _is_method(found):
        felt = [each for each in map(partial(_of_class, found), felt) if each is not None]
    places = [_place(each) for each in felt if not _is_unknown(each)]
    unknown = [_place(each) for each in felt if _is_unknown(each)]
    words = _words(found) or _ordinary([found])
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(words)))})\b".encode())
    for module in names.unparsed:
        data = module.file.data or b""
        for match in [*pattern.finditer(data)][:MOST_PLACES]:
            line = data[: match.start()].count(b"\n") + 1
            places.append({"file": module.file.path, "line": line, "how": "a file without syntax"})
    places += [{"file": each.path, "line": 0, "how": each.why} for each in names.unread]
    places = [each for i, each in enumerate(places) if each not in places[:i]]
    without = UNKNOWN_RECEIVER if unknown else UNUSED
    status = USED if any(map(_certainly, felt)) else MAYBE_USED if places else without
    return {
        "status": status,
        "count": len(places),
        "places": places[:MOST_PLACES],
        "unknown_count": len(unknown),
        "unknown": unknown[:MOST_PLACES],
    }


def _place(mention: Mention) -> dict[str, Any]:
    return {"file": mention.path, "line": mention.line, "how": mention.how}


def _is_unknown(mention: Mention) -> bool:
    return mention.receivers == frozenset([UNKNOWN])


def _of_class(found: Finding, mention: Mention) -> Mention | None:
    """Return a place where a method is used, if it may be of the class that a finding is about.

    The receiver's class decides; ``UNKNOWN`` is its only one where nobody can say.
    """
    if mention.receivers is None:
        return mention
    owner = found.subject.split(".")[-2]
    # Classes of FlashInfer that add to a name inherit its methods: CUDAGraph...Wrapper.
    own = {e for e in mention.receivers if e.rpartition(".")[2].endswith(owner)}
    if own:
        is_one = own == mention.receivers
        origin = f"{min(own)}.{mention.name}" if is_one else mention.origin
        return replace(mention, receivers=frozenset(own), origin=origin)
    return (
        replace(mention, receivers=frozenset([UNKNOWN])) if UNKNOWN in mention.receivers else None
    )


def _certainly(mention: Mention) -> bool:
    return mention.certain and mention.kind not in UNSEEN and not mention.starred


def _mentions(names: Names, subject: str) -> Iterator[Mention]:
    """Return the places that name a callable, or all that its module has."""
    parts = subject.split(".")
    wanted = parts[-2] if parts[-1] == "__init__" else parts[-1]
    module = f"{FLASHINFER}.{parts[0]}"
    for each in names.mentions:
        if each.name == ALL:
            base = each.origin.removesuffix(f".{ALL}")
            if base == FLASHINFER or f"{module}.".startswith(f"{base}.") or base.startswith(module):
                yield each
        elif each.name == wanted and each.kind not in (COPY, NUMBER):
            yield each


def _any(found: Finding, names: Names) -> list[Mention]:
    return list(_mentions(names, found.subject))


def _launches(found: Finding, names: Names) -> list[Mention]:
    """Return the places that name a function that launches kernels, or a class that may do so."""
    felt = _any(found, names)
    if routed := ROUTED.get(found.subject):
        felt += [each for each in _mentions(names, routed) if each.name != ALL]
    wrapper = WRAPPERS.get(found.subject)
    for each in _mentions(names, wrapper) if wrapper else ():
        if each.name != ALL:
            felt.append(replace(each, kind=VALUE, how=f"{each.how}, perhaps of trtllm-gen"))
    return felt


def _removed_names(found: Finding, names: Names) -> list[Mention]:
    """Return the places that name a public name of a module, as one of that module."""
    wanted = {f"{found.subject}.{name}" for name in [*found.baseline, ALL]}
    return [each for each in names.mentions if each.origin in wanted]


def _calls(found: Finding, names: Names, affected: Callable[..., Affected]) -> list[Mention]:
    """Return the calls that feel a change of parameters, and whatever may be such a call."""
    mentions = list(_mentions(names, found.subject))
    before, after = (parameters_of(side.get("signature", "")) for side in _sides(found))
    # A method's first parameter is passed by the dot.
    bound = int(found.subject.count(".") > 1)
    if before is None or after is None:
        felt: Affected = _always
    else:
        felt = affected(Parameters(before, after, _detail(found), bound))
    if not any(each.kind in (CALL, *UNSEEN) for each in mentions):
        how = "imported, and no call of it is seen"
        return [replace(m, kind=VALUE, how=how) for m in mentions if m.kind == IMPORT]
    return [each for each in mentions if each.kind in UNSEEN or (each.kind == CALL and felt(each))]


def _always(_: Mention) -> bool:
    return True


def _sides(found: Finding) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return found.baseline, found.candidate


def _detail(found: Finding) -> str:
    """Return the parameter that a finding is about: the last part of its id."""
    return found.id.partition(f"/{found.change}/{found.subject}/")[2]


@dataclass(frozen=True)
class Parameters:
    """A change of parameters.

    Attributes:
        before, after: the callable's parameters with each release.
        name: the one that changed; empty where the finding is about several.
        bound: 1 for a method, whose first parameter no call passes; else 0.
    """

    before: Signature
    after: Signature
    name: str
    bound: int


def _by_position(of: Parameters) -> Affected:
    first = min(moved_positions(of.before, of.after), default=0)
    return lambda call: call.starred or call.positional + of.bound > first


def _refused(of: Parameters) -> Affected:
    most = len(positional_names(of.after))
    return lambda call: call.starred or call.positional + of.bound > most


def _gone(of: Parameters) -> Affected:
    names = {each["name"] for each in of.after if not each["kind"].startswith("var_")}
    if of.name.startswith("**"):
        return lambda call: call.open_keywords or not names.issuperset(call.keywords)
    old = positional_names(of.before)
    at = old.index(of.name) if of.name in old and of.name not in names else None

    def felt(call: Mention) -> bool:
        named = call.open_keywords or of.name in call.keywords
        return named or (at is not None and (call.starred or call.positional + of.bound > at))

    return felt


def _renamed(of: Parameters) -> Affected:
    renamed = renamed_parameters(of.before, of.after).items()
    old = {other: one for one, other in renamed}.get(of.name)
    return lambda call: call.open_keywords or old is None or old in call.keywords


def _required(of: Parameters) -> Affected:
    return _leaving_out([of.name], of)


def _default(of: Parameters) -> Affected:
    old = {each["name"]: each.get("default") for each in of.before}
    changed = (
        each for each in of.after if old.get(each["name"]) not in (None, each.get("default"))
    )
    return _leaving_out([each["name"] for each in changed], of)


def _leaving_out(wanted: Sequence[str], of: Parameters) -> Affected:
    """Return whether a call may leave out a parameter: an open one may."""
    places = {name: i for i, name in enumerate(positional_names(of.after))}
    return lambda call: any(
        name not in call.keywords and call.positional + of.bound <= places.get(name, len(places))
        for name in wanted
    )


def _members(found: Finding, names: Names) -> list[Mention]:
    """Return the places that name a member that is gone, or may."""
    gone = {name: number for name, number in found.baseline.items() if name not in found.candidate}
    made: list[Mention] = []
    for each in _of_enum(found, names):
        asked, by = _asked_for(each)
        if each.kind in UNSEEN or (asked and (by is None or by in gone or by in gone.values())):
            made.append(_said(each, by))
    return made


def _numbers(found: Finding, names: Names) -> list[Mention]:
    """Return the places that take a member by a number that means another one now."""
    meant = {number: name for name, number in found.candidate.items()}
    moved = {number for name, number in found.baseline.items() if meant.get(number) != name}
    made: list[Mention] = []
    for each in _of_enum(found, names):
        _, by = _asked_for(each)
        if each.kind in UNSEEN or (each.kind == CALL and (by is None or by in moved)):
            made.append(_said(each, by))
    for each in names.mentions:
        is_number = each.kind == NUMBER and each.name == _snake(found.subject)
        if is_number and isinstance(each.node, ast.Constant) and each.node.value in moved:
            made.append(each)
        if each.kind == COPY and each.name == found.subject and isinstance(each.node, ast.ClassDef):
            made += [replace(each, line=line, how=how) for line, how in _copied(each.node, found)]
    return made


def _of_enum(found: Finding, names: Names) -> Iterator[Mention]:
    for each in names.mentions:
        if each.name in (found.subject, ALL) and each.kind not in (COPY, NUMBER):
            yield each


def _asked_for(each: Mention) -> tuple[bool, object]:
    """Return whether a place asks an enum for a member, and by which name or number.

    The name or number is None where it is computed.
    """
    node, parent = each.node, each.parent
    if isinstance(parent, ast.Attribute):
        return True, parent.attr
    if isinstance(parent, ast.Subscript):
        return True, string(parent.slice)
    if isinstance(parent, ast.Call) and parent.func is node:
        value = parent.args[0] if parent.args else None
        return True, value.value if isinstance(value, ast.Constant) else None
    if isinstance(parent, ast.Call) and each.kind == NAME and len(parent.args) > 1:  # getattr
        return True, string(parent.args[1])
    return False, None


def _said(each: Mention, by: object) -> Mention:
    """Return a place that may ask for any member as one that is not certain."""
    if each.kind in (CALL, NAME):
        if by is None:
            return replace(each, kind=VALUE, how="a member by a name or number that is computed")
        return replace(each, how=f"the member {by}")
    return each


def _copied(copy: ast.ClassDef, found: Finding) -> Iterator[tuple[int, str]]:
    """Return the members of a copy of an enum whose numbers mean another member now."""
    meant = {number: name for name, number in found.candidate.items()}
    for each in copy.body:
        if not (isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)):
            continue
        value: ast.expr = each.value
        if isinstance(value, ast.Tuple) and len(value.elts) == 1:  # IntEnum takes (9,) for 9
            value = value.elts[0]
        number = value.value if isinstance(value, ast.Constant) else None
        name = each.targets[0].id
        if name in found.baseline and isinstance(number, int) and meant.get(number, name) != name:
            yield each.lineno, f"a copy of the enum: {name} is {number}, now {meant[number]}"


def _snake(name: str) -> str:
    """Return the parameter that takes an enum: ``activation_type`` of ``ActivationType``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


ENUM_CHANGES = ("enum-number-moved", "enum-member-removed")
CHANGES_FELT: Mapping[str, Callable[[Finding, Names], list[Mention]]] = {
    "callable-removed": _any,
    "parameter-removed": partial(_calls, affected=_gone),
    "parameter-renamed": partial(_calls, affected=_renamed),
    "parameter-required": partial(_calls, affected=_required),
    "positional-meaning": partial(_calls, affected=_by_position),
    "positional-refused": partial(_calls, affected=_refused),
    "default-changed": partial(_calls, affected=_default),
    "enum-number-moved": _numbers,
    "enum-member-removed": _members,
    "name-removed": _removed_names,
    "refusal-added": _any,
    "refusal-removed": _any,
    **dict.fromkeys(("calls-die", "calls-raise", "calls-rebuilt", "calls-rerouted"), _launches),
    "calls-gained": _launches,
}
"""Changes that an engine's source may use, and the places that feel each."""
