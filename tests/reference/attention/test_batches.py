"""Requests that are attended together give what each gives alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelproof.reference import Arithmetic, AttentionProblem, materialise
from kernelproof.reference.attention import error_terms, softmax
from kernelproof.reference.attention.batches import Batch, batches
from kernelproof.reference.attention.bounds import Bounded
from kernelproof.reference.attention.error_terms import most_equal_keys
from kernelproof.reference.attention.options import Options
from kernelproof.reference.attention.requests import paged_call
from kernelproof.reference.oracle import bounded_attention
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

MIXED = AttentionProblem(
    query_lens=(1, 1, 0, 5, 1, 4, 2, 7),
    seq_lens=(33, 1, 9, 21, 0, 4, 40, 3),
    num_kv_heads=2,
    group_size=3,
    head_dim_qk=16,
    head_dim_vo=32,
    page_size=4,
    page_order=3,
    causal=True,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window_left": 6},
    "window across pages": {"window_left": 2, "page_size": 16, "kv_layout": "HND"},
    "custom mask": {"custom_mask": True},
    "mask and window": {"custom_mask": True, "window_left": 9, "causal": False},
    "sinks and cap": {"sinks": True, "logits_soft_cap": 5.0},
    "scales of heads": {"per_head_scales": True, "k_scale": 0.5, "v_scale": 2.0},
    "strided": {"strided_q": True, "strided_kv": True},
    "shared prefix": {"shared_prefix_pages": 1},
    "fp8 cache": {"kv_cache": "float8_e4m3fn"},
    "nvfp4 cache": {"kv_cache": "nvfp4", "kv_layout": "HND"},
    "ragged": {"operation": "ragged_attention"},
    "ragged window": {"operation": "ragged_attention", "window_left": 3},
}
ARITHMETIC = Arithmetic(probabilities="bfloat16", row_sum="probabilities", partial_outputs=True)
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def oracle_of(problem: AttentionProblem, unused: float = 11.0) -> Bounded:
    inputs: Any = materialise(problem, unused=unused)
    return bounded_attention(inputs, ARITHMETIC)


def alone(problem: AttentionProblem, request: int) -> AttentionProblem:
    return replace(
        problem,
        query_lens=problem.query_lens[request : request + 1],
        seq_lens=problem.seq_lens[request : request + 1],
        request_ids=(request,),
    )


def batches_of(problem: AttentionProblem) -> list[Batch]:
    inputs: Any = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs)
    options = Options(**inputs.keywords())
    call = paged_call(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, inputs.kv_layout, options
    )
    return list(batches(call, options))


@variants
@pytest.mark.parametrize("regime", ["iid", "exact_grid", "dominant_key"])
def test_a_batch_gives_what_its_requests_give_alone(options: dict[str, Any], regime: str) -> None:
    if regime == "exact_grid" and options.get("logits_soft_cap"):
        pytest.skip("the exact grid has no soft cap")
    problem = replace(MIXED, regime=regime, **options)
    together = oracle_of(problem)
    for request, queries in enumerate(problem.query_lens):
        start = sum(problem.query_lens[:request])
        rows = slice(start, start + queries)
        single = alone(problem, request)
        apart = oracle_of(single)
        for whole, part in zip(
            (*together.expected, *together.bound), (*apart.expected, *apart.bound), strict=True
        ):
            torch.testing.assert_close(whole[rows], part, rtol=2e-9, atol=1e-14)
        if problem.exact:
            out = getattr(torch, problem.dtype)
            assert torch.equal(together.expected.out[rows].to(out), apart.expected.out.to(out))


@variants
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_fills_up_a_batch_is_never_seen(options: dict[str, Any], poison: float) -> None:
    if poison == float("inf") and options.get("kv_cache"):
        pytest.skip("its codes have no infinity")
    problem = replace(MIXED, **options)
    clean, poisoned = oracle_of(problem), oracle_of(problem, unused=poison)
    for before, after in zip(
        (*clean.expected, *clean.bound), (*poisoned.expected, *poisoned.bound), strict=True
    ):
        assert torch.equal(before, after)


def test_short_requests_go_together_and_long_ones_alone() -> None:
    decodes = replace(MIXED, query_lens=(1,) * 16, seq_lens=tuple(range(10, 26)))
    assert [len(batch.requests) for batch in batches_of(decodes)] == [16]
    mixed = replace(
        decodes,
        num_kv_heads=8,
        head_dim_qk=128,
        head_dim_vo=128,
        page_size=64,
        seq_lens=(900, 2000, *decodes.seq_lens[2:]),
    )
    assert sorted(len(batch.requests) for batch in batches_of(mixed)) == [1, 1, 14]


def test_each_request_is_in_one_batch() -> None:
    rows = [list(request.tokens) for batch in batches_of(MIXED) for request in batch.requests]
    assert sorted(token for each in rows for token in each) == list(range(MIXED.num_tokens))


class TestEqualKeys:
    def test_it_counts_the_longest_run_of_any_head(self) -> None:
        norms = torch.tensor([[[1.0, 2, 1, 3], [5, 5, 5, 6]], [[1, 2, 3, 4], [4, 3, 2, 1]]])
        assert most_equal_keys(norms).tolist() == [3, 1]

    def test_what_is_no_key_equals_nothing(self) -> None:
        nan = torch.nan
        norms = torch.tensor([[[1.0, nan, nan, nan]], [[2, 2, nan, nan]]])
        assert most_equal_keys(norms).tolist() == [1, 2]

    @pytest.mark.parametrize("keys", [0, 1])
    def test_without_two_keys_there_is_none(self, keys: int) -> None:
        assert most_equal_keys(torch.zeros(3, 2, keys)).tolist() == [1, 1, 1]

    def test_repeated_keys_of_one_request_do_not_loosen_another(self) -> None:
        """One request reads a page twice; the bound of the other does not know."""
        inputs: Any = materialise(replace(MIXED, query_lens=(1, 1), seq_lens=(16, 12)))
        before = bounded_attention(inputs, Arithmetic(probabilities="bfloat16")).bound.out
        indices = inputs.metadata.paged_kv_indices
        indices[1:4] = indices[0].clone()
        after = bounded_attention(inputs, Arithmetic(probabilities="bfloat16")).bound.out
        assert torch.equal(before[1], after[1])
        assert not torch.equal(before[0], after[0])


class _Operations(TorchDispatchMode):
    """Counts what torch is asked to do, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.found[function.name()] += 1
        return function(*args, **(kwargs or {}))


class TestCost:
    """On a GPU every operation is a launch, and every look at a value waits for all of them."""

    def operations(self, problem: AttentionProblem) -> Counter[str]:
        inputs: Any = materialise(problem)
        mode = _Operations()
        with mode:
            bounded_attention(inputs, ARITHMETIC)
        return mode.found

    def test_it_does_not_grow_with_the_requests(self) -> None:
        few = replace(MIXED, query_lens=(1,) * 2, seq_lens=(30, 20))
        many = replace(MIXED, query_lens=(1,) * 12, seq_lens=tuple(range(19, 31)))
        assert self.operations(many).total() == self.operations(few).total()

    @variants
    def test_values_are_read_once(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if options.get("kv_cache") == "nvfp4":
            pytest.skip("dequantising checks its scale")
        inputs: Any = materialise(replace(MIXED, **options))
        reads: list[torch.Tensor] = []
        listed = torch.Tensor.tolist

        def read(tensor: torch.Tensor) -> Any:  # noqa: ANN401  whatever torch gives
            reads.append(tensor)
            return listed(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", read)
        monkeypatch.setattr(error_terms, "may_reorder", lambda errors: errors.absolute.numel() > 0)
        monkeypatch.setattr(softmax, "reads_are_free", lambda _: False)  # as on a GPU
        with _Operations() as mode:
            bounded_attention(inputs, ARITHMETIC)
        monkeypatch.undo()
        assert len(reads) == 1  # the metadata
        waiting = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")
        assert not [name for name in mode.found if name in waiting]
