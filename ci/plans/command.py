"""The command plan: are the plans of FlashInfer releases right, on any chip?"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from ..console.choices import Choice
from ..console.errors import CONFORMING, NONCONFORMING, MachineError, UsageRefusedError
from ..console.outputs import Outputs
from ..options import JSON
from .problems import KINDS, PlanProblem, problem_from_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from .judging import Judged
    from .planner import ReleasedPlanner

SCHEMA = "kernelproof/plans/1"


@click.command("plan", short_help="Judge the plan functions of FlashInfer releases on a CPU.")
@click.argument("releases", nargs=-1, required=True, metavar="VERSION|WHEEL|FOLDER...")
@click.option(
    "--kind", "kinds", type=Choice(list(KINDS)), multiple=True, help="Only these; may be repeated."
)
@click.option(
    "--problems",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    metavar="N",
    help="Problems of each kind.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="S")
@click.option(
    "--problem", "given", default="", metavar="JSON", help="Judge this problem only, by all laws."
)
@click.option(
    "--faults",
    is_flag=True,
    help="Judge copies of the plans with seeded faults instead: does the law of each find it?",
)
@JSON
def plan(
    releases: tuple[str, ...],
    *,
    kinds: tuple[str, ...],
    problems: int,
    seed: int,
    given: str,
    faults: bool,
    outputs: Outputs,
) -> int:
    """Judge what FlashInfer's plan functions divide among blocks: decode, FA2, FA3 and MLA.

    A plan is host code. nvcc compiles each release's own over a CUDA driver that has the number of
    multiprocessors that a problem names; the laws count which rows and keys its blocks compute. No
    kernel runs. Known findings are counted, and not shown again.

    Exit code 0 if all laws hold, 1 if a plan breaks one that nothing explains, or a seeded fault is
    not found; 3 without nvcc.
    """
    from ..console.terminal import console
    from .planner import open_planner

    outputs.check()
    problem = _problem(given) if given else None
    err, out = console(sys.stderr), console(sys.stdout)

    def tell(line: str) -> None:
        err.print(line, soft_wrap=True, markup=False, highlight=False)

    def show(line: str) -> None:
        out.print(line, soft_wrap=True, markup=False, highlight=False)

    found: list[dict[str, Any]] = []
    wrong = False
    for release in releases:
        try:
            planner = open_planner(release, tell=tell)
        except MachineError as error:
            message = f"UNSUPPORTED: flashinfer {release} cannot be asked: {error.message}"
            raise MachineError(message) from error
        with closing(planner):
            if problem is not None:
                wrong |= _judge_one(planner, problem, show, found)
            elif faults:
                wrong |= _judge_faults(planner, show, found)
            else:
                for kind in kinds or KINDS:
                    wrong |= _judge_kind(planner, kind, problems, seed, show, found)
    outputs.write({"--json": lambda: {"schema": SCHEMA, "plans": found}})
    return NONCONFORMING if wrong else CONFORMING


def _problem(given: str) -> PlanProblem:
    try:
        data = json.loads(given)
    except ValueError as error:
        message = f"--problem: {error}"
        raise UsageRefusedError(message) from error
    if not isinstance(data, dict):
        message = "--problem: it is no object"
        raise UsageRefusedError(message)
    try:
        return problem_from_json(data)
    except UsageRefusedError as error:
        message = f"--problem: {error.message}"
        raise UsageRefusedError(message) from error


def _judge_one(
    planner: ReleasedPlanner,
    problem: PlanProblem,
    show: Callable[[str], None],
    found: list[dict[str, Any]],
) -> bool:
    from .laws import LAWS, Case, broken

    case = Case(planner, problem)
    names = broken(case)
    for law in LAWS:
        if law.name in names:
            show(f"{planner.version} {problem.kind}: {law.name}: {law.judge(case)}")
    if not names:
        why = f"refused: {case.answer.error}" if case.refused else "all laws hold"
        show(f"{planner.version} {problem.kind}: {why}")
    found.append({"flashinfer": planner.version, "problem": problem.to_json(), "broken": names})
    return bool(names)


def _judge_faults(
    planner: ReleasedPlanner, show: Callable[[str], None], found: list[dict[str, Any]]
) -> bool:
    from .faults import FAULTS, score
    from .known import KNOWN

    known = [each for each in KNOWN if each.in_release(planner.version)]
    scored = score(planner, known)
    missed = [name for name, tried in scored.items() if not tried]
    for each in FAULTS:
        said = f"found in plan {scored[each.name]}" if scored[each.name] else "MISSED"
        show(f"{planner.version} {each.kind}: {each.name}, by {each.law}: {said}")
    show(f"{planner.version}: {len(scored) - len(missed)} of {len(scored)} seeded faults found")
    found.append({"flashinfer": planner.version, "faults": dict(scored)})
    return bool(missed)


def _judge_kind(
    planner: ReleasedPlanner,
    kind: str,
    problems: int,
    seed: int,
    show: Callable[[str], None],
    found: list[dict[str, Any]],
) -> bool:
    from .judging import search
    from .known import KNOWN

    judged = search(planner, planner.version, kind, problems, seed, KNOWN)
    show(_summary(judged))
    for finding in judged.findings:
        show(f"  {finding.law}: {finding.why}")
        if finding.problem is not None:
            words = json.dumps(finding.problem.to_json())
            show(f"    kernelproof plan {planner.version} --problem '{words}'")
    for name, count in sorted(judged.known.items()):
        show(f"  known: {name}, in {count} problems")
    found.append(judged.to_json())
    return bool(judged.findings)


def _summary(judged: Judged) -> str:
    verdict = f"{len(judged.findings)} findings" if judged.findings else "all laws hold"
    refused = f", {judged.refused} refused" if judged.refused else ""
    return f"{judged.version} {judged.kind}: {judged.problems} problems{refused}: {verdict}"
