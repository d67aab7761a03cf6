"""A cluster of Ray on this machine, whose nodes a test kills, and runs of the command on it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SUBJECTS = Path(__file__).parent / "cluster_subjects.py"
CODE = """
import json, sys
from ray.cluster_utils import Cluster

nodes, cluster = {}, Cluster()
for name, chip, environment in json.loads(sys.argv[2]):
    nodes[name] = cluster.add_node(
        num_cpus=1, object_store_memory=80 << 20, include_dashboard=False,
        resources={chip: 1}, env_vars={
            "KERNELPROOF_TEST_NODE": name, "KERNELPROOF_TEST_ORDERS": sys.argv[1], **environment
        },
        **({} if nodes else {"_system_config": {"health_check_period_ms": 1000}}),
    )
print("at", cluster.address, *(node.node_id for node in nodes.values()), flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes[line.strip()], allow_graceful=False)
cluster.shutdown()
"""
"""Its nodes have one core each, and the least object store that Ray takes."""


@dataclass(frozen=True)
class Cluster:
    """A cluster.

    Attributes:
        address: of its head.
        ids: Ray's names of its nodes, by theirs.
        orders: folder of what `cluster_subjects` does; a file names the node that it is for.
        process: that started the nodes, and kills those whose names it reads.
    """

    address: str
    ids: dict[str, str]
    orders: Path
    process: subprocess.Popen[str]

    def kill(self, node: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{node}\n")
        self.process.stdin.flush()

    def check(self, folder: Path, *words: str, ray: bool = True) -> subprocess.Popen[str]:
        """Begin `kernelproof check`, which writes out.json into a folder, on the cluster or not."""
        command = [sys.executable, "-m", "kernelproof", "check", "--profile", "quick"]
        where = ["--ray", self.address] if ray else []
        return subprocess.Popen(
            [*command, *words, *where, "--json", "out.json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end_of(self, run: subprocess.Popen[str], folder: Path) -> tuple[int, dict[str, Any], str]:
        """Wait for a run, and return its exit code, its report and what it wrote to stderr."""
        _, said = run.communicate(timeout=300)
        written = folder / "out.json"
        return run.returncode, json.loads(written.read_text()) if written.exists() else {}, said

    def hung(self, run: subprocess.Popen[str]) -> list[int]:
        """Wait until a call hangs as `cluster_subjects` was ordered, and return its processes."""
        path, deadline = self.orders / "hung", time.monotonic() + 120
        while not path.exists() or not path.read_text():
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, "no call hangs"
            time.sleep(0.1)
        return [int(line) for line in path.read_text().split()]


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Start the nodes that a module names, in a process: Ray leaves threads and warnings behind."""
    pytest.importorskip("ray", reason="Ray is not installed")
    nodes, orders = request.module.NODES, tmp_path_factory.mktemp("orders")
    with subprocess.Popen(
        [sys.executable, "-c", CODE, orders, json.dumps(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("at "))
        _, address, *ids = line.split()
        names = [name for name, *_ in nodes]
        yield Cluster(address, dict(zip(names, ids, strict=True)), orders, process)
        process.communicate("")
