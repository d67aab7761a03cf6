"""Bad arguments: one ValueError each, whose text names the argument and the position."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    UNIT_ROUNDOFF,
    Arithmetic,
    BatchMetadata,
    append_paged_kv,
    attention_error_bound,
    build_metadata,
    merge_error_bound,
    merge_states,
    paged_attention,
    ragged_attention,
    ragged_attention_error_bound,
    slice_phases,
    split_decodes_and_prefills,
    unit_roundoff,
)

INT32_MAX = 2**31 - 1


def words(parameter: object) -> str | None:
    """Identify a test by the words that its message must hold, not by the tensors it passes."""
    return parameter if isinstance(parameter, str) else None


def assert_refused(names: str, call: Callable[..., object], *args: Any, **options: Any) -> None:  # noqa: ANN401  anything may be passed wrongly
    """Assert one ValueError, caused by no other error, whose text holds each of these words."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        call(*args, **options)
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    message = str(caught.value)
    for name in names.split():
        assert re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message), (name, message)
    assert "\n" not in message


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Metadata

FIELDS: dict[str, Any] = {
    "qo_indptr": ints(0, 1, 4),
    "paged_kv_indptr": ints(0, 2, 3),
    "paged_kv_indices": ints(4, 0, 2),
    "paged_kv_last_page_len": ints(2, 4),
    "seq_lens": ints(6, 4),
    "page_size": 4,
}


def test_the_good_metadata_are_accepted() -> None:
    BatchMetadata(**FIELDS)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"page_size": 0}, "page_size 0"),
        ({"page_size": -4}, "page_size -4"),
        ({"page_size": 4.0}, "page_size 4.0"),
        ({"qo_indptr": ints(0, 1)}, "qo_indptr 2 3"),
        ({"qo_indptr": ints(1, 1, 4)}, "qo_indptr[0] 1"),
        ({"qo_indptr": ints(0, 5, 4)}, "qo_indptr 2 5 4"),
        ({"qo_indptr": ints(0, -1, 4)}, "qo_indptr 1 -1"),
        ({"qo_indptr": torch.tensor([0.0, 1.0, 4.0])}, "qo_indptr torch.float32"),
        ({"qo_indptr": ints(0, 1, 4).reshape(1, 3)}, "qo_indptr"),
        ({"qo_indptr": torch.tensor([0, 1, 2**31])}, "qo_indptr[2] 2147483648 int32"),
        ({"paged_kv_indptr": ints(0, 2)}, "paged_kv_indptr 2 3"),
        ({"paged_kv_indptr": ints(0, 3, 2)}, "paged_kv_indptr 2"),
        ({"paged_kv_indptr": ints(1, 2, 3)}, "paged_kv_indptr[0]"),
        ({"paged_kv_indptr": ints(0, 2, 4)}, "paged_kv_indptr 4 3 paged_kv_indices"),
        ({"paged_kv_indptr": ints(0, 1, 3)}, "seq_lens[0] paged_kv_indptr 6 2 1"),
        ({"paged_kv_indices": ints(4, 0)}, "paged_kv_indptr 3 2 paged_kv_indices"),
        ({"paged_kv_indices": ints(4, -1, 2)}, "paged_kv_indices[1] -1"),
        ({"paged_kv_last_page_len": ints(2, 0)}, "seq_lens[1] paged_kv_last_page_len[1] 4 0"),
        ({"paged_kv_last_page_len": ints(3, 4)}, "seq_lens[0] paged_kv_last_page_len[0] 2 3"),
        ({"paged_kv_last_page_len": ints(2)}, "paged_kv_last_page_len 1 2"),
        ({"paged_kv_last_page_len": ints(6, 4)}, "paged_kv_last_page_len[0] 6"),
        ({"seq_lens": ints(7, 4)}, "seq_lens[0] 7 paged_kv_last_page_len[0]"),
        ({"seq_lens": ints(2, 4)}, "seq_lens[0] 2 paged_kv_indptr"),
        ({"seq_lens": ints(6, -4)}, "seq_lens[1] -4"),
        ({"seq_lens": ints(INT32_MAX, 4)}, "seq_lens 1 int32"),
        ({"seq_lens": torch.tensor([True, False])}, "seq_lens torch.bool"),
    ],
    ids=words,
)
def test_metadata_that_contradict_themselves(changes: dict[str, Any], names: str) -> None:
    assert_refused(names, BatchMetadata, **{**FIELDS, **changes})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (([1, 1], [6, 4], [[4, 0], [2, 9]], 0), "page_size 0"),
        (([1, 1], [6, 4], [[4, 0], [2, 9]], True), "page_size True"),
        (([1, 1], [6, 4], [[4, 0], [2, 9]], 4.0), "page_size 4.0"),
        (([1], [6, 4], [[4, 0], [2, 9]], 4), "query_lens 1 seq_lens 2"),
        (([1, -1], [6, 4], [[4, 0], [2, 9]], 4), "query_lens[1] -1"),
        (([1, 1], [-6, 4], [[4, 0], [2, 9]], 4), "seq_lens[0] -6"),
        (([1, 1.5], [6, 4], [[4, 0], [2, 9]], 4), "query_lens[1] 1.5"),
        (([1, 1], [6, 4], [[4, 0]], 4), "block_table 1 seq_lens 2"),
        (([1, 1], [9, 4], [[4, 0], [2, 9]], 4), "block_table[0] 2 seq_lens[0] 9 3"),
        (([1, 1], [6, 4], [[4, -1], [2, 9]], 4), "block_table[0][1] -1"),
        (([1, 1], [6, 4], [[4, 2**31], [2, 9]], 4), "block_table[0][1] 2147483648 int32"),
        (([1, 1], [6, 4], [[4, 0.5], [2, 9]], 4), "block_table[0][1] 0.5"),
        (([1, 1], [6, 4], torch.zeros(2, 2), 4), "block_table torch.float32"),
        (([1, 1], [6, 4], ints(4, 0), 4), "block_table"),
        (([2**31], [4], [[0]], 4), "query_lens[0] 2147483648 int32"),
        (([INT32_MAX, 1], [4, 4], [[0], [1]], 4), "query_lens 2147483648 1 int32"),
        (([1, 1], [INT32_MAX, 1], [[0], [1]], INT32_MAX), "seq_lens 2147483648 1 int32"),
        ((torch.ones(2), [6, 4], [[4, 0], [2, 9]], 4), "query_lens torch.float32"),
        (([1, 1], ints(6, 4).reshape(1, 2), [[4, 0], [2, 9]], 4), "seq_lens"),
    ],
    ids=words,
)
def test_batches_that_cannot_be_built(arguments: tuple[Any, ...], names: str) -> None:
    assert_refused(names, build_metadata, *arguments)


def test_the_largest_lengths_that_fit() -> None:
    built = build_metadata([INT32_MAX - 1, 1], [INT32_MAX - 1, 1], [[7], [INT32_MAX]], INT32_MAX)
    assert built.qo_indptr.tolist() == [0, INT32_MAX - 1, INT32_MAX]
    assert built.paged_kv_indices.tolist() == [7, INT32_MAX]


def test_phases_and_splits() -> None:
    metadata = BatchMetadata(**FIELDS)
    assert_refused("num_decodes -1 2", slice_phases, metadata, -1)
    assert_refused("num_decodes 3 2", slice_phases, metadata, 3)
    assert_refused("query_lens[1] -2", split_decodes_and_prefills, [1, -2])
    assert_refused("decode_threshold -1", split_decodes_and_prefills, [1], decode_threshold=-1)
    assert_refused(
        "query_lens 1 int32", split_decodes_and_prefills, [INT32_MAX, 1], decode_threshold=2
    )


# Attention


def tensors(kv_layout: str = "NHD") -> dict[str, Any]:
    """Return good arguments: 4 tokens, 4 over 2 heads, dims 6 and 5, 5 pages of 4."""
    shape = (5, 4, 2) if kv_layout == "NHD" else (5, 2, 4)
    return {
        "q": torch.ones(4, 4, 6),
        "k_cache": torch.ones(*shape, 6),
        "v_cache": torch.ones(*shape, 5),
        "metadata": BatchMetadata(**FIELDS),
    }


def ragged_tensors() -> dict[str, Any]:
    return {
        "q": torch.ones(4, 4, 6),
        "k": torch.ones(10, 2, 6),
        "v": torch.ones(10, 2, 5),
        "qo_indptr": ints(0, 1, 4),
        "kv_indptr": ints(0, 6, 10),
    }


paged = pytest.mark.parametrize("call", [paged_attention, attention_error_bound])
ragged = pytest.mark.parametrize("call", [ragged_attention, ragged_attention_error_bound])

Call = Callable[..., object]


@paged
def test_good_arguments_are_accepted(call: Call) -> None:
    for kv_layout in ("NHD", "HND"):
        call(**tensors(kv_layout), kv_layout=kv_layout)
    ragged_attention(**ragged_tensors())


def with_metadata(**changes: Any) -> BatchMetadata:  # noqa: ANN401  fields of any kind
    return BatchMetadata(**{**FIELDS, **changes})


@paged
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"q": torch.ones(4, 4)}, "q tokens"),
        ({"q": torch.ones(4, 4, 6, dtype=torch.int32)}, "q torch.int32"),
        ({"q": [[1.0]]}, "q torch.Tensor"),
        ({"q": torch.ones(5, 4, 6)}, "qo_indptr 4 5 2"),
        ({"q": torch.ones(3, 4, 6)}, "qo_indptr 4 3 2"),
        ({"q": torch.ones(4, 3, 6)}, "q 3 2"),
        ({"q": torch.ones(4, 4, 7)}, "k_cache 6 q 7"),
        ({"k_cache": torch.ones(5, 4, 2)}, "k_cache"),
        ({"k_cache": torch.ones(5, 4, 0, 6), "v_cache": torch.ones(5, 4, 0, 5)}, "q 4 0"),
        ({"v_cache": torch.ones(5, 4, 2, 5, 1)}, "v_cache"),
        ({"v_cache": torch.ones(5, 4, 2, 5, dtype=torch.int8)}, "v_cache torch.int8"),
        ({"v_cache": torch.ones(6, 4, 2, 5)}, "v_cache 6 k_cache 5"),
        ({"v_cache": torch.ones(5, 4, 1, 5)}, "v_cache 1 k_cache 2"),
        ({"v_cache": torch.ones(5, 3, 2, 5)}, "v_cache 3 k_cache 4"),
        ({"kv_layout": "HND"}, "k_cache HND metadata.page_size 4 2"),
        ({"kv_layout": "nhd"}, "kv_layout 'nhd'"),
        ({"kv_layout": None}, "kv_layout None"),
        ({"metadata": with_metadata(paged_kv_indices=ints(4, 0, 5))}, "paged_kv_indices[2] 5"),
        ({"metadata": with_metadata(qo_indptr=ints(0, 1, 3))}, "qo_indptr 3 4 2"),
    ],
    ids=words,
)
def test_paged_attention(call: Call, changes: dict[str, Any], names: str) -> None:
    assert_refused(names, call, **{**tensors(), **changes})


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"window_left": -2}, "window_left -2"),
    ({"logits_soft_cap": -1.0}, "logits_soft_cap -1.0"),
    ({"logits_soft_cap": math.nan}, "logits_soft_cap nan"),
    ({"logits_soft_cap": math.inf}, "logits_soft_cap inf"),
    ({"sinks": torch.ones(2)}, "sinks 4 2"),
    ({"sinks": torch.ones(4, 1)}, "sinks 4"),
    ({"k_scale": torch.ones(4)}, "k_scale 2 4"),
    ({"v_scale": torch.ones(3)}, "v_scale 2 3"),
    ({"custom_mask": torch.ones(17, dtype=torch.bool)}, "custom_mask 18 17"),
    ({"custom_mask": torch.ones(18)}, "custom_mask torch.float32"),
    ({"custom_mask": torch.ones((3, 6), dtype=torch.bool)}, "custom_mask 18"),
    ({"compute_dtype": torch.bfloat16}, "compute_dtype torch.bfloat16"),
]


@paged
@pytest.mark.parametrize(("changes", "names"), OPTIONS, ids=words)
def test_options_of_paged_attention(call: Call, changes: dict[str, Any], names: str) -> None:
    assert_refused(names, call, **tensors(), **changes)


@ragged
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        *OPTIONS,
        ({"q": torch.ones(4, 4)}, "q"),
        ({"k": torch.ones(10, 2, 6, 1)}, "k"),
        ({"v": torch.ones(9, 2, 5)}, "v 9 k 10"),
        ({"v": torch.ones(10, 1, 5)}, "v 1 k 2"),
        ({"v": torch.ones(10, 2, 5, dtype=torch.int64)}, "v torch.int64"),
        ({"q": torch.ones(4, 5, 6)}, "q 5 2"),
        ({"q": torch.ones(4, 4, 8)}, "k 6 q 8"),
        ({"qo_indptr": ints(0, 1, 5)}, "qo_indptr 5 4 2"),
        ({"qo_indptr": ints(0, 5, 4)}, "qo_indptr 2 5 4"),
        ({"qo_indptr": ints(1, 2, 4)}, "qo_indptr[0] 1"),
        ({"qo_indptr": ints(0, 4)}, "qo_indptr 2 kv_indptr 3"),
        ({"qo_indptr": ints()}, "qo_indptr"),
        ({"kv_indptr": ints(0, 6, 9)}, "kv_indptr 9 10 2"),
        ({"kv_indptr": ints(0, 12, 10)}, "kv_indptr 2 12 10"),
        ({"kv_indptr": ints(2, 6, 10)}, "kv_indptr[0] 2"),
        ({"kv_indptr": torch.tensor([0.0, 6.0, 10.0])}, "kv_indptr torch.float32"),
        ({"kv_indptr": torch.tensor([0, 2**31, 10])}, "kv_indptr[1] 2147483648 int32"),
    ],
    ids=words,
)
def test_ragged_attention(call: Call, changes: dict[str, Any], names: str) -> None:
    assert_refused(names, call, **{**ragged_tensors(), **changes})


# Merging and appending


@pytest.mark.parametrize("call", [merge_states, merge_error_bound])
@pytest.mark.parametrize(
    ("outs", "lses", "names"),
    [
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), "outs states"),
        (torch.ones(2, 3, 4, 5), torch.ones(2, 3), "lses states"),
        (torch.ones(2, 3, 4, 5), torch.ones(1, 3, 4), "lses 1 outs 2"),
        (torch.ones(2, 3, 4, 5), torch.ones(2, 4, 4), "lses 4 outs 3"),
        (torch.ones(2, 3, 4, 5), torch.ones(2, 3, 1), "lses 1 outs 4"),
        (torch.ones(2, 3, 4, 5).int(), torch.ones(2, 3, 4), "outs torch.int32"),
        (torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4).long(), "lses torch.int64"),
    ],
    ids=["axes", "lse axes", "states", "tokens", "heads", "outs dtype", "lses dtype"],
)
def test_merging(call: Call, outs: torch.Tensor, lses: torch.Tensor, names: str) -> None:
    assert_refused(names, call, outs, lses)


def append_arguments() -> dict[str, Any]:
    given = tensors()
    given["k"], given["v"] = torch.ones(4, 2, 6), torch.ones(4, 2, 5)
    del given["q"]
    return given


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"k": torch.ones(4, 2)}, "k tokens"),
        ({"k": torch.ones(4, 2, 6).int()}, "k torch.int32"),
        ({"k": torch.ones(3, 2, 6)}, "v 4 k 3"),
        ({"k": torch.ones(5, 2, 6), "v": torch.ones(5, 2, 5)}, "qo_indptr 4 5"),
        ({"k": torch.ones(4, 1, 6)}, "k 1 k_cache 2"),
        ({"v": torch.ones(4, 1, 5)}, "v 1 v_cache 2"),
        ({"k": torch.ones(4, 2, 5)}, "k 5 k_cache 6"),
        ({"v": torch.ones(4, 2, 6)}, "v 6 v_cache 5"),
        ({"k_cache": torch.ones(5, 4, 2)}, "k_cache pages"),
        ({"k_cache": torch.ones(5, 3, 2, 6)}, "k_cache 3 metadata 4"),
        ({"v_cache": torch.ones(5, 3, 2, 5)}, "v_cache 3 metadata 4"),
        ({"v_cache": torch.ones(6, 4, 2, 5)}, "v_cache 6 k_cache 5"),
        ({"kv_layout": "NDH"}, "kv_layout 'NDH'"),
        ({"metadata": with_metadata(paged_kv_indices=ints(9, 0, 2))}, "paged_kv_indices[0] 9 5"),
        (
            {
                "metadata": with_metadata(qo_indptr=ints(0, 1, 6)),
                "k": torch.ones(6, 2, 6),
                "v": torch.ones(6, 2, 5),
            },
            "qo_indptr 1 5 seq_lens[1] 4",
        ),
    ],
    ids=words,
)
def test_appending(changes: dict[str, Any], names: str) -> None:
    append_paged_kv(**append_arguments())
    assert_refused(names, append_paged_kv, **{**append_arguments(), **changes})


# Formats


def test_formats() -> None:
    assert_refused("Arithmetic.accumulate 'fp32'", Arithmetic, accumulate="fp32")
    assert_refused("Arithmetic.accumulate 'inputs'", Arithmetic, accumulate="inputs")
    assert_refused("Arithmetic.probabilities 'half'", Arithmetic, probabilities="half")
    assert_refused("int32", unit_roundoff, torch.int32)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_a_unit_roundoff_is_half_the_distance_between_neighbours(dtype: torch.dtype) -> None:
    assert unit_roundoff(dtype) == torch.finfo(dtype).eps / 2
    assert UNIT_ROUNDOFF[str(dtype).split(".")[1]] == unit_roundoff(dtype)
