"""Making the deck: what is chosen, and that the kept one still kills what it says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.ci.bench.first_finding import HALVES, half_of
from kernelproof.ci.score.deck import (
    Trial,
    bugs_of,
    cover,
    judged_on,
    killers_of,
    with_every_law,
    write_deck,
)
from kernelproof.properties.laws import laws_of
from kernelproof.properties.search import deck
from kernelproof.properties.search.deck import DeckEntry, load_deck
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.worker.pools import open_pool
from kernelproof.properties.worker.requests import HarnessError
from kernelproof.reference import MergeProblem


def trial_of(*kills: str) -> Trial:
    """Return a trial in which the nth problem of n + 1 tokens has killed these bugs."""
    trial = Trial()
    for number, names in enumerate(kills):
        problem = MergeProblem(num_tokens=number + 1)
        trial.problems["parity", problem.id] = DeckEntry("parity", problem)
        trial.kills["parity", problem.id] |= set(names)
    return trial


def test_what_kills_most_comes_first_and_what_kills_nothing_is_left_out() -> None:
    chosen = cover(trial_of("a", "", "abcd", "e"))
    assert [each.problem for each in chosen][:2] == [
        MergeProblem(num_tokens=3),
        MergeProblem(num_tokens=4),
    ]
    assert chosen[0].kills == ("a", "b", "c", "d")
    assert all(each.kills for each in chosen)


def test_of_two_that_kill_the_same_the_cheaper_comes_first() -> None:
    trial = trial_of("ab", "ab")
    cheap, dear = trial.problems
    trial.calls[cheap] = 9
    assert trial.cost(cheap) > trial.cost(dear)
    assert cover(trial)[0].problem.id == dear[1]


def test_only_the_even_half_takes_part() -> None:
    bugs = bugs_of("merge_state")
    assert bugs
    assert {half_of(name) for name in bugs} == {HALVES[0]}
    for each in load_deck("merge_state"):
        assert set(each.kills) <= bugs.keys()


def test_every_law_that_is_not_dear_has_an_entry() -> None:
    named = {each.law for each in with_every_law("merge_state", [])}
    assert named == {law.name for law in laws_of("merge_state")} - {"soak", "far_rows"}


def test_a_deck_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (DeckEntry("parity", MergeProblem(seed=9), ("some-bug",)),)
    write_deck("written", entries, tmp_path)
    monkeypatch.setattr(deck, "DECK", tmp_path)
    assert load_deck("written") == entries


def test_a_bug_whose_process_starts_too_late_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axes, renewed = narrow("merge_state", lambda asked: [None] * len(asked), 1000), list[int]()
    said: list[Any] = ["importing it took longer than 60 s", HarnessError("load: overrun"), axes]

    def survey(_worker: object, _address: object, _work: int, report: Any) -> Any:  # noqa: ANN401
        found = said.pop(0)
        if isinstance(found, HarnessError):
            raise found
        report.error = found if isinstance(found, str) else ""
        return None if report.error else found

    monkeypatch.setattr("kernelproof.ci.score.deck.survey", survey)
    worker = SimpleNamespace(renew=lambda: renewed.append(1))
    pool: Any = SimpleNamespace(lease=lambda _: nullcontext(worker))
    bug = next(iter(bugs_of("merge_state").values()))
    assert judged_on(pool, bug, []) == {}
    assert (len(renewed), said) == (2, [])
    said += ["it ends its process"] * 3
    with pytest.raises(RuntimeError, match=f"{bug.name} cannot be judged: it ends its process"):
        judged_on(pool, bug, [])


@pytest.mark.parametrize("operation", ["merge_state", "append_paged_kv", "batched_moe"])
def test_entries_of_the_kept_deck_kill_what_they_say(operation: str) -> None:
    bugs = bugs_of(operation)
    killers = killers_of(operation, bugs)
    entries = [each for each in load_deck(operation) if each.kills][:4]
    name = entries[0].kills[0]
    assert killers[name]
    claimed = [each for each in entries if name in each.kills]
    with open_pool("cpu", size=1) as pool:
        verdicts = judged_on(pool, bugs[name], claimed)
    assert all(verdicts[each.law, each.problem.id][0] for each in claimed)
