"""K and V with strides of their own: drawn where named, and a kernel that mixes them is found."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Implementation, Target, find_implementation, implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.laws import find_law
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import (
    AttentionOutput,
    AttentionProblem,
    Problem,
    materialise,
    oracle,
    problem_from_json,
)
from kernelproof.reference.formats.cache_elements import RECORDS
from kernelproof.reference.problems.cache_names import KV_CACHES
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

CPU = Target.here("cpu")
PROBLEM = AttentionProblem(
    query_lens=(2, 1), seq_lens=(9, 5), page_size=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64
)
DIFFERENT = replace(PROBLEM, different_kv_strides=True)


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


@implementation("paged_attention", name="any-strides", features=("different_kv_strides",))
def right(inputs: PagedAttentionInputs) -> AttentionOutput:
    out, lse = oracle.attention(inputs)
    return AttentionOutput(out.to(inputs.out_dtype), lse.float())


@implementation("paged_attention", name="keys-strides", features=("different_kv_strides",))
def wrong(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Read V with the strides of K."""
    k, v = inputs.k_cache, inputs.v_cache
    memory = inputs.storages.get("v", inputs.storages["k"])
    places = torch.full(v.shape, int(v.storage_offset()))
    for axis, step in enumerate(k.stride()):
        along = torch.arange(v.shape[axis]) * step
        places += along.view(-1, *[1] * (v.dim() - 1 - axis))
    return right.function(replace(inputs, v_cache=memory[places % len(memory)]))  # type: ignore[no-any-return]


plain = implementation("paged_attention", name="plain")(right.function)


def judged(law: str, kernel: Implementation, problem: AttentionProblem) -> Verdict:
    try:
        return find_law(law).check(Subject(kernel, CPU, Stages()), problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", ["parity", "contiguity", "inputs_unchanged", "unused_memory"])
@pytest.mark.parametrize("strided", [False, True])
def test_a_right_kernel_passes(law: str, strided: bool) -> None:
    for seed in range(4):
        problem = replace(DIFFERENT, seed=seed, strided_kv=strided)
        assert judged(law, right, problem).status == "PASS"


def test_a_kernel_that_reads_values_with_the_strides_of_keys_is_found() -> None:
    assert judged("parity", wrong, PROBLEM).status == "PASS"
    assert judged("parity", wrong, DIFFERENT).status == "FAIL"
    found = {seed: judged("contiguity", wrong, replace(PROBLEM, seed=seed)) for seed in (0, 1)}
    assert {seed: verdict.status for seed, verdict in found.items()} == {0: "PASS", 1: "FAIL"}


def test_only_kernels_that_name_it_get_it() -> None:
    refusal = find_implementation("triton-attention").refusal(DIFFERENT, CPU)
    assert refusal is not None
    assert (refusal.code, refusal.about) == ("feature", "different_kv_strides")


@pytest.mark.parametrize(
    ("name", "kinds"), [("torch-sdpa-paged", (False, True)), ("plain", (False,))]
)
def test_it_is_drawn_where_it_is_named(name: str, kinds: tuple[bool, ...]) -> None:
    kernel = plain if name == "plain" else find_implementation(name)

    def probe(asked: Sequence[Problem]) -> list[Refusal | None]:
        return [kernel.refusal(each, CPU) for each in asked]

    axes = narrow("paged_attention", probe, 10**5)
    assert axes is not None
    assert axes.allows("different_kv_strides") == kinds


@pytest.mark.parametrize("kv_cache", [name for name in KV_CACHES if name not in RECORDS])
@pytest.mark.parametrize("strided", [False, True])
def test_the_values_are_the_same_and_the_strides_are_not(kv_cache: str, strided: bool) -> None:
    problem = replace(DIFFERENT, kv_cache=kv_cache, strided_kv=strided)
    inputs, dense = materialise(problem), materialise(replace(PROBLEM, kv_cache=kv_cache))
    assert isinstance(inputs, PagedAttentionInputs)
    assert isinstance(dense, PagedAttentionInputs)
    assert inputs.k_cache.stride() != inputs.v_cache.stride()
    assert inputs.k_cache.stride(-1) == inputs.v_cache.stride(-1) == 1
    assert dense.k_cache.stride() == dense.v_cache.stride()
    pairs = zip(oracle.attention(inputs), oracle.attention(dense), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_problems_without_it_keep_their_ids() -> None:
    assert "different_kv_strides" not in PROBLEM.to_json()
    assert problem_from_json(DIFFERENT.to_json()) == DIFFERENT
    assert DIFFERENT.id != PROBLEM.id
