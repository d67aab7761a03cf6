"""Checking the shape of a file where that is possible: with msgspec, which is not everywhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from .data_files import Refusal


def checked(data: Any, schema: Callable[[], Any], source: object, refusal: Refusal) -> None:  # noqa: ANN401  of a file
    """Refuse data that has not the shape of a schema, where msgspec is there to see it.

    An interpreter that Kernelproof is lent to has what FlashInfer needs, and no msgspec; the
    process that lends has read the same files.

    Args:
        data: the data of a file.
        schema: imports the type, see ``schemas.converted``, and returns it.
        source: named first in the sentence.
        refusal: makes the exception.
    """
    if find_spec("msgspec") is not None:
        from .schemas import converted

        converted(data, schema(), source, refusal)
