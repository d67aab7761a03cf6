"""Ray without a cluster: what is said of an address, and where Ray or the cluster is absent."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from click import ClickException

from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.bump import cluster
from kernelproof.ci.bump.command import Request
from kernelproof.ci.console.errors import MachineError
from kernelproof.ci.fleet import ray_machines
from kernelproof.ci.fleet.ray_machines import Node, RayMachines, compilers_each, connected
from kernelproof.ci.fleet.ray_tasks import Bus
from kernelproof.ci.fleet.shipping import Facts
from kernelproof.ci.fleet.units import Event, Job, Unit
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import PROFILES


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClickException, match=r"pip install '\.\[ray\]' in a clone") as refused:
        connected("auto").__enter__()
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("address", ["nowhere", "host:", "http://host:80", "host:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(ClickException, match="must be auto, HOST:PORT or ray://") as refused:
        connected(address).__enter__()
    assert refused.value.exit_code == 2


def test_where_nothing_answers_one_sentence_says_so() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ClickException, match="nothing answers there") as failed:
            connected(address).__enter__()
    assert failed.value.exit_code == 3


@pytest.mark.parametrize(
    ("running", "compilers"), [(1, 16), (2, 16), (3, 8), (5, 5), (24, 1), (30, 1)]
)
def test_the_units_that_run_on_a_machine_share_its_cores(running: int, compilers: int) -> None:
    nodes = [Node(name, "sm90", units=12, share=1 / 12, cores=16) for name in "ab"]
    assert compilers_each(nodes, running) == compilers


class RayStandIn:
    """Stands for Ray with machines of one chip; no unit ends."""

    class exceptions:  # noqa: N801  Ray's name
        class RayError(Exception): ...

        class GetTimeoutError(RayError): ...

    def __init__(self, *names: str) -> None:
        self.alive = dict.fromkeys(names, True)
        self.submitted: list[dict[str, Any]] = []
        self.gpus = 0
        self.cancelled: list[object] = []
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": alive,
                "NodeManagerAddress": name,
                "Resources": {"CPU": 2, "GPU": self.gpus, "sm90": 1},
            }
            for name, alive in self.alive.items()
        ]

    def remote(self, *work: object, **_: object) -> Any:  # noqa: ANN401
        return self if work else lambda _: self

    def options(self, **options: Any) -> Any:  # noqa: ANN401
        def submit(*_: object) -> object:
            self.submitted.append(options)
            return len(self.submitted)

        return SimpleNamespace(remote=submit)

    def get_runtime_context(self) -> Any:  # noqa: ANN401
        return SimpleNamespace(get_node_id=lambda: "head")

    def put(self, job: object) -> object:
        return job

    def get(self, answer: object, timeout: float = 0.0) -> Facts:
        del answer, timeout
        return Facts(python=platform.python_version())

    def wait(self, units: list[object], **_: object) -> tuple[list[object], list[object]]:
        return [], units

    def cancel(self, unit: object, *, force: bool) -> None:
        del force
        self.cancelled.append(unit)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayStandIn:
    stand_in = RayStandIn("a", "b")
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr(ray_machines, "FRESH_SECONDS", 0.0)
    return stand_in


def test_what_units_say_is_kept_on_a_machine_that_has_what_they_need(ray: RayStandIn) -> None:
    """The driver's machine, named head, is none of them."""
    RayMachines("cpu")
    assert ray.submitted[-1]["label_selector"] == {"ray.io/node-id": "in(a,b)"}
    ray.alive["head"] = True
    RayMachines("cpu")
    assert ray.submitted[-1]["label_selector"] == {"ray.io/node-id": "in(head)"}


def machines_of(ray: RayStandIn) -> RayMachines:
    machines = RayMachines("cpu")
    machines._bus = MagicMock()
    machines.start(Job(Plan([], PROFILES["quick"])))
    ray.submitted.clear()  # what has asked the machines, and the bus
    return machines


def test_what_units_say_is_not_lost_where_the_bus_is_late_or_gone(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, event = machines_of(ray), Event(Unit("sm90", "m:any"), "law_begun", ("any", "parity"))
    answers = [ray.exceptions.GetTimeoutError(), [event], ray.exceptions.RayError(), [event]]
    asked = []

    def get(answer: object, timeout: float) -> object:
        del timeout
        asked.append(answer)
        if isinstance(said := answers.pop(0), Exception):
            raise said
        return said

    monkeypatch.setattr(ray, "get", get)
    take = machines._bus.take.remote
    take.side_effect = ["first", "second", "third"]
    assert [machines.events() for _ in range(4)] == [[], [event], [], [event]]
    assert asked == ["first", "first", "second", "third"]


def test_a_unit_that_waits_as_its_chips_last_machine_dies_comes_back(ray: RayStandIn) -> None:
    machines, unit = machines_of(ray), Unit("sm90", "m:any")
    assert machines.places("sm90") == 4
    ray.alive = dict.fromkeys(ray.alive, False)
    assert machines.carry_out(unit, 1) is None
    assert len(ray.cancelled) == 1
    assert machines.places("sm90") == 0
    assert machines.carry_out(unit, 1) is None
    assert len(ray.submitted) == 1


def test_units_that_need_a_machine_go_elsewhere_when_it_dies(ray: RayStandIn) -> None:
    machines = machines_of(ray)
    on_a = Unit("sm90", "m:any", 1, node="a")
    assert [machines.places("sm90", node) for node in ("a", "b", "")] == [2, 2, 4]
    ray.alive["a"] = False
    assert machines.carry_out(on_a, 1) is None
    assert ray.submitted[-1]["label_selector"] == {"ray.io/node-id": "in(a)"}
    assert [machines.places("sm90", node) for node in ("a", "b", "")] == [2, 2, 2]
    machines.close()
    with pytest.raises(CancelledError):
        machines.carry_out(on_a, 1)
    assert ray.submitted[-1]["label_selector"] == {"ray.io/node-id": "in(b)"}
    assert len(ray.cancelled) == 2


def test_a_unit_that_fails_says_why_in_a_sentence(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TaskError(ray.exceptions.RayError):  # type: ignore[name-defined, misc]
        cause = ValueError("no such file\nand more")

    def get(_: object) -> object:
        raise TaskError

    machines = machines_of(ray)
    monkeypatch.setattr(ray, "wait", lambda units, **_: (units, []))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(MachineError, match=r"^no such file$"):
        machines.carry_out(Unit("sm90", "m:any"), 1)


def test_what_one_machine_builds_no_other_of_its_chip_begins() -> None:
    bus = Bus()
    assert bus.claim("sm90", ["x", "y"], "a", stays=False) == "a"
    assert bus.claim("sm100", ["x"], "c", stays=False) == "c"
    assert bus.claim("sm90", ["z"], "b", stays=False) == "b"
    assert bus.claim("sm90", ["x", "y", "z"], "b", stays=False) == "a"
    assert bus.claim("sm90", ["x", "z"], "b", stays=False) == "b"  # one of them is there
    assert bus.claim("sm90", ["y"], "b", stays=True) == "b"


def test_a_machine_has_as_many_units_at_a_time_as_are_asked_for(ray: RayStandIn) -> None:
    assert RayMachines("cpu").places("sm90") == 4
    assert RayMachines("cpu", 1).places("sm90") == 2
    ray.gpus = 1
    assert RayMachines("cuda", 1).places("sm90") == 2
    assert RayMachines("cuda", 3).places("sm90") == 4  # one core each


@pytest.mark.usefixtures("ray")
def test_what_one_chip_says_is_told_before_what_failed_on_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[list[str]] = []

    def joined(
        reports: list[object], names: list[str], *_: object, **__: object
    ) -> dict[str, object]:
        assert reports == [{"exit_code": 0}]
        told.append(names)
        return {}

    answers = {
        "sm90": cluster.Answer('{"exit_code": 0}', {"a.json": "{}"}),
        "sm100": MachineError("sm100: its last machine is gone"),
        "sm120": cluster.Answer(refused="no such release", code=2),
    }
    monkeypatch.setattr(RayMachines, "once_a_chip", lambda *_: answers)
    monkeypatch.setattr(cluster, "connected", lambda _: nullcontext())
    monkeypatch.setattr(cluster, "join", joined)
    monkeypatch.setattr(cluster, "tell", lambda *_, **__: 1)
    request = Request(
        "1", "2", "kernelproof bump 1 2", cases=tmp_path, journal=tmp_path / "kept.jsonl"
    )
    with pytest.raises(MachineError) as failed:
        cluster.bump_on("made-up", request)
    assert failed.value.message == "sm100: its last machine is gone; sm120: no such release"
    assert told == [["sm90"]]
    assert (tmp_path / "a.json").exists()


@pytest.mark.usefixtures("ray")
def test_a_journal_that_cannot_be_written_costs_no_chip_its_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chips = ["sm90", "sm100"]

    def copy(journal: Journal, offset: int, data: bytes) -> None:
        if "sm90" in journal._path.name:
            message = f"--journal {journal._path}: cannot be used (No space left on device)"
            raise JournalError(message)
        copied.append((offset, data))

    def once_a_chip(
        machines: RayMachines,
        work: object,
        given: object,
        heard: Callable[[Event], object],
        ended: object,
    ) -> dict[str, cluster.Answer]:
        del machines, work, given, ended
        for offset in (0, 1):
            for chip in chips:
                heard(Event(Unit(chip, ""), cluster.JOURNAL, (offset, b"a")))
        return {chip: cluster.Answer('{"exit_code": 0}') for chip in chips}

    copied: list[tuple[int, bytes]] = []
    told: list[list[str]] = []
    monkeypatch.setattr(Journal, "copy", copy)
    monkeypatch.setattr(RayMachines, "__init__", lambda self, _: setattr(self, "chips", chips))
    monkeypatch.setattr(RayMachines, "once_a_chip", once_a_chip)
    monkeypatch.setattr(cluster, "connected", lambda _: nullcontext())
    monkeypatch.setattr(cluster, "join", lambda _, names, *__, **___: told.append(names))
    monkeypatch.setattr(cluster, "tell", lambda *_, **__: 0)
    request = Request(
        "1", "2", "kernelproof bump 1 2", cases=tmp_path, journal=tmp_path / "kept.jsonl"
    )
    assert cluster.bump_on("made-up", request) == 0
    assert told == [chips]
    assert copied == [(0, b"a"), (1, b"a")]
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 1
    assert "from here on no answer of sm90 is kept" in said


def test_work_on_each_chip_ends_when_one_has_no_machine_left(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = machines_of(ray)
    monkeypatch.setattr(machines, "events", list)
    ray.alive = dict.fromkeys(ray.alive, False)
    (gone,) = machines.once_a_chip(print, {"sm90": ()}, print, str).values()
    assert gone.message == "sm90: its last machine is gone"
    assert ray.cancelled == [1]
    assert ray.submitted[-1]["num_cpus"] == 2  # a whole machine


@pytest.mark.parametrize(
    ("begun", "why"), [(False, "it had not begun"), (True, "it did not report in 0 s")]
)
def test_work_that_is_to_end_and_does_not_report_is_given_up(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch, *, begun: bool, why: str
) -> None:
    machines, heard = machines_of(ray), list[Event]()
    said = [Event(Unit("sm90", ""), "journal", (0, b""))] * begun
    monkeypatch.setattr(machines, "events", lambda: said)
    monkeypatch.setattr(ray_machines, "GRACE_SECONDS", 0.0)
    (none,) = machines.once_a_chip(print, {"sm90": ()}, heard.append, lambda: "SIGTERM").values()
    assert none.message == f"sm90: {why}"
    assert heard[:1] == said
    assert ray.cancelled == [1]
