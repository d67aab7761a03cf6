"""What a worker does that has a release of FlashInfer on its path: read it, and judge its calls."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .modules import NotCompiledError, compiled_only

if TYPE_CHECKING:
    from ...properties.isolation.worker_main import Monitor
    from .release import Published

HANDLER = f"{__name__}:answer"


@functools.cache
def _release() -> list[Published]:
    import torch

    from .answers import ask
    from .release import read_release

    found = read_release()
    # A first evaluation takes seconds, by which later ones are not to be measured.
    ask(lambda x: x.softmax(-1) @ x, {"x": torch.ones(2, 2)})
    return found


def answer(payload: Mapping[str, Any], stages: Monitor) -> dict[str, Any]:
    """Return what the release publishes, or what is found of one of its calls.

    Args:
        payload: device; of a question about a call also its number, the seed, how many problems,
            part, a law that has problems of its own, and whether modules may be compiled.
        stages: shows the parent the stage of this process.
    """
    device = payload["device"]
    if "call" not in payload:
        return _published(device)
    published = _release()[payload["call"]]
    stages.enter("judge")
    try:
        with nullcontext() if payload["compile"] else compiled_only():
            found = _judged(published, device, payload, stages)
    except NotCompiledError as error:  # of a part
        found = {"problems": [], "why": str(error), "module": error.module}
    except Exception as error:  # noqa: BLE001  a release has errors of many classes
        traceback.print_exc()
        found = {
            "name": published.name,
            "api": published.api,
            "problems": [],
            "state": "unasked",
            "why": f"{type(error).__name__}: {str(error).strip()[:160]}",
        }
    lost = device == "cuda" and _lost()
    return {**found, "lost": lost}


def _published(device: str) -> dict[str, Any]:
    """Return what the release publishes, or in a sentence why that is nothing."""
    try:
        import flashinfer
    except ImportError as error:
        return {"unpublished": f"flashinfer cannot be imported: {error}"}
    try:
        calls = _release()
    except ImportError:  # of the table of templates
        calls = []
    if not calls:
        return {"unpublished": f"flashinfer {flashinfer.__version__} publishes no templates"}
    names = [{"name": each.name, "api": each.api, "lacks": each.lacks} for each in calls]
    return {"version": flashinfer.__version__, "chip": _chip(device), "calls": names}


def _judged(
    published: Published, device: str, payload: Mapping[str, Any], stages: Monitor
) -> dict[str, Any]:
    from .judging import PARTS, judge

    seed = payload["seed"]
    if "part" in payload:
        return {"problems": PARTS[payload["part"]](published, device, seed, stages)}
    return judge(published, device, seed, stages, payload["problems"])


def _chip(device: str) -> int:
    """Return the compute capability of the device, times ten; 0 of a CPU."""
    import torch

    if device == "cpu":
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _lost() -> bool:
    """Whether the process has lost its device, as after an access outside of memory."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
