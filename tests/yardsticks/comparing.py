"""Comparisons as vLLM's and FlashInfer's own tests make them, of kernels called by our adapters.

Both files beside this one are yardsticks for mutants of engines' kernels: each is a table of
parameters and tolerances that a project's tests have, and asks none of our laws. They are named on
the command line only, for ``kernelproof mutate --tests``, and collected by no other run::

    YARDSTICK="python -m pytest -q -x -p no:cacheprovider tests/yardsticks/vllm_comparisons.py"
    kernelproof mutate vllm-merge-attn-states --from .engines/vllm-0.33.0 --sample 100 \\
      --tests "$YARDSTICK -k merge"

The mutant is found by ``KERNELPROOF_FROM``, which begins with the copy that has it. ``-k`` takes an
adapter's name. That of ``vllm-unified-attention`` begins those of its 3D kernel and of its tensor
descriptors, which lie in the same file: ``-k 'vllm-unified-attention and not 3d and not td'`` and
``-k 'vllm-unified-attention-3d and not td'`` ask what the laws of these two adapters ask.

Values are normal, from a fixed seed, in the whole cache. Answers go into zeros. The other side is
the oracle, rounded to the answer's dtype, where a project compares with a plain computation of its
own or with another kernel that is not here; it is the same kernel where the project compares a
kernel with itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernelproof.impl import find_implementation
from kernelproof.reference import AttentionProblem, build_metadata, materialise
from kernelproof.reference.operations import OPERATIONS, operation_of
from kernelproof.reference.tensors.inputs import AppendInputs, MergeInputs, PagedAttentionInputs
from kernelproof.reference.tensors.moe_inputs import MoEInputs

os.environ.setdefault("TRITON_INTERPRET", "1")  # before an adapter imports Triton

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Close:
    """The tolerances of a comparison; None for those that torch has for the dtype."""

    rtol: float | None = None
    atol: float | None = None

    def check(self, found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
        """Raise AssertionError where an answer is not close to another."""
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=self.rtol, atol=self.atol)


@dataclass(frozen=True)
class Comparison:
    """One row of a table.

    Attributes:
        kernel: the name of the adapter.
        compare: makes the comparison: takes the kernel, the tolerances and ``parameters``.
        close: the tolerances.
        parameters: keyword arguments of ``compare``.
    """

    kernel: str
    compare: Callable[..., None]
    close: Close
    parameters: Mapping[str, Any]

    def run(self) -> None:
        """Make the comparison, with values from a fixed seed."""
        torch.manual_seed(0)
        self.compare(self.kernel, self.close, **self.parameters)


def rows(
    kernels: str | Sequence[str],
    compare: Callable[..., None],
    close: Close,
    *several: Mapping[str, Any],
    **common: Any,  # noqa: ANN401  keyword arguments of ``compare``
) -> list[Comparison]:
    """Return rows of a table: each kernel with each of several parameters."""
    names = [kernels] if isinstance(kernels, str) else kernels
    return [
        Comparison(name, compare, close, {**common, **each}) for name in names for each in several
    ]


def cases(table: Iterable[Comparison]) -> list[Any]:
    """Return the rows as parameters of a test, each named by its kernel and its number there."""
    seen: dict[str, int] = {}
    found = []
    for each in table:
        number = seen[each.kernel] = seen.get(each.kernel, -1) + 1
        found.append(pytest.param(each, id=f"{each.kernel}-{number}"))
    return found


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normal values."""
    return torch.randn(*shape).to(dtype)


def call(kernel: str, inputs: Any) -> Any:  # noqa: ANN401  each operation has its own records
    """Return a kernel's answer, written into zeros where it takes buffers."""
    if isinstance(inputs, PagedAttentionInputs):
        shape = *inputs.q.shape[:2], inputs.head_dim_vo
        lse = torch.zeros(shape[:2])
        inputs = replace(inputs, out=torch.zeros(shape, dtype=inputs.out_dtype), lse=lse)
    if isinstance(inputs, MergeInputs):
        zeros = torch.zeros(inputs.outs.shape[1:], dtype=inputs.out_dtype)
        inputs = replace(inputs, out=zeros, lse=torch.zeros_like(inputs.lses[0]))
    return find_implementation(kernel)(inputs)


def oracle(inputs: Any) -> Any:  # noqa: ANN401
    """Return the oracle's answer."""
    return OPERATIONS[operation_of(inputs)].answer(inputs)


# Attention


def attention(**fields: Any) -> tuple[PagedAttentionInputs, PagedAttentionInputs]:  # noqa: ANN401
    """Return a call with codes in FP8 where the problem has them, and that of the same numbers.

    Args:
        fields: of an ``AttentionProblem``; ``heads`` are query and key-value heads, ``head_dim``
            that of keys and values, ``window`` the keys that a window has.
    """
    qo_heads, kv_heads = fields.pop("heads")
    dims = {}
    if "head_dim" in fields:
        dims = dict.fromkeys(("head_dim_qk", "head_dim_vo"), fields.pop("head_dim"))
    window = fields.pop("window", 0)
    queries, keys = zip(*fields.pop("lens"), strict=True)
    problem = AttentionProblem(
        query_lens=queries, seq_lens=keys, num_kv_heads=kv_heads, group_size=qo_heads // kv_heads,
        window_left=window - 1, page_order=1, **dims, **fields,
    )  # fmt: skip
    plain = replace(problem, kv_cache="", q_dtype="", q_scale=1.0, k_scale=1.0, v_scale=1.0)
    numbers, coded = materialise(plain), materialise(problem)
    assert isinstance(numbers, PagedAttentionInputs)
    assert isinstance(coded, PagedAttentionInputs)
    for name in ("q", "v_cache", "k_cache"):  # the keys last: values may be a part of them
        number, code = getattr(numbers, name), getattr(coded, name)
        number.copy_(torch.randn(number.shape))
        scaled = number.float() / getattr(coded, f"{name[0]}_scale")
        code.copy_(scaled.clamp(-LARGEST, LARGEST) if code.dtype == FP8 else scaled)
    return coded, numbers


def attends(
    kernel: str,
    close: Close,
    *,
    of_codes: bool = False,
    lse: bool = False,
    **fields: Any,  # noqa: ANN401
) -> None:
    """Compare attention with that of the oracle to the numbers before they became codes.

    Args:
        kernel: the name of the adapter.
        close: the tolerances.
        of_codes: whether the oracle reads the codes instead.
        lse: whether the LSE is compared too.
        fields: of the problem.
    """
    coded, numbers = attention(**fields)
    out, sums = call(kernel, coded)
    wanted = oracle(coded if of_codes else replace(numbers, output_scale=None))
    if coded.output_scale is not None:
        out = (out.float() * coded.output_scale).to(numbers.q.dtype)
    close.check(out, wanted.out)
    if lse:
        close.check(sums, wanted.lse)


def pages_as_tokens(kernel: str, close: Close, **fields: Any) -> None:  # noqa: ANN401
    """Compare attention to pages with the kernel's own to the same keys as pages of one."""
    inputs, _ = attention(**fields)
    metadata, size = inputs.metadata, inputs.metadata.page_size
    table = (inputs.block_table.unsqueeze(2) * size + torch.arange(size)).flatten(1).int()
    lengths = metadata.seq_lens.tolist()
    pages = [row[:length] for row, length in zip(table.tolist(), lengths, strict=True)]
    tokens = replace(
        inputs,
        k_cache=inputs.k_cache.flatten(0, 1).unsqueeze(1),
        v_cache=inputs.v_cache.flatten(0, 1).unsqueeze(1),
        metadata=build_metadata(metadata.qo_indptr.diff().tolist(), lengths, pages, 1),
        block_table=table,
    )
    close.check(call(kernel, inputs)[0], call(kernel, tokens)[0])


def codes_as_numbers(kernel: str, close: Close, **fields: Any) -> None:  # noqa: ANN401
    """Compare attention to codes in FP8 with the kernel's own to the numbers."""
    coded, numbers = attention(**fields)
    close.check(call(kernel, coded)[0], call(kernel, numbers)[0])


def between_layers(kernel: str, close: Close, **fields: Any) -> None:  # noqa: ANN401
    """Compare attention to pages between those of other layers with that to dense ones."""
    dense, _ = attention(**fields)
    caches = []
    for cache in (dense.k_cache, dense.v_cache):
        layers = normal(len(cache), LAYERS, *cache.shape[1:], dtype=cache.dtype)
        layers[:, 1] = cache
        caches.append(layers[:, 1])
    if dense.v_cache.data_ptr() == dense.k_cache.data_ptr():
        caches[1] = caches[0][..., : dense.v_cache.shape[3]]
    layered = replace(dense, k_cache=caches[0], v_cache=caches[1])
    for found, wanted in zip(call(kernel, layered), call(kernel, dense), strict=True):
        close.check(found, wanted)


LAYERS = 3
"""Layers between whose pages a cache lies."""


# Merging


def merges(
    kernel: str,
    close: Close,
    *,
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    empty: float = 0.0,
    **options: Any,  # noqa: ANN401  of ``MergeInputs``
) -> None:
    """Compare the merging of two states with the oracle's.

    Behind the first state's tokens the second one is copied as it is, empty or not.

    Args:
        kernel: the name of the adapter.
        close: the tolerances.
        tokens, heads, dim: the shape of a state.
        dtype: of the outs.
        empty: share of the rows of each state whose LSE is inf; never those of both.
        options: of ``MergeInputs``.
    """
    lses = torch.randn(2, heads, tokens)
    marked = torch.rand(2, heads, tokens) < empty
    lses[marked & ~marked.all(0)] = torch.inf
    inputs = MergeInputs(
        outs=normal(2, tokens, heads, dim, dtype=dtype),
        lses=lses.transpose(1, 2),
        **{"out_dtype": dtype, **options},
    )
    out, lse = call(kernel, inputs)
    wanted = oracle(replace(inputs, output_scale=None))
    if inputs.output_scale is not None:
        out = out.float() * inputs.output_scale
    copied = slice(inputs.context_tokens, None) if inputs.context_tokens else slice(0)
    for found, want, copy in ((out, wanted.out, inputs.outs), (lse, wanted.lse, inputs.lses)):
        want[copied] = copy[1][copied].to(want.dtype)
        close.check(found, want)


def merges_nothing(kernel: str, close: Close, *, dtype: torch.dtype) -> None:
    """Compare the merging of two empty states with an empty one."""
    outs, lses = torch.zeros(2, 2, 2, 64, dtype=dtype), torch.full((2, 2, 2), -torch.inf)
    out, lse = call(kernel, MergeInputs(outs, lses, out_dtype=dtype))
    close.check(out, outs[0])
    close.check(lse, lses[0])


# Appending


def appends(
    kernel: str,
    close: Close,
    *,
    slots: Callable[[], torch.Tensor],
    pages: int,
    page_size: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    packed: int = 2,
    factor: float = 1.0,
    fp8: bool = False,
) -> None:
    """Compare whole caches with those into which torch has written.

    Args:
        kernel: the name of the adapter.
        close: the tolerances.
        slots: gives the slot of each token.
        pages, page_size, heads, dim: the shape of the caches.
        dtype: of keys and values, and of the caches.
        packed: tensors that a token's keys and values, the last of them, are interleaved with; 0
            if each lies by itself.
        factor: of the keys' and the values' normal values.
        fp8: whether the caches are in FP8, with scales of a 64th of the largest new number.
    """
    mapping = slots()
    tokens, shape = len(mapping), (pages, page_size, heads, dim)
    new = normal(tokens, max(packed, 2), heads, dim, dtype=dtype) * factor
    k, v = new[:, -2], new[:, -1]
    if not packed:
        k, v = k.contiguous(), v.contiguous()
    scales = [float(each.amax()) / 64 if fp8 else 1.0 for each in (k, v)]
    caches = [normal(*shape, dtype=FP8 if fp8 else dtype) for _ in range(2)]
    wanted = [_numbers(cache, scale) for cache, scale in zip(caches, scales, strict=True)]
    for cache, rows_ in zip(wanted, (k, v), strict=True):
        cache.view(-1, heads, dim)[mapping] = rows_.to(cache.dtype)
    problem = AttentionProblem(
        operation="append_paged_kv", query_lens=(tokens,), seq_lens=(tokens,), page_size=page_size,
        num_kv_heads=heads, head_dim_qk=dim, head_dim_vo=dim, dtype=str(dtype).partition(".")[2],
        kv_cache="float8_e4m3fn" if fp8 else "",
    )  # fmt: skip
    inputs = materialise(problem)
    assert isinstance(inputs, AppendInputs)
    inputs = replace(
        inputs, k=k, v=v, k_cache=caches[0], v_cache=caches[1], slots=mapping, in_place=True,
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    for cache, scale, want in zip(call(kernel, inputs), scales, wanted, strict=True):
        close.check(_numbers(cache, scale), want)


def _numbers(cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a copy of a cache; one in FP8 as numbers of float16."""
    return (cache.float() * scale).half() if cache.dtype == FP8 else cache.clone()


# Experts


def multiplies(
    kernel: str,
    close: Close,
    *,
    tokens: int,
    hidden: int,
    inter: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    factor: float,
    factor_hidden: float | None = None,
    ranks: int = 1,
    padding: int = 0,
    renormalised: bool = False,
) -> None:
    """Compare a sum of experts, over all ranks, with the oracle's of all experts.

    Args:
        kernel: the name of the adapter.
        close: the tolerances.
        tokens, hidden, inter, experts, top_k, dtype: those of a ``MoEProblem``.
        factor: of the weights' normal values.
        factor_hidden: of the hidden states'; the same if None.
        ranks: how many parts the experts are in, one after another.
        padding: columns behind those of the weights.
        renormalised: whether a token's routing weights add up to 1.
    """
    first = normal(experts, 2 * inter, hidden, dtype=dtype) * factor
    second = normal(experts, hidden, inter, dtype=dtype) * factor
    states = factor if factor_hidden is None else factor_hidden
    scores = torch.randn(tokens, experts).to(dtype).float().softmax(-1)
    weights, ids = scores.topk(top_k)
    inputs = MoEInputs(
        hidden=normal(tokens, hidden, dtype=dtype) * states, w13=first, w2=second,
        topk_ids=ids.int(), out_dtype=dtype, num_experts=experts,
        topk_weights=weights / weights.sum(-1, keepdim=True) if renormalised else weights,
    )  # fmt: skip
    wide = [torch.nn.functional.pad(each, (0, padding)) for each in (first, second)]
    w13, w2 = wide[0][..., :hidden], wide[1][..., :inter]
    local, found = experts // ranks, torch.zeros(tokens, hidden, dtype=dtype)
    for offset in range(0, experts, local):
        here = slice(offset, offset + local)
        found += call(kernel, replace(inputs, w13=w13[here], w2=w2[here], expert_offset=offset))
    close.check(found, oracle(inputs))
