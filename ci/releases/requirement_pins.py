"""Which release of a package a serving stack's requirements file pins.

Read by ``bump --candidate-from FILE``, so that a pipeline of the stack itself compares what it has
with what a change would bring, without naming a version twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from ...impl.targets.backends import FLASHINFER
from ...impl.targets.data_files import Refusal, read_text, read_toml
from ...impl.targets.schemas import converted
from ..console.errors import UsageRefusedError

MOST_FILES = 100
"""Most files that a requirements file includes, each other's among them."""
COMMENT = re.compile(r"(^|\s)#.*$")
OPTION = re.compile(r"\s--?[A-Za-z][\w-]*(?:[=\s]\S+)?")
"""What pip allows behind a requirement: --hash=sha256:..., --config-settings ..."""
INCLUDED = re.compile(r"(?:-r|--requirement)[=\s]*(?P<path>\S+)$")


class Project(msgspec.Struct):
    """What a project needs, and its extras."""

    dependencies: list[str] = []
    extras: dict[str, list[str]] = msgspec.field(name="optional-dependencies", default_factory=dict)


class ProjectFile(msgspec.Struct):
    """A pyproject.toml."""

    project: Project = msgspec.field(default_factory=Project)


def pinned_release(
    path: Path, distribution: str = FLASHINFER, *, option: str = "--candidate-from"
) -> str:
    """Return the release of a distribution that a requirements file or a pyproject.toml pins.

    Files that a requirements file includes (``-r``) are read too, each once. A line whose
    environment marker does not hold here is left out, as pip would.

    Args:
        path: the path of the file, such as vLLM's ``requirements/cuda.txt`` or SGLang's
            ``python/pyproject.toml``.
        distribution: the distribution that is pinned.
        option: the option that named it, for messages.

    Returns:
        The version, in its normal form, such as ``"0.7.2.post1"``.

    Raises:
        UsageRefusedError: the file cannot be read, has no such line, or does not pin one version;
            the message names the file and the line.
    """
    # Its name may be written flashinfer_python.
    words = r"[-_.]+".join(map(re.escape, distribution.split("-")))
    named = re.compile(rf"{words}(?![\w.-]*[\w-])", re.IGNORECASE)
    found: dict[Version, str] = {}
    lines = _of_project(path, option) if path.suffix == ".toml" else _lines(path, option, set())
    for where, line in lines:
        if not named.match(line):
            continue
        try:
            need = Requirement(OPTION.sub("", line).strip())
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
        except ValueError as error:
            message = f"{option} {where}: {line!r} is no requirement"
            raise UsageRefusedError(message) from error
        (clause, *more) = [*need.specifier, None]
        if clause is None or more != [None] or clause.operator != "==":
            message = f"{option} {where}: {line!r} does not pin one version (==)"
            raise UsageRefusedError(message)
        if clause.version.endswith(".*"):
            message = f"{option} {where}: {line!r} pins a series, not one version"
            raise UsageRefusedError(message)
        found.setdefault(Version(clause.version), where)
    if not found:
        message = f"{option} {path}: pins no {distribution}"
        raise UsageRefusedError(message)
    if len(found) > 1:
        places = ", ".join(f"{version} ({where})" for version, where in found.items())
        message = f"{option} {path}: pins several releases of {distribution}: {places}"
        raise UsageRefusedError(message)
    (version,) = found
    return str(version)


def side(
    name: str, given: str | None, path: Path | None, distribution: str = FLASHINFER
) -> str | None:
    """Return one side of a comparison, which is named or pinned by a file.

    Args:
        name: ``"baseline"`` or ``"candidate"``.
        given: release that is named, if any.
        path: the path of the file that ``--baseline-from`` or ``--candidate-from`` names, if any.
        distribution: the distribution that the file pins.

    Raises:
        UsageRefusedError: both are given; see ``pinned_release`` too.
    """
    if path is None:
        return given
    option = f"--{name}-from"
    if given is not None:
        message = f"{option}: the {name} is named already, {given}"
        raise UsageRefusedError(message)
    return pinned_release(path, distribution, option=option)


def _lines(path: Path, option: str, read: set[Path]) -> Iterator[tuple[str, str]]:
    """Return each logical line of a file, and of those that it includes, with its place."""
    place = Path(os.path.realpath(path))  # which takes a loop of links
    if place in read:
        return
    read.add(place)
    if len(read) > MOST_FILES:
        message = f"{option} {path}: more than {MOST_FILES} files include one another"
        raise UsageRefusedError(message)
    text = read_text(path, _refusal(option))
    begun, whole = 0, ""
    for number, piece in enumerate(text.splitlines(), 1):
        begun = begun or number
        # A comment ends at its line, even with a backslash behind it.
        bare = COMMENT.sub("", piece)
        whole += bare.removesuffix("\\")
        if bare.endswith("\\"):
            continue
        line, where = whole.strip(), f"{path}:{begun}"
        begun, whole = 0, ""
        included = INCLUDED.match(line)
        if included:
            yield from _lines(path.parent / included["path"], option, read)
        elif line:
            yield where, line
    if whole.strip():
        yield f"{path}:{begun}", whole.strip()


def _of_project(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """Return the requirements of a project, and of its extras, with their places."""
    content = read_toml(path, _refusal(option))
    project = converted(content, ProjectFile, f"{option} {path}", UsageRefusedError).project
    tables = {
        "dependencies": project.dependencies,
        **{f"optional-dependencies.{name}": needs for name, needs in project.extras.items()},
    }
    for table, needs in tables.items():
        for need in needs:
            yield f"{path} [project] {table}", need


def _refusal(option: str) -> Refusal:
    return lambda sentence: UsageRefusedError(f"{option} {sentence}")
