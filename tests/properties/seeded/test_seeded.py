"""Each law kills the bugs that were seeded for it, and accuses no honest control.

The searches draw the problems of ``kernelproof score --profile quick``, by its seeds, and judge
them in this process: starting Python and torch for every few bugs would take longer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kernelproof.ci.score.scoring import LEAST_KILLED, PROBLEMS_UNDER_ONE_LAW
from kernelproof.impl import OPERATIONS, Implementation, Target, find_implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import LAWS, Law, find_law, laws_of
from kernelproof.properties.search.drawing import MOST_IDLE
from kernelproof.properties.search.plan import Plan, problems_of
from kernelproof.properties.seeded import BUGS, CATALOGUE, HONEST, PROCESS_CONTROLS, SeededBug
from kernelproof.properties.seeded.triton_bugs import BUGS as TRITON_BUGS
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.properties.space.profiles import PROFILES, Cost
from kernelproof.properties.space.rounds import Enough, draw_round, most_rounds, seed_of_round
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.launches import launches_of
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import HANDLER
from kernelproof.properties.worker.requests import Address, verdict_of
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    Problem,
    RouteProblem,
)

TARGET = Target.here("cpu")
QUICK = PROFILES["quick"]
FAST = Cost("fast", 1.0, QUICK.max_work)
"""The cost class of every bug and control, whatever the machine."""
MOST_PROBLEMS = 300
"""Until a bug's own law must have killed it; most die within 20."""
SEEDS = (0, 1)
"""One of them must do: a bug of trees with windows takes 70 to 350 problems, whatever is drawn."""
UNSEEN = frozenset({
    "append-does-not-saturate", "append-record-rotary-quantised", "append-record-scales-inverse",
    "output-not-saturated",
    "graph-keeps-page-indices", "keys-of-the-host", "layout-guessed",
    "second-byte-lost", "sixty-four-parts", "full-last-part",
    "window-of-eleven-bits", "hidden-wide-tile-resets", "first-two-spans",
    "tokens-of-twelve-bits", "products-cut-short",
    "path-of-deepseek-loses-a-lane", "counts-in-whole-warps", "static-scale-does-not-saturate",
    "ue8m0-of-tokens-packed-wrong", "block-scales-transposed", "last-state-late",
    "reciprocal-for-division", "overflow-to-nan", "overflow-at-the-largest", "rows-of-a-cut-tile",
    "cut-group-of-a-row-wraps", "reciprocal-in-place", "always-saturating",
    "slopes-beside-interleaved-scales", "last-tile-ends-early", "part-counted-in-pages",
    "residual-row-in-int32",
})  # fmt: skip
"""Bugs that no law of the profile quick kills; the profile gate is held to every one."""
RUN_SECONDS, PATIENT = 1.0, 120.0
"""Deadlines of a call that hangs, and of one that ends by itself, on a busy machine too."""

RAGGED = "ragged_attention"
RARE: dict[str, Problem] = {
    # More keys than are drawn: parity has one such problem from the profile gate on.
    "sixty-four-parts": AttentionProblem(seq_lens=(2**14 + 37,)),
    "full-last-part": AttentionProblem(seq_lens=(2**14,), regime="dominant_key", seed=18),
    # Parity has such requests from the profile gate on.
    "window-of-eleven-bits": AttentionProblem(
        RAGGED, query_lens=(1,), seq_lens=(4133,), causal=True, window_left=4095
    ),
    "hidden-wide-tile-resets": AttentionProblem(
        RAGGED, seq_lens=(1061,), custom_mask=True, mask_pattern="inner_tile", seed=1
    ),
    # Whole tiles of keys of one sign with many channels, in FP8: from the profile gate on.
    "products-cut-short": AttentionProblem(
        query_lens=(4,),
        seq_lens=(200,),
        num_kv_heads=2,
        head_dim_qk=128,
        head_dim_vo=128,
        dtype="bfloat16",
        page_size=16,
        kv_cache="float8_e4m3fn",
        q_dtype="float8_e4m3fn",
        regime="one_sign",
    ),
    # Two features that hardly a draw has: parity has pairs of them from the profile gate on.
    "slopes-beside-interleaved-scales": AttentionProblem(
        seq_lens=(40,),
        head_dim_qk=64,
        head_dim_vo=64,
        page_size=4,
        kv_cache="nvfp4 interleaved",
        alibi=True,
    ),
    # More tokens than are drawn: parity has such a call from the profile gate on.
    "tokens-of-twelve-bits": MoEProblem(num_tokens=4097),
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
    idle: int = 0
    found: tuple[Verdict, Problem] | None = None


def verdict(law: Law, implementation: Implementation, problem: Problem) -> Verdict:
    subject = Subject(implementation, TARGET, _Anywhere())
    subject.kernel_names = launches_of(implementation, TARGET)
    try:
        return subject.as_launched(law.check(subject, problem))
    except Stop as stop:
        return stop.verdict


def quick_problems(law: Law) -> int:
    """Count the problems that a law judges with the profile quick."""
    return problems_of(Plan([], QUICK), law, FAST)


_narrowed: dict[object, Axes | None] = {}


def axes_of(implementation: Implementation) -> Axes | None:
    """Narrow the axes once for all that claim the same: thousands of problems are asked about."""
    claims = (implementation.operation, implementation.features, implementation.supports)

    def probe(asked: Any) -> list[Refusal | None]:  # noqa: ANN401  a sequence of problems
        return [implementation.refusal(problem, TARGET) for problem in asked]

    if claims not in _narrowed:
        assert not implementation.backend, "support rules refuse problems too"
        _narrowed[claims] = narrow(implementation.operation, probe, QUICK.max_work)
    return _narrowed[claims]


def search(
    implementation: Implementation,
    law: Law,
    most: int,
    judge: Callable[[Problem], Verdict] | None = None,
    wanted: str = "",
    seeds: tuple[object, ...] = (),
) -> _Search:
    """Draw problems, as the engine does, until one fails, or has the wanted status."""
    seeds = seeds or (law.name, implementation.name, 0)  # the engine's, for its own seed 0
    axes = axes_of(implementation)
    assert axes is not None
    axes, result, seen = axes.within(law.looks_at), _Search(), set[str]()
    if axes is None:
        return result

    def look(problem: Problem) -> None:
        gives_up = not result.judged and result.idle > max(MOST_IDLE, 4 * most)
        if result.judged >= most or result.found or gives_up:
            raise Enough
        if problem.id in seen:
            return
        seen.add(problem.id)
        if implementation.refusal(problem, TARGET) is not None:
            result.idle += 1
            return
        said = judge(problem) if judge else verdict(law, implementation, problem)
        result.judged += not said.vacuous
        result.idle += said.vacuous
        if said.status == wanted if wanted else said.bad:
            result.found = (said, problem)

    for number in range(most_rounds(most)):
        if draw_round(axes, QUICK, seed_of_round(number, *seeds), look):
            break
    return result


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_killed_by_the_law_that_it_was_seeded_for(bug: SeededBug) -> None:
    """Within the problems of quick, or else another law kills it within those."""
    implementation, law = find_implementation(bug.reference), find_law(bug.law)
    found = search(implementation, law, quick_problems(law)).found
    if not found and bug.name not in UNSEEN:
        others = [each for each in laws_of(bug.operation) if each is not law]
        killed = any(search(implementation, each, quick_problems(each)).found for each in others)
        assert killed, "quick kills it by no law"
    if bug.name in RARE:
        problem = RARE[bug.name]
    else:
        for seed in SEEDS:
            found = found or search(implementation, law, MOST_PROBLEMS, seeds=(seed,)).found
        assert found, f"{law.name} finds nothing in {MOST_PROBLEMS} problems"
        problem = found[1]
    # Once more, as the engine confirms it: a fault of the second call must show again.
    said = verdict(law, implementation, problem)
    assert said.bad, f"{said} on {problem}"


NO_OTHER_SCALE = ("without-scales", "scale_homogeneity")
"""A control that refuses every scale but 1, and the law that asks for other ones."""


ON_A_GPU = ("host_runs_ahead", "metadata_no_host_sync")
"""Laws of what the host and the GPU do at the same time."""


@pytest.mark.parametrize("control", HONEST, ids=lambda control: control.name)
def test_no_law_accuses_an_honest_control(control: SeededBug) -> None:
    """On a third of the problems of a quick score; the kept scores have more."""
    implementation = find_implementation(control.reference)
    laws = [law for law in laws_of(control.operation) if law.concerns(implementation.declares)]
    for law in laws:
        result = search(implementation, law, max(2, quick_problems(law) // 2))
        concerned = (control.name, law.name) != NO_OTHER_SCALE and law.name not in ON_A_GPU
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
    address, law = Address(control.reference, None, "cpu"), find_law(control.law)
    hangs, harmless = control.control == "hang", HARMLESS[control.operation]
    wanted, deadlines = control.control.upper(), Deadlines(run=RUN_SECONDS if hangs else PATIENT)

    def forked(problem: Problem) -> Verdict:
        limits = replace(deadlines, load=2 * PATIENT)  # it stands still while its fork goes on
        return verdict_of(worker.run(address.attempt(law.name, problem, deadlines), limits))

    def asked(problem: Problem, deadlines: Deadlines) -> Verdict:
        return verdict_of(worker.run(address.case(law.name, problem), deadlines))

    # That quick draws such a problem is seen in forks, which cost no process.
    implementation = find_implementation(control.reference)
    most = round(PROBLEMS_UNDER_ONE_LAW * quick_problems(law))
    found = search(implementation, law, most, forked, wanted).found
    assert found, f"no {wanted} in {most} problems"
    said = asked(found[1], deadlines)
    assert said.status == wanted, said
    if not hangs:
        assert said.kind == CRASH_KINDS[control.name]
    assert asked(harmless, Deadlines(run=PATIENT)).status == "PASS"


def test_the_catalogue_is_large_and_covers_every_law_and_operation() -> None:
    assert len(BUGS) >= 45
    assert len(PROCESS_CONTROLS) >= 6
    assert len(HONEST) >= 6
    laws = {bug.law for bug in (*BUGS, *TRITON_BUGS)}
    assert {law.name for law in LAWS if not law.overlap} <= laws
    assert {bug.operation for bug in CATALOGUE} == set(OPERATIONS)
    assert {bug.operation for bug in HONEST} == set(OPERATIONS)
    assert {bug.name for bug in BUGS} >= UNSEEN
    assert len(UNSEEN) <= (1 - LEAST_KILLED) * len(BUGS)


@pytest.mark.parametrize("bug", CATALOGUE, ids=lambda bug: bug.name)
def test_an_entry_names_an_implementation_and_says_what_it_does(bug: SeededBug) -> None:
    implementation = find_implementation(bug.reference)
    assert (implementation.name, implementation.operation) == (bug.name, bug.operation)
    assert bug.description.endswith(".")
    assert [other.name for other in CATALOGUE].count(bug.name) == 1
    if bug.control != "honest":
        assert bug.law in {law.name for law in laws_of(bug.operation)}
