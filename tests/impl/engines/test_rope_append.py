"""Triton kernels that turn and append: their answers in the interpreter, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.isolation.workers import Worker
from kernelproof.reference import RopeAppendProblem
from kernelproof.tests.interpreting import ask

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
SGLANG = RopeAppendProblem(
    (2, 1), (19, 4), num_qo_heads=4, num_kv_heads=2, rope_dim=16, quantised_q=False,
    k_scale=0.11, v_scale=2.0, kv_layout="HND", skipped=True, spare_channels=5, shift=3, seed=1,
)  # fmt: skip
CALLS = {
    "sglang-fused-qk-rope-cache": SGLANG,
    "triton-rope-append": replace(
        SGLANG, rope_dim=6, plain_dim=5, interleaved=True, quantised_q=True, q_scale=0.0372
    ),
}


@pytest.mark.parametrize("regime", ["iid", "ties", "outliers", "faint", "large", "zeros"])
@pytest.mark.parametrize("name", CALLS)
def test_what_they_answer(interpreter: Worker, name: str, regime: str) -> None:
    for codes in ("float8_e4m3fn", "float8_e5m2"):
        problem = replace(CALLS[name], regime=regime, codes=codes)
        verdict = ask(interpreter, "rope_parity", name, problem)
        if verdict.status == "UNSUPPORTED":
            pytest.skip(verdict.message)
        assert verdict.status == "PASS", verdict.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantised_q": True}, "queries keep their dtype"),
        ({"plain_dim": 16}, "all channels turn"),
        ({"rope_dim": 6}, "channels are a power of two"),
        ({"page_size": 5}, "slots of a page"),
        ({"num_qo_heads": 3}, "as many queries"),
        ({"query_lens": (0,), "seq_lens": (3,)}, "without a token"),
        ({"query_lens": (9,), "seq_lens": (9,)}, "too long"),
        (
            {"latent": True, "num_kv_heads": 1, "kv_layout": "NHD", "v_scale": 1.0},
            "do not hold the values",
        ),
    ],
)
def test_what_sglang_refuses(fields: dict[str, Any], said: str) -> None:
    found, here = find_implementation("sglang-fused-qk-rope-cache"), Target.here("cpu")
    if (refusal := found.refusal(SGLANG, here)) is not None:
        pytest.skip(str(refusal))
    refusal = found.refusal(replace(SGLANG, **fields), here)
    assert refusal is not None
    assert said in refusal
