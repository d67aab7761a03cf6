"""Judging on a GPU that others share: what has no room at first is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Refusal
from ..verdicts.contained import OUT_OF_MEMORY, out_of_memory
from ..verdicts.memory_need import NO_ROOM, too_small
from ..verdicts.verdict import Verdict

PAUSES = 0.5, 4.0
"""Seconds after which a law that found no room is tried again: problems of others last less."""
KEPT_BYTES = 1 << 30
"""Free memory that torch may keep for the next problem: a dozen processes share a GPU, on which a
law of far addresses needs 32 GiB."""


def judged_with_room(judge: Callable[[], Verdict], device: str) -> Verdict:
    """Return a law's verdict, on a GPU with several tries where there is no room for the first.

    Args:
        judge: asks the law.
        device: "cpu", where it is asked once, or "cuda".

    Returns:
        The verdict, with the seconds that it waited; UNSUPPORTED where the suite itself has found
        no room each time. A call of the implementation that found none each time stays a CRASH.
    """
    if device != "cuda":
        return _attempted(judge, device)
    waited = 0.0
    for pause in PAUSES:
        with _returning_memory():
            verdict = _attempted(judge, device)
        if verdict.kind not in (NO_ROOM, OUT_OF_MEMORY):
            return replace(verdict, waited=waited)
        began = time.monotonic()
        torch.cuda.empty_cache()
        time.sleep(pause)
        waited += time.monotonic() - began
    with _returning_memory():
        return replace(_attempted(judge, device), waited=waited)


def _attempted(judge: Callable[[], Verdict], device: str) -> Verdict:
    try:
        return judge()
    except Exception as error:
        if not out_of_memory(error):
            raise
        if device == "cpu":
            what = message_of(error) or "an allocation of the suite failed"
            return Verdict("UNSUPPORTED", NO_ROOM, too_small(what))
        reason = f"the GPU has no room for the problem beside what else runs: {message_of(error)}"
        return Verdict("UNSUPPORTED", NO_ROOM, Refusal(reason, NO_ROOM))


@contextmanager
def _returning_memory() -> Iterator[None]:
    """Give back at the end what torch keeps of much memory: other processes need it."""
    try:
        yield
    finally:
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
            torch.cuda.empty_cache()
