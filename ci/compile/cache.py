"""Results of compiling objects, remembered between runs under the user's cache folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ...impl.targets.data_files import read_json
from ...properties.findings.files import dumps, write_text
from ..releases.sandboxes import cache_folder
from .nvcc import UNDECIDED, Compiled


def recall(key: str) -> Compiled | None:
    """Return what is remembered; None where there is nothing, or nothing that can be read."""
    try:
        return Compiled(**read_json(_file(key), ValueError))
    except (ValueError, TypeError):
        return None


def remember(key: str, compiled: Compiled) -> str:
    """Keep a result, unless it is the machine's fault; say why it could not be kept."""
    if compiled.state == UNDECIDED:
        return ""
    try:
        write_text(_file(key), dumps(asdict(compiled)))
    except OSError as error:
        return f"{cache_folder()}: nothing can be kept there ({error.strerror})"
    return ""


def _file(key: str) -> Path:
    return cache_folder() / "compile" / key[:2] / f"{key}.json"
