"""FlashInfer's calls that turn and quantise, without a GPU: their claims and arguments."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer import rope
from kernelproof.impl.flashinfer.calls import flashinfer
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.laws.append import rope_parity
from kernelproof.properties.seeded.rope_bugs import call, stored, turned
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import RopeAppendProblem

pytestmark = pytest.mark.skipif(
    missing("flashinfer", "flashinfer") is not None, reason="flashinfer is not installed"
)
H200 = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", triton="3.6.0", device="cuda")
HEADS = RopeAppendProblem(
    (3, 2), (20, 2), num_qo_heads=4, num_kv_heads=2, rope_dim=32, plain_dim=32, skipped=True,
    q_scale=0.25, k_scale=2.0, v_scale=2.0, kv_layout="HND", shift=3, seed=1,
)  # fmt: skip
LATENT = RopeAppendProblem(
    (3, 2), (20, 2), num_qo_heads=4, rope_dim=32, plain_dim=64, latent=True, skipped=True, seed=2
)
NAMES = {"rope-append": HEADS, "mla-rope-quantize": LATENT}


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


@pytest.mark.parametrize("name", NAMES)
def test_what_they_take(name: str) -> None:
    found = find_implementation(f"flashinfer-{name}")
    assert found.refusal(NAMES[name], H200) is None
    assert found.refusal(NAMES[name], Target.here("cpu")) == "FlashInfer's CUDA kernels need a GPU"
    assert found.refusal(NAMES[name], replace(H200, sm=80)) is not None


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("rope-append", {"v_scale": 1.0}, "one scale"),
        ("rope-append", {"quantised_q": False, "q_scale": 1.0}, "quantises queries"),
        ("rope-append", {"rope_dim": 16}, "multiples of 32 channels"),
        ("rope-append", {"rope_dim": 24, "interleaved": True}, "multiples of 16 channels"),
        ("rope-append", {"plain_dim": 16}, "a multiple of those that turn"),
        ("rope-append", {"spare_channels": 5}, "multiples of 8 elements apart"),
        ("rope-append", {"query_lens": (0,), "seq_lens": (1,)}, "without a token"),
        ("mla-rope-quantize", {"latent": False}, "keys hold the values"),
    ],
)
def test_what_they_refuse(name: str, fields: dict[str, Any], said: str) -> None:
    refusal = find_implementation(f"flashinfer-{name}").refusal(
        replace(NAMES[name], **fields), H200
    )
    assert refusal is not None
    assert said in refusal


def answering(record: list[Any]) -> SimpleNamespace:
    """Stand in for the module: calls are bound to its own signatures and answered in torch."""

    def bound(name: str, keywords: dict[str, Any]) -> dict[str, Any]:
        function = getattr(flashinfer("flashinfer.rope"), name)
        return dict(inspect.signature(function).bind(**keywords).arguments)

    def quantise(keywords: dict[str, Any], rows: tuple[tuple[str, float], ...]) -> None:
        inputs = record[0]
        for name, scale in rows:
            x = inputs.q if name == "q" else inputs.k
            made = stored(turned(inputs, x), inputs.q_dtype, scale)
            for part, where in (("rope", inputs.rotary), ("nope", inputs.plain)):
                out = keywords[f"{name}_{part}_out"]
                assert keywords[f"{name}_{part}"].equal(
                    x[..., where] if out.dim() > 2 else x[:, 0, where]
                )
                out.copy_(made[..., where].view(out.shape))

    def append(**keywords: Any) -> None:  # noqa: ANN401
        given, inputs = bound("rope_quantize_fp8_append_paged_kv_cache", keywords), record[0]
        kept = given["batch_indices"] >= 0
        first = given["kv_indptr"][given["batch_indices"][kept].long()].long()
        size = given["page_size"]
        pages = given["kv_indices"][first + given["positions"][kept] // size].long()
        slots = torch.full_like(inputs.slots, -1)
        slots[kept] = pages * size + given["positions"][kept] % size
        scales = {"k_scale": 1 / given["quant_scale_kv"], "v_scale": 1 / given["quant_scale_kv"]}
        call(replace(inputs, slots=slots, positions=given["pos_ids"], **scales))
        assert given["is_neox"] is not inputs.interleaved
        quantise(given, (("q", 1 / given["quant_scale_q"]),))

    def mla(**keywords: Any) -> None:  # noqa: ANN401
        given = bound("mla_rope_quantize_fp8", keywords)
        scales = 1 / given["quant_scale_q"], 1 / given["quant_scale_kv"]
        quantise(given, tuple(zip(("q", "k"), scales, strict=True)))

    return SimpleNamespace(
        rope_quantize_fp8_append_paged_kv_cache=append, mla_rope_quantize_fp8=mla
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [("rope-append", HEADS), ("rope-append", LATENT), ("mla-rope-quantize", LATENT)],
)
def test_how_they_are_called(
    monkeypatch: pytest.MonkeyPatch, name: str, problem: RopeAppendProblem
) -> None:
    found = find_implementation(f"flashinfer-{name}")
    record: list[Any] = []

    def kernel(inputs: Any) -> Any:  # noqa: ANN401
        record[:] = [inputs]
        return found.function(inputs)

    monkeypatch.setattr(rope, "flashinfer", lambda _: answering(record))
    mine = replace(found, function=kernel)
    verdict = rope_parity(Subject(mine, Target.here("cpu"), Stages()), problem)
    assert verdict.status == "PASS", verdict.message
