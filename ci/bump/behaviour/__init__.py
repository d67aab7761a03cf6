"""What the same problems give with two releases: outcomes, speed, memory."""

from __future__ import annotations

from ....fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
