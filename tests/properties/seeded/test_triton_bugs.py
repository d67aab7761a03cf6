"""Each fault of a Triton kernel is killed by its law, and the kernel without it is not."""

from __future__ import annotations

import pytest

from kernelproof.impl import find_implementation
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.isolation.workers import Worker
from kernelproof.properties.seeded import triton_bugs
from kernelproof.properties.seeded.catalogue import SeededBug
from kernelproof.properties.seeded.triton_bugs import BUGS
from kernelproof.reference import AttentionProblem, MergeProblem
from kernelproof.tests.interpreting import ask

RAGGED = "ragged_attention"
SPLIT = "triton-attention-split-kv"
SHOWN: dict[str, tuple[AttentionProblem | MergeProblem, str]] = {
    "window-of-first-row": (
        AttentionProblem(query_lens=(4,), seq_lens=(80,), window_left=63, causal=True),
        "triton-attention",
    ),
    "causal-tile-unmasked": (
        AttentionProblem(query_lens=(40,), seq_lens=(60,), causal=True),
        "triton-attention",
    ),
    "edge-not-rescaled": (
        AttentionProblem(RAGGED, query_lens=(3,), seq_lens=(40,), seed=2),
        "triton-ragged-attention",
    ),
    "tail-of-one-key": (AttentionProblem(seq_lens=(65,)), "triton-attention"),
    "page-of-key-before": (AttentionProblem(seq_lens=(64,)), "triton-attention"),
    "mask-of-first-tile": (
        AttentionProblem(RAGGED, seq_lens=(64,), custom_mask=True),
        "triton-ragged-attention",
    ),
    "splits-share-a-key": (AttentionProblem(seq_lens=(64,)), SPLIT),
    "empty-split-weighs": (AttentionProblem(seq_lens=(4,)), SPLIT),
    "sink-in-every-split": (AttentionProblem(seq_lens=(64,), sinks=True), SPLIT),
    "lse-of-largest-split": (AttentionProblem(seq_lens=(64,)), SPLIT),
    "eps-in-the-denominator": (AttentionProblem(seq_lens=(2,)), "triton-attention"),
    "faint-keys-left-out": (
        AttentionProblem(RAGGED, (4,), (26,), regime="outlier_channels", seed=5),
        "triton-ragged-attention",
    ),
    "eps-in-the-merge": (MergeProblem(), "triton-merge-state"),
    "pages-of-no-token": (AttentionProblem("append_paged_kv", (1,), (40,)), "triton-append"),
    "undefined-states": (MergeProblem(num_tokens=8, empty="some"), "triton-merge-state"),
    "channels-behind-the-last-key": (
        AttentionProblem(RAGGED, (1,), (64,), head_dim_qk=24, head_dim_vo=24),
        "triton-ragged-attention",
    ),
}
"""A problem that shows each, and the implementation that is right there."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_fault_is_killed_where_the_kernel_is_right(bug: SeededBug, interpreter: Worker) -> None:
    problem, honest = SHOWN[bug.name]

    def said(implementation: str, law: str = bug.law) -> str:
        return ask(interpreter, law, implementation, problem).status

    # Last, in the same process: nothing of the fault is left behind.
    assert [said(each) for each in (bug.reference, honest)] == ["FAIL", "PASS"]
    if bug.law == "algebra":
        assert said(bug.reference, "parity") == "PASS", "float32 hides it"
    if bug.law == "touched_memory":
        asked = "append_parity" if bug.operation == "append_paged_kv" else "parity"
        assert said(bug.reference, asked) == "PASS", "the answer is right"


def test_there_are_sixteen_and_each_names_itself() -> None:
    assert len({bug.name for bug in BUGS}) == 16
    for bug in BUGS:
        found = find_implementation(bug.reference)
        assert (found.name, found.operation) == (bug.name, bug.operation)
        assert found.session is None


def test_a_substitution_of_what_is_not_there_fails() -> None:
    if (reason := missing("triton", "triton")) is not None:
        pytest.skip(reason)
    kernel = "kernelproof.impl.triton.kernels.attention"
    for text, times in (("no such text", 0), ("BLOCK_N", 2)):
        with pytest.raises(ValueError, match="not once: mend the bug"):
            triton_bugs._substitute(kernel, f"{kernel}__{times}", text, "")
