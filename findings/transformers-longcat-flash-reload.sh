#!/usr/bin/env bash
# transformers 5.24.0 cannot load a LongCat-Flash checkpoint that transformers 4.57.1 has saved.
#
# A third of LongCat-Flash's experts are identities, which have no weights, and a checkpoint names
# those of the other experts only. LongcatFlashExperts of 5.24.0 allocates the first projection
# (gate_up_proj) for the identities too, the second one (down_proj) for the others alone; its forward
# never reads the rows of identities. So the joined weights of a checkpoint do not fit:
#   MISMATCH | Reinit due to size mismatch - ckpt: torch.Size([4, 32, 32]) vs model:torch.Size([6, 32, 32])
# and from_pretrained raises a RuntimeError. Without identities (zero_expert_num=0) the same checkpoint
# loads, and both versions' logits agree. With the sizes of the configuration's defaults (256
# identities, hidden 6144, 2048 channels an expert) the unread rows are 6.4 thousand million numbers a
# layer. Seen with CPython 3.11 and torch 2.13.0 on a CPU, on 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }
pip torch==2.13.0 numpy
# torch is there already: each version's own needs go beside it.
pip --target "$folder/old" --no-deps transformers==4.57.1 tokenizers==0.22.1 huggingface_hub==0.36.0
pip --target "$folder/new" --no-deps transformers==5.24.0
pip --target "$folder/new" 'tokenizers>=0.22' 'huggingface_hub>=1.3' httpx2
pip safetensors regex pyyaml packaging filelock requests tqdm fsspec hf_xet typing_extensions

cat >"$folder/model.py" <<'PYTHON'
import sys

import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

action, place, identities = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokens = torch.arange(10)[None]
if action == "save":
    torch.manual_seed(0)
    config = LongcatFlashConfig(
        vocab_size=64, hidden_size=32, num_layers=1, num_hidden_layers=2, ffn_hidden_size=48,
        expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=identities, moe_topk=2,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8,
    )
    model = LongcatFlashForCausalLM(config).eval()
    model.save_pretrained(place)
    with torch.no_grad():
        torch.save(model(tokens).logits, place + "/logits.pt")
else:
    try:
        model = LongcatFlashForCausalLM.from_pretrained(place).eval()
    except RuntimeError as error:
        print(type(error).__name__)
    else:
        with torch.no_grad():
            off = (model(tokens).logits - torch.load(place + "/logits.pt")).abs().max().item()
        print("equal" if off < 1e-5 else f"off by {off}")
PYTHON

ask() { PYTHONPATH=$1 "$folder/venv/bin/python" "$folder/model.py" "${@:2}" 2>"$folder/errors"; }
for identities in 0 2; do
  ask "$folder/old" save "$folder/$identities" "$identities"
  for version in old new; do
    found=$(ask "$folder/$version" load "$folder/$identities" "$identities") || { cat "$folder/errors" >&2; exit 1; }
    echo "$identities identities, $version: $found"
    wanted=equal
    [ "$identities $version" = "2 new" ] && wanted=RuntimeError
    [ "$found" = "$wanted" ] || { echo "changed: expected $wanted" >&2; cat "$folder/errors" >&2; exit 1; }
  done
done
grep -o 'ckpt: torch.Size(\[4, 32, 32\]) vs model:torch.Size(\[6, 32, 32\])' "$folder/errors"
