"""The report of a comparison: one dictionary that every output is made of (docs/bump.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from .... import __version__
from ....properties.search.ending import Ending
from ....properties.verdicts.text import count_of
from ...console.errors import MachineError, UsageRefusedError
from ...releases.packages import DECLARED as DECLARED_PART
from ...releases.packages import FLASHINFER_PACKAGE, PARTS, Package
from ..behaviour.compiled import compiled_chips
from ..behaviour.numbers import build_seconds, implementation_json, not_run, replayed, rows_of
from ..behaviour.records import Comparison
from ..sides.plan import BumpPlan, end_of
from ..sides.releases import SIDES
from ..verdicts.findings import Chip, Finding
from ..verdicts.policy import RULES, Policy
from ..verdicts.verdict import COMPILED, DECLARED, RAN, UNDECIDED, Verdict, chip_name, decide

SCHEMA = "kernelproof/bump/1"
_VERSIONS = dict.fromkeys(("flashinfer", "torch", "triton", "cuda"))


def to_json(
    learned: Comparison,
    plan: BumpPlan,
    policy: Policy,
    *,
    machine: Chip,
    command: str,
    timings: Mapping[str, Any],
    ending: Ending,
) -> dict[str, Any]:
    """Return the report of a comparison that has ended.

    Args:
        learned: the report's record of what was learned.
        plan: the plan of its behaviour.
        policy: the policy that decides on its findings.
        machine: the chip that it ran on.
        command: the command that was given.
        timings: what depends on the clock, beside what ``learned`` has.
        ending: the ending of the comparison.
    """
    findings = with_actions(learned.findings, policy)
    evidence = dict.fromkeys(learned.chips, DECLARED)
    evidence |= {chip: COMPILED for chip in compiled_chips(learned.compiled) if chip in evidence}
    ran = any(tried.judged(SIDES[1]) for each in learned.compared for tried in each.tried)
    ran |= bool(learned.published.get(SIDES[1], {}).get("summary", {}).get("judged"))
    if ran and machine in evidence:
        evidence[machine] = RAN
    verdict = decide(
        findings,
        evidence,
        policy,
        baseline=learned.name(SIDES[0]),
        failures=learned.failures,
        # A signal that comes after the last step has cut nothing off.
        ended=end_of(ending)[0] in learned.failures,
    )
    machines = [_machine(learned, plan, machine, command, timings, ending)]
    return assemble(
        verdict,
        findings,
        policy,
        sides={side: _side(learned, side) for side in SIDES},
        features=learned.features,
        machines=machines,
        not_tested=_not_tested(learned, evidence, machine),
        failures=learned.failures,
        command=command,
        code=learned.code if verdict.verdict == UNDECIDED else 0,
        engines=learned.engines,
        kernels=learned.kernels,
        package=learned.package,
    )


def refused(
    given: Mapping[str, str],
    policy: Policy,
    error: UsageRefusedError | MachineError,
    command: str,
    package: Package = FLASHINFER_PACKAGE,
) -> dict[str, Any]:
    """Return the report of a comparison that was not begun, or ended because of what was asked.

    Args:
        given: the sides as they were asked for.
        policy: the policy that would have decided on it.
        error: why.
        command: the command that was given.
        package: the package that was to be compared.
    """
    learned, failures = Comparison(given, (), package), [error.message]
    return assemble(
        decide([], {}, policy, baseline=given[SIDES[0]], failures=failures),
        [],
        policy,
        sides={side: _side(learned, side) for side in SIDES},
        features=None,
        machines=[],
        not_tested=[],
        failures=failures,
        command=command,
        code=error.exit_code,
        package=package,
    )


def assemble(
    verdict: Verdict,
    findings: Sequence[Finding],
    policy: Policy,
    *,
    sides: Mapping[str, Any],
    features: Mapping[str, Any] | None,
    machines: Sequence[Mapping[str, Any]],
    not_tested: Sequence[Mapping[str, Any]],
    failures: Sequence[str],
    command: str,
    code: int = 0,
    engines: Sequence[Mapping[str, Any]] = (),
    kernels: Sequence[Mapping[str, Any]] = (),
    package: Package = FLASHINFER_PACKAGE,
) -> dict[str, Any]:
    """Put a report together; ``merge`` does too."""
    return {
        "schema": SCHEMA,
        "verdict": verdict.verdict,
        "message": verdict.message,
        "exit_code": code or verdict.exit_code,
        "package": package.distribution,
        **sides,
        "chips": [each.to_json() for each in verdict.chips],
        "conditions": [each.to_json() for each in verdict.conditions],
        "findings": [each.to_json() for each in findings],
        "features": features,
        "machines": list(machines),
        "not_tested": list(not_tested),
        "failures": list(failures),
        "engines": list(engines),
        "kernels": list(kernels),
        "policy": {
            **policy.to_json(),
            "rules": list(RULES),
            "unused": policy.unused(findings),
        },
        "kernelproof": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
    }


def with_actions(findings: Sequence[Finding], policy: Policy) -> list[Finding]:
    """Return findings with their actions: what blocks first, and then in the order of the parts."""
    order = {"block": 0, "condition": 1, "report": 2}
    found = [policy.apply(each) for each in findings]
    return sorted(found, key=lambda each: order[each.action])


def _side(learned: Comparison, side: str) -> dict[str, Any]:
    target, release = learned.targets.get(side), learned.releases.get(side)
    return {
        "given": learned.given[side],
        "version": learned.version(side),
        "flashinfer": learned.declared.get(side, {}).get("flashinfer")
        or (target.flashinfer if target else None),
        "own_environment": bool(release and release.own_environment),
        "torch": target.torch if target else None,
        "triton": target.triton if target else None,
        "cuda": target.cuda if target else None,
        "artifacts": learned.declared.get(side, {}).get("artifacts", {}).get("paths", {}),
        "not_imported": learned.declared.get(side, {}).get("not_imported", {}),
    }


def _machine(
    learned: Comparison,
    plan: BumpPlan,
    machine: Chip,
    command: str,
    timings: Mapping[str, Any],
    ending: Ending,
) -> dict[str, Any]:
    target = next(iter(learned.targets.values()), None)
    implementations = [implementation_json(each) for each in learned.compared if each.runs]
    return {
        "chip": machine,
        "device": plan.device,
        "device_name": target.device_name if target else "",
        "versions": {
            side: {
                name: learned.targets[side].version_of(name)
                for name in _VERSIONS | {learned.package.name: None}
            }
            for side in SIDES
            if side in learned.targets
        },
        "profile": plan.profile.name,
        "seed": plan.seed,
        "problems": sum(len(each.tried) for each in learned.compared),
        "judged": sum(each["judged"] for each in implementations),
        "corpus": replayed(learned.compared),
        "implementations": implementations,
        "published": learned.published,
        "liveness": _liveness(learned, plan),
        "compiled": [
            {name: value for name, value in each.items() if name != "seconds"}
            for each in learned.compiled
        ],
        "cut": [asdict(each) for each in learned.cuts],
        "not_tested": [
            *_skipped(learned),
            *rows_of(learned.cuts, ending),
            *not_run(each for each in learned.compared if not each.left_out),
        ],
        "timings": {
            **timings,
            "parts": learned.seconds,
            "builds": build_seconds(learned.compared),
            "speed": [
                {"name": each.name, "measurements": each.speeds}
                for each in learned.compared
                if each.speeds
            ],
        },
        "command": command,
    }


def _liveness(learned: Comparison, plan: BumpPlan) -> dict[str, Any]:
    soaked = [
        {
            "name": each.name,
            "problems": len(tried),
            "failed": sum(t.bad("candidate") for t in tried),
        }
        for each in learned.compared
        if (tried := [t for t in each.tried if t.law == "soak" and t.judged("candidate")])
    ]
    hangs = [
        tried.problem.id
        for each in learned.compared
        for tried in each.tried
        if tried.bad("candidate") and tried.verdicts["candidate"].status == "HANG"
    ]
    known = [each.id for each in learned.findings if each.change in ("known-hang", "hang-stays")]
    launches = plan.soak or plan.profile.soak
    return {"launches": launches, "soaked": soaked, "hangs": hangs, "known": known}


def _skipped(learned: Comparison) -> list[dict[str, str]]:
    return [
        {"what": part, "why": why}
        for part, why in sorted(
            learned.skipped.items(), key=lambda item: (item[0] not in PARTS, item[0])
        )
    ]


def _not_tested(
    learned: Comparison, evidence: Mapping[Chip, str], machine: Chip
) -> list[dict[str, Any]]:
    absent = [chip for chip, level in evidence.items() if level == DECLARED and chip != machine]
    found: list[dict[str, Any]] = []
    if absent:
        names = ", ".join(map(chip_name, absent))
        them = "it" if len(absent) == 1 else "them"
        why = f"what is said of {them} stands on declarations and support rules"
        if DECLARED_PART in learned.skipped:
            why = f"without {DECLARED_PART}, next to nothing is known of {them}"
        found.append(
            {"what": f"calls on {names}", "why": f"no such device here: {why}", "chips": absent}
        )
    unread = learned.declared.get(SIDES[1], {}).get("not_imported", {})
    if unread:
        found.append(
            {
                "what": f"the surface of {count_of(len(unread), 'module')}: {', '.join(unread)}",
                "why": "not importable here: "
                + "; ".join(dict.fromkeys(map(str, unread.values()))),
            }
        )
    return found
