"""The commands, on small implementations of every temperament."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from kernelproof.ci.cli import main
from kernelproof.impl import BUILT_IN, Target
from kernelproof.impl.targets.registrations import Registration
from kernelproof.properties.findings.ledger import read_case
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.verdicts.text import defaults

ZOO = dedent(
    """
    import ctypes
    import subprocess
    import time
    from kernelproof.impl import implementation
    from kernelproof.reference import merge_states

    def oracle(inputs):
        out, lse = merge_states(inputs.outs.double(), inputs.lses.double())
        return out.to(inputs.out_dtype), lse.float()

    @implementation("merge_state", name="honest")
    def honest(inputs):
        return oracle(inputs)

    @implementation("merge_state", name="wrong")
    def wrong(inputs):
        out, lse = oracle(inputs)
        return (out if inputs.outs.shape[0] < 3 else out + 1.0), lse

    @implementation("merge_state", name="hanging")
    def hanging(inputs):
        ctypes.CDLL(None).puts(b"round")  # as a GPU's printf, by C's stdout
        print("and round", flush=False)
        while inputs.outs.shape[0] > 2:
            time.sleep(0.01)
        return oracle(inputs)

    @implementation("merge_state", name="raising")
    def raising(inputs):
        raise ValueError("<no> \\x1b[31mluck\\x00 today")

    @implementation("merge_state", name="choosy", supports=lambda problem, target: "not today")
    def choosy(inputs):
        return oracle(inputs)

    def plain(inputs):
        return oracle(inputs)

    @implementation("merge_state", name="sleeper")
    def sleeper(inputs):
        time.sleep(0.5)
        return oracle(inputs)

    @implementation(
        "merge_state", name="built", build_ahead=True, compile_key=lambda problem: "one"
    )
    def built(inputs):
        return oracle(inputs)

    @implementation(
        "merge_state", name="building", build_ahead=True, compile_key=lambda problem: "one"
    )
    def building(inputs):
        subprocess.run(["sleep", "600"])  # the compiler
    """
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my zoo")
    (folder / "zoo.py").write_text(ZOO)
    (folder / "torn.py").write_text("raise RuntimeError('torn in half')\nkernel = None\n")
    return folder


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def kernelproof(
    zoo: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(zoo)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def command(*words: str) -> Ended:
        capfd.readouterr()
        code = main(words)
        return Ended(code, *capfd.readouterr())

    return command


QUICK = ("--profile", "quick", "--law", "well_formed", "--law", "parity", "--jobs", "2")


def test_several_at_once(kernelproof: Command) -> None:
    names = [f"zoo:{name}" for name in ("honest", "wrong", "raising", "choosy", "plain")]
    files = ["--json", "o/a.json", "--junit", "o/a.xml", "--html", "o/a.html"]
    ended = kernelproof("check", *names, "--operation", "merge_state", *QUICK, *files)
    assert ended.code == 1
    data = json.loads(Path("o/a.json").read_text())
    assert data["verdict"] == "nonconforming"
    assert data["command"] == shlex.join(
        ["kernelproof", "check", *names, "--operation", "merge_state", *QUICK, *files]
    )
    states = {each["name"]: each["status"] for each in data["implementations"]}
    assert states == {
        "honest": "PASS",
        "wrong": "FINDINGS",
        "raising": "FINDINGS",
        "choosy": "UNSUPPORTED",
        "zoo:plain": "PASS",
    }
    found = {(each["implementation"], each["law"]): each for each in data["findings"]}
    assert set(found) == {
        ("wrong", "parity"),
        ("raising", "parity"),
    }
    assert found["raising", "parity"]["laws"] == ["parity", "well_formed"]
    wrong = found["wrong", "parity"]
    assert (wrong["status"], wrong["kind"]) == ("FAIL", "numeric")
    assert wrong["problem"]["num_states"] == 3
    assert wrong["problem"]["num_tokens"] == 1
    assert found["raising", "parity"]["status"] == "CRASH"
    assert "zoo.py" in found["raising", "parity"]["trace"]
    assert "not today" in ended.out
    assert wrong["replay"] in ended.out.replace("\n\n", "\n")
    assert wrong["replay"] in ended.err
    root = ET.parse("o/a.xml").getroot()  # noqa: S314
    assert root.get("failures") == "3"
    assert "not today" in Path("o/a.html").read_text()

    words = shlex.split(wrong["replay"])
    assert words[0] == "kernelproof"
    again = kernelproof(*words[1:])
    assert again.code == 1
    assert again.out.startswith("FAIL numeric  zoo:wrong  parity\n")
    assert "still fails" in again.out
    crash = shlex.split(found["raising", "parity"]["replay"])
    assert kernelproof(*crash[1:]).code == 1
    # The same problem is no problem to an honest implementation.
    fixed = kernelproof(*words[1:], "--implementation", "zoo:honest")
    assert fixed.code == 0
    assert "passes" in fixed.out


def test_a_conforming_one(kernelproof: Command) -> None:
    ended = kernelproof("check", "zoo.py:honest", *QUICK, "--expectations", "none")
    assert ended.code == 0
    first, *rest = ended.out.splitlines()
    assert first.startswith("CONFORMING: no new finding")
    assert "passed: 2 of 2 laws of honest" in rest
    assert "to be judged: 1 implementation under 2 laws" in ended.err


def test_a_hang_is_found_and_replayed(
    kernelproof: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelproof.properties.search.deadlines.DEADLINE_FLOOR", 1.5)
    ended = kernelproof(
        "check", "zoo:hanging", *QUICK[:4], "--json", "hang.json", "--cases", "my cases"
    )
    assert ended.code == 1
    (finding,) = json.loads(Path("hang.json").read_text())["findings"]
    assert finding["status"] == "HANG"
    assert "hanging" in finding["trace"]
    assert " s, in stage run); stuck in hanging (zoo.py:" in finding["message"]
    assert finding["printed"] == "round\nand round\n"
    words = shlex.split(finding["replay"])
    assert words[2].startswith("my cases/hanging-well_formed-")
    law, problem, data = read_case(Path(words[2]))
    assert (law, problem.to_json()) == ("well_formed", finding["problem"])
    assert (data["implementation"], data["schema"]) == ("zoo:hanging", "kernelproof/case/1")
    again = kernelproof(*words[1:], "--deadline", "0.5", "--save", "kept", "--script", "stuck.py")
    assert again.code == 1
    assert again.out.startswith("HANG run  zoo:hanging")
    assert "(0.5 s, in stage run); stuck in hanging (zoo.py:" in again.out
    assert "printed: round\n  printed: and round\n" in again.out
    assert f"default: {defaults(problem)}" in again.out
    # What the call was given was on disk before it began.
    suffix = "pt" if find_spec("safetensors") is None else "safetensors"
    saved = {*(f"{name}.{suffix}" for name in ("inputs", "oracle", "bound")), "index.json"}
    assert {each.name for each in Path("kept").iterdir()} == saved
    assert "HANG run of zoo:hanging" in Path("stuck.py").read_text()


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a kernel that runs in this process needs of it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("own_process")
def test_a_case_is_replayed_in_the_commands_own_process(kernelproof: Command) -> None:
    Path("here.py").write_text(
        "import os\n"
        "def merge(inputs):\n"
        "    print('in', os.getpid())\n"
        "    return inputs.outs[0], inputs.lses[0]\n"
    )
    problem = {"schema": "kernelproof/problem/1", "type": "merge"}
    case: dict[str, Any] = {"law": "parity", "implementation": "here:merge", "problem": problem,
            "operation": "merge_state"}  # fmt: skip
    Path("case.json").write_text(json.dumps(case))
    ended = kernelproof("replay", "case.json", "--in-process", "--script", "again.py")
    assert ended.code == 1
    assert ended.out.startswith("in this process: no deadline is watched")
    assert f"\nin {os.getpid()}\n" in ended.out
    assert "script: again.py" in ended.out
    ended = kernelproof("replay", "case.json", "--in-process", "--implementation", "here:lion")
    assert ended.code == 2
    assert "has no 'lion'" in ended.err
    ended = kernelproof("replay", "case.json", "--in-process", "--release", "0.6.13")
    assert ended.code == 2
    assert "--in-process does not go with --release" in ended.err
    assert "--distrust" not in ended.err
    # What a script cannot show is said, and not written.
    case |= {"law": "well_formed", "distrust": True}
    Path("case.json").write_text(json.dumps(case))
    ended = kernelproof("replay", "case.json", "--in-process", "--script", "fine.py")
    assert ended.code == 2
    assert "case.json asks for another process to judge (--distrust): this one is " in ended.err
    assert "--script fine.py: the case does not fail" in ended.err
    assert not Path("fine.py").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the case would run")
@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("device", [{"device": "cuda"}, {}])
def test_a_case_of_a_gpu_says_that_it_needs_one(
    kernelproof: Command, device: dict[str, str]
) -> None:
    Path("gpu.py").write_text(
        "from kernelproof.impl import implementation\n"
        "from kernelproof.impl.targets.refusal import Refusal\n"
        "refuse = lambda problem, target: Refusal('no CPU', 'device')\n"
        "@implementation('merge_state', name='gpu', supports=refuse)\n"
        "def gpu(inputs): ...\n"
    )
    problem = {"schema": "kernelproof/problem/1", "type": "merge"}
    case = {"law": "parity", "implementation": "gpu:gpu", "problem": problem, **device}
    Path("gpu.json").write_text(json.dumps(case))
    ended = kernelproof("replay", "gpu.json", "--in-process")
    assert ended.code == 3
    assert "gpu.json needs a GPU, and torch sees no CUDA device on this machine" in ended.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the case would run")
def test_the_ledger_knows_the_device_of_a_shipped_case(kernelproof: Command) -> None:
    ended = kernelproof("replay", "flashinfer-decode-empty-request.json")
    assert ended.code == 3
    assert "torch sees no CUDA device on this machine" in ended.err


def test_a_case_keeps_the_rules_that_were_left_out(kernelproof: Command) -> None:
    Path("refused.py").write_text(
        "from kernelproof.impl import implementation\n"
        "@implementation('merge_state', name='refused', backend='cuda')\n"
        "def refused(inputs):\n"
        "    return inputs.outs[0] + 1, inputs.lses[0]\n"
    )
    words = ("check", "refused:refused", *QUICK, "--expectations", "none")
    assert kernelproof(*words).code == 3  # no CPU runs what calls itself FlashInfer's CUDA merge
    left_out = ("--without-rule", "merge-state", "--without-rule", "*")
    assert kernelproof(*words, *left_out, "--json", "r.json").code == 1
    replay = json.loads(Path("r.json").read_text())["findings"][0]["replay"]
    case = Path(shlex.split(replay)[2])
    data = json.loads(case.read_text())
    assert data["without_rules"] == ["merge-state", "*"]
    assert kernelproof(*shlex.split(replay)[1:]).code == 1
    # A case of before has no such field: every rule is asked.
    del data["without_rules"]
    case.write_text(json.dumps(data))
    ended = kernelproof("replay", str(case))
    assert ended.code == 3
    assert "UNSUPPORTED" in ended.out
    case.write_text(json.dumps({**data, "without_rules": "*"}))
    ended = kernelproof("replay", str(case))
    assert ended.code == 2
    assert "Expected `array`, got `str` - at `$.without_rules`" in ended.err


def test_nothing_judged_is_not_conforming(kernelproof: Command) -> None:
    ended = kernelproof("check", "zoo:choosy", *QUICK, "--json", "none.json")
    assert ended.code == 3
    data = json.loads(Path("none.json").read_text())
    assert (data["verdict"], data["judged"]) == ("error", 0)
    assert "not today" in ended.out


def test_what_cannot_be_loaded(kernelproof: Command) -> None:
    ended = kernelproof("check", "nowhere:kernel", "zoo:plain", *QUICK)
    assert ended.code == 2
    assert "no module 'nowhere'" in ended.out
    ended = kernelproof("check", "zoo:honets", *QUICK)
    assert ended.code == 2
    assert "zoo:honets: module 'zoo' has no 'honets'; did you mean honest?" in ended.out
    names = ["torn:kernel", "zoo:plain"]
    ended = kernelproof("check", *names, *QUICK, "--json", "lost.json")
    assert ended.code == 2
    for told in ("torn in half", "name its --operation"):
        assert told in ended.out
    assert "Traceback" not in ended.err
    data = json.loads(Path("lost.json").read_text())
    assert data["verdict"] == "error"
    assert all(each["error"] for each in data["implementations"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["zoo"], "no MODULE:NAME"),
        (["zoo:honest", "--law", "murphy"], "--law: there is no law 'murphy'"),
        (["zoo:honest", "--without-rule", "nine"], "--without-rule nine: there is no such rule"),
        (["zoo:honest", "--only", "colour=red"], "--only: 'colour' is no field of a problem"),
        (["zoo:honest", "--only", "dtype=red"], "--only: dtype=red is no value of it; there are"),
        (["zoo:honest", "--costs", "absent.json"], "--costs absent.json: cannot be read"),
        (
            ["zoo:honest", "--costs", "a.json", "--device", "cuda", "--sanitizer", "memcheck"],
            "leave --sanitizer out",
        ),
        (["zoo:honest", "--costs", "zoo.py"], "--costs zoo.py: not JSON"),
        (["zoo:honest", "--modules", "0"], "Invalid value for '--modules'"),
        (["zoo:honest", "--operation", "origami"], "--operation 'origami': there are paged_"),
        (["zoo:honest", "--operation", "merge"], "'merge': did you mean merge_state? there are"),
        (["zoo:honest", "--without-rule", "fa2-sink"], "no such rule; did you mean fa2-sinks-"),
        (["zoo:honest", "--profile", "lazy"], "'--profile'"),
        (["zoo:honest", "--profile", "quik"], "'nightly'; did you mean quick?"),
        (["zoo:honest", "--expectations", "absent.toml"], "--expectations: absent.toml"),
        (["zoo:honest", "--expectations", "torn.toml"], "torn.toml: not TOML"),
        (
            ["zoo:honest", "--expectations", "bare.toml"],
            "bare.toml: Object missing required field `id`",
        ),
        (["zoo:honest", "--expectations", "lost.toml"], "absent.json: cannot be read"),
        (
            ["zoo:honest", "--expectations", "odd.toml"],
            "'i': Invalid value 'num_sates' - at `key` in `$.finding[0].where`; did you mean",
        ),
        (["zoo:honest", "--expectations", "zoo.py"], "zoo.py: not TOML"),
        (
            ["zoo:honest", "--expectations", "one.toml"],
            "one.toml: Expected `object`, got `int` - at",
        ),
        (
            ["zoo:honest", "--json", "zoo.py/a.json"],
            "--json zoo.py/a.json: cannot be written (zoo.py: File exists)",
        ),
        ([], "MODULE:NAME"),
    ],
)
def test_wrong_usage(kernelproof: Command, words: list[str], told: str) -> None:
    entry = {
        "id": "i",
        "implementation": "honest",
        "laws": ["parity"],
        "status": "FAIL",
        "reason": "r",
        "case": "absent.json",
    }
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in entry.items())
    Path("torn.toml").write_text("[[finding\n")
    Path("bare.toml").write_text("[[finding]]\n")
    Path("lost.toml").write_text(f"[[finding]]\n{lines}where = {{}}\n")
    Path("odd.toml").write_text(
        f"[[finding]]\n{lines}where = {{ num_sates = 2 }}\n".replace("absent", "present")
    )
    Path("one.toml").write_text("finding = [1]\n")
    problem = {"schema": "kernelproof/problem/1", "type": "merge"}
    case = {"law": "parity", "implementation": "honest", "problem": problem}
    Path("present.json").write_text(json.dumps(case))
    if "torn.toml" in words:
        words = [*words, "--json", "usage.json"]
    ended = kernelproof("check", *words)
    assert ended.code == 2
    assert told in ended.err
    assert "Traceback" not in ended.err
    if "torn.toml" in words:
        assert json.loads(Path("usage.json").read_text())["verdict"] == "error"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (None, "not JSON"),
        ({"law": None}, "Expected `str`, got `null` - at `$.law`"),
        ({"law": "murphy"}, "there is no law 'murphy'"),
        ({"law": "metadata_parity"}, "does not speak of merge_state"),
        ({"problem": {"dtype": "float7"}}, "dtype is 'float7'"),
        ({"problem": {"num_sates": 3}}, "num_sates is 3; did you mean num_states? it must be abs"),
        ({"problem": {"dtype": "float23"}}, "'float23'; did you mean float32?"),
        ({"problem": {"type": "merg"}}, "type is 'merg'; did you mean merge?"),
        ({"device": "abacus"}, "Invalid value 'abacus' - at `$.device`; known: cpu, cuda"),
        ({"implementation": "lion"}, "no MODULE:NAME"),
        ({"implementation": "zoo:lion"}, "no 'lion'"),
    ],
)
def test_cases_that_cannot_be_read(
    kernelproof: Command, change: dict[str, Any] | None, told: str
) -> None:
    case: dict[str, Any] = {
        "law": "parity",
        "implementation": "zoo:honest",
        "problem": {"schema": "kernelproof/problem/1", "type": "merge"},
    }
    if change is not None:
        case["problem"] |= change.pop("problem", {})
    Path("case.json").write_text("{" if change is None else json.dumps(case | change))
    ended = kernelproof("replay", "case.json")
    assert ended.code == 2
    assert told in ended.err
    assert "case.json" in ended.err or change == {"implementation": "zoo:lion"}
    assert "Traceback" not in ended.err
    assert kernelproof("replay", "absent.json").code == 2


def test_a_problem_without_room(kernelproof: Command) -> None:
    problem = {"schema": "kernelproof/problem/1", "type": "moe", "hidden": 2**31 - 1,
               "num_experts": 32}  # fmt: skip
    case = {"law": "parity", "implementation": "torch-moe", "problem": problem}
    Path("case.json").write_text(json.dumps(case))
    ended = kernelproof("replay", "case.json")
    assert ended.code == 3
    assert "no room for the tensors of MoEProblem(hidden=2147483647" in ended.out
    assert "Traceback" not in ended.err


def test_a_device_that_is_not_there(kernelproof: Command) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("it is there")
    ended = kernelproof("check", "zoo:honest", "--device", "cuda", "--json", "gpu.json")
    assert ended.code == 3
    assert "no CUDA device" in ended.err
    assert json.loads(Path("gpu.json").read_text())["verdict"] == "error"


def test_known_findings_conform(kernelproof: Command) -> None:
    problem = {"schema": "kernelproof/problem/1", "type": "merge", "num_states": 3}
    case = {"law": "parity", "implementation": "wrong", "problem": problem}
    Path("known.json").write_text(json.dumps(case))
    ledger = dedent(
        """
        [[finding]]
        id = "one-too-many"
        implementation = "{}"
        laws = ["parity"]
        status = "FAIL"
        where = {{ num_states = {{ min = 3 }} }}
        reason = "adds one"
        case = "known.json"
        """
    )
    Path("ledger.toml").write_text(ledger.format("wrong"))
    words = [*QUICK[:2], "--law", "parity", "--expectations", "ledger.toml", "--json", "w.json"]
    ended = kernelproof("check", "zoo:wrong", *words)
    assert ended.code == 0
    assert re.search(r"^KNOWN one-too-many: \d+ problems: adds one$", ended.out, re.MULTILINE)
    (finding,) = json.loads(Path("w.json").read_text())["findings"]
    assert (finding["status"], finding["entry"]) == ("KNOWN", "one-too-many")
    assert finding["replay"] == "kernelproof replay known.json"
    # An entry whose case passes is loud, and its replay shows that it passes.
    Path("ledger.toml").write_text(ledger.format("honest"))
    ended = kernelproof("check", "zoo:honest", *words)
    assert ended.code == 1
    (finding,) = json.loads(Path("w.json").read_text())["findings"]
    assert (finding["kind"], finding["contradicts"]) == ("unexpected_pass", "one-too-many")
    replayed = kernelproof(*shlex.split(finding["replay"])[1:])
    assert replayed.code == 1
    assert "passes, but the ledger says that it fails" in replayed.out


def test_the_gate_judges_what_can_run(
    kernelproof: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kernelproof.impl.registry.registered",
        lambda: ["reference-metadata", "zoo:choosy", "zoo:honest"],
    )
    ended = kernelproof("gate", *QUICK)
    assert ended.code == 0
    assert "not today" in ended.out
    assert "none of the laws that were to run speaks of build_metadata" in ended.out


@pytest.fixture
def distributions(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install distributions of which one registers a kernel and the others fail to."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(zoo), *sys.path])
    monkeypatch.setattr("kernelproof.impl.registry.BUILT_IN", {})
    monkeypatch.setattr("kernelproof.properties.search.preparation.IMPORT_SECONDS", 3.0)
    (tmp_path / "registered_needing.py").write_text("import surely_not_there\n")
    (tmp_path / "registered_endless.py").write_text("while True: pass\n")
    (tmp_path / "registered_ending.py").write_text("import os; os.abort()\n")
    for name, points in {
        "fine": "fine = zoo:honest",
        "needing": "needing = registered_needing:kernel",
        "endless": "endless = registered_endless:kernel",
        "ending": "ending = registered_ending:kernel",
        "none": "none = zoo:plain",
        "second": "fine = zoo:wrong\nnew = zoo:honest",
    }.items():
        info = tmp_path / f"{name}_kernels-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}-kernels\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[kernelproof.implementations]\n{points}\n")


BROKEN = {
    "ending": "ending-kernels 0.1 registers 'ending': importing it ended the process: SIGABRT .*",
    "endless": r"endless-kernels 0.1 registers 'endless': importing it took longer than 3 s \(.*\)",
    "needing": "needing-kernels 0.1 registers 'needing': importing 'registered_needing' needs .*",
    "none": "none-kernels 0.1 registers 'none': it is function, not an implementation: .*",
    "fine": "second-kernels 0.1 registers 'fine': fine-kernels has an implementation of this name",
    "new": "second-kernels 0.1 registers 'new': it is named 'honest', as .* of fine-kernels",
}


@pytest.mark.usefixtures("distributions")
def test_the_gate_goes_on_without_registrations_that_are_broken(kernelproof: Command) -> None:
    ended = kernelproof("gate", *QUICK, "--json", "o/broken.json")
    assert ended.code == 0, ended.out + ended.err
    data = json.loads(Path("o/broken.json").read_text())
    assert [(each["name"], each["provider"]) for each in data["implementations"]] == [
        ("honest", "fine-kernels")
    ]
    assert [each["name"] for each in data["broken"]] == [*BROKEN]
    lines = [line for line in ended.out.splitlines() if line.startswith("left out: ")]
    for line, said in zip(lines, BROKEN.values(), strict=True):
        assert re.fullmatch(f"left out: {said}", line)


@pytest.mark.usefixtures("distributions")
def test_the_list_names_registrations_that_are_broken(kernelproof: Command) -> None:
    ended = kernelproof("list", "--json")
    assert ended.code == 0
    data = json.loads(ended.out)
    (found,) = data["implementations"]
    assert (found["name"], found["provider_version"]) == ("fine", "0.1")
    for each, said in zip(data["broken"], BROKEN.values(), strict=True):
        assert re.fullmatch(said, Registration(**each).text)
    assert "left out: needing-kernels 0.1 registers" in kernelproof("list").out


def test_a_part_of_the_space(kernelproof: Command) -> None:
    """The seeded fault needs three states: it is no part of problems of two."""
    for only, code in (("2", 0), ("2,3", 1)):
        ended = kernelproof("check", "zoo:wrong", *QUICK, "--only", f"num_states={only}")
        assert ended.code == code
    ended = kernelproof("check", "zoo:honest", *QUICK, "--only", "window_left=3")
    assert ended.code == 3
    assert "problems of merge_state have no window_left" in ended.out


def test_cost_classes_are_written_and_read(kernelproof: Command) -> None:
    """A class that is given decides: the word in the file shows which it was."""
    options = (*QUICK, "--cases", "of-costs")
    path = Path("of-costs", "costs", "quick-cpu.json")
    assert kernelproof("check", "zoo:honest", *options).code == 0
    data = json.loads(path.read_text())
    assert set(data["costs"]) == {"honest"}
    given = {"name": "given", "problems": 0.5, "max_work": 5000, "max_heads": 0}
    data["costs"]["honest"] = given
    path.write_text(json.dumps(data))
    ended = kernelproof("check", "zoo:honest", *options, "--costs", str(path), "--json", "a.json")
    assert ended.code == 0
    assert json.loads(path.read_text()) == data
    (found,) = json.loads(Path("a.json").read_text())["implementations"]
    assert found["cost"] == "given"
    ended = kernelproof("check", "zoo:honest", "--profile", "gate", "--costs", str(path))
    assert ended.code == 2
    assert "profile is 'quick', and this run's is 'gate'" in ended.err


def test_what_builds_took_is_written_and_decides_what_is_built(kernelproof: Command) -> None:
    options = (*QUICK[:4], "--jobs", "1", "--cases", "of-builds", "--minutes", "1")
    path = Path("of-builds", "costs", "builds.json")
    assert kernelproof("check", "zoo:built", *options).code == 0
    data = json.loads(path.read_text())
    (library,) = data["minutes"]
    assert 0 < data["minutes"][library] < 10
    path.write_text(json.dumps({**data, "minutes": {library: 1e6, "another's": 2.0}}))
    ended = kernelproof("check", "zoo:built", *options, "--no-reuse")
    assert ended.code == 3
    assert "building one of its modules takes about 1,000,000 minutes of a core" in ended.out


def test_the_gate_tries_the_support_table_too(
    kernelproof: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On what is registered here: the reference metadata, and a merge that no rule is about."""
    from kernelproof.impl import registry

    names = {name: BUILT_IN[name] for name in ("reference-metadata",)}
    monkeypatch.setattr(registry, "BUILT_IN", {**names, "honest": "zoo:honest"})
    files = ["--json", "o/gate.json", "--evidence", "o/kept.json"]
    words = ["--profile", "quick", "--jobs", "1", "--only", "head_dim=4"]  # of the laws alone
    ended = kernelproof("gate", "--gating", *words, *files)
    assert ended.code == 0, ended.out + ended.err
    for path in ("o/gate.json", "o/kept.json"):
        data = json.loads(Path(path).read_text())
        assert data["verdict"] == data["gating"]["verdict"] == "conforming"
        assert data["judged"] > 0
        outcomes = {each["implementation"]: each["outcome"] for each in data["gating"]["trials"]}
        assert outcomes == {"reference-metadata": "right"}
        reasons = {each["name"]: each["reason"] for each in data["gating"]["implementations"]}
        assert "names no backend" in reasons["honest"]
    assert "Supported by the rules" in ended.out


def test_the_support_table_has_no_second_process(kernelproof: Command) -> None:
    ended = kernelproof("gate", "--gating", "--distrust")
    assert ended.code == 2
    assert "--distrust does not go with --gating" in ended.err


def test_the_list(kernelproof: Command) -> None:
    ended = kernelproof("list", "--json")
    assert ended.code == 0
    listed = json.loads(ended.out)
    assert {each["name"] for each in listed["implementations"]} >= set(BUILT_IN)
    known = {each["name"]: each for each in listed["implementations"]}
    assert known["torch-sdpa-paged"]["available"] is True
    assert known["torch-sdpa-paged"]["operation"] == "paged_attention"
    assert known["torch-sdpa-paged"]["provider"] == "torch"
    assert known["torch-sdpa-paged"]["provider_version"] == Target.here().torch
    assert all(each["available"] or each["reason"] for each in known.values())
    assert all(each["statement"] for each in listed["laws"])
    assert [each["name"] for each in listed["profiles"]] == list(PROFILES)


def test_help_is_fast_for_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kernelproof.ci.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'hypothesis', 'rich', 'jinja2', 'pytest'}\n"
        "heavy |= {'kernelproof.reference', 'kernelproof.properties.laws'}\n"
        "heavy |= {'kernelproof.impl.protocol', 'kernelproof.impl.registry'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    for command in ("check", "gate", "replay", "list", "score"):
        assert command.encode() in ended.stdout
        assert main([command, "--help"]) == 0
    assert main(["--unknown"]) == 2
    assert main(["dance"]) == 2


def children(pid: int) -> list[int]:
    """Return the processes below one, as far as /proc tells."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            found += [child, *children(child)]
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "code", "ended"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_run_that_a_signal_ends_tells_what_it_knows(
    number: signal.Signals, code: int, ended: str, zoo: Path
) -> None:
    words = ["check", "zoo:building", "zoo:raising", "zoo:sleeper", "--profile", "gate"]
    words += ["--law", "parity", "--law", "well_formed"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelproof", *words, "--jobs", "1", "--json", "stopped.json",
         "--junit", "stopped.xml", "--html", "stopped.html"],
        cwd=zoo,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "kernelproof replay" in line:
            break
    assert wait_for(lambda: any(program(pid) == b"sleep" for pid in children(process.pid)))
    workers = children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert f"{ended}, this is what was learned until then" in out
    assert "out of time" not in out
    data = json.loads((zoo / "stopped.json").read_text())
    assert (data["interrupted"], data["ended"]) == (True, ended)
    assert data["findings"][0]["implementation"] == "raising"
    laws = {each["name"]: each["laws"] for each in data["implementations"]}
    # Laws that have not begun are named: nothing is known of them.
    assert [law["law"] for law in laws["building"]] == ["parity", "well_formed"]
    assert all(law["ended"] == "stopped" and not law["judged"] for law in laws["building"])
    assert "<failure" in (zoo / "stopped.xml").read_text()
    assert "raising" in (zoo / "stopped.html").read_text()
    assert wait_for(lambda: not any(alive(pid) for pid in workers))


def test_a_run_ends_at_its_first_finding(zoo: Path, kernelproof: Command) -> None:
    words = ("zoo:wrong", "zoo:sleeper", "--profile", "gate", "-x", "--jobs", "1")
    ended = kernelproof("check", *words, "--json", "first.json")
    assert ended.code == 1
    assert "not judged, as the run ended at its first finding" in ended.out
    # Shown at once, before it is made smaller.
    assert ended.err.index("now it is made smaller") < ended.err.index("kernelproof replay")
    data = json.loads((zoo / "first.json").read_text())
    assert (data["verdict"], data["ended"]) == ("nonconforming", "found")
    assert len(data["findings"]) == 1
    assert 0 < data["milestones"]["judged"] <= data["milestones"]["failing"] < data["seconds"]


def test_a_known_finding_does_not_end_a_run(zoo: Path, kernelproof: Command) -> None:
    (zoo / "known.toml").write_text(
        '[[finding]]\nid = "known"\nimplementation = "wrong"\nstatus = "FAIL"\n'
        'where = {}\nreason = "a test"\nquarantine = true\n'
    )
    kernelproof(
        "check", "zoo:wrong", *QUICK, "-x", "--expectations", "known.toml", "--json", "k.json"
    )
    assert json.loads((zoo / "k.json").read_text())["ended"] == ""


def test_a_run_ends_with_its_time(zoo: Path, kernelproof: Command) -> None:
    words = ("zoo:sleeper", "--profile", "gate", "--minutes", "0.01", "--jobs", "1")
    ended = kernelproof("check", *words, "--json", "late.json")
    data = json.loads((zoo / "late.json").read_text())
    assert data["ended"] == "time"
    assert data["interrupted"] is False
    assert all(law["ended"] for each in data["implementations"] for law in each["laws"])
    assert "the run ended before its first law did" in ended.out


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def program(pid: int) -> bytes:
    """Return the first word of a process's command."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_begin_to_import_before_the_command_imports_what_is_heavy() -> None:
    code = dedent(
        """
        import sys
        from kernelproof.ci.cli import main
        from kernelproof.properties.isolation import process

        def begun(*_, **__):
            sys.exit(f"imported: {sorted(HEAVY & {*sys.modules})}")

        HEAVY = {"torch", "numpy", "hypothesis", "rich", "kernelproof.ci.check.checking"}
        process.ForkServer = begun
        main(["check", "torch-map-slots"])
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert ended.stderr.strip() == "imported: []"
