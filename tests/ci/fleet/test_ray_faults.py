"""Faults on a cluster: a machine that cannot be used, a hang, a dead driver, a dead machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.ci.bump.report.merging import join
from kernelproof.ci.fleet.units import Unit, UnitResult
from kernelproof.properties.findings.files import dumps
from kernelproof.tests.bench.fleet_simulation import simulated, units_of
from kernelproof.tests.ci.bump import test_command

if TYPE_CHECKING:
    from kernelproof.tests.ci.fleet.conftest import Cluster

SUBJECTS = Path(__file__).parent / "cluster_subjects.py"
LACKING = Path(__file__).parent / "lacking"
"""A folder with a module of PyTorch's name that cannot be imported."""
NODES = [
    ("a", "sm90", {}),
    ("b", "sm90", {}),
    ("c", "sm100", {}),
    ("d", "sm100", {"PYTHONPATH": str(LACKING)}),
]
"""The nodes of this module's cluster: name, chip, environment."""
JOURNAL = Path(".kernelproof", "cases", "fleet", "journal-*.jsonl")
"""The journal of a run below its folder; the rest of its name says what was asked for."""
ROUNDED = 0.01
"""More seconds than rounding adds to a report's units."""
CLOCK = (
    "seconds", "build_seconds", "call_seconds", "run_seconds", "timings", "date", "share",
    "time_by_law",
)  # fmt: skip
"""Fields of a report that depend on the clock."""
NAMES = ("obedient", "tame", "docile", "sharing", "sharing-too")
"""Implementations whose costs are known."""
TWO_UNITS = ("--law", "parity", "--law", "repeated_calls")
"""Options that make the laws on each implementation two units."""

pytestmark = [
    pytest.mark.xdist_group("ray faults"),
    pytest.mark.timeout(600),  # a busy machine starts dozens of processes slowly
]


def journal_in(folder: Path) -> bytes:
    (path,) = folder.glob(str(JOURNAL))
    return path.read_bytes()


def journal(folder: Path) -> list[tuple[Unit, UnitResult]]:
    """Return the units of a run that have ended, with their results."""
    _, *lines = journal_in(folder).splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    return [
        (Unit(*each["unit"]), UnitResult.from_data(each["result"]))
        for each in answers
        if "unit" in each
    ]


def assert_foreseen(report: dict[str, Any], ended: list[tuple[Unit, UnitResult]]) -> None:
    """Compare a run with its simulation.

    The report has exactly the units that ended. They alone take no longer than the run took with
    what it does around them, however busy this machine is.
    """
    listed = Counter(
        (each["chip"], each["implementation"], each["number"]) for each in report["fleet"]["units"]
    )
    assert listed == Counter((unit.chip, result.report.name, unit.number) for unit, result in ended)
    seconds = max(simulated(units, places) for units, places in units_of(report).values())
    assert 0 < seconds <= report["seconds"] + ROUNDED


def costs(folder: Path) -> list[str]:
    """Return options by which the costs of calls are known, and not measured first."""
    fast = {"name": "fast", "problems": 1.0, "max_work": 20_000}
    known = {
        "schema": "kernelproof-costs-1",
        "profile": "quick",
        "device": "cpu",
        "costs": dict.fromkeys(NAMES, fast),
    }
    (folder / "costs.json").write_text(json.dumps(known))
    return ["--costs", "costs.json"]


def without_clock(value: Any) -> Any:  # noqa: ANN401  JSON
    """Return JSON without what the clock decides."""
    if isinstance(value, dict):
        return {name: without_clock(each) for name, each in value.items() if name not in CLOCK}
    return [without_clock(each) for each in value] if isinstance(value, list) else value


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [each for each in processes if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """Return a folder for a run; no call hangs yet."""
    for order in cluster.orders.iterdir():
        order.unlink()
    return tmp_path


def test_a_hang_is_one_nodes_and_one_that_lacks_something_is_left_out(
    cluster: Cluster, folder: Path
) -> None:
    (folder / "release" / "vllm").mkdir(parents=True)
    (folder / "release" / "vllm" / "__init__.py").touch()
    (folder / "release" / "vllm" / "_version.py").write_text("version = '9.8'")
    (cluster.orders / "c").touch()
    names = [f"{SUBJECTS}:{name}" for name in ("obedient", "of_a_release")]
    words = ["--law", "parity", "--from", "release", *costs(folder)]
    run = cluster.check(folder, *names, *words)
    code, report, said = cluster.end_of(run, folder)
    assert code == 1, said
    assert said.count("is left out: it has no torch\n") == 1
    states = {
        chip: [each["status"] for each in one["implementations"]]
        for chip, one in report["chips"].items()
    }
    assert states == {"sm90": ["PASS", "PASS"], "sm100": ["FINDINGS", "PASS"]}
    assert {finding["status"] for finding in report["findings"]} == {"HANG"}
    assert_gone([int(line) for line in (cluster.orders / "hung").read_text().split()])
    assert_foreseen(report, journal(folder))


def test_a_module_is_built_once_a_chip_and_its_users_run_where_it_is(
    cluster: Cluster, folder: Path
) -> None:
    names = [f"{SUBJECTS}:{name}" for name in ("sharing", "sharing_too")]
    run = cluster.check(folder, *names, *TWO_UNITS, *costs(folder))
    code, _, said = cluster.end_of(run, folder)
    assert code == 0, said
    chips = {name: chip for name, chip, _ in NODES}
    built = [line.split() for line in (cluster.orders / "builds").read_text().splitlines()]
    times = Counter((chips[node], dtype) for node, dtype in built)
    assert len(times) == 2 * len({dtype for _, dtype in times}) > 2
    assert set(times.values()) == {1}
    units = journal(folder)
    assert len(units) == 8
    for chip in ("sm90", "sm100"):
        assert len({result.node for unit, result in units if unit.chip == chip}) == 1


def bump(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Begin a comparison of two made-up releases, all paths relative to their folder."""
    options = ["--sm", "cpu,90", "--implementation", "subject.py:merge", "--law", "parity",
               "--profile", "quick", "--jobs", "1", "--json", "bump.json"]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "kernelproof", "bump", "old", "new", *options, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of(run: subprocess.Popen[str], folder: Path, code: int) -> dict[str, Any]:
    """Return the report of a comparison, which ends with this exit code."""
    _, said = run.communicate(timeout=300)
    assert run.returncode == code, said
    report: dict[str, Any] = json.loads((folder / "bump.json").read_text())
    return report


def compared(folder: Path, *words: str) -> dict[str, Any]:
    """Return the report of a comparison that has every kind of relative path among its options."""
    parts = ["--part", "declarations", "--part", "behaviour"]
    paths = ["--policy", "policy.toml", "--from", "engine", "--cases", "kept/cases"]
    run = bump(folder, *parts, *paths, "--html", "bump.html", *words)
    return report_of(run, folder, code=1)


def read(cases: Path) -> dict[str, Any]:
    """Return the cases of a folder, without what the clock decides."""
    return {path.name: without_clock(json.loads(path.read_text())) for path in cases.glob("*.json")}


def test_a_comparison_on_a_cluster_is_that_of_each_chips_machine(
    cluster: Cluster, folder: Path
) -> None:
    (folder / "subject.py").write_text(test_command.SUBJECT)
    test_command.release(folder / "old", test_command.OLD)
    test_command.release(folder / "new", test_command.NEW, broken=True)
    (folder / "policy.toml").write_text("[chips]\nrequired = [90]\n")
    (folder / "engine" / "vllm").mkdir(parents=True)
    (folder / "engine" / "vllm" / "__init__.py").touch()
    alone = compared(folder)
    cases = folder / "kept" / "cases"
    written = read(cases)
    assert written, alone["findings"]
    assert "--from engine" in json.dumps(alone["findings"])
    shutil.rmtree(cases.parent)
    there = {path.name for path in folder.iterdir()} | {"kept"}
    report = compared(folder, "--ray", cluster.address)
    assert read(cases) == written
    assert {path.name for path in folder.iterdir()} == there
    # Both chips are made up: two machines of a CPU have the findings of one.
    assert len(report["machines"]) == 2
    alone["machines"][0]["command"] = report["command"]
    joined = join([alone, alone], ["sm90", "sm100"], None, report["command"])
    assert without_clock(report) == without_clock(json.loads(dumps(joined)))
    assert "<table" in (folder / "bump.html").read_text()


def test_a_comparison_that_a_signal_ends_reports_and_goes_on(
    cluster: Cluster, folder: Path
) -> None:
    hurry = folder / "hurry"
    pause = f"import os, time\n    time.sleep(0 if os.path.exists({str(hurry)!r}) else 0.5)"
    pause += "\n    outs, lses ="
    (folder / "subject.py").write_text(test_command.SUBJECT.replace("outs, lses =", pause))
    test_command.release(folder / "old", test_command.OLD)
    test_command.release(folder / "new", test_command.NEW)
    words = ["--part", "behaviour", "--ray", cluster.address]
    began = time.monotonic()
    run = bump(folder, *words)
    gate = folder / ".kernelproof" / "gate"
    journals = [gate / f"old-new-cpu-{chip}.jsonl" for chip in ("sm100", "sm90")]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text().count("\n") > 4 for path in journals):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    signalled = time.monotonic()
    run.terminate()
    report = report_of(run, folder, code=143)
    # On a busy machine all takes longer: starting took its time too.
    assert time.monotonic() - signalled < max(10, signalled - began)
    assert report["verdict"] == "undecided"
    assert report["failures"] == ["ended by SIGTERM: --resume goes on from here"]
    assert len(report["machines"]) == 2
    hurry.touch()
    known = [path.read_text().count("\n") - 1 for path in journals]
    report = report_of(bump(folder, *words, "--resume"), folder, code=0)
    assert [each["timings"]["remembered"] for each in report["machines"]] == known


def test_a_driver_that_is_killed_repeats_nothing_when_it_resumes(
    cluster: Cluster, folder: Path
) -> None:
    for name, *_ in NODES:
        (cluster.orders / name).write_text(f'{folder / JOURNAL}\n"unit"')
    words = [f"{SUBJECTS}:tame", f"{SUBJECTS}:docile", *TWO_UNITS, *costs(folder)]
    run = cluster.check(folder, *words)
    hanging = cluster.hung(run)
    run.kill()
    run.communicate()
    assert_gone(hanging)
    before, known = journal_in(folder), journal(folder)
    assert known
    for order in cluster.orders.iterdir():
        order.unlink()
    _, report, said = cluster.end_of(cluster.check(folder, *words, "--resume"), folder)
    assert report["chips"]["sm90"]["verdict"] == "conforming", said
    assert journal_in(folder).startswith(before)
    assert_foreseen(report, journal(folder)[len(known) :])
    times = Counter((unit.chip, unit.implementation, unit.number) for unit, _ in journal(folder))
    assert set(times.values()) == {1}
    assert len(times) == 6


def test_units_of_a_dead_machine_run_elsewhere_and_its_finished_ones_are_kept(
    cluster: Cluster, folder: Path
) -> None:
    (cluster.orders / "b").write_text(f"{folder / JOURNAL}\n{cluster.ids['b']}")
    words = [f"{SUBJECTS}:tame", f"{SUBJECTS}:docile", *TWO_UNITS, *costs(folder)]
    run = cluster.check(folder, *words)
    hanging = cluster.hung(run)
    cluster.kill("b")
    _, report, _ = cluster.end_of(run, folder)
    assert_gone(hanging)
    ended = [(unit, result.node) for unit, result in journal(folder) if unit.chip == "sm90"]
    assert len({(unit.implementation, unit.number) for unit, _ in ended}) == len(ended) == 4
    assert [unit.number for unit, node in ended if node == cluster.ids["b"]] == [0]
    assert {node for _, node in ended} == {cluster.ids["a"], cluster.ids["b"]}
    # Nothing of it is seen in the report: it is that of one machine.
    alone = cluster.end_of(cluster.check(folder, *words, ray=False), folder)[1]
    assert without_clock(report["chips"]["sm90"]["implementations"]) == without_clock(
        alone["implementations"]
    )
