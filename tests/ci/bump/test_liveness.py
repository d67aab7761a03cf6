"""Hangs that are known of a release: its binaries decide, whatever its version says."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproof.ci.bump.surface.declared import known_hangs
from kernelproof.ci.bump.verdicts.findings import CHANGES

DEADLOCKS, MENDED = "e7afc4134", "abc"
"""Of trtllm-gen's attention on SM103: the binaries of 0.6.7 and 0.6.7.post1, and others."""
RULE = "trtllm-gen-sm103-hang"


def release(version: str, binaries: str) -> dict[str, Any]:
    return {
        "flashinfer": version,
        "artifacts": {"paths": {"TRTLLM_GEN_FMHA": f"{binaries}/fmha"}},
    }


@pytest.mark.parametrize(
    ("baseline", "candidate", "change", "action"),
    [
        (("0.6.6", MENDED), ("0.6.7", DEADLOCKS), "known-hang", "condition"),
        # The binaries came along: a later version mends nothing.
        (("0.6.7", DEADLOCKS), ("0.6.13", DEADLOCKS), "hang-stays", "report"),
        (("0.6.6", MENDED), ("0.6.13", DEADLOCKS), "known-hang", "condition"),
        (("0.6.7", DEADLOCKS), ("0.6.7", MENDED), "", ""),
        (("0.6.7", DEADLOCKS), ("0.6.13", MENDED), "", ""),
    ],
)
def test_a_known_hang_goes_with_its_binaries(
    baseline: tuple[str, str], candidate: tuple[str, str], change: str, action: str
) -> None:
    found = [
        each
        for each in known_hangs(release(*baseline), release(*candidate), (90, 103))
        if each.subject == RULE
    ]
    assert [(each.change, CHANGES[each.change].action) for each in found] == [
        (change, action)
    ] * bool(change)
    for each in found:
        assert each.chips == (103,)
        assert (
            each.rule == "do not call trtllm-gen (paged_attention, ragged_attention, mla) on SM103"
        )


def test_a_hang_of_a_kind_of_calls_says_which() -> None:
    calls = "fa3 (paged_attention, ragged_attention) on SM90"
    found = {
        each.subject: each
        for each in known_hangs(release("0.6.6", MENDED), release("0.6.13", MENDED), (90, 100))
    }
    each = found["fa3-fp8-window-hang"]
    assert (each.change, each.chips) == ("hang-stays", (90,))  # 0.6.6 has it too
    assert each.rule.startswith(f"do not call {calls} with q_dtype float8_e4m3fn, window True")
