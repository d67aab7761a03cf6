"""What stands in for the rest of vLLM while its kernel files are loaded: one table for all of them.

Each stands for what vLLM's own module answers on a machine with CUDA, or without a GPU; names of
modules that a release does not have are never asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch


class KVQuantMode(enum.IntEnum):
    """How a cache is quantised, by vLLM's numbers (``vllm/v1/kv_cache_interface.py``)."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class Platform:
    """The machine, as ``vllm.platforms.current_platform`` describes it."""

    def fp8_dtype(self) -> torch.dtype:
        """Return the dtype of FP8 everywhere but on AMD's first chips with it."""
        return torch.float8_e4m3fn

    def has_device_capability(self, least: int) -> bool:
        """Whether there is a GPU of this compute capability (times ten) or a newer one."""
        return self._capability() >= least

    def get_device_capability(self) -> tuple[int, int] | None:
        """Return the GPU's compute capability; None without one."""
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else None

    def is_device_capability_family(self, family: int) -> bool:
        """Whether the GPU is of the family of this compute capability."""
        return self._capability() // 10 == family // 10

    def is_cuda(self) -> bool:
        """Whether there is a CUDA device."""
        return torch.cuda.is_available()

    def is_cuda_alike(self) -> bool:
        """Whether there is a CUDA device: AMD's are not spoken of."""
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """Whether the GPU is AMD's."""
        return False

    simple_compile_backend = "eager"

    @property
    def device_type(self) -> str:
        """Where tensors are."""
        return "cuda" if self.is_cuda() else "cpu"

    def is_xpu(self) -> bool:
        """Whether to launch as on Intel's GPUs: without a GPU, for CUDA would be asked for one."""
        return not self.is_cuda()

    @staticmethod
    def _capability() -> int:
        if not torch.cuda.is_available():
            return 0
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor


class Unused:
    """Something that a file names and its kernels never use: a type, a function, a base class."""

    def __getattr__(self, name: str) -> Unused:
        """Return itself for every name but Python's own."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Unused:
        """Return itself, as a decorator, a logger's method or a registration."""
        return self

    def __getitem__(self, _: object) -> Unused:
        """Return itself, as a generic base with its parameters."""
        return self

    def __or__(self, other: object) -> Unused:
        """Return itself, in an annotation."""
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        """Be no base of a class."""
        return ()


MOE = "vllm.model_executor.layers.fused_moe"
QUANTISATION = "vllm.model_executor.layers.quantization.utils"


RCP_LN2 = 1.4426950216
"""1 / ln 2, with as many digits as ``vllm/utils/math_utils.py`` has."""


def _round_up(number: int, of: int) -> int:
    return -(-number // of) * of


def _tma_aligned(rows: int, itemsize: int) -> int:
    """Return rows that take a multiple of 16 bytes, as TMA needs."""
    return _round_up(rows, 16 // itemsize)


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _is_quantised(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype.startswith("fp8") or kv_cache_dtype.endswith("per_token_head")


def align(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    *_: object,
) -> None:
    """Compute what vLLM's CUDA operator ``moe_align_block_size`` gives, by torch.

    Pairs are sorted by their expert, each expert's filled up to whole blocks with the number of all
    pairs. Pairs of experts that ``expert_map`` gives -1 are left out.
    """
    ids = topk_ids.flatten().long()
    if expert_map is not None:
        ids = expert_map.long()[ids]
    sorted_ids.fill_(ids.numel())
    expert_ids.fill_(-1)
    end = 0
    for expert in range(num_experts):
        pairs = (ids == expert).nonzero().flatten()
        blocks = -(-len(pairs) // block_size)
        sorted_ids[end : end + len(pairs)] = pairs.to(sorted_ids.dtype)
        expert_ids[end // block_size : end // block_size + blocks] = expert
        end += blocks * block_size
    padded.fill_(end)


UNUSED: Mapping[str, tuple[str, ...]] = {
    "vllm.distributed": ("get_dcp_group", "get_pcp_group"),
    "vllm.model_executor.parameter": (
        "BlockQuantScaleParameter", "ChannelQuantScaleParameter", "PerTensorScaleParameter",
    ),
    "vllm.model_executor.utils": ("set_weight_attrs",),
    "vllm.model_executor.layers.quantization.input_quant_fp8": ("QuantFP8",),
    "vllm.model_executor.warmup.jit_warmup": (
        "WarmupChoices", "WarmupIntRange", "kernel_launcher",
    ),
    "vllm.model_executor.warmup.jit_warmup_triton_helper": (
        "DispatchSpec", "LaunchSpec", "TritonWarmupTensor", "VllmTritonJitKernel",
        "triton_kernel_dispatcher_with_warmup", "triton_scalar_specialization_rep",
    ),
    "vllm.triton_utils.allocation": ("set_triton_allocator",),
    "vllm.utils": ("direct_register_custom_op", "is_torch_equal_or_newer", "random_uuid"),
    "vllm.utils.deep_gemm": ("is_deep_gemm_e8m0_used", "transform_sf_into_required_layout"),
    "vllm.utils.platform_utils": ("get_device_name_as_file_name", "is_uva_available"),
    "vllm.utils.torch_utils": (
        "async_tensor_h2d", "direct_register_custom_op", "get_accelerator_view_from_cpu_tensor",
    ),
    "vllm.v1.attention.backends.utils": ("CommonAttentionMetadata",),
    "vllm.v1.utils": ("CpuGpuBuffer",),
    f"{MOE}.activation": ("MoEActivation", "apply_moe_activation"),
    f"{MOE}.config": (
        "FUSED_MOE_UNQUANTIZED_CONFIG", "FusedMoEConfig", "FusedMoEParallelConfig",
        "FusedMoEQuantConfig", "_get_config_dtype_str",
    ),
    f"{MOE}.cutlass_moe": (
        "_valid_cutlass_block_scaled_grouped_gemm", "run_cutlass_block_scaled_fused_experts",
    ),
    f"{MOE}.deep_gemm_moe": ("_valid_deep_gemm", "deep_gemm_moe_fp8"),
    f"{MOE}.modular_kernel": (
        "ExpertTokensMetadata", "FusedMoEActivationFormat", "FusedMoEExpertsModular",
        "FusedMoEModularKernel", "FusedMoEPermuteExpertsUnpermute", "TopKWeightAndReduce",
    ),
    f"{MOE}.prepare_finalize": ("MoEPrepareAndFinalizeNoEP",),
    f"{MOE}.rocm_aiter_fused_moe": ("is_rocm_aiter_moe_enabled",),
    f"{MOE}.topk_weight_and_reduce": ("TopKWeightAndReduceNoOP",),
    f"{MOE}.utils": (
        "_resize_cache", "activation_without_mul", "disable_inplace",
        "moe_kernel_quantize_input", "warn_if_moe_use_td_ineffective",
    ),
    f"{QUANTISATION}.mxfp4_utils": ("dequant_mxfp4",),
    f"{QUANTISATION}.w8a8_utils": ("all_close_1d", "per_tensor_dequantize"),
    f"{QUANTISATION}.mxfp6_utils": ("dequant_mxfp6",),
    f"{QUANTISATION}.quant_utils": (
        "QuantKey", "amax_for_moe_activation_quant", "kFp8Dynamic128Sym",
        "kFp8DynamicTensorSym", "kFp8DynamicTokenSym",
        "kFp8Static128BlockSym", "kFp8StaticChannelSym", "kFp8StaticTensorSym",
    ),
}  # fmt: skip
"""Names, by module, that the file of experts imports and its kernels never use."""


def stubs() -> Mapping[str, Mapping[str, object]]:
    """Return the attributes of the modules that stand in, by the modules' names."""
    import triton
    from triton import language

    limits = torch.finfo(torch.float8_e4m3fn)
    used: dict[str, dict[str, object]] = {
        "vllm._custom_ops": {"moe_align_block_size": align},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": Unused()},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.platforms.rocm": {"use_rocm_custom_paged_attention": lambda *_: False},
        "vllm.triton_utils": {"triton": triton, "tl": language, "HAS_TRITON": True},
        "vllm.utils": {"round_up": _round_up},
        "vllm.utils.deep_gemm": {"get_tma_aligned_size": _tma_aligned},
        "vllm.utils.math_utils": {"round_up": _round_up, "next_power_of_2": _next_power_of_2,
                                  "cdiv": _ceil_div, "RCP_LN2": RCP_LN2,
                                  "largest_power_of_2_divisor": lambda number: number & -number},
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": _is_quantised},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
        "vllm.v1.kv_cache_interface": {
            "KVQuantMode": KVQuantMode, "is_quantized_kv_cache": _is_quantised,
        },
        f"{MOE}.utils": {
            "resolve_moe_use_td": lambda: False, "enable_swap_ab": lambda *_: False,
        },
        f"{QUANTISATION}.quant_utils": {
            "FP8_DTYPE": torch.float8_e4m3fn, "get_fp8_min_max": lambda: (limits.min, limits.max),
        },
    }  # fmt: skip
    return {
        module: {**dict.fromkeys(UNUSED.get(module, ()), Unused()), **used.get(module, {})}
        for module in {*used, *UNUSED}
    }


class WithoutOperators(Platform):
    """A machine for which vLLM has no compiled operators, and runs its Triton kernels."""

    def is_cuda_alike(self) -> bool:
        """Whether compiled operators of CUDA are there."""
        return False

    def is_xpu(self) -> bool:
        """Whether those of Intel's GPUs are."""
        return False


def stubs_without_operators() -> Mapping[str, Mapping[str, object]]:
    """Stand in for vLLM where nothing but its Triton kernels quantises."""
    return {**stubs(), "vllm.platforms": {"current_platform": WithoutOperators()}}


def stubs_with_swapped_operands() -> Mapping[str, Mapping[str, object]]:
    """Stand in for vLLM on Hopper, where blocks of few rows are the second operand."""
    return _with_choice(enable_swap_ab=lambda rows, columns: rows < 64 <= columns)  # noqa: PLR2004


def stubs_with_descriptors() -> Mapping[str, Mapping[str, object]]:
    """Stand in for vLLM where VLLM_TRITON_USE_TD asks for tensor descriptors."""
    return _with_choice(resolve_moe_use_td=lambda: True)


def _with_choice(**choices: object) -> Mapping[str, Mapping[str, object]]:
    usual = stubs()
    return {**usual, f"{MOE}.utils": {**usual[f"{MOE}.utils"], **choices}}
