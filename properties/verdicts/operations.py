"""The table of operations for whatever compares answers: what differs by operation in a law.

``reference.operations`` has the oracle's side. Both are loaded by the isolated worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ...impl import Implementation
from ...reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    RouteProblem,
)
from ...reference.attention.rope import RopeAppended
from ...reference.operations import Table
from ...reference.tensors.batched_moe import BatchedMoEInputs
from ...reference.tensors.inputs import AttentionInputs, MergeInputs
from ...reference.tensors.moe_inputs import MoEInputs
from .comparison import Result
from .quantised import judge_normed, judge_quantised
from .rope import judge_rope
from .routes import judge_route
from .verdict import Verdict

Buffer = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of an output."""
MORE_TOKENS, MORE_QUERIES, MORE_KEYS = 3, 1, 3
"""Tokens, or queries and keys of one more request, that another batch has more."""


def _undefined(*_: object) -> NoReturn:
    message = (
        "kernelproof.properties.verdicts.operations.OPERATIONS leaves this field of the operation "
        "out: no law of the operation has asked for it before"
    )
    raise LookupError(message)


@dataclass(frozen=True)
class Answers:
    """What laws of several operations need to know of one operation's answers.

    Attributes:
        law: name of the law that compares its answers with the oracle's.
        pair: the value that a call returned as the pair that is compared, or a text that says what
            it is instead: (out, lse or None) of attention and merging, (out, None) of ``moe``,
            (topk_weights, topk_ids) of ``route``.
        outputs: the buffers that a call on a record may be given for its results, by field.
        other_batch: another problem of the same kind, as different as can be.
        judge_apart: judges an implementation's answer to a record, where right answers may differ
            by more than bounds; None where two answers are right if they agree within theirs.
        names: the names of the two tensors of ``pair``, for messages.
        unused: which elements of ``pair``'s first tensor nothing is promised of, as a mask that
            broadcasts to it, of the inputs: laws see zeros there; None where all are judged.
        compared: whether answers are compared with the oracle's. Many plans of a batch are right.
    """

    law: str = "parity"
    pair: Callable[[object], Result | str] = _undefined
    outputs: Callable[[Any], dict[str, Buffer]] = _undefined
    other_batch: Callable[[Any], Any] = _undefined
    judge_apart: Callable[[Implementation, Any, Result], Verdict] | None = None
    names: tuple[str, str] = ("out", "lse")
    unused: Callable[[Any], torch.Tensor] | None = None
    compared: bool = True

    @property
    def has_pair(self) -> bool:
        """Whether the answer is a pair of tensors, the second of which may be missing."""
        return self.pair is not _undefined

    @property
    def has_outputs(self) -> bool:
        """Whether the shapes of the answer are known beforehand."""
        return self.outputs is not _undefined


def _pair(result: object, what: str, *, both: bool = False) -> Any:  # noqa: ANN401  a pair or a text
    """Return a result that is a pair of tensors; the second may be None unless both must be."""
    if not (isinstance(result, tuple) and len(result) == 2):  # noqa: PLR2004
        return f"{type(result).__name__}, not {what}"
    first, second = result
    second_is_right = isinstance(second, torch.Tensor) or (second is None and not both)
    if not (isinstance(first, torch.Tensor) and second_is_right):
        return f"({type(first).__name__}, {type(second).__name__}), not tensors"
    return first, second


APPENDED = ("k_cache", "v_cache", "k_scales", "v_scales")
"""Names of what appending returns; the last two where each token and head has a scale."""
AS_READ = ("k_cache as it is read", "v_cache as it is read")
"""What codes say together with their scales and zero points, which is compared besides."""


def appended_caches(result: object, *, scaled: bool) -> tuple[torch.Tensor, ...] | str:
    """Return a result that is what appending returns, or a text that says what it is instead."""
    names = APPENDED if scaled else APPENDED[:2]
    if not (isinstance(result, tuple) and len(result) == len(names)):
        return f"{type(result).__name__}, not ({', '.join(names)})"
    if not all(isinstance(each, torch.Tensor) for each in result):
        return f"({', '.join(type(each).__name__ for each in result)}), not tensors"
    return result


def _out_and_lse(result: object) -> Result | str:
    pair: Result | str = _pair(result, "AttentionOutput or a pair (out, lse)")
    return pair


def _weights_and_ids(result: object) -> Result | str:
    pair = _pair(result, "Routing or a pair (topk_ids, topk_weights)", both=True)
    return pair if isinstance(pair, str) else (pair[1], pair[0])


def _codes_and_scales(result: object) -> Result | str:
    pair: Result | str = _pair(result, "a pair (codes, scales)")
    return pair


def _queries(result: object) -> Result | str:
    # The oracle's answer has the caches beside them.
    return _out(result.q if isinstance(result, RopeAppended) else result)


def _out(result: object) -> Result | str:
    if isinstance(result, torch.Tensor):
        return result, None
    return f"{type(result).__name__}, not a tensor"


def _attended(inputs: AttentionInputs) -> dict[str, Buffer]:
    return _buffers(inputs.q, inputs.head_dim_vo, inputs.out_dtype)


def _merged(inputs: MergeInputs) -> dict[str, Buffer]:
    return _buffers(inputs.outs[0], inputs.outs.shape[-1], inputs.out_dtype)


def _buffers(rows: torch.Tensor, width: int, dtype: torch.dtype) -> dict[str, Buffer]:
    tokens, heads = rows.shape[:2]
    return {
        "out": ((tokens, heads, width), dtype, rows.device),
        "lse": ((tokens, heads), torch.float32, rows.device),
    }


def _of_experts(inputs: MoEInputs) -> dict[str, Buffer]:
    hidden = inputs.hidden if isinstance(inputs.hidden, torch.Tensor) else inputs.hidden.codes
    weights = inputs.w2 if isinstance(inputs.w2, torch.Tensor) else inputs.w2.codes
    width = inputs.hidden_size or weights.shape[1]
    return {"out": ((hidden.shape[0], width), inputs.out_dtype, hidden.device)}


def _of_batched(inputs: BatchedMoEInputs) -> dict[str, Buffer]:
    hidden = inputs.hidden if isinstance(inputs.hidden, torch.Tensor) else inputs.hidden.codes
    weights = inputs.w2 if isinstance(inputs.w2, torch.Tensor) else inputs.w2.codes
    shape = (*hidden.shape[:2], weights.shape[1])
    return {"out": (shape, inputs.out_dtype, hidden.device)}


def _other_requests(problem: AttentionProblem) -> AttentionProblem:
    if len(problem.query_lens) > 1:
        return replace(
            problem,
            query_lens=problem.query_lens[1:],
            seq_lens=problem.seq_lens[1:],
            request_ids=problem.request_ids[1:],
        )
    return replace(
        problem,
        query_lens=(*problem.query_lens, MORE_QUERIES),
        seq_lens=(*problem.seq_lens, MORE_KEYS),
        request_ids=(),
    )


def _more_states(problem: MergeProblem) -> MergeProblem:
    return replace(problem, num_tokens=problem.num_tokens + MORE_TOKENS)


def _more_tokens(problem: Any) -> MoEProblem | RouteProblem:  # noqa: ANN401  one of these
    other: MoEProblem | RouteProblem = replace(
        problem, num_tokens=problem.num_tokens + MORE_TOKENS, token_ids=()
    )
    return other


def _other_counts(problem: BatchedMoEProblem) -> BatchedMoEProblem:
    """Return a batch of the same shape in which other rows are in use."""
    counts = tuple(problem.most_rows - count for count in problem.counts)
    if counts == problem.counts:
        counts = (*counts[1:], 0)
    return replace(problem, counts=counts)


ATTENTION = Answers("parity", _out_and_lse, _attended, _other_requests)
OPERATIONS = Table("kernelproof.properties.verdicts.operations.OPERATIONS", {
    "paged_attention": ATTENTION,
    "ragged_attention": ATTENTION,
    "merge_state": Answers("parity", _out_and_lse, _merged, _more_states),
    "append_paged_kv": Answers("append_parity"),
    "build_metadata": Answers("metadata_parity"),
    "slice_context_parallel": Answers("context_parallel_parity"),
    "map_slots": Answers("slots_parity"),
    "prepare_batch": Answers("batch_parity"),
    "prepare_steps": Answers("steps_parity"),
    "plan": Answers("plan_keys", compared=False),
    "route": Answers("routing_parity", _weights_and_ids, other_batch=_more_tokens,
                     judge_apart=judge_route, names=("topk_weights", "topk_ids")),
    "moe": Answers("parity", _out, _of_experts, _more_tokens),
    "batched_moe": Answers("parity", _out, _of_batched, _other_counts,
                           unused=BatchedMoEInputs.unused),
    "quantize": Answers("quantize_parity", _codes_and_scales, judge_apart=judge_quantised,
                        names=("codes", "scales")),
    "norm_and_quantize": Answers("norm_parity", _codes_and_scales, judge_apart=judge_normed,
                                 names=("codes", "scales")),
    "rearrange": Answers("rearrange_parity"),
    "rope_and_append": Answers("rope_parity", _queries, judge_apart=judge_rope, names=("q", "lse")),
})  # fmt: skip
