"""Laws of experts about options: each must matter, and other ways to say the same must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from ...reference import MoEProblem, QuantizedMatrix
from ...reference.attention.bounds import Bounded
from ...reference.formats.arithmetic import UNIT_ROUNDOFF
from ...reference.moe.weights import IN_BLOCKS, SCALE_BLOCK, WEIGHT_FORMATS, checked_matrix
from ...reference.problems.moe import WITHOUT_SHARED
from ...reference.tensors.moe_inputs import MoEInputs
from ..verdicts.asked import compared
from ..verdicts.comparison import Result, fail, same_result_bits, within
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .expert_calls import NOTHING_SHARED, answer, guarded, result, same, with_rows
from .general import run_on
from .law import MOE, Law

Call = tuple[str, MoEProblem, MoEInputs]
MATRICES = ("hidden", "w13", "w2", "shared_w13", "shared_w2")
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Both at once: kernels take both or none.
    "biases": ({"biases": False}, {"w13_bias": None, "w2_bias": None}),
    "swiglu_parameters": ({"swiglu_parameters": ""}, {"alpha": None, "beta": None, "limit": None}),
    "weights_on_input": ({"weights_on_input": False}, {"weights_on_input": False}),
    "interleaved": ({"interleaved": False}, {"interleaved": False}),
    "shared_experts": (WITHOUT_SHARED, NOTHING_SHARED),
    "shared_gate": ({"shared_gate": ""}, {"shared_gate": None, "shared_gate_logits": False}),
    "output_norm": (
        {"output_norm": ""},
        {"output_norm_eps": None, "output_norm_gain": None, "output_norm_first": False},
    ),
    "routed_scaling_factor": ({"routed_scaling_factor": 1.0}, {"routed_scaling_factor": 1.0}),
}
"""Fields of a problem, and arguments of its call, that switch an option off."""
VISIBLE = 16 * UNIT_ROUNDOFF["bfloat16"]
"""Share of the oracle's largest element by which an option must move it to be called ignored:
less may be lost in the roundings of a kernel that honours it."""
MOVED = 4.0
"""Times the bounds that the oracle's answer must move for the subject's to have to."""


def moe_sensitivity(subject: Subject, problem: MoEProblem) -> Verdict:
    """Switch each option in use off: where the oracle's answer moves, the subject's must move."""
    if not problem.num_tokens:
        return VACUOUS
    inputs = subject.materialise(problem)
    return _must_move(subject, problem, inputs, list(_switched(subject, problem, inputs)))


def _switched(subject: Subject, problem: MoEProblem, inputs: MoEInputs) -> Iterator[Call]:
    """Return the call without each option that it has, where the subject claims it."""
    changes = [
        (name, others, arguments)
        for name, (others, arguments) in SWITCHES.items()
        if any(getattr(problem, field) != off for field, off in others.items())
    ]
    if problem.activation == "swiglu_oai" and not problem.swiglu_parameters:
        changes.append(("activation", {"activation": "swiglu"}, {"activation": "swiglu"}))
    for name, others, arguments in changes:
        other = replace(problem, **others)
        if subject.supports(other):
            yield name, other, replace(inputs, **arguments)


def gate_up_swap(subject: Subject, problem: MoEProblem) -> Verdict:
    """Swap the gate rows with the up rows: where the oracle's answer moves, so must the subject's.

    Which half is the gate is a convention that stacks do not share. A kernel that has the other one
    moves as much, and parity sees it: this law is about kernels for which the halves are alike, and
    about weights that were packed once and are not looked at again.
    """
    cut = problem.quantized in IN_BLOCKS and problem.wide_inter % SCALE_BLOCK
    if not (problem.gated and problem.num_tokens) or (cut and not problem.interleaved):
        return VACUOUS
    inputs = subject.materialise(problem)
    wide = problem.wide_inter
    rows = torch.arange(2 * wide)
    rows = rows.view(-1, 2).flip(1).flatten() if problem.interleaved else rows.roll(wide)
    bias = inputs.w13_bias
    swapped = replace(
        inputs,
        w13=with_rows(inputs.w13, rows, interleaved=problem.interleaved),
        w13_bias=None if bias is None else bias[:, rows.to(bias.device)],
    )
    return _must_move(subject, problem, inputs, [("order of gate and up rows", problem, swapped)])


def _must_move(
    subject: Subject, problem: MoEProblem, inputs: MoEInputs, others: Sequence[Call]
) -> Verdict:
    """Check that each other call moves the subject's answer where it moves the oracle's."""
    if not others:
        return VACUOUS
    first, bounded = run_on(subject, problem, guarded(inputs))
    verdict = VACUOUS
    stuck: dict[str, Moved] = {}
    for name, other, given in others:
        move = _moved(name, first, bounded, run_on(subject, other, guarded(given)))
        if move is not None:
            verdict = Verdict("PASS", ratio=0.0)
            stuck |= {name: move} if move.stuck else {}
    ignored = [call for call in others if call[0] in stuck and stuck[call[0]].still]
    if ignored:
        wrong = within("out", first[0].double(), bounded.expected.out, bounded.bound.out)
        if not wrong.bad or _right_without(subject, problem, inputs, ignored):
            names = tuple(name for name, _, _ in ignored)
            several = f"{', '.join(names)} are ignored: " if len(names) > 1 else ""
            said = several + "; ".join(stuck[name].stuck for name in names)
            calls = compared(problem, ignored[0][1])
            return replace(fail("insensitive", said), ignored=names, compared=calls)
    # It moves, but too little: one of both answers is wrong, for whatever reason.
    return next((move.wrong for move in stuck.values() if move.wrong.bad), verdict)


class Moved(NamedTuple):
    """What another call does to an answer.

    Attributes:
        stuck: sentence on an element that moves too little; empty where there is none.
        still: every bit of the answer stays, though the oracle's moves visibly.
        wrong: the verdict on the first answer, or else on the other one.
    """

    stuck: str
    still: bool
    wrong: Verdict


def _moved(
    name: str, first: Result, bounded: Bounded, second: tuple[Result, Bounded]
) -> Moved | None:
    """Compare the moves of the subject's and the oracle's answers; None where none must move."""
    out, (other, other_bounded) = first[0].double(), second
    bound = bounded.bound.out + other_bounded.bound.out
    moved = (bounded.expected.out - other_bounded.expected.out).abs()
    must_move = moved > MOVED * bound
    if not must_move.any():
        return None
    actual = (out - other[0].double()).abs().nan_to_num(nan=torch.inf)
    stuck = must_move & (actual < moved - 2 * bound)
    if not stuck.any():
        return Moved("", still=False, wrong=VACUOUS)
    where = tuple(int(i) for i in stuck.nonzero()[0])
    said = (
        f"another {name} moves the oracle's out{list(where)} by {moved[where].item():.3g}, "
        f"the implementation's by {actual[where].item():.3g} ({int(stuck.sum())} of "
        f"{int(must_move.sum())} elements that must move do not)"
    )
    visible = moved > VISIBLE * bounded.expected.out.abs().max()
    still = bool((must_move & visible).any()) and same_result_bits(first, other)
    wrong = within("out", out, bounded.expected.out, bounded.bound.out)
    if not wrong.bad:
        expected = other_bounded.expected.out
        wrong = within("out", other[0].double(), expected, other_bounded.bound.out)
        wrong = replace(wrong, message=f"with another {name}: {wrong.message}")
    return Moved(said, still, wrong)


def _right_without(
    subject: Subject, problem: MoEProblem, inputs: MoEInputs, others: Sequence[Call]
) -> bool:
    """Whether the answer is right with all of these changes: ignoring them is what is wrong.

    What is wrong for another reason may stand still, too, such as an answer of zeros.
    """
    bare, given = problem, inputs
    for _, other, changed in others:
        bare = replace(bare, **_differences(problem, other))
        given = replace(given, **_differences(inputs, changed))
    if not (others and subject.supports(bare)):
        return False
    (out, _), bounded = run_on(subject, bare, guarded(given))
    return not within("out", out, bounded.expected.out, bounded.bound.out).bad


def _differences(first: MoEProblem | MoEInputs, other: MoEProblem | MoEInputs) -> dict[str, Any]:
    names = (each.name for each in fields(first))
    return {n: getattr(other, n) for n in names if getattr(other, n) is not getattr(first, n)}


def dequantised_experts(subject: Subject, problem: MoEProblem) -> Verdict:
    """Return the numbers that codes stand for in their place: nothing changes."""
    plain = replace(problem, quantized="", quantized_hidden=False)
    if not (problem.quantized and problem.num_tokens and subject.supports(plain)):
        return VACUOUS
    inputs = subject.materialise(problem)
    if inputs.intermediate_scale is not None:
        return VACUOUS  # kernels of 16 bits take none
    numbers = {name: _numbers(name, inputs) for name in MATRICES}
    if any(numbers[name] is None and getattr(inputs, name) is not None for name in MATRICES):
        return VACUOUS  # the dtype does not hold them
    first = answer(subject, problem, inputs)
    second = answer(subject, plain, replace(inputs, **numbers))
    return same(first.out, second.out, first.bound + second.bound)


def _numbers(name: str, inputs: MoEInputs) -> torch.Tensor | None:
    """Return the numbers of a matrix in the output's dtype; None if it does not hold them."""
    matrix: torch.Tensor | QuantizedMatrix | None = getattr(inputs, name)
    dtype = inputs.out_dtype
    if not isinstance(matrix, QuantizedMatrix):
        return matrix
    hidden = name == "hidden"
    axes = "tokens hidden" if hidden else "experts rows columns"
    checked = checked_matrix(name, matrix, axes, interleaved=inputs.interleaved)
    if hidden:
        index = torch.arange(len(matrix.codes), device=matrix.codes.device)
        wide = checked.tokens(index, torch.float64)
    else:
        wide = torch.stack([checked.weights(expert) for expert in range(len(matrix.codes))])
    narrow = wide.to(dtype)
    return narrow if torch.equal(narrow.double(), wide) else None


def hidden_strides(subject: Subject, problem: MoEProblem) -> Verdict:
    """Return the hidden states as a slice of wider rows: nothing changes."""
    strided, contiguous = (replace(problem, strided_hidden=each) for each in (True, False))
    if not (problem.num_tokens and subject.supports(strided) and subject.supports(contiguous)):
        return VACUOUS
    first, bound = answer(subject, contiguous, subject.materialise(contiguous))
    second = result(subject, strided, subject.materialise(strided))
    return same(second, first, 2 * bound, exact=subject.exact(problem))


LAWS = (
    Law(
        "moe_sensitivity",
        MOE,
        moe_sensitivity,
        "switching off an option in use moves the answer wherever it moves the oracle's",
        weight=0.5,
    ),
    Law(
        "gate_up_swap",
        MOE,
        gate_up_swap,
        "swapping gate and up rows moves the answer wherever it moves the oracle's",
        weight=0.5,
    ),
    Law(
        "dequantised_experts",
        MOE,
        dequantised_experts,
        "quantised weights and hidden states give what the numbers that they stand for give",
        weight=0.5,
        overlap="parity kills its bugs too: this law asks for no codec of the oracle's",
        needs=tuple(dict.fromkeys(form.feature for form in WEIGHT_FORMATS.values())),
    ),
    Law(
        "hidden_strides",
        MOE,
        hidden_strides,
        "hidden states in a slice of wider rows give what contiguous ones give",
        weight=0.5,
        needs=("strided_hidden",),
    ),
)
