"""How the site is built: `make docs`, offline, warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

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
