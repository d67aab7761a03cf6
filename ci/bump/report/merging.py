"""The reports of several runners, one for each chip, as one matrix and one verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....impl.targets.backends import FLASHINFER
from ...console.errors import UsageRefusedError
from ...releases.packages import PACKAGES
from ..sides.releases import BASELINE, SIDES
from ..surface.uses import MOST_PLACES, Source, with_uses
from ..verdicts.findings import MAYBE_USED, USES, Chip, Finding, chip_order
from ..verdicts.policy import Accepted, Policy
from ..verdicts.verdict import DECLARED, EVIDENCE, chip_name, decide
from .contents import assemble, with_actions
from .outline import chip_label, package_of, version_of
from .shape import read_report

Report = Mapping[str, Any]
NOT_ASKED = "not read by the machine that has this finding"
"""What a report says of an engine whose source was not searched for a change."""


class MergeError(UsageRefusedError):
    """Reports that do not go together; the message names the file."""


def merge(
    paths: Sequence[Path],
    policy: Policy | None,
    command: str,
    sources: Sequence[Source] = (),
) -> dict[str, Any]:
    """Join reports that are in files; see ``join``.

    Raises:
        ReportError: one of them cannot be read.
        MergeError: see ``join``.
    """
    return join([read_report(path) for path in paths], paths, policy, command, sources)


def join(
    reports: Sequence[Report],
    names: Sequence[object],
    policy: Policy | None,
    command: str,
    sources: Sequence[Source] = (),
    *,
    failures: Sequence[str] = (),
    code: int = 0,
) -> dict[str, Any]:
    """Join reports.

    Args:
        reports: the reports of the same two releases.
        names: the names of the reports, for messages.
        policy: the policy that decides on the findings; that of the first report if None.
        command: the command for the record.
        sources: the sources of the engines that are to go on with what they use, instead of those
            of the reports.
        failures: sentences on what no report was made of.
        code: exit code where somebody ended the comparisons; 0 where nobody did.

    Raises:
        MergeError: they are of different releases, or nothing is to be joined; ``sources`` were
            given and they are not of FlashInfer.
    """
    if not reports:
        message = "merge needs reports: kernelproof merge A.json B.json"
        raise MergeError(message)
    first = reports[0]
    distribution = package_of(first)
    if sources and distribution != FLASHINFER:  # whose names are not looked for: none would be used
        message = f"--uses does not apply to {distribution}"
        raise MergeError(message)
    for name, report in zip(names, reports, strict=True):
        if package_of(report) != distribution:
            message = f"{name}: it compares {package_of(report)}, but {names[0]} {distribution}"
            raise MergeError(message)
        for side in SIDES:
            if not _is_same(report, first, side):
                message = (
                    f"{name}: its {side} is {_name(report, side)}, but that of {names[0]} is "
                    f"{_name(first, side)}"
                )
                raise MergeError(message)
    policy = policy or policy_of(first)
    found, engines = with_uses(_findings(reports), sources)
    findings = with_actions(found, policy)
    evidence = _evidence(reports)
    told = [*(each for report in reports for each in report["failures"]), *failures]
    failures = list(dict.fromkeys(told))
    verdict = decide(
        findings,
        evidence,
        policy,
        baseline=_name(first, BASELINE),
        failures=failures,
        ended=bool(code),
    )
    machines = [machine for report in reports for machine in report["machines"]]
    return assemble(
        verdict,
        findings,
        policy,
        sides={side: _side(reports, side) for side in SIDES},
        features=_features(reports),
        machines=machines,
        not_tested=_not_tested(reports, evidence),
        failures=failures,
        command=command,
        code=code,
        engines=engines or _engines(reports),
        kernels=_kernels(reports),
        package=next(each for each in PACKAGES.values() if each.distribution == distribution),
    )


def policy_of(report: Report) -> Policy:
    """Return the policy that decided on a report."""
    told = report["policy"]
    return Policy(
        told["actions"],
        told["slower"],
        tuple(told["required"]),
        tuple(
            Accepted(each["finding"], each["reason"], tuple(each["chips"]))
            for each in told["accepted"]
        ),
        told["source"],
    )


def _engines(reports: Sequence[Report]) -> list[Mapping[str, Any]]:
    """Return the engines' sources that any of the reports read."""
    read = (each for report in reports for each in report.get("engines", ()))
    return list({_engine(each): each for each in read}.values())


def _kernels(reports: Sequence[Report]) -> list[Mapping[str, Any]]:
    """Return what became of precompiled kernels: of each chip what the first report says."""
    known = (each for report in reports for each in report.get("kernels", ()))
    by_chip: dict[Chip, Mapping[str, Any]] = {}
    for each in known:
        by_chip.setdefault(each["chip"], each)
    return [by_chip[chip] for chip in sorted(by_chip, key=chip_order)]


def _engine(read: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what tells an engine's source from another at the same path, as far as is known."""
    return read["path"], read["files"], read["naming"]


def _name(report: Report, side: str) -> str:
    return str(version_of(report[side]) or report[side].get("given"))


def _is_same(one: Report, other: Report, side: str) -> bool:
    """Whether two reports are of one release; one may not know its version."""
    if _name(one, side) == _name(other, side):
        return True
    unknown = not (version_of(one[side]) and version_of(other[side]))
    return unknown and one[side].get("given") == other[side].get("given")


def _findings(reports: Sequence[Report]) -> list[Finding]:
    """Return the findings of all: one that several have is one, on all of their chips."""
    found: dict[str, Finding] = {}
    asked = defaultdict[str, set[object]](set)
    for report in reports:
        for data in report["findings"]:
            each = Finding.from_json(data)
            known = found.get(each.id)
            found[each.id] = each if known is None else _joined(known, each)
            if each.uses is not None:
                asked[each.id].update(map(_engine, report.get("engines", ())))
    for each in found.values():
        others = [one for one in _engines(reports) if _engine(one) not in asked[each.id]]
        if each.unused and others:  # which may use it
            places = [{"file": one["path"], "line": 0, "how": NOT_ASKED} for one in others]
            uses = {"status": MAYBE_USED, "count": len(places), "places": places[:MOST_PLACES]}
            found[each.id] = replace(each, uses=uses)
    return list(found.values())


def _joined(one: Finding, other: Finding) -> Finding:
    """Join two findings of the same: one's problem, and what the other says otherwise."""
    chips = (
        tuple(sorted({*one.chips, *other.chips}, key=chip_order))
        if one.chips and other.chips
        else ()
    )
    laws = tuple(dict.fromkeys((*one.laws, *other.laws)))
    found_by = tuple(sorted({*one.found_by, *other.found_by}, reverse=True))
    another = _of_another(one, other) if _shown(one) != _shown(other) else {}
    return replace(
        one,
        chips=chips,
        laws=laws,
        found_by=found_by,
        count=max(one.count, other.count),
        issue=one.issue or other.issue,
        uses=_most_used(one, other),
        rule="; ".join(dict.fromkeys(filter(None, (one.rule, other.rule)))),
        **another,
    )


def _most_used(one: Finding, other: Finding) -> Mapping[str, Any] | None:
    """Return what the sources of two reports say: a change that one of them uses is used."""
    told = [each.uses for each in (one, other) if each.uses is not None]
    told.sort(key=lambda uses: USES.index(uses["status"]))
    if not told:
        return None
    first, last = told[0], told[-1]
    joined = dict(first)
    for count, named in (("count", "places"), ("unknown_count", "unknown")):
        known = first.get(named, ())
        more = [each for each in last.get(named, ()) if each not in known]
        if more:  # they have read different engines
            joined[named] = [*known, *more][:MOST_PLACES]
            joined[count] = first.get(count, 0) + last.get(count, 0)
    return joined


def _shown(found: Finding) -> tuple[object, ...]:
    return found.message, found.problem, found.baseline, found.candidate


def _of_another(one: Finding, other: Finding) -> dict[str, Any]:
    """Return the fields of a finding that tell what another machine found too, by its chips."""
    where = f"on {', '.join(map(chip_name, other.chips)) or 'another machine'}"
    fields: dict[str, Any] = {"message": f"{one.message} ({where}: {other.message})"}
    if other.problem is not None:
        told = str(other.problem.get("told", other.problem.get("id", "")))
        fields["baseline"] = {**one.baseline, where: _verdict(other.baseline)}
        fields["candidate"] = {**one.candidate, where: f"{_verdict(other.candidate)} of {told}"}
        fields["replay"] = {
            **one.replay,
            **{f"{side} {where}": command for side, command in other.replay.items()},
        }
    return fields


def _verdict(side: Mapping[str, Any]) -> str:
    return " ".join(str(side[name]) for name in ("status", "kind", "message") if side.get(name))


def _evidence(reports: Sequence[Report]) -> dict[Chip, str]:
    """Return for each chip the best evidence that a report has."""
    found: dict[Chip, str] = {}
    for report in reports:
        for each in report["chips"]:
            known = found.get(each["chip"], DECLARED)
            found[each["chip"]] = max(known, each["evidence"], key=EVIDENCE.index)
    return found


def _features(reports: Sequence[Report]) -> dict[str, Any] | None:
    """Join the matrices: columns of all reports, rows as the first one has them."""
    made = [report["features"] for report in reports if report["features"]]
    if not made:
        return None
    chips = sorted({chip for each in made for chip in each["chips"]}, key=chip_order)
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in made:
        for row in each["rows"]:
            key = (row["operation"], row["backend"], row["title"])
            kept = rows.setdefault(key, {**row, "cells": {}})
            for cell in row["cells"]:
                kept["cells"].setdefault(cell["chip"], cell)
    rules = {name: reason for each in made for name, reason in each["rules"].items()}
    return {
        "chips": chips,
        "rules": rules,
        "rows": [
            {**row, "cells": [row["cells"].get(chip) or _unknown(chip) for chip in chips]}
            for row in rows.values()
        ],
    }


def _unknown(chip: Chip) -> dict[str, Any]:
    """Return the cell of a chip of which a report does not say what the others do."""
    nothing = {"status": "unknown", "evidence": "", "rule": ""}
    return {"chip": chip, "change": "same", **dict.fromkeys(SIDES, nothing)}


def _side(reports: Sequence[Report], side: str) -> dict[str, Any]:
    """Return what is known of a side: torch and the like stand with each machine."""
    known = [report[side] for report in reports if version_of(report[side])]
    first = dict(known[0] if known else reports[0][side])
    for name in ("torch", "triton", "cuda"):
        values = {report[side].get(name) for report in reports}
        first[name] = values.pop() if len(values) == 1 else None
    return first


def _not_tested(reports: Sequence[Report], evidence: Mapping[Chip, str]) -> list[dict[str, Any]]:
    """Return what nobody tested: calls on chips that some report did run are left out."""
    found: list[dict[str, Any]] = []
    for report in reports:
        for each in report["not_tested"]:
            absent = [
                chip for chip in each.get("chips", []) if evidence.get(chip, DECLARED) == DECLARED
            ]
            if "chips" not in each:
                told = dict(each)
            elif absent:
                names = ", ".join(map(chip_label, absent))
                told = {**each, "what": f"calls on {names}", "chips": absent}
            else:
                continue
            if told not in found:
                found.append(told)
    return found
