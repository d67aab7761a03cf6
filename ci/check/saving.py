"""A case's tensors in a folder: inputs, result, the oracle's answer, bounds, and an index."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...properties.findings.files import Output, OutputError
from ...properties.worker.keeping import Kept

INDEX = "index.json"
INDEX_SCHEMA = "kernelproof/tensors/1"
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
        folder: is made where it is missing.
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
        folder.mkdir(parents=True, exist_ok=True)
        for group, named in groups.items():
            path = folder / f"{group}{suffix}"
            path.unlink(missing_ok=True)  # of a case that was saved before
            if not named:
                continue
            # Strides are the kernel's to see, and the script's; a file of tensors has none.
            write({name: each.contiguous().clone() for name, each in named.items()}, path)
            files.append(path)
            tensors += [_entry(name, each, path.name, group) for name, each in named.items()]
    except OSError as error:
        message = f"--save {folder}: cannot be written ({error.strerror})"
        raise OutputError(message) from error
    index = {"schema": INDEX_SCHEMA, **about, "operation": kept.operation, "call": kept.number,
             "wrong": kept.wrong, "inputs": kept.record, "tensors": tensors}  # fmt: skip
    Output("--save", folder / INDEX).write(index)
    return [*files, folder / INDEX]


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
        return ".safetensors", importlib.import_module("safetensors.torch").save_file
    return ".pt", torch.save
