"""Evaluates a published reference in float64, and what its roundings can do to the answer.

A reference is plain torch with casts of its own. Below it, at the operators that torch dispatches,
every floating format of 16 and 32 bits becomes float64. The same operators say which rounding each
step has in the call's own formats. Running error analysis by samples: each step is disturbed by its
own rounding, at random, and the answers spread by as much as roundings may move them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WIDE = torch.float64
WIDENED = (torch.float16, torch.bfloat16, torch.float32)
UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
"""Largest relative error of rounding to the nearest number of a format."""
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
FUNCTION_ERROR = 2.0**-21
"""Relative error of ex2.approx, lg2.approx, rsqrt.approx, rcp.approx and what is made of them."""
SINE_ERROR, SINE_SLOPE = 2.0**-20.5, 2.0**-23
"""Absolute error of sin.approx and cos.approx, by the PTX manual: 2^-20.5 to 2 pi, and 2^-14.7 at
100 pi, which is that share of the angle."""
LOG_ERROR = 2.0**-21.41 + 2.0**-24
"""Absolute error of __logf between 0.5 and 2, by the CUDA guide, and of the sum 1 + e before it."""
TANH_ERROR = 2.0**-10.5
"""Relative error of tanh.approx, by the PTX manual."""
TINIEST = 2.0**-1000
"""What a number is divided by where that would be zero."""
FP8_SUM_ERROR = 2.0**-13
"""Bits that Hopper's tensor cores keep of a product of FP8 numbers below the largest of a sum."""

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution"})
SUMS = frozenset(
    {"sum", "mean", "linalg_vector_norm", "norm", "var", "var_mean", "std", "native_layer_norm"}
)
SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp"})
SOFTMAX = frozenset({"_softmax", "_log_softmax", "logsumexp", "exp", "exp2"})
TANH = frozenset({"tanh", "gelu"})
SINES = frozenset({"sin", "cos"})
LOGS = frozenset({"log", "softplus", "log_sigmoid_forward"})
"""Functions that kernels take by way of a logarithm near 1: softplus is __logf(1 + __expf(x))."""
FUNCTIONS = SOFTMAX | {
    *("log", "log2", "log1p", "expm1", "sin", "cos", "rsqrt", "sqrt", "sigmoid", "silu"),
    *("softplus", "pow", "reciprocal", "div", "log_sigmoid_forward"),
}
STEPS = frozenset({"add", "sub", "rsub", "mul", "addcmul", "addcdiv", "lerp", "square"})
DRAWS = frozenset({"multinomial", "bernoulli", "uniform", "normal", "exponential", "rand", "randn"})
"""Operators whose result is drawn."""
LINEAR = PRODUCTS | {"sum", "mean", "cumsum"}
"""Sums of terms whose squares they add up as well."""
MOVED = frozenset({"clone", "cat", "stack", "index", "index_select", "gather", "where"})
"""Operators that move numbers and leave them as they are."""
MAXIMA = frozenset({"amax", "max"})
"""Operators that return the largest number along axes."""
SUMMED = PRODUCTS | SUMS | SCANS
ROUNDED = SUMMED | TANH | FUNCTIONS | STEPS
"""Operators whose result is rounded; all others copy, choose, compare or count."""


def base_name(function: Any) -> str:  # noqa: ANN401  torch has no public type of it
    """Return the name of an operator, without that it writes in place."""
    name = function.overloadpacket.__name__
    return str(name if name.startswith("_") else name.rstrip("_"))


def _floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (*WIDENED, WIDE)


class Steps(TorchDispatchMode):
    """Records, of a reference in the call's own formats, in which format each step is rounded.

    Attributes:
        units: unit roundoffs of what holds the result of each rounded step, in order.
        classes: how many steps there are of each kind.
        longest: terms of the longest sum.
        draws: whether a step draws at random.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.units: list[float] = []
        self.classes: Counter[str] = Counter()
        self.longest = 1
        self.draws = False
        self._made: dict[int, list[int]] = {}
        self._written: dict[int, list[tuple[int, float]]] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, and record its rounding."""
        name = base_name(func)
        result = func(*args, **(kwargs or {}))
        self.draws |= name in DRAWS
        first = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(first, torch.Tensor):
            return result
        if name in ROUNDED and _floating(first):
            self.units.append(UNITS[first.dtype])
            place = storage_of(first)
            self._made[place] = [len(self.units) - 1]
            self._written[place] = [(len(self.units) - 1, 2.0**-24)]
            self._kept.append(first)  # else another tensor has its address
            self._classify(name, args, first)
        elif name in ("_to_copy", "copy", "clone"):
            source = args[1] if name == "copy" else args[0]
            self._narrow(source, first)
            self._move([source], first, keep=name == "copy")
        elif name in MOVED:
            self._move(tree_leaves(args), first)
        return result

    def _move(self, sources: Iterable[object], result: torch.Tensor, *, keep: bool = False) -> None:
        """Note the steps that made what is moved into a result, or into a part of it."""
        place = storage_of(result)
        steps = list(self._made.get(place, ())) if keep else []
        for each in sources:
            if isinstance(each, torch.Tensor):
                steps += self._made.get(storage_of(each), ())
        if steps:
            self._made[place] = sorted(set(steps))
            self._kept.append(result)

    def _classify(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        kinds = {"product": PRODUCTS, "sum": SUMS, "scan": SCANS, "softmax": SOFTMAX}
        kind = next((kind for kind, names in kinds.items() if name in names), "step")
        self.classes[kind] += 1
        if kind in ("product", "sum", "scan"):
            self.longest = max(self.longest, terms(name, args, result))

    def _narrow(self, source: object, result: torch.Tensor) -> None:
        if not isinstance(source, torch.Tensor) or not _floating(source):
            return
        if result.dtype not in WIDENED or not self.units:
            return
        if UNITS[result.dtype] > UNITS[source.dtype]:
            for made in self._made.get(storage_of(source), [len(self.units) - 1]):
                self._written.setdefault(storage_of(result), []).append((made, self.units[made]))
                self.units[made] = max(self.units[made], UNITS[result.dtype])
            self._kept.append(result)
        elif storage_of(source) in self._written:
            # A copy of a last result is one too.
            kept = self._written.setdefault(storage_of(result), [])
            kept += self._written[storage_of(source)]
            self._kept.append(result)

    def without_last(self, outputs: Iterable[torch.Tensor]) -> list[float]:
        """Return the units without the rounding to the outputs' own formats, which has a term."""
        units = list(self.units)
        for each in outputs:
            for place, unit in self._written.get(storage_of(each), ()):
                units[place] = min(units[place], unit)
        return units


def storage_of(value: torch.Tensor) -> int:
    """Return what a tensor and its views have in common."""
    return int(value.untyped_storage()._cdata)  # noqa: SLF001


def terms(name: str, args: tuple[Any, ...], result: torch.Tensor) -> int:
    """Return how many terms a sum has."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if name in ("addmm", "baddbmm", "addmv"):
        tensors = tensors[1:]
    if name in PRODUCTS:
        return max(1, tensors[0].shape[-1] if tensors[0].dim() else 1)
    if name in SCANS:
        return max(1, max(tensors[0].shape, default=1))
    return max(1, tensors[0].numel() // max(1, result.numel()))


@dataclass(frozen=True)
class TensorCores:
    """What products of a call may be made of.

    Attributes:
        operands: the format in which operands may be held that do not fit into it.
        probabilities: the format of operands between 0 and 1.
        sums: error that a product of FP8 numbers has within a sum, relative to the largest.
        partials: unit roundoff of sums of some of the terms.
    """

    operands: torch.dtype = torch.float32
    probabilities: torch.dtype = torch.float32
    sums: float = 0.0
    partials: float = 0.0


class Wide(TorchDispatchMode):
    """Evaluates in float64, and disturbs each step by its rounding if it is given one.

    Args:
        units: the unit roundoff of each rounded step; None: nothing is disturbed.
        seed: seed of the disturbances.
        lean: 0: roundings at random; 1 or -1: the errors of approximate functions instead, all to
            that side.
        cores: what products are made of.
        times: how many roundings each disturbance is worth.
        factors: what each maximum over an axis is multiplied by, in order.

    Attributes:
        maxima: the results of each maximum over an axis, in order.
    """

    def __init__(
        self,
        units: Sequence[float] | None = None,
        *,
        seed: int = 0,
        lean: int = 0,
        cores: TensorCores = TensorCores(),
        times: float = 1.0,
        factors: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.maxima: list[torch.Tensor] = []
        self._factors = factors
        self._units, self._step, self._lean, self._times = units, 0, lean, times
        self._cores = cores
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._full: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator in float64."""
        named = dict(kwargs or {})
        name = base_name(func)
        if named.get("dtype") in WIDENED:
            named["dtype"] = WIDE
        if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):  # noqa: PLR2004
            return self._bits(func, args[0], args[1])
        rounded = name in ROUNDED
        disturbed = rounded and self._units is not None and not self._lean
        if disturbed and name in PRODUCTS and not any(self._is_full(each) for each in args):
            args = tuple(self._rounded_operand(each) for each in args)
        result = func(*args, **named)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if name in MAXIMA and isinstance(first, torch.Tensor) and first.dtype == WIDE:
            self._maximum(first)
        moved = name in MOVED or name == "_to_copy"
        if moved and isinstance(first, torch.Tensor) and any(self._is_full(each) for each in args):
            self.keep_full(first)
        if isinstance(first, torch.Tensor) and first.dtype in CODES:
            self._follow(func, name, args, first)
        if not rounded or not isinstance(first, torch.Tensor) or not first.is_floating_point():
            in_place = func._schema.is_mutable  # noqa: SLF001
            return result if in_place else tree_map(_widened, result)
        if first.dtype != WIDE:
            first = first.to(WIDE)
            result = first if result is not first and isinstance(result, torch.Tensor) else result
        if self._units is not None:
            self._disturb(func, name, args, named, first)
        return result

    def _maximum(self, result: torch.Tensor) -> None:
        """Keep the result of a maximum, and change it if that is asked."""
        place = len(self.maxima)
        if place < len(self._factors):
            result.mul_(self._factors[place])
        self.maxima.append(result.clone())

    def keep_full(self, value: torch.Tensor) -> None:
        """Know of an input in float32: no tensor core holds a product of it in 16 bits."""
        self._full.add(storage_of(value))
        self._kept.append(value)

    def _is_full(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and storage_of(value) in self._full

    def _bits(self, func: Any, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
        """Return another reading of the same bits, which a float64 does not have."""
        if source.dtype == WIDE and dtype != WIDE:
            source = source.to(torch.bfloat16 if dtype.itemsize == 2 else torch.float32)  # noqa: PLR2004
        found: torch.Tensor = _widened(func(source, dtype))
        return found

    def _follow(self, func: Any, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:  # noqa: ANN401
        """Keep the numbers that codes were rounded from, also where the codes are copied."""
        if name == "_to_copy" and result.is_contiguous() and args[0].dtype == WIDE:
            self._before[storage_of(result)] = args[0].contiguous().reshape(-1)
        elif name in MOVED and result.is_contiguous():
            moved = func(*tree_map(self._numbers, args))
            self._before[storage_of(result)] = moved.contiguous().reshape(-1)
        elif name in ("copy", "index_put"):
            place = storage_of(result)
            if place not in self._before:
                count = result.untyped_storage().nbytes()
                self._before[place] = torch.as_strided(result, (count,), (1,), 0).to(WIDE)
            numbers = tuple(self._numbers(each) for each in args)
            func(*numbers)
        self._kept.append(result)

    def _numbers(self, value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.Tensor) or value.dtype not in CODES:
            return value
        before = self._before.get(storage_of(value))
        if before is None:
            return value.to(WIDE)
        return torch.as_strided(before, value.shape, value.stride(), value.storage_offset())

    def numbers_of(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers that an output's codes were rounded from, if they are known."""
        known = value.dtype in CODES and storage_of(value) in self._before
        return self._numbers(value) if known else None

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(like.shape, dtype=WIDE, device=like.device)
        random = self._random(like.device)
        return empty.uniform_(-self._times, self._times, generator=random)

    def _random(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _rounded_operand(self, value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.Tensor) or value.dtype != WIDE:
            return value
        inside = value.numel() and bool(((value >= 0) & (value <= 1)).all())
        dtype = self._cores.probabilities if inside else self._cores.operands
        if torch.equal(value.to(dtype).to(WIDE), value):
            return value
        steps = _steps_of_codes(value) if dtype in CODES else value
        return value + UNITS[dtype] * steps * self._noise(value)

    def _disturb(
        self,
        func: Any,  # noqa: ANN401
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        result: torch.Tensor,
    ) -> None:
        units = self._units or ()
        unit = units[self._step] if self._step < len(units) else 2.0**-24
        self._step += 1
        if self._lean:
            if name in SINES:
                size = (args[0].to(WIDE).abs() * SINE_SLOPE).clamp_min(SINE_ERROR)
                result.add_(torch.nan_to_num(size, nan=0.0, posinf=0.0), alpha=self._lean)
            elif name in TANH:
                result.mul_(1 + self._lean * TANH_ERROR)
            elif name in FUNCTIONS:
                result.mul_(1 + self._lean * FUNCTION_ERROR)
                if name in LOGS:
                    result.add_(self._lean * LOG_ERROR)
            return
        if name in SUMMED and not func._schema.is_mutable:  # noqa: SLF001
            self._disturb_sum(func, name, args, named, result)
        result.mul_(1 + unit * self._noise(result))

    def _disturb_sum(
        self,
        func: Any,  # noqa: ANN401
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        result: torch.Tensor,
    ) -> None:
        """Disturb a sum of K terms by sqrt(K) units of their root sum of squares, and of itself.

        Partial sums of terms of both signs grow as the former does, of one sign as the latter.
        Tensor cores that cut FP8 products off lose with each 32 of them, always to one side: of
        terms whose largest is some five of their root mean square, sqrt(K) / 12 of that error.
        """
        count = terms(name, args, result)
        size = result.abs()
        if name in LINEAR:
            squares = tuple(each.square() if _floating(each) else each for each in args)
            root = func(*squares, **named).sqrt()
            size = size + (root / math.sqrt(count) if name == "mean" else root)
        noise = torch.empty_like(result).normal_(generator=self._random(result.device))
        error = 2.0**-24 * math.sqrt(count)
        error += self._cores.partials
        if name in PRODUCTS and self._cores.sums:
            error += self._cores.sums * (1 + math.sqrt(count) / 12)
        result.add_(torch.nan_to_num(size, posinf=0.0) * noise * (self._times * error))


def _steps_of_codes(value: torch.Tensor) -> torch.Tensor:
    """Return the powers of two below probabilities, relative to the largest of their row.

    A kernel rounds exp(logit - max): half a step of a format is a share of its power of two.
    """
    largest = value.amax(-1, keepdim=True)
    binades = torch.frexp(value / largest.clamp_min(TINIEST)).exponent - 1
    return torch.where(value > 0, torch.exp2(binades.to(WIDE)) * largest, 0.0)


def _widened(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor) and value.dtype in WIDENED:
        return value.to(WIDE)
    return value


def widened_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of inputs in float64; codes and integers stay as they are."""
    return {
        key: tree_map(
            lambda each: (
                (each.to(WIDE) if each.dtype in WIDENED else each.clone())
                if isinstance(each, torch.Tensor)
                else each
            ),
            value,
        )
        for key, value in inputs.items()
    }


def copied_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of inputs."""
    return {
        key: tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, value)
        for key, value in inputs.items()
    }
