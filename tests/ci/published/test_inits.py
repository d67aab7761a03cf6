"""What completes the inputs that an init makes of a published call."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kernelproof.ci.published.answers import reference_arguments
from kernelproof.ci.published.inits import COMPLETED, completed

NONE = SimpleNamespace(outputs={})


def test_a_format_stands_where_an_init_has_a_number_of_it() -> None:
    def product(a: torch.Tensor, dtype: torch.dtype, count: int) -> None: ...

    template = SimpleNamespace(outputs={"c": SimpleNamespace(dtype="bfloat16")})
    found = completed("product", product, template, {"dtype": 1, "count": 1})
    assert found == {"dtype": torch.bfloat16, "count": 1}
    assert completed("product", product, NONE, {"dtype": 1}) == {"dtype": 1}


def test_a_head_of_a_state_space_is_tied() -> None:
    made = {
        "dt": torch.rand(3, 64),
        "A": torch.rand(64, 128),
        "D": torch.rand(64),
        "dt_bias": torch.rand(64),
    }
    found = COMPLETED["selective_state_update"](made)
    assert found["dt"].shape == (3, 1, 64)
    assert found["dt"].stride()[1:] == (1, 0)
    assert found["A"].stride() == (1, 0, 0)
    assert found["D"].stride() == found["dt_bias"].stride() == (1, 0)


def test_a_matrix_of_columns_has_the_same_numbers() -> None:
    matrices = torch.rand(2, 8, 4)
    found = COMPLETED["bmm_fp8"]({"B": matrices})["B"]
    assert torch.equal(found, matrices)
    assert found.stride() == (32, 1, 8)


def test_each_score_has_a_page_and_each_row_a_table() -> None:
    made = {
        "input": torch.rand(12, 5),
        "src_page_table": torch.zeros(4, 3, dtype=torch.int32),
        "k": 8,
    }
    found = COMPLETED["top_k_page_table_transform"](made)
    assert found["k"] == 5
    assert found["src_page_table"].unique().numel() == 4 * 5
    assert found["row_to_batch"].tolist() == [*range(4)] * 3


def test_each_index_has_a_state() -> None:
    made = {"initial_state": torch.rand(2, 1, 4, 4), "initial_state_indices": torch.arange(5)}
    states = COMPLETED["gated_delta_rule_mtp:gdn_mtp"](made)["initial_state"]
    assert states.shape[0] == 5
    assert torch.equal(states[:2], made["initial_state"])


def test_a_reference_is_given_what_gates_follow_from() -> None:
    made = {"g": torch.rand(5, 2), "beta": torch.rand(5, 2)}
    found = {**made, **COMPLETED["chunk_gated_delta_rule:gdn_prefill"](made)}

    def reference(a: torch.Tensor, b: torch.Tensor) -> None: ...

    inputs = {"a": SimpleNamespace(param="g"), "b": SimpleNamespace(param="beta")}
    template = SimpleNamespace(inputs=inputs, reference=reference)
    given = reference_arguments(template, found)
    gates = torch.exp(-torch.nn.functional.softplus(given["a"]))
    assert torch.allclose(gates, found["g"], atol=1e-6)
    assert torch.allclose(given["b"].sigmoid(), found["beta"], atol=1e-6)


def test_a_reference_answers_in_the_format_of_the_output_that_is_given() -> None:
    def reference(q: torch.Tensor, output: torch.Tensor, output_dtype: object = None) -> None: ...

    def other(q: torch.Tensor, output: torch.Tensor) -> None: ...

    made = {"output": torch.zeros(2, dtype=torch.bfloat16)}
    for one, asked in ((reference, True), (other, False), (None, False)):
        template = SimpleNamespace(outputs={}, reference=one)
        assert ("output_dtype" in completed("attend", reference, template, made)) is asked
    found = completed("attend", reference, SimpleNamespace(outputs={}, reference=reference), made)
    assert found["output_dtype"] is torch.bfloat16


def test_a_wrapper_of_segments_is_given_their_number() -> None:
    made = {"weights": torch.rand(3, 8, 4), "x": torch.rand(9, 8)}
    found = COMPLETED["SegmentGEMMWrapper.run:segment_gemm_run"](made)
    assert found == {"batch_size": 3, "weight_column_major": False}


def test_a_reference_is_given_little_of_a_workspace() -> None:
    def reference(workspace_buffer: torch.Tensor, x: torch.Tensor) -> None: ...

    template = SimpleNamespace(inputs={}, reference=reference)
    made = {"workspace_buffer": torch.zeros(2**20, dtype=torch.uint8), "x": torch.rand(2**10)}
    given = reference_arguments(template, made)
    assert given["workspace_buffer"].numel() < 2**10
    assert given["x"] is made["x"]
