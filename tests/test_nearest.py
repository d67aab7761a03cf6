"""Which tests `make check` takes for near, and which of them it has time for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from kernelproof.tests.nearest import BESIDE, CHANGED, NAMED, SECONDS, nearest

FILES = {
    "ci/score/scoring.py": "",
    "tests/ci/score/test_scoring.py": "",
    "tests/ci/test_cli.py": "from kernelproof.ci.score import scoring",
    "tests/ci/test_other.py": "from kernelproof.ci.score import command",
    "tests/test_docs.py": "",
    "tests/test_doc_commands.py": "",
    "tests/test_ledger.py": "LEDGER = 'ledger.toml'",
}
PROGRAM = """
import sys
from pathlib import Path
from kernelproof.tests.nearest import main
sys.exit(main(Path.cwd(), 60.0))
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def commit(root: Path, *files: str) -> None:
    """Make a repository whose only commit has these files."""
    git = shutil.which("git") or "git"
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init"], ["add", *files], [*who, "commit", "-m", "first"]):
        subprocess.run([git, *words], cwd=root, check=True, capture_output=True)


def check(root: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM]
    return subprocess.run(words, cwd=root, check=False, capture_output=True, text=True)


def test_near_is_what_changed_or_names_it_or_stands_for_its_folder(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    cli, scoring = "tests/ci/test_cli.py", "tests/ci/score/test_scoring.py"
    assert nearest(tmp_path, ["ci/score/scoring.py"]) == {cli: NAMED, scoring: BESIDE}
    assert nearest(tmp_path, [scoring]) == {scoring: CHANGED}
    assert nearest(tmp_path, ["fixtures/ledger.toml"]) == {"tests/test_ledger.py": NAMED}
    pages = ("tests/test_docs.py", "tests/test_doc_commands.py")
    assert nearest(tmp_path, ["docs/laws.md"]) == dict.fromkeys(pages, NAMED)


def test_a_test_that_would_end_too_late_is_left_out_and_named(tmp_path: Path) -> None:
    """Also that runs note what tests take, and forget nothing of those that were left out."""
    cache = f".pytest_cache/v/{SECONDS}"
    write(
        tmp_path,
        {
            "tests/test_near.py": "def test_slow(): assert 0",
            "tests/test_new.py": "def test_after_quick_ones(): open('quick').close()",
            "tests/test_quick.py": "def test_quick(): open('quick', 'w').close()",
            "tests/test_far.py": "def test_far(): assert 0",
            "tests/conftest.py": Path(__file__).with_name("conftest.py").read_text(),
            cache: json.dumps(
                {"tests/test_near.py::test_slow": 61.0, "tests/test_quick.py::test_quick": 0.1}
            ),
        },
    )
    commit(tmp_path, "tests/test_far.py")
    ended = check(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tests/test_near.py: no time for 1 tests" in ended.stdout
    assert "what is not near: 1 test files" in ended.stdout
    kept = json.loads((tmp_path / cache).read_text())
    ran = {"tests/test_quick.py::test_quick", "tests/test_new.py::test_after_quick_ones"}
    assert set(kept) == {"tests/test_near.py::test_slow", *ran}
    assert kept["tests/test_near.py::test_slow"] == 61.0


def test_a_check_in_which_no_test_ran_says_so_and_fails(tmp_path: Path) -> None:
    """First in a shallow clone without changes: git does not have what came before."""
    write(
        tmp_path,
        {
            "tests/test_near.py": "def test_slow(): assert 0",
            ".gitignore": "__pycache__\n.pytest_cache\n",
            f".pytest_cache/v/{SECONDS}": json.dumps({"tests/test_near.py::test_slow": 61.0}),
        },
    )
    commit(tmp_path, ".")
    ended = check(tmp_path)
    assert (ended.returncode, ended.stderr) == (5, "")
    assert "check: changed: 0 files, near: 0 test files" in ended.stdout
    assert ended.stdout.endswith("check: no test ran\n")
    write(tmp_path, {"tests/test_near.py": "def test_slow(): assert 1"})
    ended = check(tmp_path)
    assert "tests/test_near.py: no time for 1 tests" in ended.stdout
    assert (ended.returncode, ended.stdout[-19:]) == (5, "check: no test ran\n")
