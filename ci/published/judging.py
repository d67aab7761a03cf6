"""Judges one published call: its reference, seeded faults over it, and what the call answers."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...properties.isolation.worker_main import Monitor
from .answers import (
    NoAnswerError,
    Said,
    ask,
    exact_answers,
    first_line,
    in_order,
    leaves,
    reference_arguments,
    same,
)
from .arithmetic import WIDE, WIDENED
from .calling import (
    Called,
    NotCalledError,
    alike,
    answer_of,
    backends,
    call,
    draws,
    is_scratch,
    may_be_far,
    may_be_strided,
    may_write,
    replayed,
)
from .comparing import compare
from .expected import Expected
from .faults import is_one_step, seeded
from .known import ARITHMETIC, NONE
from .modules import NotCompiledError
from .release import (
    BRIEF,
    LARGER,
    LARGEST,
    REGIMES,
    SIZES,
    Published,
    axis_values,
    drawn_sizes,
    inputs_of,
    problems_of,
    run_time_axes,
)

MANY = 10_000_000
"""Numbers of inputs above which a reference is evaluated on a GPU, if there is one."""
MOST_REFUSED = 2
"""Problems that a call may refuse before it is given up."""
PROBLEMS = (SIZES, LARGER, LARGEST)
"""Values of run-time axes of the first problems."""
FAR_ABOVE = 1e4
"""A logit beside which those of 0 have no probability in any format."""
LONGER = 40.0
"""Seconds of references beyond which there is no further problem though a fault is accepted."""
_NOTHING = {"arithmetic": "", "random": [], "accused": [], "faults": {}, "steps": {}}
LACKING = re.compile(r"not (available|installed|supported)|does not support|\b[Ii]nstall ")
"""What is said where a backend lacks a package or its chip."""
LONG = 6.0
"""Seconds of a first problem's reference beyond which there is no second."""


def on(device: str, value: Any) -> Any:  # noqa: ANN401
    """Return a structure with its tensors on a device."""
    return tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, value)


def _place(inputs: Mapping[str, Any]) -> str:
    """Return where to evaluate a reference: small steps are faster on a CPU, large ones not."""
    sizes = [each.numel() for _, each in leaves(inputs)]
    places = {each.device.type for _, each in leaves(inputs)}
    return "cuda" if "cuda" in places and sum(sizes) > MANY else "cpu"


class LostDeviceError(Exception):
    """A call after which the process has lost its device, as after an access outside of memory."""

    def __init__(self, law: str, error: Exception) -> None:
        super().__init__(f"it loses the device: {type(error).__name__}: {first_line(error)}")
        self.law = law
        self.axes: Mapping[str, int] = {}


def check_device(law: str, error: Exception) -> None:
    """Raise LostDeviceError if an error of a call is one after which no other call can be made.

    Raises:
        LostDeviceError: if it is.
        OutOfMemoryError: the error, if it is one: others may hold the memory, it is no answer.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise LostDeviceError(law, error) from error


@dataclass(frozen=True)
class How:
    """How a problem is drawn.

    Attributes:
        sizes: values of run-time axes, in turn until a template takes them.
        regime: one of ``REGIMES``.
        every: whether axes of which an init has values are drawn first.
    """

    sizes: Sequence[tuple[int, ...]]
    regime: str
    every: bool


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
    stages: Monitor

    def call(self, inputs: Mapping[str, Any] | None = None, strided: Sequence[str] = ()) -> Called:
        """Call the release's own function."""
        inputs = self.inputs if inputs is None else inputs
        return call(self.published, inputs, self.stages, strided=strided)

    def answer(self, place: int, called: Called) -> torch.Tensor | None:
        """Return what a call answered for an output of the reference; None if it has none."""
        outputs = self.said.outputs
        found = answer_of(self.published, outputs[place], place, len(outputs), called)[0]
        return self.ordered(found) if found is not None else None

    def scales_of(self, expected: Expected, called: Called) -> torch.Tensor | None:
        """Return the scales that a call answered beside the codes of an output, if there are."""
        place = self.said.scales_place(expected)
        found = None if place is None else self.answer(place, called)
        return None if found is None else found.cpu()

    def ordered(self, found: torch.Tensor) -> torch.Tensor:
        """Return what a call has answered, in order where it promises none."""
        known = ARITHMETIC.get(self.published.name, NONE)
        return in_order(found) if known.unordered else found

    def different(self, one: Called, other: Called) -> list[str]:
        """Return the outputs that are not the same in two calls."""
        found = []
        for place, expected in enumerate(self.said.outputs):
            first, second = self.answer(place, one), self.answer(place, other)
            if first is not None and second is not None and not same(first, second):
                found.append(expected.name)
        return found


def judge(
    published: Published, device: str, seed: int, stages: Monitor, most: int = 0
) -> dict[str, Any]:
    """Return what is found of a call, as JSON.

    Args:
        published: the call.
        device: "cpu" or "cuda".
        seed: seed of the first problem.
        stages: shows whoever waits the stage of the process.
        most: problems; 0: until its faults are refused, three at most.
    """
    found: dict[str, Any] = {"name": published.name, "api": published.api, "problems": []}
    if published.lacks:
        return {**found, "state": "unasked", "why": f"no {published.lacks} is published"}
    try:
        unanswered = _judge_problems(published, found, device, seed, stages, most)
    except NotCompiledError as error:
        found |= {"module": error.module, "why": str(error)}
        unanswered = "not compiled"
    except Exception as error:  # noqa: BLE001  what earlier problems have found stays
        traceback.print_exc()
        found["why"] = f"{type(error).__name__}: {first_line(error)}"
        unanswered = "unasked"
    answered = any(each["answer"]["state"] == "answered" for each in found["problems"])
    return {**found, "state": "judged" if answered else unanswered}


def _judge_problems(
    published: Published,
    found: dict[str, Any],
    device: str,
    seed: int,
    stages: Monitor,
    most: int,
) -> str:
    """Judge problems of a call, and return its state if it has answered none."""
    before: tuple[Subject, Called] | None = None
    for number in range(max(most, len(PROBLEMS))):
        stages.advance()
        sizes = PROBLEMS[number] if number < len(PROBLEMS) else drawn_sizes(seed + number)
        regime = REGIMES[number % len(REGIMES)]
        if number and _seconds(found["problems"]) > LONG:
            sizes = BRIEF
            # No third problem may have the time, and faults hide less in small numbers.
            regime = REGIMES[-1] if _accepted(found["problems"]) else regime
        try:
            how = How(sizes, regime, every=number > 0)
            problem, judged = _first(published, device, seed + number, how, stages)
        except LostDeviceError as error:
            answer = {"state": "ended", "findings": [{"law": error.law, "why": str(error)}]}
            found["problems"].append({**_NOTHING, "axes": error.axes, "answer": answer})
            break
        except NoAnswerError as error:
            if not number:
                found["why"] = str(error)
                return "unasked"
        else:
            found["problems"].append({**problem, "regime": regime})
            if before is not None and judged is not None:
                _kept(problem["answer"], _order, *before)
            before = judged
            if problem["answer"].get("lost"):
                break
        if _are_enough(found["problems"], most):
            break
    return "reference only"


def _are_enough(problems: Sequence[Mapping[str, Any]], most: int) -> bool:
    """Whether no further problem is to be judged after these, by the seconds of their reference."""
    if most and problems[-1]["answer"]["state"] == "answered":
        return len(problems) >= most
    limit = LONGER if _accepted(problems) else 0.0 if len(problems) > 1 else LONG
    return _seconds(problems) > limit


def _seconds(problems: Sequence[Mapping[str, Any]]) -> float:
    """Return what the references of problems have taken."""
    seconds: float = sum(each.get("seconds", 0.0) for each in problems)
    return seconds


def _kept(found: dict[str, Any], law: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
    """Judge by a law; where it raises, what was found by others stays.

    A lost device is a finding, any other error the reason why this is not all.
    """
    if found.get("lost"):
        return
    try:
        law(*arguments, found)
    except LostDeviceError as error:
        _report(found, error.law, str(error))
        found["lost"] = True
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        found["why"] = f"{type(error).__name__}: {first_line(error)}"


def judge_empty(
    published: Published, device: str, seed: int, stages: Monitor
) -> list[dict[str, Any]]:
    """Return what is found of a call whose run-time axes have no element, one at a time."""
    found: list[dict[str, Any]] = []
    for axis in run_time_axes(published):
        stages.advance()
        axes = {**axis_values(published, SIZES[0]), axis: 0}
        try:
            inputs = drawn_inputs(published, inputs_of(published, axes, device, seed))
            arguments = reference_arguments(published.template, on(_place(inputs), inputs))
            said = ask(published.template.reference, arguments)
        except Exception as error:  # noqa: BLE001  neither promises anything of empty axes
            why = f"{type(error).__name__}: {first_line(error)}"
            found.append({**_NOTHING, "axes": axes, "answer": {"state": "unjudged", "why": why}})
            continue
        # What a sum of nothing is divided by is nobody's promise.
        said.outputs = [each for each in said.outputs if bool(each.exact.to(WIDE).isfinite().all())]
        answer: dict[str, Any] = {"state": "answered", "laws": [], "findings": []}
        found.append({**_NOTHING, "axes": axes, "answer": answer})
        _kept(answer, _empty, Subject(published, inputs, said, stages))
        if answer.get("lost"):
            break
    return found


def _empty(subject: Subject, found: dict[str, Any]) -> None:
    subject.inputs, called = _answering(subject.published, subject.inputs, subject.stages, "empty")
    if isinstance(called, Called):
        _parity(subject, called, found, "empty")
    else:
        found |= called


def judge_graph(
    published: Published, device: str, seed: int, stages: Monitor
) -> list[dict[str, Any]]:
    """Return what is found of a call that is captured in a CUDA graph and replayed."""
    if device == "cpu":
        return []
    return _judge_part(published, device, seed, stages, _graph)


def _judge_part(
    published: Published, device: str, seed: int, stages: Monitor, law: Callable[..., None]
) -> list[dict[str, Any]]:
    """Return what is found by a law of the first problem that a call answers."""
    for axes, made in problems_of(published, device, seed):
        subject = Subject(published, drawn_inputs(published, made), Said([], ""), stages)
        answer: dict[str, Any] = {"state": "unjudged", "laws": [], "findings": []}
        _kept(answer, _answered, subject, law)
        if answer["state"] != "unjudged" or answer["findings"] or "why" in answer:
            return [{**_NOTHING, "axes": axes, "answer": answer}]
    return []


def _answered(subject: Subject, law: Callable[..., None], found: dict[str, Any]) -> None:
    """Judge by a law if a call answers."""
    subject.inputs, called = _answering(subject.published, subject.inputs, subject.stages)
    if isinstance(called, Called):
        found["state"] = "answered"
        law(subject, called, found)


def _graph(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that a replayed graph answers as two calls that answer alike."""
    again = subject.call()
    try:
        other = replayed(subject.published, subject.inputs, subject.stages)
    except Exception as error:  # noqa: BLE001  not all calls can be captured
        check_device("graph", error)
        found["state"] = "unjudged"
        found["why"] = f"not captured: {type(error).__name__}: {first_line(error)}"
        return
    found["laws"].append("graph")
    groups = (
        ("what it returns", called.returned, again.returned, other.returned),
        *(
            (path, [called.arguments[path]], [again.arguments[path]], [other.arguments[path]])
            for path in sorted(called.changed)
            if not is_scratch(path)
        ),
    )
    for where, *answers in groups:
        rows = zip(*(map(subject.ordered, each) for each in answers), strict=True)
        if any(same(one, two) and not same(one, three) for one, two, three in rows):
            _report(found, "graph", f"{where}: a replayed graph answers otherwise")


def judge_far(
    published: Published, device: str, seed: int, stages: Monitor
) -> list[dict[str, Any]]:
    """Return what is found of a call of whose inputs one has rows far apart."""
    return _judge_part(published, device, seed, stages, _far)


def _far(subject: Subject, dense: Called, found: dict[str, Any]) -> None:
    """Judge rows of an input that are far apart, where rows a little apart change no bit."""
    for path, each in leaves(subject.inputs):
        if is_scratch(path) or not may_be_far(each):
            continue
        try:
            if not alike(dense, subject.call(strided=[path])):
                continue
            called = call(subject.published, subject.inputs, subject.stages, far=[path])
        except torch.OutOfMemoryError:  # others have taken it
            continue
        except Exception as error:  # noqa: BLE001  a call may refuse either
            check_device("far", error)
            continue
        found["laws"] = ["far"]
        if alike(dense, called):
            continue
        template = subject.published.template
        try:
            inputs = on(_place(subject.inputs), subject.inputs)
            said = ask(template.reference, reference_arguments(template, inputs))
        except NoAnswerError as error:
            unsure = f"another answer than that of dense rows, but {error}"
            _report(found, "far", f"of {path}: {unsure}")
            continue
        answer: dict[str, Any] = {"laws": [], "findings": []}
        _parity(replace(subject, said=said), called, answer, "far")
        for finding in answer["findings"]:
            _report(found, "far", f"of {path}: {finding['why']}")


PARTS = {"empty": judge_empty, "graph": judge_graph, "far": judge_far}
"""Laws that have problems of their own, and may end the process without the others' answers."""


def _accepted(problems: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a fault of an output is refused by none of the problems; one of a step is not."""
    refused: dict[tuple[str, str], bool] = {}
    for each in problems:
        for fault, outputs in each["faults"].items():
            for output, law in outputs.items():
                key = (fault, output)
                refused[key] = refused.get(key, False) or bool(law)
        for fault, names in each.get("steps", {}).items():
            for output in names:
                refused.setdefault((fault, output), False)
    return not all(refused.values())


def _first(
    published: Published,
    device: str,
    seed: int,
    how: How,
    stages: Monitor,
) -> tuple[dict[str, Any], tuple[Subject, Called] | None]:
    """Return what is found of the first problem that a template's reference takes, and the call.

    Raises:
        NoAnswerError: if it takes none.
    """
    refused: NoAnswerError | None = None
    unanswered: dict[str, Any] = {}
    problems = problems_of(published, device, seed, how.sizes, how.regime, every=how.every)
    certain = draws(published)
    for tried, (axes, made) in enumerate(problems):
        inputs = drawn_inputs(published, made)
        try:
            called: Called | dict[str, Any] | None = None
            if device != "cpu":
                inputs, called = _answering(published, inputs, stages)
            # Most kernels of other chips refuse at once, and references take seconds.
            if isinstance(called, dict):
                unanswered = unanswered or {**_NOTHING, "axes": axes, "answer": called}
                if tried == MOST_REFUSED:
                    break
                continue
            arguments = reference_arguments(published.template, on(_place(inputs), inputs))
            known = ARITHMETIC.get(published.name, NONE)
            said = ask(published.template.reference, arguments, known=known, certain=certain)
            return _problem(Subject(published, inputs, said, stages), axes, called)
        except NoAnswerError as error:
            refused = refused or error
        except LostDeviceError as error:
            error.axes = axes
            raise
    if unanswered:
        return unanswered, None
    raise refused or NoAnswerError("no axis values are left to try")


def drawn_inputs(published: Published, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the inputs of a call: of one that draws, such that it is certain what.

    Raises:
        NoAnswerError: if that cannot be.
    """
    return made_certain(made) if draws(published) else made


def made_certain(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of a call that draws, such that it is certain what it draws.

    Rows of probabilities have one of 1, rows of logits one that is far above the others: whoever
    draws right answers with their place.

    Raises:
        NoAnswerError: if they are no rows, but such as those of several positions.
    """
    found = dict(inputs)
    for name, each in inputs.items():
        if isinstance(each, torch.Tensor) and each.dim() > 1 and each.is_floating_point():
            if each.dim() > 2:  # noqa: PLR2004
                message = "it draws at random"
                raise NoAnswerError(message)
            places = each.argmax(-1, keepdim=True)
            found[name] = torch.zeros_like(each).scatter_(-1, places, 1)
            if "logits" in name:
                found[name] *= FAR_ABOVE
    return found


def _answering(
    published: Published, inputs: Mapping[str, Any], stages: Monitor, law: str = "crashes"
) -> tuple[Mapping[str, Any], Called | dict[str, Any]]:
    """Return what a call did, and the inputs that name its backend where its own is not here."""
    called = _first_call(published, inputs, stages, law)
    if isinstance(called, Called) or not LACKING.search(called["why"]) or "backend" in inputs:
        return inputs, called
    for each in backends(published):
        other = {**inputs, "backend": each}
        answered = _first_call(published, other, stages, law)
        if isinstance(answered, Called):
            return other, answered
    return inputs, called


def _first_call(
    published: Published, inputs: Mapping[str, Any], stages: Monitor, law: str = "crashes"
) -> Called | dict[str, Any]:
    """Return what a call did, or the state that says why it did nothing."""
    try:
        return call(published, inputs, stages)
    except NotCalledError as error:
        return {"state": "unjudged", "why": str(error)}
    except Exception as error:  # noqa: BLE001  a release has errors of many classes
        check_device(law, error)
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
        "steps": {},
    }
    for expected in said.outputs:
        scales = said.own_scales(expected)
        difference = compare(expected, expected.honest, scales)
        if difference is not None:
            found["accused"].append({"law": difference.law, "why": difference.why})
        for fault, faulty in seeded(expected).items():
            seen = compare(expected, faulty, scales)
            if seen is None and is_one_step(expected, faulty):
                found["steps"].setdefault(fault, []).append(expected.name)
                continue
            found["faults"].setdefault(fault, {})[expected.name] = seen.law if seen else ""
    if not said.outputs:
        found["answer"] = {"state": "unjudged", "why": "its reference draws at random"}
        return found, None
    if called is None:
        subject.inputs, called = _answering(subject.published, subject.inputs, subject.stages)
    if "backend" in subject.inputs:
        found["backend"] = subject.inputs["backend"]
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
    found["laws"] += ["outside", "inputs"]
    _writing(subject, called, found)
    for law in (_repeats, _strides, _rows):
        _kept(found, law, subject, called)
    return found


def _repeats(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that a second call answers as the first."""
    _again(subject, called, found, "repeats", "a second call")


def _order(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that an answer is the same after a call on another problem."""
    _again(subject, called, found, "order", "a call after another problem")


def _again(subject: Subject, called: Called, found: dict[str, Any], law: str, which: str) -> None:
    try:
        again = subject.call()
    except Exception as error:  # noqa: BLE001
        check_device(law, error)
        _report(found, law, f"{which} raises {type(error).__name__}")
        return
    found["laws"].append(law)
    for name in subject.different(called, again):
        _report(found, law, f"{name}: {which} answers otherwise")


def _report(found: dict[str, Any], law: str, why: str) -> None:
    if {"law": law, "why": why} not in found["findings"]:
        found["findings"].append({"law": law, "why": why})


def _parity(subject: Subject, called: Called, found: dict[str, Any], law: str) -> None:
    compared = 0
    for place, expected in enumerate(subject.said.outputs):
        answer = subject.answer(place, called)
        if answer is None:
            found.setdefault("unpaired", []).append(expected.name)
            continue
        compared += 1
        scales = subject.scales_of(expected, called)
        difference = compare(expected, answer.cpu(), scales)
        if difference is not None and _are_alike(answer.shape, expected.exact.shape):
            _report(found, law, f"{difference.law}: {difference.why}")
            difference = compare(expected, answer.cpu().reshape(expected.exact.shape), scales)
        if difference is not None:
            _report(found, law, f"{difference.law}: {difference.why}")
    if compared:
        found["laws"].append(law)
    elif law not in ("strides", "far"):
        found["state"] = "unjudged"
        found["why"] = "nothing of its answer is an output of its reference"


def _are_alike(one: torch.Size, other: torch.Size) -> bool:
    """Whether two shapes differ by axes of one element only: then the numbers can be compared."""
    return one != other and [each for each in one if each != 1] == [
        each for each in other if each != 1
    ]


def _writing(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that a call writes its outputs and nothing else."""
    for path in called.broken:
        _report(found, "outside", f"it writes outside of {path}")
    allowed = may_write(subject.published, subject.said.outputs, called)
    for path in sorted(called.changed):
        if path.split(".")[0] not in allowed and not is_scratch(path):
            _report(found, "inputs", f"it changes its input {path}")


def _strides(subject: Subject, dense: Called, found: dict[str, Any]) -> None:
    """Judge rows of an input that are further apart: the same answer, or an error."""
    refused = {}
    for path, each in leaves(subject.inputs):
        if not may_be_strided(each) or is_scratch(path):
            continue
        try:
            called = subject.call(strided=[path])
        except Exception as error:  # noqa: BLE001
            check_device("strides", error)
            refused[path] = f"{type(error).__name__}: {first_line(error)}"
            continue
        found["laws"] = list(dict.fromkeys([*found["laws"], "strides"]))
        _writing(subject, called, found)
        answer: dict[str, Any] = {"laws": [], "findings": []}
        if subject.different(dense, called):
            _parity(subject, called, answer, "strides")
        for finding in answer["findings"]:
            _report(found, "strides", f"of {path}: {finding['why']}")
    if refused:
        found["strides"] = refused


def _rows(subject: Subject, called: Called, found: dict[str, Any]) -> None:
    """Judge that a last row's numbers change no other row, if they change none in the reference."""
    template = subject.published.template
    changed = _with_another_row(template, subject.inputs, subject.said)
    if changed is None or any(each["law"] == "repeats" for each in found["findings"]):
        return
    try:
        arguments = reference_arguments(template, on(_place(changed), changed))
        other = exact_answers(template.reference, arguments)
        again = subject.call(changed)
    except Exception as error:  # noqa: BLE001  either may refuse
        check_device("rows", error)
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
            changed[key][-1] = value[-1].flip(-1)
    return None if all(changed[key] is inputs[key] for key in changed) else changed


def _row_axis(template: Any, said: Said) -> str | None:  # noqa: ANN401
    first = {
        each.dim_names[0] for each in template.outputs.values() if getattr(each, "dim_names", None)
    }
    if len(first) != 1 or any(each.kind == "codes" for each in said.outputs):
        return None
    axis = first.pop()
    return axis if type(template.axes.get(axis)).__name__ == "Var" else None
