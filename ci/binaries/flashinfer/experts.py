"""The arguments of FlashInfer's trtllm-gen MoE for a kind of call: tensors that nothing reads.

Which quantisation a call has, the release reads off dtypes and numbers of scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....impl.flashinfer.names import ACTIVATION_NAMES, ROUTING_MEMBERS
from .questions import MOE_FUNCTIONS

ENUMS = ("ActivationType", "RoutingMethodType", "Fp8QuantizationType")
"""The release's enums that the arguments need."""
ON_GPU = "on_gpu"
"""Attribute of tensors that the launcher checks to be a GPU's."""
GATED = ("swiglu", "swiglu_oai", "geglu")
BIASED = ("deepseek_v3", "minimax2")
"""Routing methods that add a bias to the scores of experts."""
GROUPS, CHOSEN_GROUPS, ROUTED_SCALE = 8, 4, 2.5
"""DeepSeek-V3's routing: groups of many experts, groups that are chosen, and a factor."""
BLOCK = 128
"""Channels, and rows of a weight, that share a scale in FP8 with blocks."""
BLOCK_BYTES = 128
"""Bytes of a block of the layout of 16-bit weights."""
MX_BLOCK, NV_BLOCK = 32, 16
"""Elements that share a scale in MXFP8 and MXFP4, and in NVFP4."""
EIGHT, BYTES, WIDE, BRAIN = torch.float8_e4m3fn, torch.uint8, torch.float32, torch.bfloat16
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class NoMemberError(ValueError):
    """An enum of a release that has no such member: it cannot be asked for that."""


Make = Callable[..., torch.Tensor]
"""Makes a tensor of a shape and a ``dtype``."""


def moe_arguments(
    make: Make, feature: Mapping[str, Any], call: Mapping[str, int], enums: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the name of the function for a kind of call, and its arguments.

    Args:
        make: makes a tensor.
        feature: fields of the kind of call.
        call: its tokens and sizes.
        enums: the release's enums of ``ENUMS`` by name.

    Raises:
        NoMemberError: the release has no such activation, routing method or quantisation.
    """
    quantisation, activation = feature["quantisation"], feature["activation"]
    routing, experts = feature["routing"], call["num_experts"]
    grouped = routing == "deepseek_v3"
    groups = GROUPS if experts >= GROUPS * GROUPS else 1
    bias = feature["routing_bias_dtype"] or ("bfloat16" if routing in BIASED else "")
    arguments: dict[str, Any] = {
        "routing_logits": make(call["tokens"], experts, dtype=WIDE if grouped else torch.bfloat16),
        "routing_bias": make(experts, dtype=DTYPES[bias]) if bias else None,
        "num_experts": experts,
        "top_k": call["top_k"],
        "n_group": groups if grouped else None,
        "topk_group": min(groups, CHOSEN_GROUPS) if grouped else None,
        "intermediate_size": call["intermediate_size"],
        "local_expert_offset": 0,
        "local_num_experts": call["local_experts"],
        "routed_scaling_factor": ROUTED_SCALE if grouped else None,
        "routing_method_type": _member(enums, "RoutingMethodType", ROUTING_MEMBERS[routing]).value,
        **_FORMS[quantisation](make, feature, call),
    }
    if quantisation in ("fp8_block", "mxfp8"):
        name = "MxFp8" if quantisation == "mxfp8" else "DeepSeekFp8"
        arguments["fp8_quantization_type"] = _member(enums, "Fp8QuantizationType", name)
    if activation == "swiglu_oai":
        for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
            arguments[name] = make(call["local_experts"], dtype=WIDE)
            setattr(arguments[name], ON_GPU, True)
    elif activation != "swiglu":  # functions of old releases have no parameter for another
        member = _member(enums, "ActivationType", ACTIVATION_NAMES[activation])
        arguments["activation_type"] = member.value
    return MOE_FUNCTIONS[quantisation], arguments


def _member(enums: Mapping[str, Any], enum: str, name: str) -> Any:  # noqa: ANN401  a member
    found = getattr(enums[enum], name, None)
    if found is None:
        message = f"{enum} has no {name}"
        raise NoMemberError(message)
    return found


def _rows(feature: Mapping[str, Any], call: Mapping[str, int]) -> int:
    """Return the rows of an expert's first weight."""
    inner: int = call["intermediate_size"]
    return 2 * inner if feature["activation"] in GATED else inner


def _plain(make: Make, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
    local, hidden, inner = call["local_experts"], call["hidden_size"], call["intermediate_size"]
    block = BLOCK_BYTES // 2
    dtype = DTYPES[feature["q_dtype"]]
    return {
        "hidden_states": make(call["tokens"], hidden, dtype=dtype),
        "gemm1_weights": make(local, hidden // block, _rows(feature, call), block, dtype=dtype),
        "gemm2_weights": make(local, inner // block, hidden, block, dtype=dtype),
    }


def _per_tensor(make: Make, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
    scale = make(call["local_experts"], dtype=WIDE)
    return {
        **_weights(make, feature, call, EIGHT, 1),
        "hidden_states": make(call["tokens"], call["hidden_size"], dtype=EIGHT),
        "output1_scales_scalar": scale,
        "output1_scales_gate_scalar": scale,
        "output2_scales_scalar": scale,
        "use_routing_scales_on_input": feature["weights_on_input"],
    }


def _weights(
    make: Make, feature: Mapping[str, Any], call: Mapping[str, int], dtype: torch.dtype, packed: int
) -> dict[str, Any]:
    local, hidden, inner = call["local_experts"], call["hidden_size"], call["intermediate_size"]
    return {
        "gemm1_weights": make(local, _rows(feature, call), hidden // packed, dtype=dtype),
        "gemm2_weights": make(local, hidden, inner // packed, dtype=dtype),
    }


def _scales(
    make: Make,
    feature: Mapping[str, Any],
    call: Mapping[str, int],
    dtype: torch.dtype,
    rows: int,
    columns: int,
) -> dict[str, Any]:
    """Return scales of both weights, of blocks of some rows and columns."""
    local, hidden, inner = call["local_experts"], call["hidden_size"], call["intermediate_size"]
    first = (local, _rows(feature, call) // rows, hidden // columns)
    return {
        "gemm1_weights_scale": make(*first, dtype=dtype),
        "gemm2_weights_scale": make(local, hidden // rows, inner // columns, dtype=dtype),
    }


def _blocks(make: Make, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
    tokens, hidden = call["tokens"], call["hidden_size"]
    return {
        **_weights(make, feature, call, EIGHT, 1),
        **_scales(make, feature, call, WIDE, BLOCK, BLOCK),
        "hidden_states": make(tokens, hidden, dtype=EIGHT),
        "hidden_states_scale": make(hidden // BLOCK, tokens, dtype=WIDE),
    }


def _mxfp8(make: Make, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
    tokens, hidden = call["tokens"], call["hidden_size"]
    return {
        **_weights(make, feature, call, EIGHT, 1),
        **_scales(make, feature, call, BYTES, 1, MX_BLOCK),
        "hidden_states": make(tokens, hidden, dtype=EIGHT),
        "hidden_states_scale": make(tokens, hidden // MX_BLOCK, dtype=BYTES),
        "use_shuffled_weight": True,
    }


def _four(make: Make, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
    tokens, hidden, local = call["tokens"], call["hidden_size"], call["local_experts"]
    quantisation = feature["quantisation"]
    states: tuple[torch.Tensor, torch.Tensor | None]
    if quantisation == "nvfp4":
        block = NV_BLOCK
        states = (
            make(tokens, hidden // 2, dtype=BYTES),
            make(tokens, hidden // NV_BLOCK, dtype=EIGHT),
        )
    elif quantisation in ("mxfp4", "w4a8"):
        block = MX_BLOCK
        states = make(tokens, hidden, dtype=EIGHT if quantisation == "w4a8" else BRAIN), None
    else:
        block = MX_BLOCK
        scale = make(tokens, hidden // MX_BLOCK, dtype=EIGHT)
        states = make(tokens, hidden, dtype=EIGHT), scale
    output = make(local, dtype=WIDE) if quantisation in ("nvfp4", "w4a8") else None
    bias = feature["bias_dtype"]
    return {
        **_weights(make, feature, call, BYTES, 2),
        **_scales(make, feature, call, EIGHT, 1, block),
        "hidden_states": states[0],
        "hidden_states_scale": states[1],
        "gemm1_bias": make(local, _rows(feature, call), dtype=DTYPES[bias]) if bias else None,
        "gemm2_bias": make(local, hidden, dtype=DTYPES[bias]) if bias else None,
        "gemm1_alpha": None,
        "gemm1_beta": None,
        "gemm1_clamp_limit": None,
        "output1_scale_scalar": output,
        "output1_scale_gate_scalar": output,
        "output2_scale_scalar": output,
    }


def _int4(make: Make, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
    return {
        **_weights(make, feature, call, BYTES, 2),
        **_scales(make, feature, call, BRAIN, 1, MX_BLOCK),
        "hidden_states": make(call["tokens"], call["hidden_size"], dtype=BRAIN),
        "gemm1_alpha": None,
        "gemm1_beta": None,
        "gemm1_clamp_limit": None,
    }


_FORMS: Mapping[str, Callable[[Make, Mapping[str, Any], Mapping[str, int]], dict[str, Any]]] = {
    "none": _plain,
    "fp8_per_tensor": _per_tensor,
    "fp8_block": _blocks,
    "mxfp8": _mxfp8,
    "nvfp4": _four,
    "mxfp4": _four,
    "mxfp8_mxfp4": _four,
    "w4a16": _int4,
    "w4a8": _four,
}
"""Weights, hidden states and scales by the quantisation of the weights."""
