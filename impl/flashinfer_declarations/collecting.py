"""Collects what one FlashInfer release declares; runs in a process of its own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import SCHEMA, architectures, capabilities, headers, surface


def collect(folder: Path, chips: Sequence[int]) -> dict[str, Any]:
    """Collect the declarations of the release in a folder.

    Raises:
        ImportError: there is no flashinfer in it, or it does not import.
    """
    flashinfer = importlib.import_module("flashinfer")
    root = Path(str(flashinfer.__file__)).resolve().parent
    if root.parent != folder.resolve():
        message = f"flashinfer was imported from {root.parent}, not from {folder}"
        raise ImportError(message)
    modules = capabilities.Modules()
    return {
        "schema": SCHEMA,
        "flashinfer": _version(folder, flashinfer.__dict__),
        "chips": list(chips),
        "assumed_cuda": ".".join(map(str, architectures.ASSUMED_CUDA)),
        "capabilities": capabilities.capabilities(root, chips, modules),
        "runners": capabilities.runners(root, modules),
        "configs": capabilities.configs(root, chips, modules),
        "targets": architectures.targets(chips, modules),
        "jit_filters": architectures.jit_filters(root, chips, modules),
        "fixed_flags": architectures.fixed_flags(root),
        "fused_moe_modules": architectures.fused_moe_modules(root),
        "python_checks": architectures.python_checks(root),
        "xqa": capabilities.xqa(modules),
        "fa3": capabilities.fa3(modules),
        "artifacts": surface.artifacts(root),
        "enums": surface.enums(root, modules),
        "signatures": surface.signatures(root, modules),
        "exports": surface.exports(root, modules),
        "refusals": surface.refusals(root, modules),
        "backend_choices": surface.backend_choices(root, modules),
        "dispatch": headers.dispatch(root),
        "fmha_runner": headers.runner_checks(root),
        "compatible_cubins": headers.compatible_cubins(root),
        "launcher_majors": headers.launcher_majors(root),
        "activations": headers.activations(root),
        "constants": headers.header_constants(root),
        "not_imported": dict(sorted(modules.failed.items())),
    }


def main(arguments: Sequence[str]) -> int:
    """Collect, and write the answer.

    Args:
        arguments: the folder that holds the package ``flashinfer`` and stands on the path, the
            file of the answer, and chips.
    """
    folder, answer, *chips = arguments
    declared = collect(Path(folder), [int(chip) for chip in chips])
    Path(answer).write_text(json.dumps(declared), encoding="utf-8")
    return 0


def _version(folder: Path, names: dict[str, Any]) -> str:
    """Return the release of the package in a folder: another one may be installed beside it."""
    for each in metadata.distributions(name="flashinfer-python", path=[str(folder)]):
        return each.version
    try:
        return str(names.get("__version__") or metadata.version("flashinfer-python"))
    except metadata.PackageNotFoundError:
        return ""
