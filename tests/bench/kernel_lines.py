"""What recording the lines of Triton kernels costs: cases judged with it and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kernelproof.ci.bench.results import Requirement, Results, Table
from kernelproof.impl.gpu import triton_interpreter
from kernelproof.properties.isolation.workers import Worker, WorkerPool
from kernelproof.properties.verdicts.specialising import Stages
from kernelproof.properties.worker import tasks
from kernelproof.reference import AttentionProblem, Problem

MOST = 1.15
"""Most times as long as without recording."""
WARM_UP = 2
CASES: Mapping[str, Problem] = {
    "triton-attention": AttentionProblem(
        query_lens=(3, 1), seq_lens=(70, 40), page_size=16, causal=True, head_dim_qk=64
    ),
    "triton-attention-split-kv": AttentionProblem(
        query_lens=(1, 1), seq_lens=(300, 40), page_size=16, causal=True, head_dim_qk=64
    ),
}
"""A problem of each implementation."""


def handle(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Do a task of the worker's, and return the processor's seconds that it took."""
    start = time.process_time()
    result = tasks.handle(payload, stages)
    return {"seconds": time.process_time() - start, "kernels": bool(result.get("kernels"))}


def handle_unseen(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Do it without recording."""
    vars(triton_interpreter)["mark_lines"] = lambda _: None
    return handle(payload, stages)


def measure(repetitions: int) -> Results:
    """Judge a problem of each implementation in two workers, in turn."""
    rows, requirements = [], []
    for name, problem in CASES.items():
        without, recorded = _seconds(name, problem, repetitions)
        times = recorded / without
        rows.append((name, 1e3 * without, 1e3 * recorded, times))
        requirements.append(Requirement(f"times as long, {name}", times, high=MOST))
    columns = ("implementation", "without", "recorded", "times")
    table = Table("A case in Triton's interpreter, ms of a processor, medians", columns, (*rows,))
    return Results("kernel-lines", (table,), tuple(requirements))


def _seconds(name: str, problem: Problem, repetitions: int) -> Sequence[float]:
    request: dict[str, object] = {
        "task": "judge",
        "implementation": name,
        "device": "cpu",
        "law": "parity",
        "problem": problem.to_json(),
    }
    with ExitStack() as stack:
        pools = [stack.enter_context(_pool(each)) for each in ("handle_unseen", "handle")]
        workers = [stack.enter_context(pool.lease()) for pool in pools]
        taken = [[_trip(each, request) for each in workers] for _ in range(WARM_UP + repetitions)]
    if any(seen for (_, seen), _ in taken) or not all(seen for _, (_, seen) in taken):
        message = f"{name} was recorded where it must not be, or not recorded"
        raise RuntimeError(message)
    arms = zip(*taken[WARM_UP:], strict=True)
    return [statistics.median(seconds for seconds, _ in arm) for arm in arms]


def _pool(handler: str) -> WorkerPool:
    environment = {"TRITON_INTERPRET": "1"}
    return WorkerPool(f"{__name__}:{handler}", environment=environment, standby=False)


def _trip(worker: Worker, request: dict[str, object]) -> tuple[float, bool]:
    outcome = worker.run(request)
    if outcome.status != "done" or outcome.result is None:
        message = f"the request gave {outcome.status}: {outcome.detail}"
        raise RuntimeError(message)
    return float(str(outcome.result["seconds"])), bool(outcome.result["kernels"])
