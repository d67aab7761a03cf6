"""FlashInfer's public surface: names, artifacts, enums, signatures, backends, refusals."""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .capabilities import Modules
from .sources import literal, parse, scoped, where

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


EXPORTING = (
    "",
    "activation",
    "attention",
    "autotuner",
    "cascade",
    "cudnn",
    "decode",
    "fused_moe",
    "gemm",
    "mla",
    "norm",
    "page",
    "pod",
    "prefill",
    "quantization",
    "rope",
    "sampling",
    "sparse",
    "tllm_enums",
    "triton.cascade",
    "utils",
    "xqa",
)
"""Modules that serving engines import from; the package itself is the empty name."""
UNKNOWN_PART = "..."
"""Text in place of what a message takes from the call."""


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


def exports(root: Path, modules: Modules) -> dict[str, dict[str, str]]:
    """Return the public names of each module, each a class, function, enum or constant."""
    found = {}
    for name in EXPORTING:
        module = modules.load(f"{root.name}.{name}" if name else root.name)
        if module is not None:
            found[name] = {each: _kind(vars(module)[each]) for each in _offered(root, module)}
    return found


def refusals(root: Path, modules: Modules) -> dict[str, list[dict[str, str]]]:
    """Return what the public callables raise and assert: message, condition, place.

    FlashInfer has no list of what a call may not ask for: most of it is said by these.
    """
    found: dict[str, list[dict[str, str]]] = {}
    for name, callables in PUBLIC.items():
        module = modules.load(f"{root.name}.{name}")
        for qualified in callables:
            owner = qualified.partition(".")[0]
            value = attribute(module, owner)
            path = source_file(value) if value is not None else None
            if path is None or f"{name}.{owner}" in found or root not in path.parents:
                continue
            said = list(_refused(root, path, owner))
            if said:
                found[f"{name}.{owner}"] = said
    return found


def _offered(root: Path, module: ModuleType) -> Iterator[str]:
    """Return the names that a module offers: its ``__all__``, or what it has of its own package."""
    listed = getattr(module, "__all__", None)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if listed is not None:
            if name in listed:
                yield name
        elif _kind(value) == "constant" or _own(root, value):
            yield name


def _own(root: Path, value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == root.name


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "enum" if issubclass(value, enum.Enum) else "class"
    if callable(value):
        return "function"
    return "constant" if isinstance(value, bool | int | float | str | tuple) else "other"


def _refused(root: Path, path: Path, owner: str) -> Iterator[dict[str, str]]:
    for node in parse(path).body:
        if getattr(node, "name", "") != owner:
            continue
        for scope, inner in scoped(ast.Module(body=[node], type_ignores=[])):
            for conditions, raised in _raised(inner):
                said = _message(raised)
                if said:
                    yield {
                        "scope": scope,
                        "exception": _exception(raised),
                        "message": said,
                        "when": " and ".join(sorted(conditions)),
                        "source": where(root, path, raised.lineno),
                    }


def _raised(node: ast.AST) -> Iterator[tuple[list[str], ast.Raise | ast.Assert]]:
    """Return what a function's own body raises or asserts, with the conditions around each."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            yield from _under(statement, [])


def _under(
    node: ast.AST, conditions: list[str]
) -> Iterator[tuple[list[str], ast.Raise | ast.Assert]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return  # which `scoped` comes to by itself
    if isinstance(node, ast.Raise):
        yield conditions, node
    elif isinstance(node, ast.Assert):
        yield [*conditions, f"not ({ast.unparse(node.test)})"], node
    elif isinstance(node, ast.If):
        for each in node.body:
            yield from _under(each, [*conditions, *_parts(node.test)])
        for each in node.orelse:
            yield from _under(each, [*conditions, f"not ({ast.unparse(node.test)})"])
    else:
        for child in ast.iter_child_nodes(node):
            yield from _under(child, conditions)


def _parts(test: ast.expr) -> list[str]:
    """Take a condition apart, so that nesting it differently makes no difference."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for value in test.values for part in _parts(value)]
    return [ast.unparse(test)]


def _message(node: ast.Raise | ast.Assert) -> str:
    said = node.msg if isinstance(node, ast.Assert) else node.exc
    if isinstance(said, ast.Call):
        said = said.args[0] if said.args else None
    return " ".join(_text(said).split()) if said is not None else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else UNKNOWN_PART
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


def _exception(node: ast.Raise | ast.Assert) -> str:
    if isinstance(node, ast.Assert):
        return "AssertionError"
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return ast.unparse(raised) if raised is not None else ""
