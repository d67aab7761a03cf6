"""Judges one published call: its reference, seeded faults over it, and what the call answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...properties.verdicts.specialising import Stages
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
from .calling import (
    Called,
    NotCalledError,
    answer_of,
    call,
    draws,
    is_scratch,
    may_be_strided,
    may_write,
    replayed,
)
from .comparing import compare
from .faults import seeded
from .known import PARTIALS
from .release import (
    LARGER,
    LARGEST,
    SIZES,
    Published,
    axis_values,
    inputs_of,
    problems_of,
    run_time_axes,
)

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


@dataclass
class Subject:
    """A call on one problem.

    Attributes:
        published: the call.
        inputs: what its template's init has made.
        said: what its reference says.
        stages: shows whoever waits the stage of the process.
    """

    published: Published
    inputs: Mapping[str, Any]
    said: Said
    stages: Stages

    def call(self, inputs: Mapping[str, Any] | None = None, strided: Sequence[str] = ()) -> Called:
        """Call the release's own function."""
        inputs = self.inputs if inputs is None else inputs
        return call(self.published, inputs, self.stages, strided=strided)

    def answer(self, place: int, called: Called) -> torch.Tensor | None:
        """Return what a call answered for an output of the reference; None if it has none."""
        outputs = self.said.outputs
        return answer_of(self.published, outputs[place], place, len(outputs), called)

    def different(self, one: Called, other: Called) -> list[str]:
        """Return the outputs that are not the same in two calls."""
        found = []
        for place, expected in enumerate(self.said.outputs):
            first, second = self.answer(place, one), self.answer(place, other)
            if first is not None and second is not None and not same(first, second):
                found.append(expected.name)
        return found


def judge(published: Published, device: str, seed: int, stages: Stages) -> dict[str, Any]:
    """Return what is found of a call, as JSON."""
    found: dict[str, Any] = {"name": published.name, "api": published.api, "problems": []}
    if published.lacks:
        return {**found, "state": "unasked", "why": f"no {published.lacks} is published"}
    begin = time.monotonic()
    before: tuple[Subject, Called] | None = None
    for number, sizes in enumerate((SIZES, LARGER, LARGEST)):
        try:
            problem, judged = _first(published, device, seed + number, sizes, stages)
        except NoAnswerError as error:
            if not number:
                return {**found, "state": "unasked", "why": str(error)}
        else:
            found["problems"].append(problem)
            if before is not None and judged is not None:
                _order(*before, problem["answer"])
            before = judged
        limit = LONGER if _accepted(found["problems"]) else 0.0 if number else LONG
        if time.monotonic() - begin > limit:
            break
    answered = any(each["answer"]["state"] == "answered" for each in found["problems"])
    return {**found, "state": "judged" if answered else "reference only"}


def _order(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that an answer is the same after a call on another problem."""
    try:
        again = subject.call()
    except Exception as error:  # noqa: BLE001
        _report(found, "order", f"after another problem it raises {type(error).__name__}")
        return
    found["laws"].append("order")
    for name in subject.different(called, again):
        _report(found, "order", f"{name}: after another problem it answers otherwise")


def judge_empty(
    published: Published, device: str, seed: int, stages: Stages
) -> list[dict[str, Any]]:
    """Return what is found of a call whose run-time axes have no element, one at a time."""
    found = []
    for axis in run_time_axes(published):
        axes = {**axis_values(published, SIZES[0], every=True), axis: 0}
        try:
            inputs = inputs_of(published, axes, device, seed)
            arguments = reference_arguments(published.template, on(_place(inputs), inputs))
            said = ask(published.template.reference, arguments)
        except Exception as error:  # noqa: BLE001  neither promises anything of empty axes
            why = f"{type(error).__name__}: {first_line(error)}"
            found.append({**_NOTHING, "axes": axes, "answer": {"state": "unjudged", "why": why}})
            continue
        # What a sum of nothing is divided by is nobody's promise.
        said.outputs = [each for each in said.outputs if bool(each.exact.isfinite().all())]
        called = _first_call(published, inputs, stages)
        answer: dict[str, Any] = {"state": "answered", "laws": [], "findings": []}
        if not isinstance(called, Called):
            answer = called
        else:
            _parity(Subject(published, inputs, said, stages), called, answer, "empty")
        found.append({**_NOTHING, "axes": axes, "answer": answer})
    return found


def judge_graph(
    published: Published, device: str, seed: int, stages: Stages
) -> list[dict[str, Any]]:
    """Return what is found of a call that is captured in a CUDA graph and replayed."""
    if device == "cpu":
        return []
    for axes, inputs in problems_of(published, device, seed):
        called = _first_call(published, inputs, stages)
        if not isinstance(called, Called):
            continue
        answer: dict[str, Any] = {"state": "answered", "laws": [], "findings": []}
        again = call(published, inputs, stages)
        try:
            other = replayed(published, inputs, stages)
        except Exception as error:  # noqa: BLE001  not all calls can be captured
            why = f"not captured: {type(error).__name__}: {first_line(error)}"
            return [{**_NOTHING, "axes": axes, "answer": {"state": "unjudged", "why": why}}]
        answer["laws"].append("graph")
        groups = (
            ("what it returns", called.returned, again.returned, other.returned),
            *(
                (path, [called.arguments[path]], [again.arguments[path]], [other.arguments[path]])
                for path in sorted(called.changed)
                if not is_scratch(path)
            ),
        )
        for where, *answers in groups:
            if any(
                same(one, two) and not same(one, three)
                for one, two, three in zip(*answers, strict=True)
            ):
                _report(answer, "graph", f"{where}: a replayed graph answers otherwise")
        return [{**_NOTHING, "axes": axes, "answer": answer}]
    return []


PARTS = {"empty": judge_empty, "graph": judge_graph}
"""Laws that have problems of their own, and may end the process without the others' answers."""


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
    published: Published,
    device: str,
    seed: int,
    sizes: Sequence[tuple[int, ...]],
    stages: Stages,
) -> tuple[dict[str, Any], tuple[Subject, Called] | None]:
    """Return what is found of the first problem that a template's reference takes, and the call.

    Raises:
        NoAnswerError: if it takes none.
    """
    refused: NoAnswerError | None = None
    unanswered: dict[str, Any] = {}
    for tried, (axes, inputs) in enumerate(problems_of(published, device, seed, sizes)):
        called: Called | dict[str, Any] | None = None
        if device != "cpu":
            # Most kernels of other chips refuse at once, and references take seconds.
            called = _first_call(published, inputs, stages)
            if isinstance(called, dict):
                unanswered = unanswered or {**_NOTHING, "axes": axes, "answer": called}
                if tried == MOST_REFUSED:
                    break
                continue
        try:
            arguments = reference_arguments(published.template, on(_place(inputs), inputs))
            partials = PARTIALS.get(published.name, "")
            said = ask(published.template.reference, arguments, partials=partials)
        except NoAnswerError as error:
            refused = refused or error
            continue
        return _problem(Subject(published, inputs, said, stages), axes, called)
    if unanswered:
        return unanswered, None
    raise refused or NoAnswerError("no axis values are left to try")


def _first_call(
    published: Published, inputs: Mapping[str, Any], stages: Stages
) -> Called | dict[str, Any]:
    """Return what a call did, or the state that says why it did nothing."""
    try:
        return call(published, inputs, stages)
    except NotCalledError as error:
        return {"state": "unjudged", "why": str(error)}
    except Exception as error:  # noqa: BLE001  a release has errors of many classes
        return {"state": "refused", "why": f"{type(error).__name__}: {first_line(error)}"}


def _problem(
    subject: Subject, axes: dict[str, int], called: Called | dict[str, Any] | None
) -> tuple[dict[str, Any], tuple[Subject, Called] | None]:
    said = subject.said
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
        for fault, faulty in seeded(expected).items():
            seen = compare(expected, faulty)
            found["faults"].setdefault(fault, {})[expected.name] = seen.law if seen else ""
    if not said.outputs or draws(subject.published):
        by = "it" if said.outputs else "its reference"
        found["answer"] = {"state": "unjudged", "why": f"{by} draws at random"}
        return found, None
    called = called or _first_call(subject.published, subject.inputs, subject.stages)
    if not isinstance(called, Called):
        found["answer"] = called
        return found, None
    answer = found["answer"] = _answer(subject, called)
    repeats = all(each["law"] != "repeats" for each in answer["findings"])
    return found, (subject, called) if repeats else None


def _answer(subject: Subject, called: Called) -> dict[str, Any]:
    """Return what the release's own function answers, and the laws that it breaks."""
    found: dict[str, Any] = {"state": "answered", "laws": [], "findings": []}
    _parity(subject, called, found, "parity")
    _writing(subject.published, subject.said, called, found)
    try:
        again = subject.call()
    except Exception as error:  # noqa: BLE001
        _report(found, "repeats", f"the second call raises {type(error).__name__}")
        return found
    found["laws"].append("repeats")
    for name in subject.different(called, again):
        _report(found, "repeats", f"{name}: a second call answers otherwise")
    _strides(subject, found)
    if all(each["law"] != "repeats" for each in found["findings"]):
        _rows(subject, called, found)
    return found


def _report(found: dict[str, Any], law: str, why: str) -> None:
    found["findings"].append({"law": law, "why": why})


def _parity(subject: Subject, called: Called, found: dict[str, Any], law: str) -> None:
    compared = 0
    for place, expected in enumerate(subject.said.outputs):
        answer = subject.answer(place, called)
        if answer is None:
            found.setdefault("unpaired", []).append(expected.name)
            continue
        compared += 1
        difference = compare(expected, answer.cpu())
        if difference is not None:
            _report(found, law, f"{difference.law}: {difference.why}")
    if compared:
        found["laws"].append(law)
    elif law != "strides":
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


def _strides(subject: Subject, found: dict[str, Any]) -> None:
    """Judge rows of an input that are further apart: the same answer, or an error."""
    refused = {}
    for path, each in leaves(subject.inputs):
        if not may_be_strided(each):
            continue
        try:
            called = subject.call(strided=[path])
        except Exception as error:  # noqa: BLE001
            refused[path] = f"{type(error).__name__}: {first_line(error)}"
            continue
        answer: dict[str, Any] = {"laws": [], "findings": []}
        _parity(subject, called, answer, "strides")
        found["laws"] = list(dict.fromkeys([*found["laws"], *answer["laws"]]))
        for finding in answer["findings"]:
            _report(found, "strides", f"of {path}: {finding['why']}")
    if refused:
        found["strides"] = refused


def _rows(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that a last row's numbers change no other row, if they change none in the reference."""
    template = subject.published.template
    changed = _with_another_row(template, subject.inputs, subject.said)
    if changed is None:
        return
    try:
        arguments = reference_arguments(template, on(_place(changed), changed))
        other = exact_answers(template.reference, arguments)
        again = subject.call(changed)
    except Exception as error:  # noqa: BLE001  either may refuse
        found["rows"] = f"not judged: {type(error).__name__}: {first_line(error)}"
        return
    for place, expected in enumerate(subject.said.outputs):
        exact = other.get(expected.name)
        if exact is None or not torch.equal(exact[:-1], expected.exact[:-1]):
            continue
        one, two = subject.answer(place, called), subject.answer(place, again)
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
