"""A case's tensors in a folder: inputs, result, the oracle's answer, bounds, and an index."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...properties.findings.files import Output, OutputError, make_folder
from ...properties.worker.keeping import Kept

INDEX = "index.json"
INDEX_SCHEMA = "kernelproof/tensors/1"
SUFFIXES = (".safetensors", ".pt")
"""Suffixes of files of tensors, with and without safetensors."""
MEANINGS = {
    "inputs": "what the kernel was given",
    "result": "what the kernel answered",
    "oracle": "the oracle's answer",
    "bound": "how far each element of the result may be from the oracle's",
}
"""What is in each file, by its name."""


def save_tensors(kept: Kept, folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write a call's tensors and their index.

    Args:
        kept: the call.
        folder: the folder, which is made where it is missing.
        about: what the index says of the case.

    Returns:
        The files: safetensors where that is installed, else ``.pt``, which ``torch.load`` reads
        with ``weights_only=True``.

    Raises:
        OutputError: a file cannot be written.
    """
    suffix, write = _writer()
    groups = {
        "inputs": kept.inputs,
        "result": kept.result or {},
        "oracle": kept.expected,
        "bound": kept.bound,
    }
    files, tensors = [], []
    try:
        make_folder(folder)
        _clear(folder)
        for group, named in groups.items():
            path = folder / f"{group}{suffix}"
            if not named:
                continue
            # Strides are the kernel's to see, and the script's; a file of tensors has none.
            write({name: each.contiguous().clone() for name, each in named.items()}, path)
            files.append(path)
            tensors += [_entry(name, each, path.name, group) for name, each in named.items()]
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save
        why = getattr(error, "strerror", None) or error
        message = f"--save {folder}: cannot be written ({why})"
        raise OutputError(message) from error
    index = {"schema": INDEX_SCHEMA, **about, "operation": kept.operation, "call": kept.number,
             "wrong": kept.wrong, "inputs": kept.record, "tensors": tensors}  # fmt: skip
    Output("--save", folder / INDEX).write(index)
    return [*files, folder / INDEX]


def _clear(folder: Path) -> None:
    """Remove the tensors of a case that was saved here before, and nothing of others.

    Raises:
        OutputError: a file of such a name is there, and no index of ours.
    """
    names = [f"{group}{suffix}" for group in MEANINGS for suffix in SUFFIXES]
    there = [folder / name for name in names if (folder / name).exists()]
    try:
        ours = json.loads((folder / INDEX).read_bytes())["schema"] == INDEX_SCHEMA
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if there and not ours:
        message = f"--save {folder}: {there[0].name} is there, and was not written by --save"
        raise OutputError(message)
    for each in there:
        each.unlink()


def _entry(name: str, tensor: torch.Tensor, file: str, group: str) -> dict[str, Any]:
    return {
        "name": name,
        "file": file,
        "meaning": MEANINGS[group],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
    }


def _writer() -> tuple[str, Callable[[dict[str, torch.Tensor], Path], None]]:
    """Return the files' suffix, and what writes one."""
    if importlib.util.find_spec("safetensors") is not None:
        return SUFFIXES[0], importlib.import_module("safetensors.torch").save_file
    return SUFFIXES[1], torch.save
