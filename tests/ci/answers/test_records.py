"""Records of a run come back from JSON as they were, and nothing else comes out of a journal."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.identity import plan_identity
from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.answers.records import from_data, to_data
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.kernels import FileRun
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    ProblemVerdict,
    RunReport,
)
from kernelproof.properties.search.candidate import Deadly
from kernelproof.properties.search.plan import Learned, Plan
from kernelproof.properties.space.axes import Axes
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.verdicts.comparison import fail
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, MergeProblem, RouteProblem

SMALL, LONG = MergeProblem(num_tokens=3), AttentionProblem(seq_lens=(7,))
WRONG = fail("numeric", "off \udc80 by far")


def run_report() -> RunReport:
    law = LawReport("parity", judged=2, seconds=0, ratios=Counter({3: 2}), known=Counter(a=1))
    law.finding = Finding("mine", "parity", WRONG, SMALL, first=(LONG, Verdict("HANG")))
    law.problems = {LONG.id: ProblemVerdict(LONG, "PASS", "", vacuous=False)}
    law.without_room, law.too_large = {SMALL.id: SMALL}, {SMALL.id}
    law.passing_ratio = float("inf")
    law.kernels.files["mine.py"] = FileRun(1 << 10_000, {7: {"BLOCK": ["16"]}}, {7: 2})
    report = ImplementationReport("mine", "m:mine", "merge_state", laws=[law])
    report.refusal = Refusal("no room", "memory", "a GPU")
    report.declared = {"tile": 0, "claims": ["one"], "head_dims": None}
    return RunReport("quick", 7, {"device": "cpu"}, [report])


@pytest.mark.parametrize(
    "record",
    [
        run_report(),
        Learned((SMALL, RouteProblem()), (Deadly(SMALL, WRONG, {"causal": True}),)),
        Axes("merge_state", {"sizes": ((1, 2), (3, 4)), "causal": (True,)}, 9, edges=(64,)),
        {"costs": {"mine": None}, "numbers": [1, 1.0, True]},
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_is_made_again(record: object) -> None:
    again = from_data(json.loads(json.dumps(to_data(record))))
    assert again == record
    assert repr(again) == repr(record)  # 0 is no 0.0, a list no tuple


def test_a_refusal_keeps_its_code() -> None:
    again = from_data(to_data(run_report().implementations[0].refusal))
    assert (again, again.code, again.about) == ("no room", "memory", "a GPU")


def test_other_objects_are_not_written_and_not_made() -> None:
    @dataclass
    class Finding:
        implementation: str

    for other in (Finding("mine"), Path("a"), b"a"):
        with pytest.raises(TypeError, match="is no record that a journal keeps"):
            to_data([other])
    wrong: list[Any] = [{"": "Path", "of": ["a"]}, {"": "Finding"}, {"": "set"}, {"": []}]
    for data in wrong:
        with pytest.raises((KeyError, TypeError)):
            from_data(data)


def test_an_answer_that_is_none_of_its_question_is_refused(tmp_path: Path) -> None:
    for resume in (False, True):
        with Journal(tmp_path / "j.jsonl", flag="--cases") as journal:
            journal.start({}, resume=resume)
            if not resume:
                journal.keep({"ask": "a"}, {"": "no such record"})
                assert journal.recall({"ask": "a"}, from_data) is None, "it is for a later run"
                continue
            assert journal.recall({"ask": "b"}, from_data) is None
            with pytest.raises(JournalError, match=r"--cases .*j\.jsonl: holds an answer that"):
                journal.recall({"ask": "a"}, from_data)


def test_a_journal_of_another_plan_or_code_is_refused(tmp_path: Path) -> None:
    path, subject = tmp_path / "j.jsonl", tmp_path / "subject.py"

    def start(**other: Any) -> None:  # noqa: ANN401  fields of a plan
        with Journal(path) as journal:
            plan = Plan([f"{subject}:merge"], PROFILES["quick"], **other)
            journal.start(plan_identity(plan), resume=True)

    subject.write_text("merge = 1")
    start()
    start(jobs=3, seconds=60.0)
    with pytest.raises(JournalError, match="of another run: its seed is 0, not 7"):
        start(seed=7)
    with pytest.raises(JournalError, match=r"its laws is \[\], not \['parity'\]"):
        start(laws=["parity"])
    subject.write_text("merge = 2")
    with pytest.raises(JournalError, match=r"its implementation .*subject\.py is"):
        start()
