"""One class, loaded once, whatever the checkout is called and however it is installed.

The repository's root is the package, so pytest has two ways to name the same file. These tests run
pytest in copies of the repository, with a library module that imports relatively and test modules
that import absolutely, as all of them here do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    # By the name that `make types` knows it under; when tests run, nothing imports a conftest.
    from kernelproof.tests.conftest import Environment

CHECKOUTS = ["kernelproof", "repo", "my-repo"]

LIBRARY_MODULE = '''"""Reaches the oracle as library code does."""

from ..reference import BatchMetadata
from ..reference.attention.metadata import BatchMetadata as AtHome
'''

TEST_MODULE = '''"""Reaches the oracle as test modules do."""

import sys

import kernelproof
from kernelproof.impl import identity_probe
from kernelproof.reference import BatchMetadata, build_metadata


def test_one_class():
    assert identity_probe.BatchMetadata is BatchMetadata
    assert identity_probe.AtHome is BatchMetadata
    assert type(build_metadata([1], [1], [[0]], 16)) is BatchMetadata


def test_loaded_once():
    homes = [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").endswith("reference/attention/metadata.py")
    ]
    assert homes == ["kernelproof.reference.attention.metadata"]


def test_from_the_right_place():
    assert kernelproof.__file__.startswith({origin!r})
'''

CHECK_AT_THE_END = """
import sys

def pytest_sessionfinish(session):
    homes = [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").endswith("reference/attention/metadata.py")
    ]
    assert homes == ["kernelproof.reference.attention.metadata"], homes
"""


def write_probe(checkout: Path) -> None:
    """Add a library module that the repository does not have."""
    (checkout / "impl" / "identity_probe.py").write_text(LIBRARY_MODULE)


def run_pytest(environment: Environment, checkout: Path, origin: Path) -> None:
    """Run the test module from each folder that holds tests: with and without __init__.py."""
    source = TEST_MODULE.replace("{origin!r}", repr(str(origin)))
    names = ["tests/test_one.py", "tests/reference/test_one.py", "properties/test_one.py"]
    for name in names:
        path = checkout / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    result = environment.run("python", *arguments, cwd=checkout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "9 passed" in result.stdout


def collect_suite(environment: Environment, folder: Path, *mode: str) -> None:
    """Collect the suite from a folder that has nothing to do with the checkout."""
    folder.mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(CHECK_AT_THE_END)
    suite = ["--pyargs", "kernelproof.properties", "--impl", "reference-metadata"]
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *mode]
    result = environment.run("python", *arguments, *suite, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    items = [line for line in result.stdout.splitlines() if "::" in line]
    assert any("test_law[reference-metadata-metadata_parity]" in item for item in items)
    assert all("test_conformance.py::" in item for item in items)


@pytest.mark.parametrize("name", CHECKOUTS)
def test_editable_install(
    name: str,
    tmp_path: Path,
    copy_repository: Callable[[Path], Path],
    make_environment: Callable[[Path], Environment],
) -> None:
    checkout = copy_repository(tmp_path / name)
    write_probe(checkout)
    environment = make_environment(tmp_path / "environment")
    environment.borrow()
    environment.install("-I", "--no-deps", "--no-build-isolation", "--editable", checkout)
    if name == "repo":  # it costs seconds
        collect_suite(environment, tmp_path / "outside")
    run_pytest(environment, checkout, origin=checkout)


@pytest.fixture(scope="module")
def with_wheel(
    tmp_path_factory: pytest.TempPathFactory,
    copy_repository: Callable[[Path], Path],
    make_environment: Callable[[Path], Environment],
) -> Environment:
    folder = tmp_path_factory.mktemp("identity")
    source = copy_repository(folder / "source")
    write_probe(source)
    environment = make_environment(folder / "environment")
    environment.borrow()
    environment.install("-I", "--no-deps", "--no-build-isolation", source)
    return environment


@pytest.mark.parametrize("name", CHECKOUTS)
def test_wheel(
    name: str,
    tmp_path: Path,
    copy_repository: Callable[[Path], Path],
    with_wheel: Environment,
) -> None:
    checkout = copy_repository(tmp_path / name)
    run_pytest(with_wheel, checkout, origin=with_wheel.site_packages)


@pytest.mark.parametrize(
    "options",
    [
        ["--import-mode=prepend", "-o", "python_files=check_*.py"],  # a project's own pattern
        ["--import-mode=importlib"],
    ],
)
def test_the_suite_of_a_wheel(options: list[str], tmp_path: Path, with_wheel: Environment) -> None:
    collect_suite(with_wheel, tmp_path / "outside", *options)
