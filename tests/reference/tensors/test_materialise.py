"""Materialised tensors: the same bits everywhere, whatever pages, layouts and batches do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from kernelproof.properties.space.rounds import problems
from kernelproof.properties.verdicts.comparison import same_bits
from kernelproof.reference import (
    AttentionProblem,
    KVLayout,
    MergeProblem,
    MetadataProblem,
    Problem,
    build_metadata,
    materialise,
    oracle,
)
from kernelproof.reference.formats.cache_elements import TOKEN_SCALED
from kernelproof.reference.problems import ATTENTION_REGIMES
from kernelproof.reference.tensors.allocation import CANARY, FENCE
from kernelproof.reference.tensors.inputs import (
    AppendInputs,
    AttentionInputs,
    Inputs,
    MetadataInputs,
    PagedAttentionInputs,
)

MAX_WORK = 30_000
PAGED = AttentionProblem(
    query_lens=(2, 1, 0, 4),
    seq_lens=(5, 9, 3, 2),
    page_size=4,
    num_kv_heads=2,
    group_size=3,
    head_dim_qk=8,
    head_dim_vo=6,
    causal=True,
    seed=7,
)
RAGGED = replace(PAGED, operation="ragged_attention")
APPEND = AttentionProblem(
    "append_paged_kv", query_lens=(2, 3), seq_lens=(5, 3), page_size=4, head_dim_qk=8, head_dim_vo=6
)


def test_new_rows_are_slices_of_packed_qkv_or_lie_by_themselves() -> None:
    """Either of them, or both, whatever they hold."""
    seen = set()
    for seed in range(12):
        dense = materialise(replace(APPEND, seed=seed))
        packed = materialise(replace(APPEND, seed=seed, strided_q=True))
        assert isinstance(dense, AppendInputs)
        assert isinstance(packed, AppendInputs)
        for name in ("k", "v"):
            assert same_bits(getattr(dense, name), getattr(packed, name))
            assert getattr(dense, name).is_contiguous()
        strides = [each.stride() for each in (packed.k, packed.v)]
        assert set(strides) <= {(8, 8, 1), (24, 8, 1), (6, 6, 1), (18, 6, 1)}
        seen.add((packed.k.is_contiguous(), packed.v.is_contiguous()))
    assert seen == {(True, False), (False, True), (False, False)}


class Logical(NamedTuple):
    """What one request holds, wherever it lies."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def paged(problem: AttentionProblem, **options: Any) -> PagedAttentionInputs:  # noqa: ANN401
    inputs = materialise(problem, **options)
    assert isinstance(inputs, PagedAttentionInputs)
    return inputs


def logical(inputs: Inputs) -> list[Logical]:
    """Gather each request's rows, slot by slot."""
    assert isinstance(inputs, AttentionInputs)
    found = []
    if not isinstance(inputs, PagedAttentionInputs):
        rows, keys = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
        for i in range(len(rows) - 1):
            span = slice(keys[i], keys[i + 1])
            found.append(Logical(inputs.q[rows[i] : rows[i + 1]], inputs.k[span], inputs.v[span]))
        return found
    size, rows = inputs.metadata.page_size, inputs.metadata.qo_indptr.tolist()
    for i, length in enumerate(inputs.metadata.seq_lens.tolist()):
        pages = inputs.block_table[i].tolist()
        caches = []
        for cache in (inputs.k_cache, inputs.v_cache):
            nhd = cache if inputs.kv_layout == "NHD" else cache.transpose(1, 2)
            slots = [nhd[pages[s // size], s % size] for s in range(length)]
            caches.append(torch.stack(slots) if slots else nhd.new_empty((0, *nhd.shape[2:])))
        found.append(Logical(inputs.q[rows[i] : rows[i + 1]], *caches))
    return found


def same(first: list[Logical], second: list[Logical]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and same_bits(a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def checksum(inputs: Inputs) -> str:
    digest = hashlib.sha256()
    for name, storage in sorted(inputs.storages.items()):
        digest.update(name.encode())
        digest.update(bytes(storage.view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("operation", ["paged_attention", "append_paged_kv", "merge_state"])
def test_the_same_bits_twice(operation: str) -> None:
    @settings(max_examples=30)
    @given(problems(operation=operation, max_work=MAX_WORK))
    def check(problem: Problem) -> None:
        first, second = materialise(problem).storages, materialise(problem).storages
        assert first.keys() == second.keys()
        assert all(same_bits(first[name], second[name]) for name in first)

    check()


class WritesOnce(TorchDispatchMode):
    """Fails where what is scattered depends on the order, which on a GPU is anybody's guess."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  any operation of torch
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        written = None
        if func is torch.ops.aten.scatter_.src:
            target, dim, index, values = args
            written = target.clone().scatter_(dim, index.flip(dim), values.flip(dim))
        elif func is torch.ops.aten.index_put_.default and not any(args[3:]):
            target, places, values = args
            backwards = torch.arange(len(places[0]) - 1, -1, -1)
            written = target.clone()
            rows = values.expand_as(target[tuple(places)])
            written[tuple(each[backwards] for each in places)] = rows[backwards]
        found = func(*args, **(kwargs or {}))
        assert written is None or same_bits(written, found), f"{func} writes some places twice"
        return found


@pytest.mark.parametrize("operation", ["paged_attention", "append_paged_kv", "moe", "route"])
def test_no_value_depends_on_the_order_in_which_a_gpu_scatters(operation: str) -> None:
    @settings(max_examples=100)
    @given(problems(operation=operation, max_work=MAX_WORK))
    def check(problem: Problem) -> None:
        with WritesOnce():  # type: ignore[no-untyped-call]  # torch's own
            materialise(problem)

    check()


@pytest.mark.parametrize("problem", [PAGED, RAGGED, APPEND])
def test_nothing_of_a_problem_is_left_for_the_next(problem: AttentionProblem) -> None:
    """Problems of one structure have their tables in common, but not the tensors of a call."""
    first = materialise(problem)
    assert first.storages
    before = {name: storage.clone() for name, storage in first.storages.items()}
    for storage in first.storages.values():
        storage.view(torch.uint8).zero_()
    again = materialise(problem).storages
    assert all(same_bits(again[name], before[name]) for name in before)


CHECKSUMS: list[tuple[Problem, str]] = [
    (PAGED, "dc34ebaad5ea683a"),
    (RAGGED, "db0e2a24f40669cc"),
    (APPEND, "5f84aea1667bed2c"),
    (
        replace(PAGED, kv_layout="HND", page_order=1, dtype="bfloat16", strided_kv=True),
        "a583442babe150bf",
    ),
    (
        replace(PAGED, sinks=True, custom_mask=True, per_head_scales=True, dtype="float16"),
        "4322818a06e3dab9",
    ),
    (replace(PAGED, regime="dominant_key"), "5aecae1b50077f07"),
    (replace(PAGED, regime="position_coded"), "be1bdb358e5fa806"),
    (replace(PAGED, regime="shifted_logits"), "de545656ac9316df"),
    (replace(PAGED, regime="outlier_channels"), "6308de6df30d63ef"),
    (replace(PAGED, regime="exact_grid"), "3e0dc39b67e0df9e"),
    (
        MergeProblem(num_states=3, num_tokens=2, empty="some", dtype="bfloat16", seed=3),
        "c28ae47a59cde10a",
    ),
    (MergeProblem(regime="exact_grid"), "34389b09076d98ea"),
    (
        MetadataProblem(steps=(((1, 2), (3, 9)),), page_size=4, spare_columns=2, seed=5),
        "f9211423fd7dc644",
    ),
]


@pytest.mark.parametrize(("problem", "expected"), CHECKSUMS)
def test_the_bits_are_the_ones_that_have_been_recorded(problem: Problem, expected: str) -> None:
    # A change here changes what every recorded case and every pinned search looks at.
    assert checksum(materialise(problem)) == expected


def test_other_seeds_and_tensors_have_other_values() -> None:
    first, second = paged(PAGED), paged(replace(PAGED, seed=8))
    for name in ("q", "k_cache", "v_cache"):
        assert not torch.equal(getattr(first, name), getattr(second, name))
    square = paged(replace(PAGED, head_dim_vo=PAGED.head_dim_qk))
    assert not torch.equal(square.k_cache, square.v_cache)
    assert len(torch.unique(first.q)) == first.q.numel()


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 3},
        {"page_size": 256},
        {"kv_layout": "HND"},
        {"page_order": 1},
        {"page_order": 2, "kv_layout": "HND", "page_size": 2},
        {"strided_q": True, "strided_kv": True},
        {"operation": "ragged_attention"},
        {"operation": "ragged_attention", "strided_kv": True},
    ],
    ids=str,
)
def test_values_stay_with_their_tokens(changes: dict[str, Any], regime: str) -> None:
    problem = replace(PAGED, regime=regime)
    assert same(logical(materialise(problem)), logical(materialise(replace(problem, **changes))))


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
@pytest.mark.parametrize("base", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_a_request_keeps_its_values_alone_and_in_another_order(
    base: AttentionProblem, regime: str
) -> None:
    problem = replace(base, regime=regime)
    whole = logical(materialise(problem))
    order = (3, 1, 0, 2)
    shuffled = replace(
        problem,
        query_lens=tuple(problem.query_lens[i] for i in order),
        seq_lens=tuple(problem.seq_lens[i] for i in order),
        request_ids=order,
    )
    assert same(logical(materialise(shuffled)), [whole[i] for i in order])
    for i in range(len(whole)):
        alone = replace(
            problem,
            query_lens=problem.query_lens[i : i + 1],
            seq_lens=problem.seq_lens[i : i + 1],
            request_ids=(i,),
        )
        assert same(logical(materialise(alone)), whole[i : i + 1])


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
@pytest.mark.parametrize("kv_cache", ["float8_e4m3fn", "nvfp4"])
def test_a_request_keeps_its_codes_and_sinks_beside_a_long_one(kv_cache: str, regime: str) -> None:
    """Beyond 256 keys a quantised batch is not exact; its short requests hold what they held."""
    problem = AttentionProblem(
        query_lens=(1, 1),
        seq_lens=(3, 257),
        head_dim_qk=64,
        head_dim_vo=64,
        page_size=4,
        kv_cache=kv_cache,
        regime=regime,
        dtype="bfloat16",
        sinks=True,
    )
    whole = paged(problem)
    alone = paged(replace(problem, query_lens=(1,), seq_lens=(3,), request_ids=(0,)))
    assert whole.sinks is not None
    assert alone.sinks is not None
    assert torch.equal(whole.sinks, alone.sinks)
    pairs = [(whole.k_cache, alone.k_cache), (whole.v_cache, alone.v_cache)]
    pairs += zip(whole.kv_cache_sf or (), alone.kv_cache_sf or (), strict=True)
    for of_whole, of_one in pairs:
        assert torch.equal(of_whole[0, :3].view(torch.uint8), of_one[0, :3].view(torch.uint8))


def test_the_custom_mask_and_sinks_stay_with_their_request_too() -> None:
    problem = replace(PAGED, sinks=True, custom_mask=True)
    whole = paged(problem)
    alone = paged(replace(problem, query_lens=(4,), seq_lens=(2,), request_ids=(3,)))
    assert whole.custom_mask is not None
    assert alone.custom_mask is not None
    assert torch.equal(whole.custom_mask[-8:], alone.custom_mask)
    assert 0 < int(whole.custom_mask.sum()) < whole.custom_mask.numel()
    assert whole.sinks is not None
    assert alone.sinks is not None
    assert torch.equal(whole.sinks, alone.sinks)


@settings(max_examples=60)
@given(problems(operation="paged_attention", max_work=MAX_WORK))
def test_the_oracle_sees_no_poison_in_paged_attention(problem: Problem) -> None:
    check_poison(problem)


@settings(max_examples=30)
@given(problems(operation="ragged_attention", max_work=MAX_WORK))
def test_the_oracle_sees_no_poison_in_ragged_attention(problem: Problem) -> None:
    check_poison(problem)


def check_poison(problem: Problem) -> None:
    clean, poisoned = materialise(problem), materialise(problem, unused=torch.nan)
    assert isinstance(clean, AttentionInputs)
    assert isinstance(poisoned, AttentionInputs)
    assert any(storage.isnan().any() for storage in poisoned.storages.values())
    for a, b in zip(oracle.attention(clean), oracle.attention(poisoned), strict=True):
        assert not b.isnan().any()
        assert same_bits(a, b)


@settings(max_examples=40)
@given(problems(operation="append_paged_kv", max_work=MAX_WORK))
def test_appending_fills_just_the_new_slots(problem: Problem) -> None:
    assert isinstance(problem, AttentionProblem)
    assume(not problem.cache_entry.scaled)  # codes have no NaN, and a call makes its own scales
    inputs = materialise(problem, unused=torch.nan)
    assert isinstance(inputs, AppendInputs)

    def filled(cache: torch.Tensor) -> int:
        values = inputs.kv_format.view(cache) if inputs.kv_format else cache
        return int((~values.float().isnan()).sum())

    before = [filled(cache) for cache in (inputs.k_cache, inputs.v_cache)]
    caches = oracle.append(inputs)
    whole = materialise(replace(problem, operation="paged_attention"), unused=torch.nan)
    assert isinstance(whole, PagedAttentionInputs)
    for name, cache, count in zip(("k", "v"), caches, before, strict=True):
        new = getattr(inputs, name)
        assert not new.isnan().any()
        assert filled(cache) == count + new.numel()
        assert same_bits(cache, getattr(whole, f"{name}_cache").contiguous())


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache", TOKEN_SCALED)
def test_scales_of_tokens_are_for_the_call_to_write(kv_cache: str, kv_layout: KVLayout) -> None:
    problem = replace(APPEND, kv_cache=kv_cache, kv_layout=kv_layout, strided_kv=True)
    inputs = materialise(problem, unused=torch.nan)
    assert isinstance(inputs, AppendInputs)
    assert inputs.kv_cache_sf is not None
    whole = oracle.append(inputs)
    expected, bound = oracle.bounded_append(inputs)
    assert bound is not None
    new = problem.num_tokens * problem.num_kv_heads
    for before, cache, number, error in zip(inputs.written, whole, expected, bound, strict=True):
        assert cache.shape == before.shape == number.shape == error.shape
        assert (cache.double() - number).abs().nan_to_num().le(error).all()
    for before, scales in zip(inputs.kv_cache_sf, whole[2:], strict=True):
        assert before.isnan().sum() == scales.isnan().sum() + new


def test_appending_in_place_is_drawn_both_ways() -> None:
    kinds = set()
    for seed in range(20):
        inputs = materialise(replace(APPEND, seed=seed))
        assert isinstance(inputs, AppendInputs)
        kinds.add(inputs.in_place)
    assert kinds == {True, False}


@pytest.mark.parametrize("unused", [CANARY, float("inf"), -3.0])
@pytest.mark.parametrize(
    "problem",
    [PAGED, RAGGED, APPEND, replace(PAGED, strided_q=True, strided_kv=True), MergeProblem()],
    ids=["paged", "ragged", "append", "strided", "merge"],
)
def test_every_tensor_lies_between_fences(problem: Problem, unused: float) -> None:
    inputs = materialise(problem, unused=unused)
    assert inputs.storages
    for name, storage in inputs.storages.items():
        fences = torch.cat([storage[:FENCE], storage[-FENCE:]])
        fill = unused if storage.dtype.is_floating_point else 11
        assert (fences == fill).all(), name
    for tensor in vars(inputs).values():
        if isinstance(tensor, torch.Tensor):
            home = tensor.untyped_storage().data_ptr()
            assert tensor.data_ptr() - home >= FENCE * tensor.element_size()


@pytest.mark.parametrize(
    "problem",
    [PAGED, RAGGED, APPEND, MergeProblem(), replace(PAGED, custom_mask=True, per_head_scales=True)],
    ids=["paged", "ragged", "append", "merge", "masked"],
)
def test_a_tight_tensor_ends_where_its_memory_does(problem: Problem) -> None:
    """A tool that watches allocations sees a read of four bytes behind an input."""
    inputs, usual = materialise(problem, tight=True), materialise(problem)
    metadata = getattr(inputs, "metadata", None)
    tensors = {**vars(inputs), **(metadata.tensors() if metadata is not None else {})}
    ends = 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or name in ("out", "lse") or not tensor.numel():
            continue
        room = tensor.untyped_storage()
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        assert end == room.data_ptr() + room.nbytes(), name
        ends += 1
    assert ends >= 2
    for name, tensor in vars(usual).items():
        if isinstance(tensor, torch.Tensor):  # the same bits
            assert torch.equal(tensor.nan_to_num(), getattr(inputs, name).nan_to_num()), name


@settings(max_examples=60)
@given(problems(operation="paged_attention", max_work=MAX_WORK))
def test_at_least_two_pages_belong_to_nobody(problem: Problem) -> None:
    assert isinstance(problem, AttentionProblem)
    inputs = paged(problem)
    used = set(inputs.metadata.paged_kv_indices.tolist())
    assert inputs.k_cache.shape[0] >= len(used) + 2
    for cache in (inputs.k_cache, inputs.v_cache):
        stored = inputs.kv_format.view(cache) if inputs.kv_format else cache
        canary = torch.tensor(CANARY).to(stored.dtype).float()  # e5m2 has no 11
        for page in sorted(set(range(stored.shape[0])) - used):
            assert (stored[page].float() == canary).all()


def test_pages_are_scattered_by_order() -> None:
    assert paged(PAGED).metadata.paged_kv_indices.tolist() == [0, 1, 2, 3, 4, 5, 6]
    orders = {
        tuple(paged(replace(PAGED, page_order=n)).metadata.paged_kv_indices.tolist())
        for n in range(4)
    }
    assert len(orders) == 4


def test_the_block_table_holds_garbage_past_the_used_pages() -> None:
    inputs = paged(PAGED)
    counts = [-(-s // PAGED.page_size) for s in PAGED.seq_lens]
    assert inputs.block_table.shape == (4, max(counts) + 1)
    garbage = [
        page
        for row, count in zip(inputs.block_table.tolist(), counts, strict=True)
        for page in row[count:]
    ]
    outside = [page for page in garbage if not 0 <= page < inputs.k_cache.shape[0]]
    assert len(garbage) == 4 * 4 - sum(counts)
    assert len(outside) > len(garbage) // 2
    again = build_metadata(PAGED.query_lens, PAGED.seq_lens, inputs.block_table, PAGED.page_size)
    for name, tensor in again.tensors().items():
        assert torch.equal(tensor, inputs.metadata.tensors()[name])


def test_shared_prefixes_share_pages_and_content() -> None:
    problem = replace(PAGED, seq_lens=(9, 13, 3, 4), shared_prefix_pages=2)
    inputs = paged(problem)
    table = inputs.block_table.tolist()
    assert table[0][:2] == table[1][:2]  # two whole pages each
    assert table[3][0] == table[0][0]  # one whole page
    assert table[2][0] != table[0][0]  # no whole page
    used = [*table[0][:3], *table[1][2:4], table[2][0]]
    assert len(set(used)) == len(used)
    requests = logical(inputs)
    for name in ("k", "v"):
        first, second, _, last = (getattr(request, name) for request in requests)
        assert torch.equal(first[:8], second[:8])
        assert not torch.equal(first[8:9], second[8:9])
        assert torch.equal(last[:4], first[:4])
    apart = logical(paged(replace(problem, shared_prefix_pages=0)))
    assert not torch.equal(apart[0].k[:8], apart[1].k[:8])


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
def test_a_shared_prefix_is_attended_to_as_if_each_request_had_its_own(regime: str) -> None:
    problem = replace(PAGED, seq_lens=(9, 13, 3, 4), shared_prefix_pages=2, regime=regime)
    # Each request's own keys, gathered page by page, are what ragged attention would be given.
    requests = logical(paged(problem))
    result = oracle.attention(paged(problem))
    start = 0
    for request in requests:
        rows = slice(start, start + len(request.q))
        start = rows.stop
        if len(request.q) and len(request.k):
            raw = torch.einsum(
                "thd,shd->ths", request.q.double(), request.k.double().repeat_interleave(3, 1)
            )
            limit = torch.arange(len(request.q)) + len(request.k) - len(request.q)
            hidden = torch.arange(len(request.k)) > limit[:, None]
            logits = (raw * problem.scale).masked_fill(hidden[:, None], -torch.inf)
            probabilities = torch.softmax(logits, dim=-1).nan_to_num(0.0)
            values = request.v.double().repeat_interleave(3, 1)
            out = torch.einsum("ths,she->the", probabilities, values)
            torch.testing.assert_close(result.out[rows], out, rtol=1e-9, atol=1e-9)


def test_strided_inputs_are_slices_of_something_larger() -> None:
    plain, strided = paged(PAGED), paged(replace(PAGED, strided_q=True, strided_kv=True))
    heads, dim = PAGED.num_qo_heads, PAGED.head_dim_qk
    assert plain.q.is_contiguous()
    assert strided.q.stride() == ((heads + 2 * PAGED.num_kv_heads) * dim, dim, 1)
    assert not strided.q.is_contiguous()
    for cache in (strided.k_cache, strided.v_cache):
        assert not cache.is_contiguous()
        assert cache.stride(0) > cache[0].numel()
        assert cache.stride(-1) == 1
    one = strided.k_cache.untyped_storage().data_ptr()
    assert one == strided.v_cache.untyped_storage().data_ptr()
    assert plain.k_cache.is_contiguous()
    hnd = paged(replace(PAGED, kv_layout="HND"))
    assert hnd.k_cache.is_contiguous()
    assert hnd.k_cache.shape[1:3] == (PAGED.num_kv_heads, PAGED.page_size)
    ragged = materialise(replace(RAGGED, strided_q=True, strided_kv=True))
    assert isinstance(ragged, AttentionInputs)
    assert not any(getattr(ragged, name).is_contiguous() for name in ("q", "k", "v"))


@settings(max_examples=50)
@given(problems(operation="build_metadata"))
def test_metadata_is_asked_with_garbage_in_unused_columns(problem: Problem) -> None:
    assert isinstance(problem, MetadataProblem)
    for step, (query_lens, seq_lens) in enumerate(problem.steps):
        inputs = materialise(problem, step=step)
        assert isinstance(inputs, MetadataInputs)
        assert inputs.query_lens.tolist() == list(query_lens)
        assert inputs.seq_lens.tolist() == list(seq_lens)
        assert inputs.block_table.dtype == torch.int32
        counts = [-(-s // problem.page_size) for s in seq_lens]
        assert inputs.block_table.shape == (
            len(counts),
            max(counts, default=0) + problem.spare_columns,
        )
        for row, count in zip(inputs.block_table.tolist(), counts, strict=True):
            assert all(0 <= page < 10_000 for page in row[:count])
        oracle.metadata(inputs)


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
@pytest.mark.parametrize("kv_cache", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("strided", [False, True])
def test_latent_values_are_the_keys_first_channels(
    regime: str, kv_cache: str, strided: bool
) -> None:
    problem = AttentionProblem(
        query_lens=(1, 3),
        seq_lens=(21, 3),
        group_size=3,
        head_dim_qk=24,
        head_dim_vo=16,
        dtype="bfloat16",
        page_size=4,
        page_order=1,
        causal=True,
        values_in_keys=True,
        kv_cache=kv_cache,
        regime=regime,
        strided_kv=strided,
    )
    inputs = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs)
    assert inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr()
    assert inputs.v_cache.stride() == inputs.k_cache.stride()
    assert inputs.k_cache.stride(0) == (2 if strided else 1) * 4 * 24
    attended = oracle.attention(inputs)
    assert attended.out.shape == (4, 3, 16)
    assert attended.out.isfinite().all()
    if problem.exact:
        assert torch.equal(attended.out, attended.out.bfloat16().to(attended.out.dtype))
        assert attended.out.unique().numel() > 8


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
@pytest.mark.parametrize(("channels", "heads"), [(16, 5), (32, 71)])
def test_values_may_be_the_whole_of_the_keys(regime: str, channels: int, heads: int) -> None:
    problem = AttentionProblem(
        query_lens=(1, 2),
        seq_lens=(11, 6),
        group_size=heads,
        head_dim_qk=channels,
        head_dim_vo=channels,
        page_size=4,
        page_order=1,
        values_in_keys=True,
        regime=regime,
    )
    inputs = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs)
    assert torch.equal(inputs.v_cache, inputs.k_cache)
    attended = oracle.attention(inputs)
    indptr = inputs.metadata.paged_kv_indptr.tolist()
    row = 0
    for request, (t, s) in enumerate(zip(problem.query_lens, problem.seq_lens, strict=True)):
        pages = inputs.metadata.paged_kv_indices[indptr[request] : indptr[request + 1]].long()
        keys = inputs.k_cache[pages].flatten(0, 2)[:s].double()
        for q in inputs.q[row : row + t].double():
            weights = torch.softmax(q @ keys.T * inputs.sm_scale, dim=-1)
            assert torch.allclose(attended.out[row], weights @ keys, atol=1e-9, rtol=1e-9)
            row += 1
