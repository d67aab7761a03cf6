"""A cluster of Ray on this machine: its report, and what is said where there is none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click import ClickException

from kernelproof.ci.fleet.ray_machines import connected

if TYPE_CHECKING:
    from collections.abc import Iterator

SUBJECTS = Path(__file__).parents[2] / "properties" / "engine_subjects.py"
STORE = 80 << 20
"""Bytes of a node's object store, the least that Ray takes."""


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClickException, match=r"pip install 'kernelproof\[ray\]'") as refused:
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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster in a process of its own: Ray leaves threads and warnings behind."""
    pytest.importorskip("ray", reason="Ray is not installed")
    code = (
        "import sys\nfrom ray.cluster_utils import Cluster\n"
        f"head = dict(num_cpus=1, object_store_memory={STORE}, include_dashboard=False)\n"
        "c = Cluster(initialize_head=True, head_node_args={**head, 'resources': {'sm90': 1}})\n"
        f"c.add_node(num_cpus=1, object_store_memory={STORE}, resources={{'sm100': 1}})\n"
        "print('at', c.address, flush=True)\nsys.stdin.read()\nc.shutdown()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        yield next(line.split()[1] for line in cluster.stdout if line.startswith("at "))
        cluster.communicate("")


@pytest.mark.xdist_group("ray")
def test_each_chip_of_a_cluster_has_its_column(address: str, tmp_path: Path) -> None:
    names = [f"{SUBJECTS}:honest_attention", f"{SUBJECTS}:wrong_from_five"]
    ended = subprocess.run(
        [sys.executable, "-m", "kernelproof", "check", *names, "--law", "parity", "--profile",
         "quick", "--ray", address, "--json", "out.json"],
        check=False, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert sorted(report["chips"]) == ["sm100", "sm90"]
    for chip in report["chips"].values():
        assert [each["status"] for each in chip["implementations"]] == ["PASS", "FINDINGS"]
    assert {finding["law"] for finding in report["findings"]} == {"parity"}
