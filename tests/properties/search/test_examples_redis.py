"""Example databases on a live Redis server: what one machine finds, another one tries first."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.examples import Examples, ExamplesError, open_examples
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import Profile

redis = pytest.importorskip("redis", reason="the package redis is not installed")
SERVER = shutil.which("redis-server")
if SERVER is None:
    pytest.skip("redis-server is not installed", allow_module_level=True)

SUBJECT = f"{Path(__file__).parents[1] / 'engine_subjects.py'}:wrong_from_five"
TINY = Profile("tiny", 30, 20_000, shrink_seconds=0.5, seconds=60.0, explore=True)
PASSWORD = "of-the-night"  # noqa: S105  of a server that lives as long as a test


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def keys(self) -> int:
        return len(redis.Redis.from_url(self.url).keys("kernelproof:*"))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert SERVER is not None
    words = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    words += ["--save", "", "--appendonly", "no", "--dir", str(tmp_path)]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen([SERVER, *words], stdout=log, stderr=log)
    started = Server(f"redis://:{PASSWORD}@127.0.0.1:{port}/0", process)
    try:
        for _ in range(200):
            with suppress(redis.RedisError):
                redis.Redis.from_url(started.url).ping()
                break
            time.sleep(0.05)
        yield started
    finally:
        started.stop()


def judged(database: ExampleDatabase, *, seed: int) -> int:
    """Search with one seed until the fault is found; give how many problems it took."""
    plan = Plan(
        [SUBJECT], TINY, laws=["parity"], jobs=1, seed=seed, examples=database, confirm=False
    )
    (report,) = Run(plan).execute().implementations
    (law,) = report.laws
    assert law.finding is not None
    return law.judged


def test_what_one_machine_finds_another_one_tries_first(server: Server, tmp_path: Path) -> None:
    judged(open_examples(server.url, tmp_path / "one"), seed=1)
    assert server.keys()
    with_it = judged(open_examples(server.url, tmp_path / "two"), seed=2)
    alone = judged(open_examples("", tmp_path / "three"), seed=2)
    assert with_it < alone / 2


def test_a_server_that_goes_away_costs_the_run_nothing_of_its_own(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = Examples(open_examples(server.url, tmp_path / "own"), "cpu").of("parity", "mine")
    examples.save(b"key", b"before")
    server.stop()
    examples.save(b"key", b"after")
    assert sorted(examples.fetch(b"key")) == [b"after", b"before"]
    own = Examples(DirectoryBasedExampleDatabase(tmp_path / "own"), "cpu").of("parity", "mine")
    assert sorted(own.fetch(b"key")) == [b"after", b"before"]
    told = capsys.readouterr().err
    assert told.count("an example database failed, going on without: redis://:***@127.0.0.1:") == 1
    assert PASSWORD not in told


@pytest.mark.parametrize(("change", "told"), [
    ((PASSWORD, "of-the-day"), "cannot be reached (AuthenticationError: "),
    (("/0", "/99"), "cannot be reached (ResponseError: "),
])  # fmt: skip
def test_a_server_that_refuses(
    change: tuple[str, str], told: str, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(ExamplesError) as refused:
        open_examples(server.url.replace(*change), tmp_path / "own")
    assert told in str(refused.value)
    assert "of-the-" not in str(refused.value)
