"""The adapters that the documentation shows are right, and a wrong one of them is found."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem

FAULTS = [
    ("flex_attention_adapter", "row + behind", "row + behind + 1"),
    ("onnxruntime_adapter", "window_left + 1", "window_left + 2"),
    ("onnxruntime_adapter", "zip(caches, result[1:], strict=True)", "zip(caches, result[1:2])"),
]
"""Words of each adapter, and what stands in their place in a faulty one."""
PROBLEM = AttentionProblem(
    operation="ragged_attention",
    query_lens=(3, 1, 4),
    seq_lens=(3, 9, 40),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=16,
    head_dim_vo=16,
    causal=True,
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_left": 2},
    {"logits_soft_cap": 5.0},
    {"k_scale": 0.5, "v_scale": 0.75},
    {"dtype": "bfloat16"},
    {"query_lens": (), "seq_lens": ()},
    {"query_lens": (2, 2), "seq_lens": (0, 1)},
]


class Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def statuses(file: Path) -> set[str]:
    """Return what parity says of an adapter on each problem."""
    subject = Subject(find_implementation(f"{file}:attend"), Target(), Anywhere())
    same = {**vars(PROBLEM), "operation": subject.implementation.operation}
    problems = [AttentionProblem(**{**same, **each}) for each in OPTIONS]
    claimed = [each for each in problems if subject.supports(each)]
    assert len(claimed) > len(problems) / 2
    return {find_law("parity").check(subject, each).status for each in claimed}


@pytest.mark.parametrize(("name", "right", "wrong"), FAULTS)
def test_an_adapter_of_the_documentation(
    repository: Path, tmp_path: Path, name: str, right: str, wrong: str
) -> None:
    if name == "onnxruntime_adapter":
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
        pytest.importorskip("onnx", reason="the extra onnx is not installed")
    file = repository / "docs" / "examples" / f"{name}.py"
    source = file.read_text(encoding="utf-8")
    assert source.count(right) == 1
    faulty = tmp_path / f"faulty_{name}.py"
    faulty.write_text(source.replace(right, wrong))
    assert statuses(file) == {"PASS"}
    assert "FAIL" in statuses(faulty)
