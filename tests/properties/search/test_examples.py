"""Example databases: what one run finds, the next one tries first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    InMemoryExampleDatabase,
    MultiplexedDatabase,
)

from kernelproof.ci.cli import main
from kernelproof.impl import Target
from kernelproof.properties.findings.redaction import masked
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.examples import (
    VARIABLE,
    Enduring,
    Examples,
    ExamplesError,
    examples_on,
    open_examples,
    shared_examples,
)
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import Profile

SUBJECT = f"{Path(__file__).parents[1] / 'engine_subjects.py'}:wrong_from_five"
TINY = Profile("tiny", 30, 20_000, shrink_seconds=0.5, seconds=60.0, explore=True)


class BrokenDatabase(InMemoryExampleDatabase):
    """One whose server is gone."""

    def fetch(self, key: bytes) -> Any:  # noqa: ANN401
        raise ConnectionError(key)

    def save(self, key: bytes, value: bytes) -> None:
        raise ConnectionError(key, value)


def judged(database: ExampleDatabase, *, seed: int) -> tuple[int, bool]:
    """Search with one seed; give how many problems it took, and whether it found the fault."""
    plan = Plan(
        [SUBJECT], TINY, laws=["parity"], jobs=1, seed=seed, examples=database, confirm=False
    )
    (report,) = Run(plan).execute().implementations
    assert not report.error
    (law,) = report.laws
    return law.judged, law.finding is not None


def test_a_failure_that_one_run_keeps_is_the_first_that_the_next_one_tries(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    _, found = judged(open_examples(str(shared), tmp_path / "one"), seed=1)
    assert found
    assert list(shared.rglob("*"))

    tried: list[bytes] = []

    class Noting(DirectoryBasedExampleDatabase):
        def fetch(self, key: bytes) -> Any:  # noqa: ANN401
            for value in super().fetch(key):
                tried.append(value)
                yield value

    database = MultiplexedDatabase(DirectoryBasedExampleDatabase(tmp_path / "two"), Noting(shared))
    _, found = judged(database, seed=2)
    assert found
    assert tried


def search(database: ExampleDatabase, wrong: Callable[[int], bool]) -> list[int]:
    """Look for a number that is wrong; give what was tried."""
    tried: list[int] = []

    @hypothesis.settings(
        database=database,
        derandomize=False,
        max_examples=30,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
    )  # after the seed, which takes the database away from the settings before it
    @hypothesis.seed(0)
    @hypothesis.given(st.integers(0, 10**9))
    def holds(number: int) -> None:
        tried.append(number)
        assert not wrong(number)

    with suppress(AssertionError):
        holds()
    return tried


def test_a_run_on_another_chip_tries_an_example_and_does_not_make_it_forgotten() -> None:
    memory = InMemoryExampleDatabase()
    here, there = Examples(memory, "103"), Examples(memory, "90")
    (smallest,) = set(search(here.of("parity", "mine"), lambda number: number > 999)[-1:])
    assert smallest == 1000

    assert search(there.of("parity", "mine"), lambda _: False)[0] == 1000
    assert search(here.of("parity", "mine"), lambda _: False)[0] == 1000
    # It passes now where it was found: dropped.
    assert 1000 not in search(here.of("parity", "mine"), lambda _: False)


@pytest.mark.parametrize(("law", "name", "part"), [
    ("soak", "mine", ""), ("parity", "yours", ""), ("parity", "mine", "bfloat16-128"),
])  # fmt: skip
def test_laws_implementations_and_parts_keep_apart(law: str, name: str, part: str) -> None:
    memory = InMemoryExampleDatabase()
    Examples(memory, "cpu").of("parity", "mine").save(b"key", b"value")
    assert list(Examples(memory, "cpu").of("parity", "mine").fetch(b"other key")) == [b"value"]
    assert list(Examples(memory, "cpu").of("parity", "mine").fetch(b"key.secondary")) == []
    assert list(Examples(memory, "cpu", part).of(law, name).fetch(b"key")) == []


def test_a_database_that_fails_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = DirectoryBasedExampleDatabase(tmp_path)
    examples = Examples(MultiplexedDatabase(own, Enduring(BrokenDatabase(), "there")), "cpu")
    tried = search(examples.of("parity", "mine"), lambda number: number > 999)
    assert tried[-1] == 1000
    assert search(Examples(own, "cpu").of("parity", "mine"), lambda _: False)[0] == 1000
    search(examples.of("soak", "mine"), lambda _: False)
    told = capsys.readouterr().err
    assert told.count("an example database failed, going on without: there (Connection") == 1


def test_a_run_keeps_its_own_folder_beside_what_is_shared(tmp_path: Path) -> None:
    database = open_examples(f"{tmp_path / 'a'}, {tmp_path / 'b'}", tmp_path / "own")
    database.save(b"key", b"value")
    for name in ("own", "a", "b"):
        assert list(DirectoryBasedExampleDatabase(tmp_path / name).fetch(b"key")) == [b"value"]
    alone = open_examples("", tmp_path / "own")
    assert list(alone.fetch(b"key")) == [b"value"]
    assert examples_on(None, Target()) is None
    on_hopper = examples_on(alone, Target(sm=90))
    assert on_hopper is not None
    assert on_hopper.chip == "90"


@pytest.mark.parametrize(("places", "told"), [
    ("github:kernels", "github:OWNER/REPO"),
    ("github:me/mine/name/more", "github:OWNER/REPO"),
    ("ftp://host/examples", "is no folder, github:OWNER/REPO or Redis URL"),
    ("{file}/examples", "cannot be made"),
    ("redis://127.0.0.1:1/0", "redis"),
    ("redis://127.0.0.1:port/0", "redis"),
])  # fmt: skip
def test_a_place_that_cannot_be_opened(places: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = places.format(file=tmp_path / "file")
    with pytest.raises(ExamplesError) as refused:
        open_examples(place, tmp_path / "own")
    assert str(refused.value).startswith(f"{place}: ")
    assert told in str(refused.value)


def test_an_artifact_of_github_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    DirectoryBasedExampleDatabase(tmp_path / "uploaded").save(b"key", b"value")
    # As if it had been downloaded just now.
    downloads = tmp_path / "github-artifacts" / "me" / "kernels" / "nightly"
    name = datetime.now(timezone.utc).isoformat().replace(":", "_")
    shutil.make_archive(str(downloads / name), "zip", tmp_path / "uploaded")

    database = open_examples("github:me/kernels/nightly", tmp_path / "own")
    assert list(database.fetch(b"key")) == [b"value"]
    database.save(b"key", b"another")
    database.delete(b"key", b"value")
    assert sorted(database.fetch(b"key")) == [b"another", b"value"]


def test_the_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "there")
    assert shared_examples(None) == "there"
    assert shared_examples("here") == "here"
    assert shared_examples("") == ""


@pytest.mark.parametrize(("words", "told"), [
    (["--profile", "quick", "--examples", "x"], "--examples goes with --profile nightly"),
    (["--profile", "nightly", "--examples", "ftp://x"], "--examples: ftp://x: is no folder"),
    (["--profile", "nightly", "--examples", "redis://me:pa@s@h:x/0"], "redis://me:***@h:x/0: "),
])  # fmt: skip
def test_wrong_usage(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    where = ["--cases", str(tmp_path), "--json", str(path)]
    assert main(["check", "torch-sdpa-paged", *words, *where]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert told in json.loads(path.read_text())["message"]
    assert "pa@s" not in path.read_text()


@pytest.mark.parametrize(("text", "shown"), [
    ("redis://host:6379/0", "redis://host:6379/0"),
    ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
    ("rediss://me:a/b@c@host,redis://me:d@x", "rediss://me:***@host,redis://me:***@x"),
    ("redis://me@corp:secret@host:6379/0", "redis://me@corp:***@host:6379/0"),
    ("redis://me:a,b@host/0", "redis://me:***@host/0"),
    ("unix:///socket?db=1&password=secret&x=1", "unix:///socket?db=1&password=***&x=1"),
    ("github:me/kernels,/shared", "github:me/kernels,/shared"),
])  # fmt: skip
def test_a_password_is_shown_to_nobody(text: str, shown: str) -> None:
    assert masked(text) == shown
