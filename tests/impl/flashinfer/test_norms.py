"""FlashInfer's norms that quantise, without a GPU: what they claim, and how they are called."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer import norms
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.torch.norm_quantize import norm_and_quantize
from kernelproof.impl.torch.quantize import quantize
from kernelproof.properties.laws.quantisers import norm_parity, parity
from kernelproof.properties.seeded.norm_bugs import norm_of_16_bits
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import NormQuantizeProblem, QuantizeProblem
from kernelproof.reference.tensors.norm_quantize import NormQuantizeInputs

pytestmark = pytest.mark.skipif(
    missing("flashinfer", "flashinfer") is not None, reason="flashinfer is not installed"
)
H200 = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", triton="3.6.0", device="cuda")
GIVEN = NormQuantizeProblem(3, 256, block_rows=0, scale=0.0372, seed=1)
ADDED = replace(GIVEN, residual=True)
BLOCKS = NormQuantizeProblem(
    5, 256, block_channels=128, residual=True, floor=1e-4, scale_layout="padded_columns", seed=2
)
NAMES = {"rmsnorm-quant": GIVEN, "add-rmsnorm-quant": ADDED, "add-rmsnorm-block-quant": BLOCKS}


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
    said = found.refusal(NAMES[name], replace(H200, sm=80))
    assert said is not None


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("rmsnorm-quant", {"residual": True}, "adds no residual"),
        ("rmsnorm-quant", {"gamma_offset": 1.0}, "no offset"),
        ("rmsnorm-quant", {"num_channels": 100}, "whole vectors of 8"),
        ("rmsnorm-quant", {"spare_channels": 5}, "multiples of 8 elements apart"),
        ("rmsnorm-quant", {"scale": 2.0**-140}, "flushes a scale"),
        ("rmsnorm-quant", {"num_tokens": 0}, "without a token"),
        ("rmsnorm-quant", {"dtype": "float32"}, "takes 16 bits"),
        ("add-rmsnorm-quant", {"residual": False}, "adds a residual"),
        ("add-rmsnorm-block-quant", {"num_channels": 384}, "a row has 256 channels"),
        ("add-rmsnorm-block-quant", {"num_channels": 16640}, "a row has 512 channels"),
        ("add-rmsnorm-block-quant", {"scale_layout": "rows"}, "in columns of whole 4 rows"),
        ("add-rmsnorm-block-quant", {"floor": 1e-10}, "at least 0.0001"),
    ],
)
def test_what_they_refuse(name: str, fields: dict[str, Any], said: str) -> None:
    refusal = find_implementation(f"flashinfer-{name}").refusal(
        replace(NAMES[name], **fields), H200
    )
    assert refusal is not None
    assert said in refusal


def test_groups_need_cutile() -> None:
    groups = QuantizeProblem(3, 256, block_channels=128)
    refusal = find_implementation("flashinfer-group-quant-8bit").refusal(groups, H200)
    assert refusal is None or "cuda.tile" in refusal or "tileiras" in refusal


def test_groups_need_the_compiler_of_cutile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "pip install 'cuda-tile[tileiras]'" in (norms._tile_compiler() or "")
    script = tmp_path / "bin" / "tileiras"
    script.parent.mkdir()
    script.touch(mode=0o755)
    assert norms._tile_compiler() is None


@pytest.mark.parametrize(("by_cuda", "refused"), [(True, False), (False, True)])
def test_norms_of_another_backend_are_refused(
    monkeypatch: pytest.MonkeyPatch, *, by_cuda: bool, refused: bool
) -> None:
    stand_in = SimpleNamespace(_USE_CUDA_NORM=by_cuda)
    monkeypatch.setattr(norms, "missing", lambda *_: None)
    monkeypatch.setattr(norms, "flashinfer", lambda _: stand_in)
    assert ("FLASHINFER_USE_CUDA_NORM=1" in (norms._by_cuda() or "")) is refused


def answering(module: Any) -> Any:  # noqa: ANN401  flashinfer.norm
    """Stand in for the module: calls are bound to its own signatures and answered in torch."""

    def answer(name: str, **keywords: Any) -> None:  # noqa: ANN401
        given = inspect.signature(getattr(module, name)).bind(**keywords).arguments
        scale, block = given.get("scale"), "block_scale" in given
        problem = BLOCKS if block else GIVEN
        inputs: NormQuantizeInputs = materialised(
            problem, given["input"], given.get("residual"), given["weight"], scale
        )
        codes, scales = (norm_of_16_bits if block else norm_and_quantize)(inputs)
        given["out"].copy_(codes)
        if scales is not None:
            given["block_scale"][:, : len(codes)].copy_(scales.transpose(0, 1))

    def materialised(
        problem: NormQuantizeProblem,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        gamma: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> NormQuantizeInputs:
        subject = Subject(norm_and_quantize, Target.here("cpu"), Stages())
        record: NormQuantizeInputs = subject.materialise(problem)
        return replace(record, x=x, residual=residual, gamma=gamma, scale=scale)

    names = ("rmsnorm_quant", "fused_add_rmsnorm_quant", "fused_add_rmsnorm_fp8_block_quant")
    return SimpleNamespace(
        **{name: lambda name=name, **keywords: answer(name, **keywords) for name in names}
    )


@pytest.mark.parametrize("name", NAMES)
def test_they_are_called_by_their_own_signatures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("flashinfer.norm")
    monkeypatch.setattr(norms, "flashinfer", lambda _: answering(module))
    subject = Subject(find_implementation(f"flashinfer-{name}"), Target.here("cpu"), Stages())
    found = norm_parity(subject, NAMES[name])
    assert found.status == "PASS", found.message


NVFP4 = QuantizeProblem(
    37, 128, codes="e2m1", scale_format="e4m3", block_channels=16, floor=2.0**-126,
    global_scale=2.0**-7, spare_channels=16, seed=3,
)  # fmt: skip
WRITERS = ("nvfp4-append", "nvfp4-append-slots")


@pytest.mark.parametrize("name", WRITERS)
def test_writers_of_nvfp4_take_what_they_say(name: str) -> None:
    found = find_implementation(f"flashinfer-{name}")
    assert found.refusal(NVFP4, H200) is None
    for fields, said in (
        ({"global_scale": 0.0372}, "powers of two"),
        ({"num_channels": 96}, "heads of 64"),
        ({"floor": 1e-10}, "as it is"),
        ({"dtype": "float32"}, "16 bits"),
    ):
        refusal = found.refusal(replace(NVFP4, **fields), H200)
        assert refusal is not None
        assert said in refusal


def writing(module: Any, *, outside: bool = False) -> Any:  # noqa: ANN401  flashinfer.page
    """Stand in for the module: rows are quantised in torch and written slot by slot."""

    def write(name: str, **keywords: Any) -> None:  # noqa: ANN401
        given = inspect.signature(getattr(module, name)).bind(**keywords).arguments
        rows, caches = given["append_key"], given["paged_kv_cache"]
        scales = [each.view(torch.uint8) for each in given["kv_cache_sf"]]
        subject = Subject(quantize, Target.here("cpu"), Stages())
        record = subject.materialise(NVFP4)
        codes, made = quantize(replace(record, x=rows.flatten(1)))
        if "slot_mapping" in given:
            slots = given["slot_mapping"].tolist()
        else:
            ids = given["kv_indices"].tolist()
            slots = [ids[p // 16] * 16 + p % 16 for p in given["positions"].tolist()]
        for row, slot in enumerate(slots):
            for cache in caches:
                cache[slot // 16, slot % 16] = codes[row].view(cache.shape[2:])
            for cache in scales:
                cache[slot // 16, slot % 16] = made[row].view(torch.uint8).view(cache.shape[2:])
        if outside:
            for cache in caches:
                cache[0, 0] = 0

    names = (
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    )
    return SimpleNamespace(
        **{name: lambda name=name, **keywords: write(name, **keywords) for name in names}
    )


@pytest.mark.parametrize("name", WRITERS)
def test_writers_of_nvfp4_are_read_from_the_slots_of_their_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("flashinfer.page")
    found = find_implementation(f"flashinfer-{name}")
    subject = Subject(found, Target.here("cpu"), Stages())
    for regime in ("iid", "ties", "zeros"):
        monkeypatch.setattr(norms, "flashinfer", lambda _: writing(module))
        verdict = parity(subject, replace(NVFP4, regime=regime))
        assert verdict.status == "PASS", verdict.message
    monkeypatch.setattr(norms, "flashinfer", lambda _: writing(module, outside=True))
    with pytest.raises(RuntimeError, match="that no row has"):
        found(subject.materialise(NVFP4))
