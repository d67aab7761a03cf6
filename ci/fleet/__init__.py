"""One run over many machines: its parts, what carries them out, and their results as one report."""

from __future__ import annotations
