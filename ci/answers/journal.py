"""What a run has asked and was answered, kept as it comes, so that a killed one can go on.

Everything that a run learns is the answer to a question that can be written down: what a release
declares, what a worker makes of a problem, what a law finds. What is asked next follows from the
answers only. So a run that is started again with the answers of the one before it asks the same
questions, gets the same answers at once, and goes on where the other one stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from ...impl.targets.data_files import check_regular, read_bytes
from ...impl.targets.schemas import converted
from ...properties.findings.files import dumps, make_folder
from ..console.errors import MachineError, UsageRefusedError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
Tell = Callable[[str], object]
"""Receives a line for people."""
FAMILY = "kernelproof/journal/"
SCHEMA = f"{FAMILY}1"
BEGINNING = json.dumps({"schema": FAMILY})[:-2].encode()
"""Beginning of the first line of a journal."""
ASIDE = ".old"
MOST_BYTES = 256 << 20
"""Largest journal that is gone on from, which is held in memory: 256 MiB."""
LONGEST_HEAD = 1 << 20
"""Bytes of the first line, at most."""


class JournalError(UsageRefusedError):
    """A journal that cannot be used; the message says why."""


class Head(msgspec.Struct, frozen=True):
    """The first line: what the answers are about."""

    schema: str
    identity: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """Each line after it; ``digest`` is of the question and the answer."""

    question: str
    answer: Any
    digest: str


class Asking(Protocol):
    """The end of a run, after which nothing is asked any more."""

    def refuse(self) -> None:
        """Raise an error where no new question may be asked."""

    def check(self) -> None:
        """Raise an error where the run has ended meanwhile: what was asked has no answer."""


class Journal:
    """Answers by question, in a file with a line each; may be used from several threads.

    The file is this process's until ``close``: another run that names it is refused.

    Args:
        path: the path of the file; nothing is kept if None.
        ending: the ending after which no question is asked that is not answered here.
        flag: the option that names the file or its folder.

    Raises:
        JournalError: the file cannot be opened, is none of a run, or is in use.
    """

    def __init__(
        self, path: Path | None, ending: Asking | None = None, *, flag: str = "--journal"
    ) -> None:
        self._ending, self._flag = ending, flag
        self.answered = self.remembered = 0
        self._answers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._file: int | None = None
        self._started = False
        self._path = path or Path()
        if path is None:
            return
        with self._used():
            make_folder(path.parent)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with self._used():
                check_regular(self._file)
                self._own(self._file)
                self._refuse_other_files(path)
        except JournalError:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def start(
        self, identity: Mapping[str, Any], *, resume: bool = False, tell: Tell = lambda _: None
    ) -> None:
        """Begin to keep answers; before that, none is.

        Args:
            identity: what they are about; those about something else are refused.
            resume: go on with the answers in the file, rather than start afresh. These are kept
                in a file beside it, whose name ends in ``.old``.
            tell: called with a line where there is nothing to go on from, and where answers are
                put aside.

        Raises:
            JournalError: the file cannot be read or written, or is about something else.
        """
        if self._file is None:
            return
        head = json.loads(dumps({"schema": SCHEMA, "identity": identity}))
        with self._used():
            data = read_bytes(self._path, self._refusal, MOST_BYTES)
            whole = self._read(data, head) if resume else 0
            self._tell_start(data, whole=whole, resume=resume, tell=tell)
            # A line that was cut off by the end of the process is written again.
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
        self._started = True
        if not whole:
            self._write(head)

    def ask(self, question: Mapping[str, Any], answer: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return the answer to a question: the one that is known, or else a new one, which is kept.

        Args:
            question: the question in JSON.
            answer: finds it; what it gives is turned into JSON and back.

        Raises:
            EndedError: there is no answer, and the comparison has ended.
        """
        key = _key(question)
        with self._lock:
            if key in self._answers:
                self.remembered += 1
                return self._answers[key]
        if self._ending is not None:
            self._ending.refuse()
        try:
            found = json.loads(json.dumps(answer()))
        finally:
            if self._ending is not None:
                self._ending.check()
        with self._lock:
            self._answers[key] = found
            self._keep(key, found)
        return found

    def recall(self, question: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """Return what an answer reads as that the run before has kept; None where it has not.

        Raises:
            JournalError: it does not read as what the question asks for.
        """
        key = _key(question)
        if key not in self._answers:
            return None
        self.remembered += 1
        try:
            return read(self._answers[key])
        except (KeyError, TypeError, ValueError) as error:
            message = f"{self._path}: holds an answer that this Kernelproof does not read"
            raise self._refusal(message) from error

    def require(self, name: str, value: Any) -> None:  # noqa: ANN401  JSON
        """Keep what answers are about that is known after the start, as ``identity`` is.

        Raises:
            JournalError: the answers of the run before are about something else.
        """
        self._refuse_another(name, self.ask({"about": name}, lambda: value), value)

    def keep(self, question: Mapping[str, Any], answer: Any) -> None:  # noqa: ANN401  JSON
        """Write an answer that came without ``ask``, for a later run."""
        with self._lock:
            self._keep(_key(question), answer)

    def keep_or_stop(
        self,
        question: Mapping[str, Any],
        answer: Any,  # noqa: ANN401  JSON
        tell: Tell,
    ) -> None:
        """Keep an answer; where that fails, such as on a full disk, say so and keep none from then.

        It costs the run no result.
        """
        try:
            self.keep(question, answer)
        except MachineError as error:
            tell(error.message)
            self._started = False

    def follow(self, *, resume: bool, tell: Tell = lambda _: None) -> bytes:
        """Begin to hold the journal of another machine instead, and return what it goes on from.

        Raises:
            JournalError: the file cannot be read or written.
        """
        assert self._file is not None  # noqa: S101  a journal with a path
        with self._used():
            data = read_bytes(self._path, self._refusal, MOST_BYTES)
            known = data[: data.rfind(b"\n") + 1] if resume else b""
            self._tell_start(data, whole=len(known), resume=resume, tell=tell)
            os.ftruncate(self._file, len(known))
        return known

    def copy(self, offset: int, data: bytes) -> None:
        """Write a part of the journal that is followed at its place, and drop what came after it.

        A part whose predecessor did not arrive is dropped: what is there stays a journal.

        Raises:
            JournalError: the file cannot be written.
        """
        assert self._file is not None  # noqa: S101  a journal with a path
        with self._used():
            if offset <= os.fstat(self._file).st_size:
                os.ftruncate(self._file, offset)
                os.pwrite(self._file, data, offset)

    def move(self, path: Path) -> None:
        """Move the file of a run that has reached its end, for another that is asked the same."""
        if self._file is not None and self._started:
            self._path.replace(path)
            self._started = False

    def remove(self) -> None:
        """Remove the file of a run that has reached its end: there is nothing to go on with."""
        if self._file is not None and self._started:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; it stays."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _keep(self, key: str, answer: Any) -> None:  # noqa: ANN401  JSON
        self.answered += 1
        self._write({"question": key, "answer": answer, "digest": _digest(key, answer)})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None or not self._started:
            return
        rest = memoryview(json.dumps(line).encode() + b"\n")
        whole = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            while rest:  # a write may take a part of it
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with suppress(OSError):  # another thread's line must not follow the half of this one
                os.ftruncate(self._file, whole)
                os.lseek(self._file, whole, os.SEEK_SET)
            message = f"{self._flag} {self._path}: cannot be written ({error.strerror})"
            raise MachineError(message) from error

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self._flag} {self._path}: cannot be used ({error.strerror})"
            raise JournalError(message) from error

    def _own(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = (
                f"{self._flag} {self._path}: another run is writing it; wait for its end, or name "
                "another one"
            )
            raise JournalError(message) from error
        except OSError:  # a file system that knows no locks
            pass

    def _tell_start(self, data: bytes, *, whole: int, resume: bool, tell: Tell) -> None:
        """Tell of a start without answers; put those aside that are not gone on from."""
        if resume and not whole:
            tell(f"--resume: there is no journal at {self._path} yet; starting afresh")
        elif not resume and data.count(b"\n") > 1:
            tell(f"the answers of an earlier run are kept in {self._put_aside(data)}")

    def _put_aside(self, data: bytes) -> Path:
        aside = self._path.with_name(f"{self._path.name}{ASIDE}")
        if aside.exists():
            self._refuse_other_files(aside)
        aside.write_bytes(data)
        return aside

    def _read(self, data: bytes, head: Mapping[str, Any]) -> int:
        """Read what was kept, and return the length of what is whole.

        Only the last line may not be: its process ended while it wrote it.
        """
        lines = data.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            return 0
        self._compare(self._parsed(lines[0], Head, f"{self._path}: line 1"), head)
        for number, line in enumerate(lines[1:], 2):
            place = f"{self._path}: line {number}"
            known = self._parsed(line, Line, place)
            if known.digest != _digest(known.question, known.answer):
                message = f"{place}: answer is not what was written there, by its digest"
                raise self._refusal(message)
            self._answers[known.question] = known.answer
        return sum(map(len, lines))

    def _compare(self, first: Head, head: Mapping[str, Any]) -> None:
        if first.schema != SCHEMA:
            message = f"{self._path}: has schema {first.schema!r}, not {SCHEMA!r}"
            raise self._refusal(message)
        for name, value in head["identity"].items():
            self._refuse_another(name, first.identity.get(name), value)

    def _refuse_another(self, name: str, before: object, value: object) -> None:
        if before != value:
            message = (
                f"--resume: {self._path} is of another run: its {name} is "
                f"{before!r}, not {value!r}; without --resume it is put aside"
            )
            raise JournalError(message)

    def _refusal(self, sentence: str) -> JournalError:
        return JournalError(f"{self._flag} {sentence}; delete it, or name another one")

    def _parsed(self, line: bytes, kind: type[T], place: str) -> T:
        """Read a line.

        Raises:
            JournalError: it is none of a journal's; the place is named.
        """
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            message = f"{place}: is no line of a journal ({error})"
            raise self._refusal(message) from error
        return converted(data, kind, place, self._refusal)

    def _refuse_other_files(self, path: Path) -> None:
        """Refuse a file that is no journal, not even the beginning of one."""
        with path.open("rb") as file:
            first = file.readline(LONGEST_HEAD)
        whole = False
        if first.endswith(b"\n"):
            with suppress(JournalError):
                whole = self._parsed(first, Head, f"{path}").schema.startswith(FAMILY)
        if not (whole or BEGINNING.startswith(first) or _is_cut_off(first)):
            message = f"{self._flag} {path}: is no journal of a run; name another one"
            raise JournalError(message)


def _key(question: Mapping[str, Any]) -> str:
    """Return what a question goes by in the file."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]


def _digest(question: str, answer: object) -> str:
    """Return what tells an answer that was changed, or that is another question's."""
    return hashlib.sha256(f"{question}{json.dumps(answer)}".encode()).hexdigest()[:16]


def _is_cut_off(first: bytes) -> bool:
    return first.startswith(BEGINNING) and not first.endswith(b"\n")
