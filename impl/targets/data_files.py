"""Data files as they are read: TOML and JSON, refused in a sentence that names the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Refusal = Callable[[str], Exception]
"""Makes the exception of a sentence."""


def read_toml(path: Path, refusal: Refusal) -> dict[str, Any]:
    """Return what a TOML file holds; raise the refusal where it cannot be read or is no TOML."""
    table: dict[str, Any] = _parsed(path, refusal, "TOML", tomllib.loads)
    return table


def read_json(path: Path, refusal: Refusal) -> Any:  # noqa: ANN401  JSON
    """Return what a JSON file holds; raise the refusal where it cannot be read or is no JSON."""
    return _parsed(path, refusal, "JSON", json.loads)


def _parsed(path: Path, refusal: Refusal, language: str, parse: Callable[[str], Any]) -> Any:  # noqa: ANN401  of the file
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror})"
        raise refusal(message) from error
    except (ValueError, RecursionError) as error:
        message = f"{path}: not {language} ({error})"
        raise refusal(message) from error
