"""Judging mutants of small kernels, by the laws and by somebody's own tests."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from rich.console import Console

from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.mutate import judging, measuring, trial, trials
from kernelproof.ci.mutate.finding_kernels import find_kernels
from kernelproof.ci.mutate.judging import Answer, Clean, Judge
from kernelproof.ci.mutate.measuring import measure
from kernelproof.ci.mutate.mutants import Mutant, mutants_of
from kernelproof.ci.mutate.report import print_report
from kernelproof.ci.mutate.stand_ins import MOST_COPIED, Kernels, StandIn
from kernelproof.ci.mutate.trials import Trials
from kernelproof.properties.laws import LAWS
from kernelproof.properties.search.plan import Plan

PLAIN = dedent(
    """
    def jit(function):
        return function

    @jit
    def double(x):
        if x > 1000:
            return x + 1
        y = x * 2
        y = y + 0.0
        return y
    """
)
"""A kernel that needs no Triton: a file of kernels is known by its text."""
TESTS = "from kernels import double\nassert double(3) == 6\n"
MERGE = dedent(
    """
    import torch
    import triton
    import triton.language as tl
    from kernelproof.impl import implementation


    @triton.jit
    def kernel(outs, lses, out, lse, states, rows, DIM: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        if rows < 0:
            row += 1
        channel = tl.arange(0, BLOCK)
        largest = tl.load(lses + row)
        for state in range(1, states):
            largest = tl.maximum(largest, tl.load(lses + state * rows + row))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = base * 0.0
        merged = tl.full((BLOCK,), 0.0, tl.float32)
        for state in range(0, states):
            weight = tl.exp(tl.load(lses + state * rows + row) - base)
            if weight > 0.0:
                place = (state * rows + row) * DIM + channel
                value = tl.load(outs + place, mask=channel < DIM, other=0.0)
                total += weight
                merged += weight * value
        tl.store(out + row * DIM + channel, merged / tl.maximum(total, 1e-30), mask=channel < DIM)
        tl.store(lse + row, largest + tl.log(tl.where(total > 0.0, total, 1.0)))


    @implementation("merge_state", name="mine")
    def merge(inputs):
        outs, lses = inputs.outs.float().contiguous(), inputs.lses.float().contiguous()
        states, tokens, heads, dim = outs.shape
        out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        block = triton.next_power_of_2(dim)
        if tokens * heads:
            kernel[(tokens * heads,)](outs, lses, out, lse, states, tokens * heads, dim, block)
        return out.to(inputs.out_dtype), lse
    """
)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    (tmp_path / "kernels.py").write_text(PLAIN)
    (tmp_path / "test_kernels.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    return Kernels("kernels:double", "kernels:double", str(tmp_path), "", ("kernels.py",))


OPEN: list[Journal] = []


def judge_of(
    kernels: Kernels, tests: str = "", *, laws: tuple[str, ...] = (), resume: bool = False
) -> Judge:
    while OPEN:  # as the run before does at its end
        OPEN.pop().close()
    journal = Journal(Path("journal.jsonl"), flag="--resume")
    journal.start({"mutants": kernels.name}, resume=resume)
    OPEN.append(journal)
    return Judge(kernels, jobs=2, seed=0, tests=tests, laws=laws, journal=journal)


def python(script: str) -> str:
    return shlex.join([sys.executable, script])


def one_of(mutants: list[Mutant], wanted: str) -> Mutant:
    (found,) = [
        each for each in mutants if each.diff.splitlines()[-1].removeprefix("+").strip() == wanted
    ]
    return found


def test_tests_kill_what_they_reach(plain: Kernels) -> None:
    told: list[str] = []
    measured = measure(judge_of(plain, python("test_kernels.py")), "tests", None, told.append, {})
    became = {each.diff.splitlines()[-1].strip("+ "): answer for each, answer in measured.judged}
    assert became["y = x + 2"].status == "killed"
    assert became["y = x + 2"].verdict == "exit code 1"
    assert became["y = y - 0.0"].status == "survived"
    assert became["return x - 1"].status == "unreached"
    assert became["if x >= 1000:"].status == "survived"
    killed, reached = measured.killed_of_reached()
    assert 0 < killed < reached
    equal = one_of(measured.survivors, "y = y - 0.0")
    argued = measure(
        judge_of(plain, python("test_kernels.py"), resume=True),
        "tests",
        None,
        told.append,
        {equal.id: "minus zero"},
    )
    assert argued.killed_of_reached(without_equivalents=True) == (killed, reached - 1)
    data = argued.to_json()
    assert {"id": equal.id, "equivalent": "minus zero"}.items() <= next(
        row for row in data["mutants"] if row["id"] == equal.id
    ).items()


@pytest.mark.parametrize("judgeable", [True, False])
def test_what_triton_refuses_no_test_has_killed(
    plain: Kernels, monkeypatch: pytest.MonkeyPatch, judgeable: bool
) -> None:
    """The laws stand in for Triton, which a file of plain Python does not have."""
    wrong = {"law": "parity", "status": "FAIL", "kind": "numeric", "message": "off",
             "raised": False, "trace": ""}  # fmt: skip
    raised = {"status": "CRASH", "kind": "ValueError", "raised": True, "trace": "triton"}

    def ask(self: Judge, stand_in: StandIn, *_: object, first_only: bool, jobs: int) -> object:
        del self, jobs
        mutated = first_only and "y = x + 2" in (stand_in.place / "kernels.py").read_text()
        found = [wrong | (raised if mutated else {})] if first_only else []
        clean = {"judged": int(judgeable), "costs": {}, "seconds": 1.0, "cut": [], "preload": []}
        return {**clean, "findings": found}

    monkeypatch.setattr(Judge, "_ask", ask)
    judge = judge_of(plain, python("test_kernels.py"))
    every = mutants_of("kernels.py", PLAIN)
    chosen = [one_of(every, text) for text in ("y = x + 2", "y = x * 3", "y = y - 0.0")]
    answers = judge.judge(chosen, "tests", judge.clean("tests"), lambda _: None)
    became = [answers[each.id].status for each in chosen]
    assert became == ["refused" if judgeable else "killed", "killed", "survived"]


@pytest.mark.slow
def test_triton_refuses_a_mutant_that_tests_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "mine.py").write_text(MERGE)
    (tmp_path / "test_mine.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from mine import merge\n"
        "outs, lses = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2)\n"
        "out, lse = merge(SimpleNamespace(outs=outs, lses=lses, out_dtype=torch.float32))\n"
        "assert torch.allclose(lse, lses.logsumexp(0))\n"
        "assert torch.allclose(out, (lses.softmax(0).unsqueeze(-1) * outs).sum(0), atol=1e-5)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = Kernels("mine:merge", "mine:merge", str(tmp_path), "", ("mine.py",))
    judge = judge_of(kernels, python("test_mine.py"), laws=("parity",))
    every = mutants_of("mine.py", MERGE)
    wanted = {"total = weight": "killed", "channel = tl.arange(1, BLOCK)": "refused"}
    chosen = {text: one_of(every, text) for text in wanted}
    answers = judge.judge(list(chosen.values()), "tests", judge.clean("tests"), lambda _: None)
    assert {text: answers[each.id].status for text, each in chosen.items()} == wanted


def test_a_later_run_judges_only_what_is_left(
    plain: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = python("test_kernels.py")
    first = measure(judge_of(plain, command), "tests", 4, lambda _: None, {})
    with Path("journal.jsonl").open("a") as file:
        file.write('{"question": "cut o')
    judged: list[Mutant] = []
    answer = Judge._answer

    def counted(self: Judge, mutant: Mutant, *more: object) -> object:
        judged.append(mutant)
        return answer(self, mutant, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Judge, "_answer", counted)
    again = measure(judge_of(plain, command, resume=True), "tests", 6, lambda _: None, {})
    assert len(judged) == 2
    assert {each.id for each in first.mutants} <= {each.id for each in again.mutants}
    measure(judge_of(plain, command), "tests", 4, lambda _: None, {})
    assert len(judged) == 6


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (shlex.join([sys.executable, "-c", "raise SystemExit(3)"]), "exits with 3 though nothing"),
        (shlex.join([sys.executable, "-c", ""]), "exits with 0 though kernels.py cannot be loaded"),
    ],
)
def test_tests_that_tell_nothing_are_refused(plain: Kernels, command: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        measure(judge_of(plain, command), "tests", 1, lambda _: None, {})


def test_a_test_that_never_ends_has_a_deadline(
    plain: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "LEAST_SECONDS", 5.0)
    monkeypatch.setattr(judging, "TIMES_CLEAN", 0.0)
    Path("test_kernels.py").write_text(
        "import time\nfrom kernels import double\nwhile double(3) != 6: time.sleep(0.1)\n"
    )
    judge = judge_of(plain, python("test_kernels.py"))
    clean = judge.clean("tests")
    mutant = one_of(mutants_of("kernels.py", PLAIN), "y = x + 2")
    assert judge.judge([mutant], "tests", clean, lambda _: None)[mutant.id].verdict == "timeout"


@pytest.mark.slow
def test_the_laws_judge_mutants_of_a_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "mine.py").write_text(MERGE)
    monkeypatch.chdir(tmp_path)
    kernels = Kernels("mine:merge", "mine:merge", str(tmp_path), "", ("mine.py",))
    judge = judge_of(kernels, laws=("parity",))
    clean = judge.clean("quick")
    assert not clean.without
    every = mutants_of("mine.py", MERGE)
    wanted: dict[str, Callable[[str, str], bool]] = {
        "total = weight": lambda status, law: status == "killed" and law == "parity",
        "row -= 1": lambda status, law: status == "unreached" and not law,
        "channel = tl.arange(1, BLOCK)": lambda status, _: status == "refused",
        "if rows <= 0:": lambda status, law: status == "survived" and not law,
    }
    chosen = {text: one_of(every, text) for text in wanted}
    answers = judge.judge(list(chosen.values()), "quick", clean, lambda _: None)
    became = {text: answers[mutant.id] for text, mutant in chosen.items()}
    assert {
        text: str(became[text])
        for text, right in wanted.items()
        if not right(became[text].status, became[text].law)
    } == {}


def test_built_in_kernels_are_found_by_what_they_launch() -> None:
    pytest.importorskip("triton")
    found = find_kernels("triton-merge-state", None)
    assert found["package"] == "kernelproof"
    assert found["files"] == [
        "impl/triton/kernels/merge.py",
        "impl/triton/kernels/device_functions.py",
    ]
    assert find_kernels("triton-merge-state", "kernels/merge.py")["files"] == found["files"][:1]
    assert not find_kernels("triton-merge-state", "other/merge.py")["files"]
    assert not find_kernels("triton-merge-state", "erge.py")["files"]


def test_a_file_of_a_plug_in_is_meant_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernels.py").write_text(PLAIN)
    (tmp_path / "plugged.py").write_text(
        "import a.kernels, b.kernels\n"
        "from kernelproof.impl import implementation\n"
        "@implementation('merge_state', name='plugged')\n"
        "def merge(inputs): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def files(file: str | None) -> list[str]:
        return find_kernels("plugged.py:merge", file)["files"]  # type: ignore[no-any-return]

    assert files(None) == ["a/kernels.py", "b/kernels.py"]
    assert files("b/kernels.py") == ["b/kernels.py"]
    assert files("kernels.py") == ["a/kernels.py", "b/kernels.py"]
    assert not files("moe/kernels.py")


def test_what_a_test_writes_beside_it_changes_no_original(plain: Kernels, tmp_path: Path) -> None:
    (tmp_path / "golden.txt").write_text("right")
    (tmp_path / "large.bin").write_bytes(bytes(MOST_COPIED + 1))
    (tmp_path / "test_kernels.py").write_text(
        TESTS + "from pathlib import Path\nPath('golden.txt').write_text('new')\n"
    )
    judge_of(plain, python("test_kernels.py")).clean("tests")
    assert (tmp_path / "golden.txt").read_text() == "right"
    copy = StandIn(plain, tmp_path.parent / "copy").place
    assert not (copy / "golden.txt").is_symlink()
    assert (copy / "large.bin").is_symlink()


@pytest.mark.parametrize("kernels_here", [True, False])
def test_another_test_is_asked_again(plain: Kernels, tmp_path: Path, kernels_here: bool) -> None:
    if not kernels_here:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "kernels.py").write_text(PLAIN)
        plain = replace(plain, folder=str(tmp_path / "package"), package="package")

    def journal() -> Path:
        judge = measuring.judge_of(
            plain, seed=0, tests="pytest", laws=(), jobs=1, resume=True, tell=lambda _: None
        )
        with judge.journal, pytest.raises(JournalError, match="another run is writing it"):
            Journal(judge.journal._path)  # another measurement of the same
        return judge.journal._path

    first = journal()
    assert journal() == first
    (tmp_path / "test_more.py").write_text("")
    assert journal() != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-kernel"], "no-such-kernel"),
        (["torch-sdpa-ragged"], "there is no function under triton.jit"),
        (["torch-sdpa-ragged", "--equivalents", "list.json"], "an object with a text for each id"),
        (["torch-sdpa-ragged", "--without", "algebr"], "--without: "),
        (["torch-sdpa-ragged", "--law", "parity", "--without", "parity"], "no law is left"),
        (["torch-sdpa-ragged", "--only", "no_such_field=1"], "no_such_field"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    assert main(["mutate", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--without", "algebra"], {law.name for law in LAWS} - {"algebra"}),
        (["--law", "parity", "--law", "soak", "--without", "soak"], {"parity"}),
        ([], set()),
    ],
)
def test_a_judge_has_the_laws_and_the_problems_that_are_left(
    options: list[str], left: set[str], plain: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "find", lambda *_: plain)
    asked: list[dict[str, Any]] = []

    def judge_of(_: Kernels, **given: Any) -> Judge:  # noqa: ANN401  of ``judge_of``
        asked.append(given)
        message = "enough"
        raise UsageRefusedError(message)

    monkeypatch.setattr(measuring, "judge_of", judge_of)
    assert main(["mutate", "kernels:double", *options, "--only", "dtype=bfloat16"]) == 2
    assert (set(asked[0]["laws"]), asked[0]["only"]) == (left, ("dtype=bfloat16",))


def test_a_trial_draws_only_the_problems_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[Plan] = []

    def run(plan: Plan) -> None:
        plans.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "Run", run)
    request = {
        "reference": "torch-sdpa-ragged",
        "profile": "quick",
        "seed": 0,
        "seconds": 1.0,
        "jobs": 1,
        "laws": ["parity"],
        "without": [],
        "only": ["dtype=bfloat16"],
        "costs": {},
        "first_only": True,
        "preload": [],
    }
    with pytest.raises(KeyboardInterrupt):
        trial.judge(request)
    assert plans[0].only.values == {"dtype": ("bfloat16",)}


SERVER = dedent(
    """
    import json, os, sys, time
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("die"):
            sys.exit("I was told to")
        time.sleep(request.get("sleep", 0.0))
        print(json.dumps({"process": os.getpid(), "last": "last" in request}), flush=True)
    """
)
"""A process that answers as ``trial`` does."""


def test_a_process_answers_until_it_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "COMMAND", (sys.executable, "-c", SERVER))
    with Trials() as asked:
        assert asked.ask({}) == asked.ask({})
        first = asked.ask({})["process"]
        assert asked.ask({"sleep": 60.0}, 0.2) == {"error": "no answer within 0 s"}
        second = asked.ask({}, 60.0)["process"]
        assert asked.ask({"die": True}) == {"error": "I was told to"}
        third = asked.ask({"last": True})["process"]
        fourth = asked.ask({})["process"]
        os.kill(fourth, signal.SIGKILL)  # as a user may, between two mutants
        os.waitid(os.P_PID, fourth, os.WEXITED | os.WNOWAIT)
        assert len({first, second, third, fourth, asked.ask({})["process"]}) == 5


def test_a_kernel_that_a_trial_has_loaded_is_loaded_in_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "judge", lambda _: {"judged": 1})
    assert trial.answer_to({"files": [__file__]}) == {"judged": 1, "last": True}
    assert trial.answer_to({"files": ["kernels.py"]}) == {"judged": 1, "last": False}


class Unanswered(Judge):
    """A judge without processes that has an answer on each mutant but those of one line."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.ended, self.seed, self.tests, self.laws = kernels, "", 0, "", ()

    def clean(self, stage: str) -> Clean:
        assert stage == "gate"
        return Clean({"kernels.py": [7, 11]})

    def judge(
        self, mutants: Sequence[Mutant], stage: str, clean: Clean, tell: Callable[[str], None]
    ) -> dict[str, Answer]:
        tell(stage)
        assert clean.lines
        became = {each.id: "error" if each.line == 7 else "killed" for each in mutants}
        seconds = iter((3.0, 1.0, 2.0))
        return {
            name: Answer(name, stage, status, seconds=next(seconds) if status == "killed" else 90.0)
            for name, status in became.items()
        }


def test_what_has_no_answer_is_counted(plain: Kernels, capsys: pytest.CaptureFixture[str]) -> None:
    text = "@jit\ndef one(x):\n    y = 1\n    if y:\n        y = 1\n    else:\n        y += x\n"
    text += "\n@jit\ndef two(x):\n    return x + y\n"
    Path("kernels.py").write_text(text)
    measured = measure(Unanswered(plain), "gate", None, lambda _: None, {})
    assert {each.line for each, _ in measured.judged} >= {11}
    assert 7 not in {each.line for each, _ in measured.judged}
    assert measured.errors == measured.to_json()["errors"] > 0
    print_report(Console(), measured)
    printed = capsys.readouterr().out
    assert f"without an answer: {measured.errors}" in printed
    assert "median time to the first finding 2.0 s" in " ".join(printed.split())
    assert measured.to_json()["median_seconds_to_first_finding"] == 2.0
    assert {row["seconds"] for row in measured.to_json()["mutants"]} == {1.0, 2.0, 3.0}
