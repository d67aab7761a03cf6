"""Problems of mixture of experts: one call of ``route``, or of ``moe``."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ..moe.activations import ACTIVATIONS
from ..moe.routing_methods import GROUP_SCORES, MASKED_GROUPS, METHODS, RENORMALISE_FLOOR
from ..moe.routing_rules import JITTER, JOINT
from ..moe.weights import WEIGHT_FORMATS
from .base import DTYPES, BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types

ROUTE_REGIMES = (
    "iid",
    "ties",
    "all_negative",
    "saturated",
    "negative_scores",
    "dominant_expert",
    "exact_grid",
    "faint_scores",
    "negative",
    "positive",
)
"""The last two: all logits of one sign, with a size of its own for each token, 16 at most."""
BIAS_VALUES = ("spread", "trained", "zeros")
"""Kinds of values of a router's bias: of the size of the scores around 0; around 7, as trained ones
are, with differences of the size of the scores; or zeros, which select as no bias does."""
BIAS_DTYPES = ("float32", "bfloat16")
MOE_REGIMES = (
    "iid",
    "zero_weights",
    "dominant_expert",
    "outlier_channels",
    "saturated",
    "exact_grid",
    "one_sign",
)
ASSIGNMENTS = ("iid", "balanced", "one_expert", "sparse", "duplicates", "masked")
SWIGLU_SUBSETS = {
    "": ("alpha", "beta", "limit"),
    **{"_".join(names): names for count in (1, 2)
       for names in itertools.combinations(("limit", "alpha", "beta"), count)},
}  # fmt: skip
"""The numbers of alpha, beta and limit that a call passes, by name; empty: all that the activation
takes."""
SWIGLU_PARAMETERS = (
    "",
    "one",
    "each",
    *(f"{each}{names}" for names in SWIGLU_SUBSETS if names for each in ("", "each_")),
)
QUANTISED = ("", *WEIGHT_FORMATS)
MULTIPLES = {name: form.weights.multiple for name, form in WEIGHT_FORMATS.items()}
"""What hidden and inter are multiples of, by format: columns that share a scale, or a byte."""
OUTPUT_NORMS = ("", "plain", "gain", "gain_first")
SHARED_GATES = ("", "weights", "logits", "weights_each", "logits_each")
WITHOUT_SHARED: dict[str, Any] = {"shared_experts": 0, "shared_gate": "", "shared_weight": 0.0}
"""Fields of a problem without shared experts."""
MAX_TOKENS = 2**20
PADDED_FORMATS = ("", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4", "mxfp4")
"""Formats of weights whose tensors may be wider than hidden and inter."""
INEXACT = ("swiglu_oai", "swiglu_step", "situ")
"""Activations that no argument saturates to few bits: the limit of swiglu_oai leaves a sigmoid
below 1, that of swiglu_step is 7, and those of situ are soft."""


@dataclass(frozen=True)
class RouteProblem(BaseProblem):
    """One call of ``route``, which says more of the fields that it shares.

    Attributes:
        num_tokens: tokens of the call.
        num_experts: experts that tokens are routed to.
        top_k: experts a token.
        method: one of ``METHODS``.
        bias: whether selection adds one to the scores.
        num_groups: groups that the experts fall into; 1 for no groups.
        topk_groups: groups that a token may use; 1 for no groups.
        scaling_factor, masked_groups: the same as in ``route``.
        dtype: the dtype of the logits.
        regime: how values are made, one of ``ROUTE_REGIMES``.
        seed: the seed of the values.
        token_ids: identity of each token's logits; its position if empty.
        renormalise_floor, best_of_each_group, shared_experts, jitter: the same as in ``route``.
            Experts that are shared come on top of ``num_experts``.
        expert_scales: whether each expert's weight has a factor of its own.
        hash_vocabulary: rows of the table that experts are taken from by a token's id in the
            vocabulary; 0: experts are taken by their scores.
        bias_values: one of ``BIAS_VALUES``.
        bias_dtype: dtype of the bias, one of ``BIAS_DTYPES``.
        group_score: the same as in ``route``; empty for None.
    """

    kind: ClassVar[str] = "route"
    operation: ClassVar[str] = "route"
    later_fields: ClassVar[tuple[str, ...]] = (
        "renormalise_floor",
        "expert_scales",
        "best_of_each_group",
        "shared_experts",
        "hash_vocabulary",
        "jitter",
        "bias_values",
        "bias_dtype",
        "group_score",
    )

    num_tokens: int = 1
    num_experts: int = 2
    top_k: int = 1
    method: str = "renormalize"
    bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0
    masked_groups: str = "-inf"
    dtype: str = "float32"
    regime: str = "iid"
    seed: int = 0
    token_ids: tuple[int, ...] = ()
    renormalise_floor: float = RENORMALISE_FLOOR
    expert_scales: bool = False
    best_of_each_group: bool = False
    shared_experts: int = 0
    hash_vocabulary: int = 0
    jitter: float = JITTER
    bias_values: str = "spread"
    bias_dtype: str = "float32"
    group_score: str = ""

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("method", self.method, tuple(METHODS))
        check_one_of("bias_values", self.bias_values, BIAS_VALUES)
        check_one_of("bias_dtype", self.bias_dtype, BIAS_DTYPES)
        check_one_of("group_score", self.group_score, ("", *GROUP_SCORES))
        for name, usual in (("bias_values", BIAS_VALUES[0]), ("bias_dtype", BIAS_DTYPES[0])):
            if not self.bias and getattr(self, name) != usual:
                refuse(name, getattr(self, name), f"{usual} without a bias")
        if self.group_score and self.num_groups == 1:
            refuse("group_score", self.group_score, "empty without groups")
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("regime", self.regime, ROUTE_REGIMES)
        check_one_of("masked_groups", self.masked_groups, tuple(MASKED_GROUPS))
        check_at_least(
            self,
            (
                ("num_tokens", 0),
                ("num_experts", 1),
                ("top_k", 1),
                ("num_groups", 1),
                ("topk_groups", 1),
                ("shared_experts", 0),
                ("hash_vocabulary", 0),
                ("seed", 0),
            ),
        )
        _check_token_ids(self.num_tokens, self.token_ids)
        if not math.isfinite(self.scaling_factor):
            refuse("scaling_factor", self.scaling_factor, "finite")
        if self.num_experts % self.num_groups:
            refuse("num_groups", self.num_groups, f"a divisor of num_experts = {self.num_experts}")
        if self.num_groups > 1 and METHODS[self.method].score == "logit":
            refuse("num_groups", self.num_groups, f"1 with {self.method}, which ranks by logits")
        if self.topk_groups > self.num_groups:
            refuse("topk_groups", self.topk_groups, f"at most num_groups = {self.num_groups}")
        within = self.topk_groups * (self.num_experts // self.num_groups)
        if self.top_k > within:
            refuse("top_k", self.top_k, f"at most {within}, the experts of topk_groups groups")
        self._check_rules()

    def _check_rules(self) -> None:
        weight = METHODS[self.method].weight
        for name in ("renormalise_floor", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(name, getattr(self, name), "a number from 0 upwards")
        for name, usual, kind in (
            ("renormalise_floor", RENORMALISE_FLOOR, "renormalize"),
            ("jitter", JITTER, "sparsemixer"),
        ):
            if getattr(self, name) != usual and weight != kind:
                refuse(name, getattr(self, name), f"{usual} with {self.method}, which has none")
        if self.best_of_each_group and not (
            self.topk_groups == self.num_groups and self.top_k % self.num_groups == 0
        ):
            expected = "false where topk_groups is not num_groups, or does not divide top_k"
            refuse("best_of_each_group", self.best_of_each_group, expected)
        table = self.hash_vocabulary > 0
        if self.bias and (table or weight == "sparsemixer"):
            refuse("bias", self.bias, "false with a table of experts, and with sparsemixer")
        if table and (self.grouped or weight == "sparsemixer"):
            refuse("hash_vocabulary", self.hash_vocabulary, "0 with groups, and with sparsemixer")
        if self.shared_experts and (
            weight not in JOINT or self.grouped or table or self.expert_scales
        ):
            expected = "0 with groups, a table, scales of experts, or weights not normalised"
            refuse("shared_experts", self.shared_experts, expected)

    @property
    def slots(self) -> int:
        """Experts of each token, the shared ones too."""
        return self.top_k + self.shared_experts

    @property
    def usual_floor(self) -> float:
        """The floor that needs no feature: shared experts are normalised without one."""
        normalised = METHODS[self.method].weight == "renormalize"
        return 0.0 if self.shared_experts and normalised else RENORMALISE_FLOOR

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens' identities."""
        return self.token_ids or tuple(range(self.num_tokens))

    @property
    def grouped(self) -> bool:
        """Whether there is more than one group of experts."""
        return self.num_groups > 1

    @property
    def group_experts(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

    @property
    def exact(self) -> bool:
        """Ids are compared as they are, weights within their bound: never bitwise."""
        return False

    @property
    def work(self) -> int:
        """Elements of its tensors, roughly weighted by what is done to them."""
        experts = self.num_experts + self.shared_experts
        table = self.hash_vocabulary * self.top_k // 32
        return 16 * self.num_tokens * (experts + self.slots) + self.num_experts + table


@dataclass(frozen=True)
class MoEProblem(BaseProblem):
    """One call of ``moe``, which says more of the fields that it shares.

    Attributes:
        num_tokens: tokens of the call.
        hidden: channels of the hidden states.
        inter: channels between both products.
        num_experts: experts of all ranks.
        top_k: experts a token.
        activation: one of ``ACTIVATIONS``.
        dtype: the dtype of hidden states and weights that are not quantised, and of the output.
        biases: whether both products have one.
        interleaved: gate and up rows alternate.
        swiglu_parameters: alpha, beta and limit: empty: the activation's own; ``"one"``: others,
            the same for all experts; ``"each"``: a tensor with other ones for each expert;
            ``"limit"``, ``"alpha_beta"``, ...: only these, one for all experts; ``"each_limit"``,
            ...: for each. ``"one"`` and ``"each"`` are all that the activation takes.
        local_experts: experts of this rank; 0: all of them.
        expert_offset: global id of this rank's first expert.
        weights_on_input: the routing weights multiply the hidden states.
        shared_experts: experts that every token goes to.
        quantized: format of the weights, one of ``QUANTISED``: FP8 with one scale an expert, one
            a row, or one for 128 x 128; nvfp4 or mxfp4; int8 with the scales of FP8;
            ``"fp8_block_ue8m0"``, whose scales are powers of two; mxfp8; int4 with a scale for 32
            or 128 columns (the last group may be short), ``zp`` with a zero point too;
            ``"nvfp4_gate_up"``, with a global scale of gate and of up for each expert. Empty: they
            are numbers.
        quantized_hidden: the hidden states are quantised too: as the weights, with one scale for
            all, one a token, or one for 128 columns; mxfp8 where weights are mxfp4; int8 where they
            are, with one scale a token, or for 128 columns where weights have blocks; beside int4
            with one scale a token: int8 with groups of 32, FP8 with groups of 128.
        assignment: how tokens are spread over experts: ``"iid"``; ``"balanced"``, in turn;
            ``"one_expert"``, all tokens to the same ones; ``"sparse"``, to few; ``"duplicates"``,
            where an expert may appear twice; ``"masked"``, where a third of the ids is -1.
        regime: how values are made, one of ``MOE_REGIMES``.
        strided_hidden: the hidden states are a slice of wider rows.
        seed: the seed of the values.
        token_ids: identity of each token's values; its position if empty.
        output_norm: norm of each routed expert's output, one of ``OUTPUT_NORMS``: by its root mean
            square, ``"plain"``; ``"gain"``: times a gain; ``"gain_first"``: the gain is before it.
        routed_scaling_factor: what the sum of the routed experts is multiplied by.
        shared_gate: what shared experts are multiplied by for each token, one of
            ``SHARED_GATES``: weights, or logits of a sigmoid; one for all, or for each of them.
        shared_weight: what shared experts are multiplied by; 0: 1 or 0.4, by the seed.
        one_product: there is no second product: outputs are of inter channels.
        identity_experts: experts whose output is the hidden state; their ids follow all others.
        pad_to: number of channels of whose multiples the weights' tensors are, zeros behind hidden
            and inter; 0: they are as wide as these.
        pad_states: the hidden states' tensor is as wide as the weights', too.
    """

    kind: ClassVar[str] = "moe"
    operation: ClassVar[str] = "moe"
    later_fields: ClassVar[tuple[str, ...]] = (
        "output_norm",
        "routed_scaling_factor",
        "shared_gate",
        "shared_weight",
        "one_product",
        "identity_experts",
        "pad_to",
        "pad_states",
    )

    num_tokens: int = 1
    hidden: int = 16
    inter: int = 16
    num_experts: int = 1
    top_k: int = 1
    activation: str = "swiglu"
    dtype: str = "float32"
    biases: bool = False
    interleaved: bool = False
    swiglu_parameters: str = ""
    local_experts: int = 0
    expert_offset: int = 0
    weights_on_input: bool = False
    shared_experts: int = 0
    quantized: str = ""
    quantized_hidden: bool = False
    assignment: str = "iid"
    regime: str = "iid"
    strided_hidden: bool = False
    seed: int = 0
    token_ids: tuple[int, ...] = ()
    output_norm: str = ""
    routed_scaling_factor: float = 1.0
    shared_gate: str = ""
    shared_weight: float = 0.0
    one_product: bool = False
    identity_experts: int = 0
    pad_to: int = 0
    pad_states: bool = False

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        for name, allowed in (
            ("activation", tuple(ACTIVATIONS)),
            ("dtype", DTYPES),
            ("swiglu_parameters", SWIGLU_PARAMETERS),
            ("quantized", QUANTISED),
            ("assignment", ASSIGNMENTS),
            ("regime", MOE_REGIMES),
            ("output_norm", OUTPUT_NORMS),
            ("shared_gate", SHARED_GATES),
        ):
            check_one_of(name, getattr(self, name), allowed)
        check_at_least(
            self,
            (
                ("num_tokens", 0),
                ("hidden", 1),
                ("inter", 1),
                ("num_experts", 1),
                ("top_k", 1),
                ("local_experts", 0),
                ("expert_offset", 0),
                ("shared_experts", 0),
                ("identity_experts", 0),
                ("seed", 0),
            ),
        )
        _check_token_ids(self.num_tokens, self.token_ids)
        self._check_experts()
        self._check_padding()
        activation = ACTIVATIONS[self.activation]
        if self.interleaved and not activation.gated:
            refuse("interleaved", self.interleaved, f"false: {self.activation} has no gate")
        if not takes(self.activation, self.swiglu_parameters):
            expected = (
                f"of {', '.join(activation.parameters)}" if activation.parameters else "empty"
            )
            refuse("swiglu_parameters", self.swiglu_parameters, f"{expected} for {self.activation}")
        if self.numbers_of_each and self.shared_experts:
            refuse("swiglu_parameters", self.swiglu_parameters, "'' or 'one' with shared experts")
        if self.quantized_hidden and not self.quantized:
            refuse("quantized_hidden", self.quantized_hidden, "false where quantized is empty")
        self._check_sums()
        for name in ("hidden", "inter"):
            number = MULTIPLES.get(self.quantized, 1)
            if getattr(self, name) % number:
                expected = f"a multiple of {number} with weights in {self.quantized}"
                refuse(name, getattr(self, name), expected)

    def _check_sums(self) -> None:
        """Refuse factors that are none, and what shared experts would need."""
        if self.output_norm and self.weights_on_input:
            refuse("output_norm", self.output_norm, "empty with weights_on_input")
        for name in ("output_norm", "shared_experts"):
            if self.one_product and getattr(self, name):
                refuse("one_product", self.one_product, f"false with {name}")
        for name in ("routed_scaling_factor", "shared_weight"):
            if not math.isfinite(getattr(self, name)):
                refuse(name, getattr(self, name), "finite")
        for name, off in (("shared_gate", ""), ("shared_weight", 0.0)):
            if getattr(self, name) != off and not self.shared_experts:
                refuse(name, getattr(self, name), f"{off!r} without shared experts")

    def _check_padding(self) -> None:
        check_at_least(self, (("pad_to", 0),))
        if not self.pad_to:
            if self.pad_states:
                refuse("pad_states", self.pad_states, "false where pad_to is 0")
            return
        if self.one_product:
            refuse("pad_to", self.pad_to, "0 with one_product")
        check_one_of("quantized", self.quantized, PADDED_FORMATS)
        multiple = 128 if self.quantized == "fp8_block" else MULTIPLES.get(self.quantized, 1)
        if self.pad_to % multiple:
            expected = f"a multiple of {multiple} with weights in {self.quantized}"
            refuse("pad_to", self.pad_to, expected)
        if self.quantized == "fp8_block" and self.inter % multiple:
            refuse(
                "inter", self.inter, f"a multiple of {multiple} with pad_to and blocks of scales"
            )

    def _check_experts(self) -> None:
        impossible = self.quantized_hidden or self.local_experts or self.one_product
        if self.identity_experts and impossible:
            expected = (
                "0 with hidden states that are quantised, experts of other ranks, or one_product"
            )
            refuse("identity_experts", self.identity_experts, expected)
        if self.top_k > self.num_experts and self.assignment != "duplicates":
            expected = f"at most num_experts = {self.num_experts} without duplicates"
            refuse("top_k", self.top_k, expected)
        end = self.expert_offset + (self.local_experts or self.num_experts)
        if end > self.num_experts:
            expected = f"such that the shard ends at most at num_experts = {self.num_experts}"
            refuse("expert_offset", self.expert_offset, expected)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens' identities."""
        return self.token_ids or tuple(range(self.num_tokens))

    @property
    def gated(self) -> bool:
        """Whether there are gate and up rows."""
        return ACTIVATIONS[self.activation].gated

    @property
    def numbers_given(self) -> tuple[str, ...]:
        """Names of the numbers that a call gives, of alpha, beta and limit."""
        return numbers_given(self.activation, self.swiglu_parameters)

    @property
    def numbers_of_each(self) -> bool:
        """Whether each expert has numbers of its own."""
        return self.swiglu_parameters.startswith("each")

    @property
    def wide_hidden(self) -> int:
        """Channels that the weights' tensors have room for, of hidden."""
        return -(-self.hidden // self.pad_to) * self.pad_to if self.pad_to else self.hidden

    @property
    def wide_inter(self) -> int:
        """Channels that the weights' tensors have room for, of inter."""
        return -(-self.inter // self.pad_to) * self.pad_to if self.pad_to else self.inter

    @property
    def here(self) -> int:
        """Experts of this rank."""
        return self.local_experts or self.num_experts

    @property
    def expert_parallel(self) -> bool:
        """Whether other ranks have experts too."""
        return self.here < self.num_experts

    @property
    def exact(self) -> bool:
        """Whether the output is exactly representable, so that it is compared bitwise."""
        return (
            self.regime == "exact_grid"
            and self.activation not in INEXACT
            and not (self.swiglu_parameters or self.quantized or self.identity_experts)
            and not (self.output_norm or self.shared_gate or self.shared_weight)
            and self.routed_scaling_factor == 1
            and self.top_k + self.shared_experts <= 8  # noqa: PLR2004  see regimes
        )

    @property
    def work(self) -> int:
        """Multiply-adds of the call plus elements of its tensors: what it costs, roughly."""
        expert = self.wide_inter * self.wide_hidden * (3 if self.gated else 2)
        pairs = self.num_tokens * (self.top_k + self.shared_experts)
        return (pairs + 4 * (self.here + self.shared_experts)) * expert + self.num_tokens


def numbers_given(activation: str, parameters: str) -> tuple[str, ...]:
    """Return the names of the numbers that a value of ``swiglu_parameters`` stands for."""
    if not parameters:
        return ()
    subset = parameters.removeprefix("each").removeprefix("one").removeprefix("_")
    taken = ACTIVATIONS[activation].parameters
    return tuple(name for name in SWIGLU_SUBSETS[subset] if subset or name in taken)


def takes(activation: str, parameters: str) -> bool:
    """Whether an activation takes the numbers that a value of ``swiglu_parameters`` stands for."""
    given, taken = numbers_given(activation, parameters), ACTIVATIONS[activation].parameters
    return not parameters or (bool(given) and set(given) <= set(taken))


def as_one(parameters: str) -> str:
    """Return the value of ``swiglu_parameters`` with the same names and one number for all."""
    return parameters.removeprefix("each_") if parameters != "each" else "one"


def _check_token_ids(num_tokens: int, token_ids: tuple[int, ...]) -> None:
    if num_tokens > MAX_TOKENS:
        refuse("num_tokens", num_tokens, f"at most {MAX_TOKENS}")
    if token_ids and len(token_ids) != num_tokens:
        refuse("token_ids", token_ids, "empty or one a token")
    for position, identity in enumerate(token_ids):
        if not 0 <= identity < MAX_TOKENS:
            refuse(f"token_ids[{position}]", identity, f"from 0 to {MAX_TOKENS - 1}")
