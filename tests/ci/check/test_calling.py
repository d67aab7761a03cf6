"""``kernelproof.check``: the command's run and report, for tests, scripts and notebooks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

import kernelproof
from kernelproof.ci.cli import main
from kernelproof.properties.findings.report import Finding
from kernelproof.reference import MergeProblem, materialise

if TYPE_CHECKING:
    from collections.abc import Sequence

MERGE = dedent(
    """
    import torch
    LOW = -torch.inf
    def total(lses): return torch.logsumexp(lses, dim=0)
    def merge(inputs):
        lse = total(inputs.lses)
        weights = torch.exp(inputs.lses - torch.where(lse == LOW, LOW, lse)).unsqueeze(-1)
        return (weights * inputs.outs).sum(dim=0).to(inputs.out_dtype), lse
    """
)
"""A merge of states that is wrong where all of them are empty."""
FOUND = "FAIL nan  {}  parity\n  out[0, 0, 0] is NaN, expected 0 (4 of 4 are)\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_merges.py").write_text(MERGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=280, check=False
    )


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "0", text).strip()


def test_a_function_of_a_module_is_checked_as_by_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook has it
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    import my_merges  # type: ignore[import-not-found]

    report = kernelproof.check(my_merges.merge, "merge_state", laws="parity")
    assert (report.verdict, report.exit_code) == ("nonconforming", 1)
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.delenv("COLUMNS")
    words = ["my_merges:merge", "--operation", "merge_state", "--profile", "quick"]
    assert main(["check", *words, "--law", "parity", "--json", "shell.json"]) == 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert without_numbers(str(report)) == without_numbers(capsys.readouterr().out)
    shell = json.loads(Path("shell.json").read_text())
    assert shell.keys() == report.to_json().keys()
    (finding,) = report.findings
    assert isinstance(finding, Finding)
    assert (finding.law, finding.verdict.kind) == ("parity", "nan")
    assert finding.problem == MergeProblem(head_dim=4, empty="some")
    assert my_merges.merge(materialise(finding.problem))[0].isnan().any()
    with pytest.raises(AssertionError, match="NOT CONFORMING: 1 new finding") as raised:
        report.raise_for_findings()
    assert FOUND.format("my_merges:merge") in str(raised.value)
    assert f"  replay:  {finding.replay}" in str(raised.value)
    assert "coverage:" not in str(raised.value)
    page = report._repr_html_()
    assert "<strong>✗ NOT CONFORMING</strong>: 1 new finding" in page
    assert "out[0, 0, 0] is NaN" in page
    assert "<script" not in page
    assert repr(report).startswith("<kernelproof.Report NOT CONFORMING: 1 new finding")


def test_a_script_is_not_run_again(tmp_path: Path) -> None:
    end = """
    import kernelproof
    print("begun", flush=True)
    report = kernelproof.check(
        merge, "merge_state", laws=("parity",), supports=lambda p, t: p.head_dim < 64
    )
    print(report)
    report.raise_for_findings()
    """
    (tmp_path / "script.py").write_text(MERGE + dedent(end))
    ended = python("script.py")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count("begun") == 1
    assert FOUND.format("merge") in ended.stdout
    assert "FindingsError: NOT CONFORMING" in ended.stderr
    replay = re.search(r"replay: +kernelproof (replay .*)", ended.stdout)
    assert replay is not None
    assert main(replay[1].split()) == 1


def test_drawing_processes_do_not_run_the_script_again(tmp_path: Path) -> None:
    code = """
    from kernelproof.properties.space.axes import Axes, all_axes
    from kernelproof.properties.space.drawers import Drawers
    from kernelproof.properties.space.profiles import PROFILES
    print("begun", flush=True)
    drawers = Drawers(1)
    axes = Axes("merge_state", all_axes("merge_state"), 1000)
    print(len(drawers.problems(axes, PROFILES["quick"], 0, 5)), drawers.apart)
    print(drawers._pool is not None)
    drawers.close()
    """
    (tmp_path / "script.py").write_text(dedent(code))
    ended = python("script.py")
    assert ended.stdout.split() == ["begun", "5", "True", "True"], ended.stderr


def test_a_named_implementation_conforms() -> None:
    report = kernelproof.check("torch-slice-context-parallel", laws=["context_parallel_parity"])
    assert (report.verdict, report.exit_code, report.findings) == ("conforming", 0, ())
    report.raise_for_findings()


def test_what_was_not_judged_is_no_pass() -> None:
    def mine(inputs: object) -> None: ...

    report = kernelproof.check(mine, "merge_state", laws="parity", supports=lambda _, __: "no")
    assert (report.verdict, report.exit_code) == ("error", 3)
    with pytest.raises(AssertionError, match="no problem at all was judged of mine"):
        report.raise_for_findings()


def test_a_module_that_checks_itself_is_told_where_to_call(tmp_path: Path) -> None:
    call = "import kernelproof\nreport = kernelproof.check(merge, 'merge_state')\n"
    (tmp_path / "itself.py").write_text(MERGE + call)
    ended = python("-c", "import itself; print(itself.report)")
    assert "kernelproof.check is called by a module that a worker of it imports" in ended.stdout
    assert "__main__" in ended.stdout


@pytest.mark.parametrize(
    ("words", "given", "error", "message"),
    [
        (["mine", "merge"], {}, ValueError, "operation is 'merge'; did you mean merge_state?"),
        (["mine", "moe", "fast"], {}, ValueError, "profile is 'fast'; it must be one of quick,"),
        (["mine"], {"device": "gpu"}, ValueError, "device is 'gpu'; .*it must be one of cpu, cuda"),
        (["mine"], {"laws": "party"}, ValueError, "laws: .*did you mean parity"),
        (["mine"], {"laws": ["parity", 3]}, ValueError, "laws: there is no law '3'"),
        (
            ["mine", "merge_state"],
            {"laws": "sensitivity"},
            ValueError,
            "sensitivity does not speak",
        ),
        (["made"], {"laws": "sensitivity"}, ValueError, "does not speak of merge_state"),
        (["mine"], {"allow_incomplete": "no"}, ValueError, "allow_incomplete is 'no'; it must"),
        (["mine"], {"minutes": "1"}, ValueError, "minutes is '1'; it must be above 0"),
        (["mine", "moe", ["quick"]], {}, ValueError, "profile is .'quick'.; did you mean quick?"),
        (["mine"], {"seed": -1}, ValueError, "seed is -1; it must be a number from 0 on"),
        (["mine"], {"minutes": 0}, ValueError, "minutes is 0; it must be above 0"),
        (["mine"], {"suports": 1}, TypeError, "no option 'suports'; did you mean supports?"),
        (["mine"], {"features": ["mal"]}, ValueError, r"features names \['mal'\]"),
        (["mine"], {"supports": 3}, TypeError, "supports is 3; it must be callable"),
        (["made"], {"supports": None}, TypeError, "made is declared already: supports belongs"),
        (["made", "moe"], {}, ValueError, "operation is 'moe', and made implements merge_state"),
        (["torch-mo"], {}, ValueError, "torch-mo: no MODULE:NAME and no registered.*torch-moe"),
        ([3], {}, TypeError, "fn is 3; it must be a function, an implementation or a name"),
    ],
)
def test_wrong_words_are_named(
    words: Sequence[str], given: dict[str, object], error: type[Exception], message: str
) -> None:
    from kernelproof.impl import implementation

    def mine(inputs: object) -> None: ...

    made = implementation("merge_state", name="made")(mine)
    first = {"mine": mine, "made": made}.get(words[0], words[0])
    with pytest.raises(error, match=message):
        kernelproof.check(first, *words[1:], **given)  # type: ignore[arg-type]


SLOW = """
import glob, os, time
import kernelproof
def merge(inputs):
    open(f"worker-{os.getpid()}", "w").close()
    time.sleep(600)
try:
    kernelproof.check(merge, "merge_state", laws="parity")
except KeyboardInterrupt:
    print("interrupted", flush=True)
for _ in range(600):
    left = "".join(open(each).read() for each in glob.glob("/proc/self/task/*/children"))
    if not left:
        break
    time.sleep(0.1)
print(f"left: {left}")
print("goes on", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_the_run_and_leaves_no_worker(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    started = subprocess.Popen(
        [sys.executable, "slow.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(2400):
        if workers := [int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")]:
            break
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.1)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=120)
    assert out.split("\n") == ["interrupted", "left: ", "goes on", ""], err
    assert started.returncode == 0
    for each in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def test_what_is_missing_is_named_when_it_is_first_used(tmp_path: Path) -> None:
    code = """
    import sys
    import kernelproof
    assert {"torch", "click", "hypothesis", "importlib.metadata"}.isdisjoint(sys.modules)
    sys.modules["hypothesis"] = None
    for name in ("check", "strategies", "nothing"):
        try:
            getattr(kernelproof, name)
        except (AttributeError, ModuleNotFoundError) as error:
            print(error)
    """
    (tmp_path / "bare.py").write_text(dedent(code))
    ended = python("bare.py")
    lines = ended.stdout.splitlines()
    assert len(lines) == 3, ended.stderr
    for name, line in zip(("check", "strategies"), lines, strict=False):
        assert line.startswith(f"kernelproof.{name} needs the package hypothesis, which is not")
        assert "'.[suite]'" in line
    assert lines[2] == "module 'kernelproof' has no attribute 'nothing'"
