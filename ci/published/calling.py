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
from .answers import flat_inputs, leaves, same
from .expected import Expected
from .release import Published

FENCE = 4096
"""Bytes before and behind each tensor that nothing may write."""
FENCED = 0xFF
"""What stands there: NaN in every floating format, so that it shows what reads it."""
WORKSPACE = 128 * 2**20
PADDING = 32
"""Bytes by which rows are further apart, where strides are tried: vectors stay aligned."""
FAR = 2**31
"""Elements between the first row and the last one, where it is tried: 32 bits do not count them."""
ALIGNED = 128
"""Elements by which such rows are apart, or a multiple."""

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
    """Copies of a problem's inputs, each in memory of its own with a fence on both sides.

    Attributes:
        inputs: the copies.
        fences: the memory of each, by where it is, and its elements in it as integers.
    """

    inputs: dict[str, Any]
    fences: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = field(
        default_factory=dict
    )

    def broken(self) -> list[str]:
        """Return the tensors outside of whose elements something was written."""
        found = []
        for path, (memory, elements) in self.fences.items():
            rest = memory.clone()
            elements(rest).fill_(-1)
            if bool((rest != FENCED).any()):
                found.append(path)
        return found


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes; -1 has the bits of the fence."""


def may_be_strided(value: torch.Tensor) -> bool:
    """Whether a tensor's rows can be put further apart."""
    dense = value.dim() > 1 and value.numel() and value.is_contiguous()
    return bool(dense and value.is_floating_point() and value.dtype in COPIED)


def may_be_far(value: torch.Tensor) -> bool:
    """Whether a tensor's rows can be put far apart, with memory for it left for others."""
    if not may_be_strided(value) or value.shape[0] == 1:
        return False
    return not value.is_cuda or 4 * FAR * value.element_size() < torch.cuda.mem_get_info()[0]


def _far_apart(value: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last row is ``FAR`` elements behind the first.

    On a GPU as much memory lies before it, for offsets that are negative in 32 bits.
    """
    row = -(-FAR // ((value.shape[0] - 1) * ALIGNED)) * ALIGNED
    before = FAR if value.is_cuda else 0
    size = before + (value.shape[0] - 1) * row + value[0].numel()
    memory = torch.empty(size, dtype=value.dtype, device=value.device)
    if value.is_cuda:
        memory.view(torch.uint8).fill_(FENCED)
    strides = (row, *value.stride()[1:])
    return torch.as_strided(memory, value.shape, strides, before).copy_(value)


def fenced(
    inputs: Mapping[str, Any], *, strided: Collection[str] = (), far: Collection[str] = ()
) -> Fenced:
    """Return fenced copies of inputs.

    Args:
        inputs: the inputs.
        strided: those whose rows are further apart.
        far: those whose rows are far apart, without fences.
    """
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
        if path in far:
            return _far_apart(value)
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

        def within(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            inner = memory[FENCE : FENCE + size].view(dtype)
            return torch.as_strided(inner, shape, strides)

        # Of an axis that was expanded one element is in memory, and is written once.
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        shape = value[once].shape if value.numel() else value.shape
        integers = INTEGERS[value.element_size()]
        found.fences[path] = (memory, lambda memory: within(memory, integers))
        copied = within(memory, value.dtype)
        copied.copy_(value[once] if value.numel() else value)
        return copied.expand(value.shape)

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
    far: Collection[str] = (),
) -> Called:
    """Call the release's own function on copies of inputs (``fenced``), as the stage "run".

    Raises:
        NotCalledError: if the harness cannot make the call. Other errors are the release's.
    """
    copies = fenced(inputs, strided=strided, far=far)
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
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in each.stride())
            each[once].copy_(before[path][once])
        graph.replay()
        torch.cuda.synchronize()
    return _called(copies, before, returned)


def _called(copies: Fenced, before: Mapping[str, torch.Tensor], returned: object) -> Called:
    after = dict(_paths(copies.inputs))
    changed = {path for path, each in after.items() if not same(before[path], each)}
    found = [each for _, each in leaves(returned)]
    return Called(found, after, changed, copies.broken())


def _paths(inputs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return list(leaves(flat_inputs(inputs)))


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


def backends(published: Published) -> list[str]:
    """Return the backends that a call is written to take, but not the one that it takes itself."""
    asked = inspect.signature(published.original).parameters.get("backend")
    if asked is None or typing.get_origin(asked.annotation) is not typing.Literal:
        return []
    return [each for each in typing.get_args(asked.annotation) if each != asked.default]


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


Paired = tuple["torch.Tensor | None", str]
"""What answers an output, and which argument that is, if it is one."""


def answer_of(
    published: Published, expected: Expected, place: int, count: int, called: Called
) -> Paired:
    """Return what a call answered for an output of its reference; None if it has none."""
    template = published.template
    if expected.name.startswith("argument "):
        path = expected.name.removeprefix("argument ")
        head, _, tail = path.partition(".")
        description = template.inputs.get(head)
        key = getattr(description, "param", None) or head
        index = getattr(description, "tuple_idx", None)
        tail = tail or ("" if index is None else str(index))
        key = f"{key}.{tail}" if tail else key
        return called.arguments.get(key), key
    if len(called.returned) >= count and called.returned[place].shape == expected.exact.shape:
        return called.returned[place], ""
    for key in _own_names(published, place, count):
        if (found := called.arguments.get(key)) is not None:
            return found, key
    if called.returned:
        return called.returned[place] if place < len(called.returned) else None, ""
    return _in_place(expected, place, called)


def _own_names(published: Published, place: int, count: int) -> list[str]:
    """Return the names by which an argument may be an output."""
    outputs = list(published.template.outputs.items())
    if place >= len(outputs):
        return []
    name, description = outputs[place]
    return [getattr(description, "param", None) or name, *(("out",) if count == 1 else ())]


def _in_place(expected: Expected, place: int, called: Called) -> Paired:
    """Return what a call writes in place; if it has changed nothing, what it left there."""
    written = [path for path in called.arguments if path in called.changed] or [
        path
        for path, each in called.arguments.items()
        if each.dtype == expected.honest.dtype and not is_scratch(path)
    ]
    alike = [path for path in written if called.arguments[path].shape == expected.exact.shape]
    if not alike:
        return None, ""
    path = alike[min(place, len(alike) - 1)]
    return called.arguments[path], path


def may_write(published: Published, said: Sequence[Expected], called: Called) -> set[str]:
    """Return the arguments that a call may write: its outputs."""
    paths = (
        answer_of(published, each, place, len(said), called)[1] for place, each in enumerate(said)
    )
    found = {path.split(".")[0] for path in paths if path}
    outputs = published.template.outputs.items()
    return found | {getattr(each, "param", None) or name for name, each in outputs}


OUTPUTS = frozenset({"out", "output", "lse"})
SCRATCH = OUTPUTS | {"workspace", "buffer", "scratch", "scratchpad", "semaphores"}


def is_scratch(path: str) -> bool:
    """Whether an argument is memory that a call may use as it likes, by the words of its name."""
    words = path.replace(".", "_").split("_")
    return any(word in SCRATCH or word.startswith("counter") for word in words)


def alike(one: Called, other: Called) -> bool:
    """Whether two calls have returned and written the same bytes, scratch left aside."""
    if len(one.returned) != len(other.returned):
        return False
    written = [
        path
        for path in one.changed | other.changed
        if not is_scratch(path) or OUTPUTS & set(path.replace(".", "_").split("_"))
    ]
    pairs = [
        *zip(one.returned, other.returned, strict=True),
        *((one.arguments[path], other.arguments[path]) for path in written),
    ]
    return all(same(first, second) for first, second in pairs)
