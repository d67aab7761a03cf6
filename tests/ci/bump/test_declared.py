"""Made-up declarations are compared: what is gone is told from what could not be read."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproof.ci.bump.surface.declared import declared_findings

CHIPS = (90, 100)
GEMM, NORM = "gemm.gemm_base.mm_bf16", "norm.rmsnorm"


def release(**sections: Any) -> dict[str, Any]:  # noqa: ANN401  sections of the declarations
    """Declare one thing of each section."""
    return {
        "flashinfer": "0.6.13",
        "capabilities": [
            {
                "api": GEMM,
                "how": "asked",
                "backends": {"cudnn": [90], "tiny": [100]},
                "common": None,
            },
            {"api": NORM, "how": "asked", "backends": {}, "common": [90, 100]},
        ],
        "runners": [
            {"runner": "Bf16Runner", "chips": [100], "source": "flashinfer/fused_moe/core.py:5"}
        ],
        "configs": [
            {"config": "MoeConfig", "chips": [90], "source": "flashinfer/fused_moe/__init__.py:7"}
        ],
        "jit_filters": [{"generator": "gen_module", "chips": [90]}],
        "fused_moe_modules": {"modules": {"90": "gen_sm90"}},
        "compatible_cubins": {"chips": {"100": ["100"]}},
        "xqa": {"head_dims": [64, 128], "source": "flashinfer.jit.xqa"},
        "fa3": {"head_dims": None, "custom_mask": True, "source": "flashinfer.utils"},
        "backend_choices": {"xqa.xqa": {"choices": ["xqa"]}},
        "activations": {"cutlass": {"values": ["Relu2"]}, "trtllm-gen": {"values": ["Silu"]}},
        "fmha_runner": {"mDtypeKv": {"values": ["FP16"]}},
        "dispatch": {"DISPATCH_QUANT": {"values": ["kFP8"]}, "DISPATCH_DIM": {"values": [64]}},
        "artifacts": {"paths": {"TRTLLM_GEN_FMHA": "abc/fmha"}},
        "exports": {"gemm": {"mm_bf16": "function"}, "norm": {"rmsnorm": "function"}},
        "not_imported": {},
        **sections,
    }


def changes(candidate: dict[str, Any], baseline: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the messages of what changed, by kind and subject; artifacts aside."""
    found = declared_findings(baseline or release(), candidate, CHIPS)
    return {
        f"{each.change} {each.subject}": each.message
        for each in found
        if not each.change.startswith("artifact")
    }


def test_the_same_release_declares_the_same() -> None:
    assert changes(release()) == {}


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"runners": []}, "declared-lost runner Bf16Runner"),
        ({"configs": []}, "declared-lost config MoeConfig"),
        ({"xqa": {"page_sizes": []}}, "declared-lost xqa head dims"),
        (
            {"activations": {"cutlass": {"values": ["Relu2"]}}},
            "declared-lost activations of trtllm-gen MoE",
        ),
        (
            {"dispatch": {"DISPATCH_DIM": {"values": [64]}}},
            "internals-lost templates DISPATCH_QUANT",
        ),
        (
            {"backend_choices": {"decode.x": {"choices": ["y"]}}},
            "internals-lost backends of xqa.xqa",
        ),
        ({"compatible_cubins": {}}, "declared-lost binaries of trtllm-gen attention"),
        (
            {"capabilities": release()["capabilities"][:1], "exports": {"norm": {"mm_bf16": ""}}},
            f"declared-lost {NORM}",
        ),
        (
            {
                "capabilities": [
                    {"api": GEMM, "how": "asked", "backends": {"cudnn": [90]}, "common": None},
                    release()["capabilities"][1],
                ]
            },
            f"declared-lost {GEMM} with tiny",
        ),
    ],
)
def test_what_is_gone_altogether_is_found(sections: dict[str, Any], found: str) -> None:
    assert list(changes(release(**sections))) == [found]


@pytest.mark.parametrize(
    "sections",
    [
        {"runners": [], "not_imported": {"flashinfer.fused_moe.core": "no cutlass"}},
        {"configs": [], "not_imported": {"flashinfer.fused_moe": "no cutlass"}},
        {"backend_choices": {}, "not_imported": {"flashinfer.xqa": "no nvcc"}},
        {"xqa": {}, "fa3": {}, "activations": {}, "fmha_runner": {}, "dispatch": {}},
        {"fmha_runner": {"mDtypeK": {"values": ["FP16"]}}},  # a check under another name
        {"jit_filters": []},
        {"jit_filters": [{"generator": "gen_module", "chips": None}]},
        {"capabilities": []},  # no decorator on what is there is no loss
        {
            "capabilities": [
                {"api": GEMM, "how": "read", "backends": {}, "common": None},
                {"api": NORM, "how": "asked", "backends": {}, "common": None},
            ]
        },
    ],
)
def test_what_could_not_be_read_is_not_gone(sections: dict[str, Any]) -> None:
    assert changes(release(**sections)) == {}


def test_artifacts_that_come_and_go() -> None:
    none = release(artifacts={"paths": {}})
    for old, new, said in (
        (release(), none, "TRTLLM_GEN_FMHA was abc, and is there no more"),
        (none, release(), "TRTLLM_GEN_FMHA is new: abc, of which nothing is known"),
    ):
        (found,) = declared_findings(old, new, CHIPS)
        assert (found.change, found.message.startswith(said)) == ("artifact-changed", True)
