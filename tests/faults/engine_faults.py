"""Faults in the real Triton kernels of vLLM and SGLang, each judged by a whole check.

    python tests/faults/engine_faults.py                     every fault, then the unmodified files
    python tests/faults/engine_faults.py --only NAME ...     some of them
    python tests/faults/engine_faults.py --faults-only       without the unmodified files
    python tests/faults/engine_faults.py --at-once 4         several checks at a time

Other options are those of the check, such as ``--device cuda --minutes 1``. Nothing is fetched.

The releases are those that ``make engines`` fetches. For each fault the engine's folder is copied,
one line is replaced, and ``kernelproof check ADAPTER --profile gate`` must end with 1; without a
fault it must end with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ENGINES = Path(__file__).parents[2] / ".engines"
VLLM, SGLANG = "vllm-0.33.0", "sglang-0.5.23"
OPS = "vllm/v1/attention/ops"
WORKER = "vllm/v1/worker/gpu"
KERNELS = "sglang/kernels/ops/attention"


class Fault(NamedTuple):
    """A line of a kernel, and what a slip would make of it.

    Attributes:
        name: of the fault.
        adapter: that calls the kernel.
        engine: folder in ``.engines``.
        file: that is changed.
        line: as it is there, once; several where one alone is there more often.
        slip: what it becomes.
        blind: whether who chose it had read the kernels alone, and knew nothing of the laws.
    """

    name: str
    adapter: str
    engine: str
    file: str
    line: str
    slip: str
    blind: bool = False


FAULTS = (
    Fault(
        "2d-rescale", "vllm-unified-attention", VLLM, f"{OPS}/triton_unified_attention.py",
        "        acc = acc * alpha[:, None]",
        "        acc = acc",
    ),
    Fault(
        "3d-segments", "vllm-unified-attention-3d", VLLM, f"{OPS}/triton_unified_attention.py",
        "    segm_output *= segment_scale[:, None]",
        "    segm_output *= 1.0",
    ),
    Fault(
        "vllm-merge-scale", "vllm-merge-attn-states", VLLM, f"{OPS}/triton_merge_attn_states.py",
        "    s_scale = s_se / out_se",
        "    s_scale = s_se",
    ),
    Fault(
        "moe-bias", "vllm-fused-moe", VLLM, "vllm/model_executor/layers/fused_moe/fused_moe.py",
        "        bias_ptrs = b_bias_ptr + off_experts * stride_bbe + offs_bn * stride_bbn",
        "        bias_ptrs = b_bias_ptr + offs_bn * stride_bbn",
    ),
    Fault(
        "decode-last-key", "sglang-decode-grouped", SGLANG, f"{KERNELS}/decode_attention.py",
        '                mask_h[:, None] & (offs_n[None, :] < split_kv_end), qk, float("-inf")',
        '                mask_h[:, None] & (offs_n[None, :] <= split_kv_end), qk, float("-inf")',
    ),
    Fault(
        "decode-parts", "sglang-decode", SGLANG, f"{KERNELS}/decode_attention.py",
        "            acc *= old_scale",
        "            acc *= 1.0",
    ),
    Fault(
        "extend-prefix-scale", "sglang-extend", SGLANG, f"{KERNELS}/extend_attention.py",
        "                qk *= sm_scale * k_scale",
        "                qk *= sm_scale",
    ),
    Fault(
        "sglang-merge-lse", "sglang-merge-state", SGLANG, f"{KERNELS}/merge_state.py",
        "        out_lse = tl.log(out_se) + max_lse",
        "        out_lse = tl.log(out_se) + p_lse",
    ),
    Fault(
        "2d-scale-of-head", "vllm-unified-attention", VLLM, f"{OPS}/triton_unified_attention.py",
        "                + kv_head_idx * stride_vs_head",
        "                + 0 * stride_vs_head",
    ),
    Fault(
        "3d-output-scale", "vllm-unified-attention-3d", VLLM, f"{OPS}/triton_unified_attention.py",
        "        acc = acc * tl.load(out_scale_inv)",
        "        acc = acc / tl.load(out_scale_inv)",
    ),
    Fault(
        "2d-window-rows", "vllm-unified-attention", VLLM, f"{OPS}/triton_unified_attention.py",
        "            qpos_lo = q_block_local_idx * BLOCK_Q",
        "            qpos_lo = q_block_local_idx * BLOCK_M",
        blind=True,
    ),
    Fault(
        "3d-reduced-request", "vllm-unified-attention-3d", VLLM,
        f"{OPS}/triton_unified_attention.py",
        "        query_start_len_ptr, query_token_idx, num_seqs, BLOCK_Q, False",
        "        query_start_len_ptr, query_token_idx, num_seqs, BLOCK_Q, True",
        blind=True,
    ),
    Fault(
        "vllm-merge-context", "vllm-merge-attn-states", VLLM,
        f"{OPS}/triton_merge_attn_states.py",
        "    prefix_mask = token_idx < prefill_tokens_with_context",
        "    prefix_mask = token_idx <= prefill_tokens_with_context",
        blind=True,
    ),
    Fault(
        "moe-last-channels", "vllm-fused-moe", VLLM,
        "vllm/model_executor/layers/fused_moe/fused_moe.py",
        "        accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)\n"
        "    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):",
        "        accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)\n"
        "    for k in range(0, K // BLOCK_SIZE_K):",
        blind=True,
    ),
    Fault(
        "decode-value-strides", "sglang-decode-grouped", SGLANG, f"{KERNELS}/decode_attention.py",
        "        base_offs_v = cur_kv_head * stride_buf_vh + offs_dv[None, :]",
        "        base_offs_v = cur_kv_head * stride_buf_kh + offs_dv[None, :]",
        blind=True,
    ),
    Fault(
        "decode-sink", "sglang-decode", SGLANG, f"{KERNELS}/decode_attention.py",
        "        e_sum += tl.exp(cur_sink - e_max)",
        "        e_sum += tl.exp(cur_sink)",
        blind=True,
    ),
    Fault(
        "extend-window-start", "sglang-extend", SGLANG, f"{KERNELS}/extend_attention.py",
        "            tl.maximum(cur_block_m * BLOCK_M - SLIDING_WINDOW_SIZE, 0) // BLOCK_N",
        "            tl.cdiv(tl.maximum(cur_block_m * BLOCK_M - SLIDING_WINDOW_SIZE, 0), BLOCK_N)",
        blind=True,
    ),
    Fault(
        "decode-part-end", "sglang-decode", SGLANG, f"{KERNELS}/decode_attention.py",
        '            qk = tl.where(offs_n < split_kv_end, qk, float("-inf"))',
        '            qk = tl.where(offs_n < cur_batch_seq_len, qk, float("-inf"))',
        blind=True,
    ),
    Fault(
        "rows-of-a-larger-batch", "vllm-steps", VLLM, f"{WORKER}/block_table.py",
        "            num_rows = max(num_rows, self._num_dirty_rows)",
        "            num_rows = num_reqs_padded",
    ),
    Fault(
        "pages-of-a-finished-request", "vllm-steps", VLLM, f"{WORKER}/block_table.py",
        "            start = self.num_blocks.np[i, req_index] if not overwrite else 0",
        "            start = self.num_blocks.np[i, req_index]",
    ),
    Fault(
        "rejected-drafts", "vllm-steps", VLLM, f"{WORKER}/input_batch.py",
        "    computed_delta = query_len - num_rejected",
        "    computed_delta = query_len",
    ),
    Fault(
        "int4-zero-point", "vllm-reshape-and-cache-int4", VLLM, f"{OPS}/int4_per_token_head.py",
        "    v_zp_int = v_zp_f.to(tl.int32)",
        "    v_zp_int = k_zp_f.to(tl.int32)",
    ),
    Fault(
        "int4-scale-bits", "vllm-reshape-and-cache-int4", VLLM, f"{OPS}/int4_per_token_head.py",
        "    k_scale_packed = ((k_scale_bits & -16) | (k_zp_int & 0xF)).to(",
        "    k_scale_packed = (k_scale_bits | (k_zp_int & 0xF)).to(",
    ),
    Fault(
        "mla-slots", "sglang-set-mla-kv-buffer", SGLANG,
        "sglang/kernels/ops/kvcache/mla_buffer.py",
        "    is_valid = (loc != reserved_skip_index) & (loc % DCP_WORLD_SIZE == DCP_RANK)",
        "    is_valid = (loc > 0) & (loc % DCP_WORLD_SIZE == DCP_RANK)",
    ),
)  # fmt: skip


def injected(fault: Fault, folder: Path) -> Path:
    """Copy an engine's folder with one line replaced.

    Raises:
        ValueError: the line is not there, or several times.
    """
    copy = folder / fault.engine
    shutil.copytree(ENGINES / fault.engine, copy, copy_function=os.symlink)
    file = copy / fault.file
    text, line = file.read_text(encoding="utf-8"), f"\n{fault.line}\n"
    if text.count(line) != 1:
        message = f"{fault.name}: {fault.file} has the line {text.count(line)} times, not 1"
        raise ValueError(message)
    file.unlink()  # a link to the engine's own file
    file.write_text(text.replace(line, f"\n{fault.slip}\n"), encoding="utf-8")
    return copy


def check(adapter: str, engine: Path, folder: Path, options: list[str]) -> tuple[int, str, float]:
    """Check an adapter; return the exit code, the laws with findings, and the seconds."""
    report = folder / "report.json"
    command = [
        *(sys.executable, "-m", "kernelproof", "check", adapter, "--profile", "gate"),
        *("--from", str(engine), "--json", str(report), *options),
    ]
    start = time.monotonic()
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - start
    if not report.exists():
        return ended.returncode, ended.stderr.strip()[-200:], seconds
    found = json.loads(report.read_text(encoding="utf-8"))
    laws = dict.fromkeys(each["law"] for each in found["findings"] if each["status"] != "KNOWN")
    return ended.returncode, ", ".join(laws), seconds


def main() -> int:
    """Judge the faults, and the files without one; 0 if all are judged rightly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[fault.name for fault in FAULTS])
    parser.add_argument("--faults-only", action="store_true")
    parser.add_argument("--at-once", type=int, default=1)
    asked, options = parser.parse_known_args()
    if missing := [each for each in (VLLM, SGLANG) if not (ENGINES / each).is_dir()]:
        parser.error(f"{ENGINES} has no {' and no '.join(missing)}: run make engines, or copy it")
    chosen = [fault for fault in FAULTS if fault.name in asked.only]
    runs: list[tuple[str, str, Fault | None]] = [
        (fault.adapter, fault.engine, fault) for fault in chosen
    ]
    if not asked.faults_only:
        honest = dict.fromkeys((fault.adapter, fault.engine) for fault in chosen)
        runs += [(adapter, engine, None) for adapter, engine in honest]
    with ThreadPoolExecutor(asked.at_once) as at_once:
        judged = [at_once.submit(judge, *run, options) for run in runs]
        return int(not all(each.result() for each in judged))


def judge(adapter: str, engine: str, fault: Fault | None, options: list[str]) -> bool:
    """Check an adapter with a fault or without one, print a line; return whether it is right."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = injected(fault, folder) if fault else (ENGINES / engine).resolve()
        code, laws, seconds = check(adapter, files, folder, options)
    name = "unmodified" if fault is None else fault.name + " (chosen blind)" * fault.blind
    sys.stdout.write(f"{name}: {adapter}: exit code {code}, {seconds:.0f} s: {laws or '-'}\n")
    sys.stdout.flush()
    return code == int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())
