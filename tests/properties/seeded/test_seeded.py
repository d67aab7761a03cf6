"""Each law kills the bugs that were seeded for it, and accuses no honest control."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kernelproof.impl import OPERATIONS, Implementation, Target, find_implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import LAWS, Law, find_law, laws_of
from kernelproof.properties.seeded import BUGS, CATALOGUE, HONEST, PROCESS_CONTROLS, SeededBug
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import Enough, draw_round, most_rounds, seed_of_round
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.properties.worker.tasks import HANDLER
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    Problem,
    RouteProblem,
)

TARGET = Target.here("cpu")
MOST_PROBLEMS = 300
"""Until a bug's own law must have killed it; most die within 20."""
HONEST_PROBLEMS = 6
RUN_SECONDS, PATIENT = 1.0, 120.0
"""Deadlines of a call that hangs, and of one that ends by itself, on a busy machine too."""

RAGGED = "ragged_attention"
RARE: dict[str, Problem] = {
    # Too much work for quick: several blocks of scales, in both directions.
    "block-scales-transposed": MoEProblem(
        hidden=136, inter=72, num_experts=4, top_k=4, quantized="fp8_block"
    ),
}
TRIGGERS: dict[str, Problem] = {
    "spins-on-long-request": AttentionProblem(seq_lens=(40,)),
    "sleeps-in-window": AttentionProblem(RAGGED, window_left=0),
    "waits-with-lock-held": MergeProblem(num_states=3),
    "aborts-on-chunked-prefill": AttentionProblem(query_lens=(2,), seq_lens=(3,)),
    "segfaults-on-large-page": AttentionProblem(page_size=64),
    "exits-with-sinks": AttentionProblem(RAGGED, sinks=True),
    "leaves-on-second-layout": AttentionProblem("append_paged_kv", kv_layout="HND"),
    "raises-on-group-size": AttentionProblem(group_size=5),
    "stuck-in-barrier": AttentionProblem(seq_lens=(17,)),
    "workspace-of-terabytes": AttentionProblem(seq_lens=(40,)),
    "killed-by-empty-batch": MetadataProblem(steps=(((), ()),)),
    "waits-for-idle-expert": MoEProblem(num_experts=3, top_k=2, seed=2),
    "spins-on-second-tile": MoEProblem(num_tokens=9, num_experts=1),
    "aborts-on-no-tokens": MoEProblem(num_tokens=0),
    "segfaults-on-duplicate-ids": MoEProblem(top_k=2, assignment="duplicates"),
    "seeks-threshold-between-ties": RouteProblem(num_experts=8, regime="ties"),
    "exits-on-masked-groups": RouteProblem(
        method="deepseek_v3", num_experts=4, num_groups=2, topk_groups=1
    ),
}
HARMLESS: dict[str, Problem] = {
    "paged_attention": AttentionProblem(),
    "ragged_attention": AttentionProblem(RAGGED),
    "append_paged_kv": AttentionProblem("append_paged_kv"),
    "merge_state": MergeProblem(),
    "build_metadata": MetadataProblem(),
    "moe": MoEProblem(num_tokens=3),
    "route": RouteProblem(num_tokens=3, num_experts=8),
}
CRASH_KINDS = {
    "aborts-on-chunked-prefill": "SIGABRT",
    "segfaults-on-large-page": "SIGSEGV",
    "exits-with-sinks": "exit 7",
    "leaves-on-second-layout": "SystemExit",
    "raises-on-group-size": "ValueError",
    "workspace-of-terabytes": "out of memory",
    "killed-by-empty-batch": "SIGKILL",
    "aborts-on-no-tokens": "SIGABRT",
    "segfaults-on-duplicate-ids": "SIGSEGV",
    "exits-on-masked-groups": "exit 9",
}


class _Anywhere:
    """Stages that nobody watches: the laws run in this process here."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


@dataclass
class _Search:
    """What a search for a counterexample came to."""

    judged: int = 0
    found: tuple[Verdict, Problem] | None = None


def verdict(law: Law, implementation: Implementation, problem: Problem) -> Verdict:
    try:
        return law.check(Subject(implementation, TARGET, _Anywhere()), problem)
    except Stop as stop:
        return stop.verdict


def search(implementation: Implementation, law: Law, most: int) -> _Search:
    """Draw problems, as the engine does, until one fails."""

    def probe(asked: Any) -> list[Refusal | None]:  # noqa: ANN401  a sequence of problems
        return [implementation.refusal(problem, TARGET) for problem in asked]

    axes = narrow(implementation.operation, probe, PROFILES["quick"].max_work)
    assert axes is not None
    result = _Search()

    def look(problem: Problem) -> None:
        if result.judged >= most or result.found:
            raise Enough
        if implementation.refusal(problem, TARGET) is None:
            said = verdict(law, implementation, problem)
            result.judged += not said.vacuous
            if said.bad:
                result.found = (said, problem)

    for number in range(most_rounds(most)):
        if draw_round(axes, PROFILES["quick"], seed_of_round(number, 0), look):
            break
    return result


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_killed_by_the_law_that_it_was_seeded_for(bug: SeededBug) -> None:
    implementation, law = find_implementation(bug.reference), find_law(bug.law)
    if bug.name in RARE:
        problem = RARE[bug.name]
    else:
        found = search(implementation, law, MOST_PROBLEMS).found
        assert found, f"{law.name} finds nothing in {MOST_PROBLEMS} problems"
        problem = found[1]
    # Once more, as the engine confirms it: a fault of the second call must show again.
    said = verdict(law, implementation, problem)
    assert said.bad, f"{said} on {problem}"


NO_OTHER_SCALE = ("without-scales", "scale_homogeneity")
"""A control that refuses every scale but 1, and the law that asks for other ones."""


ON_A_GPU = ("host_runs_ahead", "metadata_no_host_sync")
"""Laws of what the host and the GPU do at the same time."""


def declares(implementation: Implementation, law: Law) -> bool:
    """Whether an implementation declares what a law needs."""
    declared = {
        *implementation.features,
        *(["writes_out"] if implementation.writes_out else []),
        *(["session"] if implementation.session else []),
    }
    return not law.needs or bool(declared & set(law.needs))


@pytest.mark.parametrize("control", HONEST, ids=lambda control: control.name)
def test_no_law_accuses_an_honest_control(control: SeededBug) -> None:
    implementation = find_implementation(control.reference)
    for law in laws_of(control.operation):
        result = search(implementation, law, HONEST_PROBLEMS)
        concerned = declares(implementation, law) and (control.name, law.name) != NO_OTHER_SCALE
        concerned = concerned and law.name not in ON_A_GPU
        assert bool(result.judged) >= concerned, f"{law.name} judged nothing"
        assert result.found is None, f"{law.name}: {result.found}"


@pytest.mark.parametrize(
    ("bug", "actions"),
    [
        ("plan_keeps_host_buffers", "plan the batch; overwrite what was planned from; run: "),
        ("plan_by_lengths", "plan the batch; plan the same lengths on other pages; run: "),
        ("plan_in_shared_workspace", "plan the batch; plan and run another session; run: "),
        ("plan_keeps_lengths", "plan the batch; plan longer requests; run: "),
        ("cache_gathered_once", "plan the batch; run; write new keys in place and run again: "),
        (
            "cache_gathered_once",
            "plan the batch; run; append a key to each request, plan and run again: ",
        ),
        ("buffer_of_first_dtype", "plan the batch; run; plan the batch in another dtype; run: "),
        ("scratch_assumed_zero", "plan the batch; overwrite the scratch memory; run: "),
        (
            "graph_keeps_page_indices",
            "plan the batch; capture; plan the same lengths on other pages; replay: ",
        ),
        ("graph_scratch_not_reset", "plan the batch; capture; replay; replay: "),
        (
            "graph_buffers_shared",
            "plan the batch; capture; plan and run another session; replay: ",
        ),
    ],
)
def test_the_fewest_actions_that_show_a_fault_are_told(bug: str, actions: str) -> None:
    home = "graph_bugs" if bug.startswith("graph") else "session_bugs"
    implementation = find_implementation(f"kernelproof.properties.seeded.attention.{home}:{bug}")
    problem = AttentionProblem(
        query_lens=(2, 1), seq_lens=(5, 3), page_size=2, causal=True, dtype="bfloat16"
    )
    law = find_law("life_cycle")
    said = (verdict(law, implementation, replace(problem, seed=seed)) for seed in range(60))
    assert any(each.message.startswith(actions) for each in said)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    preload = ("torch", "kernelproof.properties.worker.tasks")
    with WorkerPool(HANDLER, preload=preload) as pool, pool.lease() as lent:
        yield lent


@pytest.mark.parametrize("control", PROCESS_CONTROLS, ids=lambda control: control.name)
def test_a_hang_or_crash_becomes_a_verdict_and_its_neighbour_keeps_its_own(
    control: SeededBug, worker: Worker
) -> None:
    def ask(problem: Problem, seconds: float = PATIENT) -> Verdict:
        payload = {
            "task": "judge",
            "law": control.law,
            "implementation": control.reference,
            "problem": problem.to_json(),
            "device": "cpu",
        }
        return verdict_of(worker.run(payload, Deadlines(run=seconds)))

    said = ask(TRIGGERS[control.name], RUN_SECONDS if control.control == "hang" else PATIENT)
    assert said.status == control.control.upper(), said
    if control.control == "crash":
        assert said.kind == CRASH_KINDS[control.name]
    assert ask(HARMLESS[control.operation]).status == "PASS"


def test_the_catalogue_is_large_and_covers_every_law_and_operation() -> None:
    assert len(BUGS) >= 45
    assert len(PROCESS_CONTROLS) >= 6
    assert len(HONEST) >= 6
    assert {law.name for law in LAWS if not law.overlap} <= {bug.law for bug in BUGS}
    assert {bug.operation for bug in CATALOGUE} == set(OPERATIONS)
    assert {bug.operation for bug in HONEST} == set(OPERATIONS)


@pytest.mark.parametrize("bug", CATALOGUE, ids=lambda bug: bug.name)
def test_an_entry_names_an_implementation_and_says_what_it_does(bug: SeededBug) -> None:
    implementation = find_implementation(bug.reference)
    assert (implementation.name, implementation.operation) == (bug.name, bug.operation)
    assert bug.description.endswith(".")
    assert [other.name for other in CATALOGUE].count(bug.name) == 1
    if bug.control != "honest":
        assert bug.law in {law.name for law in laws_of(bug.operation)}
