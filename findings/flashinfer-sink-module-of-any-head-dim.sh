#!/usr/bin/env bash
# FlashInfer's wrapper with attention sinks has one compiled module for all head dims.
#
# flashinfer-python 0.7.2.post1 names the module of BatchAttentionWithAttentionSinkWrapper by the
# queries' dtype, by whether there is a window, and by the backend; other wrappers' names have the head
# dim too. The head dim is a constant of the module's sources, and the name is that of their folder. So
# a wrapper of another head dim writes its sources over those of the first, and a process that loads
# the first again compiles what the other has left, or the other way round. Seen with CPython 3.11 on
# 2026-11-30, for head dims 64 and 128 one after the other:
#   64 batch_prefill_attention_sink_bf16_swa_False_fa2 HEAD_DIM_QK = 64
#   128 batch_prefill_attention_sink_bf16_swa_False_fa2 HEAD_DIM_QK = 128
# Nothing is compiled or called here: a module is only named, and its sources are written. What serves
# two models needs a folder (FLASHINFER_WORKSPACE_BASE) for each head dim.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }
pip torch==2.13.0 apache-tvm-ffi click einops filelock ninja numpy nvidia-ml-py packaging requests tabulate tqdm
pip --no-deps flashinfer-python==0.7.2.post1

cat >"$folder/sinks.py" <<'PYTHON'
import pathlib
import re

import torch
from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper
from flashinfer.jit import core


class Named(Exception):
    """Ends a wrapper's construction before its module is compiled."""


def stop(spec, *_, **__):
    raise Named(spec)


core.JitSpec.build_and_load = stop
for channels in (64, 128):
    try:
        BatchAttentionWithAttentionSinkWrapper(
            torch.empty(1024, dtype=torch.uint8),
            backend="fa2",
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            head_dim_qk=channels,
            head_dim_vo=channels,
        )
    except Named as named:
        (spec,) = named.args
    folder = pathlib.Path(spec.sources[0]).parent
    text = "".join(path.read_text() for path in folder.rglob("*.inc"))
    print(channels, spec.name, *sorted(set(re.findall(r"HEAD_DIM_QK = \d+", text))))
PYTHON

export FLASHINFER_WORKSPACE_BASE="$folder" FLASHINFER_CUDA_ARCH_LIST=9.0a
"$folder/venv/bin/python" "$folder/sinks.py" 2>/dev/null | tee "$folder/said"
name=batch_prefill_attention_sink_bf16_swa_False_fa2
diff "$folder/said" <(printf '%s\n' "64 $name HEAD_DIM_QK = 64" "128 $name HEAD_DIM_QK = 128") ||
  { echo "changed: the module's name, or what it holds"; exit 1; }
