"""Judges one published call: its reference, seeded faults over it, and what the call answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .answers import (
    NoAnswerError,
    Said,
    ask,
    exact_answers,
    first_line,
    leaves,
    reference_arguments,
    same,
)
from .arithmetic import WIDENED
from .calling import Called, NotCalledError, answer_of, call, is_scratch, may_write
from .comparing import compare
from .faults import seeded
from .release import LARGER, LARGEST, SIZES, Published, problems_of

MANY = 10_000_000
"""Numbers of inputs above which a reference is evaluated on a GPU, if there is one."""
MOST_REFUSED = 2
"""Problems that a call may refuse before it is given up."""
LONGER = 25.0
"""The same where the first problem has accepted a fault."""
OTHER = -3.0
"""Factor of a row whose numbers are other ones."""
_NOTHING = {"arithmetic": "", "random": [], "accused": [], "faults": {}}
LONG = 6.0
"""Seconds of a first problem beyond which there is no second."""


def on(device: str, value: Any) -> Any:  # noqa: ANN401
    """Return a structure with its tensors on a device."""
    return tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, value)


def _place(inputs: Mapping[str, Any]) -> str:
    """Return where to evaluate a reference: small steps are faster on a CPU, large ones not."""
    sizes = [each.numel() for _, each in leaves(inputs)]
    places = {each.device.type for _, each in leaves(inputs)}
    return "cuda" if "cuda" in places and sum(sizes) > MANY else "cpu"


def judge(published: Published, device: str, seed: int) -> dict[str, Any]:
    """Return what is found of a call, as JSON."""
    found: dict[str, Any] = {"name": published.name, "api": published.api, "problems": []}
    if published.lacks:
        return {**found, "state": "unasked", "why": f"no {published.lacks} is published"}
    begin = time.monotonic()
    for number, sizes in enumerate((SIZES, LARGER, LARGEST)):
        try:
            found["problems"].append(_first(published, device, seed + number, sizes))
        except NoAnswerError as error:
            if not number:
                return {**found, "state": "unasked", "why": str(error)}
        limit = LONGER if _accepted(found["problems"]) else 0.0 if number else LONG
        if time.monotonic() - begin > limit:
            break
    answered = any(each["answer"]["state"] == "answered" for each in found["problems"])
    return {**found, "state": "judged" if answered else "reference only"}


def _accepted(problems: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a fault of an output is refused by none of the problems."""
    refused: dict[tuple[str, str], bool] = {}
    for each in problems:
        for fault, outputs in each["faults"].items():
            for output, law in outputs.items():
                key = (fault, output)
                refused[key] = refused.get(key, False) or bool(law)
    return not all(refused.values())


def _first(
    published: Published, device: str, seed: int, sizes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return what is found of the first problem that a template's reference takes.

    Raises:
        NoAnswerError: if it takes none.
    """
    refused: NoAnswerError | None = None
    unanswered: dict[str, Any] = {}
    for tried, (axes, inputs) in enumerate(problems_of(published, device, seed, sizes)):
        called: Called | dict[str, Any] | None = None
        if device != "cpu":
            # Most kernels of other chips refuse at once, and references take seconds.
            called = _first_call(published, inputs)
            if isinstance(called, dict):
                unanswered = unanswered or {**_NOTHING, "axes": axes, "answer": called}
                if tried == MOST_REFUSED:
                    break
                continue
        try:
            arguments = reference_arguments(published.template, on(_place(inputs), inputs))
            said = ask(published.template.reference, arguments)
        except NoAnswerError as error:
            refused = refused or error
            continue
        return _problem(published, axes, inputs, said, called)
    if unanswered:
        return unanswered
    raise refused or NoAnswerError("no axis values are left to try")


def _first_call(published: Published, inputs: Mapping[str, Any]) -> Called | dict[str, Any]:
    """Return what a call did, or the state that says why it did nothing."""
    try:
        return call(published, inputs)
    except NotCalledError as error:
        return {"state": "unjudged", "why": str(error)}
    except Exception as error:  # noqa: BLE001  a release has errors of many classes
        return {"state": "refused", "why": f"{type(error).__name__}: {first_line(error)}"}


def _problem(
    published: Published,
    axes: dict[str, int],
    inputs: Mapping[str, Any],
    said: Said,
    called: Called | dict[str, Any] | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "axes": axes,
        "arithmetic": said.arithmetic,
        "random": said.random,
        "seconds": round(said.seconds, 2),
        "accused": [],
        "faults": {},
    }
    for expected in said.outputs:
        difference = compare(expected, expected.honest)
        if difference is not None:
            found["accused"].append({"law": difference.law, "why": difference.why})
        for fault, answer in seeded(expected).items():
            seen = compare(expected, answer)
            found["faults"].setdefault(fault, {})[expected.name] = seen.law if seen else ""
    found["answer"] = _answer(published, inputs, said, called)
    return found


def _answer(
    published: Published,
    inputs: Mapping[str, Any],
    said: Said,
    called: Called | dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what the release's own function answers, and the laws that it breaks."""
    if not said.outputs:
        return {"state": "unjudged", "why": "its reference draws at random"}
    called = called or _first_call(published, inputs)
    if isinstance(called, dict):
        return called
    found: dict[str, Any] = {"state": "answered", "laws": [], "findings": []}
    _parity(published, said, called, found, "parity")
    _writing(published, said, called, found)
    try:
        again = call(published, inputs)
    except Exception as error:  # noqa: BLE001
        _report(found, "repeats", f"the second call raises {type(error).__name__}")
        return found
    found["laws"].append("repeats")
    for place, expected in enumerate(said.outputs):
        one = answer_of(published, expected, place, len(said.outputs), called)
        other = answer_of(published, expected, place, len(said.outputs), again)
        if one is not None and other is not None and not same(one, other):
            _report(found, "repeats", f"{expected.name}: a second call answers otherwise")
    _strides(published, inputs, said, found)
    if all(each["law"] != "repeats" for each in found["findings"]):
        _rows(published, inputs, said, called, found)
    return found


def _report(found: dict[str, Any], law: str, why: str) -> None:
    found["findings"].append({"law": law, "why": why})


def _parity(
    published: Published, said: Said, called: Called, found: dict[str, Any], law: str
) -> None:
    compared = 0
    for place, expected in enumerate(said.outputs):
        answer = answer_of(published, expected, place, len(said.outputs), called)
        if answer is None:
            found.setdefault("unpaired", []).append(expected.name)
            continue
        compared += 1
        difference = compare(expected, answer.cpu())
        if difference is not None:
            _report(found, law, f"{difference.law}: {difference.why}")
    if compared:
        found["laws"].append(law)
    elif law == "parity":
        found["state"] = "unjudged"
        found["why"] = "nothing of its answer is an output of its reference"


def _writing(published: Published, said: Said, called: Called, found: dict[str, Any]) -> None:
    found["laws"] += ["outside", "inputs"]
    for path in called.broken:
        _report(found, "outside", f"it writes outside of {path}")
    allowed = may_write(published, said.outputs)
    for path in sorted(called.changed):
        if path.split(".")[0] not in allowed and not is_scratch(path):
            _report(found, "inputs", f"it changes its input {path}")


def _strides(
    published: Published, inputs: Mapping[str, Any], said: Said, found: dict[str, Any]
) -> None:
    """Judge rows that are further apart: the same answer, or an error."""
    try:
        called = call(published, inputs, strided=True)
    except Exception as error:  # noqa: BLE001
        found["strides"] = f"refused: {type(error).__name__}: {first_line(error)}"
        return
    _parity(published, said, called, found, "strides")


def _rows(
    published: Published,
    inputs: Mapping[str, Any],
    said: Said,
    called: Called,
    found: dict[str, Any],
) -> None:
    """Judge that a last row's numbers change no other row, if they change none in the reference."""
    template = published.template
    changed = _with_another_row(template, inputs, said)
    if changed is None:
        return
    try:
        arguments = reference_arguments(template, on(_place(changed), changed))
        other = exact_answers(template.reference, arguments)
        again = call(published, changed)
    except Exception as error:  # noqa: BLE001  either may refuse
        found["rows"] = f"not judged: {type(error).__name__}: {first_line(error)}"
        return
    for place, expected in enumerate(said.outputs):
        exact = other.get(expected.name)
        if exact is None or not torch.equal(exact[:-1], expected.exact[:-1]):
            continue
        one, two = (
            answer_of(published, expected, place, len(said.outputs), each)
            for each in (called, again)
        )
        if one is None or two is None or one.shape != expected.exact.shape:
            continue
        found["laws"] = list(dict.fromkeys([*found["laws"], "rows"]))
        if not same(one[:-1], two[:-1]):
            _report(found, "rows", f"{expected.name}: the last row's numbers change other rows")


def _with_another_row(
    template: Any,  # noqa: ANN401
    inputs: Mapping[str, Any],
    said: Said,
) -> dict[str, Any] | None:
    """Return inputs whose last row along the outputs' first axis has other numbers, if any has."""
    axis = _row_axis(template, said)
    if axis is None or set(inputs) >= {"plan", "run"}:
        return None
    changed = dict(inputs)
    for name, each in template.inputs.items():
        key = getattr(each, "param", None) or name
        value = inputs.get(key)
        along = getattr(each, "dim_names", None) and each.dim_names[0] == axis
        if along and isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] > 1:
            if value.dtype not in WIDENED:
                continue
            changed[key] = value.clone()
            changed[key][-1] *= OTHER
    return None if all(changed[key] is inputs[key] for key in changed) else changed


def _row_axis(template: Any, said: Said) -> str | None:  # noqa: ANN401
    first = {
        each.dim_names[0] for each in template.outputs.values() if getattr(each, "dim_names", None)
    }
    if len(first) != 1 or any(each.kind == "codes" for each in said.outputs):
        return None
    axis = first.pop()
    return axis if type(template.axes.get(axis)).__name__ == "Var" else None
