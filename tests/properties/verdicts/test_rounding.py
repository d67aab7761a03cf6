"""Findings whose error looks like a rounding name the arithmetic that would allow it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded.kernels import attend
from kernelproof.properties.verdicts.rounding import TABLE
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import Arithmetic, AttentionProblem, MoEProblem

PROBLEM = AttentionProblem(
    query_lens=(8,),
    seq_lens=(40,),
    num_kv_heads=2,
    head_dim_qk=32,
    head_dim_vo=32,
    causal=True,
    dtype="bfloat16",
)


class Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def naive(inputs: Any, dtype: torch.dtype, *, keys: int = 0) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Attend to one request with probabilities that are rounded, and without its last keys."""
    order = inputs.metadata.paged_kv_indices.long()
    k, v = (c[order].flatten(0, 1).float() for c in (inputs.k_cache, inputs.v_cache))
    length = int(inputs.metadata.seq_lens[0])
    k, v = k[:length], v[:length]
    q = inputs.q.float()
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    logits = torch.einsum("thd,shd->hts", q, k) * inputs.sm_scale
    hidden = torch.arange(length) > torch.arange(len(q)).unsqueeze(1) + length - len(q)
    logits = logits.masked_fill(hidden, -torch.inf)
    logits[..., length - keys :] = -torch.inf
    largest = logits.amax(-1, keepdim=True)
    p = (logits - largest).exp()
    out = torch.einsum("hts,shd->thd", p.to(dtype).float(), v) / p.sum(-1).T.unsqueeze(-1)
    return out.to(inputs.out_dtype), torch.logsumexp(logits, -1).T


def judged(
    kernel: Any,  # noqa: ANN401
    problem: AttentionProblem,
    law: str = "parity",
    **claims: Any,  # noqa: ANN401
) -> Verdict:
    made = implementation("paged_attention", name="mine", **claims)(kernel)
    return find_law(law).check(Subject(made, Target(), Anywhere()), problem)


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_that_are_rounded_are_named(seed: int) -> None:
    problem = replace(PROBLEM, seed=seed)
    rounding = lambda inputs: naive(inputs, torch.bfloat16)  # noqa: E731
    verdict = judged(rounding, problem)
    assert (verdict.status, verdict.kind) == ("FAIL", "numeric")
    assert "Arithmetic(probabilities='inputs') allows it" in verdict.message
    assert f"arithmetic= what the kernel rounds, if it does: {TABLE}" in verdict.message
    declared = Arithmetic(probabilities="inputs")
    assert judged(rounding, problem, arithmetic=declared).status == "PASS"


def test_an_output_that_is_rounded_before_v_scale_is_named() -> None:
    def twice(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        out, lse = attend(replace(inputs, v_scale=1.0))
        return out.to(inputs.out_dtype) * inputs.v_scale, lse

    verdict = judged(twice, replace(PROBLEM, v_scale=1.25))
    assert "rounded twice: v_scale multiplies what has the output's dtype" in verdict.message
    assert "Arithmetic(" not in verdict.message
    assert judged(twice, replace(PROBLEM, v_scale=2.0)).status == "PASS"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_faults_are_not_called_roundings(dtype: str, seed: int) -> None:
    def scaled(inputs: Any) -> Any:  # noqa: ANN401
        out, lse = attend(inputs)
        return (out * 0.98).to(inputs.out_dtype), lse

    def one_head(inputs: Any) -> Any:  # noqa: ANN401
        out, lse = (each.clone() for each in attend(inputs))
        out[:, 1] *= 1.1
        return out.to(inputs.out_dtype), lse

    def rows_without_keys(inputs: Any) -> Any:  # noqa: ANN401
        out, lse = attend(inputs)
        out = torch.where(lse.isfinite().unsqueeze(-1), out, inputs.v_cache.double().mean())
        return out.to(inputs.out_dtype), lse

    def few_keys(inputs: Any) -> Any:  # noqa: ANN401
        return naive(inputs, torch.float32, keys=1)

    def wrong_scale(inputs: Any) -> Any:  # noqa: ANN401
        return attend(replace(inputs, sm_scale=1.2 * inputs.sm_scale))

    short = replace(PROBLEM, query_lens=(40,), seq_lens=(37,))  # three rows see no key
    for kernel in (scaled, one_head, few_keys, wrong_scale, rows_without_keys):
        problem = short if kernel is rows_without_keys else PROBLEM
        verdict = judged(kernel, replace(problem, dtype=dtype, seed=seed))
        assert verdict.status == "FAIL"
        assert "arithmetic" not in verdict.message


@pytest.mark.parametrize("seed", range(3))
def test_an_intermediate_of_experts_that_is_rounded_is_named(seed: int) -> None:
    def rounding(inputs: Any) -> torch.Tensor:  # noqa: ANN401
        out = torch.zeros(inputs.hidden.shape, dtype=torch.float64)
        for token, (ids, weights) in enumerate(
            zip(inputs.topk_ids.tolist(), inputs.topk_weights, strict=True)
        ):
            for expert, weight in zip(ids, weights, strict=True):
                gate, up = (inputs.w13[expert].double() @ inputs.hidden[token].double()).chunk(2)
                inner = (torch.nn.functional.silu(gate) * up).bfloat16().double()
                out[token] += weight * (inputs.w2[expert].double() @ inner)
        return out.to(inputs.out_dtype)

    made = implementation("moe", name="mine")(rounding)
    problem = MoEProblem(num_tokens=8, hidden=64, dtype="bfloat16", seed=seed)
    verdict = find_law("parity").check(Subject(made, Target(), Anywhere()), problem)
    assert (verdict.status, verdict.kind) == ("FAIL", "numeric")
    assert "Arithmetic(intermediate='inputs') allows it" in verdict.message


PEERS = {
    "logits": Arithmetic(logits="inputs"),
    "sinks": Arithmetic(sinks="inputs"),
    "lse": Arithmetic(lse="inputs"),
}
"""What peers store in 16 bits."""


def stored(
    inputs: Any,  # noqa: ANN401
    words: Sequence[str],
    *,
    keys: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to one request, with these in the queries' dtype, and without its first keys."""

    def as_stored(word: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(inputs.q.dtype) if word in words else tensor

    order = inputs.metadata.paged_kv_indices.long()
    k, v = (c[order].flatten(0, 1).float() for c in (inputs.k_cache, inputs.v_cache))
    length, tokens = int(inputs.metadata.seq_lens[0]), len(inputs.q)
    group = inputs.q.shape[1] // k.shape[1]
    k, v = (each[:length].repeat_interleave(group, 1) for each in (k, v))
    products = torch.einsum("thd,shd->hts", inputs.q.float(), k)
    logits = as_stored("logits", products).float() * inputs.sm_scale
    hidden = torch.arange(length) > torch.arange(tokens).unsqueeze(1) + length - tokens
    logits = logits.masked_fill(hidden, -torch.inf)
    logits[..., :keys] = -torch.inf
    sinks = as_stored("sinks", inputs.sinks).float()[:, None, None].expand(-1, tokens, 1)
    every = torch.cat([logits, sinks], -1)
    out = torch.einsum("hts,shd->thd", every.softmax(-1)[..., :-1], v)
    return out.to(inputs.out_dtype), as_stored("lse", every.logsumexp(-1).T)


@pytest.mark.parametrize("word", PEERS)
def test_a_peer_that_stores_16_bits_says_so(word: str) -> None:
    problems = [replace(PROBLEM, sinks=True, seed=seed) for seed in range(3)]

    def bad(arithmetic: Arithmetic, keys: int = 0) -> bool:
        def kernel(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
            return stored(inputs, [word], keys=keys)

        return any(
            judged(kernel, problem, law, arithmetic=arithmetic).bad
            for problem in problems
            for law in ("parity", "well_formed")
        )

    assert bad(Arithmetic())
    assert not bad(PEERS[word])
    assert bad(PEERS[word], keys=1)


def test_an_lse_of_16_bits_has_a_buffer_of_them() -> None:
    def writing(inputs: Any) -> None:  # noqa: ANN401
        assert inputs.lse.dtype == torch.bfloat16
        for given, made in zip((inputs.out, inputs.lse), stored(inputs, [*PEERS]), strict=True):
            given.copy_(made)

    said = Arithmetic(logits="inputs", sinks="inputs", lse="inputs")
    assert not judged(writing, replace(PROBLEM, sinks=True), arithmetic=said, writes_out=True).bad
