"""A check that repeats one of which all passed: its report is kept, so that no torch is needed.

The next such check reuses each result, see ``reusing``. What it would print and write is known at
the end of this one, and so is what it depends on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from ...properties.findings.files import dumps, write_text
from ..answers.identity import code_identity, digest_of
from ..answers.surroundings import as_before, content_of, gpus, surroundings
from ..console.outputs import Outputs
from ..reports.outline import Block, Line, Part, Table, sized

REPEATED = "repeated-"
"""Beginning of the names of files that hold what a repeated check says."""
MOST_CHECKS = 20
"""Most checks of which a folder of cases keeps what passed; the oldest go first."""
KINDS: Mapping[str, Callable[..., Any]] = {each.__name__: each for each in (Line, Block, Table)}


class Answer(msgspec.Struct, frozen=True):
    """What a repeated check says.

    Attributes:
        about: what it depends on, see ``repeatable``.
        read: fingerprints of what the implementations have read.
        date: the date in the outputs.
        outline: the parts of the report: heading, and the kind and the fields of each item.
        annotations: lines for GitHub Actions.
        outputs: content of the files to write, by the option that names each.
    """

    about: dict[str, Any]
    read: dict[str, str]
    date: str
    outline: list[tuple[str, list[tuple[str, list[Any]]]]]
    annotations: list[str]
    outputs: dict[str, Any]


@dataclass(frozen=True)
class Repeatable:
    """A check that may repeat an earlier one.

    Attributes:
        path: the path of what it says then.
        about: what that depends on.
    """

    path: Path
    about: Mapping[str, Any]

    def answer(self) -> Answer | None:
        """Return what the check says without asking anything; None where that is not known."""
        with suppress(OSError, ValueError):  # none was kept, or it was cut off
            found = msgspec.json.decode(self.path.read_bytes(), type=Answer)
            if found.about == self.about and as_before(found.read):
                return found
        return None

    def keep(
        self,
        read: Mapping[str, str],
        date: str,
        outline: Iterable[Part],
        annotations: Iterable[str],
        outputs: Mapping[str, object],
    ) -> None:
        """Keep what the next such check says; see ``Answer``."""
        parts = [
            (part.heading, [(type(each).__name__, list(each)) for each in _plain(part)])
            for part in outline
        ]
        answer = Answer({**self.about}, {**read}, date, parts, [*annotations], {**outputs})
        with suppress(OSError):
            write_text(self.path, dumps(msgspec.structs.asdict(answer)))
            drop_oldest(self.path.parent, REPEATED)


def repeatable(given: Mapping[str, Any], command: str) -> Repeatable | None:
    """Return what a check has to find unchanged to be a repeated one; None if it is never one.

    Args:
        given: the values of the command's options and its implementations, by name.
        command: the command with what a file says of its options.
    """
    anew = ("resume", "ray", "failed_first", "distrust")
    chips = gpus() if given["device"] == "cuda" else ""
    if not given["reuse"] or any(given[name] for name in anew) or chips is None:
        return None
    with suppress(LookupError, OSError, ValueError):  # what is wrong is said by who needs it
        about = {
            **code_identity(given["implementations"]),
            **surroundings(given["jobs"], given["minutes"]),
            "command": command,
            "options": {name: repr(value) for name, value in sorted(given.items())},
            "files": {str(file): content_of(str(file)) for file in _files(given)},
            "GPUs": chips,
        }
        name = f"{REPEATED}{digest_of([command.encode()])}.jsonl"
        return Repeatable(given["cases"] / name, json.loads(json.dumps(about)))
    return None


def repeat(answer: Answer, outputs: Outputs) -> None:
    """Print a report that is known, and write its files.

    Raises:
        UsageRefusedError: a file cannot be written.
    """
    # Imported here: a check that is not repeated has its workers begin before this.
    from ..console.terminal import console
    from ..reports.display import print_outline

    outputs.check()
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        outputs.write(
            {
                flag: lambda content=content: _dated(content, answer.date, now)  # type: ignore[misc]
                for flag, content in answer.outputs.items()
            }
        )
    finally:
        parts = [
            Part(heading, [KINDS[kind](*fields) for kind, fields in items])
            for heading, items in answer.outline
        ]
        print_outline(console(sys.stdout), parts)
        for each in answer.annotations:
            print(each)


def drop_oldest(cases: Path, begin: str) -> None:
    """Remove the oldest files of a folder whose names begin so, where there are too many."""
    kept = sorted(cases.glob(f"{begin}*.jsonl"), key=lambda file: file.stat().st_mtime)
    for file in kept[:-MOST_CHECKS]:
        file.unlink(missing_ok=True)


def _plain(part: Part) -> Iterator[Line | Block | Table]:
    """Yield the items of a part without what only a page shows."""
    from ..console.terminal import PLAIN_WIDTH

    for item in part.items:
        if isinstance(item, Line):
            yield item._replace(text=sized(item.text, PLAIN_WIDTH), about=None)
        elif isinstance(item, Block):
            yield item._replace(message=sized(item.message, PLAIN_WIDTH), about=None)
        else:
            yield item


def _files(given: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that options name to be read, those of a folder one by one."""
    named = [each for name, each in given.items() if isinstance(each, Path) and name != "cases"]
    if given["expectations"]:
        named.append(Path(given["expectations"]))
    for each in named:
        yield each
        if each.is_dir():
            yield from (file for file in sorted(each.rglob("*")) if file.is_file())


def _dated(content: Any, date: str, now: str) -> Any:  # noqa: ANN401  JSON or text
    """Return the content of a file with the date of this check."""
    if isinstance(content, str):
        return content.replace(date, now)
    dated = {**content, "date": now} if "date" in content else {**content}
    if "milestones" in dated:
        dated["milestones"] = {**dated["milestones"], "started": time.time()}
    return dated
