"""Deadlines on a machine that is busy with other work: only what a process can use counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproof.impl import find_implementation
from kernelproof.impl.registry import BUILT_IN
from kernelproof.properties.isolation.stage_clock import MOST_TIMES, StageClock
from kernelproof.properties.isolation.workers import Deadlines, Outcome, WorkerPool
from kernelproof.properties.laws import laws_of
from kernelproof.properties.worker.pools import open_pool
from kernelproof.properties.worker.requests import Address, verdict_of
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    NormQuantizeProblem,
    Problem,
    QuantizeProblem,
    RearrangeProblem,
    RopeAppendProblem,
    RouteProblem,
)

SMALL: dict[str, Problem] = {
    "paged_attention": AttentionProblem(query_lens=(2, 1), seq_lens=(3, 5), page_size=2),
    "ragged_attention": AttentionProblem("ragged_attention", (2, 1), (3, 5)),
    "append_paged_kv": AttentionProblem("append_paged_kv", (2, 1), (3, 5)),
    "merge_state": MergeProblem(num_states=3),
    "build_metadata": MetadataProblem(),
    "route": RouteProblem(num_tokens=3, num_experts=8),
    "moe": MoEProblem(num_tokens=3),
    "quantize": QuantizeProblem(num_tokens=3),
    # Without a residual, which each of many calls would add in place.
    "norm_and_quantize": NormQuantizeProblem(num_tokens=3),
    "rearrange": RearrangeProblem(rows=3),
    "rope_and_append": RopeAppendProblem((2, 1), (5, 3)),
}
PATH = [str(Path(__file__).parents[1]), *sys.path]
OTHERS = 4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a thread waits")


@pytest.fixture
def busy() -> Iterator[int]:
    """A processor on which four other processes run all the time."""
    processor = max(os.sched_getaffinity(0))
    spin = (
        f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
        for _ in range(OTHERS)
    ]
    for each in others:  # imports over, it spins from now on
        assert each.stdout is not None
        each.stdout.readline()
    yield processor
    for each in others:
        each.kill()
        each.communicate()


def outcome_of(limit: float, **payload: object) -> Outcome:
    pool = WorkerPool(
        "isolation_handlers:misbehave", sys_path=PATH, preload=(), standby=False, forks=False
    )
    with pool, pool.lease() as worker:
        assert worker.run({"do": "echo", "value": 0}).status == "done"
        return worker.run(payload, Deadlines(run=limit))


def test_a_call_that_gets_a_fifth_of_a_processor_is_not_stuck(busy: int) -> None:
    outcome = outcome_of(1.0, do="work", seconds=0.8, processor=busy)
    assert outcome.status == "done", outcome
    assert outcome.seconds > 1.0, "nothing was shown: the processor was not busy"


def test_a_loop_without_end_is_found_on_a_busy_machine_too(busy: int) -> None:
    outcome = outcome_of(0.4, do="work", seconds=600.0, processor=busy)
    assert (outcome.status, outcome.stage) == ("hang", "run")
    assert outcome.seconds < MOST_TIMES * 0.4 + 2.0


@pytest.mark.usefixtures("busy")
def test_a_sleep_without_end_waits_for_no_processor() -> None:
    outcome = outcome_of(0.4, do="sleep")
    assert (outcome.status, outcome.stage) == ("hang", "run")
    assert outcome.seconds < 1.5


def test_steps_of_a_known_number_are_progress_and_the_last_is_not() -> None:
    assert outcome_of(1.0, do="steps", steps=20, last=0.1).status == "done"
    stuck = outcome_of(1.0, do="steps", steps=5, last=600.0)
    assert (stuck.status, stuck.stage) == ("hang", "run")
    assert stuck.seconds < 2.5


SLOW = """
import os
import time
from dataclasses import replace

from kernelproof.impl import find_implementation


def slowly(name):
    ours = find_implementation(name, None)
    calls = []

    def call(inputs):
        os.sched_setaffinity(0, {PROCESSOR})
        until = time.process_time() + (0.35 if calls else 0.0)
        calls.append(None)
        while True:
            result = ours.function(inputs)
            if time.process_time() > until:
                return result

    return replace(ours, name=f"slow-{name}", function=call, compile_key=None)


"""
OURS = [name for name in BUILT_IN if name.startswith("triton-") and "graph" not in name]


def test_our_kernels_that_are_interpreted_on_a_busy_processor_are_not_stuck(
    busy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {name: name.replace("-", "_") for name in OURS}
    lines = [f'{short} = slowly("{name}")' for name, short in kernels.items()]
    text = SLOW.replace("PROCESSOR", str(busy)) + "\n".join(lines)
    (tmp_path / "slow_kernels.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    longest, limits = 0.0, (4.0, 0.6)  # of a first call, which imports, and of a slow one
    with open_pool("cpu", standby=False) as pool, pool.lease() as worker:
        for name, short in kernels.items():
            worker.renew()
            operation = find_implementation(name, None).operation
            law = next(law.name for law in laws_of(operation) if law.name.endswith("parity"))
            case = Address(f"slow_kernels:{short}", None, "cpu").case(law, SMALL[operation])
            for limit in limits:
                verdict = verdict_of(worker.run(case, Deadlines(run=limit)))
                assert (verdict.status, verdict.interpreted) == ("PASS", True), (name, verdict)
            longest = max(longest, verdict.seconds / verdict.calls)
    assert longest > limits[-1], "nothing was shown: the processor was not busy"


def test_what_was_waited_is_of_one_stage_that_began_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = [0]

    def delays(_process: int) -> dict[str, int]:
        waited[0] += 1_000_000_000
        return {"1": waited[0]}

    clock, now = StageClock(), [10.0]
    monkeypatch.setattr("kernelproof.properties.isolation.stage_clock._delays", delays)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def seen(stage: str, started: float) -> float:
        now[0] += 1.0
        return clock.waited(1, stage, int(started * 1e9), limit=4.0)

    assert seen("run", 10.0) == 0.0, "what was waited before the first look is not known"
    assert seen("run", 10.0) == 1.0
    assert seen("specialise", 12.5) == 0.0
    assert seen("specialise", 12.5) == 1.0
    assert seen("run", 12.0) == 1.0, "it goes on where it was"
    assert seen("run", 12.0) == 2.0
    assert seen("run", 16.5) == 0.0, "another call"
    assert [seen("run", 16.5) for _ in range(50)][-1] == (MOST_TIMES - 1) * 4.0
