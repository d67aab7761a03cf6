"""The law book: problems as they are drawn, the laws, and the isolated worker they run in."""

from __future__ import annotations
