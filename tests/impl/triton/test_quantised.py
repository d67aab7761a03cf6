"""Kernelproof's Triton attention over FP8 and NVFP4 caches, against the oracle and code by code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import AttentionProblem, Problem
from kernelproof.reference.formats.cache_elements import INT4, RECORDS, TOKEN_SCALED, ZERO_POINTS
from kernelproof.reference.problems.cache_names import KV_CACHES, element_of, layout_of

OURS = ("triton-attention", "triton-attention-split-kv")
QUANTISED = tuple(
    name
    for name in KV_CACHES
    if name
    and layout_of(name) == "linear"
    and element_of(name) not in (*TOKEN_SCALED, INT4, *ZERO_POINTS, *RECORDS)
)
ON_CPU = Target(device="cpu")

CODES = """
import json, sys
from dataclasses import replace
import torch
from kernelproof.impl.triton.attention import paged
from kernelproof.reference import AttentionProblem, KVCacheFormat, interleave_v_scales, materialise
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.attention.metadata import build_metadata

device = torch.device(sys.argv[1])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
BYTES = torch.arange(256, dtype=torch.uint8)
wrong = {}

def attend(q, k, v, kv_format, scales=None):
    # [requests, 1, 1, dim]: a request a page, each of one key.
    ones = torch.ones(len(k), dtype=torch.int32)
    table = torch.arange(len(k), dtype=torch.int32)[:, None]
    queries = ones * (len(q) // len(k))
    metadata = build_metadata(queries, ones, table, 1)
    placed = {name: tensor.to(device) for name, tensor in metadata.tensors().items()}
    found = paged(PagedAttentionInputs(
        q=q.to(device), k_cache=k.to(device), v_cache=v.to(device),
        metadata=type(metadata)(**placed, page_size=1), block_table=table.to(device),
        kv_layout="NHD", causal=False, sm_scale=1.0, window_left=-1, logits_soft_cap=0.0,
        sinks=None, custom_mask=None, k_scale=1.0, v_scale=1.0, out_dtype=q.dtype,
        kv_format=kv_format,
        kv_cache_sf=scales and tuple(each.to(device) for each in scales),
    ))
    return found.out.cpu().double(), found.lse.cpu().double()

def expect(name, dtype, got, wanted, rtol=0.0):
    same = torch.isclose(got, wanted, rtol=rtol, atol=0.0, equal_nan=True)
    wrong[f"{name} {dtype}"] = int((~same).sum())

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    # Keys show in the lse: the query of a channel is 1 there, so that its logit is the key's value.
    for element in ("float8_e4m3fn", "float8_e5m2"):
        fp8 = getattr(torch, element)
        values = BYTES.view(fp8).double()
        finite = torch.where(values.isfinite(), BYTES, BYTES * 0)
        for storage in ("", "uint8"):
            kv_format = KVCacheFormat(element, storage)
            k, v = (each.view(kv_format.dtype)[None, None, None] for each in (finite, BYTES))
            out, lse = attend(torch.eye(256, dtype=dtype)[:, None], k, v, kv_format)
            expect(f"v {element} {storage}", dtype, out, values.expand(256, 1, 256))
            keys = finite.view(fp8).double()
            expect(f"k {element} {storage}", dtype, lse[:, 0], keys, rtol=2.0**-22)
    # 32 blocks a row, each with all 16 codes; 8 rows for the 256 block scales.
    nibbles = BYTES[:16].repeat(32)
    codes = (nibbles[0::2] | nibbles[1::2] << 4)[None, None, None].repeat(8, 1, 1, 1)
    scales = BYTES.view(torch.float8_e4m3fn).view(8, 1, 1, 32)
    values = (scales.double()[..., None] * E2M1).flatten(-2)
    zero = (torch.zeros_like(codes), torch.zeros_like(scales.view(torch.uint8)).view(scales.dtype))
    q = torch.zeros(8, 1, 512, dtype=dtype)
    out, _ = attend(q, zero[0], codes, KVCacheFormat("nvfp4"), (zero[1], scales))
    expect("v nvfp4", dtype, out, values[:, 0])
    finite = torch.where(scales.double().isfinite(), scales.double(), 0.0).to(scales.dtype)
    keys = (finite.double()[..., None] * E2M1).flatten(-2)[:, 0, 0]
    q = torch.eye(512, dtype=dtype).repeat(8, 1)[:, None]
    _, lse = attend(q, codes, zero[0], KVCacheFormat("nvfp4"), (finite, zero[1]))
    expect("k nvfp4", dtype, lse[:, 0], keys.flatten(), rtol=2.0**-22)

# Pages further apart than 31 bits say; of the memory between them no byte is touched.
problem = AttentionProblem(seq_lens=(7,), head_dim_qk=64, head_dim_vo=64, page_size=2)
for cache in ("float8_e5m2 as uint8", "nvfp4"):
    inputs = materialise(replace(problem, kv_cache=cache), device)
    # Of the last pages, which belong to nobody, there is no need.
    near, _ = paged(inputs)
    far = torch.empty(3 * 2**30 + 2**12, dtype=torch.uint8, device=device)
    places = iter(range(0, 2**12, 2**10))

    def spread(tensor):
        tensor = tensor[:4]
        strides = (2**30, *tensor.contiguous().stride()[1:])
        there = far.as_strided(tensor.shape, strides, next(places)).view(tensor.dtype)
        return there.copy_(tensor)

    scales = inputs.kv_cache_sf and tuple(map(spread, inputs.kv_cache_sf))
    apart = replace(inputs, k_cache=spread(inputs.k_cache), v_cache=spread(inputs.v_cache),
                    kv_cache_sf=scales)
    wrong[f"far pages {cache}"] = int((paged(apart)[0] != near).sum())
    del apart, far, scales

# V's scales in trtllm-gen's order, for a kernel that reads them in order.
problem = replace(problem, kv_cache="nvfp4", page_size=4)
inputs = materialise(problem, device)
k_scales, v_scales = inputs.kv_cache_sf
kv_format = KVCacheFormat("nvfp4", v_scale_layout="interleaved")
interleaved = (k_scales, interleave_v_scales(v_scales, kv_layout="NHD"))
again = replace(inputs, kv_format=kv_format, kv_cache_sf=interleaved)
wrong["interleaved"] = int((paged(again)[0] != paged(inputs)[0]).sum())

try:
    paged(replace(inputs, kv_format=None))
except ValueError as error:
    wrong["bare uint8"] = 0 if "does not say what the bytes hold" in str(error) else str(error)
print(json.dumps(wrong))
"""


PATIENT = Deadlines(materialise=280.0, run=280.0, judge=280.0)
"""Deadlines just below the 300 seconds of a test: nothing hangs here, however slow the machine."""


def ask(worker: Worker, device: str, name: str, law: str, problem: Problem) -> Verdict:
    payload = {
        "task": "judge", "law": law, "implementation": name, "problem": problem.to_json(),
        "device": device,
    }  # fmt: skip
    return verdict_of(worker.run(payload, PATIENT))


def test_every_code_and_scale_is_exact(device: str) -> None:
    interpret = "1" if device == "cpu" else "0"
    done = subprocess.run(
        [sys.executable, "-c", CODES, device],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout)
    assert len(wrong) == 3 * 10 + 4
    assert wrong == dict.fromkeys(wrong, 0)


def batch(**changes: Any) -> AttentionProblem:  # noqa: ANN401  fields of any type
    """Return a mixed batch: a decode, a prefill, no query, and more queries than keys."""
    fields: dict[str, Any] = {
        "query_lens": (1, 5, 0, 4), "seq_lens": (37, 5, 3, 2), "num_kv_heads": 2,
        "group_size": 3, "page_size": 4, "page_order": 1, "dtype": "bfloat16", "causal": True,
        "head_dim_qk": 48, "head_dim_vo": 32, "k_scale": 0.75, "v_scale": 1.5, **changes,
    }  # fmt: skip
    return AttentionProblem(**fields)


BATCHES = [
    batch(dtype="float32", group_size=1, causal=False),
    batch(kv_layout="HND", dtype="float16", strided_q=True),
    batch(strided_kv=True, per_head_scales=True, page_size=1),
    batch(kv_layout="HND", strided_kv=True, sinks=True, page_size=16, num_kv_heads=1, group_size=8),
    batch(window_left=3, sinks=True, page_size=3, dtype="float16", logits_soft_cap=5.0),
    batch(custom_mask=True, window_left=7, kv_layout="HND", dtype="float16"),
    batch(regime="outlier_channels", shared_prefix_pages=2, seq_lens=(37, 12, 3, 9)),
    batch(regime="exact_grid", sm_scale=1.0, k_scale=1.0, v_scale=0.5, strided_kv=True),
    batch(query_lens=(3, 1), seq_lens=(0, 0), sinks=True),
    batch(query_lens=(40, 1), seq_lens=(70, 65), num_kv_heads=1, group_size=2, page_size=16),
    batch(query_lens=(1, 2), seq_lens=(33, 2), head_dim_qk=192, head_dim_vo=128, page_size=64),
    batch(query_lens=(2,), seq_lens=(20,), head_dim_qk=512, head_dim_vo=512, kv_layout="HND"),
    batch(query_lens=(1,), seq_lens=(9,), head_dim_qk=16, head_dim_vo=16, strided_kv=True),
]
LAWS = ["unused_memory", "inputs_unchanged", "output_buffers", "repeated_calls", "logit_shift"]


@pytest.mark.parametrize("cache", QUANTISED)
@pytest.mark.parametrize("problem", BATCHES, ids=lambda problem: problem.id)
def test_parity(problem: AttentionProblem, cache: str, worker: Worker, device: str) -> None:
    verdict = ask(worker, device, OURS[0], "parity", replace(problem, kv_cache=cache))
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("cache", QUANTISED[2:])
@pytest.mark.parametrize("problem", BATCHES[::3], ids=lambda problem: problem.id)
def test_split_kv(problem: AttentionProblem, cache: str, worker: Worker, device: str) -> None:
    verdict = ask(worker, device, OURS[1], "parity", replace(problem, kv_cache=cache))
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("dim", [8, 24, 40])
def test_head_dims_that_no_nvfp4_cache_has(dim: int, worker: Worker, device: str) -> None:
    problem = batch(head_dim_qk=dim, head_dim_vo=dim, kv_cache="float8_e4m3fn")
    verdict = ask(worker, device, OURS[0], "parity", problem)
    assert verdict.status == "PASS", verdict


@pytest.mark.parametrize("law", LAWS)
def test_laws(law: str, worker: Worker, device: str) -> None:
    for name in OURS:
        for cache in ("float8_e4m3fn", "nvfp4"):
            verdict = ask(worker, device, name, law, batch(strided_kv=True, kv_cache=cache))
            assert verdict.status == "PASS", verdict


def test_only_paged_attention_names_what_pages_alone_have() -> None:
    for name in OURS:
        assert {"fp8_kv", "nvfp4_kv"} <= find_implementation(name).features
    ragged = find_implementation("triton-ragged-attention")
    assert {"fp8_kv", "nvfp4_kv"} & ragged.features == {"fp8_kv"}


def test_the_cache_is_part_of_the_compiled_kernel() -> None:
    for name in OURS:
        key = find_implementation(name).compile_key
        assert key is not None
        elements: dict[str, set[object]] = {}
        for cache in ("", *QUANTISED):
            problem = replace(BATCHES[0], kv_cache=cache)
            elements.setdefault(problem.kv_element, set()).add(key(problem))
        # FP8 that is stored as bytes takes the kernel of FP8: it reads bytes.
        assert {len(keys) for keys in elements.values()} == {1}
        assert len(set.union(*elements.values())) == len(elements)


@pytest.mark.parametrize("cache", QUANTISED)
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_the_gate_lets_them_pass_on_any_chip(sm: int, cache: str) -> None:
    problem = batch(kv_cache=cache)
    for name in OURS:
        assert find_implementation(name).refusal(problem, Target(device="cuda", sm=sm)) is None
