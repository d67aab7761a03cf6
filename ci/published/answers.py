"""What a published reference says of one problem: its answer in float64, and how far others may be.

Error analysis by samples. Each of ``SAMPLES`` evaluations has every step disturbed at random by the
rounding that this step has in the call's own formats: a step, a function or a conversion by its
format's unit, a sum of K terms by sqrt(K) units of float32 of itself and of its root sum of
squares, an operand of a product by the format of tensor cores where it does not fit into that. Two
more have the errors of approximate functions, all to one side. How far these spread is how far
roundings move an answer.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .arithmetic import (
    CODES,
    FP8_SUM_ERROR,
    UNITS,
    WIDE,
    WIDENED,
    Steps,
    TensorCores,
    Wide,
    copied_inputs,
    widened_inputs,
)
from .expected import Expected, Scales
from .known import NONE, Arithmetic
from .scales import changes, pairs_of

SAMPLES = 6
"""Disturbed evaluations of a reference."""
MOST_LETTERS = 160
"""Letters kept of an error's first line."""
PLACE = re.compile(r" at /\S+:\d+(?=:)")
"""The place in FlashInfer's sources that stands in front of what is wrong."""
DISTANT = 4
"""Evaluations that are disturbed by more than a rounding."""
FEW = 16
"""Elements of a workspace that are left to a reference."""
FAR = 3.0
"""Roundings that a disturbance is worth where codes are sought that roundings may change."""
BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
"""Formats whose bytes are codes of several kinds: equal, or where a disturbance changes them."""


class NoAnswerError(Exception):
    """A reference that cannot be asked, with the reason."""


Pair = tuple[torch.Tensor, torch.Tensor]
"""An output, and the numbers that were rounded to it if it has codes."""
Answers = dict[str, Pair]
"""The outputs of an evaluation, by name."""


@dataclass
class Said:
    """All that a reference says of one problem.

    Attributes:
        outputs: each output.
        arithmetic: the class of the call's arithmetic, as its steps are.
        random: outputs that differ with another state of the generator.
        seconds: what it took.
    """

    outputs: list[Expected]
    arithmetic: str
    random: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def scales_place(self, expected: Expected) -> int | None:
        """Return the place of the output that has the scales of another's codes, if there is."""
        beside = expected.scales.name if expected.scales is not None else None
        places = (place for place, each in enumerate(self.outputs) if each.name == beside)
        return next(places, None)

    def own_scales(self, expected: Expected) -> torch.Tensor | None:
        """Return the scales that the reference itself has beside an output's codes."""
        place = self.scales_place(expected)
        return None if place is None else self.outputs[place].honest


def leaves(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a structure with where they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from leaves(each, f"{path}.{index}" if path else str(index))


def reference_arguments(template: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments of a template's reference, which has names of its own."""
    given = flat_inputs(inputs)
    signature = inspect.signature(template.reference)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    found: dict[str, Any] = {}
    for name, description in template.inputs.items():
        key = getattr(description, "param", None) or name
        # What has both names has what the reference asks for under the template's.
        value = given.get(name, given.get(key))
        index = getattr(description, "tuple_idx", None)
        if index is not None and isinstance(value, tuple | list):
            value = value[index]
        if name in signature.parameters and value is not None:
            found[name] = value
    for name, value in given.items():
        if name not in found and value is not None and (takes_all or name in signature.parameters):
            found[name] = value
    _fill(template, found, given, signature)
    found = {name: _without_memory(name, value) for name, value in found.items()}
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if name not in found
        and parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if missing:
        message = f"its init has no {', '.join(missing)}, which its reference asks for"
        raise NoAnswerError(message)
    return found


def _without_memory(name: str, value: object) -> object:
    """Return an argument of a reference, or little of it if it is memory for a kernel's own use.

    Evaluations copy and compare arguments: of 256 MiB, for longer than they calculate.
    """
    if "workspace" in name and isinstance(value, torch.Tensor) and value.dim() == 1:
        return value[:FEW]
    return value


def _fill(
    template: Any,  # noqa: ANN401
    found: dict[str, Any],
    given: Mapping[str, Any],
    signature: inspect.Signature,
) -> None:
    """Find arguments that have a longer or shorter name in a plan, the usual scale, and None."""
    for name, parameter in signature.parameters.items():
        if found.get(name) is not None or parameter.default is not parameter.empty:
            continue
        alike = [
            key
            for key, value in given.items()
            if value is not None and (key.endswith(f"_{name}") or name.endswith(f"_{key}"))
        ]
        if len(alike) == 1:
            found[name] = given[alike[0]]
        elif name == "sm_scale" and isinstance(found.get("q"), torch.Tensor):
            found[name] = found["q"].shape[-1] ** -0.5
        elif name in given or getattr(template.inputs.get(name), "optional", False):
            found[name] = None


def flat_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call, or of a wrapper's plan and run, as one dictionary."""
    if set(inputs) >= {"plan", "run"}:
        rest = {key: value for key, value in inputs.items() if key not in ("plan", "run")}
        return {**inputs["plan"], **rest, **inputs["run"]}
    return dict(inputs)


def outcome(reference: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return what a call returns and which of its arguments it has written."""
    before = {path: each.clone() for path, each in leaves(arguments)}
    returned = reference(**arguments)
    found = {path or "0": each for path, each in leaves(returned)}
    places = {each.data_ptr() for each in found.values()}
    for path, each in leaves(arguments):
        if each.data_ptr() not in places and not same(before[path], each):
            found[f"argument {path}"] = each
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_cores(arguments: Mapping[str, Any]) -> TensorCores:
    """Return what products of a call may be made of, by the formats of its inputs."""
    dtypes = {each.dtype for _, each in leaves(arguments)}
    halves = [each for each in (torch.bfloat16, torch.float16) if each in dtypes]
    # Without inputs of 16 bits it is codes that are multiplied, without a loss.
    operands = halves[0] if halves else torch.float32
    if dtypes & set(CODES):
        return TensorCores(operands, torch.float8_e4m3fn, FP8_SUM_ERROR)
    return TensorCores(operands, torch.bfloat16 if torch.uint8 in dtypes else operands)


def ask(
    reference: Any,  # noqa: ANN401
    arguments: dict[str, Any],
    seed: int = 0,
    *,
    known: Arithmetic = NONE,
    certain: bool = False,
) -> Said:
    """Evaluate a reference in its own formats, in float64, and disturbed.

    Args:
        reference: the published function.
        arguments: what it is called with.
        seed: seed of what it draws.
        known: roundings that it has not and the call has.
        certain: whether what it draws at random has no other outcome.

    Raises:
        NoAnswerError: if it cannot be evaluated, or not in float64.
    """
    begin = time.monotonic()
    steps = Steps()
    try:
        torch.manual_seed(seed)
        with steps:
            honest = outcome(reference, copied_inputs(arguments))
        torch.manual_seed(seed + 1)
        again = outcome(reference, copied_inputs(arguments))
    except Exception as error:
        message = f"its reference raises {type(error).__name__}: {first_line(error)}"
        raise NoAnswerError(message) from error
    if not honest:
        message = "its reference returns nothing and writes nothing"
        raise NoAnswerError(message)
    random = [
        name
        for name in honest
        if (steps.draws and not certain) or name not in again or not same(honest[name], again[name])
    ]
    units = steps.without_last(honest.values())
    cores = tensor_cores(arguments)
    if known.partials:
        cores = replace(cores, partials=UNITS[cores.operands])
    try:
        found = _evaluations(reference, arguments, seed, units, cores, pairs_of(honest))
    except Exception as error:
        message = f"its reference has no answer in float64: {type(error).__name__}: " + first_line(
            error
        )
        raise NoAnswerError(message) from error
    outputs = []
    for name, own in honest.items():
        if name in random:
            continue
        if any(name not in each for each in found.all()):
            # An argument that is written with what it has already.
            continue
        outputs.append(_expected(name, own, found))
        if known.twice and outputs[-1].kind == "codes":
            _round_twice(outputs[-1], UNITS[cores.operands])
        if known.unordered:
            outputs[-1] = _in_order(outputs[-1])
    arithmetic = [arithmetic_class(steps, outputs), *([known.text] if known.text else [])]
    said = Said(outputs, ", ".join(arithmetic), random)
    said.seconds = time.monotonic() - begin
    return said


@dataclass
class _Evaluations:
    """A reference's answers in float64.

    Attributes:
        exact: nothing is disturbed.
        samples, leaning, far: disturbed, as in ``Expected``.
        others: evaluations without disturbance, in which only the largest numbers of blocks are
            raised, or lowered.
        pairs: the output that has the scales of each output that has codes.
    """

    exact: Answers
    samples: list[Answers]
    leaning: list[Answers]
    far: list[Answers]
    others: list[Answers]
    pairs: Mapping[str, str]

    def all(self) -> Iterator[Answers]:
        """Yield each evaluation."""
        yield from (self.exact, *self.samples, *self.leaning, *self.far, *self.others)


def _evaluations(
    reference: Any,  # noqa: ANN401
    arguments: dict[str, Any],
    seed: int,
    units: Sequence[float],
    cores: TensorCores,
    pairs: Mapping[str, str],
) -> _Evaluations:
    """Evaluate a reference in float64, and disturbed."""

    def evaluate(mode: Wide) -> Answers:
        return _evaluate(reference, arguments, mode, seed)

    plain = Wide()
    exact = evaluate(plain)
    modes = [Wide(units, seed=1 + number, cores=cores) for number in range(SAMPLES)]
    samples = [evaluate(mode) for mode in modes]
    far = [evaluate(Wide(units, seed=101 + i, times=FAR, cores=cores)) for i in range(DISTANT)]
    leaning = [evaluate(Wide(units, lean=lean, cores=cores)) for lean in (1, -1)]
    others = []
    if pairs and plain.maxima:
        unit = max(units, default=0.0)
        moved = changes(plain.maxima, [mode.maxima for mode in modes], unit)
        for sign in (1, -1) if moved is not None else ():
            factors = [1 + sign * each for each in moved or ()]
            others.append(evaluate(Wide(factors=factors)))
    return _Evaluations(exact, samples, leaning, far, others, pairs)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    lines = str(error).strip().splitlines()
    return PLACE.sub("", lines[0])[:MOST_LETTERS] if lines else ""


def exact_answers(reference: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return a reference's answers in float64 only."""
    return {
        name: each[0].cpu() for name, each in _evaluate(reference, arguments, Wide(), 0).items()
    }


def _evaluate(
    reference: Any,  # noqa: ANN401
    arguments: dict[str, Any],
    mode: Wide,
    seed: int,
) -> Answers:
    """Return each output, and the numbers that were rounded to it if it has codes."""
    torch.manual_seed(seed)
    wide = widened_inputs(arguments)
    full = {path for path, each in leaves(arguments) if each.dtype == torch.float32}
    for path, each in leaves(wide):
        if path in full:
            mode.keep_full(each)
    with mode:
        found = outcome(reference, wide)
    pairs = {}
    for name, each in found.items():
        numbers = mode.numbers_of(each)
        pairs[name] = (each, each if numbers is None else numbers)
    return pairs


def _expected(name: str, own: torch.Tensor, found: _Evaluations) -> Expected:
    exact = found.exact[name]
    codes = own.dtype in CODES and exact[1].dtype == WIDE
    if codes:
        kind = "codes"
    elif own.dtype in WIDENED or own.dtype == WIDE:
        kind = "floats"
    else:
        kind = "bytes" if own.dtype in (*BYTES, *CODES) else "integers"
    place = 1 if codes else 0

    def of(group: Sequence[Answers], name: str = name, place: int = place) -> list[torch.Tensor]:
        return [each[name][place].cpu() for each in group]

    scales = None
    if found.others and (beside := found.pairs.get(name)) is not None:
        bases = [found.exact, *found.others]
        scales = Scales(
            beside,
            list(zip(of(bases, beside, 0), of(bases), strict=True)),
            *(of(group, beside, 0) for group in (found.samples, found.leaning, found.far)),
        )
    samples, leaning, far = (of(group) for group in (found.samples, found.leaning, found.far))
    return Expected(name, kind, own.cpu(), exact[place].cpu(), samples, leaning, far, scales)


def _in_order(expected: Expected) -> Expected:
    """Return an output whose rows are in order, as those of an answer are put before."""
    return replace(
        expected,
        honest=in_order(expected.honest),
        exact=in_order(expected.exact),
        samples=[*map(in_order, expected.samples)],
        leaning=[*map(in_order, expected.leaning)],
        far=[*map(in_order, expected.far)],
    )


def in_order(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the elements of each row in order."""
    return value.sort(-1).values if value.dim() else value


def _round_twice(expected: Expected, unit: float) -> None:
    """Disturb the numbers that codes are rounded from by one more rounding."""
    generator = torch.Generator().manual_seed(0)
    for group in (expected.samples, expected.far):
        for each in group:
            noise = torch.empty(each.shape, dtype=WIDE).uniform_(-unit, unit, generator=generator)
            each.mul_(1 + noise)


def arithmetic_class(steps: Steps, outputs: Sequence[Expected]) -> str:
    """Return the class of a call's arithmetic, in words."""
    kinds = {each.kind for each in outputs}
    parts = []
    if steps.classes["product"] or steps.classes["sum"]:
        parts.append(f"dot product of {steps.longest}")
    if steps.classes["softmax"]:
        parts.append("softmax")
    if steps.classes["scan"]:
        parts.append("scan")
    if not parts and steps.classes["step"]:
        parts.append("elementwise")
    if kinds & {"codes", "bytes"}:
        parts.append("codes")
    if "integers" in kinds:
        parts.append("integers")
    return ", ".join(parts) or "copies"
