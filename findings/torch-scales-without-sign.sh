#!/usr/bin/env bash
# torch 2.13.0: as float8_e8m0fnu, -2 becomes 2, infinity becomes NaN, and 1.25 * 2^-127 is rounded up.
#
# The format of MX scales has no sign, no zero and no infinity. The conversion raises nothing and does
# not saturate: it drops the sign, makes NaN of 1.9 * 2^127, and 2^-127 of 0, so that
# torch.zeros of it is no zeros. It rounds to the nearest power of two, except just above the smallest
# one: float32 and bfloat16 hold 1.25 * 2^-127 as a subnormal number, which becomes 2^-126, though
# 2^-127 is nearer; 1.25 becomes 1. Seen on a CPU, 2026-11-30. A scale that was computed with a wrong
# sign is a right one afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/python" -m pip --disable-pip-version-check install -qq torch==2.13.0 numpy==2.4.0

cat >"$folder/scales.py" <<'PYTHON'
import math

import torch

SCALE = torch.float8_e8m0fnu


def scale(number, dtype=torch.float32):
    return torch.tensor(number, dtype=dtype).to(SCALE).double().item()


print(scale(-2.0), scale(math.inf), scale(1.9 * 2.0**127))
print([math.log2(each) for each in torch.zeros(2, dtype=SCALE).double().tolist()])
for dtype in (torch.float32, torch.bfloat16):
    print([math.log2(scale(1.25 * 2.0**power, dtype)) for power in (0, -126, -127)])
PYTHON
"$folder/v/bin/python" "$folder/scales.py" | tee "$folder/said"
printf '%s\n' "2.0 nan nan" "[-127.0, -127.0]" "[0.0, -126.0, -126.0]" "[0.0, -126.0, -126.0]" |
  cmp - "$folder/said" || { echo "changed: see above"; exit 1; }
