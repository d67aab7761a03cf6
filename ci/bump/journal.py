"""What a comparison has asked and was answered, kept as it comes, so that a killed one can go on.

Everything that a run learns is the answer to a question that can be written down: what a release
declares, what a worker makes of a problem. What is asked next follows from the answers alone. So a
run that is started again with the answers of the one before it asks the same questions, gets the
same answers at once, and goes on where the other one stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...properties.files import dumps
from ..errors import UsageRefusedError

SCHEMA = "kernelproof/bump-journal/1"


class JournalError(UsageRefusedError):
    """A journal that cannot be used; the message says why."""


class Journal:
    """Answers by question, in a file with a line each; may be used from several threads.

    Args:
        path: of the file; nothing is kept if None.
        identity: what the answers are about; a journal about something else is refused.
        resume: go on with the answers in the file, rather than start afresh.

    Raises:
        JournalError: the file cannot be read or written, or is about something else.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        self.answered = self.remembered = 0
        self._answers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._file: int | None = None
        self._path = path
        if path is None:
            return
        head = json.loads(dumps({"schema": SCHEMA, "identity": identity}))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._read(path, head) if resume and path.exists() else 0
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            # A line that was cut off by the end of the process is written again.
            os.truncate(path, whole)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            message = f"--journal {path}: cannot be used ({error.strerror})"
            raise JournalError(message) from error
        if not whole:
            self._write(head)

    def ask(self, question: Mapping[str, Any], answer: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Give the answer to a question: the one that is known, or else a new one, which is kept.

        Args:
            question: in JSON.
            answer: finds it; what it gives is turned into JSON and back.
        """
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]
        with self._lock:
            if key in self._answers:
                self.remembered += 1
                return self._answers[key]
        found = json.loads(json.dumps(answer()))
        with self._lock:
            self.answered += 1
            self._answers[key] = found
            self._write({"question": key, "answer": found})
        return found

    def close(self) -> None:
        """Close the file; it stays."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def _read(self, path: Path, head: Mapping[str, Any]) -> int:
        """Read what was kept, and give the length of what is whole."""
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if not lines:
            return 0
        try:
            first, *rest = [json.loads(line) for line in lines]
            schema, identity = first["schema"], first["identity"]
            answers = {line["question"]: line["answer"] for line in rest}
        except (ValueError, KeyError, TypeError) as error:
            message = f"--journal {path}: is no journal of a comparison; delete it"
            raise JournalError(message) from error
        if schema != SCHEMA:
            message = f"--journal {path}: has schema {schema!r}, not {SCHEMA!r}; delete it"
            raise JournalError(message)
        for name, value in head["identity"].items():
            if identity.get(name) != value:
                message = (
                    f"--resume: {path} is of another comparison: its {name} is "
                    f"{identity.get(name)!r}, not {value!r}"
                )
                raise JournalError(message)
        self._answers = answers
        return whole
