"""What a release needs of the project's address, and what is checked before an upload.

Address and contact stand in one place, ``[tool.kernelproof]`` of pyproject.toml. Commands:

    python .ci/release.py files          write SECURITY and the templates of issues, to be committed
    python .ci/release.py prepare TAG    check the tag; make links absolute, add [project.urls]
    python .ci/release.py check FOLDER   check the archives in it

Exit code 2, with one sentence, where something is missing or wrong.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from string import Template
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT, README = ROOT / "pyproject.toml", ROOT / "README.md"
TEMPLATES, COMMUNITY = ROOT / ".ci" / "templates", ROOT / ".github"
OUTSIDE = r"(?!https?:|mailto:|#)"
LINK = re.compile(
    rf"(?P<image>!\[[^\]]*)?\]\({OUTSIDE}(?P<target>[^)\s]+)\)"
    rf'|(?P<name>src|href)="{OUTSIDE}(?P<place>[^"\s]+)"'
)
"""A link or an image of Markdown, or of HTML in it, to a file of the repository."""
URLS = {
    "Homepage": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}
"""Pages by the names that PyPI knows, below the address."""


class RefusedError(Exception):
    """Why there is no release."""


def place() -> dict[str, str]:
    """Return the project's address and contact.

    Raises:
        RefusedError: one of them is not given: nobody invents it.
    """
    table = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["kernelproof"]
    found = {"address": str(table["address"]).rstrip("/"), "contact": str(table["contact"])}
    wanted = {
        "address": (r"https://[^/\s]+(/[^/\s]+)+", "the https address of a repository"),
        "contact": (r"[^@\s]+@[^@\s]+", "a mail address"),
    }
    for name, (pattern, what) in wanted.items():
        if not re.fullmatch(pattern, found[name]):
            message = f"pyproject.toml: {name} of [tool.kernelproof] must be {what}"
            raise RefusedError(message)
    return found


def community_files() -> dict[Path, str]:
    """Return what belongs into .github, by path."""
    found = place()
    return {
        COMMUNITY / source.relative_to(TEMPLATES): Template(
            source.read_text(encoding="utf-8")
        ).substitute(found)
        for source in sorted(TEMPLATES.rglob("*.*"))
    }


def write_files() -> None:
    """Write SECURITY and the templates of issues."""
    for path, text in community_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def prepare(tag: str) -> None:
    """Turn a checkout into what is published: it is changed only where nothing is amiss.

    Raises:
        RefusedError: address or contact are not given, the tag is not the version's, CHANGELOG has
            no section of it, or .github is not what ``files`` writes.
    """
    found = place()
    version = _version()
    if tag != f"v{version}":
        message = f"the tag is {tag}, but __init__.py says {version}: the tag must be v{version}"
        raise RefusedError(message)
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        message = f"CHANGELOG.md has no section '## [{version}]'"
        raise RefusedError(message)
    for path, text in community_files().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            name, mend = path.relative_to(ROOT), "run python .ci/release.py files, and commit"
            message = f"{name} is not what its template makes: {mend}"
            raise RefusedError(message)
    README.write_text(
        absolute(README.read_text(encoding="utf-8"), found["address"], tag), encoding="utf-8"
    )
    table = "\n".join(f'{name} = "{found["address"]}{page}"' for name, page in URLS.items())
    project = PROJECT.read_text(encoding="utf-8")
    PROJECT.write_text(f"{project}\n[project.urls]\n{table}\n", encoding="utf-8")


def absolute(text: str, address: str, tag: str) -> str:
    """Return Markdown whose links to files of the repository work anywhere.

    Args:
        text: of a page at the repository's root.
        address: of the repository.
        tag: whose files are meant.
    """

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found["image"] or found["name"] == "src" else "blob"
        at = found.start("target" if found["target"] else "place") - found.start()
        return f"{found[0][:at]}{address}/{kind}/{tag}/{found[0][at:]}"

    return LINK.sub(link, text)


def check(folder: Path) -> None:
    """Check what was built.

    Raises:
        RefusedError: there is not one wheel and one source archive of the version, one of them
            holds what it should not, or the description has links that PyPI cannot follow.
    """
    version = _version()
    names = {path.name for path in folder.iterdir()}
    wheel, source = f"kernelproof-{version}-py3-none-any.whl", f"kernelproof-{version}.tar.gz"
    if names != {wheel, source}:
        message = f"{folder} holds {sorted(names)}; it must hold {wheel} and {source}"
        raise RefusedError(message)
    with zipfile.ZipFile(folder / wheel) as archive:
        metadata = email.message_from_bytes(
            archive.read(f"kernelproof-{version}.dist-info/METADATA")
        )
        strays = [name for name in archive.namelist() if not name.startswith("kernelproof")]
    urls = metadata.get_all("Project-URL", [])
    if not urls:
        message = f"{wheel} has no addresses of the project: prepare comes before the build"
        raise RefusedError(message)
    description = metadata.get_payload()
    if (left := LINK.search(str(description))) is not None:
        message = f"{wheel}: its description links to {left['target'] or left['place']}"
        raise RefusedError(message)
    with tarfile.open(folder / source) as archive_of_source:
        inner = [name.partition("/")[2] for name in archive_of_source.getnames()]
    strays += [name for name in inner if name.startswith(("tests", "docs", "."))]
    if strays:
        message = f"strays in what was built: {', '.join(strays[:5])}"
        raise RefusedError(message)


def _version() -> str:
    text = (ROOT / "__init__.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def main(arguments: list[str]) -> int:
    """Run a command, and return its exit code."""
    commands: dict[str, Any] = {
        "files": write_files,
        "prepare": prepare,
        "check": lambda folder: check(Path(folder)),
    }
    try:
        name, *rest = arguments
        commands[name](*rest)
    except RefusedError as error:
        sys.stderr.write(f"release: {error}\n")
        return 2
    except (KeyError, TypeError, ValueError):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
