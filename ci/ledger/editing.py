"""Editing a ledger: entries come, get wider or narrower and go; comments and the rest stay.

An entry that comes goes behind the last one of the same implementation, so that a diff shows one
block. What is written is read back in full before the file is replaced.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.items import AoT, Item, Key, Table

from ...fixtures import files_of
from ...impl.registry import BUILT_IN, built_in_provider
from ...impl.targets.backends import FLASHINFER
from ...impl.targets.data_files import read_text
from ...impl.targets.registrations import canonical_name
from ...properties.findings.cases import MUST_FAIL, loading_name
from ...properties.findings.causes import SIZES
from ...properties.findings.corpus import load_case
from ...properties.findings.expectations import read_expectations
from ...properties.findings.files import Output
from ...properties.findings.ledger import CASE_SCHEMA, PREDICATES, Entry, LedgerError, read_case
from ...properties.findings.names import without_reference
from ...properties.verdicts.verdict import BAD
from ...reference import Problem, problem_from_json
from ..console.errors import UsageRefusedError

FREE = ("seed", "request_ids", "token_ids", "query_lens", "seq_lens", "num_tokens", "num_heads",
        "head_dim")  # fmt: skip
"""Fields that say how large a problem is or what its values are, not what is special about it."""
KEPT = (
    "schema",
    "law",
    "implementation",
    "operation",
    "problem",
    "device",
    "without_rules",
    "soak",
)
"""Fields of a case that are kept in the corpus: what a run found is not."""


class ReportError(ValueError):
    """A report that cannot be learned from; the message names the field."""


@dataclass(frozen=True)
class Failure:
    """A failure that no entry explains.

    Attributes:
        implementation, laws, status, kinds: who broke what, and how.
        law: the law under which ``problem`` fails.
        problem: the smallest.
        where: what tells the problems that fail from those that pass, as a predicate.
        device, sm: where; a chip where there is one.
        versions: the versions of the distribution that the implementation comes from, as an entry
            names it.
    """

    implementation: str
    laws: tuple[str, ...]
    status: str
    kinds: tuple[str, ...]
    law: str
    problem: Problem
    where: dict[str, Any]
    device: str
    sm: int | None
    versions: dict[str, str]

    @property
    def kind(self) -> str:
        """First of its kinds; empty if it has none."""
        return next(iter(self.kinds), "")

    @property
    def id(self) -> str:
        """Name for its entry."""
        text = f"{self.implementation}-{self.law}-{self.kind or self.status}".lower()
        return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")


def predicate(problem: Problem) -> dict[str, Any]:
    """Return what is special about a problem: its fields that are not the simplest ones'.

    A number stands for all that are as far from the simplest one, or farther.
    """
    return {
        each.name: _beyond(each.default, getattr(problem, each.name))
        for each in fields(problem)
        if each.name in PREDICATES
        and each.name not in FREE
        and isinstance(getattr(problem, each.name), str | int | float | bool)
        and getattr(problem, each.name) != each.default
    }


def _beyond(simplest: object, value: Any) -> Any:  # noqa: ANN401  as a ledger has it
    if isinstance(value, bool | str) or not isinstance(simplest, int | float):
        return value
    return {"min": value} if value > simplest else {"max": value}


def case_of_entry(name: str) -> str:
    """Return the file of the case of an entry that is added, relative to the ledger."""
    return f"corpus/{name}.json"


def read_document(path: Path) -> TOMLDocument:
    """Return a ledger to edit, empty where there is no file yet.

    The comments above an entry become part of it; tomlkit keeps them at the end of the one before.

    Raises:
        LedgerError: the file cannot be read, or its entries are no tables.
    """
    text = read_text(path, LedgerError) if path.exists() else ""
    document = tomlkit.parse(text.rstrip() + "\n")
    if not document.get("finding"):
        document.pop("finding", None)
        document["finding"] = tomlkit.aot()
    entries = document["finding"]
    if not isinstance(entries, AoT):
        message = f"{path}: finding is a list in brackets; only [[finding]] tables can be edited"
        raise LedgerError(message)
    for entry, following in itertools.zip_longest(entries.body, entries.body[1:]):
        _move(_cut_end(entry), following, document)
    return document


def _cut_end(entry: Table) -> str:
    """Remove the comments and blank lines behind the last value of an entry, and return them."""
    body = entry.value.body
    while isinstance(body[-1][1], Table) and body[-1][1].value.body:
        body = body[-1][1].value.body
    return _cut_comments(body)


def _cut_comments(body: list[tuple[Key | None, Item]]) -> str:
    """Remove the comments and blank lines at the end of a body, and return them."""
    count = len(list(itertools.takewhile(lambda item: item[0] is None, reversed(body))))
    at = len(body) - count
    end = "".join(item.as_string() for _, item in body[at:])
    del body[at:]
    return end


def _move(text: str, following: Table | None, document: TOMLDocument) -> None:
    """Put comments and blank lines in front of an entry, or behind the last one.

    There they stand in front of the comments at the end of the file.
    """
    if following is None:
        text += _cut_comments(document.body)
        document.body.extend(tomlkit.parse(text).body)
    else:
        following.trivia.indent = text + following.trivia.indent.lstrip("\n")


def add_entry(
    path: Path,
    document: TOMLDocument,
    failure: Failure,
    reason: str,
    issue: str = "",
    *,
    known: Collection[str] = (),
) -> str:
    """Make a ledger explain a failure, with a case beside its file, and return the entry's id.

    An entry of the failure's name is widened where it says the same of other values; else another
    one gets that name with a number. Only entries of ``known`` ids are widened.
    """
    failure = replace(failure, implementation=shared_name(failure.implementation, failure.id))
    entries: AoT = document["finding"]
    names = itertools.chain([failure.id], (f"{failure.id}-{n}" for n in itertools.count(2)))
    for name in names:
        found = next((entry for entry in entries.body if entry["id"] == name), None)
        if found is not None and name in known and _widen(found, failure):
            return name
        case = case_of_entry(name)
        if found is None and not (path.parent / case).exists():
            break
    lines = [
        "[[finding]]",
        f"id = {_toml(name)}",
        f"implementation = {_toml(failure.implementation)}",
        f"laws = {_toml(list(failure.laws))}",
        f"status = {_toml(failure.status)}",
        *([f"kinds = {_toml(list(failure.kinds))}"] if failure.kinds else []),
        f"where = {_toml(failure.where)}",
        *([f"versions = {_toml(failure.versions)}"] if failure.versions else []),
        f"device = {_toml(failure.device)}",
        *([f"sm = [{failure.sm}]"] if failure.sm else []),
        *([f"issue = {_toml(issue)}"] if issue else []),
        *(["quarantine = true"] if failure.status in ("HANG", "CRASH") else []),
        f"case = {_toml(case)}",
        f"reason = {_toml(reason)}",
        "",
    ]
    content = {
        "schema": CASE_SCHEMA,
        "law": failure.law,
        "implementation": failure.implementation,
        "problem": failure.problem.to_json(),
        "device": failure.device,
    }
    Output("", path.parent / case).write(content)
    own = [
        number
        for number, entry in enumerate(entries.body, 1)
        if entry["implementation"] == failure.implementation
    ]
    at = own[-1] if own else len(entries)
    (new,) = tomlkit.parse("\n".join(lines))["finding"]
    entries.insert(at, new)
    for entry in entries.body[at : at + 2]:  # the new one, and one that follows it
        _move("\n", entry, document)
    return name


def _widen(entry: Table, failure: Failure) -> bool:
    """Make an entry speak of a failure too, where it can, and return whether it does."""
    known = entry.unwrap()
    where = _union(known["where"], failure.where)
    if where is None or bool(known.get("kinds")) != bool(failure.kinds):
        return False
    if (
        known["implementation"] != failure.implementation
        or known["status"] != failure.status
        or known.get("device", "") != failure.device
        or known.get("versions", {}) != failure.versions
        or failure.sm not in (known.get("sm") or [failure.sm])
    ):
        return False
    for name, value in where.items():
        if value != known["where"][name]:
            entry["where"][name] = tomlkit.value(_toml(value))
    for name, values in (("laws", failure.laws), ("kinds", failure.kinds)):
        for value in values if known.get(name) else ():
            if value not in entry[name]:
                entry[name].append(value)
    return True


def _union(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a predicate that holds where one of two of the same fields does; None if others."""
    if first.keys() != second.keys():
        return None
    found: dict[str, Any] = {}
    for name, one in first.items():
        other = second[name]
        if one == other:
            found[name] = one
        elif isinstance(one, Mapping) and isinstance(other, Mapping):
            widest = {"min": min, "max": max}
            if one.keys() != other.keys() or len(one) != 1 or not one.keys() <= widest.keys():
                return None
            found[name] = {end: widest[end](limit, other[end]) for end, limit in one.items()}
        elif isinstance(one, Mapping) or isinstance(other, Mapping):
            return None
        else:
            values = [*(one if isinstance(one, list) else [one])]
            values += other if isinstance(other, list) else [other]
            found[name] = list(dict.fromkeys(values))
    return found


def narrow_entry(document: TOMLDocument, entry: Entry, provider: str, version: str | None) -> None:
    """Make a ledger's entry speak no longer of a release, or remove it; its comments stay."""
    entries: AoT = document["finding"]
    at = next(n for n, each in enumerate(entries.body) if each["id"] == entry.id)
    versions = entries[at].get("versions", {})
    if version is not None and provider in versions:
        versions[provider] = f"{versions[provider]},!={version}"
        return
    comments = entries[at].trivia.indent
    del entries[at]
    _move(comments, next(iter(entries.body[at:]), None), document)


def replace_ledger(path: Path, document: TOMLDocument) -> None:
    """Write a ledger once it reads back in full, with its cases.

    Raises:
        LedgerError: it does not.
    """
    if not document["finding"]:
        document.pop("finding")  # it would be written as a list in brackets
    draft = path.with_name(f".{path.name}.draft")
    try:
        Output("", draft).write(tomlkit.dumps(document).strip("\n") + "\n")
        read_expectations(str(draft))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def add_to_corpus(case: Path, folder: Path) -> Path:
    """Put a case into a corpus, without what a run found of it and what is of one machine.

    Raises:
        UsageRefusedError: it cannot be read or shared, or the corpus has it.
    """
    try:
        load_case(case)
        law, problem, data = read_case(case)
        name = shared_name(data["implementation"], f"{case}")
        for known in files_of(folder):
            their_law, theirs, their_data = read_case(known)
            if (their_law, theirs, their_data["implementation"]) == (law, problem, name):
                message = f"{case}: the corpus has it: {known.name}"
                raise UsageRefusedError(message)
    except LedgerError as error:
        raise UsageRefusedError(str(error)) from error
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    path = folder / f"{plain}-{law.replace('_', '-')}-{problem.id}.json"
    kept = {field: data[field] for field in KEPT if data.get(field) not in (None, [], 0)}
    kept |= {"schema": CASE_SCHEMA, "implementation": name, "problem": problem.to_json()}
    Output("", path).write(kept)
    return path


def shared_name(name: str, source: str) -> str:
    """Return a name that leads to an implementation on other machines too.

    The registered one where there is one; a file in the current folder by its path from there.

    Args:
        name: the name as it was given here.
        source: the source whose implementation it is, for the message.

    Raises:
        UsageRefusedError: it is a file elsewhere on this machine.
    """
    registered = loading_name(name)
    module, _, attribute = registered.rpartition(":")
    if not module.endswith(".py"):
        return registered
    here = os.path.relpath(module)
    if here.startswith(os.pardir):
        message = (
            f"{source}: its implementation {name} is a file of this machine outside of the current "
            "folder, and a case is shared: name it by its module"
        )
        raise UsageRefusedError(message)
    return f"{Path(here).as_posix()}:{attribute}"


def failures_in(report: Mapping[str, Any]) -> list[Failure]:
    """Return the failures of a check's, a gate's or a comparison's report that nothing explains.

    A check says the cause of each. Those of a comparison that fail alike are one, with all of their
    laws.
    """
    bump = str(report.get("schema", "")).startswith("kernelproof/bump/")
    found: dict[tuple[str, ...], list[tuple[tuple[str, ...], Problem, Mapping[str, Any]]]] = {}
    for number, each in enumerate(report["findings"]):
        if each.get("entry") or not each.get("problem"):
            continue
        if bump:
            verdict = each["candidate"]
            laws, name = tuple(each["laws"]), each["subject"]
        else:
            verdict, name = each, _declared_name(each, each["implementation"], report)
            laws = tuple(each.get("laws") or (each["law"],))
        if verdict.get("status") not in BAD or verdict.get("kind") == MUST_FAIL:
            continue
        told = {k: v for k, v in each["problem"].items() if k not in ("id", "told")}
        try:
            problem = problem_from_json(told)
        except ValueError as error:
            message = f"findings[{number}]: {error}"
            raise ReportError(message) from error
        own = (each["law"], problem.id) if "cause" in each else ()
        key = (name, verdict["status"], verdict.get("kind", ""), *own)
        found.setdefault(key, []).append((laws, problem, each))
    target = _target(report, bump=bump)
    return [
        Failure(
            name,
            tuple(dict.fromkeys(law for laws, *_ in members for law in laws)),
            status,
            tuple(members[0][2].get("kinds", [kind] if kind else [])),
            members[0][2].get("law", members[0][0][0]),
            smallest := min((each[1] for each in members), key=lambda problem: problem.work),
            _where(members[0][2].get("cause"), smallest),
            target["device"],
            target["sm"],
            {provider: f"=={version}"} if version else {},
        )
        for (name, status, kind, *_), members in found.items()
        for provider, version in [_release_of(name, report, target)]
    ]


def _release_of(
    name: str, report: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Return the distribution of an implementation, as an entry names it, and its version.

    What Kernelproof ships for other packages than FlashInfer is bound to no version, but by a
    comparison of such a package.
    """
    if _compared(report) != FLASHINFER:
        return _compared(report), report["candidate"]["version"]
    known = {
        _declared_name(each, each["name"], report): each
        for each in report.get("implementations", ())
    }
    told = known.get(name, {})
    provider = told.get("provider") or built_in_provider(name) or ""
    if provider == FLASHINFER:
        return "flashinfer", target["flashinfer"]
    return canonical_name(provider), None if name in BUILT_IN else told.get("provider_version")


def _declared_name(said: Mapping[str, Any], shown: str, report: Mapping[str, Any]) -> str:
    """Return the name by which entries match, of a finding or of an implementation of a report.

    A name that several implementations share is shown with each one's reference behind it.
    """
    if said.get("declared_name"):
        return str(said["declared_name"])
    for each in report.get("implementations", ()):  # older reports do not have the field
        if each["name"] == shown:
            return without_reference(shown, each.get("reference", ""))
    return shown


def _compared(report: Mapping[str, Any]) -> str:
    """Return the distribution whose releases a report compares, FlashInfer if it says none."""
    return str(report.get("package", FLASHINFER))


def _where(cause: Mapping[str, Any] | None, problem: Problem) -> dict[str, Any]:
    """Return the predicate of a failure: what its run says of its cause, and of the smallest."""
    values = dict(cause["values"]) if cause else {}
    # Sizes alone would explain nearly every failure, that of another fault too.
    special = any(name not in (*FREE, *SIZES) for name in values)
    return values if special else predicate(problem) | values


def passes_in(report: Mapping[str, Any], entries: Sequence[Entry]) -> list[tuple[Entry, str, str]]:
    """Return the entries whose case passes though they say that it fails, and with what release.

    The release is a distribution, as the entry names it, and its version.

    Raises:
        UsageRefusedError: a version made the report that did not yet name those entries.
    """
    for index, each in enumerate(report["findings"]):
        if each.get("kind") == MUST_FAIL and "contradicts" not in each:
            message = f"findings[{index}] names no entry of the ledger: make this report again"
            raise UsageRefusedError(message)
    bump = str(report.get("schema", "")).startswith("kernelproof/bump/")
    target = _target(report, bump=bump)
    by_id = {entry.id: entry for entry in entries}
    names = [
        each.get("entry") if each.get("change") == "fixed" else each.get("contradicts")
        for each in report["findings"]
    ]
    return [
        (entry, provider, version)
        for name in dict.fromkeys(names)
        if (entry := by_id.get(name)) is not None
        for provider, version in [_release_for(entry, report, target)]
        if _speaks_of(entry, provider, version)
    ]


def _release_for(
    entry: Entry, report: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the distribution whose version an entry speaks of, FlashInfer if none, and which."""
    provider, version = _release_of(entry.implementation, report, target)
    named = next((each for each in entry.versions if canonical_name(each) == provider), None)
    if named and version:
        return named, version
    if _compared(report) != FLASHINFER:  # the entry holds for all releases of it: a person decides
        return provider, ""
    return "flashinfer", target["flashinfer"] or ""


def _speaks_of(entry: Entry, provider: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    known = entry.versions.get(provider)
    if known is None:
        return provider == "flashinfer"
    return SpecifierSet(known).contains(version, prereleases=True)


def _target(report: Mapping[str, Any], *, bump: bool) -> dict[str, Any]:
    if not bump:
        target = report["target"]
        return {name: target.get(name) for name in ("device", "sm", "flashinfer")}
    machine = report["machines"][0]
    chip = machine["chip"]
    return {
        "device": machine["device"],
        "sm": chip if isinstance(chip, int) else None,
        "flashinfer": report["candidate"]["flashinfer"],
    }


def _toml(value: Any) -> str:  # noqa: ANN401  JSON
    """Return a value as TOML on one line: JSON, except for tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
