"""Integers in Triton's interpreter have the width that a kernel declares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof.impl.gpu.annotated import declared_widths

KERNEL = """
import torch, triton
import triton.language as tl
from kernelproof.impl.gpu.triton_interpreter import hasten

@triton.jit
def multiply(out, page: tl.int32, plain, WIDE: tl.constexpr, stride: tl.int64 = 2**15):
    factor = stride if WIDE else plain
    tl.store(out, page * factor)

hasten()
for wide in (True, False):
    out = torch.zeros(1, dtype=torch.int64)
    multiply[(1,)](out, 2**17, plain=2**15, WIDE=wide)
    print(out.item())
multiply[(1,)](out, 2**17, 1, True, 2**16)
print(out.item())
"""


def test_the_width_of_an_annotation_is_read() -> None:
    def kernel() -> None:
        """Hold annotations."""

    texts = ["tl.int64", "i64", "u32", "int", "*i64", "tl.constexpr", "i1", "language.int64"]
    kernel.__annotations__ = dict(zip("abcdefgh", texts, strict=True))
    assert declared_widths(kernel) == {"a": "int64", "b": "int64", "c": "uint32"}


def printed(file: Path) -> list[str]:
    """Return the words that a program prints under Triton's interpreter."""
    command, environment = [sys.executable, str(file)], {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_an_offset_of_a_wide_stride_does_not_wrap_around(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL, encoding="utf-8")
    assert printed(file) == [str(2**32), "0", str(2**33)]


def test_an_interpreter_that_is_imported_late_is_prepared_for_every_launch(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    text = (
        "import importlib, sys\n"
        "from kernelproof.impl.gpu.interpreted import INTERPRETER, launches\n"
        "from kernelproof.impl.gpu.triton_interpreter import hasten\n"
        "hasten()\n"
        "importlib.import_module(INTERPRETER)\n"
        "hasten()\n"
        "import kernel\n"
        "print(launches())\n"
    )
    (tmp_path / "late.py").write_text(text, encoding="utf-8")
    assert printed(tmp_path / "late.py") == [str(2**32), "0", str(2**33), "3"]
