"""Ray without a cluster: what is said of an address, and where Ray or the cluster is absent."""

from __future__ import annotations

import socket
import sys

import pytest
from click import ClickException

from kernelproof.ci.cli import main
from kernelproof.ci.fleet.ray_machines import Node, compilers_each, connected


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


@pytest.mark.parametrize(
    ("running", "compilers"), [(1, 16), (2, 16), (3, 8), (5, 5), (24, 1), (30, 1)]
)
def test_the_units_that_run_on_a_machine_share_its_cores(running: int, compilers: int) -> None:
    nodes = [Node(name, "sm90", units=12, share=1 / 12, cores=16) for name in "ab"]
    assert compilers_each(nodes, running) == compilers


@pytest.mark.parametrize(
    "command", ["bump 0.6.13 0.7.2", "gate --baseline 0.6.13 --candidate 0.7.2"]
)
def test_a_comparison_on_a_cluster_is_refused_with_the_way_that_there_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--ray", "auto"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("Error: --ray does not go with a comparison of releases: compare on one")
    assert "`kernelproof merge`" in said
