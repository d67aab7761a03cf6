"""Processes that share a GPU: by a daemon that tests stand in for, without a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproof.properties.isolation.mps import CONTROL, MOST_FAULTS, PIPES, SharedGpu, share_gpu
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool

HERE = Path(__file__).parents[1]
DAEMON = f"""\
#!{sys.executable}
import os, pathlib, sys
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
log = pathlib.Path(os.environ["MPS_TEST_LOG"])
with log.open("a") as file:
    if sys.argv[1:] == ["-d"]:
        print("starts", folder, os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
        sys.exit("MPS_TEST_FAILS" in os.environ)
    print("reads", folder, sys.stdin.read().strip(), file=file)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the daemons have noted, which a program of NVIDIA's name stands in for."""
    program = tmp_path / CONTROL
    program.write_text(DAEMON, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MPS_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv(PIPES, raising=False)
    return tmp_path / "log"


@pytest.fixture
def gpu(log: Path) -> Iterator[SharedGpu]:
    assert not log.exists()
    with SharedGpu() as gpu:
        yield gpu


def variable(worker: Worker) -> object:
    """The folder of the daemon that a worker's process knows."""
    outcome = worker.run({"do": "variable", "name": PIPES})
    assert outcome.result is not None, outcome
    return outcome.result["value"]


def make_pool(gpu: SharedGpu, size: int = 1) -> WorkerPool:
    path = [str(HERE), *sys.path]
    handler = "isolation_handlers:misbehave"
    return WorkerPool(handler, size=size, sys_path=path, preload=(), gpu=gpu)


def test_only_several_processes_on_a_gpu_share(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_gpu("cpu", 12) is None
    assert share_gpu("cuda", 1) is None
    assert not log.exists()
    gpu = share_gpu("cuda", 2)
    assert gpu is not None
    client = gpu.client()
    assert client is not None
    folder = client.environment[PIPES]
    assert Path(folder).is_dir()
    gpu.close()
    told = log.read_text(encoding="utf-8")
    assert f"reads {folder} quit" in told
    assert not Path(folder).exists()
    monkeypatch.setenv(PIPES, folder)  # whoever has a daemon shares without ours
    assert share_gpu("cuda", 2) is None
    monkeypatch.delenv(PIPES)
    monkeypatch.setenv("PATH", folder)  # without the program
    assert share_gpu("cuda", 2) is None


def test_a_daemon_that_does_not_start_is_no_error(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_TEST_FAILS", "1")
    assert share_gpu("cuda", 2) is None
    folder = log.read_text(encoding="utf-8").split()[1]
    assert not Path(folder).exists()


def test_a_daemon_ends_with_a_killed_run(log: Path) -> None:
    program = """
import os, signal
from kernelproof.properties.isolation.mps import share_gpu
gpu = share_gpu("cuda", 2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    until = time.monotonic() + 30
    while "reads" not in (told := log.read_text(encoding="utf-8")):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "quit" in told


def test_processes_share_from_their_first_request_on(gpu: SharedGpu) -> None:
    client = gpu.client()
    assert client is not None
    with make_pool(gpu) as pool, pool.lease() as worker:
        assert worker.shared_with_others("")
        assert variable(worker) == client.environment[PIPES]
        assert worker.run({"do": "echo", "value": 1}).shared
        worker.renew()
        assert not worker.shared_with_others("")
        assert variable(worker) is None
        assert not worker.run({"do": "echo", "value": 1}).shared


def test_a_worker_shares_again_once_it_is_lent_again(gpu: SharedGpu) -> None:
    with make_pool(gpu) as pool:
        with pool.lease("mine") as worker:
            worker.renew()
            assert variable(worker) is None
        with pool.lease("mine") as worker:
            assert variable(worker) is not None


def test_a_process_that_shares_nothing_is_kept_for_its_owner_only(gpu: SharedGpu) -> None:
    with make_pool(gpu) as pool:
        with pool.lease("mine") as worker:
            worker.renew(keep=True)
            assert variable(worker) is None
        with pool.lease("mine") as worker:
            assert variable(worker) is None
            assert pool.respawns == 1  # the same process
        with pool.lease("other") as worker:
            assert variable(worker) is not None
        with pool.lease("mine") as worker:
            assert variable(worker) is not None


def test_a_fault_ends_what_all_share(gpu: SharedGpu) -> None:
    first = gpu.client()
    with make_pool(gpu, size=2) as pool, pool.lease() as faulty, pool.lease() as other:
        assert variable(other) == variable(faulty)
        outcome = faulty.run({"do": "end"})
        assert (outcome.faulted, outcome.shared) == (True, True)
        assert variable(faulty) is None  # judged again by itself
        assert variable(other) is None  # its context has ended
        second = gpu.client()
        assert first is not None
        assert second is not None
        assert first.environment != second.environment
        assert (gpu.serves(first), gpu.serves(second)) == (False, True)
        gpu.note_fault(first)  # of the same fault, seen by another
        assert gpu.faults == 1
    assert "a fault ended the work of all" in gpu.text(2)


@pytest.mark.parametrize(("do", "status"), [("abort", "crash"), ("sleep", "hang")])
def test_a_death_may_end_the_work_of_all(gpu: SharedGpu, do: str, status: str) -> None:
    with make_pool(gpu) as pool, pool.lease() as worker:
        outcome = worker.run({"do": do}, Deadlines(run=0.4))
        assert (outcome.status, outcome.faulted, gpu.faults) == (status, True, 1)


def test_after_several_faults_processes_have_the_gpu_in_turns(gpu: SharedGpu, log: Path) -> None:
    for number in range(MOST_FAULTS):
        client = gpu.client()
        assert client is not None, number
        gpu.note_fault(client)
    assert gpu.client() is None
    assert "in turns" in gpu.text(2)
    gpu.close()
    told = log.read_text(encoding="utf-8")
    assert told.count("reads") == MOST_FAULTS
    assert "None" in told  # daemons see all devices, their clients choose


COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("result", [0, 805])  # CUDA_ERROR_MPS_CONNECTION_FAILED
def test_a_daemon_that_serves_no_client_is_not_used(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    source = tmp_path / "cuda.c"
    source.write_text(
        "#include <stdlib.h>\n#include <string.h>\n"
        f"int cuInit(unsigned flags) {{ return {result}; }}\n"
        "int cuDevicePrimaryCtxRetain(void **context, int device) {\n"
        '    return strcmp(getenv("CUDA_VISIBLE_DEVICES"), "1");  // those of the run\n'
        "}\n",
        encoding="ascii",
    )
    library = str(tmp_path / "libcuda.so.1")
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    gpu = share_gpu("cuda", 2)
    assert (gpu is not None) == (result == 0)
    if gpu is not None:
        gpu.close()
    assert "quit" in log.read_text(encoding="utf-8")
