"""The support rules against what was reported: each fault refused, and what came after it not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kernelproof.impl.gating import (
    Decision,
    Feature,
    Target,
    UnsupportedError,
    decide,
    load_rules,
    require,
)
from kernelproof.impl.gating.decision import engine_backends

CHIPS = (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)
DATACENTRE_BLACKWELL = (100, 103, 107)
NEWEST = "0.7.2.post1"
LEAST_REPORTS = 20

BF16 = "bfloat16"
FP8 = "float8_e4m3fn"


def on(sm: int, flashinfer: str = NEWEST, cuda: str | None = None) -> Target:
    """Return a machine."""
    return Target(sm=sm, flashinfer=flashinfer, cuda=cuda)


def refused(feature: Feature, target: Target, *words: str, rule: str = "") -> Decision:
    """Decide, and check that it is refused, in words, with alternatives that are supported."""
    decision = decide(feature, target)
    assert decision.status == "refused", decision
    assert not rule or decision.rule == rule, decision
    for word in words:
        assert word in decision.reason, decision
    for other in decision.alternatives:
        assert decide(other, target).supported, other
    with pytest.raises(UnsupportedError) as raised:
        require(feature, target)
    engines = engine_backends(feature)
    assert str(raised.value) == str(decide(feature, target, backends=engines))
    return decision


def not_supported(feature: Feature, target: Target) -> Decision:
    """Decide, and check that nothing allows it, whether or not a rule refuses it by name."""
    decision = decide(feature, target)
    assert not decision.supported, decision
    assert all(decide(other, target).supported for other in decision.alternatives)
    return decision


def supported(feature: Feature, target: Target) -> Decision:
    """Decide, and check that it is supported."""
    decision = require(feature, target)
    assert decision.supported
    return decision


class TestHangOfTrtllmGenOnGB300:
    """vLLM #38730, FlashInfer #2939: the binaries of one release deadlock on SM103."""

    feature = Feature(backend="trtllm-gen", kv_layout="HND", group_size=8)

    @pytest.mark.parametrize("version", ["0.6.7", "0.6.7.post1", "0.6.7.dev20260401"])
    @pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
    def test_refused_in_between(self, version: str, phase: str) -> None:
        decision = refused(
            replace(self.feature, phase=phase),
            on(103, version),
            "deadlock on SM103",
            "0.6.7.post2",
            rule="trtllm-gen-sm103-hang",
        )
        assert decision.alternatives[0].backend == "fa2"
        assert "flashinfer/issues/2939" in decision.source

    @pytest.mark.parametrize("version", ["0.6.6", "0.6.7.post2", "0.6.7.post3", "0.6.8", NEWEST])
    def test_supported_before_and_after(self, version: str) -> None:
        supported(self.feature, on(103, version))

    @pytest.mark.parametrize("version", ["0.6.6", "0.6.7", "0.6.7.post1", "0.6.7.post2", "0.6.8"])
    def test_sm100_never_hung(self, version: str) -> None:
        supported(self.feature, on(100, version))

    @pytest.mark.parametrize("version", ["0.6.6", "0.6.7", "0.6.15.post1"])
    def test_the_family_is_not_the_chip(self, version: str) -> None:
        not_supported(self.feature, on(107, version))

    def test_the_binaries_decide_where_they_are_known(self) -> None:
        bad = (("TRTLLM_GEN_FMHA", "e7afc4134bb53eaab63fb85163d5943fb190621c"),)
        good = (("TRTLLM_GEN_FMHA", "55bba55929d4093682e32d817bd11ffb0441c749"),)
        refused(self.feature, Target(sm=103, flashinfer="0.6.8", artifacts=bad))
        supported(self.feature, Target(sm=103, flashinfer="0.6.7", artifacts=good))

    @pytest.mark.parametrize("operation", ["ragged_attention", "mla"])
    def test_all_of_the_binaries(self, operation: str) -> None:
        latent = operation == "mla"
        feature = Feature(
            operation,
            "trtllm-gen",
            phase="decode" if latent else "prefill",
            page_size=32,
            head_dim_qk=576 if latent else 192,
            head_dim_vo=512 if latent else 128,
        )
        supported(feature, on(103, "0.6.6"))
        refused(feature, on(103, "0.6.7"), "deadlock")
        supported(feature, on(103, "0.6.7.post2"))


class TestHeadDim512:
    """vLLM #38822 advertised head dim 512 on every chip; the kernels came one by one."""

    feature = Feature(head_dim_qk=512, kv_layout="HND", page_size=32, group_size=8)

    @pytest.mark.parametrize(
        ("sm", "backend", "last_without", "first"),
        [
            (100, "trtllm-gen", "0.6.9", "0.6.10"),
            (103, "trtllm-gen", "0.6.9", "0.6.10"),
            (80, "fa2", "0.6.14", "0.6.15"),
            (86, "fa2", "0.6.14", "0.6.15"),
            (89, "fa2", "0.6.14", "0.6.15"),
            (90, "fa2", "0.6.14", "0.6.15"),
            (100, "fa2", "0.6.13", "0.6.14"),
            (120, "fa2", "0.6.13", "0.6.14"),
            (121, "fa2", "0.6.13", "0.6.14"),
            (120, "xqa", "0.6.17", "0.6.18"),
            (121, "xqa", "0.6.17", "0.6.18"),
        ],
    )
    def test_since_when(self, sm: int, backend: str, last_without: str, first: str) -> None:
        feature = replace(self.feature, backend=backend)
        decision = refused(feature, on(sm, last_without), "0.6.")
        assert decision.alternatives
        supported(feature, on(sm, first))

    @pytest.mark.parametrize("backend", ["trtllm-gen", "xqa", "fa3"])
    @pytest.mark.parametrize("sm", [80, 86, 89, 90])
    def test_never_on_older_chips(self, sm: int, backend: str) -> None:
        decision = not_supported(replace(self.feature, backend=backend), on(sm))
        assert decision.alternatives[0].backend == "fa2"

    def test_fp8_cache_came_later(self) -> None:
        feature = replace(self.feature, backend="fa2", kv_dtype=FP8)
        supported(feature, on(120, "0.6.14"))
        not_supported(feature, on(90, "0.6.18"))
        supported(feature, on(90, "0.7.1"))

    @pytest.mark.parametrize("query_len", [1, 4])
    def test_up_to_32_query_rows(self, query_len: int) -> None:
        feature = replace(self.feature, backend="trtllm-gen", query_len=query_len)
        supported(feature, on(100, "0.6.11.post1"))

    @pytest.mark.parametrize("sm", DATACENTRE_BLACKWELL[:2])
    def test_fp8_that_is_stored_as_bytes(self, sm: int) -> None:
        """The second half of #38822: FlashInfer took vLLM's uint8 cache for NVFP4."""
        feature = replace(
            self.feature, backend="trtllm-gen", q_dtype=FP8, kv_dtype=FP8, kv_storage="uint8"
        )
        decision = refused(
            feature,
            on(sm, "0.6.11.post3"),
            "NVFP4",
            ".view(torch.float8_e4m3fn)",
            rule="fp8-stored-as-uint8",
        )
        assert decision.alternatives[0] == replace(feature, kv_storage="")
        supported(replace(feature, kv_storage=""), on(sm, "0.6.11.post3"))

    def test_uint8_alone_is_ambiguous(self) -> None:
        with pytest.raises(ValueError, match="does not say what the bytes hold"):
            replace(self.feature, kv_dtype="uint8")


class TestNvfp4CacheAtStart:
    """vLLM #43669: the engine started on SM120 and died at the first request."""

    feature = Feature(
        backend="trtllm-gen", q_dtype=FP8, kv_dtype="nvfp4", kv_storage="uint8", kv_layout="HND"
    )

    @pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
    @pytest.mark.parametrize("sm", [80, 86, 89, 90, 120, 121])
    @pytest.mark.parametrize("version", ["0.6.8", "0.6.13", NEWEST])
    def test_refused_with_something_to_use(self, sm: int, version: str, phase: str) -> None:
        feature = replace(self.feature, phase=phase)
        decision = refused(
            feature, on(sm, version), "NVFP4", "SM103", rule="trtllm-gen-nvfp4-kv-other-chips"
        )
        assert decision.alternatives
        assert decision.alternatives[0].phase == phase

    @pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
    @pytest.mark.parametrize("sm", [100, 103])
    def test_supported_on_datacentre_blackwell(self, sm: int, phase: str) -> None:
        feature = replace(self.feature, phase=phase)
        not_supported(feature, on(sm, "0.6.6"))
        supported(feature, on(sm, "0.6.8"))

    def test_not_with_sinks(self) -> None:
        not_supported(replace(self.feature, sinks=True), on(100))

    @pytest.mark.parametrize("sm", [80, 86, 89, 90])
    def test_fa2_reads_it_on_older_chips(self, sm: int) -> None:
        feature = Feature(backend="fa2", phase="mixed", kv_dtype="nvfp4", kv_storage="uint8")
        earlier = not_supported(feature, on(sm, "0.6.9")).alternatives[0]
        assert (earlier.backend, earlier.kv_dtype) == ("triton", "nvfp4")
        supported(feature, on(sm, "0.6.10"))
        alternative = not_supported(replace(feature, backend="trtllm-gen"), on(sm)).alternatives[0]
        assert alternative == feature

    @pytest.mark.parametrize("sm", [120, 121])
    def test_xqa_decodes_it_on_small_blackwell(self, sm: int) -> None:
        feature = Feature(backend="xqa", kv_dtype="nvfp4", kv_storage="uint8")
        not_supported(feature, on(sm, "0.6.6"))
        supported(feature, on(sm, "0.6.7"))
        not_supported(replace(feature, phase="prefill"), on(sm))

    @pytest.mark.parametrize("sm", [90, 100, 103])
    def test_xqa_does_not_elsewhere(self, sm: int) -> None:
        not_supported(Feature(backend="xqa", kv_dtype="nvfp4", kv_storage="uint8"), on(sm))


class TestRelu2:
    """vLLM #39825: a case missing in the 16-bit CUTLASS MoE, seen on SM121."""

    feature = Feature("moe", "cutlass", activation="relu2")

    @pytest.mark.parametrize("version", ["0.6.6", "0.6.7", "0.6.7.post2", "0.6.7.post3"])
    @pytest.mark.parametrize("sm", [90, 100, 120, 121])
    def test_missing_on_every_chip(self, sm: int, version: str) -> None:
        decision = refused(
            self.feature, on(sm, version), "no Relu2 case before 0.6.8", rule="cutlass-moe-relu2"
        )
        assert decision.alternatives[0].backend == "engine-triton"

    @pytest.mark.parametrize("version", ["0.6.8", "0.6.8.post1", NEWEST])
    @pytest.mark.parametrize("sm", [90, 100, 120, 121])
    def test_there_from_0_6_8(self, sm: int, version: str) -> None:
        supported(self.feature, on(sm, version))

    @pytest.mark.parametrize("quantisation", ["fp8_per_tensor", "nvfp4"])
    def test_quantised_weights_had_it(self, quantisation: str) -> None:
        supported(replace(self.feature, quantisation=quantisation), on(121, "0.6.7"))

    def test_swiglu_was_never_concerned(self) -> None:
        supported(replace(self.feature, activation="swiglu"), on(121, "0.6.7"))


class TestMixedBatch:
    """vLLM #39546: prefills and decodes in one batch, by the kernels that trtllm chooses."""

    @pytest.mark.parametrize("sm", CHIPS)
    def test_trtllm_gen(self, sm: int) -> None:
        feature = Feature(backend="trtllm-gen", phase="mixed", kv_layout="HND")
        if sm in DATACENTRE_BLACKWELL:
            supported(feature, on(sm))
        else:
            refused(feature, on(sm), "SM100, SM103 and SM107 alone")

    @pytest.mark.parametrize("sm", CHIPS)
    def test_xqa_decodes_only(self, sm: int) -> None:
        feature = Feature(backend="xqa", phase="mixed")
        decision = not_supported(feature, on(sm))
        if sm in (90, 120, 121):
            supported(replace(feature, phase="decode"), on(sm))
            assert "the prefill part of a mixed batch" in decision.reason
            assert decision.alternatives[0].backend == {90: "fa3"}.get(sm, "fa2")

    @pytest.mark.parametrize("sm", [chip for chip in CHIPS if chip not in (75, 107)])
    def test_some_backend_takes_it_on_every_chip(self, sm: int) -> None:
        feature = Feature(phase="mixed")
        for version in ("0.6.6", "0.6.7", "0.6.13", NEWEST):
            chosen = supported(feature, on(sm, version)).feature
            assert chosen.backend in ("trtllm-gen", "fa3", "fa2")

    def test_one_part_is_enough_to_refuse(self) -> None:
        """16-bit queries with an FP8 cache: trtllm-gen has kernels for decode alone."""
        feature = Feature(backend="trtllm-gen", kv_dtype=FP8)
        supported(feature, on(100))
        decision = not_supported(replace(feature, phase="mixed"), on(100))
        assert "the prefill part of a mixed batch" in decision.reason


@dataclass(frozen=True)
class Scenario:
    """A report: what it bites, where, and the nearest thing that it does not bite.

    Attributes:
        rule: id of the rule that must decide.
        issue: a report that the rule must name.
        feature, before: what is refused, and where.
        after: where the same is not refused by that rule.
        otherwise: what is asked there, where it is something else.
        expected: the status then.
    """

    rule: str
    issue: str
    feature: Feature
    before: Target
    after: Target
    otherwise: Feature | None = None
    expected: str = "supported"


def fa2(**asked: Any) -> Feature:  # noqa: ANN401  fields of a Feature
    """Ask FA2."""
    return Feature(backend="fa2", **asked)


def trtllm(**asked: Any) -> Feature:  # noqa: ANN401  fields of a Feature
    """Ask trtllm-gen, with the layout and about the group size of who uses it."""
    return Feature(backend="trtllm-gen", kv_layout="HND", **{"group_size": 8, **asked})


LATENT_96 = Feature(
    "mla", "trtllm-gen", head_dim_qk=576, head_dim_vo=512, page_size=64, group_size=96
)
DEEPSEEK_RAGGED = Feature("ragged_attention", "trtllm-gen", "prefill", 192, 128)
CUDA_CORE = Feature(backend="cuda-core")
MOE = Feature("moe", "cutlass")
NVFP4_MOE = Feature("moe", "trtllm-gen", quantisation="nvfp4")
SCENARIOS = (
    # Attention by trtllm-gen and XQA.
    Scenario("trtllm-gen-sm103-hang", "FI#2939", trtllm(), on(103, "0.6.7.post1"),
             on(103, "0.6.7.post2")),
    Scenario("trtllm-gen-other-chips", "S#36716", trtllm(), on(121), on(100)),
    Scenario("trtllm-gen-other-chips", "FI#5445", trtllm(), on(120), on(120),
             Feature(backend="xqa", group_size=8)),
    Scenario("trtllm-gen-head-dim-512-query-rows", "FI#3343",
             trtllm(head_dim_qk=512, query_len=8), on(100, "0.6.11.post1"),
             on(100, "0.6.14")),
    Scenario("trtllm-gen-head-dim-512-query-rows", "FI#3511",
             trtllm(head_dim_qk=512, query_len=16, page_size=64), on(100, "0.6.11.post1"),
             on(100, "0.6.14")),
    Scenario("trtllm-gen-pages-above-128", "FI#4347", trtllm(page_size=256),
             on(100, "0.6.16.post1"), on(100, "0.6.18")),
    Scenario("trtllm-gen-large-pages-group-size", "FI#4094", trtllm(page_size=128, group_size=1),
             on(100, "0.6.15"), on(100, "0.6.16")),
    Scenario("mla-trtllm-gen-heads", "TRT#18164", LATENT_96, on(100), on(100),
             replace(LATENT_96, group_size=128)),
    Scenario("trtllm-gen-head-dim-512-query-rows-fp8", "V#48082",
             trtllm(head_dim_qk=512, query_len=8, q_dtype=FP8), on(100, "0.6.13"),
             on(100, "0.6.13"), trtllm(head_dim_qk=512, query_len=4, q_dtype=FP8)),
    Scenario("trtllm-gen-long-speculation", "FI#4382",
             trtllm(head_dim_qk=256, query_len=6), on(100, "0.6.17"),
             on(100, "0.6.18")),
    Scenario("trtllm-gen-speculation-window-fp8-kv", "FI#3864",
             trtllm(head_dim_qk=256, group_size=2, query_len=8, window=True,
                     kv_dtype=FP8),
             on(100, "0.6.14"), on(100, "0.6.14"),
             trtllm(head_dim_qk=256, group_size=2, query_len=8, window=True,
                     q_dtype=FP8)),
    Scenario("trtllm-gen-ragged-sm103-trap", "FI#4759", DEEPSEEK_RAGGED, on(103, "0.6.17"),
             on(100, "0.6.17")),
    Scenario("xqa-head-dim-512-before-0.6.18", "FI#4546", Feature(backend="xqa", head_dim_qk=512),
             on(120, "0.6.17"), on(120, "0.6.18")),
    # Attention by fa2(), FA3 and CUDA cores.
    Scenario("fa3-fp8-window-hang", "FI#3578",
             Feature(backend="fa3", phase="prefill", q_dtype=FP8, window=True, group_size=8),
             on(90, "0.6.13"), on(90, "0.6.15")),
    Scenario("fa2-head-dim-512-before-0.6.14", "FI#3297", fa2(head_dim_qk=512),
             on(121, "0.6.11"), on(121, "0.6.14")),
    Scenario("fa2-head-dim-512-needs-blackwell-before-0.6.15", "V#49917",
             fa2(head_dim_qk=512), on(86, "0.6.14"), on(86, "0.6.15")),
    Scenario("fa2-head-dim-not-multiple-of-64", "FI#4299", fa2(head_dim_qk=96),
             on(89), on(89), fa2()),
    Scenario("fa2-fp8-kv-head-dim-192", "FI#4976",
             fa2(head_dim_qk=192, head_dim_vo=128, kv_dtype=FP8), on(90), on(90),
             fa2(head_dim_qk=192, head_dim_vo=128)),
    Scenario("fa2-ragged-fp8-scales-ignored", "FI#4979",
             Feature("ragged_attention", "fa2", "prefill", kv_dtype=FP8), on(90, "0.6.18.post1"),
             on(90, "0.7.0")),
    Scenario("fa2-fp8-prefill-sm121-head-dim-256", "V#50331",
             fa2(phase="prefill", head_dim_qk=256, kv_dtype=FP8),
             on(121, "0.6.15.post1"), on(90, "0.6.15.post1")),
    Scenario("fa2-sinks-ignored", "V#52148", fa2(phase="prefill", sinks=True),
             on(121, "0.6.16.post1"), on(100, "0.6.16.post1"),
             trtllm(phase="prefill", sinks=True)),
    Scenario("fa2-sm75-shared-memory", "FI#3620", fa2(phase="prefill", q_dtype="float16"),
             on(75, "0.6.12"), on(75, "0.6.16")),
    Scenario("fa2-sm75-fp8-kv", "V#47549", fa2(q_dtype="float16", kv_dtype=FP8),
             on(75, "0.6.13"), on(80, "0.6.13")),
    Scenario("cuda-core-group-size", "FI#996", replace(CUDA_CORE, group_size=7), on(89), on(89),
             fa2(group_size=7)),
    Scenario("cuda-core-group-size-6", "FI#2986", replace(CUDA_CORE, group_size=6),
             on(90, "0.6.17"), on(90, "0.6.18")),
    Scenario("cuda-core-group-size-16", "FI#3563", replace(CUDA_CORE, group_size=16),
             on(120, "0.6.12"), on(120, "0.7.1")),
    Scenario("jit-sm120-needs-cuda-12.9", "V#50705", fa2(), on(120, "0.6.13", "12.8"),
             on(120, "0.6.13", "12.9")),
    # KV caches
    Scenario("fp8-stored-as-uint8", "V#38822",
             trtllm(q_dtype=FP8, kv_storage="uint8"), on(100, "0.6.11.post3"),
             on(100, "0.6.11.post3"), trtllm(q_dtype=FP8)),
    Scenario("trtllm-gen-nvfp4-kv-other-chips", "V#43562",
             trtllm(q_dtype=FP8, kv_dtype="nvfp4"), on(120, "0.6.12"),
             on(100, "0.6.12")),
    Scenario("fa2-nvfp4-kv-sm12x-split", "FI#4749", fa2(kv_dtype="nvfp4"),
             on(121, "0.6.18"), on(121, "0.7.0")),
    Scenario("append-nvfp4-swizzled-scales", "V#50084",
             Feature("append_paged_kv", "cuda", kv_dtype="nvfp4"), on(120, "0.6.14"),
             on(120, "0.6.15")),
    # MoE
    Scenario("cutlass-moe-relu2", "V#39825", replace(MOE, activation="relu2"),
             on(121, "0.6.7.post3"), on(121, "0.6.8")),
    Scenario("cutlass-moe-unquantised-sm110", "FI#3134", MOE, on(110, "0.6.8.post1"),
             on(100, "0.6.8.post1")),
    Scenario("cutlass-moe-w4a16-race", "FI#5438", replace(MOE, quantisation="w4a16"),
             on(90, "0.6.12"), on(90, "0.6.16")),
    Scenario("cutlass-moe-nvfp4-sm12x-garbage", "FI#2723", replace(MOE, quantisation="nvfp4"),
             on(120, "0.6.6"), on(120, "0.6.7")),
    Scenario("cutlass-moe-nvfp4-sm120-tactics", "FI#4841", replace(MOE, quantisation="nvfp4"),
             on(120, "0.6.18"), on(120, "0.6.18"),
             Feature("moe", "b12x", quantisation="nvfp4")),
    Scenario("trtllm-moe-nvfp4-hang-0.6.8", "FI#3279", NVFP4_MOE, on(100, "0.6.8.post1"),
             on(100, "0.6.7")),
    Scenario("trtllm-moe-nvfp4-hang-0.6.14", "FI#3971", NVFP4_MOE, on(103, "0.6.14"),
             on(103, "0.6.15")),
    Scenario("trtllm-moe-nvfp4-tile-192-nan", "FI#4486", NVFP4_MOE, on(100, "0.6.17"),
             on(100, "0.6.18")),
    Scenario("trtllm-moe-mxfp4-hang-sm103", "S#34340",
             Feature("moe", "trtllm-gen", quantisation="mxfp4"), on(103, "0.6.15.post1"),
             on(100, "0.6.15.post1")),
    Scenario("serving-stack-triton-moe-fp8-before-sm89", "V#54219",
             Feature("moe", "engine-triton", quantisation="fp8_block"), on(80), on(89)),
    Scenario("trtllm-moe-fp8-block-renormalize", "FI#2822",
             Feature("moe", "trtllm-gen", quantisation="fp8_block"), on(100, "0.6.6"),
             on(100, "0.6.7")),
    Scenario("trtllm-moe-sm12x", "FI#3294", NVFP4_MOE, on(121, "0.6.11"), on(121, "0.6.11"),
             Feature("moe", "b12x", quantisation="nvfp4")),
    Scenario("trtllm-moe-sm110", "FI#3344", replace(NVFP4_MOE, quantisation="fp8_per_tensor"),
             on(110), on(110), replace(MOE, quantisation="fp8_per_tensor")),
    Scenario("cute-dsl-moe-sm12x-moe-utils", "FI#5237",
             Feature("moe", "cute-dsl", quantisation="nvfp4"), on(121, "0.6.18"),
             on(100, "0.6.18")),
)  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda case: f"{case.issue}-{case.rule}")
def test_before_and_after(scenario: Scenario) -> None:
    """What was reported is refused for that reason, and the nearest that was not is allowed."""
    rule = load_rules().find(scenario.rule)
    assert rule is not None
    assert scenario.issue in rule.issues
    refused(scenario.feature, scenario.before, rule.reason, rule=scenario.rule)
    after = decide(scenario.otherwise or scenario.feature, scenario.after)
    assert after.status == scenario.expected, after


def test_each_report_has_a_scenario() -> None:
    """A rule on a report that no scenario shows may as well say nothing."""
    reported = {rule.id for rule in load_rules().rules if rule.issues}
    assert reported == {scenario.rule for scenario in SCENARIOS}


def test_reports_are_many_and_named() -> None:
    """At least twenty real reports, each refusal with one, each permission's source public."""
    rules = load_rules().rules
    reports = {issue for rule in rules for issue in rule.issues}
    assert len(reports) >= LEAST_REPORTS
    assert len({scenario.rule for scenario in SCENARIOS}) >= LEAST_REPORTS
    for rule in rules:
        # What a report says, the release's own choice of a kernel may bear out.
        assert rule.issues or rule.evidence != "reported", rule.id
        assert not rule.issues or rule.evidence in {"reported", "selected"}, rule.id
        begins = ("https://", "flashinfer-python ", "vLLM ", "kernelproof: ")
        assert rule.source.startswith(begins), rule.id
        assert not rule.reason.endswith("."), rule.id


class TestSeveralQueryTokensADecode:
    """Verify steps of speculative decoding, draft trees, and what an engine pads them with."""

    verify = fa2(query_len=4, group_size=4)

    def test_the_decode_wrapper_takes_them_from_a_release_on(self) -> None:
        for version, rule in (("0.6.12", "decode-wrapper-one-query-before-0.6.13"),
                              ("0.6.15.post1", "fa2-decode-queries-dropped")):  # fmt: skip
            decision = refused(self.verify, on(80, version), rule=rule)
            assert replace(self.verify, phase="prefill") in decision.alternatives
            supported(fa2(phase="prefill", mask="tree"), on(80, version))
        supported(self.verify, on(80, "0.6.16"))
        for other in ("cuda-core", "fa3"):
            refused(replace(self.verify, backend=other), on(90), "on FA2 alone")

    def test_of_different_numbers_it_takes_none(self) -> None:
        ragged = replace(self.verify, ragged_queries=True)
        refused(ragged, on(120), rule="decode-wrapper-ragged-queries")
        xqa = replace(ragged, backend="xqa")
        refused(xqa, on(120, "0.6.15.post1"), rule="xqa-ragged-queries-before-0.6.16")
        for chip, backend in ((90, "xqa"), (121, "xqa"), (103, "trtllm-gen")):
            supported(replace(ragged, backend=backend), on(chip))

    def test_padded_requests_need_as_many_keys_as_tokens(self) -> None:
        for padding in ("few_keys", "no_keys"):
            padded = replace(self.verify, padding=padding)
            refused(padded, on(86), rule="fa2-decode-fewer-keys-than-queries")
            supported(replace(padded, query_len=1), on(86))
        for mask in ("custom", "tree"):
            masked = fa2(phase="prefill", mask=mask, padding="no_keys")
            refused(masked, on(90), rule="fa2-mask-request-without-keys")
            supported(replace(masked, padding="no_query"), on(90))

    def test_draft_trees(self) -> None:
        refused(replace(self.verify, mask="tree"), on(90), rule="decode-wrapper-mask")
        xqa = replace(self.verify, backend="xqa", mask="tree")
        for chip in (90, 100, 120, 121):
            supported(xqa, on(chip, "0.6.13"))
        for asked in (replace(xqa, window=True), replace(xqa, query_len=17)):
            not_supported(asked, on(90))
        for backend in ("trtllm-gen", "fa3"):
            not_supported(replace(xqa, backend=backend), on(90))
        window = replace(xqa, mask="causal", window=True)
        refused(window, on(90, "0.6.15"), rule="xqa-window-several-queries")
        supported(window, on(90, "0.6.16"))

    def test_latent_attention(self) -> None:
        latent = Feature(
            "mla",
            "trtllm-gen",
            head_dim_qk=576,
            head_dim_vo=512,
            page_size=64,
            group_size=128,
            query_len=4,
            ragged_queries=True,
        )
        rule = "mla-trtllm-gen-ragged-queries-before-0.6.14"
        refused(latent, on(100, "0.6.13"), rule=rule)
        supported(latent, on(100, "0.6.14"))
        for backend in ("fa2", "fa3"):
            supported(replace(latent, backend=backend), on(90))
        not_supported(replace(latent, backend="cutlass"), on(100))

    @pytest.mark.parametrize("sm", CHIPS)
    def test_each_chip_has_an_answer(self, sm: int) -> None:
        """Where FA2 runs, so does a verify step; SM75 takes float16, SM107 came with 0.7.1."""
        for mask, phase in (("causal", "decode"), ("tree", "prefill")):
            asked = fa2(query_len=4, mask=mask, phase=phase, q_dtype="float16")
            supported(asked, on(sm))
