"""``and``, ``or`` and ``not`` of blocks in Triton's interpreter are those of each element."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KERNEL = """
import json
import torch, triton
import triton.language as tl
from kernelproof.impl.gpu.triton_interpreter import hasten

@triton.jit
def join(out, low, high, KIND: tl.constexpr, ALL: tl.constexpr, NONE: tl.constexpr = None):
    place = tl.arange(0, 8)
    above, below = place >= low, place < high
    if KIND == "and":
        found = above and below and place != 4
    elif KIND == "or":
        found = place < low or (place >= high or place == 4)
    elif KIND == "not":
        found = not above
    elif KIND == "flag":
        found = ALL and above
    else:
        found = above & below
        if low > 100 and tl.load(out + low) > 0:  # a scalar: the load is not reached
            found = above
        if NONE is None and not (low == 3 or high == 3):
            found = below
    tl.store(out + place, found.to(tl.int32), mask=not (place < 0))

hasten()
told = {}
for kind, given in (("and", True), ("or", True), ("not", True), ("flag", True), ("scalar", True)):
    out = torch.full((8,), 7, dtype=torch.int32)
    join[(1,)](out, 2, 6, kind, given)
    told[kind] = out.tolist()
print(json.dumps(told))
"""


def test_blocks_are_joined_by_element(tmp_path: Path) -> None:
    file = tmp_path / "joins.py"
    file.write_text(KERNEL, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(file)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "and": [0, 0, 1, 1, 0, 1, 0, 0],
        "or": [1, 1, 0, 0, 1, 0, 1, 1],
        "not": [1, 1, 0, 0, 0, 0, 0, 0],
        "flag": [0, 0, 1, 1, 1, 1, 1, 1],
        "scalar": [1, 1, 1, 1, 1, 1, 0, 0],
    }
