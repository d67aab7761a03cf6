"""The command published: do FlashInfer's calls answer as FlashInfer publishes them?"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from ..console.choices import Choice
from ..console.errors import CONFORMING, INCOMPLETE, NONCONFORMING
from ..console.outputs import Outputs
from ..options import JSON
from .summary import accepted, one_step, summarise, summary_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SCHEMA = "kernelproof/published/1"
INSTALLED = "installed"


@click.command("published", short_help="Judge FlashInfer's calls by what it publishes of them.")
@click.argument("release", default=INSTALLED, metavar="[installed|VERSION|WHEEL|FOLDER]")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--device", type=Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="S")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that judge, each with the release of its own.",
)
@click.option(
    "--problems",
    type=click.IntRange(min=0),
    default=0,
    show_default="until its seeded faults are refused, 3 at most",
    metavar="N",
    help="Problems of each call.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Limit of what a call runs, and of its reference; what it compiles has its own.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.1),
    default=None,
    metavar="N",
    help="Begin no call after this time, and cut short what runs.",
)
@JSON
def published(
    release: str,
    names: tuple[str, ...],
    *,
    device: str,
    seed: int,
    jobs: int,
    problems: int,
    seconds: float,
    minutes: float | None,
    outputs: Outputs,
) -> int:
    """Judge the calls of a FlashInfer release by the templates that it publishes of them.

    A template has a call's axes, tensors, an init and a reference in torch. The reference's answer
    in float64 is compared with what the release's own function answers, within what roundings do.
    Four kinds of faults over the reference's own answer must be refused on the way. NAME is a part
    of a call's name.

    Exit code 0 if what was judged conforms, 1 if it does not or a fault is accepted, 4 if no
    function of the release answered here; 130 and 143 after a signal, with what was found until
    then.
    """
    from ...properties.findings.report import TIME
    from ...properties.search.ending import Ending
    from ...properties.worker.pools import open_pool
    from ..console.signals import SIGNALLED, ended_by_signals, signal_of
    from ..console.terminal import console
    from .asking import Asked, NoTimeError, judge_release
    from .host import HANDLER

    outputs.check()
    out = console(sys.stdout)

    def show(line: str) -> None:
        out.print(line, soft_wrap=True, markup=False, highlight=False)

    path = None
    if release != INSTALLED:
        from ..releases.sandboxes import sandbox

        path = [str(sandbox(release)), *sys.path]
    ending = Ending(math.inf if minutes is None else 60 * minutes)
    try:
        with ended_by_signals(ending.end), ending.watched():
            found = judge_release(
                Asked(device, seed, problems, seconds, ending),
                lambda size: open_pool(device, size=size, handler=HANDLER, sys_path=path),
                names=names,
                jobs=jobs,
                tell=lambda said: show_call(said, show),
            )
    except NoTimeError:
        if ending.asked in ("", TIME):
            raise
        return SIGNALLED + signal_of(ending.asked)
    summary = summarise(found)
    for line in summary_lines(found, summary):
        show(line)
    outputs.write({"--json": lambda: {"schema": SCHEMA, **found, "summary": summary}})
    if ending.asked not in ("", TIME):
        return SIGNALLED + signal_of(ending.asked)
    if summary["findings"] or summary["accepted"] or summary["accused"]:
        return NONCONFORMING
    return CONFORMING if summary["judged"] else INCOMPLETE


def show_call(said: Mapping[str, Any], show: Callable[[str], None]) -> None:
    """Print a line of a call, and one of each finding."""
    name, state = said["name"], said["state"]
    if not said["problems"]:
        show(f"{name}: {state}: {said.get('why', '')}")
        show_findings(said.get("findings", ()), show)
        return
    whys = {said.get("why", ""), *(each["answer"].get("why", "") for each in said["problems"])}
    classes = sorted({each["arithmetic"] for each in said["problems"]} - {""})
    classes += sorted(
        {f"backend {each['backend']}" for each in said["problems"] if "backend" in each}
    )
    show(
        f"{name}: {state}, {len(said['problems'])} problems, {'; '.join(classes)}"
        + "".join(f"; {why}" for why in sorted(whys - {""}))
    )
    show_findings(said.get("findings", ()), show)
    for part, why in said.get("parts", {}).items():
        show(f"  {part}: not judged: {why}")
    if unpaired := sorted({o for p in said["problems"] for o in p["answer"].get("unpaired", ())}):
        show(f"  not compared, as the call has no such answer: {', '.join(unpaired)}")
    for each in said["problems"]:
        axes = json.dumps(each["axes"])
        show_findings(each["answer"].get("findings", ()), show, f" ({axes})")
        for finding in each["accused"]:
            show(f"  its own reference is accused: {finding['why']} ({axes})")
    for fault in one_step(said):
        show(f"  not counted, one step of FP8: {fault}")
    for fault in accepted(said):
        show(f"  accepted: {fault}")


def show_findings(
    findings: Sequence[Mapping[str, str]], show: Callable[[str], None], where: str = ""
) -> None:
    """Print a line of each finding, and why it is known."""
    for each in findings:
        show(f"  {each['law']}: {each['why']}{where}")
        if "known" in each:
            show(f"    known: {each['known']}")
