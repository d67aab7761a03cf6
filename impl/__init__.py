"""What is under test, behind one small protocol: ``@implementation("paged_attention", name=...)``.

Plug in your own kernel with the decorator, and find it again by ``MODULE:NAME``.
"""

from __future__ import annotations

from ..reference import Arithmetic, AttentionOutput
from .protocol import OPERATIONS, Implementation, implementation
from .registry import BUILT_IN, ImplementationNotFoundError, find_implementation
from .target import Target, UnsupportedError

__all__ = [
    "BUILT_IN",
    "OPERATIONS",
    "Arithmetic",
    "AttentionOutput",
    "Implementation",
    "ImplementationNotFoundError",
    "Target",
    "UnsupportedError",
    "find_implementation",
    "implementation",
]
