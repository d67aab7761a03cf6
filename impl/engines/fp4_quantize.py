"""Triton quantisers of vLLM and SGLang to four bits: NVFP4 and MXFP4, with scales in rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from unittest.mock import patch

import torch

from ...reference import Arithmetic, QuantizeProblem
from ...reference.formats.quantizers import LEAST_NORMAL
from ...reference.tensors.quantize import QuantizeInputs
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .quantisers import Answer, group_of, quantiser, refused, refused_groups
from .sglang_calls import SGLANG
from .sources import load
from .vllm_stubs import QUANTISATION, Unused, stubs_without_operators

MXFP4_FILE = f"{QUANTISATION}.mxfp4_utils"
DOWNCAST_FILE = "vllm.third_party.triton_kernels.numerics_details.mxfp"
STAGING_FILE = "vllm.models.muse_spark.nvidia.ops.prepare_megamoe_nvfp4"
INDEXER_FILE = "sglang.kernels.ops.quantization.fp4_indexer_quant"
MXFP4, NVFP4 = ("e2m1_codes", "e8m0_scales"), ("e2m1_codes", "e4m3_scales")
RULES, CONSTANT = "power_rules", "MXFP_BLOCK_SIZE"
MX_GROUP, NV_GROUP = 32, 16
"""Channels of a group."""
INDEXER_CHANNELS, STAGED_CHANNELS = 128, 64
"""Channels of a head that SGLang's indexer quantises; of vLLM's staging a row has a multiple."""
INDEXER_FLOOR, STAGING_FLOOR = 6e-4, 6 * 2.0**-9
"""Least of what an amax counts: scales are 10^-4, or the least number in e4m3, at least."""


def _register(op_name: str, op_func: object, *_: object, **__: object) -> None:
    """Stand in for vLLM's registration of an operator: a function of this name."""
    setattr(torch.ops.vllm, op_name, op_func)


def _mxfp4_stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for the rest of vLLM beside its file of MXFP4."""
    found = {name: each for name, each in stubs_without_operators().items() if name != MXFP4_FILE}
    names = "get_triton_kernels_version", "has_triton_kernels"
    operators = {"direct_register_custom_op": _register, "is_torch_equal_or_newer": Unused()}
    return {
        **found,
        "vllm.utils.import_utils": dict.fromkeys(names, Unused()),
        "vllm.utils.torch_utils": {**found["vllm.utils.torch_utils"], **operators},
    }


def _sglang_stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for the rest of SGLang: a machine that is no Blackwell."""

    class Platform:
        is_blackwell = False

    return {"sglang.srt.runtime_context": {"get_platform": Platform}}


def _refused(
    problem: QuantizeProblem, group: int, scale_format: str, floor: float
) -> Refusal | str | None:
    """Return why scales are none of a format of four bits, row after row; None if they are."""
    return first_reason(
        (problem.block_rows != 1 or group_of(problem) != group, f"a group has {group} channels"),
        (problem.scale_format != scale_format, f"scales are {scale_format}"),
        (problem.scale_layout != "rows", "scales lie row after row"),
        (problem.floor != floor, f"the largest magnitude counts at least {floor:g}"),
    )  # fmt: skip


def _supports_mxfp4(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, MXFP4_FILE, "downcast_to_mxfp", ("e2m1",))
    why = why or _refused(problem, MX_GROUP, "e8m0", LEAST_NORMAL)
    why = why or first_reason(
        (problem.power_rule != "rounded", "scales are of rounded amaxes"),
        (problem.dtype == "float32", "takes 16 bits"),
    )  # fmt: skip
    return why or True


@quantiser(
    name="vllm-quant-mxfp4",
    provider="vllm",
    supports=_supports_mxfp4,
    features=(*MXFP4, RULES),
)
def mxfp4(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of 32 by ``downcast_to_mxfp``, whose scales are of exponents' bits."""
    with load(MXFP4_FILE, _mxfp4_stubs) as kernels:
        codes, scales, _ = kernels.downcast_to_mxfp(inputs.x, axis=1)
    return codes, scales


def _supports_downcast(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, DOWNCAST_FILE, "downcast_to_mxfp", ("e2m1",))
    why = why or _refused(problem, MX_GROUP, "e8m0", LEAST_NORMAL)
    faint = problem.regime == "faint" and problem.dtype != "float16"
    why = why or first_reason(
        (problem.power_rule != "up", "scales are rounded up"),
        (faint, "only zeros have a scale below 2^-126"),
    )  # fmt: skip
    return why or True


@quantiser(
    name="vllm-triton-kernels-mxfp4",
    provider="vllm",
    supports=_supports_downcast,
    features=MXFP4,
    # `max_val / 6.0`; codes by adding half a step and cutting off: _downcast_to_mxfp.py.
    arithmetic=Arithmetic(scales="approximate", ties="away"),
)
def downcast(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of 32 by ``downcast_to_mxfp`` of the ``triton_kernels`` in vLLM."""
    with load(DOWNCAST_FILE, stubs_without_operators) as kernels:
        details = sys.modules[kernels._downcast_to_mxfp.fn.__module__]  # noqa: SLF001
        # The interpreter leaves a constant of a module as it is, which no integer is divided by.
        named = nullcontext() if inputs.x.is_cuda else patch.object(details, CONSTANT, MX_GROUP)
        with named:
            codes, scales = kernels.downcast_to_mxfp(inputs.x, torch.uint8, axis=1)
    return codes, scales


def _supports_staging(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, STAGING_FILE, "prepare_megamoe_nvfp4_inputs", ("e2m1",))
    why = why or _refused(problem, NV_GROUP, "e4m3", STAGING_FLOOR)
    why = why or first_reason(
        (problem.global_scale != 1, "has no global scale"),
        (problem.num_channels % STAGED_CHANNELS, f"channels are a multiple of {STAGED_CHANNELS}"),
        (problem.num_channels == 3 * STAGED_CHANNELS, "a block of channels is a power of two"),
    )  # fmt: skip
    return why or refused_groups(problem) or True


@quantiser(
    name="vllm-megamoe-nvfp4",
    provider="vllm",
    supports=_supports_staging,
    features=NVFP4,
    # `amax * (1.0 / 6.0)`; `magnitude > 0.25 * sf_f32`, exact; `(groups < 0) & (code != 0)`:
    # prepare_megamoe_nvfp4.py.
    arithmetic=Arithmetic(scales="reciprocal", quotients="once", zeros="unsigned"),
)
def staged(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of 16 by ``prepare_megamoe_nvfp4_inputs``, which copies routing besides."""
    x = inputs.x
    tokens, channels = x.shape
    codes = torch.empty((tokens, channels // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((tokens, channels // NV_GROUP), dtype=torch.uint8, device=x.device)
    ids = torch.zeros((tokens, 1), dtype=torch.int32, device=x.device)
    weights = torch.ones((tokens, 1), dtype=torch.float32, device=x.device)
    with load(STAGING_FILE, stubs_without_operators) as kernels:
        kernels.prepare_megamoe_nvfp4_inputs(
            x, weights, ids, codes, scales, ids.long(), torch.empty_like(weights)
        )
    return codes, scales.view(torch.float8_e4m3fn)


def _supports_indexer(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, INDEXER_FILE, "quantize_fp4_indexer_tensor", ("e2m1",))
    why = why or _refused(problem, MX_GROUP, "e8m0", INDEXER_FLOOR)
    why = why or first_reason(
        (problem.power_rule != "up", "scales are rounded up"),
        (problem.num_channels % INDEXER_CHANNELS, f"takes heads of {INDEXER_CHANNELS} channels"),
    )  # fmt: skip
    return why or True


def _indexer(inputs: QuantizeInputs, *, even: bool) -> Answer:
    with load(INDEXER_FILE, _sglang_stubs) as kernels:
        heads = inputs.x.unflatten(1, (-1, INDEXER_CHANNELS))
        codes, scales = kernels.quantize_fp4_indexer_tensor(heads, rne=even)
    return (
        codes.view(torch.uint8).view(inputs.codes_shape),
        scales.view(torch.uint8).view(inputs.scale_shape),
    )


@quantiser(
    name="sglang-quant-fp4-indexer",
    provider=SGLANG,
    supports=_supports_indexer,
    features=MXFP4,
    # `amax / 6.0`; `ax > 0.25`, ..., `(x < 0) & (idx != 0)`: fp4_indexer_quant.py.
    arithmetic=Arithmetic(scales="approximate", ties="zero", zeros="unsigned"),
)
def indexer(inputs: QuantizeInputs) -> Answer:
    """Quantise heads of 128 by ``quantize_fp4_indexer_tensor``, ties toward zero."""
    return _indexer(inputs, even=False)


@quantiser(
    name="sglang-quant-fp4-indexer-even",
    provider=SGLANG,
    supports=_supports_indexer,
    features=MXFP4,
    arithmetic=Arithmetic(scales="approximate", zeros="unsigned"),  # as above
)
def even_indexer(inputs: QuantizeInputs) -> Answer:
    """Quantise heads of 128 by ``quantize_fp4_indexer_tensor``, ties to even."""
    return _indexer(inputs, even=True)
