"""Example databases: where runs that explore keep failing examples for one another.

Hypothesis keeps what it drew as a sequence of choices, under a key of the test. Here the key is
the law, the implementation and the chip. A run tries what was kept for any chip, and drops only
what was kept for its own: an example that fails on one generation of GPUs passes on the others, and
their runs must not make it forgotten.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from ...impl import Target
from ...impl.targets.capability import CHIPS
from ..findings.files import make_folder
from ..findings.redaction import masked

VARIABLE = "KERNELPROOF_EXAMPLES"
"""Environment variable with the places, where no option names them."""
GITHUB = "github:"
ARTIFACT = "kernelproof-examples"
"""Default name of the artifact."""
REDIS = ("redis://", "rediss://", "unix://")
CORPORA = (b".secondary", b".pareto")
"""Suffixes of the keys under which Hypothesis keeps more than a test's smallest failures."""
EVERY_CHIP = ("cpu", *map(str, CHIPS))


class ExamplesError(Exception):
    """An example database that cannot be opened; the message is one sentence."""


def shared_examples(places: str | None) -> str:
    """Return the places of an option, or else those of the environment."""
    return os.environ.get(VARIABLE, "") if places is None else places


def open_examples(places: str, folder: Path) -> ExampleDatabase:
    """Open the database of a run: its own folder, and whatever is shared.

    Args:
        places: separated by commas: a folder, ``github:OWNER/REPO`` or ``github:OWNER/REPO/NAME``
            (an artifact of GitHub Actions, only read), or the URL of a Redis server. None if empty.
        folder: the folder of this run, in which everything is kept.

    Raises:
        ExamplesError: a place is none of these, or cannot be reached.
    """
    own = Enduring(DirectoryBasedExampleDatabase(folder), str(folder))
    named = [place.strip() for place in places.split(",") if place.strip()]
    shared = [Enduring(_open(place, folder), masked(place)) for place in named]
    return MultiplexedDatabase(own, *shared) if shared else own


def _open(place: str, folder: Path) -> ExampleDatabase:
    if place.startswith(GITHUB):
        return _artifact(place, folder.with_name("github-artifacts"))
    if place.startswith(REDIS):
        return _redis(place)
    if "://" in place:
        message = f"{masked(place)}: is no folder, github:OWNER/REPO or Redis URL"
        raise ExamplesError(message)
    path = Path(place).expanduser()
    try:
        make_folder(path)
    except OSError as error:
        message = f"{place}: cannot be made ({error.strerror})"
        raise ExamplesError(message) from error
    return DirectoryBasedExampleDatabase(path)


def _artifact(place: str, folder: Path) -> ExampleDatabase:
    matched = re.fullmatch(r"github:([^/]+)/([^/]+)(?:/([^/]+))?", place)
    if matched is None:
        message = f"{place}: should be github:OWNER/REPO or github:OWNER/REPO/ARTIFACT"
        raise ExamplesError(message)
    owner, repository, name = matched.groups(default=ARTIFACT)
    downloads = folder / owner / repository / name  # Hypothesis goes by the last of these alone
    artifact = ReadOnlyDatabase(GitHubArtifactDatabase(owner, repository, name, path=downloads))
    # Fetched now, by one thread. Hypothesis warns where there is none yet, or no GITHUB_TOKEN.
    list(artifact.fetch(b""))
    return artifact


def _redis(place: str) -> ExampleDatabase:
    shown = masked(place)
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis, RedisError
    except ModuleNotFoundError as error:
        message = f"{shown}: needs the package redis (pip install redis)"
        raise ExamplesError(message) from error
    try:
        client = Redis.from_url(place, socket_timeout=10.0)
    except ValueError as error:  # its text may quote a part of the password
        message = f"{shown}: is no URL of a Redis server"
        raise ExamplesError(message) from error
    try:
        client.ping()
    except RedisError as error:
        why = str(error).partition("\n")[0].rstrip(".")
        message = f"{shown}: cannot be reached ({type(error).__name__}: {why})"
        raise ExamplesError(message) from error
    return RedisExampleDatabase(client, key_prefix=b"kernelproof:")


class Enduring(ExampleDatabase):
    """Wrapper that disables its database after the first error.

    Hours of search are worth more than what it would keep. Each place is given up by itself: what a
    server cannot keep is still in the run's own folder.
    """

    def __init__(self, database: ExampleDatabase, place: str) -> None:
        super().__init__()
        self._database, self._place, self._lost = database, place, False

    def fetch(self, key: bytes) -> Iterator[bytes]:
        """Return what is kept under a key, as long as there is a database to ask."""
        if self._lost:
            return
        try:
            found = list(self._database.fetch(key))
        except Exception as error:  # noqa: BLE001  a server's errors are of its own kinds
            self._lose(error)
            return
        yield from found

    def save(self, key: bytes, value: bytes) -> None:
        """Keep a value."""
        self._try(self._database.save, key, value)

    def delete(self, key: bytes, value: bytes) -> None:
        """Drop a value."""
        self._try(self._database.delete, key, value)

    def _try(self, do: Callable[[bytes, bytes], None], key: bytes, value: bytes) -> None:
        if self._lost:
            return
        try:
            do(key, value)
        except Exception as error:  # noqa: BLE001  see fetch
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._lost = True
        why = f"{self._place} ({type(error).__name__}: {error})"
        sys.stderr.write(f"kernelproof: an example database failed, going on without: {why}\n")


@dataclass(frozen=True)
class Examples:
    """The examples of a run on one chip.

    Attributes:
        database: where they are kept.
        chip: the chip of this machine: ``"cpu"``, or the compute capability times ten, such as
            ``"90"``.
        part: the part of the space of problems that is searched, where not all of it is at once:
            elsewhere the same choices are another problem.
    """

    database: ExampleDatabase
    chip: str
    part: str = ""

    def of(self, law: str, implementation: str) -> ExampleDatabase:
        """Return the database of one law on one implementation."""
        return _Shelf(self, f"{law}|{implementation}|{self.part}")


def examples_on(database: ExampleDatabase | None, target: Target) -> Examples | None:
    """Return the examples of a run on a machine; None where the run keeps none."""
    return None if database is None else Examples(database, str(target.sm or "cpu"))


class _Shelf(ExampleDatabase):
    """The part of a database that belongs to one law on one implementation."""

    def __init__(self, examples: Examples, name: str) -> None:
        super().__init__()
        self._examples, self._name = examples, name

    def fetch(self, key: bytes) -> Iterator[bytes]:
        """Return what was kept for any chip, this one's first."""
        here = self._examples.chip
        seen: set[bytes] = set()
        # This chip's come first: an example that failed here fails again most likely, and a search
        # shows only a few of what was kept.
        for chip in dict.fromkeys((here, *EVERY_CHIP)):
            found = list(self._examples.database.fetch(self._key(key, chip)))
            yield from (value for value in found if value not in seen)
            seen.update(found)

    def save(self, key: bytes, value: bytes) -> None:
        """Keep an example for this chip."""
        self._examples.database.save(self._key(key, self._examples.chip), value)

    def delete(self, key: bytes, value: bytes) -> None:
        """Drop an example, where it was kept for this chip."""
        self._examples.database.delete(self._key(key, self._examples.chip), value)

    def _key(self, key: bytes, chip: str) -> bytes:
        """Return the key under which something is kept, whatever Hypothesis calls the test."""
        name = hashlib.sha256(f"1|{self._name}|{chip}".encode()).digest()[:16]
        corpus = next((each for each in CORPORA if key.endswith(each)), b"")
        return name + corpus
