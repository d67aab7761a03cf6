"""Writing results: JSON that every reader takes, files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path


def dumps(data: object) -> str:
    """Give JSON that every reader takes: infinities and NaN become strings."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text of unknown origin may hold lone surrogates.
    data = text.encode(errors="backslashreplace")
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_bytes(data)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
