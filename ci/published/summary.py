"""The summary of a run of published calls: findings, accepted seeded faults, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def findings_of(said: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Return the findings of a call, those of its process first."""
    return [
        *said.get("findings", ()),
        *(each for one in said["problems"] for each in one["answer"].get("findings", ())),
    ]


def accepted(said: Mapping[str, Any]) -> list[str]:
    """Return the seeded faults that no problem of a call refuses."""
    tried: dict[str, bool] = {}
    for each in said["problems"]:
        for fault, outputs in each["faults"].items():
            for output, law in outputs.items():
                key = f"{fault} of output {output}"
                tried[key] = tried.get(key, False) or bool(law)
    return [fault for fault, refused in tried.items() if not refused]


def one_step(said: Mapping[str, Any]) -> list[str]:
    """Return the seeded faults that are no more than a step of FP8 in each problem."""
    steps = dict.fromkeys(
        (fault, output)
        for each in said["problems"]
        for fault, outputs in each.get("steps", {}).items()
        for output in outputs
    )
    tried = {
        (fault, output)
        for each in said["problems"]
        for fault, outputs in each["faults"].items()
        for output in outputs
    }
    return [
        f"{fault} of output {output}" for fault, output in steps if (fault, output) not in tried
    ]


def faults_tried(said: Mapping[str, Any]) -> int:
    """Return how many faults of outputs were tried."""
    return len(
        {
            (fault, output)
            for each in said["problems"]
            for fault, outputs in each["faults"].items()
            for output in outputs
        }
    )


def summarise(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a run."""
    calls = found["calls"]
    asked = [each for each in calls if each["problems"]]
    answers = [each["answer"] for call in asked for each in call["problems"]]
    findings = {call["name"]: findings_of(call) for call in calls}
    return {
        "calls": len(calls),
        "judged": sum(each["state"] == "judged" for each in calls),
        "reference only": sum(each["state"] == "reference only" for each in calls),
        "unasked": sum(each["state"] == "unasked" for each in calls),
        "not compiled": sum(each["state"] == "not compiled" for each in calls),
        "ended": sum(each["state"] == "ended" for each in calls),
        "problems judged": sum(each["state"] == "answered" for each in answers),
        "findings": [
            name for name, each in findings.items() if any("known" not in one for one in each)
        ],
        "known": [name for name, each in findings.items() if any("known" in one for one in each)],
        "accused": [
            call["name"] for call in asked if any(each["accused"] for each in call["problems"])
        ],
        "faults": sum(faults_tried(each) for each in asked),
        "accepted": [f"{call['name']}: {fault}" for call in asked for fault in accepted(call)],
    }


def summary_lines(found: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return what a run found, in sentences."""
    reasons = Counter(
        each["answer"]["why"].split(":")[0]
        for call in found["calls"]
        for each in call["problems"]
        if each["answer"]["state"] == "refused"
    )
    refused = summary["faults"] - len(summary["accepted"])
    states = (
        f"{summary['judged']} judged (their own function answered)",
        f"{summary['reference only']} reference against reference only",
        f"{summary['unasked']} not asked",
        f"{summary['not compiled']} not compiled",
        f"{summary['ended']} ended or took too long",
    )
    counts = (
        f"{len(summary['findings'])} calls with findings, {len(summary['known'])} with known ones",
        f"{refused} of {summary['faults']} seeded faults refused",
        f"{len(summary['accused'])} honest references accused",
    )
    of = (
        f"flashinfer {found['flashinfer']} on {found['device']}: {summary['calls']} published calls"
    )
    lines = [f"{of}: {', '.join(states)}", "; ".join(counts)]
    if reasons:
        lines.append("refused: " + ", ".join(f"{why} {n}" for why, n in reasons.most_common()))
    if not summary["judged"]:
        lines.append("no function of the release answered here: nothing of it was judged")
    if found["not compiled"]:
        modules = (f"{name} ({', '.join(of)})" for name, of in found["not compiled"].items())
        lines.append(f"modules not compiled: {'; '.join(modules)}")
    if found["not begun"]:
        lines.append(f"not begun: {len(found['not begun'])}: " + ", ".join(found["not begun"]))
    return lines


def brief(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reports of other runs have of a call."""
    answers = [each["answer"] for each in said["problems"]]
    whys = [said.get("why", ""), *(each.get("why", "") for each in answers)]
    return {
        "name": said["name"],
        "api": said["api"],
        "state": said["state"],
        "why": next(filter(None, whys), ""),
        "module": said.get("module", ""),
        "problems": sum(each["state"] == "answered" for each in answers),
        "laws": sorted({law for each in answers for law in each.get("laws", ())}),
        "findings": [
            {"axes": axes, "known": "", **finding}
            for axes, found in (
                ({}, said.get("findings", ())),
                *((one["axes"], one["answer"].get("findings", ())) for one in said["problems"]),
            )
            for finding in found
        ],
        "parts": dict(said.get("parts", {})),
        "accused": sorted({each["why"] for one in said["problems"] for each in one["accused"]}),
    }
