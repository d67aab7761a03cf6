"""Adapters of FlashInfer's CUDA kernels, without a GPU: what they claim, and how they call."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer import calls as flashinfer_calls
from kernelproof.impl.registry import BUILT_IN
from kernelproof.impl.targets.optional import missing
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    Problem,
    dequantize_nvfp4,
    materialise,
    oracle,
)

pytestmark = pytest.mark.skipif(
    missing("flashinfer", "flashinfer") is not None, reason="flashinfer is not installed"
)
FAMILIES = tuple(
    f"kernelproof.impl.flashinfer.{name}:" for name in ("paged", "ragged", "cascade", "graphs")
)
CUDA = [name for name, place in BUILT_IN.items() if place.startswith(FAMILIES)]
PAGED = AttentionProblem(
    query_lens=(1, 1),
    seq_lens=(9, 4),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="bfloat16",
    page_size=4,
    causal=True,
)


def on(version: str, sm: int = 90) -> Target:
    return Target(sm=sm, flashinfer=version, cuda="13.0", triton="3.6.0", device="cuda")


def refusal(name: str, problem: Problem, target: Target) -> str | None:
    return find_implementation(name).refusal(problem, target)


def test_without_a_gpu_they_say_so() -> None:
    assert len(CUDA) == 28
    for name in CUDA:
        found = find_implementation(name)
        problem: Problem = PAGED
        if found.operation == "merge_state":
            problem = MergeProblem(head_dim=64, dtype="bfloat16")
        elif "nvfp4" in name:
            problem = replace(PAGED, kv_cache="nvfp4")
        elif found.operation != "paged_attention":
            problem = replace(PAGED, operation=found.operation, query_lens=(1,), seq_lens=(9,))
        assert found.refusal(problem, Target.here()) == "FlashInfer's CUDA kernels need a GPU"
        assert found.refusal(problem, on("0.7.2.post1")) is None, name
        earlier = found.refusal(problem, on("0.6.13"))
        later = ("uniform_q_len came with", "fast_decode_plan takes q_len_per_req from")
        assert earlier is None or any(each in earlier for each in later), name


FP8: dict[str, Any] = {"kv_cache": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("decode", {"query_lens": (2, 1)}, "equally many tokens of each request"),
        ("decode", {"query_lens": (2, 2)}, "decode-several-queries-on-fa2"),
        ("decode-fa2", {"query_lens": (2, 2), "seq_lens": (9, 0)}, "as many keys as query tokens"),
        ("decode-fa2-unsplit", {"query_lens": (2, 1)}, "equally many tokens of each request"),
        ("prefill-fa2-uniform", {"query_lens": (2, 1)}, "equally many tokens of each request"),
        ("prefill-fa3-graph", {"query_lens": (2, 2), "tree": 1}, "the feature tree"),
        ("decode", {"group_size": 5}, "cuda-core-group-size"),
        ("decode", {"custom_mask": True, "causal": False}, "custom_mask"),
        ("prefill-fa2", {"dtype": "float32"}, "16-bit outputs"),
        ("prefill-fa2", {"v_scale": 1.25}, "multiplies by v_scale 1.25"),
        ("prefill-fa2", {"custom_mask": True}, "takes the place of causal"),
        ("prefill-fa2", {"query_lens": (0, 0)}, "no batch without a token"),
        ("prefill-fa2", {"sinks": True}, "fa2-sinks-ignored"),
        ("prefill-fa3", {"kv_cache": "float8_e4m3fn"}, "queries and keys of one dtype"),
        ("prefill-fa3", {"head_dim_qk": 192, "head_dim_vo": 128}, "keys and values of one stride"),
        ("prefill-fa3", {**FP8, "logits_soft_cap": 5.0}, "fa3-fp8-soft-cap-ignored"),
        ("batch-attention", {"window_left": 3}, "no window"),
        ("attention-sink-fa2", {"head_dim_qk": 128, "head_dim_vo": 128}, "overwrite each other"),
        ("attention-sink-fa2", {"logits_soft_cap": 5.0}, "without a soft cap"),
        ("cascade", {"k_scale": 2.0}, "takes no scales"),
    ],
)  # fmt: skip
def test_what_they_do_not_claim(name: str, fields: dict[str, Any], said: str) -> None:
    why = refusal(f"flashinfer-{name}", replace(PAGED, **fields), on("0.7.2.post1"))
    assert why is not None
    assert said in why


def test_the_hang_is_refused_where_it_is_and_a_rule_can_be_left_out() -> None:
    problem = replace(PAGED, **FP8, query_lens=(5, 1), window_left=7)
    found = find_implementation("flashinfer-prefill-fa3")
    assert found.refusal(problem, on("0.7.2.post1")) is None
    why = found.refusal(problem, on("0.6.13"))
    assert why is not None
    assert "fa3-fp8-window-hang" in why
    assert (why.code, why.about) == ("rules", "fa3-fp8-window-hang")
    assert found.refusal(problem, on("0.6.13"), without_rules=["fa3-fp8-window-hang"]) is None


def test_nvfp4_came_with_a_release() -> None:
    problem = replace(PAGED, kv_cache="nvfp4", head_dim_qk=128, head_dim_vo=128)
    assert refusal("flashinfer-prefill-fa2", problem, on("0.7.2.post1")) is None
    assert refusal("flashinfer-prefill-fa2", problem, on("0.6.7")) is not None


class Recorder:
    """Stands for a wrapper: binds each call to the real signature, and answers by the oracle."""

    def __init__(self, real: Any, calls: list[str]) -> None:  # noqa: ANN401  a class of FlashInfer
        self._real, self._calls = real, calls

    def _bind(self, method: str, *args: Any, **keywords: Any) -> None:  # noqa: ANN401
        function = getattr(self._real, f"_{method}_impl", getattr(self._real, method))
        inspect.signature(function).bind(None, *args, **keywords)
        self._calls.append(method)

    def plan(self, *args: Any, **keywords: Any) -> None:  # noqa: ANN401
        assert not args, "plan is called by keyword: its order has changed"
        self._bind("plan", **keywords)

    def run(self, q: torch.Tensor, *args: Any, **keywords: Any) -> Any:  # noqa: ANN401
        self._bind("run", q, *args, **keywords)
        caches = args[0]
        values = caches[1] if isinstance(caches, tuple) else args[1]
        dim = values.shape[-1] * (2 if values.dtype == torch.uint8 else 1)
        out = torch.zeros(*q.shape[:2], dim, dtype=torch.bfloat16)
        if self._real.__name__ == "MultiLevelCascadeAttentionWrapper":
            return out
        return out, torch.zeros(q.shape[:2])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import flashinfer

    from kernelproof.impl.flashinfer import (
        cascade as flashinfer_cascade,
    )
    from kernelproof.impl.flashinfer import (
        paged as flashinfer_paged,
    )
    from kernelproof.impl.flashinfer import (
        ragged as flashinfer_ragged,
    )

    made: list[str] = []

    def wrapper(name: str, *_: torch.device, apart: str = "", **options: Any) -> Recorder:  # noqa: ANN401
        del apart
        real = getattr(flashinfer, name)
        inspect.signature(real.__init__).bind(None, float_workspace_buffer=None, **options)
        return Recorder(real, made)

    def batch_attention(*_: str) -> Recorder:
        return Recorder(flashinfer.BatchAttention, made)

    for module in (flashinfer_paged, flashinfer_ragged, flashinfer_cascade):
        monkeypatch.setattr(module, "wrapper", wrapper)
    monkeypatch.setattr(flashinfer_paged, "_batch_attention", batch_attention)
    return made


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("decode", {}),
        ("decode-fa2", {"kv_cache": "float8_e5m2"}),
        ("prefill-fa2", {"query_lens": (3, 1), "window_left": 2, "logits_soft_cap": 5.0}),
        ("prefill-fa2", {"custom_mask": True, "causal": False}),
        ("decode-fa2-fixed-split", {}),
        ("decode-fa2-unsplit", {}),
        ("prefill-fa2-unsplit", {"query_lens": (3, 1)}),
        ("prefill-fa2", {"kv_cache": "nvfp4"}),
        ("prefill-fa3", {**FP8, "per_head_scales": True}),
        ("mixed-fa2", {"query_lens": (1, 3), "seq_lens": (2, 3)}),
        ("mixed-fa2", {"query_lens": (3, 0), "seq_lens": (3, 3)}),
        ("batch-attention", {"query_lens": (1, 3)}),
        ("attention-sink-fa2", {"query_lens": (3, 1), "sinks": True, "k_scale": 2.0}),
        ("attention-sink-fa2", {"window_left": 2}),
        ("cascade", {"shared_prefix_pages": 1, "seq_lens": (9, 8)}),
    ],
)
def test_calls_bind_to_the_wheels_signatures(
    name: str, fields: dict[str, Any], layout: str, calls: list[str]
) -> None:
    problem = replace(PAGED, **{"kv_layout": layout, **fields})
    inputs = materialise(problem)
    out, lse = find_implementation(f"flashinfer-{name}")(inputs)
    expected = oracle.attention(inputs)  # type: ignore[arg-type]
    assert out.shape == expected.out.shape
    assert lse is None or lse.shape == expected.lse.shape
    phases = 2 if fields.get("query_lens") == (1, 3) and name == "mixed-fa2" else 1
    assert calls == ["plan", "run"] * phases


@pytest.mark.parametrize("name", ["ragged-fa2", "ragged-fa3"])
def test_ragged_calls_bind_too(name: str, calls: list[str]) -> None:
    inputs = materialise(replace(PAGED, operation="ragged_attention", page_size=1))
    out, lse = find_implementation(f"flashinfer-{name}")(inputs)
    assert (out.shape, lse.shape) == ((2, 4, 64), (2, 4))
    assert calls == ["plan", "run"]


def test_fp8_scales_are_float32_tensors_of_each_head() -> None:
    problem = replace(PAGED, **FP8, q_scale=0.5, k_scale=2.0)
    inputs: Any = materialise(problem)
    given, keywords = flashinfer_calls.scales(inputs)
    assert keywords == {}
    assert [tensor.tolist() for tensor in given] == [[0.5] * 4, [2.0] * 2, [1.0] * 2]
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in given)
    wide: Any = materialise(replace(PAGED, k_scale=2.0))
    assert flashinfer_calls.scales(wide) == ((), {"k_scale": 2.0, "v_scale": 1.0})


def test_bytes_of_fp8_reach_flashinfer_as_fp8() -> None:
    inputs: Any = materialise(replace(PAGED, kv_cache="float8_e5m2 as uint8"))
    k, v = flashinfer_calls.paged_cache(inputs, "fa2")["paged_kv_cache"]
    assert (k.dtype, v.dtype) == (torch.float8_e5m2, torch.float8_e5m2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_in_nvfp4_is_read_by_flashinfer(
    layout: Literal["NHD", "HND"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer.quantization import fp4_quantization as theirs

    def dequantised(
        codes: torch.Tensor, scales: torch.Tensor, one: torch.Tensor, output_dtype: torch.dtype
    ) -> torch.Tensor:
        widened = dequantize_nvfp4(codes, scales.view(torch.float8_e4m3fn), one)
        return widened.to(output_dtype)

    monkeypatch.setattr(theirs, "nvfp4_kv_dequantize", dequantised)
    problem = replace(PAGED, kv_cache="nvfp4", kv_layout=layout, k_scale=2.0)
    inputs: Any = materialise(problem)
    out, lse = find_implementation("flashinfer-nvfp4-dequantize")(inputs)
    assert lse is None
    expected = oracle.attention(inputs).out
    assert (out.double() - expected.double()).abs().max() < 0.05 * expected.abs().max()


def test_a_cascade_cuts_off_what_all_requests_share() -> None:
    from kernelproof.impl.flashinfer.cascade import _shared_pages

    table = torch.tensor([[4, 7, 1], [4, 7, 2], [4, 7, 1]])
    assert _shared_pages(table, 3) == 2
    assert _shared_pages(table, 1) == 1
    assert _shared_pages(table[:1], 0) == 0
