"""The rules of the house that no linter holds: folders, pins, imports, the README's commands."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kernelproof

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "__init__.py",
    "__main__.py",
    "changelog.d",
    "ci",
    "docs",
    "findings",
    "fixtures",
    "impl",
    "properties",
    "py.typed",
    "pyproject.toml",
    "reference",
    "tests",
}

MOST_MODULES = 25
"""Most modules of one folder of the package, besides its __init__.py."""
FEWEST_LINES = 40
"""Lines below which a module with a single importer belongs into that importer."""

CONTINUES = re.compile(
    r"(that|of|by|whose|from|in|as|with|to|for|is|are|was|has|at|on|and|or|than|under|after|if|when)\b"
)
"""Beginnings of a description that only goes on from its name."""
UNNAMED = re.compile(r"(Of|By|Where|From|Whose|Stands|That|Which|In|As|At|With|To|For|How)\b")
"""Beginnings of a constant's docstring that cannot be read without its name."""

# What a worker process loads, and what no such process may pay for or be changed by.
IN_THE_WORKER = ["isolation.workers", "isolation.worker_main", "laws", "worker.tasks"]
NOT_IN_THE_WORKER = {"click", "hypothesis", "pytest", "rich"}


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text())
    return loaded


def python(code: str) -> str:
    """Run a fresh interpreter and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_top_level_is_fixed(repository: Path) -> None:
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the repository is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 (git is wherever it is installed)
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    top = {name.partition("/")[0] for name in listed.stdout.split("\0") if name}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_every_folder_of_the_package_is_listed(repository: Path, project: dict[str, Any]) -> None:
    folders = {"kernelproof"}
    for top in sorted(TOP_LEVEL):  # not the whole tree: .venv may stand in it
        for file in (repository / top).rglob("__init__.py"):
            folders.add(".".join(("kernelproof", *file.parent.relative_to(repository).parts)))
    assert set(project["tool"]["setuptools"]["packages"]) == folders


def test_no_folder_holds_more_modules_than_one_can_know(
    repository: Path, project: dict[str, Any]
) -> None:
    for name in project["tool"]["setuptools"]["packages"]:
        folder = repository.joinpath(*name.split(".")[1:])
        modules = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, folder.relative_to(repository)


def test_no_fragment_stands_alone(repository: Path, project: dict[str, Any]) -> None:
    modules = {
        ".".join(file.relative_to(repository).with_suffix("").parts): file
        for name in project["tool"]["setuptools"]["packages"]
        for file in repository.joinpath(*name.split(".")[1:]).glob("*.py")
        if not file.name.startswith("__")
    }
    importers: dict[str, set[Path]] = {name: set() for name in modules}
    for name in project["tool"]["setuptools"]["packages"]:
        for file in repository.joinpath(*name.split(".")[1:]).glob("*.py"):
            for imported in imports_of(file, repository) & modules.keys():
                importers[imported].add(file)
    fragments = [
        name
        for name, file in modules.items()
        if len(file.read_text().splitlines()) < FEWEST_LINES and len(importers[name]) == 1
    ]
    assert not fragments


def imports_of(file: Path, repository: Path) -> set[str]:
    """Return the modules that a file's relative imports may name, by their dotted paths."""
    package = file.relative_to(repository).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            found |= {".".join(base), *(".".join((*base, each.name)) for each in node.names)}
    return found


def test_descriptions_can_be_read_without_their_names(
    repository: Path, project: dict[str, Any]
) -> None:
    """An argument's description is a phrase of its own, and so is a constant's docstring."""
    wrong = []
    for name in project["tool"]["setuptools"]["packages"]:
        for file in repository.joinpath(*name.split(".")[1:]).glob("*.py"):
            tree = ast.parse(file.read_text())
            where = file.relative_to(repository)
            wrong += [f"{where}: {each}" for each in described(tree) if CONTINUES.match(each)]
            wrong += [f"{where}: {each}" for each in constants(tree) if UNNAMED.match(each)]
    assert not wrong


def described(tree: ast.Module) -> Iterator[str]:
    """Yield the descriptions of the arguments and attributes that docstrings list."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            continue
        lines = (ast.get_docstring(node) or "").splitlines()
        listed = False
        for line in lines:
            if line and not line.startswith(" "):
                listed = line in {"Args:", "Attributes:"}
            elif listed and (found := re.match(r"    [\w*`][\w*`, .]*?: (.*)", line)):
                yield found[1]


def constants(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of assignments in modules and classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for one, other in itertools.pairwise(node.body):
                if isinstance(one, (ast.Assign, ast.AnnAssign)) and isinstance(other, ast.Expr):
                    yield str(getattr(other.value, "value", ""))


def test_make_goes_on_after_a_fault_that_is_found(repository: Path, tmp_path: Path) -> None:
    for name, text in (("python", "echo one\necho two"), ("kernelproof", "exit 1")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    for stamp in (".created", ".installed-gate"):
        (tmp_path / stamp).touch()
    ended = subprocess.run(
        ["make", "-s", "triton-faults", f"VENV={tmp_path}"],  # noqa: S607  make is wherever it is installed
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )
    lines = [line.partition(",")[0] for line in ended.stdout.splitlines()]
    assert lines == ["one: exit code 1", "two: exit code 1"]


def test_tests_are_not_packages(repository: Path) -> None:
    assert not list((repository / "tests").rglob("__init__.py"))


def test_the_version_is_one(repository: Path) -> None:
    assert metadata.version("kernelproof") == kernelproof.__version__
    assert f"## [{kernelproof.__version__}]" in (repository / "CHANGELOG.md").read_text()


def test_what_has_changed_lies_in_files_of_known_kinds(repository: Path) -> None:
    kinds = "added|changed|deprecated|removed|fixed"
    for each in (repository / "changelog.d").iterdir():
        assert re.fullmatch(rf"README\.md|[a-z0-9-]+\.({kinds})\.md", each.name), each.name


def test_the_readme_names_the_commands_that_are_checked(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    assert "make gate" in readme
    assert "make test" in readme
    assert re.search(r"^make test$", (repository / ".ci" / "run").read_text(), re.MULTILINE)


def test_every_ignored_rule_has_its_reason(repository: Path) -> None:
    source = (repository / "pyproject.toml").read_text()
    lint = source[source.index("[tool.ruff.lint]") : source.index("[tool.ruff.lint.pylint]")]
    rules = re.findall(r'^  "[A-Z]+[0-9]*",.*$', lint, re.MULTILINE)
    assert rules
    assert [rule for rule in rules if not re.search(r"# \w.{5,}", rule)] == []


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned_once(
    repository: Path, project: dict[str, Any], version: str
) -> None:
    here = {"python_version": version, "python_full_version": f"{version}.9"}
    pins: list[str] = []
    for line in (repository / "ci" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            assert [clause.operator for clause in pin.specifier] == ["=="], line
            if pin.marker is None or pin.marker.evaluate(here):
                pins.append(canonicalize_name(pin.name))
    assert len(pins) == len(set(pins))

    declared = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        declared += extra
    declared += [
        line
        for line in (repository / "ci" / "requirements-flashinfer-cpu.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    wanted = {
        canonicalize_name(need.name)
        for need in map(Requirement, declared)
        if need.marker is None or need.marker.evaluate(here)
    }
    assert wanted - {"kernelproof"} - set(pins) == set()


def test_whatever_those_bring_is_pinned_too(repository: Path) -> None:
    source = (repository / "ci" / "constraints.txt").read_text()
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", source, re.MULTILINE)}
    for name in sorted(pinned - {"flashinfer-python"}):  # which is installed without what it needs
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert canonicalize_name(need.name) in pinned | {"pip", "wheel"}, (name, str(need))


def test_importing_the_package_imports_no_torch() -> None:
    assert python("import sys, kernelproof; print('torch' in sys.modules)").strip() == "False"


def test_the_oracle_imports_torch_and_the_standard_library_alone(repository: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch"}
    for file in sorted((repository / "reference").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.partition(".")[0] in allowed, f"{file.name}:{node.lineno}: {name}"


def test_no_test_module_imports_relatively(repository: Path) -> None:
    modules = [
        *(repository / "tests").rglob("*.py"),
        *(repository / "properties").rglob("test_*.py"),
    ]
    modules += (repository / "properties").rglob("conftest.py")
    for file in modules:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.relative_to(repository)}:{node.lineno}"


@pytest.mark.parametrize("name", IN_THE_WORKER)
def test_the_worker_loads_no_test_library(name: str) -> None:
    # At run time, packages' __init__.py included, which import-linter does not follow.
    loaded = python(f"import sys, kernelproof.properties.{name}; print(*sys.modules)").split()
    assert NOT_IN_THE_WORKER.isdisjoint(loaded)


def test_no_import_touches_cuda(project: dict[str, Any]) -> None:
    names = project["tool"]["setuptools"]["packages"]
    code = (
        "import importlib, pkgutil, torch\n"
        f"for name in {names!r}:\n"
        "    package = importlib.import_module(name)\n"
        "    for module in pkgutil.iter_modules(package.__path__):\n"
        "        if name != 'kernelproof':\n"
        "            importlib.import_module(f'{name}.{module.name}')\n"
        "print(torch.cuda.is_initialized())\n"
    )
    assert python(code).splitlines()[-1] == "False"


def test_what_differs_by_operation_stands_in_a_table(repository: Path) -> None:
    """One type is a guard where the code is of one operation; several are a ladder."""
    several: list[str] = []
    for layer in ("reference", "properties", "ci"):
        for file in (repository / layer).rglob("*.py"):
            for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef):
                    types = {
                        name.id
                        for node in ast.walk(function)
                        if isinstance(node, ast.Call)
                        and isinstance(node.func, ast.Name)
                        and node.func.id == "isinstance"
                        for name in ast.walk(node.args[1])
                        if isinstance(name, ast.Name) and name.id.endswith(("Problem", "Inputs"))
                    }
                    several += [f"{file}:{function.lineno}: {types}"] * (len(types) > 1)
    assert not several, "see reference/operations.py, verdicts/operations.py, space/operations.py"
