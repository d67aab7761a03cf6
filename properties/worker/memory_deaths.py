"""Whether a process that died had too little memory, and whether its last call is to blame."""

from __future__ import annotations

from ...impl.targets.refusal import Refusal
from ..isolation.memory_use import KEPT_BYTES, FailedAllocation, MemoryUse, failed_allocation
from ..isolation.outcome import ABORTED_FOR_MEMORY, SENTENCES, Outcome
from ..verdicts.contained import NO_ALLOCATION, OUT_OF_MEMORY
from ..verdicts.memory_need import NO_ROOM, beside, too_much, too_small
from ..verdicts.verdict import Verdict

IN_A_CALL = ("compile", "run", "specialise", "supports")
"""Stages in which the implementation's code runs, and none of the suite's own."""
OF_THE_MACHINE = "the machine's memory"
"""What a refusal is about where others may have left no room, which comes and goes."""


def has_room_later(verdict: Verdict, device: str) -> bool:
    """Whether a problem without room may have some at the end of a run, when nothing else runs.

    A worker's limit on a CPU stays what it is.
    """
    return device != "cpu" or getattr(verdict.message, "about", "") == OF_THE_MACHINE


def of_earlier_calls(outcome: Outcome, verdict: Verdict) -> Verdict | None:
    """Return the CRASH where earlier calls had filled the process in which a problem had no room.

    None where they had not: they may leave what malloc keeps, and as much as a call may need. A
    process without a limit, on a GPU, holds more with each module that it loads, and is not judged.

    Args:
        outcome: the outcome of that process.
        verdict: the verdict on the problem.
    """
    use = outcome.memory
    if use is None or not use.limit or not too_much(use.left - KEPT_BYTES, use.need):
        return None
    message = (
        f"earlier calls had left {use.left / 2**20:,.0f} MiB in their process, of "
        f"{use.limit / 2**20:,.0f} MiB, which is enough for the problem otherwise: "
        f"{verdict.message}"
    )
    return Verdict("CRASH", OUT_OF_MEMORY, message, trace=verdict.trace)


def verdict_on(outcome: Outcome) -> Verdict | None:
    """Return the verdict where a process lacked memory; None where nothing shows that it did.

    UNSUPPORTED, unless the call that ran asked for far more than its tensors have, as of a call
    that raises an exception: then it is a CRASH.
    """
    if outcome.starved:
        return _starved(outcome)
    in_suite = outcome.kind == "exit 1" and not _is_of_a_call(outcome)
    if outcome.status == "crash" and (outcome.kind == "SIGABRT" or in_suite):
        failed = failed_allocation(outcome.stderr)
        return None if failed is None else _ended(outcome, failed)
    return _raised(outcome) if outcome.status == "error" else None


def _raised(outcome: Outcome) -> Verdict | None:
    """Return the verdict where the suite itself, or a process's start, found no memory."""
    said = outcome.detail.strip().rpartition("\n")[2]
    if not any(each in said for each in ("MemoryError", *NO_ALLOCATION)):
        return None
    limit = outcome.memory.limit if outcome.memory else 0
    return _unsupported(outcome, too_small(said, limit or None))


def _starved(outcome: Outcome) -> Verdict:
    use = outcome.memory or MemoryUse()
    taken = f"the call had taken {beside(use.taken, use.need)}"
    if _is_of_a_call(outcome) and too_much(use.taken, use.need):
        return _crash(outcome, outcome.kind, taken)
    known = f", when {taken}" if use.taken and _is_of_a_call(outcome) else ""
    peak = f"; it held {use.peak / 2**20:,.0f} MiB at most" if use.peak else ""
    reason = (
        "the machine has no room for the problem beside what else runs: the kernel ended its "
        f"process for lack of memory in stage {outcome.stage}{known}{peak}"
    )
    return _unsupported(outcome, Refusal(reason, NO_ROOM, OF_THE_MACHINE))


def _ended(outcome: Outcome, failed: FailedAllocation) -> Verdict:
    use = outcome.memory or MemoryUse()
    of_a_call = _is_of_a_call(outcome)
    # What failed did not fit into the room; where there is no limit, none is known.
    whose = "the call" if of_a_call else "the last call"
    had = f"{whose} had {beside(use.room, use.need)}" if use.limit else "no limit is in force"
    what = f"{had}, when its process aborted: {failed.said}"
    asked = max(use.room, failed.size)
    # Between calls, a thread that one has started may ask; or it keeps what the suite then lacks.
    if too_much(asked, use.need) or (of_a_call and not use.limit):
        kind = ABORTED_FOR_MEMORY if outcome.kind == "SIGABRT" else outcome.kind
        return _crash(outcome, kind, what)
    if not of_a_call:
        what = f"its process ended in stage {outcome.stage}: {failed.said}"
    return _unsupported(outcome, too_small(what, use.limit or None))


def _is_of_a_call(outcome: Outcome) -> bool:
    return outcome.status == "crash" and outcome.stage in IN_A_CALL


def _crash(outcome: Outcome, kind: str, what: str) -> Verdict:
    message = f"the process died: {SENTENCES.get(kind, kind)} in stage {outcome.stage}: {what}"
    return Verdict("CRASH", kind, message, trace=outcome.stack)


def _unsupported(outcome: Outcome, refusal: Refusal) -> Verdict:
    return Verdict("UNSUPPORTED", NO_ROOM, refusal, trace=outcome.stack)
