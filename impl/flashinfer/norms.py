"""FlashInfer's norms that quantise, and its quantisers and writers of NVFP4 that SM90 runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from ...reference import Arithmetic, NormQuantizeProblem, QuantizeProblem
from ...reference.formats.quantizers import LEAST_NORMAL
from ...reference.problems.base import is_power_of_two
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ...reference.tensors.quantize import QuantizeInputs
from ..targets.optional import missing
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .backends import CUDA, one_module
from .calls import flashinfer
from .claims import needing, no_tokens, offered, unavailable
from .libraries import library_named

Answer = tuple[torch.Tensor, "torch.Tensor | None"]
VECTOR = 8
"""Elements of 16 bits that are loaded at once: where a row's size is no multiple, fewer are, and
rows must lie multiples of them apart."""
BLOCK, WIDE_ROWS, WIDEST_ROW = 128, 8192, 16384
"""Channels of a block of ``fused_add_rmsnorm_fp8_block_quant``; the rows above which a thread has
twice as many elements, and the widest (``norm.cuh``)."""
BLOCK_FLOOR = 1e-4
LARGEST_SCALE = 2.0**125
"""A GPU flushes the reciprocals of larger numbers to 0."""
NORM = "flashinfer.norm"
HEAD, SCALED, PAGE = 64, 16, 16
"""Channels of a head and of a block in an NVFP4 cache, and slots of a page."""
UNWRITTEN = 0xA5
"""What bytes of a cache hold before it is written."""


def _rows(problem: NormQuantizeProblem, _: Target) -> str | None:
    return first_reason(
        (problem.dtype == "float32", "takes 16 bits"),
        (problem.gamma_offset != 0, "gains have no offset"),
        (problem.num_channels % VECTOR != 0, f"a row is whole vectors of {VECTOR}"),
        (problem.spare_channels % VECTOR != 0, f"rows lie multiples of {VECTOR} elements apart"),
    )


def _given(problem: NormQuantizeProblem, _: Target) -> str | None:
    if problem.scale is None:
        return "takes the scale of a whole tensor"
    if not LEAST_NORMAL <= problem.scale <= LARGEST_SCALE:
        return "a GPU flushes a scale that is no normal float32, or has no normal reciprocal"
    return None


def _added(problem: NormQuantizeProblem, _: Target) -> str | None:
    return None if problem.residual else "adds a residual"


def _not_added(problem: NormQuantizeProblem, _: Target) -> str | None:
    return "adds no residual" if problem.residual else None


def _by_cuda(*_: object) -> str | None:
    """Refuse machines where FlashInfer answers by its CuTe DSL kernels, which are others."""
    if missing(NORM, "flashinfer") or getattr(flashinfer(NORM), "_USE_CUDA_NORM", True):
        return None
    return (
        "with nvidia-cutlass-dsl installed CuTe DSL answers, and not CUDA:"
        " set FLASHINFER_USE_CUDA_NORM=1"
    )


NORMS = (unavailable, no_tokens, _rows)
# `math::rsqrt(smem[0] / float(d) + eps)`, `x * rms_rcp * w * scale_inv` of `1.0f / scale_val`:
# norm.cuh, built with -use_fast_math. In the CuTe DSL's kernels: `rsqrt(..., fastmath=True)`,
# `rcp_approx_ftz`.
BY_RECIPROCALS = Arithmetic(roots="approximate", quotients="reciprocal")


@CUDA.adapter(
    "norm_and_quantize",
    "flashinfer-rmsnorm-quant",
    *NORMS,
    _given,
    _not_added,
    offered(NORM, "rmsnorm_quant"),
    _by_cuda,
    arithmetic=BY_RECIPROCALS,
    compile_key=one_module("norm"),
    library=library_named("norm"),
    build_ahead=True,
)
def rmsnorm_quant(inputs: NormQuantizeInputs) -> Answer:
    """Normalise and quantise by ``rmsnorm_quant``."""
    codes = torch.empty(inputs.x.shape, dtype=inputs.to.dtype, device=inputs.x.device)
    flashinfer(NORM).rmsnorm_quant(
        out=codes, input=inputs.x, weight=inputs.gamma, scale=inputs.scale, eps=inputs.eps
    )
    return codes, None


@CUDA.adapter(
    "norm_and_quantize",
    "flashinfer-add-rmsnorm-quant",
    *NORMS,
    _given,
    _added,
    offered(NORM, "fused_add_rmsnorm_quant"),
    _by_cuda,
    arithmetic=BY_RECIPROCALS,
    compile_key=one_module("norm"),
    library=library_named("norm"),
    build_ahead=True,
)
def add_rmsnorm_quant(inputs: NormQuantizeInputs) -> Answer:
    """Add, normalise and quantise by ``fused_add_rmsnorm_quant``."""
    codes = torch.empty(inputs.x.shape, dtype=inputs.to.dtype, device=inputs.x.device)
    flashinfer(NORM).fused_add_rmsnorm_quant(
        out=codes,
        input=inputs.x,
        residual=inputs.residual,
        weight=inputs.gamma,
        scale=inputs.scale,
        eps=inputs.eps,
    )
    return codes, None


def _blocks(problem: NormQuantizeProblem, _: Target) -> str | None:
    whole = 32 * (8 if problem.num_channels <= WIDE_ROWS else 16)
    wide = problem.num_channels > WIDEST_ROW
    return first_reason(
        (problem.scale is not None, "computes its scales"),
        (problem.block != (1, BLOCK), f"has a scale for {BLOCK} channels of a row"),
        (problem.scale_format != "float32", "scales are no powers of two"),
        (problem.scale_layout != "padded_columns", "scales lie in columns of whole 4 rows"),
        (problem.floor != BLOCK_FLOOR, f"the largest magnitude counts at least {BLOCK_FLOOR}"),
        (wide or problem.num_channels % whole, f"a row has {whole} channels or a multiple"),
    )  # fmt: skip


@CUDA.adapter(
    "norm_and_quantize",
    "flashinfer-add-rmsnorm-block-quant",
    *NORMS,
    _blocks,
    _added,
    offered(NORM, "fused_add_rmsnorm_fp8_block_quant"),
    # The norm is rounded to T; `amax / max_val`, `normed * (max_val / amax)`: norm.cuh.
    arithmetic=Arithmetic(
        roots="approximate", intermediate="inputs", scales="approximate", quotients="inverse"
    ),
    compile_key=one_module("norm"),
    library=library_named("norm"),
    build_ahead=True,
)
def add_rmsnorm_block_quant(inputs: NormQuantizeInputs) -> Answer:
    """Add, normalise and quantise blocks by ``fused_add_rmsnorm_fp8_block_quant``."""
    x = inputs.x
    tokens, channels = x.shape
    codes = torch.empty((tokens, channels), dtype=inputs.to.dtype, device=x.device)
    columns, padded = channels // BLOCK, inputs.scale_strides[1]
    scales = torch.empty((columns, padded), dtype=torch.float32, device=x.device)
    flashinfer(NORM).fused_add_rmsnorm_fp8_block_quant(
        out=codes,
        block_scale=scales,
        normed_out=torch.empty((tokens, channels), dtype=x.dtype, device=x.device),
        input=x,
        residual=inputs.residual,
        weight=inputs.gamma,
        eps=inputs.eps,
    )
    return codes, scales.transpose(0, 1)[:tokens]


def _groups(problem: QuantizeProblem, _: Target) -> str | None:
    group = problem.block[1] or problem.num_channels
    return first_reason(
        (problem.codes != "float8_e4m3fn" or not problem.saturate, "gives codes in e4m3"),
        (problem.scale is not None or problem.block[0] != 1, "has a scale for a group of a row"),
        (problem.num_channels % group != 0, "a row is whole groups"),
        (problem.scale_format != "float32", "scales are no powers of two below SM100"),
        (problem.scale_layout != "rows", "scales lie row after row"),
        (problem.spare_channels > 0, "rows lie one behind the other"),
        (problem.num_tokens == 0, "engines make no call without a token"),
        (problem.dtype == "float32", "takes 16 bits"),
    )  # fmt: skip


def _tile_compiler(*_: object) -> Refusal | None:
    """Refuse machines without the compiler of cuTile, which comes apart from it."""
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    of_pip = importlib.util.find_spec("nvidia")
    for place in (of_pip and of_pip.submodule_search_locations) or ():
        folders += [str(each) for each in Path(place).glob("*/bin")]
    if shutil.which("tileiras", path=os.pathsep.join(folders)):
        return None
    reason = "cuTile's compiler tileiras is not installed: pip install 'cuda-tile[tileiras]'"
    return Refusal(reason, "package", "nvidia-cuda-tileiras")


@CUDA.adapter(
    "quantize",
    "flashinfer-group-quant-8bit",
    unavailable,
    needing("cuda.tile", "cuda-tile"),
    _tile_compiler,
    _groups,
    offered("flashinfer.quantization", "per_token_group_quant_8bit"),
    # `_absmax / bit8_max`, `y * (1.0 / y_s)`: per_token_group_quant_8bit_cutile.py.
    arithmetic=Arithmetic(scales="approximate", quotients="reciprocal"),
)
def group_8bit(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of rows by ``per_token_group_quant_8bit``, which cuTile compiles."""
    codes, scales = flashinfer("flashinfer.quantization").per_token_group_quant_8bit(
        x=inputs.x,
        group_size=inputs.to.block[1] or inputs.x.shape[1],
        eps=inputs.to.floor,
        dst_dtype=inputs.to.dtype,
    )
    return codes, scales


def _written(problem: QuantizeProblem, _: Target) -> str | None:
    block = problem.block[1] or problem.num_channels
    return first_reason(
        (problem.codes != "e2m1" or problem.scale_format != "e4m3", "writes NVFP4"),
        (problem.block[0] != 1 or block != SCALED, f"a block has {SCALED} channels of a row"),
        (problem.num_channels % HEAD != 0, f"a row is whole heads of {HEAD} channels"),
        (problem.floor != LEAST_NORMAL, "an amax counts as it is"),
        # Otherwise its product with a scale is rounded once more, which `reciprocal` does not say.
        (not is_power_of_two(problem.global_scale), "global scales are powers of two here"),
        (problem.scale_layout != "rows", "scales lie row after row"),
        (problem.num_tokens == 0, "engines make no call without a token"),
        (problem.dtype == "float32", "takes 16 bits"),
    )  # fmt: skip


Caches = list[torch.Tensor]


def _caches(inputs: QuantizeInputs, pages: int) -> Caches:
    """Return K, V and their scales as bytes, [pages, slots, heads, ...] of each, not cleared."""
    heads, device = inputs.x.shape[1] // HEAD, inputs.x.device
    return [
        torch.full((pages, PAGE, heads, size), UNWRITTEN, dtype=torch.uint8, device=device)
        for size in (HEAD // 2, HEAD // 2, HEAD // SCALED, HEAD // SCALED)
    ]


def _read(caches: Caches, slots: torch.Tensor) -> Answer:
    """Return the codes and scales of each row's slot.

    Raises:
        RuntimeError: keys and values have other bytes, or a slot of no row was written.
    """
    k, v, k_scales, v_scales = (each.flatten(0, 1) for each in caches)
    if not (k.equal(v) and k_scales.equal(v_scales)):
        message = "equal keys and values were written as other bytes"
        raise RuntimeError(message)
    others = torch.ones(len(k), dtype=torch.bool, device=k.device)
    others[slots] = False
    if (k[others] != UNWRITTEN).any() or (k_scales[others] != UNWRITTEN).any():
        message = "a slot was written that no row has"
        raise RuntimeError(message)
    codes, scales = k[slots].flatten(1), k_scales[slots].flatten(1)
    return codes, scales.view(torch.float8_e4m3fn)


WRITERS = replace(
    CUDA,
    # `amax / (6.0f * global_scale)`, `value * (1.0f / (sf_rounded * global_scale))`: page.cuh,
    # built with -use_fast_math.
    arithmetic=Arithmetic(scales="approximate", quotients="reciprocal"),
    features=("e2m1_codes", "e4m3_scales"),
    compile_key=one_module("page"),
    library=library_named("page"),
    build_ahead=True,
)
PAGES = "flashinfer.page"


@WRITERS.adapter(
    "quantize",
    "flashinfer-nvfp4-append-slots",
    unavailable,
    _written,
    offered(PAGES, "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"),
)
def nvfp4_slots(inputs: QuantizeInputs) -> Answer:
    """Quantise rows as keys and values that are written by a slot mapping, the last slot first."""
    tokens = len(inputs.x)
    caches = _caches(inputs, tokens // PAGE + 2)
    last = caches[0].shape[0] * PAGE - 1
    slots = last - torch.arange(tokens, device=inputs.x.device)
    rows, (k, v, *scales) = inputs.x.unflatten(1, (-1, HEAD)), caches
    flashinfer(PAGES).nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        append_key=rows,
        append_value=rows,
        slot_mapping=slots,
        paged_kv_cache=(k, v),
        kv_cache_sf=tuple(each.view(torch.float8_e4m3fn) for each in scales),
        k_scale=inputs.factor,
        v_scale=inputs.factor,
        kv_layout="NHD",
    )
    return _read(caches, slots)


@WRITERS.adapter(
    "quantize",
    "flashinfer-nvfp4-append",
    unavailable,
    _written,
    offered(PAGES, "nvfp4_quantize_append_paged_kv_cache"),
)
def nvfp4_pages(inputs: QuantizeInputs) -> Answer:
    """Quantise rows as the keys and values of one request, whose pages lie the last one first."""
    tokens, device = len(inputs.x), inputs.x.device
    pages = -(-tokens // PAGE)
    caches = _caches(inputs, pages + 1)
    ids = torch.arange(pages, 0, -1, dtype=torch.int32, device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    rows, (k, v, *scales) = inputs.x.unflatten(1, (-1, HEAD)), caches
    flashinfer(PAGES).nvfp4_quantize_append_paged_kv_cache(
        append_key=rows,
        append_value=rows,
        batch_indices=torch.zeros_like(positions),
        positions=positions,
        paged_kv_cache=(k, v),
        kv_cache_sf=tuple(each.view(torch.float8_e4m3fn) for each in scales),
        kv_indices=ids,
        kv_indptr=torch.tensor([0, pages], dtype=torch.int32, device=device),
        kv_last_page_len=torch.tensor(
            [tokens - PAGE * (pages - 1)], dtype=torch.int32, device=device
        ),
        k_scale=inputs.factor,
        v_scale=inputs.factor,
        kv_layout="NHD",
    )
    return _read(caches, ids.long()[positions // PAGE] * PAGE + positions % PAGE)
