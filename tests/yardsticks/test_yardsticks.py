"""The kernels as they are pass the comparisons; `mutate` names them one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM

ENGINES = Path(__file__).parents[2] / ".engines"
FOLDERS = [ENGINES / name for name in ("vllm-0.33.0", "sglang-0.5.23")]
CHEAP = {
    "vllm": (
        "vllm-unified-attention-4",
        "vllm-unified-attention-3d-1",
        "vllm-decode-grouped-5",
        "vllm-merge-attn-states-5",
        "vllm-reshape-and-cache-flash-4",
        "vllm-fused-moe-0",
        "sglang-decode-grouped-3",
    ),
    "flashinfer": (
        "vllm-unified-attention-9",
        "vllm-unified-attention-3d-10",
        "vllm-decode-grouped-8",
        "vllm-merge-attn-states-1",
        "vllm-reshape-and-cache-flash-0",
        "vllm-fused-moe-0",
        "sglang-decode-grouped-6",
    ),
}
"""Rows that take less than a second, one for each kernel, by the file of comparisons."""


@pytest.mark.parametrize("project", list(CHEAP))
def test_unmodified_kernels_pass(project: str) -> None:
    if absent := missing("triton", "triton"):
        pytest.skip(str(absent))
    if not all(folder.is_dir() for folder in FOLDERS):
        pytest.skip("the files of engines are not there: `make engines` fetches them")
    file = Path(__file__).with_name(f"{project}_comparisons.py")
    rows = [f"{file}::test_comparison[{row}]" for row in CHEAP[project]]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *rows],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", FROM: os.pathsep.join(map(str, FOLDERS))},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(rows)} passed" in ended.stdout
