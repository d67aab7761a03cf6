"""What isolation costs: the way of a request to the worker and back, all work excluded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from kernelproof.ci.bench.results import Requirement, Results, Table
from kernelproof.properties.isolation.workers import Worker, WorkerPool
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.specialising import Stages
from kernelproof.properties.worker import tasks
from kernelproof.reference import AttentionProblem

ROUND_TRIP = 1.0
"""Milliseconds at the median."""
WARM_UP = 5
HANDLER = f"{__name__}:handle"
IMPLEMENTATION = "torch-sdpa-paged"
LAW = "parity"


def handle(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Do a task of the worker's, or nothing, and say how many seconds it took."""
    start = time.perf_counter()
    result = {} if payload["task"] == "nothing" else tasks.handle(payload, stages)
    return {"result": result, "inside": time.perf_counter() - start}


def measure(repetitions: int) -> Results:
    """Send requests of three sizes to one worker, in turn."""
    find_law(LAW)  # here rather than there: a wrong name is this module's fault
    with WorkerPool(HANDLER) as pool, pool.lease() as worker:
        outside = _trips(worker, WARM_UP + repetitions)
    rows, requirements = [], []
    for name, trips in outside.items():
        warm = sorted(1e3 * seconds for seconds in trips[WARM_UP:])
        median = statistics.median(warm)
        rows.append((name, len(warm), median, warm[int(0.9 * (len(warm) - 1))], warm[-1]))
        requirements.append(Requirement(f"round trip in ms, {name}", median, high=ROUND_TRIP))
    table = Table(
        "Round trip to the isolated worker, ms, without the time inside its handler",
        ("request", "trips", "median", "90 %", "max"),
        tuple(rows),
    )
    return Results("roundtrip", (table,), tuple(requirements))


def _trips(worker: Worker, count: int) -> dict[str, list[float]]:
    problem = AttentionProblem(query_lens=(1, 3), seq_lens=(17, 40), page_size=16, causal=True)
    about = {"implementation": IMPLEMENTATION, "device": "cpu"}
    requests: dict[str, dict[str, object]] = {
        "nothing": {"task": "nothing"},
        "describe": {"task": "describe", **about},
        "judge": {"task": "judge", **about, "law": LAW, "problem": problem.to_json()},
    }
    times: dict[str, list[float]] = {name: [] for name in requests}
    for _ in range(count):
        for name, request in requests.items():
            start = time.perf_counter()
            outcome = worker.run(request)
            seconds = time.perf_counter() - start
            if outcome.status != "done" or outcome.result is None:
                message = f"the request {name!r} gave {outcome.status}: {outcome.detail}"
                raise RuntimeError(message)
            inside = outcome.result["inside"]
            _require_pass(outcome.result["result"])
            times[name].append(seconds - float(str(inside)))
    return times


def _require_pass(result: object) -> None:
    """Refuse to time a request that did not do what it should."""
    if isinstance(result, Mapping):
        status, error = result.get("status", "PASS"), result.get("error")
        if status == "PASS" and error is None:
            return
    message = f"the worker answered {result}"
    raise RuntimeError(message)
