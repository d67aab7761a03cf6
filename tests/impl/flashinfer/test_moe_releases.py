"""Adapters of FlashInfer's MoE and routing against several releases, without a GPU.

A stand-in binds each call to the signature of the release, and computes what the real function
would by FlashInfer's own conventions: the gate in the second half, experts of a rank by ep_rank,
scales in ``quant_scales``. The numbers of its enums are permuted: who passes a number is wrong.
"""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernelproof.impl import Target, UnsupportedError, find_implementation
from kernelproof.impl.flashinfer import (
    calls as flashinfer_calls,
)
from kernelproof.impl.flashinfer import (
    moe as flashinfer_moe,
)
from kernelproof.impl.flashinfer import (
    names as flashinfer_names,
)
from kernelproof.impl.flashinfer import (
    routing as flashinfer_routing,
)
from kernelproof.impl.flashinfer.names import (
    ACTIVATION_NAMES,
    ROUTING_MEMBERS,
    activation_member,
    routing_member,
)
from kernelproof.reference import MoEProblem, RouteProblem, Routing, materialise, oracle, route
from kernelproof.reference.tensors.moe_inputs import MoEInputs, RouteInputs

SIGNATURES: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text(encoding="utf-8")
)
MODULES = (flashinfer_calls, flashinfer_moe, flashinfer_routing)


def permuted(name: str, members: Iterable[str], first: int) -> Any:  # noqa: ANN401  an enum
    """Make an enum of theirs whose numbers are none of those that any release has."""
    return enum.IntEnum(name, [(member, first + i) for i, member in enumerate(sorted(members))])


Activation = permuted("ActivationType", ACTIVATION_NAMES.values(), 40)
RoutingMethod = permuted("RoutingMethodType", ROUTING_MEMBERS.values(), 70)
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Silu": functional.silu,
    "Gelu": functional.gelu,
    "Relu": functional.relu,
    "Relu2": lambda x: functional.relu(x).square(),
    "Identity": lambda x: x,
}
GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Geglu": functional.gelu,
    "GegluTanh": lambda x: functional.gelu(x, approximate="tanh"),
}


OPTIONAL = ("fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit")


class Release:
    """Stands for flashinfer, its modules and its wrappers."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def bind(self, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
        """Bind a call to the release's signature; everything is to be given by keyword."""
        parameters = [
            inspect.Parameter(
                each.strip("="),
                inspect.Parameter.KEYWORD_ONLY,
                default=None if each.endswith("=") else inspect.Parameter.empty,
            )
            for each in SIGNATURES[self.version][name]
            if each != "self"
        ]
        given = inspect.Signature(parameters).bind(**keywords)
        self.calls.append((name, dict(given.arguments)))
        given.apply_defaults()
        return given.arguments

    def cutlass_fused_moe(self, **keywords: Any) -> list[torch.Tensor]:  # noqa: ANN401
        given = self.bind("fused_moe.cutlass_fused_moe", keywords)
        assert isinstance(given["activation_type"], Activation)
        given["output"].copy_(fused(given))
        return [given["output"]]

    def trtllm_fp8_block_scale_routed_moe(self, **keywords: Any) -> None:  # noqa: ANN401
        given = self.bind("fused_moe.trtllm_fp8_block_scale_routed_moe", keywords)
        ids, weights = given["topk_ids"]
        scales = given["hidden_states_scale"].T.repeat_interleave(128, 1)
        assert given["gemm1_weights"].shape[1] == 2 * given["intermediate_size"]
        states = given["hidden_states"].float() * scales
        given["output"].copy_(
            fused({
                "input": states.bfloat16(),
                "fc1_expert_weights": given["gemm1_weights"],
                "fc2_expert_weights": given["gemm2_weights"],
                "quant_scales": [given["gemm1_weights_scale"], given["gemm2_weights_scale"]],
                "use_deepseek_fp8_block_scale": True,
                "token_selected_experts": ids - given["local_expert_offset"],
                "token_final_scales": weights,
                "ep_rank": 0,
                "ep_size": given["num_experts"],
                "activation_type": Activation["Swiglu"],
                **dict.fromkeys(OPTIONAL),
            })
        )  # fmt: skip

    def cute_dsl_fused_moe_bf16(self, **keywords: Any) -> None:  # noqa: ANN401
        given = self.bind("fused_moe.cute_dsl_fused_moe_bf16", keywords)
        member = given["activation_type"] or Activation["Swiglu"]
        assert isinstance(member, Activation)
        first = given["w1_weight"]
        if member.name not in UNGATED:  # 32 ups, 32 gates, ...
            first = first.unflatten(1, (-1, 2, 32)).transpose(1, 2).flatten(1, 3)
        numbers = {n: given[n] for n in OPTIONAL if n.startswith("swiglu")}
        experts = given["num_local_experts"]
        given["moe_output"].copy_(
            fused({
                "input": given["x"],
                "fc1_expert_weights": first,
                "fc2_expert_weights": given["w2_weight"],
                "quant_scales": None,
                "use_deepseek_fp8_block_scale": False,
                "token_selected_experts":
                    given["token_selected_experts"] - given["local_expert_offset"],
                "token_final_scales": given["token_final_scales"],
                "ep_rank": 0,
                "ep_size": given["num_experts"],
                "activation_type": member,
                **dict.fromkeys(OPTIONAL),
                **{n: None if x is None else torch.full((experts,), x)
                   for n, x in numbers.items()},
            })
        )  # fmt: skip

    def fused_topk_deepseek(self, **keywords: Any) -> None:  # noqa: ANN401
        given = self.bind("fused_moe.fused_topk_deepseek", keywords)
        found = route(
            given["scores"],
            given["topk"],
            method="deepseek_v3",
            bias=given["bias"],
            num_groups=given["n_group"],
            topk_groups=given["topk_group"],
            scaling_factor=given["routed_scaling_factor"],
        )
        given["topk_values"].copy_(found.topk_weights)
        given["topk_indices"].copy_(found.topk_ids)

    def trtllm_gen_routing(self, **keywords: Any) -> Any:  # noqa: ANN401
        given = self.bind("fused_moe.trtllm_gen_routing", keywords)
        assert isinstance(given["routing_method"], RoutingMethod)
        ours = {theirs: name for name, theirs in ROUTING_MEMBERS.items()}
        found = route(
            given["routing_logits"],
            given["top_k"],
            method=ours[given["routing_method"].name],
            bias=given["routing_bias"],
            num_groups=given["n_group"] or None,
            topk_groups=given["topk_group"] or None,
            scaling_factor=given["routed_scaling_factor"],
        )
        return SimpleNamespace(topk_ids=found.topk_ids, topk_weights=found.topk_weights.bfloat16())

    def top_k(
        self,
        input: torch.Tensor,  # noqa: A002  FlashInfer's name
        k: int,
        *,
        sorted: bool,  # noqa: A002
        deterministic: bool,
    ) -> Any:  # noqa: ANN401
        assert sorted
        assert deterministic
        return input.topk(k)

    def SegmentGEMMWrapper(self, **options: Any) -> Any:  # noqa: ANN401, N802
        self.bind("gemm.SegmentGEMMWrapper.__init__", options)
        return SimpleNamespace(run=self.segments)

    def segments(self, **keywords: Any) -> torch.Tensor:  # noqa: ANN401
        """Multiply each segment by its weights, without scales."""
        given = self.bind("gemm.SegmentGEMMWrapper.run", keywords)
        x, weights, indptr = given["x"], given["weights"], given["seg_indptr"].tolist()
        assert given["weight_column_major"]
        assert len(indptr) == given["batch_size"] + 1 == len(weights) + 1
        parts = [
            x[start:stop].float() @ w.float().T
            for w, start, stop in zip(weights, indptr, indptr[1:], strict=False)
        ]
        return torch.cat(parts).to(torch.bfloat16 if x.dtype == E4M3 else x.dtype)


def fused(given: dict[str, Any]) -> torch.Tensor:
    """Compute what ``cutlass_fused_moe`` does, in float64, by its conventions."""
    x, first, second = (given[n] for n in ("input", "fc1_expert_weights", "fc2_expert_weights"))
    experts, scales = len(first), given["quant_scales"]
    out = torch.zeros(len(x), second.shape[1], dtype=torch.float64)
    states, w1, w2 = x.double(), first.double(), second.double()
    one, middle_scale = torch.ones(experts, dtype=torch.float64), None
    of_first, of_second = one, one
    if given["use_deepseek_fp8_block_scale"]:
        assert x.dtype == torch.bfloat16
        w1, w2 = (w * blocks(s, w) for w, s in zip((w1, w2), scales, strict=True))
    elif scales:
        of_first, middle_scale, of_second, states_scale = scales
        assert states_scale.dim() == middle_scale.dim() == 0
        assert of_first.shape == of_second.shape == (experts,)
        assert {each.dtype for each in scales} == {torch.float32}
    for token, slot in torch.cartesian_prod(
        torch.arange(len(x)), torch.arange(given["token_selected_experts"].shape[1])
    ).tolist():
        chosen = int(given["token_selected_experts"][token, slot])
        expert = chosen - given["ep_rank"] * experts
        assert chosen < given["ep_size"] * experts
        if not 0 <= expert < experts:
            continue
        projected = w1[expert] @ states[token] * of_first[expert]
        if given["fc1_expert_biases"] is not None:
            projected = projected + given["fc1_expert_biases"][expert].double()
        middle = activate(given, projected, expert)
        if middle_scale is not None:
            codes = (middle * middle_scale).clamp(-LARGEST, LARGEST).to(E4M3)
            middle = codes.double()
        y = w2[expert] @ middle * of_second[expert]
        if given["fc2_expert_biases"] is not None:
            y = y + given["fc2_expert_biases"][expert].double()
        out[token] += given["token_final_scales"][token, slot] * y
    return out


def blocks(scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    assert scales.shape[1:] == tuple(-(-size // 128) for size in like.shape[1:])
    return scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def activate(given: dict[str, Any], x: torch.Tensor, expert: int) -> torch.Tensor:
    name = given["activation_type"].name
    if name in UNGATED:
        return UNGATED[name](x)
    up, gate = x.chunk(2)
    if name in GATED:
        return GATED[name](gate) * up
    assert name == "Swiglu"

    def number(which: str, usual: float) -> float:
        each = given[f"swiglu_{which}"]
        assert each is None or each.dtype == torch.float32
        return usual if each is None else float(each[expert])

    limit = number("limit", torch.inf)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(number("alpha", 1.0) * gate) * (up + number("beta", 0.0))


@pytest.fixture(params=sorted(SIGNATURES))
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    made = Release(request.param)
    for module in MODULES:
        monkeypatch.setattr(module, "flashinfer", lambda *_: made)
    monkeypatch.setattr(flashinfer_calls, "WORKSPACE_BYTES", 64)
    enums = SimpleNamespace(ActivationType=Activation, RoutingMethodType=RoutingMethod)
    monkeypatch.setattr(flashinfer_names, "require", lambda *_: enums)
    flashinfer_calls.wrapper.cache_clear()
    yield made
    flashinfer_calls.wrapper.cache_clear()


PLAIN = MoEProblem(
    num_tokens=6, hidden=32, inter=48, num_experts=6, top_k=3, dtype="bfloat16", assignment="iid"
)
FP8 = replace(PLAIN, quantized="fp8_tensor", quantized_hidden=True)
WHOLE = {"hidden": 128, "inter": 256}


def on(sm: int, version: str, name: str, problem: MoEProblem) -> str | None:
    target = Target(sm=sm, flashinfer=version, cuda="13.0", device="cuda")
    return find_implementation(name).refusal(problem, target)


def judged(name: str, problem: MoEProblem, *, sm: int = 90) -> None:
    """Call an adapter and hold what it gives to its own bound."""
    assert on(sm, "0.7.2.post1", name, problem) is None
    inputs, found = materialise(problem), find_implementation(name)
    assert isinstance(inputs, MoEInputs)
    out = found(inputs)
    expected = oracle.bounded_experts(inputs, found.arithmetic)
    assert out.dtype == inputs.out_dtype
    assert ((out.double() - expected.expected).abs() <= expected.bound).all()


CUTLASS = [{"activation": activation} for activation in ACTIVATION_NAMES] + [
    {"biases": True, "interleaved": True},
    {"biases": True, "swiglu_parameters": "each", "dtype": "float16"},
    {"activation": "swiglu_oai", "swiglu_parameters": "one", "interleaved": True},
    {"local_experts": 2, "expert_offset": 4, "assignment": "masked"},
    {"local_experts": 3, "expert_offset": 3, "activation": "relu2", "biases": True},
    {"regime": "zero_weights"},
]


@pytest.mark.parametrize("fields", CUTLASS, ids=str)
def test_the_fused_moe_is_given_what_it_takes(fields: dict[str, Any], release: Release) -> None:
    judged("flashinfer-cutlass-moe", replace(PLAIN, **fields))
    name, given = release.calls[-1]
    assert name == "fused_moe.cutlass_fused_moe"
    assert given["tune_max_num_tokens"] == 8192
    assert given["quant_scales"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "relu2"},
        {"biases": True, "interleaved": True},
        {"local_experts": 3, "expert_offset": 3, "dtype": "float16"},
        {"quantized": "fp8_block", "regime": "exact_grid", **WHOLE},
        {"quantized": "fp8_block", "regime": "exact_grid", "local_experts": 2, **WHOLE},
        {"quantized": "fp8_block", "regime": "exact_grid", "biases": True, **WHOLE},
    ],
    ids=str,
)
def test_the_fused_moe_in_fp8(fields: dict[str, Any], release: Release) -> None:
    of_blocks = fields.get("quantized") == "fp8_block"
    judged(f"flashinfer-cutlass-moe{'-fp8-block' * of_blocks}", replace(FP8, **fields))
    assert ("use_deepseek_fp8_block_scale" in release.calls[-1][1]) == of_blocks


@pytest.mark.parametrize(
    "fields",
    [
        *({"activation": activation} for activation in (*ACTIVATION_NAMES, "gelu_tanh")),
        {"biases": True, "interleaved": True, "assignment": "duplicates"},
        {"swiglu_parameters": "each", "dtype": "float16"},
        {"swiglu_parameters": "one", "assignment": "one_expert"},
        {"local_experts": 2, "expert_offset": 1, "assignment": "masked"},
        {"num_tokens": 1, "top_k": 1, "local_experts": 1, "assignment": "masked", "seed": 3},
        {"quantized": "fp8_tensor", "quantized_hidden": True},
        {"quantized": "fp8_channel", "quantized_hidden": True, "biases": True},
        {"quantized": "fp8_channel", "quantized_hidden": True, "assignment": "masked"},
    ],
    ids=str,
)
def test_the_group_gemm_is_given_what_it_takes(fields: dict[str, Any], release: Release) -> None:
    judged("flashinfer-group-gemm-moe", replace(PLAIN, **fields))
    assert [name for name, _ in release.calls if "run" in name] in (
        [],
        ["gemm.SegmentGEMMWrapper.run"] * 2,
    )


@pytest.mark.parametrize(
    "fields", [{}, {"local_experts": 3, "expert_offset": 2, "assignment": "masked"}], ids=str
)
def test_trtllm_gens_moe_in_fp8_blocks(fields: dict[str, Any], release: Release) -> None:
    problem = replace(FP8, quantized="fp8_block", **{**WHOLE, **fields})
    name = "flashinfer-trtllm-fp8-block-moe"
    if on(100, release.version, name, problem) is None:
        judged(name, problem, sm=100)
    else:
        assert release.version in ("0.6.7", "0.6.13")
        assert "packed with their ids" in str(on(100, release.version, name, problem))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "relu2"},
        {"activation": "geglu_tanh", "dtype": "float16", "interleaved": True},
        {"activation": "swiglu_oai"},
        {"swiglu_parameters": "one", "local_experts": 2, "expert_offset": 4},
        {"assignment": "masked"},
    ],
    ids=str,
)
def test_cute_dsl_on_hopper(fields: dict[str, Any], release: Release) -> None:
    problem, name = replace(PLAIN, inter=64, **fields), "flashinfer-cute-dsl-moe-bf16"
    refusal = on(90, release.version, name, problem)
    if "fused_moe.cute_dsl_fused_moe_bf16" in SIGNATURES[release.version]:
        assert refusal is None
        judged(name, problem)
    else:
        assert "it came with flashinfer-python 0.7" in str(refusal)


def routed(name: str, problem: RouteProblem) -> None:
    inputs, found = materialise(problem), find_implementation(name)
    assert isinstance(inputs, RouteInputs)
    assert oracle.judge_routing(inputs, Routing(*found(inputs)), found.arithmetic).right


ROUTE = RouteProblem(num_tokens=9, num_experts=32, top_k=4, dtype="bfloat16")


@pytest.mark.parametrize("groups", [(1, 1), (8, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_deepseeks_routing_binds(groups: tuple[int, int], bias: bool, release: Release) -> None:
    problem = replace(
        ROUTE,
        method="deepseek_v3",
        bias=bias,
        num_groups=groups[0],
        topk_groups=groups[1],
        scaling_factor=2.5,
    )
    routed("flashinfer-fused-topk-deepseek", problem)
    assert release.calls[-1][1]["bias"].dtype == torch.float32


@pytest.mark.parametrize("method", ROUTING_MEMBERS)
def test_the_routing_of_trtllm_gen_goes_by_names(method: str, release: Release) -> None:
    name, problem = "flashinfer-trtllm-gen-routing", replace(ROUTE, method=method, top_k=1)
    target = Target(sm=100, flashinfer=release.version, cuda="13.0", device="cuda")
    refusal = find_implementation(name).refusal(problem, target)
    if "fused_moe.trtllm_gen_routing" not in SIGNATURES[release.version]:
        assert "it came with flashinfer-python 0.7.0" in str(refusal)
    else:
        assert refusal is None
        routed(name, problem)


@pytest.mark.parametrize("method", ["renormalize", "default", "sigmoid", "llama4", "minimax2"])
def test_top_k_among_scores(method: str, release: Release) -> None:
    assert release.version
    routed("flashinfer-top-k-route", replace(ROUTE, method=method, bias=method == "minimax2"))


def test_members_are_looked_up_by_name(release: Release) -> None:
    """Whatever their numbers: none of the permuted ones is the real release's."""
    assert release.version
    for ours, theirs in ACTIVATION_NAMES.items():
        assert activation_member(ours) is Activation[theirs]
    for ours, theirs in ROUTING_MEMBERS.items():
        assert routing_member(ours) is RoutingMethod[theirs]
    with pytest.raises(UnsupportedError, match="ActivationType has no member for 'gelu_tanh'"):
        activation_member("gelu_tanh")
    with pytest.raises(UnsupportedError, match="no member for 'deepseek_v4'"):
        routing_member("deepseek_v4")


def test_a_release_without_a_member_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    old = enum.IntEnum("old", ["Swiglu"])
    monkeypatch.setattr(flashinfer_names, "require", lambda *_: SimpleNamespace(ActivationType=old))
    with pytest.raises(UnsupportedError, match=r"'geglu_tanh' \(it would be GegluTanh\)"):
        activation_member("geglu_tanh")
