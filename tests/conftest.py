"""How the tests run, and the environments that packaging tests install into."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import hypothesis
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from kernelproof.properties.isolation.workers import Worker

# Reproducible, and without a deadline: the first call of an operation costs seconds (imports,
# compilation), which is not what a test is about.
hypothesis.settings.register_profile(
    "tests", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("tests")

# Where these tests run on GitHub Actions, commands that they start print no annotations.
os.environ.pop("GITHUB_ACTIONS", None)

# Before torch is imported. The tensors of the tests are small: threads that wait for each other on
# a busy machine made small operations take 57 s instead of 12 on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process
# that they start. A handler is not inherited: those processes end at a Ctrl-C by default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which later leaves alone what was collected.

    The items of the tests live until the end. Looking through them again and again is a sixth of
    the time that collecting takes, in every process of pytest-xdist.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# What each test took, by its id, and what its set-up did; kept for ``nearest.py``.
_seconds: dict[str, float] = {}
_set_up: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what a test took, unless it was skipped."""
    if report.when == "setup":
        _set_up[report.nodeid] = report.duration
    elif report.when == "call" and not report.skipped:
        _seconds[report.nodeid] = _set_up.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep what tests took, in pytest's cache."""
    gc.unfreeze()  # an interpreter that ends collects the rest; what is left is called a leak
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("kernelproof/seconds", {**cache.get("kernelproof/seconds", {}), **_seconds})


# What a checkout holds beside the repository itself.
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "docs")


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, away from the one that runs the tests."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages lie."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, unaffected by the surrounding test run."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "PYTHONPATH", "COVERAGE_"))
        }
        program, *rest = arguments
        return subprocess.run(
            [self.folder / "bin" / program, *rest],
            cwd=cwd,
            env=inherited,
            check=False,
            capture_output=True,
            text=True,
        )

    def install(self, *arguments: str | Path) -> None:
        """Install into it with the running environment's pip (making one costs 2 s each)."""
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python, "install"]
        flags = ["-qq", "--no-input", "--no-compile", "--disable-pip-version-check"]
        installed = subprocess.run(
            [*pip, *flags, *arguments], check=False, capture_output=True, text=True
        )
        assert installed.returncode == 0, installed.stderr

    def borrow(self) -> None:
        """Let it see the running environment's packages, but not its editable kernelproof.

        Python reads no .pth file in a folder that another .pth file names, and an editable install
        is one.
        """
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site_packages / "borrowed.pth").write_text("\n".join(sorted(paths)) + "\n")


def new_environment(folder: Path) -> Environment:
    """Create an empty environment; without pip, which takes 0.1 s instead of 3."""
    venv.create(folder, with_pip=False, symlinks=True)
    return Environment(folder)


@pytest.fixture(scope="session")
def repository(pytestconfig: pytest.Config) -> Path:
    """Return the repository's root."""
    return pytestconfig.rootpath


@pytest.fixture(scope="session")
def copy_repository(repository: Path) -> Callable[[Path], Path]:
    """Return a function that copies the source tree, so that no test writes into the checkout."""

    def copy(target: Path) -> Path:
        shutil.copytree(repository, target, ignore=NOT_SOURCE)
        return target

    return copy


@pytest.fixture(scope="session")
def make_environment() -> Callable[[Path], Environment]:
    """Return `new_environment`: test modules cannot import from a conftest."""
    return new_environment


@pytest.fixture(scope="session")
def installed_declarations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the installed FlashInfer declares, collected once for all processes of xdist."""
    from kernelproof.ci.releases.sandboxes import installed_folder
    from kernelproof.impl.flashinfer_declarations import declarations
    from kernelproof.impl.targets.optional import missing
    from kernelproof.properties.collection.xdist_lock import shared

    absent = missing("flashinfer", "flashinfer")
    if absent is not None:
        pytest.skip(absent)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "declarations"
    folder.mkdir(exist_ok=True)
    return shared(folder, lambda: declarations(installed_folder()))


@pytest.fixture(scope="module")
def interpreter() -> Generator[Worker, None, None]:
    """Lend a worker in which Triton's interpreter runs kernels."""
    from kernelproof.impl.targets.optional import missing
    from kernelproof.properties.isolation.workers import WorkerPool
    from kernelproof.properties.worker.pools import HANDLER

    if (reason := missing("triton", "triton")) is not None:
        pytest.skip(reason)
    preload, interpret = ("torch", "kernelproof.properties.worker.tasks"), {"TRITON_INTERPRET": "1"}
    with (
        WorkerPool(HANDLER, preload=preload, environment=interpret, standby=False) as pool,
        pool.lease() as lent,
    ):
        yield lent


@pytest.fixture(scope="session")
def extras(repository: Path) -> set[str]:
    """Return the names of the package's extras."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    return set(project["project"]["optional-dependencies"])


@pytest.fixture(scope="session")
def parse_command() -> Callable[[Sequence[str]], None]:
    """Return a function that fails where `kernelproof WORDS...` is no valid command."""

    def parse(words: Sequence[str]) -> None:
        from kernelproof.ci.cli import cli

        command: click.Command = cli
        rest, context = list(words), None
        try:
            while isinstance(command, click.Group):
                context = command.make_context("kernelproof", rest, parent=context)
                # click keeps the name of a group's command apart from what is behind it.
                held = vars(context)  # until click 8.1 its name had no underscore
                first = held.get("_protected_args") or held.get("protected_args") or []
                name, found, rest = command.resolve_command(context, [*first, *context.args])
                assert found is not None, name
                command = found
            command.make_context(command.name, rest, parent=context)
        except click.ClickException as error:
            pytest.fail(f"kernelproof {' '.join(words)}: {error.format_message()}")

    return parse
