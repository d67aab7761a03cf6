#!/usr/bin/env bash
# flashinfer-python 0.7.2.post1: the reference that it publishes for mono_moe takes the other half of
# the first weights as the gate than the call does.
#
# The template of flashinfer.fused_moe.monomoe.mono_moe names the rows of the first weights
# "[gate || up]": SiLU belongs to the first half. Its reference puts SiLU on the second half, as
# TensorRT-LLM's weights have it ("[up || gate]"). Seen here: with gates far below zero SiLU closes
# every expert and the answer is 0; the reference answers up to 1.3e7, and 0 with the two halves
# exchanged. Seen on an H200, too: the kernel does as the text says (it is
# up to 55 of 52 away from the reference, and 1 from that of exchanged halves, on the template's own
# inputs). Whoever tests a kernel, or another engine's weights, against this reference accepts what
# swaps gate and up, and refuses what is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }
pip torch==2.13.0 apache-tvm-ffi click einops filelock ninja numpy nvidia-ml-py packaging requests tabulate tqdm
pip --no-deps flashinfer-python==0.7.2.post1

cat >"$folder/halves.py" <<'PYTHON'
import sys

import torch
from flashinfer.trace.templates.moe import mono_moe_trace as template

inputs = template.init(
    seq_len=2, num_experts=2, top_k=1, hidden_size=256, intermediate_size=128, device="cpu"
)
first = inputs["expert_weights_up"].to(torch.float32)
half = first.shape[1] // 2
inputs["activations_in"] = torch.ones_like(inputs["activations_in"])
gate, up = torch.full_like(first[:, :half], -8.0), torch.full_like(first[:, half:], 8.0)


def largest(*parts):
    weights = torch.cat(parts, dim=1).to(torch.float8_e4m3fn)
    scales = torch.ones_like(inputs["expert_scales_up"])
    made = {**inputs, "expert_weights_up": weights, "expert_scales_up": scales}
    return float(template.reference(**made).abs().max())


text = template.inputs["expert_weights_up"].description
as_named, exchanged = largest(gate, up), largest(up, gate)
print(f"the template's text: {text!r}")
print(f"closed gates, as the text has it: {as_named:g}; with the halves exchanged: {exchanged:g}")
sys.exit(not ("gate || up" in text and as_named > 100 and exchanged == 0))
PYTHON

"$folder/venv/bin/python" "$folder/halves.py" 2>/dev/null || { echo "changed: the reference has the gate first"; exit 1; }
