"""Every command in the documentation is run, or at least understood.

A block of ``console`` holds commands, each after ``$ ``, and what they print. They are run in
order, page by page, in a folder of their own, with the files that the pages' own blocks show (a
first line such as ``# my_kernels.py`` names one). What is printed must hold the lines that the page
shows, in their order, numbers apart. A comment before a block says what is special about it:

    <!-- exit: 1 -->                      its last command ends so
    <!-- tested with: --law parity -->    options that the test adds, to be quick; what the page
                                          shows is then compared until its first line of dots
    <!-- of: reference-metadata -->       all that is registered in the test
    <!-- not run: REASON -->              options are parsed, and nothing is run

What needs a GPU (``--device cuda``) is parsed only.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kernelproof.ci.check import pages
from kernelproof.ci.cli import main

ROOT = Path(__file__).parents[1]
GENERATED = set(pages.PAGES)  # their commands stand elsewhere
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED),
]
BLOCK = re.compile(
    r"(?P<comments>(?:^<!--[^\n]*-->\n)*)^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"<!-- (?P<name>exit|tested with|of|not run): (?P<value>.+?) -->")
FILE = re.compile(r"# (?P<name>[\w/-]+\.(?:py|toml|txt))\n")
SECONDS = 600  # on a machine that does much else besides
Parse = Callable[[Sequence[str]], None]


@dataclass
class Step:
    """A command, and what the page shows of its output."""

    where: str
    command: str
    shown: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The command's words, its comment left out."""
        return shlex.split(self.command, comments=True)

    @property
    def untested(self) -> str:
        """Why it is not run, if it is not."""
        words = self.words
        if "not run" in self.notes:
            return self.notes["not run"]
        if "cuda" in words or words[1:3] == ["bench", "kernels"]:
            return "needs a GPU"
        return ""


def blocks_of(page: Path, language: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the place, text and notes of each block of a language."""
    text = page.read_text(encoding="utf-8")
    return [
        (
            f"{page.name}:{text.count(chr(10), 0, found.start('text'))}",
            found["text"],
            {note["name"]: note["value"] for note in COMMENT.finditer(found["comments"])},
        )
        for found in BLOCK.finditer(text)
        if found["language"] == language
    ]


def files_of(page: Path) -> dict[str, str]:
    """Return the files that a page shows."""
    found = {}
    for language in ("python", "toml", "text"):
        for _, text, _ in blocks_of(page, language):
            named = FILE.match(text)
            if named:
                found[named["name"]] = text
    return found


def steps_of(page: Path) -> list[Step]:
    """Return the commands of a page, in order."""
    steps: list[Step] = []
    for where, text, notes in blocks_of(page, "console"):
        mine: list[Step] = []
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                kept = {name: value for name, value in notes.items() if name != "exit"}
                mine.append(Step(where, line[2:], notes=kept))
            else:
                mine[-1].shown.append(line)
        if "exit" in notes:
            mine[-1].notes["exit"] = notes["exit"]
        steps += mine
    return steps


STEPS = [step for page in PAGES for step in steps_of(page)]
RUN = [page for page in PAGES if any(not step.untested for step in steps_of(page))]
NOT_RUN = [step for step in STEPS if step.untested]


def kernelproof_words(step: Step) -> list[str] | None:
    """Return what follows `kernelproof` in a command, also behind `timeout`; else None."""
    words = step.words
    if words[0] == "podman" and words[1] != "run":
        return None
    for index, word in enumerate(words):
        if word.rpartition("/")[2] == "kernelproof":
            return words[index + 1 :]
    return None


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.where} {step.command[:40]}")
def test_a_command_is_understood(step: Step, extras: set[str], parse_command: Parse) -> None:
    words, own = step.words, kernelproof_words(step)
    if own is not None:
        parse_command(own)
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        named = re.findall(r"kernelproof\[([\w,]+)\]", step.command)
        assert {extra for each in named for extra in each.split(",")} <= extras
    else:
        assert words[0] in {"bash", "export", "git", "podman", "pytest", "python", "python3"}, (
            step.command
        )


@pytest.mark.parametrize("step", NOT_RUN, ids=lambda step: f"{step.where} {step.command[:40]}")
def test_a_command_that_is_not_run(step: Step) -> None:
    pytest.skip(step.untested)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {**files_of(ROOT / "README.md"), **files_of(page)}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for step in steps_of(page):
        if not step.untested:
            run(step, tmp_path, monkeypatch)


def run(step: Step, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command, and compare what it prints."""
    added = shlex.split(step.notes.get("tested with", ""))
    words = [word.replace("/shared/", f"{folder}/") for word in [*step.words, *added]]
    if words[0].rpartition("/")[2] == "kernelproof":
        with monkeypatch.context() as patched:
            if "of" in step.notes:
                only = step.notes["of"].split()
                patched.setattr("kernelproof.impl.registry.registered", lambda: only)
            code, printed = in_this_process(words[1:])
    else:
        if words[0] == "pytest":
            words = ["python", "-m", *words]
        ended = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert words[0] == "python", step.command
        code, printed = ended.returncode, ended.stdout + ended.stderr
    assert code == int(step.notes.get("exit", 0)), f"{step.where}: {step.command}\n{printed}"
    shown = [line.strip() for line in step.shown]
    if added and "..." in shown:
        shown = shown[: shown.index("...")]
    compare(step, shown, printed)


def in_this_process(words: list[str]) -> tuple[int, str]:
    """Run a command of Kernelproof's, without another start of Python."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = main(words)
    return code, out.getvalue()


def compare(step: Step, shown: Sequence[str], printed: str) -> None:
    """See that what a page shows was printed, in this order, numbers and dots apart."""
    rest = printed
    for line in shown:
        if line in ("", "..."):
            continue
        pattern = re.sub(r"\\?\d(?:[\d,]|\\\.\d)*", r"\\d[\\d.,]*", re.escape(line))
        found = re.search(pattern, rest)
        assert found, f"{step.where}: {line!r} is not printed by {step.command}:\n{printed}"
        rest = rest[found.end() :]
