"""What two releases have and declare: callables, parameters, enums, support."""

from __future__ import annotations

from ....fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
