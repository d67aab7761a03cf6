"""How the site is built: `make docs`, offline, warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

import click
from sphinx.application import Sphinx

from kernelproof.ci.bump.report.page import to_page
from kernelproof.ci.bump.report.shape import read_report
from kernelproof.ci.check.json_schemas import SCHEMAS
from kernelproof.ci.check.pages import PAGES
from kernelproof.ci.cli import cli
from kernelproof.properties.findings.files import dumps

_ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.search(r'^__version__ = "(.+)"$', (_ROOT / "__init__.py").read_text(), re.MULTILINE)

project = "Kernelproof"
author = "the Kernelproof maintainers"
release = _VERSION[1] if _VERSION else ""
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["build"]
nitpicky = True

# Headings can be linked to from three levels down, as on GitHub.
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_ambiguous"]

# The public names, by their docstrings: signatures with their types, fields without a second list.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Types of torch and of the standard library are not looked up: the site is built offline.
nitpick_ignore_regex = [("py:.*", r".*")]

html_theme = "furo"
html_title = f"Kernelproof {release}"
html_copy_source = False
html_show_sourcelink = False
html_permalinks_icon = "#"

# Slow hosts answer late; anchors of GitHub's source views are made by scripts.
linkcheck_timeout = 20
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]

# What docs/bump.md links to as an example: the page of a part of a comparison.
_EXAMPLE = _ROOT / "tests" / "ci" / "bump" / "report.json"

# One entry of a docstring may describe several arguments.
_SEVERAL = re.compile(r"^ {4,}\w+(?:,\s+\w+)+:", re.MULTILINE)


def _join_names(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Write ``a, b: text`` as ``a,b: text``, since Sphinx takes a first word for a type."""
    del app, what, name, thing, options
    text = _SEVERAL.sub(lambda found: re.sub(r",\s+", ",", found[0]), "\n".join(lines))
    lines[:] = text.split("\n")


def _leave_out(app: Sphinx, what: str, name: str, thing: object, *rest: object) -> bool | None:
    """Leave out the fields of named tuples, which their class's docstring describes."""
    del app, what, name, rest
    return (getattr(thing, "__doc__", "") or "").startswith("Alias for field number") or None


def _write_beside(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        page = to_page(read_report(_EXAMPLE))
        (Path(app.outdir) / "bump-example.html").write_text(page, encoding="utf-8")
        for name, schema in SCHEMAS.items():  # to which docs/reports.md links
            (Path(app.outdir) / name).write_text(dumps(schema()), encoding="utf-8")


def _write_pages() -> None:
    """Write the generated pages, which are not kept, beside the others."""
    with click.Context(cli):
        for name, page in PAGES.items():
            path, text = Path(__file__).with_name(name), page()
            # Several builds may run at once: what is right already is left alone.
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Read docstrings as they are written here; write what is generated beside the pages."""
    _write_pages()
    app.connect("autodoc-process-docstring", _join_names, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _leave_out)
    app.connect("build-finished", _write_beside)
