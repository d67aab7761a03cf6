"""How the site is built: `make docs`, offline, warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from kernelproof.ci.bump.report.page import to_page
from kernelproof.ci.bump.report.reading import read_report

_ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.search(r'^__version__ = "(.+)"$', (_ROOT / "__init__.py").read_text(), re.MULTILINE)

project = "Kernelproof"
author = "the Kernelproof maintainers"
release = _VERSION[1] if _VERSION else ""
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["build"]
nitpicky = True

# Headings can be linked to from three levels down, as on GitHub.
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_ambiguous"]

html_theme = "furo"
html_title = f"Kernelproof {release}"
html_copy_source = False
html_show_sourcelink = False
html_permalinks_icon = "#"

# Slow hosts answer late; anchors of GitHub's source views are made by scripts.
linkcheck_timeout = 20
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]

# What docs/bump.md links to as an example: the page of a comparison that is kept.
_EXAMPLE = _ROOT / "fixtures" / "evidence" / "bump-h200.json"


def _write_example(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        page = to_page(read_report(_EXAMPLE))
        (Path(app.outdir) / "bump-example.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Write the example report beside the pages."""
    app.connect("build-finished", _write_example)
