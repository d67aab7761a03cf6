"""A finding stands once in a log of both streams, in a title that a person can read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kernelproof.properties.findings.text_format import law_names

KERNEL = """
from kernelproof.impl import implementation

@implementation("moe", name="mine")
def mine(inputs):
    return None
"""


def test_a_finding_is_printed_once_where_both_streams_are_one(tmp_path: Path) -> None:
    (tmp_path / "once_kernels.py").write_text(KERNEL, encoding="utf-8")
    command = [sys.executable, "-m", "kernelproof", "check", "once_kernels.py:mine"]
    laws = [word for name in ("parity", "token_order") for word in ("--law", name)]
    ended = subprocess.run(
        [*command, "--profile", "quick", "--jobs", "1", *laws],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 1, ended.stdout
    assert ended.stdout.count("returned NoneType, not a tensor") == 1, ended.stdout
    assert ended.stdout.count("kernelproof replay") == 1, ended.stdout


def test_many_laws_are_counted() -> None:
    laws = [f"law_{number}" for number in range(38)]
    assert law_names(laws) == "law_0, law_1, law_2, law_3 and 34 more laws"
    assert law_names(laws[:5]) == "law_0, law_1, law_2, law_3, law_4"
    assert law_names(laws, verbose=True) == ", ".join(laws)
