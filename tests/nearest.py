"""The tests nearest to what changed, as many as end in time: the last part of ``make check``.

A test file is near to a module that it imports, to those in the folder that its own stands for, and
to a page or data file that it names. How long a test takes is known from earlier runs, those of
``make test`` too, by pytest's cache.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = "kernelproof/seconds"
"""Key in pytest's cache of the seconds of each test by its id; ``conftest.py`` writes them."""
NEW = 1.0
"""Seconds that a test is taken for of which none are known: at 0, slow files came before all."""
CHANGED, NAMED, BESIDE = range(3)
"""Ranks: the file itself changed; it names what changed; it stands for the same folder."""
ALWAYS = "tests/test_house.py"
PAGES = "tests/test_doc_commands.py"
"""Runs the commands of each page: only those of a page that changed are near."""


def changed_files(root: Path) -> list[str]:
    """Name what is not committed yet; if all is, what the last commit changed, where git has it."""

    def git(*words: str, check: bool = True) -> list[str]:
        command = [shutil.which("git") or "git", *words]
        done = subprocess.run(command, cwd=root, check=check, capture_output=True, text=True)
        return [name for name in done.stdout.split("\0") if name]

    names = git("diff", "--name-only", "-z", "HEAD")
    names += git("ls-files", "-z", "--others", "--exclude-standard")
    # The first commit of a shallow clone has no parent.
    return sorted(set(names or git("diff", "--name-only", "-z", "HEAD~1", "HEAD", check=False)))


def imported(source: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, or whose members it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def nearest(root: Path, changed: Iterable[str]) -> dict[str, int]:
    """Return the ranks of the test files near to changed files, both relative to the root."""
    names = [Path(name) for name in changed]
    dotted = {
        ".".join(("kernelproof", *name.with_suffix("").parts)).removesuffix(".__init__")
        for name in names
        if name.suffix == ".py"
    }
    data = {name.name for name in names if name.suffix != ".py"}
    folders = {(name if name.parts[0] == "tests" else "tests" / name).parent for name in names}
    ranks = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        if file in names:
            ranks[str(file)] = CHANGED
        elif any(name in text for name in data) or dotted.intersection(imported(text)):
            ranks[str(file)] = NAMED
        elif file.parent in folders - {Path("tests")}:
            ranks[str(file)] = BESIDE
    pages = [name for name in names if name.suffix == ".md"]
    near = [ALWAYS, *(["tests/test_docs.py", PAGES] if pages else [])]
    return {**{file: NAMED for file in near if (root / file).exists()}, **ranks}


class Within:
    """Plugin of pytest: the nearest files first, and no test that would end too late.

    Attributes:
        left: tests that were left out, by file.
        ran: whether any test ran.
    """

    def __init__(self, ranks: dict[str, int], changed: Iterable[str], seconds: float) -> None:
        self.left: Counter[str] = Counter()
        self.ran = False
        self._ranks, self._end = ranks, time.monotonic() + seconds
        self._pages = tuple(Path(name).name for name in changed if name.endswith(".md"))
        self._known: dict[str, float] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Sort the tests by file, and keep those of the pages that changed."""
        cache = getattr(config, "cache", None)  # -p no:cacheprovider
        self._known = dict(cache.get(SECONDS, {})) if cache else {}
        every = dict.fromkeys(self._ranks, 0.0)
        for item in items:
            every[_file(item)] += self._known.get(item.nodeid, NEW)
        near = [
            item
            for item in items
            if _file(item) != PAGES
            or self._ranks[PAGES] == CHANGED
            or any(page in item.nodeid for page in self._pages)
        ]
        items[:] = sorted(near, key=lambda item: (self._ranks[_file(item)], every[_file(item)]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that would not end in time."""
        if time.monotonic() + self._known.get(item.nodeid, NEW) > self._end:
            self.left[_file(item)] += 1
            pytest.skip("no time")

    def pytest_runtest_call(self) -> None:
        """Note that a test runs."""
        self.ran = True


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def say(line: str) -> None:
    """Print a line at once, before what pytest prints."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(root: Path, seconds: float) -> int:
    """Run the nearest tests and name what was left out; return pytest's exit code.

    Where no test ran, that is said, and is no success.
    """
    changed = changed_files(root)
    ranks = nearest(root, changed)
    within = Within(ranks, changed, seconds)
    say(f"check: changed: {len(changed)} files, near: {len(ranks)} test files")
    files = [str(root / file) for file in ranks]
    options = ["-q", "-r", "fE", f"--rootdir={root}"]
    none = pytest.ExitCode.NO_TESTS_COLLECTED
    code = pytest.main([*options, *files], plugins=[within]) if files else none
    others = len(list((root / "tests").rglob("test_*.py"))) - len(ranks)
    say("check: left out:")
    for file, count in within.left.items():
        say(f"  {file}: no time for {count} tests")
    say(f"  what is not near: {others} test files (make test), and make docs")
    code = none if code == pytest.ExitCode.OK and not within.ran else code
    if code == none:
        say("check: no test ran")
    return int(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all tests together")
    sys.exit(main(ROOT, parser.parse_args().seconds))
