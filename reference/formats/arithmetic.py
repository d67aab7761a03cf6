"""What an implementation rounds, and where: the input of every error bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..validation import checked_integer, flag_of

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tfloat32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Half the distance from 1 to the next number, by format: round-to-nearest loses at most this."""

SMALLEST_SUBNORMAL: dict[str, float] = {
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "tfloat32": 2.0**-136,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float8_e4m3fn": 2.0**-9,
    "float8_e5m2": 2.0**-16,
}
"""The distance between neighbours around zero, by format: half of it is lost however small x is."""

UE8M0 = "float8_e4m3fn_ue8m0"
"""FP8 whose scales are rounded up to powers of two, as an intermediate."""
BLOCK_FORMATS = ("nvfp4", "mxfp8", "mxfp4", "int8", UE8M0)
"""Formats in which a block of elements, or a row of an intermediate, shares a scale."""

FORMATS: dict[str, tuple[str | None, ...]] = {
    "accumulate": (*UNIT_ROUNDOFF,),
    "probabilities": (None, "inputs", *UNIT_ROUNDOFF),
    "projections": (None, "inputs", *UNIT_ROUNDOFF),
    "intermediate": (None, "inputs", *UNIT_ROUNDOFF, *BLOCK_FORMATS),
    "combine": (None, "inputs", *UNIT_ROUNDOFF),
    **dict.fromkeys(("logits", "sinks", "lse"), (None, "inputs", "float16", "bfloat16")),
}
"""Values of each field of ``Arithmetic`` that names a format."""
CHOICES: dict[str, tuple[str | None, ...]] = {
    "row_sum": ("accumulate", "probabilities"),
    "exponent": ("difference", "fused"),
    "tanh": ("accumulate", "approximate", "sigmoid"),
    "operands": (None, "tfloat32"),
    "products": ("accumulate", "inputs"),
    "dequantized": ("accumulate", "inputs"),
    "row_scales": ("operands", "products", "steps"),
    "fp8_products": ("accumulate", "fixed_point"),
    "sigmoid": ("exponential", "tanh"),
    "routing": ("given", "accumulate"),
    "scales": ("division", "reciprocal", "approximate"),
    "powers": ("exact", "logarithm"),
    "quotients": ("division", "once", "approximate", "reciprocal", "inverse"),
    "ties": ("even", "away", "cut", "zero"),
    "zeros": ("signed", "unsigned"),
    "roots": ("rounded", "approximate"),
}
"""Values of each field of ``Arithmetic`` that names another choice."""


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of an attention, merge, routing, MoE or quantising kernel.

    Attributes:
        accumulate: format of dot products, exponentials, row sums and logits.
        probabilities: format to which exp(logit - max) is rounded before it multiplies V, as
            FlashAttention does before the second tensor-core product; ``"inputs"`` means the
            dtype of V; None means that it stays in ``accumulate``.
        row_sum: what the normaliser sums: ``"accumulate"``, the exponentials before they are
            rounded (FlashAttention, arXiv:2205.14135, algorithm 1), or ``"probabilities"``, the
            rounded ones (FlashInfer's FA2 sums them by a tensor-core product with ones).
        partial_outputs: outputs of parts of the keys are stored in the output's dtype before they
            are merged (FlashInfer's split-KV, ``tmp_v``).
        merged_outputs: where a request has more keys than this, several parts at a time are merged
            first, and stored in the output's dtype once more before the last merge (FlashInfer's
            ``VariableLengthMergeStates``: one row of threads each); 0: never.
        exponent: how exp(s - m) is taken: ``"difference"``: of a difference, which is 0 for the
            largest logit, or ``"fused"``: as exp2(s c - (m c)) with a product that was rounded, by
            which the largest probability is off by ``u |m|`` (FlashAttention-3). Then the exact
            grid is held to the bound, not to the last bit.
        tanh: the tanh of a soft cap: ``"accumulate"``, ``"approximate"``: PTX's
            ``tanh.approx.f32``, with a relative error of at most 2^-11, or ``"sigmoid"``: 2
            sigmoid(2 x) - 1, which has a small absolute error only (SGLang's Triton kernels).
        operands: format of float32 operands of both products, as tensor cores take them:
            ``"tfloat32"``, rounded or cut off (Triton's ``tl.dot`` by default); None: all of their
            bits. Operands of 16 bits lose nothing.
        products: the products of a query's and a key's elements: ``"accumulate"``, or ``"inputs"``:
            each is rounded to their 16-bit dtype before the sum (``tl.sum(q * k)`` of SGLang's
            decode). Overflow of float16 is still wrong.
        dequantized: keys and values of a quantised cache, scale applied: ``"accumulate"``, or
            ``"inputs"``: rounded to the queries' dtype before they are multiplied (vLLM's unified
            attention with an FP8 cache). Weights of experts: to the hidden states' (its kernel of
            int4 weights).
        row_scales: what scales of tokens and heads multiply: ``"operands"``, keys and values,
            ``"products"``: logits, and the probabilities before they are rounded (vLLM's unified
            attention with an int8 or FP8 cache of such scales), or ``"steps"``: codes less their
            zero point, where the difference and the product are each rounded to the queries' dtype
            (lmdeploy's decode with an int8 or int4 cache).
        fp8_products: what sums the products of FP8 operands (queries, keys and values):
            ``"accumulate"``, or ``"fixed_point"``: Hopper's tensor cores, which align 32 products
            and the sum so far to the largest of them and cut each off after 13 bits.
        projections: format in which experts' first product is stored before the activation
            (``"inputs"``: vLLM's Triton kernels); None: it stays in ``accumulate``.
        intermediate: format to which the activation's result is rounded before the experts' second
            product; ``"inputs"`` means the format of the hidden states. FP8 (``_ue8m0``: by powers
            of two), int8 and the block formats are scaled by the largest element of the row, or of
            a part of it.
        combine: format in which the experts' weighted outputs are added; None: ``accumulate``.
            ``partial_outputs`` says that each of them is stored in the output's dtype before.
        sigmoid: the sigmoid of routers and activations: ``"exponential"``, 1 / (1 + exp(-x)), or
            ``"tanh"``, (1 + tanh(x / 2)) / 2, which for negative x has a small absolute error only
            (FlashInfer's routing kernels).
        logits: format in which attention's product of queries and keys is stored, once, before a
            soft cap, a bias or the softmax (a matmul in 16 bits); ``"inputs"`` means the queries'
            dtype; None: it stays in ``accumulate``. Then the exact grid is held to the bound.
        sinks: format to which attention's sinks are rounded before they count; ``"inputs"`` means
            the queries' dtype; None: they stay in float32.
        lse: format in which attention's LSE is stored and returned, ``"inputs"``: the queries'
            dtype; None: float32.
        routing: what experts' routing weights are: ``"given"``, or ``"accumulate"``: a softmax that
            the call takes in that format, as the feature ``router_logits`` says.
        scales: a quantiser's amax over the largest number of its codes: ``"division"``, rounded
            once; ``"reciprocal"``: a product with the number's rounded reciprocal; or
            ``"approximate"``: a GPU's division, within 2 units in the last place.
        powers: a quantiser's scales that are powers of two: ``"exact"``, or ``"logarithm"``:
            exp2(ceil(log2(scale))), by which a scale next to a power of two becomes its neighbour.
        quotients: what a quantiser rounds to a code: ``"division"``, x / scale in float32;
            ``"once"``: the exact quotient; ``"approximate"``: a GPU's division; ``"reciprocal"``: x
            times the rounded reciprocal of the scale; or ``"inverse"``: x times the largest number
            over amax. Of the last three, a code may be its neighbour next to halfway between both.
        ties: codes in int8 and e2m1: ``"even"``, the nearest, ties to even; ``"away"``: ties away
            from zero (CUDA's ``round``); int8 only: ``"cut"``: what is behind the point is cut off
            (a cast); e2m1 only: ``"zero"``: ties toward zero.
        zeros: codes in e2m1 of what is rounded to 0: ``"signed"``, as x is, or ``"unsigned"``.
        roots: a norm's 1 / sqrt: ``"rounded"``, a root and a division, or ``"approximate"``: a
            GPU's, within 2 units in the last place, whose result for a power of four is not
            defined. Of a norm, and of RoPE, ``intermediate`` is what is quantised; of a norm,
            ``combine`` is the sum with the residual of which it is taken.

    Raises:
        ValueError: a format that has no unit roundoff in ``UNIT_ROUNDOFF``, or another choice.
    """

    accumulate: str = "float32"
    probabilities: str | None = None
    row_sum: str = "accumulate"
    partial_outputs: bool = False
    merged_outputs: int = 0
    exponent: str = "difference"
    tanh: str = "accumulate"
    fp8_products: str = "accumulate"
    projections: str | None = None
    intermediate: str | None = None
    combine: str | None = None
    sigmoid: str = "exponential"
    operands: str | None = None
    products: str = "accumulate"
    dequantized: str = "accumulate"
    row_scales: str = "operands"
    logits: str | None = None
    sinks: str | None = None
    lse: str | None = None
    routing: str = "given"
    scales: str = "division"
    powers: str = "exact"
    quotients: str = "division"
    ties: str = "even"
    zeros: str = "signed"
    roots: str = "rounded"

    def __post_init__(self) -> None:
        """Refuse formats that no bound is known for."""
        for name, known in FORMATS.items():
            if (value := getattr(self, name)) not in known:
                formats = sorted(each for each in known if each is not None)
                message = f"Arithmetic.{name} is {value!r}; known formats: {formats}"
                raise ValueError(message)
        partial = flag_of(self.partial_outputs)
        if partial is None:
            message = (
                f"Arithmetic.partial_outputs is {self.partial_outputs!r}; it must be True or False"
            )
            raise ValueError(message)
        merged = checked_integer("Arithmetic.merged_outputs", self.merged_outputs)
        if merged < 0 or (merged and not partial):
            message = (
                f"Arithmetic.merged_outputs is {self.merged_outputs!r}; it must be a number of "
                "keys, and 0 without partial_outputs"
            )
            raise ValueError(message)
        # Python's own types, of which reports and stored answers are made.
        object.__setattr__(self, "partial_outputs", partial)
        object.__setattr__(self, "merged_outputs", merged)
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                message = f"Arithmetic.{name} is {value!r}; it must be one of {choices}"
                raise ValueError(message)

    def probabilities_format(self, value_dtype: torch.dtype) -> str | None:
        """Resolve ``"inputs"`` against the dtype of V; None where nothing is rounded."""
        return self.rounded("probabilities", value_dtype)

    def rounded(self, field: str, inputs: torch.dtype) -> str | None:
        """Return the format of a field that is coarser than ``accumulate``; None if it is not.

        Args:
            field: its name.
            inputs: what ``"inputs"`` stands for.
        """
        value: str | None = getattr(self, field)
        chosen = dtype_name(inputs) if value == "inputs" else value
        if chosen is None or UNIT_ROUNDOFF[chosen] <= UNIT_ROUNDOFF[self.accumulate]:
            return None
        return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """Return the plain name of a torch dtype: ``torch.bfloat16`` is ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a floating dtype.

    Raises:
        ValueError: a dtype without an entry in ``UNIT_ROUNDOFF``.
    """
    name = dtype_name(dtype)
    if name not in UNIT_ROUNDOFF:
        message = f"dtype {name} has no unit roundoff here; known: {sorted(UNIT_ROUNDOFF)}"
        raise ValueError(message)
    return UNIT_ROUNDOFF[name]


def checked_arithmetic(arithmetic: Arithmetic | None) -> Arithmetic:
    """Return the arithmetic of a bound: float32 throughout if None.

    Raises:
        ValueError: what is no Arithmetic, such as the name of a format.
    """
    if arithmetic is None:
        return Arithmetic()
    if not isinstance(arithmetic, Arithmetic):
        message = f"arithmetic is {arithmetic!r}; it must be an Arithmetic, or None"
        raise ValueError(message)
    return arithmetic
