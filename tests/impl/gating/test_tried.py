"""What was tried on a device, as evidence: it raises the level of cells, and no rule denies it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.fixtures import EVIDENCE
from kernelproof.impl.gating import Feature, Target, decide, knowledge, load_rules
from kernelproof.impl.gating.decision import refusing
from kernelproof.impl.gating.knowledge import (
    SCHEMA,
    EvidenceError,
    Knowledge,
    Table,
    Trial,
    last_seen,
    read_trials,
    table_of,
)
from kernelproof.impl.gating.rules import NOT_RUN, RIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

H200 = Target(sm=90, flashinfer="0.6.13", cuda="13.0", triton="3.6.0")
FILES = sorted(EVIDENCE.glob("gating-*.json"))
FP8 = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}


def record(outcome: str, side: str = "supported", rule: str = "fa2-16bit", **fields: Any) -> Trial:  # noqa: ANN401  fields of a feature
    feature = Feature(**{"backend": "fa2", **fields})
    return Trial(H200, "some", "a cell", feature, side, (rule,), outcome)


def ran(table: Table, feature: Feature, target: Target) -> bool:
    """Whether a call that a rule allows was right there, by a table."""
    said = Knowledge("declared", "", "", feature, target.sm, target.flashinfer, True, "")  # noqa: FBT003
    return [each.level for each in table.agreeing(said)] == ["run"]


def contradictions(records: Iterable[Trial]) -> Iterator[str]:
    """Yield a sentence for each outcome that the shipped rules now deny."""
    book = load_rules()
    for seen in records:
        if seen.outcome == NOT_RUN or seen.explained:
            continue
        where = f"{seen.implementation}, {seen.cell} with {seen.target.flashinfer}"
        became = {RIGHT: "is right", "wrong": "is wrong"}.get(seen.outcome, seen.outcome)
        refusals = refusing(seen.feature, seen.target, book=book)
        if refusals:
            documented = {"raises", *(word for rule in refusals for word in rule.called)}
            if seen.outcome not in documented:
                names = ", ".join(rule.id for rule in refusals)
                yield f"{where}: {names} refuses it, and it {became}"
        elif seen.outcome != RIGHT:
            decision = decide(seen.feature, seen.target, book=book)
            if decision.supported:
                yield f"{where}: {decision.rule} allows it, and it {became}"


def test_no_rule_denies_what_was_seen() -> None:
    records = last_seen(record for path in FILES for record in read_trials(path))
    assert list(contradictions(records)) == []


def test_the_last_run_that_asked_counts() -> None:
    wrong, right = replace(record("wrong"), date="2026-01-01"), record("right")
    right, unrun = replace(right, date="2026-01-02"), replace(record("not run"), date="2026-01-03")
    beside = replace(wrong, feature=replace(wrong.feature, group_size=5))
    elsewhere = replace(wrong, target=replace(H200, flashinfer="0.7.2.post1"))
    chip = replace(wrong, target=replace(H200, sm=100))
    another = replace(wrong, implementation="another")
    others = [beside, elsewhere, chip, another]
    assert last_seen([unrun, right, wrong, *others]) == [right, *others]
    assert last_seen([right, replace(wrong, date=right.date)])[1].outcome == "wrong"


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (record("right"), None),
        (record("wrong"), "fa2-16bit allows it, and it is wrong"),
        (record("hangs"), "fa2-16bit allows it, and it hangs"),
        (record("not run"), None),
        (replace(record("wrong"), explained=True), None),
        (record("wrong", "refused", "fa2-sinks-ignored", sinks=True), None),
        (record("raises", "refused", "fa2-sinks-ignored", sinks=True), None),
        (
            record("right", "refused", "fa2-sinks-ignored", sinks=True),
            "fa2-sinks-ignored refuses it, and it is right",
        ),
        (
            record("crashes", "refused", "cuda-core-group-size", backend="cuda-core", group_size=5),
            "cuda-core-group-size refuses it, and it crashes",
        ),
        # The rule came after the run.
        (record("hangs", backend="fa3", phase="prefill", window=True, **FP8), None),
    ],
)
def test_a_rule_that_denies_what_was_seen_is_found(seen: Trial, told: str | None) -> None:
    found = list(contradictions([seen]))
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def test_a_cell_was_run_if_its_kernel_was_and_each_of_its_values() -> None:
    seen = table_of(
        (),
        [
            record("right", page_size=16, group_size=2),
            record("right", page_size=64, group_size=2),
            record("right", page_size=16, group_size=5),
            record("right", page_size=16, group_size=2, window=True),
            record("wrong", page_size=16, group_size=2, soft_cap=True),
        ],
    )
    plain = Feature(backend="fa2", group_size=2)
    for known in (
        plain,
        replace(plain, page_size=64, group_size=5),
        replace(plain, window=True, group_size=5),
    ):
        assert ran(seen, known, H200)
    for unknown in (
        replace(plain, soft_cap=True),
        replace(plain, group_size=7),
        replace(plain, kv_layout="HND"),
        replace(plain, head_dim_qk=64, head_dim_vo=64),
        replace(plain, phase="prefill"),
        replace(plain, backend="fa3"),
    ):
        assert not ran(seen, unknown, H200)
    assert not ran(seen, plain, Target(sm=90, flashinfer="0.6.14"))
    assert not ran(seen, plain, Target(sm=100, flashinfer="0.6.13"))


def test_the_level_of_both_sides_becomes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [
        {"feature": {"backend": "fa2"}, "side": "supported", "rules": ["fa2-16bit"],
         "outcome": "right"},
        {"feature": {"backend": "fa2", "sinks": True}, "side": "refused",
         "rules": ["fa2-sinks-ignored"], "outcome": "wrong"},
    ]  # fmt: skip
    more = {"implementation": "some", "cell": "a cell", "entry": None}
    target = {"sm": 90, "flashinfer": "0.6.13", "cuda": "13.0", "triton": None}
    data = {"schema": SCHEMA, "target": target, "trials": [{**more, **each} for each in trials]}
    (tmp_path / "gating-h200.json").write_text(json.dumps({"gating": data}))
    monkeypatch.setattr(knowledge, "EVIDENCE", tmp_path)
    knowledge.table.cache_clear()
    try:
        assert decide(Feature(backend="fa2"), H200).evidence == "run"
        refused = decide(Feature(backend="fa2", sinks=True), H200)
        assert (refused.status, refused.evidence) == ("refused", "run")
        other = replace(H200, flashinfer="0.6.14")
        assert decide(Feature(backend="fa2"), other).evidence == "declared"
        assert decide(Feature(backend="fa2", sinks=True), other).evidence == "reported"
    finally:
        knowledge.table.cache_clear()


@pytest.mark.parametrize(("last", "seen_there"), [("right", True), ("wrong", False)])
def test_of_two_files_the_later_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    seen_there: bool,
) -> None:
    target = {"sm": 90, "flashinfer": "0.6.13", "cuda": "13.0", "triton": None}
    trial = {"feature": {"backend": "fa2"}, "side": "supported", "rules": ["fa2-16bit"],
             "implementation": "some", "cell": "a cell", "entry": None}  # fmt: skip
    first = "wrong" if last == "right" else "right"
    for name, date, outcome in (("b", "2026-01-01", first), ("a", "2026-01-02", last)):
        data = {"schema": SCHEMA, "target": target, "date": date,
                "trials": [{**trial, "outcome": outcome}]}  # fmt: skip
        (tmp_path / f"gating-{name}.json").write_text(json.dumps(data))
    monkeypatch.setattr(knowledge, "EVIDENCE", tmp_path)
    knowledge.table.cache_clear()
    try:
        assert ran(knowledge.table(), Feature(backend="fa2"), H200) == seen_there
    finally:
        knowledge.table.cache_clear()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"schema": "another"}, "schema is not"),
        ([], "schema is not"),
        ({"schema": SCHEMA}, "Object missing required field `target`"),
        ({"schema": SCHEMA, "target": {"sm": 90, "flashinfer": "0.6.13", "cuda": None,
                                       "triton": None},
          "trials": [{"implementation": "some", "cell": "a", "feature": {}, "side": "refused",
                      "rules": [], "entry": None, "outcome": "explodes"}]},
         "Invalid value 'explodes' - at `$.trials[0].outcome`"),
    ],
)  # fmt: skip
def test_evidence_that_cannot_be_read(tmp_path: Path, data: object, told: str) -> None:
    path = tmp_path / "gating.json"
    path.write_text(json.dumps(data))
    with pytest.raises(EvidenceError) as error:
        read_trials(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)
