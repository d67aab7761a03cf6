"""Published calls as a part of a gate on a GPU, and of a comparison of releases there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from ...properties.search.building import compilers, limited_to
from ...properties.search.ending import Ending
from ...properties.search.engine import usual_jobs
from ...properties.worker.pools import open_pool
from ..console.errors import INCOMPLETE, MACHINE, MachineError
from .asking import Asked, NoTimeError, Open, UnpublishedError, judge_release
from .host import HANDLER
from .summary import brief, summarise

SHARE = 0.2
"""Share of the time of a gate or a comparison that they have; a gate adds what laws leave."""
SECONDS = 60.0
"""Limit of what a call runs, and of its reference."""
LEFT_OUT, UNSUPPORTED, FAILED, JUDGED = "left out", "unsupported", "failed", "judged"
"""What became of them: not asked, not there, not readable, asked."""
ON_A_CPU = "on a CPU little more than their references answers (`kernelproof published`)"


def without(device: str, part: str) -> dict[str, Any]:
    """Return what a report has of published calls that are not asked; empty where they are.

    Args:
        device: "cpu" or "cuda".
        part: the option by which only a part of a gate was asked for; empty if none was.
    """
    if device == "cpu":
        return {"state": LEFT_OUT, "why": ON_A_CPU}
    if part:
        return {"state": LEFT_OUT, "why": f"they do not go with {part}"}
    if importlib.util.find_spec("flashinfer") is None:
        return {"state": UNSUPPORTED, "why": "flashinfer is not installed"}
    return {}


def judge_installed(
    device: str,
    seed: int,
    jobs: int | None,
    ending: Ending,
    tell: Callable[[Mapping[str, Any]], None],
    *,
    known: bool = True,
) -> dict[str, Any]:
    """Return what a report has of the installed release's published calls, see ``judge_part``.

    Args:
        device: "cpu" or "cuda".
        seed: seed of their inputs.
        jobs: calls at a time; as many as there are workers of a run if None.
        ending: the end of their time.
        tell: called with each call that is judged.
        known: whether settled findings are known.
    """
    jobs = jobs or usual_jobs(device)
    asked = Asked(device, seed, 0, SECONDS, ending, known=known)
    environment = limited_to(compilers() // jobs)
    return judge_part(
        asked,
        lambda size: open_pool(device, size=size, handler=HANDLER, environment=environment),
        jobs,
        tell,
    )


def failed(why: str, code: int) -> dict[str, Any]:
    """Return what a report has of published calls that could not be judged.

    Args:
        why: the reason, in a sentence.
        code: exit code of a run that conforms otherwise.
    """
    return {"state": FAILED, "why": why, "exit_code": code}


def judge_part(
    asked: Asked, opened: Open, jobs: int, tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Return what a report has of published calls, once they were asked, see ``judge_release``."""
    try:
        with asked.ending.watched():
            found = judge_release(asked, opened, jobs=jobs, tell=tell)
    except UnpublishedError as error:
        return {"state": UNSUPPORTED, "why": error.message}
    except NoTimeError as error:
        return failed(error.message, INCOMPLETE)
    except (MachineError, RuntimeError) as error:
        return failed(str(error), MACHINE)
    calls = [brief(each) for each in found["calls"]]
    numbers = {"seed": asked.seed, "summary": summarise(found)}
    return {"state": JUDGED, "why": "", **found, "calls": calls, **numbers}
