"""FlashInfer's public surface: artifacts, enum members, signatures and choices of backends."""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .capabilities import Modules
from .sources import literal, parse, where

ARTIFACTS = "artifacts.py"
ARTIFACT_CLASSES = {"ArtifactPath": "paths", "CheckSumHash": "checksums"}
ENUM_MODULES = ("tllm_enums", "fused_moe", "fused_moe.core", "utils")
PUBLIC = {
    "decode": (
        "BatchDecodeMlaWithPagedKVCacheWrapper.__init__",
        "BatchDecodeMlaWithPagedKVCacheWrapper.plan",
        "BatchDecodeMlaWithPagedKVCacheWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchPrefillWithRaggedKVCacheWrapper.__init__",
        "BatchPrefillWithRaggedKVCacheWrapper.plan",
        "BatchPrefillWithRaggedKVCacheWrapper.run",
        "single_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_ragged_attention_deepseek",
    ),
    "attention": (
        "BatchAttention.__init__",
        "BatchAttention.plan",
        "BatchAttention.run",
        "BatchAttentionWithAttentionSinkWrapper.__init__",
        "BatchAttentionWithAttentionSinkWrapper.plan",
        "BatchAttentionWithAttentionSinkWrapper.run",
    ),
    "mla": (
        "BatchMLAPagedAttentionWrapper.__init__",
        "BatchMLAPagedAttentionWrapper.plan",
        "BatchMLAPagedAttentionWrapper.run",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "cascade": (
        "MultiLevelCascadeAttentionWrapper.__init__",
        "MultiLevelCascadeAttentionWrapper.plan",
        "MultiLevelCascadeAttentionWrapper.run",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "cudnn": ("cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache",
    ),
    "pod": (
        "PODWithPagedKVCacheWrapper.__init__",
        "PODWithPagedKVCacheWrapper.plan",
        "PODWithPagedKVCacheWrapper.run",
    ),
    "xqa": ("xqa", "xqa_mla"),
    "fused_moe": (
        "b12x_fused_moe",
        "cutlass_fused_moe",
        "cute_dsl_fused_moe_nvfp4",
        "fused_topk_deepseek",
        "trtllm_bf16_moe",
        "trtllm_bf16_routed_moe",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_block_scale_routed_moe",
        "trtllm_fp8_per_tensor_scale_moe",
        "trtllm_gen_routing",
        "trtllm_mxint4_block_scale_moe",
    ),
    "quantization": (
        "fp4_quantize",
        "nvfp4_kv_dequantize",
        "nvfp4_kv_quantize",
        "nvfp4_quantize_paged_kv_cache",
    ),
    "gemm": ("SegmentGEMMWrapper.__init__", "SegmentGEMMWrapper.run"),
}
"""The callables that serving engines use, by the module that they are imported from."""


def artifacts(root: Path) -> dict[str, Any]:
    """Return where the precompiled kernels are downloaded from, and their checksums."""
    path = root / ARTIFACTS
    found: dict[str, Any] = {"paths": {}, "checksums": {}, "archs": {}, "source": ""}
    for node in parse(path).body:
        if not (isinstance(node, ast.ClassDef) and node.name in ARTIFACT_CLASSES):
            continue
        found["source"] = found["source"] or where(root, path, node.lineno)
        for name, value in _fields(node):
            kind = "archs" if name.endswith("_ARCHS") else ARTIFACT_CLASSES[node.name]
            found[kind][name] = list(value) if isinstance(value, tuple) else value
    return found


def enums(root: Path, modules: Modules) -> dict[str, dict[str, Any]]:
    """Return the members of the enums that calls take, by name and number."""
    found: dict[str, dict[str, Any]] = {}
    for name in ENUM_MODULES:
        module = modules.load(f"{root.name}.{name}")
        for value in vars(module).values() if module else ():
            own = inspect.isclass(value) and value.__module__.partition(".")[0] == root.name
            if own and issubclass(value, enum.Enum) and value.__name__ not in found:
                members = {member: _plain(each.value) for member, each in value.__members__.items()}
                found[value.__name__] = {"members": members, "source": _place(root, value)}
    return found


def signatures(root: Path, modules: Modules) -> dict[str, dict[str, Any]]:
    """Return the parameters of the public callables, as callers see them."""
    found: dict[str, dict[str, Any]] = {}
    for name, qualified in _public():
        value = attribute(modules.load(f"{root.name}.{name}"), qualified)
        if not callable(value):
            continue
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            continue
        found[f"{name}.{qualified}"] = {
            "parameters": [
                {"name": each.name, "kind": each.kind.name.lower(), **_default(each)}
                for each in parameters
            ],
            "source": _place(root, value),
        }
    return found


def backend_choices(root: Path, modules: Modules) -> dict[str, dict[str, Any]]:
    """Return the names that each public callable or class compares its backend with.

    FlashInfer has no other list of them. A name that is only compared may still be refused later.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, qualified in _public():
        owner = qualified.partition(".")[0]
        value = attribute(modules.load(f"{root.name}.{name}"), owner)
        if value is None or f"{name}.{owner}" in found:
            continue
        path = source_file(value)
        choices = sorted(
            {
                choice
                for node in (parse(path).body if path else ())
                if getattr(node, "name", "") == owner
                for choice in _compared_backends(node)
            }
        )
        if choices:
            found[f"{name}.{owner}"] = {"choices": choices, "source": _place(root, value)}
    return found


def _public() -> Iterator[tuple[str, str]]:
    for name, callables in PUBLIC.items():
        for qualified in callables:
            yield name, qualified


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    """Return the fields of a class that literals are assigned to, in its source."""
    for each in node.body:
        target: ast.expr | None = each.target if isinstance(each, ast.AnnAssign) else None
        if isinstance(each, ast.Assign) and len(each.targets) == 1:
            target = each.targets[0]
        if isinstance(each, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
            value = literal(each.value, {})
            if value is not None:
                yield target.id, value


def _compared_backends(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        left = node.left
        name = left.attr if isinstance(left, ast.Attribute) else getattr(left, "id", "")
        if name.strip("_") not in ("backend", "resolved_backend"):
            continue
        value = literal(node.comparators[0], {})
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple | set):
            yield from (each for each in values if isinstance(each, str))


def attribute(module: ModuleType | None, qualified: str) -> Any:  # noqa: ANN401  anything
    """Return what a dotted name stands for in a module; None where there is no such thing."""
    value: Any = module
    for part in qualified.split("."):
        if value is None:  # which has methods of its own
            return None
        value = getattr(value, part, None)
    return value


def _default(parameter: inspect.Parameter) -> dict[str, str]:
    if parameter.default is inspect.Parameter.empty:
        return {}
    default = parameter.default
    if isinstance(default, enum.Enum):  # whose repr depends on how the class is written
        return {"default": f"{type(default).__name__}.{default.name}"}
    return {"default": repr(default)}


def _plain(value: object) -> object:
    return value if isinstance(value, int | str) else repr(value)


def _place(root: Path, value: object) -> str:
    """Name the place of a definition, behind its decorators; empty where it has none."""
    path = source_file(value)
    if path is None or root not in path.parents:
        return ""
    code = getattr(_undecorated(value), "__code__", None)
    if code is not None:
        return where(root, path, code.co_firstlineno)
    name = getattr(value, "__name__", "")
    lines = [node.lineno for node in parse(path).body if getattr(node, "name", "") == name]
    return where(root, path, lines[0]) if lines else ""


def source_file(value: object) -> Path | None:
    """Return the file that something was written in, behind its decorators; None for no Python."""
    try:
        name = inspect.getsourcefile(_undecorated(value))
    except TypeError:  # no Python
        return None
    return Path(name).resolve() if name else None


def _undecorated(value: Any) -> Any:  # noqa: ANN401  anything
    return value if inspect.isclass(value) or not callable(value) else inspect.unwrap(value)
