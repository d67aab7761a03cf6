#!/usr/bin/env bash
# torch 2.13.0: a number over a tensor is no division: 448.0 / t multiplies the reciprocal of t.
#
# t.__rtruediv__ rounds twice: 1 / t, then the product. A tensor of 448s over t is divided, and rounded
# once. Of t = 1, 2, ..., 2000 in float32 the two differ for 534, the first of which is 3; NumPy's
# 448 / t divides. Seen on a CPU, 2026-11-29. A quantiser's scale that is written as a number over
# magnitudes, and its reference that is written as a tensor over them, have other bits so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/python" -m pip --disable-pip-version-check install -qq torch==2.13.0 numpy==2.4.0

cat >"$folder/over.py" <<'PYTHON'
import numpy
import torch

t = torch.arange(1, 2001, dtype=torch.float32)
number, tensor = 448.0 / t, torch.full_like(t, 448.0) / t
differ = number != tensor
print(int(differ.sum()), "differ, the first for", int(t[differ][0]))
print("the reciprocal times 448:", bool((number == t.reciprocal() * 448.0).all()))
print("NumPy's is the division:", bool((numpy.float32(448) / t.numpy() == tensor.numpy()).all()))
PYTHON
"$folder/v/bin/python" "$folder/over.py" | tee "$folder/said"
printf '%s\n' "534 differ, the first for 3" "the reciprocal times 448: True" \
  "NumPy's is the division: True" | cmp - "$folder/said" || { echo "changed: see above"; exit 1; }
