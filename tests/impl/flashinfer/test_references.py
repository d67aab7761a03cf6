"""FlashInfer's adapters: right where the ledger names no fault, UNSUPPORTED where it is absent."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from kernelproof.fixtures.suggestions import how_to_install
from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.flashinfer.triton import to_base_2, to_natural
from kernelproof.impl.gpu.triton_interpreter import LoopVariable, castable_loop_variables
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.isolation.workers import Worker
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    RouteProblem,
    materialise,
)
from kernelproof.tests.interpreting import ask

FLASHINFER = sorted(name for name in BUILT_IN if name.startswith("flashinfer-"))
ABSENT = missing("flashinfer", "flashinfer") or missing("triton", "triton")
needs_flashinfer = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from kernelproof.impl import Target, find_implementation
from kernelproof.reference import (
    AttentionProblem, BatchProblem, MergeProblem, MoEProblem, NormQuantizeProblem, PlanProblem,
    QuantizeProblem, RearrangeProblem, RopeAppendProblem, RouteProblem
)
here = Target.here()
for name in {names!r}:
    found = find_implementation(name)
    layout = "HND" if "context" in name else "NHD"
    problem = {{
        "merge_state": MergeProblem(),
        "paged_attention": AttentionProblem(dtype="bfloat16", kv_layout=layout),
        "ragged_attention": AttentionProblem("ragged_attention", dtype="bfloat16"),
        "append_paged_kv": AttentionProblem("append_paged_kv"),
        "route": RouteProblem(),
        "moe": MoEProblem(),
        "prepare_batch": BatchProblem(),
        "plan": PlanProblem(),
        "quantize": QuantizeProblem(),
        "norm_and_quantize": NormQuantizeProblem(),
        "rearrange": RearrangeProblem(),
        "rope_and_append": RopeAppendProblem(),
    }}[found.operation]
    print(found.refusal(problem, here))
"""


def refusals(blocked: str, names: list[str], **environment: str) -> list[str]:
    code = BLOCKED.format(blocked=blocked, names=names)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_flashinfer_everything_is_unsupported_in_one_sentence() -> None:
    said = refusals("flashinfer", FLASHINFER, TRITON_INTERPRET="1")
    assert len(said) == len(FLASHINFER)
    for name, reason in zip(FLASHINFER, said, strict=True):
        if "-triton-" in name and missing("triton", "triton"):
            assert "triton cannot be imported" in reason
        else:
            assert "cannot be imported (flashinfer" in reason
            assert reason.endswith(f"is missing): {how_to_install('flashinfer')} brings it")


def test_without_triton_its_kernels_are_unsupported_in_one_sentence() -> None:
    names = [name for name in FLASHINFER if "-triton-" in name]
    for reason in refusals("triton", names, TRITON_INTERPRET="1"):
        assert reason == (
            f"triton cannot be imported (triton is missing): {how_to_install('triton')} brings it"
        )


def test_without_the_interpreter_its_kernels_are_unsupported_on_a_cpu() -> None:
    names = [name for name in FLASHINFER if "-triton-" in name]
    for reason in refusals("nothing", names, TRITON_INTERPRET="0"):
        assert reason.startswith("Triton runs on a CPU only under TRITON_INTERPRET=1")


def refusal(name: str, problem: Problem) -> str | None:
    return find_implementation(name).refusal(problem, Target.here())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("paged-decode", {"dtype": "float16"}, "bfloat16"),
        ("paged-decode", {"kv_layout": "HND"}, "layout is NHD"),
        ("paged-decode", {"query_lens": (2,), "seq_lens": (2,)}, "one query token"),
        ("paged-prefill", {"query_lens": (2,), "seq_lens": (2,)}, "causal=True only"),
        ("paged-prefill", {"window_left": 3}, "no window_left"),
        ("paged-prefill", {"logits_soft_cap": 5.0}, "no logits_soft_cap"),
        ("paged-prefill", {"sinks": True}, "no sinks"),
        ("paged-prefill", {"v_scale": 0.5}, "no v_scale"),
        ("paged-prefill", {"head_dim_vo": 32}, "one head_dim"),
        ("paged-prefill", {"custom_mask": True}, "does not name the feature custom_mask"),
        ("trtllm-context", {"kv_layout": "NHD"}, "reads HND"),
        ("trtllm-decode", {"query_lens": (2,), "seq_lens": (2,)}, "one query token"),
    ],
)
def test_what_the_templates_have_no_parameter_for_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    problem = AttentionProblem(**{"dtype": "bfloat16", **changes})
    reason = refusal(f"flashinfer-trace-{name}", problem)
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize("name", ["trace-merge-state", "triton-merge-state"])
def test_two_states_are_two(name: str) -> None:
    reason = refusal(f"flashinfer-{name}", MergeProblem(num_states=3))
    assert reason == "merge_state merges 2 states, not 3"


def gqa(**changes: Any) -> AttentionProblem:  # noqa: ANN401  fields of any type
    fields: dict[str, Any] = {
        "query_lens": (1, 1), "seq_lens": (8, 4), "page_size": 4, "num_kv_heads": 2,
        "group_size": 3, "dtype": "bfloat16", "causal": True, **changes,
    }  # fmt: skip
    return AttentionProblem(**fields)


RIGHT: list[tuple[str, Problem]] = [
    ("trace-paged-decode", gqa()),
    ("trace-paged-decode", gqa(page_order=1, page_size=1, regime="dominant_key")),
    ("trace-paged-prefill", gqa(query_lens=(3, 4))),
    ("trace-paged-prefill", gqa(query_lens=(3, 4), regime="exact_grid", strided_kv=True)),
    ("trace-ragged-prefill", gqa(operation="ragged_attention", query_lens=(3, 4))),
    ("trace-ragged-prefill", gqa(operation="ragged_attention", regime="outlier_channels")),
    ("trace-trtllm-context", gqa(query_lens=(3, 4), seq_lens=(7, 5), kv_layout="HND",
                                 k_scale=0.5)),
    ("trace-trtllm-decode", gqa(seq_lens=(7, 5), v_scale=2.0)),
    ("trace-trtllm-decode", gqa(seq_lens=(7, 5), kv_layout="HND", dtype="float32")),
    ("trace-append", AttentionProblem("append_paged_kv", (2, 3), (5, 3), page_size=4)),
    ("trace-append", AttentionProblem("append_paged_kv", (2, 3), (5, 3), page_size=4,
                                      kv_layout="HND", dtype="float16", strided_kv=True)),
    *((f"{kind}-merge-state", MergeProblem(num_tokens=3, num_heads=2, head_dim=16))
      for kind in ("trace", "triton")),
    *((f"{kind}-merge-states", MergeProblem(num_states=5, num_tokens=3, num_heads=2, head_dim=16))
      for kind in ("trace", "triton", "triton-variable-length")),
    ("triton-merge-states", MergeProblem(num_states=3, dtype="float16", regime="exact_grid")),
    ("triton-merge-state", MergeProblem(num_tokens=0)),
]  # fmt: skip


@needs_flashinfer
@pytest.mark.parametrize(("name", "problem"), RIGHT)
def test_adapters_agree_with_the_oracle_where_no_fault_is_known(
    name: str, problem: Problem, interpreter: Worker
) -> None:
    name = f"flashinfer-{name}"
    law = "append_parity" if problem.operation == "append_paged_kv" else "parity"
    here = Target.here()
    for entry in load_ledger().entries:
        known = entry.applies_to(name, here) and entry.explains(law, Verdict("FAIL"), problem)
        assert not known, entry.id
    verdict = ask(interpreter, law, name, problem)
    assert verdict.status == "PASS", verdict


ROUTES = ("default", "renormalize", "renormalize_naive", "llama4", "deepseek_v3")
WEIGHTS: dict[str, dict[str, Any]] = {
    "cutlass": {}, "bf16": {}, "mxfp4": {"quantized": "mxfp4"}, "nvfp4": {"quantized": "nvfp4"},
    "fp8-block": {"quantized": "fp8_block", "quantized_hidden": True, "hidden": 128, "inter": 128},
}  # fmt: skip
ON_ANY_DEVICE: list[tuple[str, Problem]] = [
    *((name, problem) for name, problem in RIGHT if name.startswith("trace-")),
    ("trace-xqa", gqa(v_scale=1.0)),
    *(("trace-route", RouteProblem(4, 16, 1 if method == "llama4" else 2, method=method))
      for method in ROUTES),
    ("trace-fused-topk-deepseek", RouteProblem(4, 16, 2, method="deepseek_v3")),
    *((f"trace-{name}-moe", MoEProblem(dtype="bfloat16", hidden=changes.pop("hidden", 64),
                                       inter=changes.pop("inter", 64), **changes))
      for name, changes in WEIGHTS.items()),
]  # fmt: skip


@needs_flashinfer
@pytest.mark.parametrize(("name", "problem"), ON_ANY_DEVICE)
def test_no_tensor_of_a_reference_s_call_is_made_on_another_device(
    name: str, problem: Problem
) -> None:
    """What is made without naming a device lies on the meta device here: mixing is an error."""
    found, inputs = find_implementation(f"flashinfer-{name}"), materialise(problem, "cpu")
    assert found.refusal(problem, Target.here()) is None
    with torch.device("meta"):
        answer = found(inputs)
    devices = {each.device.type for each in answer if isinstance(each, torch.Tensor)}
    assert devices == {"cpu"}


@needs_flashinfer
def test_a_reference_that_the_release_lacks_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(
        "flashinfer.trace.templates.moe._cute_dsl_fused_moe_reference", raising=True
    )
    problem = MoEProblem(dtype="bfloat16", hidden=64, inter=64, quantized="nvfp4")
    found = find_implementation("flashinfer-trace-nvfp4-moe").refusal(problem, Target.here())
    assert found is not None
    assert (found.code, "has no _cute_dsl_fused_moe_reference" in found) == ("package", True)


def test_bases_of_the_logarithm() -> None:
    lse = torch.tensor([0.0, 1.0, -2.5, -math.inf], dtype=torch.float64)
    base_2 = to_base_2(lse)
    assert base_2.dtype == torch.float32
    assert base_2[1].item() == pytest.approx(1 / math.log(2))
    torch.testing.assert_close(to_natural(base_2).double(), lse, rtol=1e-6, atol=0)


class TestLoopVariables:
    def test_one_can_be_cast_and_is_an_integer(self) -> None:
        assert LoopVariable(7).to("int64") == 7
        assert list(range(10))[LoopVariable(3)] == 3

    def test_nothing_changes_for_tensors_of_a_gpu(self) -> None:
        class OnGpu:
            is_cuda = True

        before = sys.modules.copy()
        with castable_loop_variables(OnGpu()):  # type: ignore[arg-type]
            pass
        assert set(before) == set(sys.modules)

    @needs_flashinfer
    def test_the_interpreter_s_loops_are_changed_within_the_context_alone(self) -> None:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        with castable_loop_variables(torch.zeros(1)):
            assert [i.to("int64") for i in interpreter.range(1, 7, 2)] == [1, 3, 5]
        assert not hasattr(interpreter, "range")
