from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernelproof.properties.isolation import kernel_kills, process, spawning, supervisor
from kernelproof.properties.isolation.leftovers import Left
from kernelproof.properties.isolation.outcome import KILLED, KILLED_FOR_MEMORY
from kernelproof.properties.isolation.stages import FrameReader, GarbledError
from kernelproof.properties.isolation.workers import Deadlines, Outcome, Worker, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parents[1]
PATH = [str(HERE), *sys.path]
MISBEHAVE = "isolation_handlers:misbehave"
SHORT = Deadlines(run=0.4)
GIB = 1 << 30

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def make_pool(
    handler: str = MISBEHAVE, *, preload: tuple[str, ...] = (), **options: object
) -> WorkerPool:
    """A pool without torch, the import of which would be most of these tests' time."""
    return WorkerPool(handler, sys_path=PATH, preload=preload, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with make_pool() as pool:
        yield pool


@pytest.fixture
def worker(pool: WorkerPool) -> Iterator[Worker]:
    with pool.lease() as worker:
        yield worker


def echo(worker: Worker, value: object) -> object:
    outcome = worker.run({"do": "echo", "value": value})
    assert outcome.status == "done", outcome
    assert outcome.result is not None
    return outcome.result["value"]


def running(pid: int) -> bool:
    """Whether a process runs; one that is dead but not reaped by whoever inherited it does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class TestDone:
    def test_results_come_back(self, worker: Worker) -> None:
        value = {"text": "gr\u00fc\u00df \ud800", "number": 1.5, "none": None, "list": [1, [2]]}
        outcome = worker.run({"do": "echo", "value": value})
        assert outcome.status == "done"
        assert outcome.result == {"value": value}
        assert (outcome.kind, outcome.stderr, outcome.stack, outcome.detail) == ("", "", "", "")
        assert outcome.seconds > 0

    def test_large_messages(self, worker: Worker) -> None:
        value = "x" * (5 << 20)
        assert echo(worker, value) == value

    def test_process_persists(self, worker: Worker) -> None:
        worker.renew()
        first = worker.run({"do": "remember", "value": 1}).result
        second = worker.run({"do": "remember", "value": 2}).result
        assert first is not None
        assert second == {"seen": [1, 2], "pid": first["pid"]}

    def test_a_handler_may_ask_for_a_fresh_process(self, worker: Worker) -> None:
        ended = worker.run({"do": "end"})
        assert ended.status == "done"
        assert ended.result is not None
        assert list(ended.result) == ["pid"]
        after = worker.run({"do": "remember", "value": 1}).result
        assert after is not None
        assert after["pid"] != ended.result["pid"]
        assert after["seen"] == [1]

    def test_what_is_asked_once_is_asked_of_each_process(self, worker: Worker) -> None:
        request = {"do": "remember", "value": 1}

        def asked() -> list[bool]:
            return [worker.run_once(request) is None for _ in range(2)]

        assert asked() == [False, True]
        assert [worker.run_once({"do": "end"}) is None for _ in range(2)] == [False, False]
        assert asked() == [False, True]
        worker.renew()
        assert asked() == [False, True]

    def test_renew_forgets(self, pool: WorkerPool, worker: Worker) -> None:
        before = pool.respawns
        first = worker.run({"do": "remember", "value": 1}).result
        worker.renew()
        second = worker.run({"do": "remember", "value": 2}).result
        assert first is not None
        assert second is not None
        assert second["seen"] == [2]
        assert second["pid"] != first["pid"]
        assert pool.respawns == before + 1

    def test_output_does_not_break_the_protocol(self, worker: Worker) -> None:
        outcome = worker.run({"do": "print", "text": "hello"})
        assert outcome.status == "done"
        assert outcome.stderr == "hello\nhello from a shell\n"
        assert worker.run({"do": "echo", "value": 1}).stderr == ""

    def test_output_of_requests_that_are_sent_ahead_is_told_apart(self, worker: Worker) -> None:
        texts = ("first", "second", "third")
        echo(worker, 0)
        for text in texts:
            worker.ask({"do": "print", "text": text})
        worker.ask({"do": "echo", "value": 1})
        time.sleep(0.3)  # all of them have been printed before an answer is taken
        for text in texts:
            assert worker.answer().stderr == f"{text}\n{text} from a shell\n"
        assert worker.answer().stderr == ""

    def test_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KERNELPROOF_TEST", "outer")
        with make_pool(environment={"KERNELPROOF_TEST": "inner"}) as pool, pool.lease() as worker:
            result = worker.run({"do": "environment"}).result
        assert result is not None
        assert result["path"] == [entry or str(Path.cwd()) for entry in PATH]
        assert result["argv"] == ["-c"]
        assert result["variable"] == "inner"
        assert str(result["cache"]).startswith(f"{tempfile.gettempdir()}/torchinductor_")
        assert result["session"] is True
        assert result["sigint"] is True

    def test_preload_that_fails_is_passed_over(self) -> None:
        preload = ("no_such_module", "this", "json")
        with make_pool(preload=preload) as pool, pool.lease() as worker:
            assert echo(worker, 1) == 1


class TestHang:
    @pytest.mark.parametrize(
        ("behaviour", "frame"),
        [
            ("spin", "in do_spin"),
            ("sleep", "in do_sleep"),
            ("pause_in_c", "in do_pause_in_c"),
            ("backtrack", "in do_backtrack"),
        ],
    )
    def test_hang(self, worker: Worker, behaviour: str, frame: str) -> None:
        outcome = worker.run({"do": behaviour}, SHORT)
        assert (outcome.status, outcome.kind, outcome.stage) == ("hang", "run", "run")
        assert frame in outcome.stack
        assert outcome.detail == "run took longer than 0.4 s"
        assert outcome.seconds >= 0.4
        assert echo(worker, 2) == 2

    def test_hang_without_a_dump(self, worker: Worker) -> None:
        outcome = worker.run({"do": "disable_dumps"}, SHORT)
        assert (outcome.status, outcome.stack) == ("hang", "")

    def test_output_without_end(self, worker: Worker) -> None:
        outcome = worker.run({"do": "print_without_end"}, SHORT)
        assert outcome.status == "hang"
        assert 0 < len(outcome.stderr) <= 4096

    def test_torch_loop(self) -> None:
        handler = "isolation_handlers:torch_loop"
        with make_pool(handler, standby=False) as pool, pool.lease() as worker:
            outcome = worker.run({}, SHORT)
        assert (outcome.status, outcome.stage) == ("hang", "run")
        assert "in torch_loop" in outcome.stack


class TestStages:
    def test_compile_does_not_count_as_run(self, worker: Worker) -> None:
        payload = {"do": "compile_within_run", "before": 0.1, "within": 3.0}
        assert worker.run(payload, Deadlines(run=2.5)).status == "done"

    def test_run_goes_on_after_compile(self, worker: Worker) -> None:
        payload = {"do": "compile_within_run", "before": 0.3, "within": 0.1}
        outcome = worker.run(payload, SHORT)
        assert (outcome.status, outcome.stage) == ("hang", "run")

    @pytest.mark.parametrize(
        ("stage", "status", "kind"),
        [
            ("load", "error", "overrun"),
            ("materialise", "error", "overrun"),
            ("compile", "hang", "compile"),
            ("run", "hang", "run"),
            ("judge", "error", "overrun"),
        ],
    )
    def test_each_stage_has_its_deadline(
        self, worker: Worker, stage: str, status: str, kind: str
    ) -> None:
        outcome = worker.run({"do": "overrun", "stage": stage}, Deadlines(**{stage: 0.2}))
        assert (outcome.status, outcome.kind, outcome.stage) == (status, kind, stage)
        assert "in do_overrun" in outcome.stack

    def test_unknown_stage(self, worker: Worker) -> None:
        outcome = worker.run({"do": "unknown_stage"})
        assert (outcome.status, outcome.kind) == ("error", "ValueError")
        assert "stage must be one of load, materialise, compile, run, judge" in outcome.detail

    def test_noting_a_stage_costs_little(self, worker: Worker) -> None:
        result = worker.run({"do": "time_stages"}).result
        assert result is not None
        assert float(str(result["seconds"])) < 10e-6


class TestCrash:
    @pytest.mark.parametrize(
        ("payload", "kind"),
        [
            ({"do": "abort"}, "SIGABRT"),
            ({"do": "segfault"}, "SIGSEGV"),
            ({"do": "exit_now", "status": 0}, "exit 0"),
            ({"do": "exit_now", "status": 3}, "exit 3"),
            ({"do": "leave", "status": None}, "exit 0"),
            ({"do": "leave", "status": 5}, "exit 5"),
            ({"do": "kill_itself"}, "SIGKILL"),
            ({"do": "end_the_process_above"}, "SIGKILL"),
            ({"do": "fork_and_exit"}, "exit 4"),
        ],
    )
    def test_crash(self, worker: Worker, payload: dict[str, object], kind: str) -> None:
        outcome = worker.run(payload)
        assert (outcome.status, outcome.kind, outcome.stage) == ("crash", kind, "run")
        assert echo(worker, 2) == 2

    def test_fatal_error_shows_where(self, worker: Worker) -> None:
        outcome = worker.run({"do": "segfault"})
        assert "Fatal Python error: Segmentation fault" in outcome.stack
        assert "in do_segfault" in outcome.stack
        assert outcome.stderr == "about to read address 0\n"

    def test_exit_with_a_message(self, worker: Worker) -> None:
        outcome = worker.run({"do": "leave", "status": "no kernel image"})
        assert (outcome.kind, outcome.stderr) == ("exit 1", "no kernel image\n")

    def test_closed_connection(self, worker: Worker) -> None:
        outcome = worker.run({"do": "close_everything"})
        assert (outcome.status, outcome.kind) == ("crash", "closed its connection")

    @pytest.mark.parametrize(("to", "detail"), [("socket", "not a message"), ("file", "board")])
    def test_stray_writes(self, worker: Worker, to: str, detail: str) -> None:
        outcome = worker.run({"do": "write_garbage", "to": to})
        assert (outcome.status, outcome.kind) == ("crash", "garbled connection")
        assert detail in outcome.detail
        assert echo(worker, 2) == 2

    def test_a_message_nested_without_end(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            body = b"[" * 100_000
            sender = threading.Thread(
                target=theirs.sendall, args=(struct.pack("!4sI", b"kpf1", len(body)) + body,)
            )
            sender.start()
            with pytest.raises(GarbledError, match="not JSON"):
                FrameReader(ours).read()
            sender.join()

    def test_earlier_results_stand(self) -> None:
        with make_pool(standby=False) as pool, pool.lease() as worker:
            before = [worker.run({"do": "echo", "value": n}) for n in range(20)]
            assert worker.run({"do": "abort"}).status == "crash"
            after = [worker.run({"do": "echo", "value": n}) for n in range(20)]
            assert pool.respawns == 1
        for outcomes in (before, after):
            assert [outcome.result for outcome in outcomes] == [{"value": n} for n in range(20)]

    def test_late_death_is_not_the_next_one_s(self, pool: WorkerPool, worker: Worker) -> None:
        before = pool.respawns
        assert worker.run({"do": "die_later"}).status == "done"
        time.sleep(0.3)
        outcome = worker.run({"do": "echo", "value": 1})
        assert (outcome.status, outcome.result) == ("done", {"value": 1})
        assert outcome.detail == "the process before this one died after its last reply"
        assert pool.respawns == before + 1


class TestError:
    @pytest.mark.parametrize(
        ("behaviour", "kind", "detail"),
        [
            ("fail", "LookupError", "a stray exception"),
            ("interrupt", "KeyboardInterrupt", "in do_interrupt"),
            ("no_json", "TypeError", "not JSON serializable"),
            ("no_object", "TypeError", "no JSON object"),
            ("nonexistent", "KeyError", "do_nonexistent"),
        ],
    )
    def test_handler_raises(
        self, pool: WorkerPool, worker: Worker, behaviour: str, kind: str, detail: str
    ) -> None:
        before = pool.respawns
        outcome = worker.run({"do": behaviour})
        assert (outcome.status, outcome.kind) == ("error", kind)
        assert detail in outcome.detail
        assert pool.respawns == before
        assert echo(worker, 2) == 2

    def test_an_error_where_others_code_ran_is_answered_again_in_a_fresh_process(self) -> None:
        def request(name: str) -> dict[str, object]:
            return {"do": "fail_after_others", "name": name, "implementation": name}

        with make_pool() as pool, pool.lease() as worker:
            first = worker.run(request("first"))
            assert (first.status, first.shared) == ("done", False)
            assert worker.shared_with_others("second")
            second = worker.run(request("second"))
            assert (second.status, second.result, second.shared) == ("done", {"seen": 1}, False)
            for name in ("second", "first", "first"):
                worker.ask(request(name))
            assert [worker.answer().result for _ in range(3)] == [
                {"seen": 2},
                {"seen": 1},
                {"seen": 2},
            ]
            assert pool.respawns == 2

    @on_linux
    def test_out_of_memory(self) -> None:
        with make_pool(memory_limit=GIB, standby=False) as pool, pool.lease() as worker:
            outcome = worker.run({"do": "allocate", "size": 4 * GIB})
            assert (outcome.status, outcome.kind) == ("error", "MemoryError")
            assert worker.run({"do": "allocate", "size": GIB // 4}).status == "done"
            assert pool.respawns == 0

    @pytest.mark.parametrize(
        ("handler", "detail"),
        [
            ("no_such_module:handler", "No module named 'no_such_module'"),
            ("isolation_handlers:no_such_handler", "no_such_handler"),
        ],
    )
    def test_handler_cannot_be_loaded(self, handler: str, detail: str) -> None:
        with make_pool(handler) as pool, pool.lease() as worker:
            for _ in range(2):
                outcome = worker.run({})
                assert (outcome.status, outcome.kind) == ("error", "start")
                assert detail in outcome.detail

    def test_worker_cannot_start(self, tmp_path: Path) -> None:
        (tmp_path / "dies.py").write_text(
            "import os\nprint('no device', flush=True)\nos._exit(7)\n", encoding="utf-8"
        )
        (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
        path = [str(tmp_path), *sys.path]
        with WorkerPool("dies:handler", preload=(), sys_path=path) as pool, pool.lease() as worker:
            dies = worker.run({})
        with WorkerPool("waits:handler", preload=(), sys_path=path) as pool, pool.lease() as worker:
            waits = worker.run({}, Deadlines(load=0.5))
        with WorkerPool("dies:handler", preload=(), sys_path=[]) as pool, pool.lease() as worker:
            lost = worker.run({})
        assert {dies.status, waits.status, lost.status} == {"error"}
        assert dies.detail == "the worker cannot start: exit 7"
        assert dies.stderr == "no device\n"
        assert waits.detail == "the worker cannot start: load took longer than 0.5 s"
        assert "waits.py" in waits.stack
        assert lost.kind == "start"
        assert "ModuleNotFoundError" in lost.stderr

    def test_payload_that_is_not_json(self, worker: Worker) -> None:
        with pytest.raises(TypeError, match="not JSON serializable"):
            worker.run({"do": object()})
        assert echo(worker, 2) == 2

    @pytest.mark.parametrize("handler", ["", "module", "module:", ":function"])
    def test_bad_handler(self, handler: str) -> None:
        with pytest.raises(ValueError, match=r"handler must be 'module:function'"):
            WorkerPool(handler)

    def test_bad_size(self) -> None:
        with pytest.raises(ValueError, match="size must be at least 1, not 0"):
            WorkerPool(MISBEHAVE, size=0)


class TestThreads:
    def test_several_at_once(self) -> None:
        def work(number: int) -> list[object]:
            with workers.lease() as worker:
                if number % 4 == 3:
                    assert worker.run({"do": "abort"}).kind == "SIGABRT"
                return [echo(worker, number * 100 + n) for n in range(20)]

        with make_pool(size=3) as workers, ThreadPoolExecutor(6) as threads:
            results = list(threads.map(work, range(12)))
            assert workers.respawns == 3
        assert results == [[number * 100 + n for n in range(20)] for number in range(12)]

    def test_who_waits_comes_before_who_has_just_given_a_worker_back(self) -> None:
        order: list[str] = []

        def wait() -> None:
            with workers.lease():
                order.append("waits")

        with make_pool() as workers, ThreadPoolExecutor(1) as threads:
            for _ in range(20):
                with workers.lease():
                    waiting = threads.submit(wait)
                    while not workers._line:
                        time.sleep(0.001)
                with workers.lease():
                    order.append("again")
                waiting.result()
        assert order == ["waits", "again"] * 20

    def test_an_owner_waits_a_little_for_the_worker_that_knows_it(self) -> None:
        def leased(owner: str, patience: float) -> Worker:
            with workers.lease(owner, patience) as worker:
                return worker

        with make_pool(size=2) as workers, ThreadPoolExecutor(1) as threads:
            knowing, other = leased("a", 0.0), leased("b", 0.0)
            assert knowing is not other
            with workers.lease("a") as busy:
                assert busy is knowing
                waiting = threads.submit(leased, "a", 60.0)
                time.sleep(0.1)
                assert not waiting.done()
                assert leased("new", 60.0) is other, "whom no worker knows does not wait"
            assert waiting.result(60) is knowing
            with workers.lease("a"):
                assert threads.submit(leased, "a", 0.1).result(60) is other

    def test_they_overlap(self, tmp_path: Path) -> None:
        def work(name: str) -> Outcome:
            with workers.lease() as worker:
                return worker.run({"do": "meet", "folder": str(tmp_path), "name": name, "of": 3})

        # None ends before all have begun.
        with make_pool(size=3) as workers, ThreadPoolExecutor(3) as threads:
            futures = [threads.submit(work, name) for name in "abc"]
            assert [future.result().status for future in futures] == ["done"] * 3

    def test_close_interrupts_a_request(self) -> None:
        def work() -> None:
            with workers.lease() as worker:
                echo(worker, 1)
                started.set()
                worker.run({"do": "sleep"}, Deadlines(run=600))

        started = threading.Event()
        workers = make_pool()
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(work)
            assert started.wait(60)
            time.sleep(0.1)
            workers.close()
            with pytest.raises(RuntimeError, match="the worker pool is closed"):
                future.result(60)
        with pytest.raises(RuntimeError, match="the worker pool is closed"), workers.lease():
            pass
        workers.close()


@on_linux
class TestOrphans:
    @pytest.mark.parametrize("then", ["exit", "sleep"])
    @pytest.mark.parametrize("how", ["child", "group", "session", "double fork"])
    def test_grandchildren_die_too(self, worker: Worker, then: str, how: str) -> None:
        # Until it exits or sleeps, it starts a process.
        payload = {"do": "leave_a_child", "then": then, "how": how}
        outcome = worker.run(payload, Deadlines(run=2.0))
        assert outcome.status == {"exit": "crash", "sleep": "hang"}[then]
        child = int(outcome.stderr.partition("child=")[2])
        assert wait_until(lambda: not running(child))

    def test_what_has_killed_the_process_above_leaves_nothing(self, worker: Worker) -> None:
        child, folder = worker.run({"do": "end_the_process_above"}).stderr.split()
        assert wait_until(lambda: not running(int(child)))
        assert not Path(folder).exists()

    def test_grandchild_left_behind_lives_no_longer_than_the_worker(self, worker: Worker) -> None:
        outcome = worker.run({"do": "leave_a_child", "then": "return"})
        assert outcome.result is not None
        child = int(str(outcome.result["child"]))
        assert running(child)
        worker.renew()
        assert wait_until(lambda: not running(child))

    def test_fork_that_returns_does_not_answer(self, worker: Worker) -> None:
        outcome = worker.run({"do": "fork_and_return"})
        assert outcome.result is not None
        assert outcome.result["fork"] != 0
        assert [echo(worker, n) for n in range(50)] == list(range(50))

    def test_closing_leaves_nothing(self, worker: Worker) -> None:
        worker.renew()
        echo(worker, 1)
        # The worker that is lent, its standby, a process above each. The process above the worker
        # that was replaced ends a little later than that worker: four may be the wrong four.
        assert wait_until(lambda: children_of_supervisors() == [1, 1]), processes()
        before = workers_processes()
        with make_pool(size=2) as pool, pool.lease() as another:
            result = another.run({"do": "leave_a_child", "then": "return"}).result
            assert result is not None
            # Two workers, a process above each, the child.
            assert wait_until(lambda: len(workers_processes()) == 4 + 5), processes()
            family = workers_processes() - before
            assert int(str(result["child"])) in family
        assert wait_until(lambda: not any(map(running, family)))

    @pytest.mark.parametrize(
        ("ending", "status"),
        [
            (signal.SIGKILL, -signal.SIGKILL),
            (signal.SIGTERM, -signal.SIGTERM),
            (signal.SIGINT, 130),
        ],
    )
    @pytest.mark.parametrize("behaviour", ["pause_in_c", "leave_a_child"])
    def test_killed_parent_leaves_nothing(
        self, behaviour: str, ending: signal.Signals, status: int
    ) -> None:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, behaviour],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "running\n"
            # Whose forks they are; a worker, the standby, a process above each; and the worker's
            # own child.
            most = 6 if behaviour == "leave_a_child" else 5
            wait_until(lambda: len(descendants_of(parent.pid)) >= most)
            time.sleep(0.3)
            family = descendants_of(parent.pid)
            if len(family) != most:
                parent.kill()
            assert len(family) == most, family
            parent.send_signal(ending)
            assert parent.wait(60) == status
        assert wait_until(lambda: not any(map(running, family))), [
            (pid, command_of(pid)) for pid in family if running(pid)
        ]

    def test_a_fork_server_that_was_killed_is_replaced(self, worker: Worker) -> None:
        echo(worker, 1)
        family = workers_processes()
        for each in fork_servers():
            os.kill(each, signal.SIGKILL)
        assert wait_until(lambda: not any(map(running, family)))
        worker.run({"do": "echo", "value": 2})  # a crash, or the first request of the next process
        echo(worker, 3)
        assert len(fork_servers()) == 1

    def test_pools_of_one_environment_share_a_fork_server(self) -> None:
        with make_pool() as pool, pool.lease() as worker:
            echo(worker, 1)
            before = fork_servers()
            with make_pool() as second, second.lease() as another:
                echo(another, 1)
                assert fork_servers() == before
        with make_pool(environment={"OTHER": "1"}) as pool, pool.lease() as another:
            echo(another, 1)
            assert len(fork_servers() - before) == 1

    def test_parent_that_forgets_to_close_leaves_nothing(self) -> None:
        parent = subprocess.run(
            [sys.executable, "-W", "error", "-c", FORGETFUL],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (parent.returncode, parent.stderr) == (0, "")
        family = [int(pid) for pid in parent.stdout.split()]
        assert len(family) == 1  # whose forks the processes are
        assert wait_until(lambda: not any(map(running, family)))


@on_linux
class TestLeft:
    def test_processes_are_named_with_whose_they_are(self) -> None:
        left = [
            {"do": "leave_a_child", "then": "return", "how": how} for how in ("child", "session")
        ]
        with make_pool(size=1) as pool:
            with pool.lease("one") as worker:
                for payload in (*left, left[0]):
                    worker.run(payload)
            with pool.lease("another") as worker:
                echo(worker, 1)
                worker.run({**left[1], "then": "exit"})
            with pool.lease("another") as worker:
                echo(worker, 1)
        assert [pool.left(name) for name in ("one", "another", None)] == [
            [Left("process", "sleep 600", 3)],
            [Left("process", "sleep 600", 1)],
            [],
        ]

    def test_what_a_case_uses_until_its_deadline_is_no_trace(self) -> None:
        with make_pool() as pool, pool.lease("one") as worker:
            for how in ("child", "group"):
                worker.run({"do": "leave_a_child", "then": "sleep", "how": how}, SHORT)
        assert pool.left("one") == []

    def test_helpers_are_no_trace(self) -> None:
        with make_pool() as pool, pool.lease("one") as worker:
            helper = worker.run({"do": "share_memory", "keep": False}).result
            assert helper is not None
            assert running(int(str(helper["tracker"])))
        assert pool.left("one") == []
        assert not running(int(str(helper["tracker"])))

    def test_shared_memory(self) -> None:
        with make_pool(size=2, standby=False) as pool, pool.lease("one") as worker:
            first = worker.run({"do": "share_memory", "keep": True}).result
            with pool.lease("another") as beside:
                second = beside.run({"do": "share_memory", "keep": True}).result
        assert first is not None
        assert second is not None
        mine, somebodys = (f"/dev/shm/{each['name']}" for each in (first, second))  # noqa: S108
        try:
            assert [each.name for each in pool.left("one")] == [mine]
            assert pool.left("another") == []
            assert [each.name for each in pool.left(None)] == [somebodys]
        finally:
            Path(mine).unlink()
            Path(somebodys).unlink()


class TestTemporaryFiles:
    def test_they_go_with_the_process(self, worker: Worker) -> None:
        worker.renew()
        first, second = (worker.run({"do": "make_temporary_files"}).result for _ in range(2))
        assert first is not None
        assert second is not None
        folder = Path(str(first["parent"]))
        assert folder == Path(str(second["parent"]))
        assert len(list(folder.iterdir())) == 2
        worker.run({"do": "kill_itself"})
        assert not folder.exists()

    def test_those_of_a_killed_supervisor_go_later(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        old, young, used = (tmp_path / f"{supervisor.SCRATCH}{name}" for name in "abc")
        for each in (old, young, used):
            each.mkdir()
            (each / "file").touch()
        for each in (old, used):
            os.utime(each, (1, 1))
        fd = os.open(used, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        spawning._remove_stale()
        os.close(fd)
        assert set(tmp_path.iterdir()) == {young, used}


class TestKilled:
    @pytest.mark.parametrize(("counts", "kind"), [((3, 3), KILLED), ((3, 4), KILLED_FOR_MEMORY)])
    def test_memory_is_named_where_the_kernel_says_so(
        self, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], kind: str
    ) -> None:
        now = [counts[0]]
        monkeypatch.setattr(process, "kills", lambda: now[0])
        with make_pool(standby=False) as pool, pool.lease() as worker:
            echo(worker, 1)
            now[0] = counts[1]
            assert worker.run({"do": "kill_itself"}).kind == kind

    @pytest.mark.parametrize(
        ("membership", "file", "text"),
        [
            ("0::/user/one\n", "user/one/memory.events", "oom 1\noom_kill 3\n"),
            ("0::/\n", "memory.events", "oom_kill 3\n"),
            ("4:memory:/one\n0::/\n", "memory/one/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ],
        ids=["version 2", "container", "version 1"],
    )
    def test_counts_of_cgroups(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, file: str, text: str
    ) -> None:
        here, place = tmp_path / "cgroup", tmp_path / "sys" / file
        place.parent.mkdir(parents=True)
        place.write_text(text, encoding="ascii")
        here.write_text(membership, encoding="ascii")
        monkeypatch.setattr(kernel_kills, "MEMBERSHIP", here)
        monkeypatch.setattr(kernel_kills, "CGROUPS", tmp_path / "sys")
        monkeypatch.setattr(kernel_kills, "_place", kernel_kills._place.__wrapped__)
        assert kernel_kills.kills() == 3


PARENT = """
import sys
from kernelproof.properties.isolation import kernel_kills, process, spawning, supervisor
from kernelproof.properties.isolation.leftovers import Left
from kernelproof.properties.isolation.outcome import KILLED, KILLED_FOR_MEMORY
from kernelproof.properties.isolation.workers import Deadlines, WorkerPool
with WorkerPool("isolation_handlers:misbehave", preload=()) as pool, pool.lease() as worker:
    worker.renew()
    worker.run({"do": "echo", "value": 1})
    print("running", flush=True)
    try:
        arguments = {"then": "sleep", "how": "session"} if sys.argv[1] == "leave_a_child" else {}
        worker.run({"do": sys.argv[1], **arguments}, Deadlines(run=600))
    except KeyboardInterrupt:
        sys.exit(130)
"""

FORGETFUL = """
import os
from pathlib import Path
from kernelproof.properties.isolation.workers import WorkerPool
pool = WorkerPool("isolation_handlers:misbehave", preload=())
lease = pool.lease()
worker = lease.__enter__()
worker.renew()
worker.run({"do": "echo", "value": 1})
for task in Path("/proc/self/task").iterdir():
    print(task.joinpath("children").read_text())
"""


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text(encoding="ascii").split()
    ]


def descendants_of(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [far for child in children for far in descendants_of(child)]


def workers_processes() -> set[int]:
    """The processes of this file's pools, not those of other files' fixtures."""
    return {far for each in fork_servers() for far in descendants_of(each)}


def children_of_supervisors() -> list[int]:
    """How many processes stand below each process above a worker."""
    return [
        len(descendants_of(above)) if running(above) else 0
        for each in fork_servers()
        for above in children_of(each)
    ]


def fork_servers() -> set[int]:
    """The processes whose forks this file's workers are: they import nothing beforehand."""
    return {each for each in children_of(os.getpid()) if '"preload": []' in command_of(each)}


def processes() -> list[str]:
    return [command_of(each)[-200:] for each in descendants_of(os.getpid())]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""


class TestSpeed:
    def test_round_trip(self, capsys: pytest.CaptureFixture[str]) -> None:
        with make_pool("isolation_handlers:empty") as pool, pool.lease() as worker:
            worker.run({})
            times = []
            for _ in range(1000):
                began = time.perf_counter()
                worker.run({})
                times.append(time.perf_counter() - began)
        with capsys.disabled():
            print(f"\nround trip, the fastest: {min(times) * 1e6:.0f} us")  # noqa: T201
        # The fastest is one that no other process came between; a pause or a poll slows all.
        assert min(times) <= 1e-3

    def test_standby_makes_a_respawn_cheap(self) -> None:
        """The process that takes over has imported torch before it is needed."""
        handler = "isolation_handlers:torch_threads"
        with make_pool(handler, preload=("torch",)) as pool, pool.lease() as worker:
            here = {"preloaded": True, "threads": 1, "omp": "1", "collects": True}
            assert worker.run({}).result == here
            assert pool._supply._standby is None  # most runs need none
            worker.renew()
            assert worker.run({}).status == "done"
            standby = pool._supply._standby
            assert standby is not None
            assert wait_until(lambda: bool(standby._poll.poll(0)))  # it says that it is ready
            worker.renew()
            assert worker._process is standby
            assert worker.run({}).status == "done"


def test_a_lease_prefers_who_has_run_the_owners_code_and_then_who_has_run_least() -> None:
    def run(owner: str) -> Worker:
        with workers.lease(owner) as worker:
            worker.run({"do": "echo", "value": 1, "implementation": owner})
        return worker

    with make_pool(size=2) as workers:
        a, b = run("a"), run("b")
        assert a is not b
        assert run("b") is b
        assert run("a") is a  # though the other one was given back last
        assert run("b") is b
        assert run("a") is a
