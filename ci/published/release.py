"""What one release of FlashInfer publishes: read by a process that has this release on its path."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import operator
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .answers import NoAnswerError, first_line, leaves
from .arithmetic import CODES
from .inits import completed

SIZES = ((3, 17, 5, 9), (8,), (16,), (64,), (128,), (4,), (2,), (1,))
"""Values of run-time axes, in turn, until a template's own init takes them."""
LARGER = ((12, 5, 17, 9), (5, 40, 9, 17), (64,), (256,))
"""Those of a second problem."""
LARGEST = ((32, 128, 16, 24), (8,), (128,))
"""Those of a third, where the others have accepted a fault: sums of few errors prove little."""
BRIEF = ((2, 3, 5, 9), *SIZES[1:])
"""Those of a second problem where the first took long."""
MANY = 10_000_000
"""Numbers of inputs above which a CPU gets constants of fewer."""
LARGE, TILE = 512, 256
"""Constants from which on a CPU gets others, and what it gets: a multiple of all blocks."""

REGIMES = ("as made", "outliers", "small")
"""What is done to inputs of 16 bits with several axes: nothing, a few larger ones, all smaller.

Codes of FP8 and scales are made smaller too.
"""
OUTLIER, EACH, SMALLER = 24.0, 61, 2.0**-9
SMALLER_CODES = 2.0**-2
"""What codes of FP8 are multiplied by: much smaller ones are all zero."""

DERIVED = re.compile(r"(\w+) == (\w+) (\+|-|\*|//) (\d+)")
"""A constraint by which an axis follows from another."""
DERIVE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


@dataclass(frozen=True)
class Published:
    """One template at one call.

    Attributes:
        name: the call's name, and the template's where it has several.
        api: the call's module and name, without "flashinfer.".
        original: the call's function.
        template: what is published.
    """

    name: str
    api: str
    original: Any
    template: Any

    @property
    def lacks(self) -> str:
        """What the template lacks to be judged by; empty if nothing."""
        lacking = [part for part in ("reference", "init") if getattr(self.template, part) is None]
        return " and ".join(lacking)


def read_release() -> list[Published]:
    """Return what the installed release publishes, in order of names."""
    import flashinfer

    root = Path(flashinfer.__path__[0])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1].startswith("__main__") or parts[0] in ("trace", "testing", "data"):
            continue
        if "trace=" not in path.read_text(errors="replace"):
            continue
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        try:
            importlib.import_module(".".join(("flashinfer", *parts)))
        except Exception:  # noqa: BLE001, S112  what a module lacks is of another chip
            continue
    from flashinfer.api_logging import _TRACE_REGISTRY

    found: dict[str, Published] = {}
    for original, template, label in _TRACE_REGISTRY:
        api = f"{original.__module__}.{original.__qualname__}".removeprefix("flashinfer.")
        short = original.__qualname__
        name = short if short == label else f"{short}:{label}"
        if name in found and found[name].template is template and found[name].api != api:
            name = f"{api}:{label}"
        found.setdefault(name, Published(name, api, original, template))
    return [found[name] for name in sorted(found)]


def problems_of(
    published: Published,
    device: str,
    seed: int,
    sizes: Sequence[tuple[int, ...]] = SIZES,
    regime: str = REGIMES[0],
    *,
    every: bool = False,
) -> Iterator[tuple[dict[str, int], Mapping[str, Any]]]:
    """Yield axis values and inputs, which an init takes; its reference may still refuse them.

    Args:
        published: the call.
        device: where its init makes them.
        seed: their seed.
        sizes: values of run-time axes, in turn.
        regime: one of ``REGIMES``.
        every: whether axes of which an init has values are drawn first, and not last.

    Raises:
        NoAnswerError: if the template's init takes no values that are tried.
    """
    why, tried = "", list[dict[str, int]]()
    drawn = (
        axis_values(published, values, every=also)
        for also, values in itertools.product((every, not every), sizes)
    )
    for axes in (each for drawn_axes in drawn for each in _lighter(published, drawn_axes, device)):
        if axes in tried:
            continue
        tried.append(axes)
        try:
            inputs = inputs_of(published, axes, device, seed)
        except Exception as error:  # noqa: BLE001  an init has no error of its own
            why = why or f"its init raises {type(error).__name__}: {first_line(error)}"
            continue
        why = ""
        yield axes, _in_regime(inputs, regime)
    if why:
        raise NoAnswerError(why)


def _in_regime(inputs: Mapping[str, Any], regime: str) -> dict[str, Any]:
    """Return the inputs of a call as a regime has them."""
    formats = {each.dtype for _, each in leaves(inputs) if each.dim() > 1}
    coded = bool(formats & {torch.uint8, *CODES})
    found = {}
    for name, value in inputs.items():
        change = functools.partial(in_regime, regime=regime, scale=coded and "scale" in name)
        found[name] = tree_map(change, value)
    return found


def in_regime(value: Any, regime: str, *, scale: bool = False) -> Any:  # noqa: ANN401
    """Return an input as a regime has it; what an init gives a structure stays as it is.

    Args:
        value: the input.
        regime: one of ``REGIMES``.
        scale: whether it has scales of codes.
    """
    dense = isinstance(value, torch.Tensor) and value.dim() > 1 and value.is_contiguous()
    if not dense or regime == REGIMES[0]:
        return value
    if regime == "small" and value.dtype in CODES and not scale:
        # Of a softmax all keys count then, and no rounding of one probability is the answer's.
        return (value.to(torch.float32) * SMALLER_CODES).to(value.dtype)
    if regime == "small" and value.dtype == torch.float32 and scale:
        return value * SMALLER
    if value.dtype not in (torch.bfloat16, torch.float16):
        return value
    if regime == "small":
        return value * SMALLER
    changed = value.clone()
    changed.view(-1)[::EACH] *= OUTLIER
    return changed


def drawn_sizes(seed: int) -> tuple[tuple[int, ...], ...]:
    """Return values of run-time axes that a seed draws, and those that always are tried."""
    draw = random.Random(seed)  # noqa: S311  sizes of problems
    return (tuple(draw.randint(1, 48) for _ in range(4)), *SIZES)


def axis_values(
    published: Published, values: tuple[int, ...], *, every: bool = False
) -> dict[str, int]:
    """Return values of the axes that an init asks for; ``every``: and of run-time axes it has."""
    cycle = itertools.cycle(values)
    template = published.template
    found = {}
    for name, parameter in inspect.signature(template.init).parameters.items():
        asked = parameter.default is parameter.empty
        # An axis whose value follows from others has none.
        runs = _is_var(template.axes, name) and bool(parameter.default)
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and (
            asked or (every and runs)
        ):
            found[name] = next(cycle)
    for constraint in template.constraints:
        if match := DERIVED.fullmatch(constraint.strip()):
            name, base, sign, number = match.groups()
            if name in found and base in found:
                found[name] = DERIVE[sign](found[base], int(number))
    return found


def _lighter(published: Published, axes: dict[str, int], device: str) -> list[dict[str, int]]:
    """Return axis values in turn: those with smaller constants first if a CPU needs them."""
    fewer = fewer_constants(published, axes) if device == "cpu" else {}
    return [{**axes, **fewer}, axes]


def fewer_constants(published: Published, axes: Mapping[str, int]) -> dict[str, int]:
    """Return smaller constants of a call whose inputs have too many numbers for a CPU.

    A CPU evaluates references only. Gigabytes of weights prove no more there, and take minutes.
    """
    template = published.template
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(template.init).parameters.items()
        if type(parameter.default) is int
    }
    values = {**defaults, **axes}
    shapes = [getattr(each, "dim_names", None) or () for each in template.inputs.values()]
    # Of an axis that follows from others an init has 0; a workspace has one axis.
    numbers = sum(math.prod(values.get(n) or 1 for n in each) for each in shapes if len(each) > 1)
    if numbers <= MANY:
        return {}
    return {
        name: TILE
        for name, value in defaults.items()
        if name not in axes
        and value >= LARGE
        and value % TILE == 0
        and type(template.axes.get(name)).__name__ == "Const"
    }


def run_time_axes(published: Published) -> list[str]:
    """Return the axes of which an init takes a value and that a call may have of any size."""
    axes = published.template.axes
    return [name for name in axis_values(published, SIZES[0], every=True) if _is_var(axes, name)]


def _is_var(axes: Mapping[str, Any], name: str) -> bool:
    return type(axes.get(name)).__name__ == "Var"


def inputs_of(
    published: Published, axes: Mapping[str, int], device: str, seed: int
) -> Mapping[str, Any]:
    """Return what a template's init makes, completed where it is known to lack something."""
    found = published.template.init(**axes, device=device, seed=seed)
    if not isinstance(found, dict):
        message = f"its init returns {type(found).__name__}"
        raise NoAnswerError(message)
    return completed(published.name, published.original, published.template, found)
