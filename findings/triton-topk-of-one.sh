#!/usr/bin/env bash
# triton 3.8.0: tl.topk(x, k) compiles for k = 4 and 2, and not for k = 1.
#
# tl.topk takes a power of two. 1 is one, but its last step then asks for the maximum along an axis of
# a tensor that has no axis left. Compiled for SM90 without a GPU, 2026-11-28: k = 4 and k = 2
# compile, k = 1 ends with a CompilationError that points at tl.topk and names no reason. 3.6.0 and
# 3.7.1 do the same; 3.9.0 compiles all three. A router that pads top_k to tl.topk's power of two, as
# SGLang 0.5.23's for Inkling does, compiles for every model but those with one expert a token.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/best.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def best(x, out, N: tl.constexpr, K: tl.constexpr):
    tl.store(out + tl.arange(0, K), tl.topk(tl.load(x + tl.arange(0, N)), K))


types = {"x": "*fp32", "out": "*fp32", "N": "constexpr", "K": "constexpr"}
for k in (4, 2, 1):
    try:
        triton.compile(ASTSource(best, types, {"N": 64, "K": k}), target=GPUTarget("cuda", 90, 32))
        print(k, "compiles")
    except triton.CompilationError as error:
        print(k, type(error).__name__)
PYTHON

for version in 3.8.0 3.9.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/python" -m pip --disable-pip-version-check install -qq "triton==$version"
  "$folder/$version/bin/python" "$folder/best.py" | tee "$folder/said-$version"
done
grep -q "^1 CompilationError$" "$folder/said-3.8.0" || { echo "changed: 3.8.0 compiles tl.topk(x, 1)"; exit 1; }
grep -q "^1 compiles$" "$folder/said-3.9.0" || { echo "changed: 3.9.0 does not compile tl.topk(x, 1)"; exit 1; }
