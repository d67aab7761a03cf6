"""The wheel, from outside the checkout, in an environment that holds torch alone."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernelproof import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    # By the name that `make types` knows it under; when tests run, nothing imports a conftest.
    from kernelproof.tests.conftest import Environment

SHIPPED_SUFFIXES = {
    ".cpp",
    ".css",
    ".cu",
    ".jinja",
    ".js",
    ".json",
    ".py",
    ".template",
    ".toml",
    ".txt",
}

# Three keys of one request on two pages of two, a query that scores all of them alike.
USE_THE_ORACLE = """
import json, math, torch
from kernelproof.reference import build_metadata, paged_attention

metadata = build_metadata([1], [3], [[1, 0]], 2)
k_cache = torch.zeros(2, 2, 1, 4)
v_cache = torch.full((2, 2, 1, 4), float("nan"))
v_cache[1, 0], v_cache[1, 1], v_cache[0, 0] = 1.0, 2.0, 6.0
result = paged_attention(torch.ones(1, 2, 4), k_cache, v_cache, metadata)
print(json.dumps({
    "out": result.out.tolist(),
    "lse_error": (result.lse - math.log(3)).abs().max().item(),
    "shapes": [list(result.out.shape), list(result.lse.shape)],
    "cuda": torch.cuda.is_initialized(),
}))
"""

READ_DATA = """
import json
from kernelproof.ci.check.law_book import law_book
from kernelproof.ci.reports.law_times import killers_of
from kernelproof.fixtures import CORPUS, FOLDER
from kernelproof.impl.gating.knowledge import table
from kernelproof.properties.findings.corpus import read_corpus
print(json.dumps({
    "home": str(FOLDER),
    "cases": [case.path.name for case in read_corpus(CORPUS)],
    "laws": len(law_book()),
    "bugs": len(killers_of("moe")),
    "cells": len(table().modules),
    "seen": len(table().kernels),
}))
"""

FIND_MODULES = """
import importlib.util, json, sys
print(json.dumps({name: importlib.util.find_spec(name) is not None for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def tree(
    tmp_path_factory: pytest.TempPathFactory,
    copy_repository: Callable[[Path], Path],
    repository: Path,
) -> Path:
    """Copy the repository as it would be tagged."""
    tree = copy_repository(tmp_path_factory.mktemp("packaging") / "kernelproof")
    for name in (".ci", ".github"):
        shutil.copytree(repository / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """Rehearse the workflow of a release, up to where a wheel is installed and uploaded."""
    workflow = (tree / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    steps = re.findall(r"^ +run: (\w.+)$", workflow.partition("- name: Install")[0], re.MULTILINE)
    assert [step.partition(" -")[0] for step in steps] == [
        "grep",  # whether the tag is the version
        "python",  # -m pip install: all is there, and stays as it is
        "python",  # -m build
    ]
    for step in (each for each in steps if " -m pip " not in each):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step],  # noqa: S607  of the machine
            cwd=tree,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "GITHUB_REF_NAME": f"v{__version__}",
            },
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist" / f"kernelproof-{__version__}-py3-none-any.whl"


def shipped(wheel: Path) -> set[str]:
    """Name the files of the package itself, relative to it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("kernelproof/") for name in names), names
    return {name.removeprefix("kernelproof/") for name in names}


def test_the_wheel_holds_every_module_and_all_data(tree: Path, wheel: Path) -> None:
    tables = (tree / "fixtures" / name for name in ("flashinfer.tsv", "real/values.tsv"))
    files = [*tree.glob("*.py"), tree / "py.typed", *tables]
    for folder in ("ci", "fixtures", "impl", "properties", "reference"):
        files += (path for path in (tree / folder).rglob("*") if path.suffix in SHIPPED_SUFFIXES)
    expected = {str(path.relative_to(tree)) for path in files}
    assert {"__init__.py", "__main__.py", "py.typed", "ci/constraints.txt"} <= expected
    assert shipped(wheel) == expected


def test_the_sizes_are_those_that_the_page_states(wheel: Path, repository: Path) -> None:
    page = (repository / "docs" / "versions.md").read_text(encoding="utf-8")
    stated = re.search(r"a wheel of ([\d.]+) MB, ([\d.]+) MB installed", page)
    assert stated is not None
    with zipfile.ZipFile(wheel) as archive:
        installed = sum(entry.file_size for entry in archive.infolist())
    for size, said in zip((wheel.stat().st_size, installed), stated.groups(), strict=True):
        assert size / 1e6 == pytest.approx(float(said), rel=0.15)


def test_data_is_read_from_the_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    read = subprocess.run(
        [sys.executable, "-c", READ_DATA],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)
    assert found["home"] == str(installed / "kernelproof" / "fixtures")
    assert found["cases"] == sorted(path.name for path in tree.glob("fixtures/corpus/*.json"))
    assert found["laws"]
    assert found["bugs"]
    assert found["cells"]
    assert found["seen"]


def test_the_wheel_requires_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist", [])
    assert [entry for entry in required if "extra ==" not in entry] == ["torch>=2.5"]
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "dev",
        "docs",
        "flashinfer",
        "gating",
        "onnx",
        "ray",
        "redis",
        "suite",
        "test",
        "triton",
    }
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_from_outside_the_checkout(
    tree: Path, wheel: Path, make_environment: Callable[[Path], Environment], tmp_path: Path
) -> None:
    # One test, because the environment takes up to 20 s: it is installed as a downstream project
    # does it, and pip brings what the wheel asks for.
    environment = make_environment(tmp_path / "environment")
    environment.install("--constraint", tree / "ci" / "constraints.txt", wheel)
    outside = tmp_path / "outside"
    outside.mkdir()
    assert (environment.site_packages / "kernelproof" / "py.typed").is_file()
    check_what_is_there(environment, outside)
    check_the_oracle(environment, outside)
    check_the_command(environment, outside)


def check_what_is_there(environment: Environment, outside: Path) -> None:
    """Nothing that only the suite needs is installed, so nothing can lean on it by accident."""
    names = ["click", "flashinfer", "hypothesis", "numpy", "pytest", "rich", "triton"]
    found = environment.run("python", "-c", FIND_MODULES, *names, "torch", cwd=outside)
    assert json.loads(found.stdout) == {**dict.fromkeys(names, False), "torch": True}


def check_the_oracle(environment: Environment, outside: Path) -> None:
    """The oracle computes; no warning but torch's own, which misses numpy."""
    warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy"]
    used = environment.run("python", *warnings, "-c", USE_THE_ORACLE, cwd=outside)
    assert used.returncode == 0, used.stderr
    answer = json.loads(used.stdout)
    assert answer["out"] == [[[pytest.approx(3.0)] * 4] * 2]
    assert answer["lse_error"] < 1e-6
    assert answer["shapes"] == [[1, 2, 4], [1, 2]]
    assert not answer["cuda"]


def check_the_command(environment: Environment, outside: Path) -> None:
    """Without the suite, the command says in one sentence what to install."""
    for command in (["kernelproof"], ["python", "-m", "kernelproof"]):
        said = environment.run(*command, "list", cwd=outside)
        assert said.returncode == 2, said.stderr
        assert said.stdout == ""
        assert said.stderr.count("\n") == 1
        assert "'.[suite]' in a clone of kernelproof brings it" in said.stderr
