"""What a call was given, what it gave, bit by bit, and what it needs, to compare two releases.

Each release runs in a process of its own: the first keeps its tensors in a file, the second reads
them. The inputs are made in both, and their digests say whether they are the same bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...impl.protocol import ScratchSession
from ...reference import Problem, problem_from_json
from ..laws import laws_of
from ..laws.batches import on_host
from ..laws.law import ATTENTION, MERGE
from ..verdicts.comparison import same_bits, unusable
from ..verdicts.contained import Stop
from ..verdicts.subject import Subject
from ..verdicts.verdict import Verdict

Named = dict[str, torch.Tensor]
ATTENDING = ATTENTION + MERGE
"""Operations whose result is a pair of an output and an LSE."""
ENOUGH_SECONDS = 0.5
"""Seconds of timing one problem; slow calls are timed once."""
NOT_COMPARED = ("storages",)
"""Fields of a record that hold what surrounds its tensors."""


class Recorder(Subject):
    """A subject whose first inputs and first result are kept."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  a subject's
        super().__init__(*arguments, **options)
        self.given = ""
        self.gave: Named | None = None

    def materialise(self, problem: Any, **options: Any) -> Any:  # noqa: ANN401  any record
        """Make a problem's tensors, and note their digest the first time."""
        inputs = super().materialise(problem, **options)
        if not self.given:
            self.given = digest(dict(tensors_in(inputs)))
        return inputs

    def call(
        self,
        problem: Any,  # noqa: ANN401  any problem
        inputs: Any,  # noqa: ANN401  any record
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Any:  # noqa: ANN401  any result
        """Run the implementation, and keep a copy of what it gave the first time."""
        result = super().call(problem, inputs, function, wait=wait)
        if self.gave is None:
            written = result
            if self.implementation.writes_out:
                lse = self.written_lse(result, getattr(inputs, "lse", None))
                written = (inputs.out, lse)
            found = self.read(lambda value: list(tensors_in(value)), written)
            # Others cannot be copied, let alone compared: the law says so.
            self.gave = {
                name: each.detach().clone()
                for name, each in found
                if unusable(name, each, self.target.device) is None
            }
        return result


def answer(subject: Recorder, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Judge a problem by the first law of its operation, and keep or compare what was given.

    Args:
        subject: the subject that is judged.
        payload: ``problem``; ``keep``, the path of a file for the result's tensors; ``compare``,
            that of another side's.

    Returns:
        The ``verdict`` as JSON, the digests ``given`` of the inputs and ``gave`` of the result, and
        with ``compare`` the ``difference`` from the other side's result, None if there is none.
    """
    problem = problem_from_json(payload["problem"])
    started = time.perf_counter()
    try:
        refusal = subject.refusal(problem)
        if refusal is not None:
            return {"verdict": Verdict("UNSUPPORTED", refusal.code, refusal).to_json()}
        verdict = subject.as_launched(laws_of(problem.operation)[0].check(subject, problem))
    except Stop as stop:
        verdict = stop.verdict
    verdict = dataclasses.replace(verdict, seconds=subject.seconds, calls=subject.calls)
    gave = defined({name: each.cpu() for name, each in (subject.gave or {}).items()})
    launched = subject.kernel_names.to_json() if subject.kernel_names else {}
    found: dict[str, Any] = {
        "verdict": dataclasses.replace(verdict, launched=launched).to_json(),
        "given": subject.given,
        "gave": digest(gave),
        "seconds": time.perf_counter() - started,
    }
    if payload.get("keep"):
        torch.save(gave, payload["keep"])
    if payload.get("compare") and Path(payload["compare"]).is_file():
        found["difference"] = difference(torch.load(payload["compare"], weights_only=True), gave)
    return found


def defined(gave: Named) -> Named:
    """Return a result without entries that may hold anything: page ids past the last request's."""
    indices, indptr = gave.get("paged_kv_indices"), gave.get("paged_kv_indptr")
    if indices is None or indptr is None or not indptr.numel():
        return gave
    return {**gave, "paged_kv_indices": indices[: max(int(indptr.flatten()[-1]), 0)]}


def timed(subject: Subject, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Time calls of an implementation on one problem, the first of which is not counted.

    Returns:
        ``seconds`` of each of ``calls`` calls, fewer where they are slow, their ``median``, and
        ``first`` of the one before them.
    """
    problem = problem_from_json(payload["problem"])
    cuda = subject.target.device == "cuda"
    inputs = subject.materialise(problem)
    seconds = []
    started = time.perf_counter()
    for number in range(int(payload["calls"]) + 1):
        if number > 1 and time.perf_counter() - started > ENOUGH_SECONDS:
            break
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            _call(subject, problem, inputs)
        except Stop as stop:
            return {"stopped": stop.verdict.to_json()}
        seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    return {"first": first, "seconds": rest, "median": statistics.median(rest)}


def weighed(subject: Subject, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Measure what a call needs of memory, once a first has set aside what is kept between calls.

    Returns:
        ``peak_bytes``, what a call allocates at most, and ``workspace_bytes``, what it needs of a
        workspace that its session names; None where it names none.
    """
    problem = problem_from_json(payload["problem"])
    inputs = subject.materialise(problem)
    try:
        _call(subject, problem, inputs)
        peak = allocated(lambda: _call(subject, problem, inputs), subject.target.device)
    except Stop as stop:
        return {"stopped": stop.verdict.to_json()}
    return {"peak_bytes": peak, "workspace_bytes": _workspace_bytes(subject, problem, inputs)}


def _call(subject: Subject, problem: Problem, inputs: Any) -> None:  # noqa: ANN401  any record
    if problem.operation in ATTENDING or subject.implementation.writes_out:
        subject.run_operation(problem, inputs)
    else:
        subject.call(problem, inputs)


def _workspace_bytes(subject: Subject, problem: Problem, inputs: Any) -> int | None:  # noqa: ANN401
    """Return the bytes that a session's run needs of the workspace it names; None without one."""
    if subject.implementation.session is None:
        return None
    try:
        session = subject.open_session()
        if not isinstance(session, ScratchSession):
            return None
        subject.call(problem, on_host(inputs)[0], session.plan)
        return written(session.scratch(), lambda: subject.call(problem, inputs, session.run))
    except Stop:  # the calls before went well: it is the session's fault, and life_cycle's to tell
        return None


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Walk a record, a tuple or a mapping, and give every tensor in it by a dotted name."""
    if isinstance(value, torch.Tensor):
        yield name or "result", value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in NOT_COMPARED:
                yield from tensors_in(getattr(value, field.name), _join(name, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key], _join(name, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, each in zip(itertools.count(), value):
            yield from tensors_in(each, _join(name, str(number)))


def digest(named: Named) -> str:
    """Return a digest of tensors' names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
    return found.hexdigest()[:32]


def difference(one: Named, other: Named) -> dict[str, Any] | None:
    """Return where two results differ: how many elements, and by how much at most.

    None where every bit is the same.
    """
    if one.keys() != other.keys():
        return {"elements": 0, "of": 0, "largest": None, "where": "other tensors"}
    elements = total = 0
    largest, where = 0.0, ""
    for name, first in one.items():
        second = other[name]
        if first.shape != second.shape or first.dtype != second.dtype:
            return {"elements": 0, "of": 0, "largest": None, "where": f"shape or dtype of {name}"}
        total += first.numel()
        if first.numel() == 0 or same_bits(first, second):
            continue
        a, b = first.to(torch.float64), second.to(torch.float64)
        different = (a != b) & ~(a.isnan() & b.isnan())
        elements += int(different.sum())
        distances = (a - b).abs().nan_to_num(nan=torch.inf)
        apart = float(torch.where(different, distances, 0.0).max())
        if apart >= largest:
            largest, where = apart, name
    if not elements:
        return None
    return {"elements": elements, "of": total, "largest": largest, "where": where}


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


QUIET = "99"
"""Level of the profiler's log; without it, the profiler writes a line when it starts and ends."""
PATTERN = 0xA5
CHUNK_BYTES = 4 << 20
"""Bytes of a workspace that are read together, from its end: it may have hundreds of MiB."""


def allocated(call: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes that torch has allocated on a device at a time during a call.

    Allocations are counted, not what the operating system lends: what an allocator keeps, and how
    it lies scattered, moves that by a megabyte from process to process. What a BLAS sets aside for
    itself is not counted.

    Args:
        call: waits for the device where that matters.
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    assert profile.profiler is not None  # noqa: S101  it has run
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(max(itertools.accumulate((event.nbytes() for event in events), initial=0)))


def written(workspaces: Sequence[torch.Tensor], call: Callable[[], object]) -> int:
    """Return how many bytes of workspaces a call needs: up to the last that it writes, of all.

    Args:
        workspaces: the workspaces that may hold anything before the call.
        call: waits for the device where that matters.
    """
    views = [each.view(torch.uint8).view(-1) for each in workspaces]
    for view in views:
        view.fill_(PATTERN)
    call()
    return sum(map(_end, views))


def _end(view: torch.Tensor) -> int:
    for stop in range(len(view), 0, -CHUNK_BYTES):
        start = max(0, stop - CHUNK_BYTES)
        changed = view[start:stop] != PATTERN
        if changed.any():
            return start + int(changed.nonzero()[-1].item()) + 1
    return 0
