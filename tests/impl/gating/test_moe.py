"""MoE and routing problems ask the support rules before anything is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from kernelproof.ci.support.command import support
from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer.names import ACTIVATION_NAMES, ROUTING_MEMBERS
from kernelproof.impl.gating import CHIPS, Feature, decide
from kernelproof.impl.gating.feature import ACTIVATIONS, ROUTINGS
from kernelproof.impl.gating.of_problem import QUANTISATIONS, feature_of
from kernelproof.impl.targets.optional import missing
from kernelproof.reference import MoEProblem, Problem, RouteProblem
from kernelproof.reference.moe.activations import ACTIVATIONS as ORACLES
from kernelproof.reference.moe.routing_methods import METHODS
from kernelproof.reference.problems.moe import QUANTISED

ABSENT = missing("flashinfer", "flashinfer")
PLAIN = MoEProblem(num_tokens=2, hidden=128, inter=128, num_experts=4, top_k=2, dtype="bfloat16")
HIDDEN: dict[str, Any] = {"quantized_hidden": True}
BLOCKS = replace(PLAIN, quantized="fp8_block", regime="exact_grid", **HIDDEN)


def test_the_gate_knows_every_activation_method_and_format() -> None:
    assert set(ACTIVATIONS) == set(ORACLES)
    assert set(ROUTINGS) == set(METHODS)
    assert set(QUANTISATIONS) == set(QUANTISED)
    assert set(ACTIVATION_NAMES) < set(ACTIVATIONS)
    assert set(ROUTING_MEMBERS) < set(ROUTINGS)


@pytest.mark.parametrize(
    ("backend", "fields", "asked"),
    [
        ("cutlass", {"activation": "relu2"}, {"activation": "relu2"}),
        ("cutlass", {"dtype": "float16"}, {"q_dtype": "float16"}),
        ("cutlass", {"swiglu_parameters": "one"}, {"activation": "swiglu_oai"}),
        ("cutlass", {"quantized": "fp8_tensor", **HIDDEN},
         {"quantisation": "fp8_per_tensor", "q_dtype": "float8_e4m3fn"}),
        ("cutlass", {"quantized": "fp8_block", **HIDDEN}, {"quantisation": "fp8_block"}),
        ("trtllm-gen", {"quantized": "fp8_block", **HIDDEN},
         {"quantisation": "fp8_block", "q_dtype": "float8_e4m3fn"}),
        ("group-gemm", {"quantized": "fp8_channel", **HIDDEN},
         {"quantisation": "fp8_per_channel", "q_dtype": "float8_e4m3fn"}),
        ("trtllm-gen", {"quantized": "nvfp4", **HIDDEN},
         {"quantisation": "nvfp4", "q_dtype": "nvfp4"}),
        ("trtllm-gen", {"quantized": "mxfp4"}, {"quantisation": "mxfp4"}),
        ("cutlass", {"quantized": "mxfp4"}, {"quantisation": "w4a16"}),
        ("cutlass", {"quantized": "mxfp4", **HIDDEN},
         {"quantisation": "mxfp8_mxfp4", "q_dtype": "mxfp8"}),
    ],
)  # fmt: skip
def test_what_a_problem_asks(backend: str, fields: dict[str, Any], asked: dict[str, Any]) -> None:
    wanted = Feature("moe", backend, **{"q_dtype": "bfloat16", **asked})
    assert feature_of(replace(PLAIN, **fields), backend) == wanted


def test_what_routing_asks() -> None:
    problem = RouteProblem(method="minimax2", dtype="float32")
    wanted = Feature("route", "trtllm-gen", q_dtype="float32", routing="minimax2")
    assert feature_of(problem, "trtllm-gen") == wanted


def on(sm: int, version: str) -> Target:
    return Target(sm=sm, flashinfer=version, cuda="13.0", triton="3.9.0", device="cuda")


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
class TestRelu2:
    """vLLM #39825 again, by the call itself: refused before launch, named, with a way out."""

    problem = replace(PLAIN, activation="relu2")

    @pytest.mark.parametrize("sm", [90, 120, 121])
    def test_the_adapter_is_refused_before_launch(self, sm: int) -> None:
        found = find_implementation("flashinfer-cutlass-moe")
        said = str(found.refusal(self.problem, on(sm, "0.6.7.post3")))
        assert said.startswith(
            "the support rules: The 16-bit CUTLASS MoE has no Relu2 case before 0.6.8"
        )
        assert said.endswith("(cutlass-moe-relu2)")
        assert (
            found.refusal(replace(self.problem, activation="silu"), on(sm, "0.6.7.post3")) is None
        )
        assert found.refusal(self.problem, on(sm, "0.6.8")) is None

    def test_triton_is_offered_instead(self) -> None:
        decision = decide(feature_of(self.problem, "cutlass"), on(121, "0.6.7.post3"))
        assert decision.instead == "Use backend='engine-triton'"

    @pytest.mark.parametrize(("version", "said"), [("0.6.7.post3", "refused"), ("0.6.8", "yes")])
    def test_the_command_says_so_too(self, version: str, said: str) -> None:
        words = ["--sm", "121", "--flashinfer", version, "--operation", "moe", "--backend",
                 "cutlass", "--activation", "relu2", "--require"]  # fmt: skip
        printed = " ".join(CliRunner().invoke(support, words).output.split())
        assert said in printed
        assert support.main(words, standalone_mode=False) == (1 if said == "refused" else 0)
        if said == "refused":
            assert "https://github.com/vllm-project/vllm/pull/39825" in printed
            assert "cutlass-moe-relu2" in printed
            assert "Use backend='engine-triton'" in printed


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
@pytest.mark.parametrize(
    ("name", "problem", "allowed", "refused"),
    [
        ("cutlass-moe", PLAIN, (90, "0.6.7"), (86, "0.7.2.post1")),
        ("cutlass-moe", PLAIN, (120, "0.6.7"), (110, "0.6.13")),
        ("cutlass-moe", replace(PLAIN, activation="geglu_tanh"), (90, "0.7.1"), (90, "0.6.13")),
        ("cutlass-moe-fp8-block", BLOCKS,
         (90, "0.6.13"), (100, "0.6.13")),
        ("group-gemm-moe", PLAIN, (80, "0.6.7"), (75, "0.6.7")),
        ("group-gemm-moe", replace(PLAIN, quantized="fp8_tensor", **HIDDEN), (90, "0.6.13"),
         (89, "0.6.13")),
        ("fused-topk-deepseek", RouteProblem(method="deepseek_v3"), (90, "0.6.7"), (80, "0.6.7")),
        ("trtllm-gen-routing", RouteProblem(), (100, "0.7.1"), (100, "0.6.13")),
        ("trtllm-gen-routing", RouteProblem(), (121, "0.7.1"), (90, "0.7.1")),
        ("trtllm-gen-routing", RouteProblem(), (121, "0.7.1"), (107, "0.7.1")),
    ],
)  # fmt: skip
def test_chips_and_releases(
    name: str, problem: Problem, allowed: tuple[int, str], refused: tuple[int, str]
) -> None:
    found = find_implementation(f"flashinfer-{name}")
    assert found.refusal(problem, on(*allowed)) is None
    assert str(found.refusal(problem, on(*refused))).startswith("the support rules: ")


class TestSizesOfExperts:
    """What depends on sizes, which a question may leave out."""

    feature = Feature("moe", "trtllm-gen", quantisation="fp8_block", routing="deepseek_v3")

    @pytest.mark.parametrize(
        ("sizes", "rule"),
        [
            ({}, ""),
            ({"num_experts": 256, "top_k": 8, "intermediate_size": 2048}, ""),
            ({"num_experts": 512, "top_k": 22}, ""),
            ({"top_k": 22}, ""),
            ({"num_experts": 256, "top_k": 9}, "trtllm-moe-fp8-block-top-k-deepseek"),
            ({"num_experts": 512, "top_k": 23}, "trtllm-moe-fp8-block-top-k-deepseek-many"),
            ({"routing": "renormalize", "top_k": 33}, "trtllm-moe-fp8-block-top-k"),
            ({"weights_on_input": True}, "trtllm-moe-weights-on-input"),
        ],
    )
    def test_they_decide_where_they_are_given(self, sizes: dict[str, Any], rule: str) -> None:
        decision = decide(replace(self.feature, **sizes), on(100, "0.6.13"))
        assert (decision.supported, decision.rule if rule else "") == (not rule, rule)

    @pytest.mark.parametrize(
        ("routing", "most", "rule"),
        [
            ("deepseek_v3", 8, "trtllm-moe-fp8-block-top-k-deepseek-0.6.6"),
            ("renormalize_naive", 10, "trtllm-moe-fp8-block-top-k-0.6.6"),
        ],
    )
    def test_an_older_release_routes_to_fewer(self, routing: str, most: int, rule: str) -> None:
        feature = replace(self.feature, routing=routing, num_experts=512)
        assert decide(replace(feature, top_k=most), on(100, "0.6.6")).supported
        assert decide(replace(feature, top_k=most + 1), on(100, "0.6.6")).rule == rule
        assert decide(replace(feature, top_k=most + 1), on(100, "0.6.7")).supported

    @pytest.mark.parametrize("sizes", [{"num_experts": 126}, {"intermediate_size": 704}])
    def test_widths_that_no_kernel_takes_are_not_allowed(self, sizes: dict[str, Any]) -> None:
        assert decide(replace(self.feature, **sizes), on(100, "0.6.13")).status == "unknown"

    def test_weights_on_the_input_need_an_argument_for_them(self) -> None:
        cutlass = Feature("moe", "cutlass", weights_on_input=True)
        assert decide(cutlass, on(90, "0.6.13")).rule == "cutlass-moe-weights-on-input"
        llama4 = Feature(
            "moe",
            "trtllm-gen",
            quantisation="fp8_per_tensor",
            routing="llama4",
            weights_on_input=True,
        )
        assert decide(llama4, on(100, "0.6.13")).supported

    def test_the_command_asks_by_them(self) -> None:
        words = ["--sm", "100", "--backend", "trtllm-gen", "--operation", "moe", "--quantisation",
                 "fp8_block", "--routing", "deepseek_v3", "--num-experts", "256",
                 "--require"]  # fmt: skip
        assert support.main([*words, "--top-k", "8"], standalone_mode=False) == 0
        assert support.main([*words, "--top-k", "9"], standalone_mode=False) == 1

    def test_the_version_of_triton_decides_on_the_engines_kernels_too(self) -> None:
        words = ["--sm", "100", "--backend", "engine-triton", "--operation", "moe", "--require"]
        for version, code in (("3.2.0", 1), ("3.3.0", 0)):
            assert support.main([*words, "--triton", version], standalone_mode=False) == code
        for given, said in (
            (["--triton", "new"], "--triton: 'new' is no version by PEP 440"),
            (["--triton", "3.3.0", "--declared", "0.6.7"], "--triton does not go with --declared"),
        ):
            assert said in CliRunner().invoke(support, given).output

    def test_a_negative_size_is_refused(self) -> None:
        with pytest.raises(ValueError, match="top_k is -1; it must be an integer of at least 0"):
            Feature("moe", top_k=-1)


class TestBackendsOfServingStacks:
    """DeepGEMM and Marlin, by chip."""

    @pytest.mark.parametrize(
        ("backend", "fields", "chips"),
        [
            ("deep-gemm", {"quantisation": "fp8_block"}, {90, 100, 103, 120, 121}),
            ("deepgemm", {"quantisation": "mxfp8"}, {100, 103}),
            ("deep_gemm", {"quantisation": "nvfp4"}, set()),
            ("deep-gemm", {"quantisation": "fp8_block", "hidden_size": 2880}, set()),
            (
                "marlin",
                {"quantisation": "nvfp4"},
                {80, 86, 87, 89, 90, 100, 103, 110, 120, 121},
            ),
            ("marlin", {"quantisation": "none"}, set()),
            ("marlin", {"quantisation": "w4a8"}, {89, 120, 121}),
            ("marlin", {"quantisation": "nvfp4", "q_dtype": "fp8"}, set()),
        ],
    )
    def test_chips_decide(self, backend: str, fields: dict[str, Any], chips: set[int]) -> None:
        feature = Feature("moe", backend, **fields)
        assert {sm for sm in CHIPS if decide(feature, on(sm, "0.7.2.post1")).supported} == chips

    def test_narrow_experts_are_for_triton(self) -> None:
        feature = Feature("moe", "deep-gemm", quantisation="fp8_block", intermediate_size=512)
        decision = decide(feature, on(90, "0.7.2.post1"))
        assert decision.rule == "deep-gemm-moe-narrow-experts"
        assert "engine-triton" in {each.backend for each in decision.alternatives}
        assert decide(replace(feature, intermediate_size=640), on(90, "0.7.2.post1")).supported


class TestDtypesOfBiases:
    """A question may name the dtypes of two biases."""

    @pytest.mark.parametrize(
        ("fields", "rule"),
        [
            ({}, ""),
            ({"routing_bias_dtype": "bf16"}, ""),
            ({"routing_bias_dtype": "fp32"}, ""),
            ({"routing_bias_dtype": "fp16"}, "trtllm-moe-routing-bias-float16"),
            ({"bias_dtype": "float32"}, ""),
            ({"bias_dtype": "bfloat16"}, "trtllm-moe-bias-dtype"),
        ],
    )
    def test_trtllm_gen(self, fields: dict[str, Any], rule: str) -> None:
        feature = Feature("moe", "trtllm-gen", quantisation="fp8_block", routing="deepseek_v3")
        decision = decide(replace(feature, **fields), on(100, "0.6.13"))
        assert (decision.supported, decision.rule if rule else "") == (not rule, rule)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_cutlass_takes_the_dtype_of_its_output(self, dtype: str) -> None:
        for bias in ("", "float16", "bfloat16", "float32"):
            feature = Feature("moe", "cutlass", q_dtype=dtype, bias_dtype=bias)
            assert decide(feature, on(90, "0.6.13")).supported == (bias in ("", dtype))

    def test_what_is_no_dtype_of_a_bias_is_refused(self) -> None:
        with pytest.raises(ValueError, match="bias_dtype is 'nvfp4'; it must be one of"):
            Feature("moe", bias_dtype="nvfp4")

    def test_the_command_asks_by_them(self) -> None:
        words = ["--sm", "100", "--backend", "trtllm-gen", "--operation", "moe", "--quantisation",
                 "fp8_block", "--routing", "deepseek_v3", "--require"]  # fmt: skip
        for given, code in (("bf16", 0), ("fp16", 1)):
            asked = [*words, "--routing-bias-dtype", given]
            assert support.main(asked, standalone_mode=False) == code
