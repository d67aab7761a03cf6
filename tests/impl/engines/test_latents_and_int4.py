"""Engines' writers of int4 and of latents: stand-ins of their files show what they are given."""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM
from kernelproof.properties.laws import laws_of
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
INT4 = AttentionProblem(
    "append_paged_kv", (2, 1), (9, 4), num_kv_heads=2, head_dim_qk=32, head_dim_vo=20, page_size=4,
    kv_cache="int4_per_token_head", dtype="bfloat16",
)  # fmt: skip
LATENT = replace(
    INT4, num_kv_heads=1, head_dim_qk=24, head_dim_vo=16, values_in_keys=True, kv_cache="",
)  # fmt: skip
WRITERS = {"vllm-reshape-and-cache-int4": INT4, "sglang-set-mla-kv-buffer": LATENT}
FILES = {
    "vllm/v1/attention/ops/int4_per_token_head.py": """
        from kernelproof.reference.formats.int4 import quantize_int4

        _reshape_cache_int4_kernel = object()

        def _run_reshape_kernel(
            kernel, *, key, value, key_cache, value_cache, k_scale_cache, v_scale_cache,
            slot_mapping, packing_factor,
        ):
            assert kernel is _reshape_cache_int4_kernel
            assert packing_factor == 2
            assert len(slot_mapping) == len(key)
            size = key_cache.shape[1]
            for rows, cache, of_scales in (
                (key, key_cache, k_scale_cache), (value, value_cache, v_scale_cache),
            ):
                for row, slot in zip(rows, slot_mapping.tolist()):
                    if slot >= 0:
                        codes, scales = quantize_int4(row)
                        cache[slot // size, slot % size] = codes
                        of_scales[slot // size, slot % size] = scales[:, 0]
    """,
    "sglang/kernels/ops/kvcache/mla_buffer.py": """
        import torch

        def set_mla_kv_buffer_triton(
            kv_buffer, loc, cache_k_nope, cache_k_rope, *, reserved_skip_index=0,
        ):
            assert reserved_skip_index == -1
            rows = torch.cat([cache_k_nope, cache_k_rope], dim=2)
            for row, slot in zip(rows, loc.tolist()):
                if slot >= 0:
                    kv_buffer[slot] = row

        def set_mla_kv_buffer_triton_fp8_quant(
            kv_buffer, loc, cache_k_nope, cache_k_rope, fp8_dtype, *, reserved_skip_index=0,
        ):
            rows = torch.cat([cache_k_nope, cache_k_rope], dim=2).float().clamp(-448, 448)
            codes = rows.to(fp8_dtype).view(torch.uint8)
            for row, slot in zip(codes, loc.tolist()):
                if slot >= 0:
                    kv_buffer.view(torch.uint8)[slot] = row
    """,
}


UNWATCHED = SimpleNamespace(stage=lambda _: nullcontext())
"""Stages of a call that nobody watches."""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write stand-ins of both files."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        (tmp_path / name.partition("/")[0] / "__init__.py").touch()
    monkeypatch.setenv(FROM, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return tmp_path


def refusal(name: str, problem: AttentionProblem) -> str:
    return str(find_implementation(name).refusal(problem, Target.here("cpu")))


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("law", ["append_parity", "never_written", "vectors_of_one_value"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vllm-reshape-and-cache-int4", {}),
        ("vllm-reshape-and-cache-int4", {"kv_layout": "HND", "strided_kv": True}),
        ("vllm-reshape-and-cache-int4", {"strided_q": True, "dtype": "float16"}),
        ("sglang-set-mla-kv-buffer", {}),
        ("sglang-set-mla-kv-buffer", {"kv_cache": "float8_e4m3fn", "strided_q": True}),
        ("sglang-set-mla-kv-buffer", {"page_size": 1, "strided_kv": True, "kv_layout": "HND"}),
    ],
)
def test_each_argument_arrives(name: str, fields: dict[str, Any], law: str) -> None:
    (chosen,) = (each for each in laws_of("append_paged_kv") if each.name == law)
    for seed in range(4):  # some are written in place
        problem = replace(WRITERS[name], **fields, seed=seed)
        subject = Subject(find_implementation(name), Target.here("cpu"), UNWATCHED)
        verdict = chosen.check(subject, problem)
        assert verdict.status == "PASS", verdict.message


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_dim_qk": 16}, "keys have rotary channels"),
        ({"query_lens": (0,), "seq_lens": (3,)}, "without a token"),
        ({"kv_cache": "float8_e5m2"}, "float8_e4m3fn where they are FP8"),
        ({"kv_cache": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.5}, "nothing divides keys"),
        ({"kv_cache": "float8_e4m3fn", "dtype": "float32"}, "made of 16 bits"),
        ({"kv_layout": "HND"}, "slots lie one behind the other"),
        ({"values_in_keys": False}, "latent attention only"),
    ],
)
def test_what_sglang_refuses(fields: dict[str, Any], said: str) -> None:
    assert said in refusal("sglang-set-mla-kv-buffer", replace(LATENT, **fields))


@pytest.mark.usefixtures("engines")
def test_a_cache_of_another_format_is_refused() -> None:
    said = refusal("vllm-reshape-and-cache-int4", replace(INT4, kv_cache=""))
    assert said == "caches of four bits with zero points in their scales only"


@pytest.mark.parametrize("name", WRITERS)
def test_an_older_release_lacks_the_name(name: str, engines: Path) -> None:
    for file in FILES:
        (engines / file).write_text("", encoding="utf-8")
    assert "has no " in refusal(name, WRITERS[name])
