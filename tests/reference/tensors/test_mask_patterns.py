"""What masks with a structure, spans and biases of problems are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl.features import FEATURES, drawn_features
from kernelproof.reference import AttentionProblem, materialise, problem_from_json
from kernelproof.reference.problems.mask_fields import BIASES, MASK_PATTERNS, PLAIN_MASK
from kernelproof.reference.tensors.inputs import RaggedAttentionInputs
from kernelproof.reference.tensors.mask_patterns import (
    REACHES,
    TILES,
    bias_values,
    mask_values,
    span_values,
)
from kernelproof.reference.tensors.values import choose

CPU = torch.device("cpu")
LONG = AttentionProblem(
    "ragged_attention", (9, 1, 40), (300, 70, 40), custom_mask=True, num_kv_heads=2
)


def masks(problem: AttentionProblem) -> list[torch.Tensor]:
    """Return each request's [T, S]."""
    sizes = [t * s for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)]
    shapes = zip(problem.query_lens, problem.seq_lens, strict=True)
    parts = mask_values(problem, CPU).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@pytest.mark.parametrize("pattern", ["leading_tile", "inner_tile"])
@pytest.mark.parametrize("seed", range(20))
def test_a_whole_tile_is_hidden_from_all_rows(pattern: str, seed: int) -> None:
    whole = masks(replace(LONG, mask_pattern=pattern, seed=seed))[0]
    hidden = ~whole.any(dim=0)
    assert (whole.all(dim=0) | hidden).all(), "a key is seen by all rows or by none"
    first, count = int(hidden.nonzero()[0]), int(hidden.sum())
    assert count in TILES
    assert hidden[first : first + count].all()
    assert first == 0 if pattern == "leading_tile" else first and first % count == 0
    assert not hidden[-1]


def test_documents_and_blocks_see_themselves_both_ways() -> None:
    for seed in range(10):
        packed = masks(replace(LONG, mask_pattern="documents", seed=seed))[2]
        assert torch.equal(packed, packed.T)
        assert packed.diagonal().all()
        canvas = masks(replace(LONG, mask_pattern="block_causal", seed=seed))[2]
        assert (canvas | ~torch.ones_like(canvas).tril()).all(), "all before is seen"
        assert canvas.triu(1).any()


@pytest.mark.parametrize("pattern", MASK_PATTERNS)
def test_a_request_keeps_its_mask_alone(pattern: str) -> None:
    problem = replace(LONG, mask_pattern=pattern)
    alone = replace(problem, query_lens=(1,), seq_lens=(70,), request_ids=(1,))
    assert torch.equal(masks(problem)[1], masks(alone)[0])


@pytest.mark.parametrize("pattern", MASK_PATTERNS)
def test_each_head_has_a_mask_of_its_own_and_the_first_that_of_all(pattern: str) -> None:
    problem = replace(LONG, mask_pattern=pattern)
    by_head = mask_values(replace(problem, mask_by_head=True), CPU)
    assert by_head.shape[0] == LONG.num_kv_heads
    assert torch.equal(by_head[0], mask_values(problem, CPU))
    others = (mask_values(replace(problem, mask_by_head=True, seed=n), CPU) for n in range(9))
    assert any(not torch.equal(each[0], each[1]) for each in others)


def test_spans_are_apart_and_some_are_around_queries() -> None:
    for seed in range(20):
        problem = replace(LONG, custom_mask=False, spans="images", seed=seed)
        for spans, t, s in zip(span_values(problem), (9, 1, 40), (300, 70, 40), strict=True):
            ends = [end for span in spans.tolist() if span[0] < span[1] for end in span]
            assert ends == sorted(ends)
            assert 0 <= ends[0] < ends[-1] <= s
            assert any(stop > s - t for stop in ends[1::2])
    prefix = span_values(replace(LONG, custom_mask=False, spans="prefix"))
    assert (prefix[:, 0, 0] == 0).all()
    assert (prefix[:, 1:] == 0).all()


@pytest.mark.parametrize("kind", BIASES[1:])
def test_a_bias_is_exact_in_sixteen_bits(kind: str) -> None:
    problem = replace(LONG, custom_mask=False, logits_bias=kind, group_size=2)
    wide = bias_values(problem, CPU)
    assert wide.shape == (4, sum(t * s for t, s in ((9, 300), (1, 70), (40, 40))))
    assert len(wide.unique()) > 9
    for dtype in ("float16", "bfloat16"):
        assert torch.equal(wide, bias_values(replace(problem, dtype=dtype), CPU).float())
    if kind == "relative":
        square = wide[:, -1600:].view(4, 40, 40)
        assert torch.equal(square[:, 1:, 1:], square[:, :-1, :-1]), "one number a distance"
    if kind == "near":
        square = wide[:, -1600:].view(4, 40, 40)
        reach = REACHES[choose(problem.seed, "reach of biases", 0, len(REACHES))]
        near = torch.ones(40, 40).tril(reach - 1).triu(1 - reach).bool()
        assert (square[:, ~near] == 0).all()
        assert square[:, near].ne(0).any()


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"spans": "images"}, "image_spans"),
        ({"chunk": 4}, "chunked_attention"),
        ({"window_dilation": 2}, "dilated_window"),
        ({"sink_tokens": 1}, "sink_tokens"),
        ({"logits_bias": "dense"}, "logits_bias"),
        ({"alibi": True, "alibi_function": "sqrt"}, "alibi_sqrt"),
        ({"custom_mask": True, "mask_by_head": True}, "mask_by_head"),
        ({"custom_mask": True, "mask_pattern": "holes"}, "custom_mask"),
    ],
)
def test_each_field_is_a_feature_and_survives_json(fields: dict[str, Any], feature: str) -> None:
    problem = AttentionProblem("ragged_attention", (2,), (5,), **fields)
    assert feature in drawn_features(problem)
    assert feature in FEATURES
    assert problem_from_json(problem.to_json()) == problem
    assert not ({*PLAIN_MASK} - {"custom_mask"}) & {*AttentionProblem().to_json()}


def test_inputs_have_the_oracles_names() -> None:
    problem = AttentionProblem(
        "ragged_attention", (2,), (5,), chunk=4, window_dilation=2, sink_tokens=1, spans="prefix"
    )
    inputs = materialise(problem)
    assert isinstance(inputs, RaggedAttentionInputs)
    given = inputs.keywords()
    assert (given["attention_chunk_size"], given["window_dilation"], given["sink_tokens"]) == (
        4,
        2,
        1,
    )
    assert given["spans"].shape[::2] == (1, 2)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mask_pattern": "holes"}, "mask_pattern"),
        ({"mask_pattern": "stripes", "custom_mask": True}, "mask_pattern"),
        ({"mask_by_head": True}, "mask_by_head"),
        ({"spans": "image"}, "spans"),
        ({"spans": "images", "tree": 1}, "spans"),
        ({"chunk": -1}, "chunk"),
        ({"window_dilation": 0}, "window_dilation"),
        ({"alibi_function": "sqrt"}, "alibi_function"),
        ({"logits_bias": "dense", "regime": "exact_grid", "sm_scale": 1.0}, "regime"),
    ],
)
def test_what_no_call_can_look_like_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AttentionProblem("ragged_attention", (2,), (5,), **fields)
