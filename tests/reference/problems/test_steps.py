"""An engine's steps: what events lead to, by hand."""

from __future__ import annotations

import pytest

from kernelproof.reference import StepsProblem, materialise
from kernelproof.reference.problems.steps import Request
from kernelproof.reference.tensors.steps import prepared_steps


def requests(*events: str, page_size: int = 4) -> list[list[tuple[int, int, int]]]:
    """Return row, computed keys and new tokens of each request of each step."""
    steps = StepsProblem(events=events, page_size=page_size).steps
    return [[(r.row, r.computed, r.new) for r in step.requests] for step in steps]


def test_a_prompt_comes_in_chunks_and_is_decoded_then() -> None:
    assert requests("arrive 5", "run 3", "run 3", "run 3", "draft 2", "run 0") == [
        [(1, 0, 3)], [(1, 3, 2)], [(1, 5, 1)], [(1, 6, 3)],
    ]  # fmt: skip


def test_rejected_drafts_are_computed_again() -> None:
    problem = StepsProblem(
        events=("arrive 2", "run 0", "draft 3", "run 0", "reject 2", "reject 9", "run 0"),
        page_size=2,
    )
    first, drafts, last = (step.requests[0] for step in problem.steps)
    assert (drafts.computed, drafts.new, drafts.rejected) == (2, 4, 3)
    assert last == Request(1, 3, 1, drafts.pages, held=3)
    assert first.pages == drafts.pages[:1]


def test_rows_and_pages_of_a_finished_request_are_used_again_at_once() -> None:
    first, other = StepsProblem(
        events=("arrive 4", "arrive 4", "run 0", "finish 0", "arrive 3", "run 0"), page_size=4
    ).steps
    kept, new = other.requests
    assert (kept.row, kept.held) == (2, 1)
    assert new.row == first.requests[0].row
    assert (new.held, new.computed) == (0, 0)
    assert first.requests[0].pages[0] in (*kept.pages, *new.pages)


def test_a_preempted_request_comes_back_after_a_step_and_is_computed_again() -> None:
    assert requests(
        "arrive 2", "arrive 3", "run 0", "run 0", "preempt 0", "run 0", "run 0"
    )[2:] == [[(2, 4, 1)], [(2, 5, 1), (1, 0, 3)]]  # fmt: skip


def test_a_shared_prefix_has_the_pages_of_the_oldest_request() -> None:
    step = StepsProblem(events=("arrive 9", "run 0", "share 9", "run 0"), page_size=4).steps[1]
    oldest, sharing = step.requests
    assert (sharing.computed, sharing.new, sharing.held) == (8, 1, 0)
    assert sharing.pages[:2] == oldest.pages[:2]
    assert sharing.pages[2] not in oldest.pages


def test_what_cannot_happen_is_nothing() -> None:
    events = ("finish 3", "preempt 1", "reject 2", "share 2", "run 0", *["arrive 1"] * 9, "run 0")
    assert [len(step) for step in requests(*events)] == [1, 6]


def test_buffers_by_hand() -> None:
    events = "arrive 3", "arrive 1", "run 0", "finish 1", "pad 2", "run 0"
    problem = StepsProblem("vllm", events, page_size=2)
    found = prepared_steps(materialise(problem))  # type: ignore[arg-type]
    (first, second), (last,) = (step.requests for step in problem.steps)
    assert found["positions"].tolist() == [[0, 1, 2, 0], [3, 1, 2, 0]]
    assert found["seq_lens"][1].tolist() == [4, 0, 0, 0, 0, 0, 0]
    assert found["page_indices"].tolist() == [
        [*first.pages, *second.pages], [*last.pages, *second.pages],
    ]  # fmt: skip
    assert found["page_table"][1, 1].tolist() == [0, 0]
    assert found["slot_mapping"][1].tolist() == [2 * last.pages[1] + 1, -1, -1, -1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "trt"}, "engine is 'trt'"),
        ({"events": ("arrive 1",)}, "it must be events that let a request arrive, and a step run"),
        ({"events": ("arrive 1", "stop 1")}, r"events\[1\] is 'stop 1'; it must be one of run"),
        ({"events": ("arrive x", "run 0")}, r"events\[0\] is 'arrive x'"),
        ({"events": ("arrive 9999", "run 0")}, "events that need less than 9973"),
    ],
)
def test_problems_of_no_engine(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepsProblem(**fields)  # type: ignore[arg-type]
