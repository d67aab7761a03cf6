"""What a call asks of a kernel: the half of a gating question that is not the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ...fixtures.suggestions import did_you_mean
from ..targets.backends import BACKENDS

OPERATIONS = (
    "paged_attention",
    "ragged_attention",
    "mla",
    "merge_state",
    "append_paged_kv",
    "build_metadata",
    "route",
    "moe",
    "gemm",
    "quantize",
    "norm_and_quantize",
    "rope_and_append",
)
AUTO = "auto"
PHASES = ("decode", "prefill", "mixed")
FLOAT_DTYPES = ("float32", "float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
FP4_DTYPES = ("nvfp4", "mxfp4")
RECORD_DTYPES = ("fp8_ds_mla", "nvfp4_ds_mla")
"""Records of latent attention."""
INT4_DTYPE = "int4_per_token_head"
"""A cache with a scale and a zero point for each token and head."""
ZERO_POINT_DTYPES = ("int8_zero_point", "int4_zero_point")
"""Caches with a zero point of the model's dtype beside the scale of each token and head."""
TOKEN_SCALED_DTYPES = ("int8_per_token_head", "fp8_per_token_head")
"""Caches with a scale for each token and head. The oracle's table has them too, but needs torch."""
INT8_DTYPE = "int8"
"""Dtype of hidden states with a scale for each token."""
DTYPES = (*FLOAT_DTYPES, *FP8_DTYPES, "mxfp8", *FP4_DTYPES)
DTYPE_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""vLLM's and SGLang's ``--kv-cache-dtype`` names among them: their ``fp8`` is e4m3."""
BACKEND_ALIASES = {
    "trtllm": "trtllm-gen",
    "trtllm_gen": "trtllm-gen",
    "cuda_core": "cuda-core",
    "cute_dsl": "cute-dsl",
    "cutedsl": "cute-dsl",
    "group_gemm": "group-gemm",
    "deep_gemm": "deep-gemm",
    "deepgemm": "deep-gemm",
    "torch_sdpa": "torch-sdpa",
}
STORAGES = ("", "uint8")
LAYOUTS = ("NHD", "HND")
MASKS = ("none", "causal", "custom", "tree")
PADDINGS = ("none", "no_query", "few_keys", "no_keys")
"""Requests that an engine adds to fill a graph, the emptiest last."""
ACTIVATIONS = (
    "swiglu",
    "geglu",
    "geglu_tanh",
    "swiglu_oai",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "identity",
    "swiglu_step",
    "situ",
    "geglu1",
)
QUANTISATIONS = (
    "none",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_block",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "mxfp8_mxfp4",
    "w4a16",
    "w4a8",
    "int8_per_tensor",
    "int8_per_channel",
    "int8_block",
    "fp8_block_ue8m0",
)
ROUTINGS = (
    "default",
    "renormalize",
    "renormalize_naive",
    "deepseek_v3",
    "llama4",
    "topk",
    "sigmoid",
    "sigmoid_renorm",
    "minimax2",
    "topk_sigmoid",
    "deepseek_v4",
    "sparsemixer",
)
BIAS_DTYPES = ("", *FLOAT_DTYPES)
"""Dtypes of a bias; empty where a question leaves it out."""
CHOICES: dict[str, tuple[str, ...]] = {
    "operation": OPERATIONS,
    "backend": (*BACKENDS, AUTO),
    "phase": PHASES,
    "q_dtype": (*DTYPES, INT8_DTYPE),
    "kv_dtype": (*DTYPES, *TOKEN_SCALED_DTYPES, INT4_DTYPE, *ZERO_POINT_DTYPES, *RECORD_DTYPES),
    "kv_storage": STORAGES,
    "kv_layout": LAYOUTS,
    "mask": MASKS,
    "padding": PADDINGS,
    "activation": ACTIVATIONS,
    "quantisation": QUANTISATIONS,
    "routing": ROUTINGS,
    "bias_dtype": BIAS_DTYPES,
    "routing_bias_dtype": BIAS_DTYPES,
}
"""What each named field may hold."""
SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size")
"""Sizes of a MoE, which a question may leave out."""
INTEGERS = ("head_dim_qk", "head_dim_vo", "page_size", "group_size", "query_len", *SIZES)
SWITCHES = ("window", "soft_cap", "sinks", "ragged_queries", "weights_on_input")


@dataclass(frozen=True)
class Feature:
    """A kind of call, as far as it decides which kernel may run.

    Attributes:
        operation: one of ``OPERATIONS``.
        backend: one of ``BACKENDS``, or ``"auto"``: the first that is supported.
        phase: ``"decode"``, ``"prefill"`` or, for a batch of both, ``"mixed"``.
        head_dim_qk, head_dim_vo: channels of queries and keys, and of values (0: the same).
        q_dtype: the dtype of queries and output, or of activations of a MoE. torch's names, or an
            alias such as ``bf16`` and ``fp8`` (e4m3).
        kv_dtype: element format of the KV cache: the above, ``nvfp4``, ``int8_per_token_head``,
            ``fp8_per_token_head``, ``int4_per_token_head``, ``int8_zero_point``,
            ``int4_zero_point``, ``fp8_ds_mla`` or ``nvfp4_ds_mla``; q_dtype if empty.
        kv_storage: ``"uint8"`` where the cache is a tensor of bytes; empty where its dtype says
            what it holds.
        kv_layout: ``"NHD"`` or ``"HND"``.
        page_size: keys a page.
        group_size: query heads a KV head.
        query_len: query tokens a request in decode: more than one under speculative decoding.
            Kernels of prefill take any number.
        ragged_queries: whether requests of a decode have different numbers of them, ``query_len``
            at most.
        window, soft_cap, sinks: whether there is a sliding window, a soft cap on the logits,
            attention sinks.
        mask: ``"none"``, ``"causal"``, ``"custom"`` or, of the query tokens of each request, a
            draft ``"tree"``.
        padding: the emptiest requests of the batch: ``"no_query"``, ``"few_keys"`` where one has
            fewer keys than query tokens, ``"no_keys"`` where it has query tokens and no key.
        window, soft_cap: may be given as numbers too, ``window_left`` (-1: none) and the cap (0:
            none). None stands for the default of any field.
        activation: the activation of a MoE, one of ``ACTIVATIONS``.
        quantisation: the quantisation of a MoE's weights, one of ``QUANTISATIONS``.
        routing: routing method, one of ``ROUTINGS``.
        num_experts, top_k: experts of a MoE, and experts a token; 0 where the question leaves them
            out, as conditions on their least value and on multiples do not refuse.
        hidden_size, intermediate_size: channels of a token, and of an expert's inner layer; of a
            GEMM what it takes and gives; 0 likewise.
        weights_on_input: whether a token is scaled by its routing weight before the experts.
        bias_dtype, routing_bias_dtype: dtypes of the experts' biases, and of the bias that is added
            to the scores of experts; empty where the question leaves them out.

    Raises:
        ValueError: a field holds what it cannot; the message names the field and its choices.
    """

    operation: str = "paged_attention"
    backend: str = AUTO
    phase: str = "decode"
    head_dim_qk: int = 128
    head_dim_vo: int = 0
    q_dtype: str = "bfloat16"
    kv_dtype: str = ""
    kv_storage: str = ""
    kv_layout: str = "NHD"
    page_size: int = 16
    group_size: int = 1
    query_len: int = 1
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    ragged_queries: bool = False
    mask: str = "causal"
    padding: str = "none"
    activation: str = "swiglu"
    quantisation: str = "none"
    routing: str = "renormalize"
    num_experts: int = 0
    top_k: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    weights_on_input: bool = False
    bias_dtype: str = ""
    routing_bias_dtype: str = ""

    def __post_init__(self) -> None:
        """Read aliases and refuse what no call can ask for."""
        put = object.__setattr__
        for each in fields(self):
            if getattr(self, each.name) is None:
                put(self, each.name, each.default)
        put(self, "backend", BACKEND_ALIASES.get(self.backend, self.backend))
        put(self, "window", _switch(self.window, off=-1))
        put(self, "soft_cap", _switch(self.soft_cap, off=0))
        put(self, "q_dtype", _dtype("q_dtype", self.q_dtype))
        for name in ("bias_dtype", "routing_bias_dtype"):
            put(self, name, _dtype(name, getattr(self, name)))
        kv_dtype = self.kv_dtype or self.q_dtype
        put(self, "kv_dtype", _dtype("kv_dtype", kv_dtype))
        put(self, "head_dim_vo", self.head_dim_vo or self.head_dim_qk)
        same = self.kv_dtype == self.q_dtype  # of operations without a cache, too
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices and not (name == "kv_dtype" and same):
                raise ValueError(wrong(name, getattr(self, name), choices))
        for name in INTEGERS:
            value = getattr(self, name)
            least = 0 if name in SIZES else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                message = f"{name} is {value!r}; it must be an integer of at least {least}"
                raise ValueError(message)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                message = f"{name} is {getattr(self, name)!r}; it must be true or false"
                raise ValueError(message)

    @property
    def query_rows(self) -> int:
        """Query rows that share one KV head in decode: query tokens times the group size."""
        return self.query_len * self.group_size

    def differences(self, other: Feature) -> dict[str, Any]:
        """Return the fields, and their values here, in which this differs from another."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(other, each.name)
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the operation and whatever is not the default."""
        plain = {each.name: each.default for each in fields(self)}
        plain["kv_dtype"], plain["head_dim_vo"] = self.q_dtype, self.head_dim_qk
        moe = self.operation in ("moe", "route", "gemm")
        shown = ["q_dtype"] if moe else ["phase", "head_dim_qk", "q_dtype"]
        shown += [
            each.name
            for each in fields(self)
            if each.name not in ("operation", *shown)
            and getattr(self, each.name) != plain[each.name]
        ]
        if moe and self.operation != "gemm":
            shown += [name for name in ("activation",) if name not in shown]
        return f"{self.operation}({', '.join(f'{n}={getattr(self, n)}' for n in shown)})"


def with_fields(feature: Feature, **changes: Any) -> Feature:  # noqa: ANN401  values of fields
    """Return a feature with other fields, which are valid: ``replace`` checks all of them again."""
    made = object.__new__(Feature)
    made.__dict__.update(feature.__dict__, **changes)
    return made


def wrong(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return the sentence on a field that holds none of its choices."""
    listed = ", ".join(choice or "''" for choice in choices)
    aliases = DTYPE_ALIASES if choices is DTYPES else BACKEND_ALIASES if name == "backend" else ()
    meant = did_you_mean(str(value), {*choices, *aliases})
    return f"{name} is {value!r}; {meant}it must be one of {listed}"


def _switch(value: object, *, off: float) -> object:
    """Read a number as whether the feature is used; what is none is refused later."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value > off
    return value


def _dtype(name: str, value: object) -> str:
    text = str(value).removeprefix("torch.")
    if text == "uint8" and name == "kv_dtype":
        message = (
            "kv_dtype is 'uint8', which does not say what the bytes hold: vLLM stores FP8 caches "
            "in uint8, FlashInfer from 0.6.8 reads uint8 as NVFP4. Give kv_dtype='float8_e4m3fn' "
            "(or float8_e5m2, or nvfp4) with kv_storage='uint8'"
        )
        raise ValueError(message)
    return DTYPE_ALIASES.get(text, text)
