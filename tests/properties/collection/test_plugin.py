"""The suite as a pytest plugin, run as a user runs it: in a folder with a kernel in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from kernelproof.properties import plugin
from kernelproof.properties.collection.surveying import (
    Configuration,
    Survey,
    Surveyed,
    configurations,
    items_of,
)
from kernelproof.properties.collection.xdist_lock import SuiteRefusedError, shared
from kernelproof.properties.findings.text_format import trace_lines
from kernelproof.properties.isolation import gpus
from kernelproof.properties.laws import laws_of
from kernelproof.properties.search.plan import Plan, problems_of
from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.profiles import PROFILES, Cost
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import MergeProblem

if TYPE_CHECKING:
    from pathlib import Path

ZOO = dedent(
    """
    import os, subprocess
    from kernelproof.impl import implementation
    from kernelproof.reference import merge_states

    child = None

    def oracle(inputs):
        out, lse = merge_states(inputs.outs.double(), inputs.lses.double())
        return out.to(inputs.out_dtype), lse.float()

    def off_by_one(inputs):
        out, lse = oracle(inputs)
        return (out if inputs.outs.shape[0] < 3 else out + 1.0), lse

    @implementation("merge_state", name="honest")
    def honest(inputs):
        return oracle(inputs)

    @implementation("merge_state", name="wrong")
    def wrong(inputs):
        return off_by_one(inputs)

    @implementation("merge_state", name="known")
    def known(inputs):
        return off_by_one(inputs)

    @implementation("merge_state", name="dying")
    def dying(inputs):
        if inputs.outs.shape[0] > 2:
            os.abort()
        return oracle(inputs)

    @implementation("merge_state", name="choosy", supports=lambda problem, target: "needs SM 90")
    def choosy(inputs):
        return oracle(inputs)

    @implementation("merge_state", name="compiled", compile_key=lambda problem: problem.dtype)
    def compiled(inputs):
        global child
        child = child or subprocess.Popen(["sleep", "600"], start_new_session=True)
        return oracle(inputs)
    """
)
LEDGER = dedent(
    """
    [[finding]]
    id = "known-three"
    implementation = "known"
    laws = ["parity"]
    status = "FAIL"
    where = { num_states = { min = 3 } }
    reason = "Three states or more come out off by one."
    issue = "https://example.org/issues/7"
    case = "known-three.json"

    [[finding]]
    id = "honest-three"
    implementation = "honest"
    laws = ["parity"]
    status = "FAIL"
    where = { num_states = 3 }
    reason = "It was so once."
    case = "known-three.json"
    """
)
# As pytest-randomly might: the stored cases would come last.
REVERSE = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.reverse()
"""
# As the kernel of the machine may, for lack of memory: in the middle of the second item.
KILLED_AT_THE_SECOND = """
import os, signal

calls = []

def pytest_runtest_call(item):
    calls.append(item)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
SUITE = ["--pyargs", "kernelproof.properties", "--kernelproof-profile", "quick"]
NAMES = ("honest", "wrong", "known", "dying", "choosy", "compiled")
# All of choosy, so that nothing was judged of it; of the others what the tests below look at. To
# shrink a death takes a process for each step.
SELECTED = "choosy or corpus or (parity and not dying)"


@dataclass(frozen=True)
class Ended:
    """A pytest run that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Ran(Ended):
    """The run that most tests look at."""

    folder: Path
    cases: dict[str, ET.Element] = field(default_factory=dict)

    def properties(self, name: str) -> dict[str | None, str | None]:
        """Return the properties of an item."""
        return {each.get("name"): each.get("value") for each in self.cases[name].iter("property")}

    def section(self, name: str) -> list[str]:
        """Return what was printed of a failed item."""
        _, _, rest = self.out.partition(f" test_law[{name}] ")
        lines = rest.splitlines()[1:]
        ends = (i for i, line in enumerate(lines) if line.startswith(("_", "=", "-")))
        return lines[: next(ends)]


def run_pytest(folder: Path, *arguments: str) -> Ended:
    """Run pytest in a folder, unaffected by the run around it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COVERAGE_"))
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=kept, check=False, capture_output=True, text=True
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def project(folder: Path) -> Path:
    """Write a project with kernels, a ledger and a stored case."""
    folder.mkdir(exist_ok=True)
    (folder / "zoo.py").write_text(ZOO)
    (folder / "conftest.py").write_text(REVERSE)
    (folder / "ledger.toml").write_text(LEDGER)
    three = {"law": "parity", "problem": MergeProblem(num_states=3).to_json()}
    (folder / "known-three.json").write_text(json.dumps({**three, "implementation": "zoo:known"}))
    cases = folder / ".kernelproof" / "cases"
    cases.mkdir(parents=True)
    (cases / "wrong-parity-old.json").write_text(
        json.dumps({**three, "implementation": "zoo:wrong"})
    )
    fixed = {"law": "parity", "problem": MergeProblem().to_json(), "implementation": "zoo:wrong"}
    (cases / "wrong-parity-fixed.json").write_text(json.dumps(fixed))
    (cases / "dying-parity-here.json").write_text(
        json.dumps({**three, "implementation": "zoo:dying"})
    )
    (cases / "of-another.json").write_text(json.dumps({**three, "implementation": "elsewhere:it"}))
    return folder


def judge(folder: Path, *more: str) -> Ran:
    named = [word for name in NAMES for word in ("--impl", f"zoo:{name}")]
    ended = run_pytest(
        project(folder),
        *(*SUITE, *named, "-k", SELECTED, "--expectations", "ledger.toml", "--strict-markers"),
        # Both of these would end the run if the suite did not see to it.
        *("-W", "error", "--timeout", "1", "--junit-xml", "junit.xml", "-v", "-rsx", *more),
    )
    assert (folder / "junit.xml").exists(), ended.out + ended.err
    root = ET.parse(folder / "junit.xml").getroot()  # noqa: S314  just written
    cases = {
        str(case.get("name")).removeprefix("test_law[").removesuffix("]"): case
        for case in root.iter("testcase")
    }
    return Ran(ended.code, ended.out, ended.err, folder, cases)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return judge(tmp_path_factory.mktemp("plugin") / "serial")


def test_each_implementation_law_and_configuration_is_an_item(ran: Ran) -> None:
    laws = [law.name for law in laws_of("merge_state")]
    assert ran.code == 1
    assert {f"zoo:choosy-{law}" for law in laws} <= set(ran.cases)
    assert {name for name in ran.cases if "compiled-parity" in name} == {
        f"zoo:compiled-parity-{dtype}" for dtype in ("float32", "float16", "bfloat16")
    }


def test_stored_cases_come_first(ran: Ran) -> None:
    stored = ["corpus" in name for name in ran.cases]
    assert sum(stored) == 5
    assert stored == sorted(stored, reverse=True)
    assert not any("another" in name for name in ran.cases)


def test_a_failure_is_told_without_noise(ran: Ran) -> None:
    assert "Traceback" not in ran.out
    title, message, problem, replay = ran.section("zoo:wrong-parity")
    assert title == "FAIL numeric  wrong  parity"
    assert "expected" in message
    assert problem == "  problem: MergeProblem(num_states=3, head_dim=4)"
    _, _, command = replay.partition("replay:  ")
    assert command.startswith("kernelproof replay .kernelproof/cases/wrong-parity-")
    case = json.loads((ran.folder / command.split()[-1]).read_text())
    assert (case["law"], case["implementation"]) == ("parity", "zoo:wrong")


def test_a_death_is_told_with_the_frames_of_the_kernel(ran: Ran) -> None:
    lines = ran.section("zoo:dying-corpus-parity-here")
    assert lines[0] == "CRASH SIGABRT  dying  parity"
    assert any("zoo.py" in line and line.endswith("in dying") for line in lines)
    assert not any("tasks.py" in line for line in lines)
    assert len(lines) < 15


def test_a_stored_case_is_judged_again(ran: Ran) -> None:
    assert ran.cases["zoo:wrong-corpus-parity-fixed"].find("failure") is None
    assert ran.properties("zoo:wrong-corpus-parity-fixed")["judged"] == "1"
    lines = ran.section("zoo:wrong-corpus-parity-old")
    assert lines[-1] == "  replay:  kernelproof replay .kernelproof/cases/wrong-parity-old.json"


def test_what_the_ledger_explains_is_an_expected_failure(ran: Ran) -> None:
    for name in ("zoo:known-parity", "zoo:known-corpus-three"):
        skipped = ran.cases[name].find("skipped")
        assert skipped is not None
        assert skipped.get("type") == "pytest.xfail"
        assert ran.properties(name)["entry"] == "known-three"
    assert "KNOWN known-three: Three states or more come out off by one." in ran.out
    assert "https://example.org/issues/7" in ran.out


def test_a_known_failure_that_passes_is_a_failure(ran: Ran) -> None:
    (lines,) = [ran.section(name) for name in ran.cases if name.startswith("zoo:honest-corpus")]
    assert lines[0] == "FAIL unexpected_pass  honest  parity"
    assert "honest-three" in lines[1]


def test_a_skip_names_the_gate(ran: Ran) -> None:
    assert "choosy: needs SM 90" in str(ran.cases["zoo:choosy-parity"][-1].get("message"))


def test_nothing_judged_is_not_conforming(ran: Ran) -> None:
    assert "\nno problem at all was judged of zoo:choosy: choosy: needs SM 90" in ran.out
    assert "judged of zoo:honest" not in ran.out


def test_junit_has_the_counts(ran: Ran) -> None:
    told = ran.properties("zoo:wrong-parity")
    assert told["implementation"] == "zoo:wrong"
    assert (told["law"], told["status"]) == ("parity", "FAIL")
    assert int(told["judged"] or 0) > 0
    assert str(told["replay"]).startswith("kernelproof replay ")
    assert {"unsupported", "rejected", "known", "seconds", "worst_ratio", "problem"} <= set(told)


def test_the_summary_gives_each_finding_once(ran: Ran) -> None:
    _, _, summary = ran.out.partition("= kernelproof =")
    assert "FAIL  zoo:wrong  parity\n  kernelproof replay" in summary
    commands = [line for line in summary.splitlines() if line.startswith("  kernelproof replay")]
    assert len(commands) == len(set(commands)) == 4
    lines = summary.splitlines()[1:]
    assert lines[0].startswith("NOT CONFORMING: 4 findings, 2 known; ")
    assert lines.count("KNOWN  zoo:known  parity: known-three") == 2  # -v was given
    passed = next(number for number, line in enumerate(lines) if line.startswith("passed: "))
    assert "not run: zoo:choosy  parity: choosy: needs SM 90" in lines[passed + 1 :]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a child subreaper")
def test_what_was_left_behind_is_named(ran: Ran) -> None:
    assert "\nnote: compiled: it left a process, which was ended: sleep 600" in ran.out


def test_xdist_comes_to_the_same(ran: Ran, tmp_path: Path) -> None:
    spread = judge(tmp_path / "spread", "-n", "2")
    assert set(spread.cases) == set(ran.cases)
    for name in ran.cases:
        assert [each.tag for each in spread.cases[name]] == [each.tag for each in ran.cases[name]]
    found = [each.properties("zoo:wrong-parity")["problem"] for each in (ran, spread)]
    assert found[0] == found[1]
    assert "[gw0]" in spread.out
    assert "[gw1]" in spread.out
    assert "note: compiled: it left a process, which was ended: sleep 600" in spread.out
    assert spread.code == 1


def test_a_process_of_xdist_that_is_killed_loses_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(ZOO)
    (tmp_path / "killer.py").write_text(KILLED_AT_THE_SECOND)
    two = ["--impl", "zoo:wrong", "-k", "zoo:wrong-parity or zoo:wrong-well_formed"]
    one = ["-n", "1", "--max-worker-restart", "0", "-p", "killer"]
    ended = run_pytest(tmp_path, *SUITE, *two, *one)
    assert ended.code == pytest.ExitCode.TESTS_FAILED, ended.out + ended.err
    assert "FAIL  zoo:wrong  parity\n  kernelproof replay" in ended.out
    assert "1 finding, 0 known" in ended.out
    # Under CI=true pytest gives the whole sentence in its summary too.
    crashed = [line for line in ended.out.splitlines() if "crashed while running" in line]
    assert crashed
    assert all("test_law[zoo:wrong-well_formed]" in line for line in crashed), crashed


@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_an_absent_implementation_is_wrong_usage(tmp_path: Path, processes: list[str]) -> None:
    ended = run_pytest(tmp_path, *SUITE, "--impl", "no_such_module:kernel", *processes)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    said = ended.out + ended.err
    assert "--impl no_such_module:kernel: there is no module 'no_such_module'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "lazy"], "invalid choice: 'lazy'"),
        (["--impl", "zoo:x", "--expectations", "none.toml"], "--expectations: none.toml: cannot"),
        (["--impl", "zoo:x", "--only", "dtype=red"], "--only: dtype=red is no value of it"),
        (["--impl", "zoo:x", "--costs", "none.json"], "none.json: cannot be read"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = run_pytest(tmp_path, *SUITE, *arguments)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_a_part_of_the_space_and_given_costs(tmp_path: Path) -> None:
    """The seeded fault needs three states: it is no part of problems of two."""
    command = [*SUITE, "--impl", "zoo:wrong", "-k", "zoo:wrong-parity"]
    folder = project(tmp_path)
    ended = run_pytest(folder, *command, "--only", "num_states=2")
    assert "1 passed" in ended.out, ended.out + ended.err
    written = folder / ".kernelproof" / "cases" / "costs" / "quick-cpu.json"
    costs = json.loads(written.read_text())
    assert set(costs["costs"]) == {"wrong"}
    costs["costs"]["wrong"]["problems"] = 0.5
    (folder / "half.json").write_text(json.dumps(costs))
    more = ["--only", "num_states=2,4", "--costs", "half.json", "--junit-xml", "junit.xml"]
    ended = run_pytest(folder, *command, *more)
    assert "num_states=4" in ended.out, ended.out + ended.err
    kept = json.loads(written.read_text())
    assert kept["costs"]["wrong"]["problems"] == 0.5


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        dedent(
            """
            def pytest_addoption(parser):
                parser.addoption("--device", default="theirs")
                parser.addoption("--profile", action="store_true")
            """
        )
    )
    (tmp_path / "test_theirs.py").write_text(
        dedent(
            """
            import sys

            def test_options(pytestconfig):
                assert pytestconfig.getoption("device") == "this"
                assert pytestconfig.getoption("profile") is True
                assert pytestconfig.getoption("kernelproof_profile") == "quick"

            def test_nothing_heavy_is_loaded():
                assert {"torch", "triton", "hypothesis"}.isdisjoint(sys.modules)
            """
        )
    )
    options = ["--device", "this", "--profile", "--kernelproof-profile", "quick"]
    ended = run_pytest(tmp_path, *options, "-W", "error")
    assert ended.code == 0, ended.out + ended.err
    assert "kernelproof:" not in ended.out


def test_hypothesis_profiles(tmp_path: Path) -> None:
    """By name on the command line, but never over a project's own of the same name."""
    (tmp_path / "conftest.py").write_text(
        "import hypothesis\nhypothesis.settings.register_profile('nightly', max_examples=7)\n"
    )
    (tmp_path / "test_theirs.py").write_text(
        dedent(
            """
            import hypothesis

            def test_profiles():
                now = hypothesis.settings()
                assert (now.max_examples, now.derandomize, now.deadline) == (120, True, None)
                assert hypothesis.settings.get_profile("quick").max_examples == 20
                assert hypothesis.settings.get_profile("nightly").max_examples == 7
            """
        )
    )
    ended = run_pytest(tmp_path, "--hypothesis-profile", "gate")
    assert ended.code == 0, ended.out + ended.err


def test_each_process_gets_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "0, 3,GPU-5")
    assert gpus.visible_devices() == ["0", "3", "GPU-5"]
    assert gpus.share_of(4) == {gpus.VISIBLE: "3"}


@pytest.mark.parametrize(
    ("argument", "device", "devices", "cores", "processes"),
    [
        ("kernelproof.properties", "cuda", "0,1", 64, 28),
        ("kernelproof.properties", "cuda", "0,1", 6, 3),
        ("kernelproof.properties", "cuda", "", 6, None),
        ("kernelproof.properties", "cpu", "0,1", 64, None),
        ("tests", "cuda", "0,1", 64, None),
    ],
)
def test_auto_counts_gpus(
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    argument: str,
    device: str,
    devices: str,
    cores: int,
    processes: int | None,
) -> None:
    monkeypatch.setattr(pytestconfig.option, "kernelproof_device", device)
    monkeypatch.setattr(pytestconfig, "args", [argument])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(gpus, "free_memory", lambda _: [])
    monkeypatch.setattr(gpus, "free_host_memory", lambda: None)
    monkeypatch.setenv(gpus.VISIBLE, devices)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == processes


def smi(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("free", "host", "processes"),
    [
        ((141_000, 143_000), None, 28),  # as many as share a GPU well
        ((40_000, 143_000), None, 12),  # six at the fuller one, and as many at the other
        ((900, 900), None, 2),  # one each, however little is left
        ((141_000, 143_000), 13_000, 3),  # the machine has room for three
        ((141_000, 143_000), 1_000, 1),
    ],
)
def test_processes_are_as_many_as_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free: tuple[int, int],
    host: int | None,
    processes: int,
) -> None:
    lines = f"0, GPU-aa, {free[0]}\\n1, GPU-bb, {free[1]}\\n2, GPU-cc, 1\\n"
    smi(tmp_path, f"printf '{lines}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpus, "free_host_memory", lambda: host)
    assert gpus.free_memory(["1", "GPU-a", "MIG-x"]) == [free[1], free[0]]
    assert gpus.processes_for(["0", "GPU-bb"], 64) == processes
    assert gpus.processes_for([], 64) == 0
    smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert gpus.free_memory(["0"]) == []


def test_free_memory_of_the_machine_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n", encoding="ascii")
    monkeypatch.setattr(gpus, "_MEMORY", file)
    assert gpus.free_host_memory() == 4096
    monkeypatch.setattr(gpus, "_MEMORY", tmp_path / "none")
    assert gpus.free_host_memory() is None


def test_one_gpu_needs_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "2")
    assert gpus.share_of(4) == {}


def test_gpus_are_counted_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf 'GPU 0: A (UUID: x)\\n  MIG 1g: y\\nGPU 1: A (UUID: z)\\n'\n"
    )
    tool.chmod(0o755)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpus.visible_devices() == ["0", "1"]


def test_a_quick_look_is_not_split_by_head_dims() -> None:
    axes = Axes("paged_attention", all_axes("paged_attention"), 400_000)
    quick = configurations(axes, PROFILES["quick"])
    assert [part.id for part in quick] == ["float32", "float16", "bfloat16"]
    ids = [part.id for part in configurations(axes, PROFILES["gate"])]
    assert len(ids) == 45
    assert {"bfloat16-128", "float16-192x128"} <= set(ids)


@pytest.mark.parametrize("parts", [1, 3, 30])
def test_parts_share_the_budget_of_a_law(parts: int) -> None:
    plan = Plan(["any"], PROFILES["gate"])
    for law in laws_of("paged_attention"):
        whole = problems_of(plan, law, Cost("fast", 1.0, 1))
        shared_out = parts * problems_of(plan, law, Cost("fast", 1.0, 1), parts)
        assert 0.5 * whole <= shared_out <= max(1.5 * whole, parts)  # a part judges one at least


def test_a_survey_survives_the_way_to_another_process() -> None:
    parts = (Configuration({"dtype": "float16", "head_dims": (192, 128)}),)
    one = Surveyed("a:b", "a:b", "ab", "paged_attention", configurations=parts, stored=("x.json",))
    survey = Survey({"device": "cpu"}, 7, (one, Surveyed("c:d", "c:d", error="no such thing")))
    again = Survey.from_json(json.loads(json.dumps(survey.to_json())))
    assert [item.id for item in items_of(again)] == [item.id for item in items_of(survey)]
    assert again == survey


def test_the_first_process_answers_for_all(tmp_path: Path) -> None:
    assert shared(tmp_path, lambda: {"a": 1}) == {"a": 1}
    assert shared(tmp_path, lambda: pytest.fail("asked again")) == {"a": 1}
    assert shared(tmp_path / "elsewhere", lambda: {"a": 2}) == {"a": 2}


def test_the_first_process_is_refused_for_all(tmp_path: Path) -> None:
    def refuse() -> dict[str, int]:
        message = "there is no such thing"
        raise SuiteRefusedError(message)

    for _ in range(2):
        with pytest.raises(SuiteRefusedError, match="no such thing"):
            shared(tmp_path, refuse)


def test_the_end_of_a_traceback_is_kept() -> None:
    trace = 'Traceback:\n  File "mine.py", line 1, in it\n    here()\nValueError: no\n'
    assert trace_lines(Verdict("CRASH", "ValueError", trace=trace)) == trace.splitlines()
    assert trace_lines(Verdict("FAIL", "nan", trace=trace)) == []


def test_what_a_distribution_registers_and_cannot_be_imported_is_left_out(tmp_path: Path) -> None:
    """Nothing else is registered: a run goes on with the others, and fails for none of these."""
    (tmp_path / "zoo.py").write_text(ZOO)
    (tmp_path / "conftest.py").write_text(
        "from kernelproof.impl import registry\n\nregistry.BUILT_IN.clear()\n"
    )
    info = tmp_path / "half_kernels-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: half-kernels\nVersion: 2.0\n")
    points = "[kernelproof.implementations]\nfine = zoo:honest\ngone = nowhere:kernel\n"
    (info / "entry_points.txt").write_text(points)
    ended = run_pytest(tmp_path, *SUITE, "-k", "parity or gone", "-p", "no:xdist")
    assert ended.code == 0, ended.out + ended.err
    assert "1 passed, 1 skipped" in ended.out
    said = "left out: half-kernels 2.0 registers 'gone': there is no module 'nowhere'"
    assert said in ended.out
