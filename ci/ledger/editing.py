"""Editing a ledger as text: entries come, get narrower and go, and the rest keeps every byte.

An entry that comes goes behind the last one of the same implementation, so that a diff shows one
block. What is written is read back in full before the file is replaced.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...fixtures import files_of
from ...impl.registry import BUILT_IN, built_in_provider
from ...impl.targets.backends import FLASHINFER
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

BLOCK = re.compile(r"^\[\[finding\]\]\n(?:(?!^\[\[finding\]\]|^#).*\n?)*", re.MULTILINE)
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
        law: under which ``problem`` fails.
        problem: the smallest.
        where: what tells the problems that fail from those that pass, as a predicate.
        device, sm: where; a chip where there is one.
        versions: of the distribution that the implementation comes from, as an entry names it.
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
        """The first of its kinds; empty if there is none."""
        return next(iter(self.kinds), "")

    @property
    def id(self) -> str:
        """A name for its entry."""
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


def add_entry(
    path: Path,
    text: str,
    failure: Failure,
    reason: str,
    issue: str = "",
    *,
    entries: Sequence[Entry] = (),
) -> tuple[str, str]:
    """Return a ledger's text that explains a failure, and the entry; write its case beside it.

    An entry of the failure's name is widened where it says the same of other values; else another
    one gets that name with a number.
    """
    failure = replace(failure, implementation=shared_name(failure.implementation, failure.id))
    names = itertools.chain([failure.id], (f"{failure.id}-{n}" for n in itertools.count(2)))
    for name in names:
        known = next((entry for entry in entries if entry.id == name), None)
        if known is not None and (widened := _widened(text, known, failure)) is not None:
            return widened, name
        case = case_of_entry(name)
        if f'id = "{name}"\n' not in text and not (path.parent / case).exists():
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
    block = "\n".join(lines)
    own = [
        found
        for found in BLOCK.finditer(text)
        if f"implementation = {_toml(failure.implementation)}\n" in found[0]
    ]
    at = own[-1].end() if own else len(text)
    before, after = text[:at].rstrip("\n"), text[at:].lstrip("\n")
    return f"{before}\n\n{block}" + (f"\n{after}" if after else ""), name


def _widened(text: str, entry: Entry, failure: Failure) -> str | None:
    """Return a ledger's text where an entry speaks of a failure too; None if it cannot."""
    here = (failure.implementation, failure.status, failure.device, failure.versions)
    where = _union(entry.where, failure.where)
    if where is None or here != (entry.implementation, entry.status, entry.device, entry.versions):
        return None
    if bool(entry.kinds) != bool(failure.kinds) or (entry.sm and failure.sm not in entry.sm):
        return None
    found = next(each for each in BLOCK.finditer(text) if f'id = "{entry.id}"\n' in each[0])
    block = found[0]
    for name, before, after in (
        ("laws", list(entry.laws), [*entry.laws, *failure.laws]),
        ("kinds", list(entry.kinds), [*entry.kinds, *failure.kinds]),
        ("where", entry.where, where),
    ):
        line = f"{name} = {_toml(before)}\n"
        if before and line not in block:
            return None  # written by hand, in lines of its own
        wide = list(dict.fromkeys(after)) if isinstance(after, list) else after
        block = block.replace(line, f"{name} = {_toml(wide)}\n")
    return text[: found.start()] + block + text[found.end() :]


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


def narrow_entry(text: str, entry: Entry, provider: str, version: str | None) -> str:
    """Return a ledger's text where an entry no longer speaks of a release, or is gone."""
    found = next(each for each in BLOCK.finditer(text) if f'id = "{entry.id}"\n' in each[0])
    known = entry.versions.get(provider)
    if version is None or known is None:
        return (
            text[: found.start()].rstrip("\n") + "\n\n" + text[found.end() :].lstrip("\n")
        ).rstrip("\n") + "\n"
    block = found[0].replace(f'"{known}"', f'"{known},!={version}"')
    return text[: found.start()] + block + text[found.end() :]


def replace_ledger(path: Path, text: str) -> None:
    """Write a ledger once it reads back in full, with its cases.

    Raises:
        LedgerError: it does not.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        Output("", draft).write(text)
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
        name: as it was given here.
        source: whose implementation it is, for the message.

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
    known = {_declared_name(each, each["name"], report): each
             for each in report.get("implementations", ())}  # fmt: skip
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
