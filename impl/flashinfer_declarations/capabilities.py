"""Capabilities that FlashInfer declares by decorators and class attributes.

A decorated callable is asked itself (``is_backend_supported`` and
``is_compute_capability_supported``). One in a module that does not import on this machine is read
from its source instead: the literals of its decorators, and of its checkers' decorators.

XQA's generator, which refuses what it has no kernel for before anything is compiled, and FA3's
selection, a plain function, are asked about head dimensions, page sizes and data types.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .sources import (
    constants,
    module_name,
    name_of,
    numbers,
    parse,
    python_files,
    scoped,
    where,
)

NO_CHIP = 10**6
REQUIREMENT, CAPABILITY = "backend_requirement", "supported_compute_capability"
HEAD_DIMS = (16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)
PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
STORED = {**{name: name for name in DTYPES}, "nvfp4": "uint8"}
"""What FlashInfer takes for each element format of a KV cache."""
XQA_CALL: dict[str, Any] = {
    "input_dtype": torch.bfloat16,
    "kv_cache_dtype": torch.bfloat16,
    "output_dtype": torch.bfloat16,
    "page_size": 16,
    "head_dim": 128,
    "head_group_ratio": 4,
    "use_sliding_window": False,
    "q_seq_len": 1,
}


class Modules:
    """Imports modules once, and keeps in ``failed`` why one could not be."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def load(self, name: str) -> ModuleType | None:
        """Import a module; None if that fails."""
        if name in self.failed:
            return None
        try:
            return importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  whatever a release raises on a CPU
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return None


@dataclass(frozen=True)
class _Decorated:
    """A decorated function as its source has it."""

    name: str
    line: int
    requirement: ast.Call | None
    ccs: ast.expr | None


def capabilities(root: Path, chips: Sequence[int], modules: Modules) -> list[dict[str, Any]]:
    """List the decorated callables with the chips of each backend and of the common check."""
    files = python_files(root)
    found = []
    for path in sorted({*files["requirement"], *files["capability"]}):
        tree = parse(path)
        decorated = {each.name: each for each in _decorated(tree)}
        used = {
            name
            for each in decorated.values()
            if each.requirement is not None
            for name in _names(each.requirement)
        }
        public = [each for name, each in decorated.items() if name not in used]
        module = modules.load(module_name(root, path)) if public else None
        for each in public:
            asked = _ask(module, each, chips)
            backends, common = asked or _read(each, decorated, constants(tree))
            found.append(
                {
                    "api": f"{module_name(root, path).partition('.')[2]}.{each.name}",
                    "decorator": CAPABILITY if each.requirement is None else REQUIREMENT,
                    "how": "asked" if asked else "read",
                    "backends": backends,
                    "common": common,
                    "source": where(root, path, each.line),
                }
            )
    return found


def runners(root: Path, modules: Modules) -> list[dict[str, Any]]:
    """List the MoE runner classes that carry ``_supported_archs``."""
    return [
        {"runner": name, "chips": sorted(archs), "source": place}
        for name, value, place in _classes(root, "archs", modules)
        if isinstance(archs := getattr(value, "_supported_archs", None), tuple)
    ]


def configs(root: Path, chips: Sequence[int], modules: Modules) -> list[dict[str, Any]]:
    """List the MoE configuration classes with the chips that their ``supported`` answers for.

    One that admits a chip that will never be compares with ``>=``, and names none.
    """
    return [
        {
            "config": name,
            "chips": [chip for chip in chips if ask(chip)],
            "open_ended": bool(ask(NO_CHIP)),
            "source": place,
        }
        for name, value, place in _classes(root, "configs", modules)
        if inspect.ismethod(ask := getattr(value, "supported", None))
    ]


def _classes(root: Path, needle: str, modules: Modules) -> Iterator[tuple[str, type[object], str]]:
    """Return the classes of the modules that hold a needle, with their places."""
    for path in python_files(root)[needle]:
        module = modules.load(module_name(root, path))
        for node in parse(path).body:
            value = getattr(module, node.name, None) if isinstance(node, ast.ClassDef) else None
            if isinstance(node, ast.ClassDef) and inspect.isclass(value):
                yield node.name, value, where(root, path, node.lineno)


def _decorated(tree: ast.Module) -> Iterator[_Decorated]:
    for name, node in scoped(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        calls = {name_of(each): each for each in node.decorator_list if isinstance(each, ast.Call)}
        requirement, capability = calls.get(REQUIREMENT), calls.get(CAPABILITY)
        if requirement or capability:
            ccs = None
            if capability is not None:
                named = [each.value for each in capability.keywords]
                ccs = next(iter([*capability.args, *named]), None)
            yield _Decorated(name, node.lineno, requirement, ccs)


def _names(call: ast.Call) -> set[str]:
    return {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}


Answer = tuple[dict[str, list[int] | None], list[int] | None]


def _ask(module: ModuleType | None, each: _Decorated, chips: Sequence[int]) -> Answer | None:
    """Ask a callable itself; None if there is none, or it does not answer."""
    value: object = module
    for part in each.name.split("."):
        value = getattr(value, part, None)
    if not hasattr(value, "is_compute_capability_supported"):
        return None
    asked: Any = value
    try:
        names = _backends(asked)
        backends: dict[str, list[int] | None] = {
            name: [chip for chip in chips if asked.is_backend_supported(name, chip)]
            for name in names
        }
        common = _common(asked)
        return backends, None if common is None else [chip for chip in chips if common(chip)]
    except (AttributeError, TypeError, ValueError):  # a release that declares in another way
        return None


def _closure(function: object) -> Mapping[str, Any]:
    """Return what a function has closed over; FlashInfer keeps no other list of backends."""
    plain = inspect.unwrap(function) if callable(function) else function
    code, cells = getattr(plain, "__code__", None), getattr(plain, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _backends(asked: Any) -> list[str]:  # noqa: ANN401  whatever a release decorates
    if not hasattr(asked, "has_backend_choices") or not asked.has_backend_choices():
        return []
    return list(_closure(asked.is_backend_supported)["backend_checks"])


def _common(asked: Any) -> Callable[[int], bool] | None:  # noqa: ANN401
    """Return the test of the check that all backends share."""
    if not hasattr(asked, "has_backend_choices"):
        plain: Callable[[int], bool] = asked.is_compute_capability_supported
        return plain
    check = _closure(asked.is_compute_capability_supported).get("common_check")
    return getattr(check, "is_compute_capability_supported", None)


def _read(
    each: _Decorated, decorated: Mapping[str, _Decorated], known: Mapping[str, ast.expr]
) -> Answer:
    """Read the literals of a callable's decorators."""

    def ccs(node: ast.expr | None) -> list[int] | None:
        checker = decorated.get(node.id) if isinstance(node, ast.Name) else None
        return numbers(checker.ccs, known) if checker else None

    if each.requirement is None:
        return {}, numbers(each.ccs, known)
    arguments: dict[str | None, ast.expr] = dict(
        zip(("backend_checks", "common_check"), each.requirement.args, strict=False)
    )
    arguments |= {keyword.arg: keyword.value for keyword in each.requirement.keywords}
    checks = arguments.get("backend_checks")
    backends: dict[str, list[int] | None] = {}
    if isinstance(checks, ast.Dict):
        for key, value in zip(checks.keys, checks.values, strict=True):
            if isinstance(key, ast.Constant):
                backends[str(key.value)] = ccs(value)
    return backends, ccs(arguments.get("common_check"))


def xqa(modules: Modules) -> dict[str, Any]:
    """Return the head dimensions and page sizes for which XQA has a kernel; empty if unknown."""
    module = modules.load("flashinfer.jit.xqa")
    generate = getattr(module, "gen_xqa_module", None)
    if generate is None:
        return {}
    known = inspect.signature(generate).parameters
    call = {name: value for name, value in XQA_CALL.items() if name in known}

    def admits(**changed: int) -> bool:
        try:
            generate(**{**call, **changed})
        except ValueError:
            return False
        return True

    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    try:
        return {
            "head_dims": [each for each in HEAD_DIMS if admits(head_dim=each)],
            "page_sizes": [each for each in PAGE_SIZES if admits(page_size=each)],
            "source": "flashinfer.jit.xqa.gen_xqa_module",
        }
    except Exception as error:  # noqa: BLE001  a release with another generator is not known
        modules.failed["flashinfer.jit.xqa.gen_xqa_module"] = f"{type(error).__name__}: {error}"
        return {}


def fa3(modules: Modules) -> dict[str, Any]:
    """Return the dtypes, masks and head dimensions that FA3 is selected for; empty if unknown."""
    utils = modules.load("flashinfer.utils")
    ask = getattr(utils, "is_fa3_backend_supported", None)
    if utils is None or ask is None:
        return {}
    plain = utils.PosEncodingMode.NONE.value

    def admits(q_dtype: str, stored: str, *, custom_mask: bool = False) -> bool:
        answer = ask(plain, False, custom_mask, _torch(q_dtype), _torch(stored))  # noqa: FBT003
        return bool(answer)

    try:
        return {
            "dtypes": [
                [q_dtype, kv_dtype]
                for q_dtype in DTYPES
                for kv_dtype, stored in STORED.items()
                if admits(q_dtype, stored)
            ],
            "custom_mask": admits("float16", "float16", custom_mask=True),
            "head_dims": _head_dims(getattr(utils, "is_fa3_prefill_head_dim_supported", None)),
            "source": "flashinfer.utils.is_fa3_backend_supported",
        }
    except Exception as error:  # noqa: BLE001  a release with another selection is not known
        modules.failed["flashinfer.utils.is_fa3_backend_supported"] = f"{error}"
        return {}


def _head_dims(ask: Callable[[int, int], bool] | None) -> list[list[int]] | None:
    """Return the pairs of head dimensions of FA3's prefill; None where they are not restricted."""
    if ask is None:
        return None
    pairs: Iterable[tuple[int, int]] = [*((each, each) for each in HEAD_DIMS), (192, 128)]
    return [list(pair) for pair in pairs if ask(*pair)]


def _torch(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
