"""The name of the declarations' format."""

from __future__ import annotations

SCHEMA = "kernelproof/declarations/1"
