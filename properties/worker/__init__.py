"""What a worker does when it is asked, and how it is asked."""

from __future__ import annotations

from ...fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
