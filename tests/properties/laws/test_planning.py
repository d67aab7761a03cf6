"""Laws of planning: right plans pass, faults are named, and what is no plan is said to be none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.impl.torch.reference_plan import plan
from kernelproof.properties.laws import laws_of
from kernelproof.properties.laws.metadata import planning
from kernelproof.properties.laws.metadata.planning import later_batches
from kernelproof.properties.seeded import plan_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import PlanProblem, problem_from_json
from kernelproof.reference.problems.plan import DECODE, FA2, FA3, FAMILIES, MLA
from kernelproof.reference.tensors.plan import INT_BYTES, LAYOUTS, PlanInputs

LAWS = {law.name: law for law in laws_of("plan")}
SMALL = PlanProblem(
    FA2, (5, 2), (900, 30), page_size=16, group_size=4, multiprocessors=16, graph=True
)
DECODES = PlanProblem(DECODE, (1, 1), (900, 0), num_kv_heads=8, graph=True, multiprocessors=40)
WIDE = replace(DECODES, multiprocessors=132)
TILES = PlanProblem(FA3, (300, 20), (900, 30), page_size=16, group_size=2)
LATENT = PlanProblem(MLA, (9, 2), (900, 30), group_size=16, head_dim=512, causal=True)


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, planner: Implementation, problem: PlanProblem) -> Verdict:
    try:
        return LAWS[law].check(Subject(planner, Target.here("cpu"), Stages()), problem)
    except Stop as stop:
        return stop.verdict


def planner(function: Callable[[PlanInputs], Any]) -> Implementation:
    return implementation("plan", name="mine")(function)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("problem", [SMALL, DECODES, TILES, LATENT, replace(SMALL, graph=False)])
def test_a_right_plan_passes(law: str, problem: PlanProblem) -> None:
    found = verdict(law, plan, problem)
    assert found.status == "PASS", found.message
    assert found.vacuous == (law == "plan_replays" and not problem.graph)


@pytest.mark.parametrize(
    ("law", "bug", "problem", "said"),
    [
        ("keys", bugs.part_of_keys_twice, DECODES, "are computed twice"),
        ("keys", bugs.last_key_of_a_part_lost, replace(LATENT, causal=False), "no work has keys"),
        ("rows", bugs.last_work_of_a_chip_lost, TILES, "work has rows up to"),
        ("merging", bugs.parts_in_one_place, LATENT, "leave their partial result at place 0"),
        ("description", bugs.pages_of_the_first_request, TILES, "of request 1 has kv_indptr 0"),
        ("padding", bugs.graph_without_a_mask, SMALL, "works on request -1515870811"),
        ("workspace", bugs.sums_in_the_partial_results, SMALL, "behind the begin 0 of s"),
        ("leftovers", bugs.merging_of_the_batch_before, SMALL, "has other merges"),
        ("replays", bugs.as_many_blocks_as_the_batch_needs, WIDE, "has padded_batch_size"),
        ("chips", bugs.part_lost_on_a_large_chip, replace(DECODES, graph=False,
                                                          multiprocessors=104), "with 208"),
    ],
)  # fmt: skip
def test_a_fault_is_named(law: str, bug: Implementation, problem: PlanProblem, said: str) -> None:
    found = verdict(f"plan_{law}", bug, problem)
    assert found.status == "FAIL"
    assert said in found.message


def spilling(inputs: PlanInputs) -> torch.Tensor:
    inputs.workspace[INT_BYTES + 3] = 0
    result: torch.Tensor = plan(inputs)
    return result


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda inputs: list(plan(inputs)), "the result is a list, not a tensor"),
        (lambda inputs: plan(inputs).int(), "the vector is torch.int32, not int64"),
        (lambda inputs: plan(inputs)[1:], "the vector has shape (14,), not (15,)"),
        (spilling, "the plan wrote behind a workspace of integers"),
    ],
)
def test_what_is_no_plan(answer: Callable[[PlanInputs], Any], said: str) -> None:
    found = verdict("plan_workspace", planner(answer), SMALL)
    assert (found.status, found.message) == ("FAIL", said)


@pytest.mark.parametrize("law", LAWS)
def test_no_room_is_a_failure_of_one_law(law: str) -> None:
    found = verdict(law, planner(lambda inputs: plan(inputs)[:0]), SMALL)
    assert found.vacuous is (law != "plan_workspace")
    if not found.vacuous:
        assert found.message == "no room for a plan that takes less than 1/4 of the workspaces"


def test_no_room_is_no_failure_of_a_large_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LITTLE", 1 << 40)
    assert verdict("plan_workspace", planner(lambda inputs: plan(inputs)[:0]), SMALL).vacuous


def overlapping(inputs: PlanInputs) -> torch.Tensor:
    """Read the indices of requests where those of tiles lie, as a plan without room does."""
    vector: torch.Tensor = plan(inputs)
    names = LAYOUTS[FA2]
    vector[names.index("request_indices")] = vector[names.index("qo_tile_indices")]
    return vector


@pytest.mark.parametrize("law", LAWS)
def test_only_the_workspaces_law_judges_a_plan_whose_arrays_overlap(law: str) -> None:
    found = verdict(law, planner(overlapping), SMALL)
    if law == "plan_workspace":
        assert (found.status, found.kind) == ("FAIL", "wrote_outside")
    else:
        assert found.status == "PASS"


def test_keys_that_a_row_sees() -> None:
    assert PlanProblem(FA2, (3,), (10,), causal=True).visible(0, 0, 0) == (0, 8)
    assert PlanProblem(FA2, (3,), (10,), causal=True, window_left=2).visible(0, 0, 2) == (5, 10)
    assert PlanProblem(FA2, (3,), (10,), window_left=2).visible(0, 0, 0) == (5, 10)
    assert PlanProblem(MLA, (3,), (10,), group_size=4, causal=True).visible(0, 4, 7) == (0, 9)
    assert PlanProblem(MLA, (3,), (1,), causal=True).visible(0, 0, 0) == (0, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"family": "fa9"}, "family"),
        ({"kv_lens": [1]}, "query_lens"),
        ({"kv_lens": [], "query_lens": []}, "query_lens"),
        ({"kv_lens": [1, -1]}, "kv_lens[1]"),
        ({"page_size": 0}, "page_size"),
        ({"head_dim": 4096}, "head_dim"),
        ({"family": "decode"}, "query_lens"),
        ({"family": "mla", "num_kv_heads": 2}, "num_kv_heads"),
        ({"query_lens": [1 << 18] * 5, "kv_lens": [1] * 5}, "query_lens"),
    ],
)
def test_a_problem_that_has_no_plan_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {field.partition('[')[0]}"):
        problem_from_json({**SMALL.to_json(), **change})


def test_what_predicates_speak_of() -> None:
    assert DECODES.empty_requests
    assert DECODES.crowded  # 8 + 1 parts at most, of 5 blocks
    assert not replace(DECODES, multiprocessors=72).crowded  # 8 + 1 parts, of 9 blocks
    assert not replace(DECODES, multiprocessors=40, kv_lens=(128, 0)).crowded
    grown = replace(DECODES, query_lens=(1, 1, 1), kv_lens=(384, 384, 0), multiprocessors=24)
    assert (grown.crowded, grown.crowded_on_a_larger_chip) == (False, True)
    assert not replace(grown, multiprocessors=48, blocks=8).crowded_on_a_larger_chip
    assert PlanProblem(FA2, (9,), (40,), window_left=23).beyond_window
    assert not PlanProblem(FA2, (9,), (40,), window_left=24).beyond_window
    assert not PlanProblem(FA2, (9,), (40,)).beyond_window
    spare = PlanProblem(MLA, (1, 0), (1, 1), group_size=128, graph=True, spare_rows=1)
    assert spare.spare_rows_fill_a_tile
    assert not replace(spare, spare_rows=0).spare_rows_fill_a_tile
    assert not replace(spare, query_lens=(2, 0)).spare_rows_fill_a_tile
    assert replace(spare, query_lens=(16385, 0)).query_tiles == 16385


@pytest.mark.parametrize("family", FAMILIES)
def test_later_batches_have_the_rows_of_the_graph(family: str) -> None:
    queries = (1, 1) if family == DECODE else (5, 2)
    problem = PlanProblem(family, queries, (9, 3), graph=True, spare_rows=int(family != DECODE))
    found = list(later_batches(problem))
    assert len(found) == (1 if family == DECODE else 3)
    assert {each.graph_rows for each in found} == {problem.graph_rows}
