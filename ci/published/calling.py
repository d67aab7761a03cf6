"""Calls what a release publishes: on fenced copies of a problem's inputs."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...properties.verdicts.specialising import Stages, watched
from .answers import Expected, as_bytes, flat_inputs, leaves
from .release import Published

FENCE = 4096
"""Bytes before and behind each tensor that nothing may write."""
FENCED = 0xA5
WORKSPACE = 128 * 2**20
PADDING = 32
"""Bytes by which rows are further apart, where strides are tried: vectors stay aligned."""


COPIED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32),
)
"""Formats that can be copied into memory of any kind."""


class NotCalledError(Exception):
    """A call that the harness cannot make, with the reason."""


@dataclass
class Fenced:
    """Copies of a problem's inputs, each in memory of its own with a fence on both sides."""

    inputs: dict[str, Any]
    fences: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)

    def broken(self) -> list[str]:
        """Return the tensors outside of which something was written."""
        return [
            path
            for path, fences in self.fences.items()
            if any(bool((each != FENCED).any()) for each in fences)
        ]


def may_be_strided(value: torch.Tensor) -> bool:
    """Whether a tensor's rows can be put further apart."""
    dense = value.dim() > 1 and value.numel() and value.is_contiguous()
    return bool(dense and value.is_floating_point() and value.dtype in COPIED)


def fenced(inputs: Mapping[str, Any], *, strided: Collection[str] = ()) -> Fenced:
    """Return fenced copies of inputs; strided: those whose rows are further apart."""
    found = Fenced({})

    def copy(value: Any, path: str) -> Any:  # noqa: ANN401
        if isinstance(value, torch.Tensor):
            return _copy(value, path)
        if isinstance(value, dict):
            return {
                key: copy(each, f"{path}.{key}" if path else key) for key, each in value.items()
            }
        if isinstance(value, tuple | list):
            return type(value)(copy(each, f"{path}.{index}") for index, each in enumerate(value))
        return value

    def _copy(value: torch.Tensor, path: str) -> torch.Tensor:
        if value.dtype not in COPIED:
            return value.clone()
        strides = list(value.stride())
        if path in strided:
            row = value.shape[-1] + PADDING // value.element_size()
            strides = [each // value.shape[-1] * row for each in strides[:-1]]
            strides.append(1)
        span = 1 + sum(
            (size - 1) * max(stride, 0) for size, stride in zip(value.shape, strides, strict=True)
        )
        size = (span if value.numel() else 0) * value.element_size()
        memory = torch.full((FENCE + size + FENCE,), FENCED, dtype=torch.uint8, device=value.device)
        inner = memory[FENCE : FENCE + size].view(value.dtype)
        result = torch.as_strided(inner, value.shape, strides) if value.numel() else value.clone()
        if value.numel():
            # Of an axis that was expanded one element is in memory, and is written once.
            once = [slice(0, 1) if stride == 0 else slice(None) for stride in strides]
            result[tuple(once)].copy_(value[tuple(once)])
        found.fences[path] = (memory[:FENCE], memory[FENCE + size :])
        return result

    found.inputs = copy(dict(inputs), "")
    return found


@dataclass
class Called:
    """What a call did.

    Attributes:
        returned: the tensors it returned, in order.
        arguments: all tensors of its inputs after it, by where they are.
        changed: those that it wrote.
        broken: tensors outside of which it wrote.
    """

    returned: list[torch.Tensor]
    arguments: dict[str, torch.Tensor]
    changed: set[str]
    broken: list[str]


def call(
    published: Published,
    inputs: Mapping[str, Any],
    stages: Stages,
    *,
    strided: Collection[str] = (),
) -> Called:
    """Call the release's own function on copies of inputs, as the stage "run".

    Raises:
        NotCalledError: if the harness cannot make the call. Other errors are the release's.
    """
    copies = fenced(inputs, strided=strided)
    before = {path: each.clone() for path, each in _paths(copies.inputs)}
    with stages.stage("run"), watched(stages):
        function, given = _bound(published, copies.inputs)
        returned = function(**given)
        if any(each.is_cuda for each in before.values()):
            torch.cuda.synchronize()
    return _called(copies, before, returned)


def replayed(published: Published, inputs: Mapping[str, Any], stages: Stages) -> Called:
    """Capture the call in a CUDA graph and replay it, on the inputs as they were.

    Raises:
        NotCalledError: if the harness cannot make the call. Other errors are of the capture.
    """
    copies = fenced(inputs)
    before = {path: each.clone() for path, each in _paths(copies.inputs)}
    with stages.stage("run"), watched(stages):
        function, given = _bound(published, copies.inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = function(**given)
        for path, each in _paths(copies.inputs):
            each.copy_(before[path])
        graph.replay()
        torch.cuda.synchronize()
    return _called(copies, before, returned)


def _called(copies: Fenced, before: Mapping[str, torch.Tensor], returned: object) -> Called:
    after = dict(_paths(copies.inputs))
    changed = {path for path, each in after.items() if not _same(before[path], each)}
    found = [each for _, each in leaves(returned)]
    return Called(found, after, changed, copies.broken())


def _paths(inputs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return list(leaves(flat_inputs(inputs)))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bytes(one), as_bytes(other))


def _bound(
    published: Published, inputs: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function to call and its arguments; a wrapper is made and planned."""
    module = importlib.import_module(published.original.__module__)
    owner: Any = module
    *parents, last = published.original.__qualname__.split(".")
    for each in parents:
        owner = getattr(owner, each)
    flat = flat_inputs(inputs)
    device = _device_of(flat) or torch.device("cpu")
    if not parents:
        function = getattr(owner, last)
        return function, _accepted(function, flat)
    wrapper = owner(**_construction(owner, flat, device))
    if hasattr(wrapper, "plan"):
        wrapper.plan(**_accepted(wrapper.plan, inputs.get("plan", flat)))
    rest = inputs.get("run", flat)
    function = getattr(wrapper, last)
    given = _accepted(function, rest)
    if (
        "return_lse" in inspect.signature(function).parameters
        and len(published.template.outputs) > 1
    ):
        given["return_lse"] = True
    return function, given


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function takes of what is given; None where it asks for one that may be it."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    found = {key: value for key, value in given.items() if key in parameters}
    for name, parameter in parameters.items():
        if name in found or parameter.default is not parameter.empty:
            continue
        alike = [
            value
            for key, value in given.items()
            if value is not None and key not in parameters and name.startswith(f"{key}_")
        ]
        if len(alike) == 1:
            found[name] = alike[0]
        elif "workspace" in name and (place := _device_of(given)) is not None:
            found[name] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=place)
        elif _may_be_none(parameter.annotation):
            found[name] = None
    return found


def _device_of(given: Mapping[str, Any]) -> torch.device | None:
    return next((each.device for _, each in leaves(given)), None)


def draws(published: Published) -> bool:
    """Whether a call takes what it draws random numbers with."""
    return "generator" in inspect.signature(published.original).parameters


def _may_be_none(annotation: Any) -> bool:  # noqa: ANN401
    """Whether a parameter is typed as one that may be None."""
    if isinstance(annotation, str):
        return annotation.startswith("Optional[") or annotation.endswith("| None")
    unions = (typing.Union, types.UnionType)
    return typing.get_origin(annotation) in unions and type(None) in typing.get_args(annotation)


def _construction(owner: type, flat: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(owner).parameters.items():
        if "workspace" in name and parameter.default is parameter.empty:
            found[name] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        elif name in flat:
            found[name] = flat[name]
        elif name == "num_levels":
            found[name] = 1
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            message = f"its wrapper asks for {name}"
            raise NotCalledError(message)
    return found


def answer_of(
    published: Published, expected: Expected, place: int, count: int, called: Called
) -> torch.Tensor | None:
    """Return what a call answered for an output of its reference; None if it has none."""
    template = published.template
    if expected.name.startswith("argument "):
        path = expected.name.removeprefix("argument ")
        head, _, tail = path.partition(".")
        description = template.inputs.get(head)
        key = getattr(description, "param", None) or head
        index = getattr(description, "tuple_idx", None)
        tail = tail or ("" if index is None else str(index))
        return called.arguments.get(f"{key}.{tail}" if tail else key)
    if len(called.returned) >= count and called.returned[place].shape == expected.exact.shape:
        return called.returned[place]
    descriptions = list(template.outputs.values())
    if place < len(descriptions):
        key = getattr(descriptions[place], "param", None)
        if key and called.arguments.get(key) is not None:
            return called.arguments[key]
    if called.returned:
        return called.returned[place] if place < len(called.returned) else None
    # What it writes in place; if it has changed nothing, that is what it left there.
    written = [path for path in called.arguments if path in called.changed] or [
        path
        for path, each in called.arguments.items()
        if each.dtype == expected.honest.dtype and not is_scratch(path)
    ]
    places = (called.arguments[path] for path in written)
    alike = [each for each in places if each.shape == expected.exact.shape]
    return alike[min(place, len(alike) - 1)] if alike else None


def may_write(published: Published, said: Sequence[Expected], called: Called) -> set[str]:
    """Return the arguments that a call may write: its outputs.

    Of one that returns nothing, these are arguments of an output's shape.
    """
    if not called.returned:
        shapes = {each.exact.shape for each in said}
        return {
            path.split(".")[0] for path in called.changed if called.arguments[path].shape in shapes
        }
    written = {each.name.removeprefix("argument ").split(".")[0] for each in said}
    template = published.template
    keys = {getattr(template.inputs.get(name), "param", None) or name for name in written}
    keys |= {getattr(each, "param", None) or name for name, each in template.outputs.items()}
    return keys


def is_scratch(path: str) -> bool:
    """Whether an argument is memory that a call may use as it likes, by its name."""
    words = ("workspace", "buffer", "out", "scratch", "semaphore", "counter", "lse")
    return any(word in path for word in words)
