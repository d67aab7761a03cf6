"""Tensors without values, and tensors that ask for gradients, in every call of the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelproof import reference
from kernelproof.reference import (
    AttentionOutput,
    BatchMetadata,
    KVCacheFormat,
    QuantizedFormat,
    Routing,
    build_metadata,
    compare_routing,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)

INT32 = torch.int32
BATCH: dict[str, Any] = {
    "query_lens": torch.tensor([1, 2]),
    "seq_lens": torch.tensor([3, 4]),
    "block_table": torch.tensor([[1, 0], [2, 3]]),
}
METADATA = build_metadata(**BATCH, page_size=2)
X = torch.linspace(-1, 1, 256).view(4, 64)
STATES = {"outs": torch.ones(2, 3, 2, 4), "lses": torch.ones(2, 3, 2)}
NEW = {"k": torch.ones(3, 1, 16), "v": torch.ones(3, 1, 16)}
CACHES = {"k_cache": torch.ones(4, 2, 1, 16), "v_cache": torch.ones(4, 2, 1, 16)}
ROPE = {
    **{name: torch.ones(3, 1, 16) for name in ("q", "k", "v")},
    "cos_sin": torch.ones(2, 8),
    "positions": torch.tensor([0, 1, 1]),
    "slots": torch.tensor([0, 2, -1]),
}
OPTIONS = {
    "sinks": torch.zeros(2),
    "custom_mask": torch.ones(3 + 8, dtype=torch.bool),
    "q_scale": torch.ones(2),
    "k_scale": torch.ones(1),
    "v_scale": torch.ones(1),
}
PAGED: dict[str, Any] = {"q": torch.ones(3, 2, 16), **CACHES, "metadata": METADATA, **OPTIONS}
RAGGED: dict[str, Any] = {
    "q": torch.ones(3, 2, 16),
    "k": torch.ones(7, 1, 16),
    "v": torch.ones(7, 1, 16),
    "qo_indptr": torch.tensor([0, 1, 3], dtype=INT32),
    "kv_indptr": torch.tensor([0, 3, 7], dtype=INT32),
    **OPTIONS,
}
LOGITS = torch.arange(12.0).view(3, 4)
ROUTE: dict[str, Any] = {
    "logits": LOGITS,
    "top_k": 2,
    "bias": torch.zeros(4),
    "method": "deepseek_v3",
}
EXPERTS = {
    "hidden": torch.ones(3, 4),
    "w13": torch.ones(4, 6, 4),
    "w2": torch.ones(4, 4, 3),
    "topk_ids": torch.zeros(3, 2, dtype=INT32),
    "topk_weights": torch.ones(3, 2),
    "w13_bias": torch.zeros(4, 6),
}
ROWS = {
    "hidden": torch.ones(4, 2, 4),
    "w13": EXPERTS["w13"],
    "w2": EXPERTS["w2"],
    "counts": torch.ones(4, dtype=INT32),
    "w13_bias": EXPERTS["w13_bias"],
}
NIBBLES = torch.zeros(4, 64, dtype=torch.uint8)


def compared(logits: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Any:  # noqa: ANN401
    return compare_routing(Routing(topk_ids, topk_weights), logits, 2)


def nvfp4_attention(k_scales: torch.Tensor, v_scales: torch.Tensor) -> AttentionOutput:
    cache = torch.zeros(4, 2, 1, 8, dtype=torch.uint8)
    kv_format = KVCacheFormat("nvfp4", storage="uint8")
    return reference.paged_attention(
        PAGED["q"], cache, cache, METADATA, kv_format=kv_format, kv_cache_sf=(k_scales, v_scales)
    )


BLOCK_SCALES = torch.ones(4, 2, 1, 1).to(torch.float8_e4m3fn)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        name: (getattr(reference, name), arguments)
        for name, arguments in {
            "build_metadata": {**BATCH, "page_size": 2},
            "split_decodes_and_prefills": {"query_lens": BATCH["query_lens"]},
            "paged_attention": PAGED,
            "attention_error_bound": PAGED,
            "ragged_attention": RAGGED,
            "ragged_attention_error_bound": RAGGED,
            "merge_states": STATES,
            "merge_error_bound": STATES,
            "append_paged_kv": {**NEW, **CACHES, "metadata": METADATA},
            "route": ROUTE,
            "moe": EXPERTS,
            "batched_moe": ROWS,
            "moe_error_bound": EXPERTS,
            "quantize_fp8": {"x": X, "scale": torch.ones(1)},
            "dequantize_fp8": {"codes": quantize_fp8(X), "scale": torch.ones(1)},
            "quantize": {"x": X, "to": QuantizedFormat(), "scale": torch.ones(1)},
            "norm_and_quantize": {
                "x": X,
                "gamma": torch.ones(X.shape[1]),
                "to": QuantizedFormat(),
                "residual": X,
                "scale": torch.ones(1),
            },
            "rope_and_append": {**ROPE, "paged_kv_cache": tuple(CACHES.values())},
            "quantize_e2m1": {"x": X},
            "dequantize_e2m1": {"codes": NIBBLES},
            "pack_e2m1": {"codes": NIBBLES},
            "unpack_e2m1": {"packed": NIBBLES},
            "dequantize_e8m0": {"codes": NIBBLES},
            "quantize_nvfp4": {"x": X, "global_scale": torch.ones(1)},
            "dequantize_nvfp4": quantize_nvfp4(X, torch.ones(1))._asdict(),
            "quantize_mxfp4": {"x": X},
            "dequantize_mxfp4": quantize_mxfp4(X)._asdict(),
            "quantize_mxfp8": {"x": X},
            "dequantize_mxfp8": quantize_mxfp8(X)._asdict(),
        }.items()
    },
    "compare_routing": (
        compared,
        {"logits": LOGITS, "topk_ids": EXPERTS["topk_ids"], "topk_weights": torch.ones(3, 2)},
    ),
    "nvfp4": (nvfp4_attention, {"k_scales": BLOCK_SCALES, "v_scales": BLOCK_SCALES}),
}
OTHERS = {
    # The checks of append_paged_kv and of caches.
    "append_error_bound",
    "append_paged_nvfp4",
    "append_paged_scaled",
    "materialise",  # of a problem
    "problem_from_json",
    "map_slots",  # of integers, which it brings to the host, as the next
    "plan",
    "prepare_batch",
    "slice_context_parallel",  # of metadata, as the next
    "slice_phases",
    "unit_roundoff",  # of a dtype
    # Permutations, which read no value.
    "deinterleave_v_scales",
    "interleave_v_scales",
    "rearrange",
    "swizzle_scales_128x4",
    "unswizzle_scales_128x4",
}


@functools.cache
def mode() -> FakeTensorMode:
    """Make it for a test only: it imports torch's compiler, which takes 1.7 s."""
    return FakeTensorMode()


WITHOUT_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "on the device 'meta'": lambda tensor: tensor.to("meta"),
    "a FakeTensor": lambda tensor: mode().from_tensor(tensor),
}
TENSORS = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name, (_, arguments) in CALLS.items()
    for argument, value in arguments.items()
    if isinstance(value, torch.Tensor)
]


def test_every_function_is_here() -> None:
    functions = {
        name for name in reference.__all__ if type(getattr(reference, name)) is type(compared)
    }
    assert functions == OTHERS | CALLS.keys() - {"nvfp4"}


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_a_tensor_without_values_is_refused_by_name(name: str, argument: str, kind: str) -> None:
    function, arguments = CALLS[name]
    changed = {**arguments, argument: WITHOUT_VALUES[kind](arguments[argument])}
    called = {"k_scales": "kv_cache_sf of k", "v_scales": "kv_cache_sf of v"}
    if name == "dequantize_e8m0":
        called["codes"] = "block_scales"
    with pytest.raises(ValueError, match=f"^{called.get(argument, argument)}.* is {kind}"):
        function(**changed)


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_metadata_without_values_are_refused(kind: str) -> None:
    change = WITHOUT_VALUES[kind]
    tensors: dict[str, Any] = {name: change(each) for name, each in METADATA.tensors().items()}
    with pytest.raises(ValueError, match=f"^qo_indptr is {kind}"):
        reference.paged_attention(**PAGED | {"metadata": BatchMetadata(**tensors, page_size=2)})


@pytest.mark.parametrize("name", CALLS)
def test_results_carry_no_gradients(name: str) -> None:
    function, arguments = CALLS[name]
    result = function(
        **{
            argument: value.clone().requires_grad_()
            if isinstance(value, torch.Tensor)
            and value.dtype.is_floating_point
            and value.dtype.itemsize > 1
            else value
            for argument, value in arguments.items()
        }
    )
    parts = result if isinstance(result, tuple) else (result,)
    assert not any(part.requires_grad for part in parts if isinstance(part, torch.Tensor))
