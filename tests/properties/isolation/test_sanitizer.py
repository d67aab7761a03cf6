"""Workers under compute-sanitizer: a script stands for it here, which logs what the kernel says."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.properties.findings.cases import CaseWriter
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.isolation import sanitizer
from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.isolation.workers import Deadlines, WorkerPool
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import Profile
from kernelproof.properties.verdicts.verdict import PASS
from kernelproof.properties.worker.requests import verdict_of

SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"
HANDLERS = Path(__file__).parents[1] / "isolation_handlers.py"
TINY = Profile("tiny", problems=40, max_work=20_000, shrink_seconds=3.0, seconds=60.0)
SCRIPT = """\
#!{python}
import os, subprocess, sys
options = sys.argv[1:]
path = options[options.index("--log-file") + 1]
tool = options[options.index("--tool") + 1]
command = options[options.index("--log-file") + 2:]
with open(path, "a") as log:
    log.write("========= COMPUTE-SANITIZER\\n")
environment = dict(os.environ, KERNELPROOF_TEST_LOG=path, KERNELPROOF_TEST_TOOL=tool)
ended = subprocess.run(command, env=environment, close_fds=False)
sys.exit(ended.returncode if ended.returncode >= 0 else 128 - ended.returncode)
"""
LOG = """\
========= COMPUTE-SANITIZER
========= Program hit nothing, said in passing
=========     at launch() in torch.so
=========
========= Invalid __global__ write of size 4 bytes
=========     at fill(float *, int)+0x40
=========     by thread (32,0,0) in block (0,0,0)
=========     Address 0x7f0000000400 is out of bounds
=========
========= Warning: something small
=========     that is no error
========= ERROR SUMMARY: 2 errors
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / sanitizer.PROGRAM
    script.write_text(SCRIPT.format(python=sys.executable), encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return script


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("kernelproof.properties.isolation.sanitizer.PLACES", (str(tmp_path),))


def test_errors_are_told_from_headers_warnings_and_sums() -> None:
    first, second = sanitizer.errors(LOG)
    assert first.startswith("Program hit nothing")
    assert second.splitlines()[:2] == [
        "Invalid __global__ write of size 4 bytes",
        "     at fill(float *, int)+0x40",
    ]
    assert sanitizer.errors("") == []
    assert (
        sanitizer.errors("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []
    )


def test_an_error_is_a_crash_whatever_the_law_says() -> None:
    done = Outcome("done", PASS.to_json(), log=LOG)
    said = verdict_of(done, "memcheck")
    assert (said.status, said.kind) == ("CRASH", "memcheck")
    assert said.message.startswith("compute-sanitizer --tool memcheck: Program hit nothing")
    assert said.message.endswith("(and 1 more)")
    assert verdict_of(done).status == "PASS"
    assert verdict_of(Outcome("done", PASS.to_json(), log=""), "memcheck").status == "PASS"


@pytest.mark.usefixtures("installed")
def test_what_the_sanitizer_reports_is_found_shrunk_and_replayed(tmp_path: Path) -> None:
    names = [f"{SUBJECTS}:{name}" for name in ("races", "honest_attention")]
    plan = Plan(names, TINY, laws=["parity"], sanitizer="racecheck", jobs=2)
    report = Run(plan).execute()
    races, honest = report.implementations
    assert honest.findings == []
    assert honest.judged
    (finding,) = races.findings
    assert (finding.verdict.status, finding.verdict.kind) == ("CRASH", "racecheck")
    assert "Race reported between Write access at races()+0x10" in finding.verdict.message
    assert finding.problem.causal  # type: ignore[union-attr]
    assert finding.problem.seq_lens == (1,)  # type: ignore[union-attr]

    CaseWriter(tmp_path, None, Ledger()).write(finding, races, report)
    _, _, path = shlex.split(finding.replay)
    assert json.loads(Path(path).read_text(encoding="utf-8"))["sanitizer"] == "racecheck"
    ended = subprocess.run(
        [sys.executable, "-m", "kernelproof", "replay", path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("CRASH racecheck  ")


@pytest.mark.usefixtures("installed")
def test_a_hang_under_it_gives_its_stack_and_both_processes_end() -> None:
    handler = f"{HANDLERS.stem}:misbehave"
    with (
        WorkerPool(
            handler,
            preload=(),
            sys_path=[str(HANDLERS.parent), *sys.path],
            under=sanitizer.command("memcheck"),
            standby=False,
        ) as pool,
        pool.lease() as worker,
    ):
        hung = worker.run({"do": "sleep"}, Deadlines(run=0.5))
        assert hung.status == "hang"
        assert "do_sleep" in hung.stack
        assert worker.run({"do": "environment"}).status == "done"


@pytest.mark.usefixtures("absent")
def test_where_it_is_absent_that_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "triton-metadata", "--device", "cuda", "--sanitizer", "memcheck"])
    assert code == 2
    said = capsys.readouterr().err
    assert "--sanitizer memcheck: compute-sanitizer is not installed" in said
    assert "cuda-sanitizer" in said


@pytest.mark.usefixtures("installed")
def test_it_is_refused_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "triton-metadata", "--sanitizer", "memcheck"]) == 2
    assert "it needs --device cuda" in capsys.readouterr().err
