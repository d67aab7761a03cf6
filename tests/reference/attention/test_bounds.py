"""The error bounds: honest float32 kernels stay inside them, wrong ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    AttentionOutput,
    attention_error_bound,
    build_metadata,
    paged_attention,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.attention.error_terms import SUM, growth

LOG2_E = math.log2(math.e)

Unary = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """One request: q [T, H, D], k [S, K, D], v [S, K, E] and the oracle's options."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        ends = [torch.tensor([0, tensor.shape[0]]) for tensor in (self.q, self.k)]
        return (self.q, self.k, self.v, *ends)

    def exact(self) -> AttentionOutput:
        return ragged_attention(*self.arguments(), **self.options)

    def bound(
        self, arithmetic: Arithmetic | None = None, out_dtype: torch.dtype | None = None
    ) -> AttentionOutput:
        return ragged_attention_error_bound(
            *self.arguments(), **self.options, arithmetic=arithmetic, out_dtype=out_dtype
        )

    def visible(self) -> torch.Tensor:
        """Return the [T, S] mask of what each row sees."""
        num_queries, num_keys = self.q.shape[0], self.k.shape[0]
        position = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        key = torch.arange(num_keys).unsqueeze(0)
        keep = torch.ones((num_queries, num_keys), dtype=torch.bool)
        if self.options.get("causal", True):
            keep &= key <= position
        if self.options.get("window_left", -1) >= 0:
            keep &= key >= position - self.options["window_left"]
        return keep


# Honest kernels, all in float32


@dataclass(frozen=True)
class Kernel:
    """A way in which a correct kernel may order and round its float32 arithmetic."""

    tile: int = 10**9  # keys a step of the online softmax
    splits: int = 1  # parts of the keys, merged through their lse
    order: str = "forward"  # in which tiles and splits are visited: forward, backward, shuffled
    probabilities: torch.dtype | None = None
    base2: bool = False  # logits are scaled by log2(e), the exponential is exp2
    one_by_one: bool = False  # dot products and sums take one term after the other

    def arithmetic(self) -> Arithmetic:
        name = None if self.probabilities is None else str(self.probabilities).split(".")[-1]
        return Arithmetic(probabilities=name)

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not self.one_by_one:
            return a @ b
        total = torch.zeros((*a.shape[:-1], b.shape[-1]))
        for i in range(a.shape[-1]):
            total = total + a[..., i : i + 1] * b[..., i : i + 1, :]
        return total

    def chunks(self, start: int, stop: int, size: int) -> list[slice]:
        found = [slice(i, min(i + size, stop)) for i in range(start, stop, size)]
        if self.order == "backward":
            found.reverse()
        elif self.order == "shuffled":
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1))
            found = [found[i] for i in order.tolist()]
        return found

    def run(self, rows: Rows, out_dtype: torch.dtype = torch.float32) -> AttentionOutput:
        """Compute attention as such a kernel would."""
        exp: Unary = torch.exp2 if self.base2 else torch.exp
        log: Unary = torch.log2 if self.base2 else torch.log
        unit = LOG2_E if self.base2 else 1.0
        logits, v = self.logits(rows, unit), heads_first(rows.v, rows)
        num_keys = rows.k.shape[0]
        out = torch.zeros((*logits.shape[:2], v.shape[-1]))
        lse = torch.full((*logits.shape[:2], 1), -math.inf)
        for part in self.chunks(0, num_keys, max(1, -(-num_keys // self.splits))):
            largest, total, acc = lse.new_full(lse.shape, -math.inf), lse * 0, out * 0
            total = torch.zeros_like(lse)
            for tile in self.chunks(part.start, part.stop, self.tile):
                s = logits[..., tile]
                new = torch.maximum(largest, s.amax(dim=-1, keepdim=True))
                safe = torch.where(new.isneginf(), 0.0, new)
                shrink = exp(largest - safe)
                p = exp(s - safe)
                total = total * shrink + p.sum(dim=-1, keepdim=True)
                if self.probabilities is not None:
                    p = p.to(self.probabilities).float()
                acc = acc * shrink + self.product(p, v[:, tile])
                largest = new
            part_out = acc / torch.where(total == 0, 1.0, total)
            out, lse = merge(out, lse, part_out, largest + log(total), exp, log)
        if "sinks" in rows.options:
            sink = (rows.options["sinks"].float() * unit).reshape(-1, 1, 1).expand_as(lse)
            out, lse = merge(out, lse, out * 0, sink, exp, log)
        out = out * scale_of(rows.options.get("v_scale", 1.0), rows)
        lse = (lse / unit).squeeze(-1)
        return AttentionOutput(
            out.to(out_dtype).double().transpose(0, 1), lse.double().transpose(0, 1)
        )

    def logits(self, rows: Rows, unit: float) -> torch.Tensor:
        """Compute the masked logits [H, T, S], in units of log(2) for a base of 2."""
        q, k = rows.q.float().transpose(0, 1), heads_first(rows.k, rows)
        scale: float = rows.options.get("sm_scale", rows.q.shape[-1] ** -0.5)
        cap: float = rows.options.get("logits_soft_cap", 0.0)
        logits = self.product(q, k.transpose(-1, -2))
        logits = logits * scale_of(rows.options.get("k_scale", 1.0), rows)
        if cap:
            logits = torch.tanh(logits * (scale / cap)) * (cap * unit)
        else:
            logits = logits * (scale * unit)
        return logits.masked_fill(~rows.visible(), -math.inf)


def merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    exp: Unary,
    log: Unary,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states in float32, as split-KV kernels do."""
    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest.isneginf(), 0.0, largest)
    a, b = exp(lse_a - largest), exp(lse_b - largest)
    total = a + b
    safe = torch.where(total == 0, 1.0, total)
    return out_a * (a / safe) + out_b * (b / safe), largest + log(total)


def heads_first(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Repeat key-value heads: [S, K, X] to float32 [H, S, X]."""
    groups = rows.q.shape[1] // tensor.shape[1]
    return tensor.float().repeat_interleave(groups, dim=1).transpose(0, 1)


def scale_of(scale: float | torch.Tensor, rows: Rows) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        return torch.tensor(scale, dtype=torch.float32)
    groups = rows.q.shape[1] // scale.numel()
    return scale.float().repeat_interleave(groups).reshape(-1, 1, 1)


KERNELS = {
    "plain": Kernel(),
    "plain, one by one": Kernel(one_by_one=True),
    "online": Kernel(tile=16),
    "online, backward, base 2": Kernel(tile=16, order="backward", base2=True),
    "online by 1": Kernel(tile=1),
    "split": Kernel(splits=5),
    "split, shuffled tiles, base 2": Kernel(tile=8, splits=7, order="shuffled", base2=True),
    "split by key": Kernel(splits=10**6, order="backward"),
    "bf16 probabilities": Kernel(probabilities=torch.bfloat16),
    "bf16 probabilities, online, base 2": Kernel(tile=32, probabilities=torch.bfloat16, base2=True),
    "bf16 probabilities, split, backward": Kernel(
        tile=16, splits=4, order="backward", probabilities=torch.bfloat16, one_by_one=True
    ),
    "fp16 probabilities": Kernel(tile=64, probabilities=torch.float16),
}

QUICK = {name: kernel for name, kernel in KERNELS.items() if "by" not in name}

# Values


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def iid(rows: Rows) -> Rows:
    return rows


def sharp(rows: Rows) -> Rows:
    return Rows(rows.q * 12, rows.k, rows.v)


def shifted(rows: Rows) -> Rows:
    """Shift raw logits by -441 D: -56448 at D = 128."""
    return Rows(rows.q * 0.1 - 21, rows.k * 0.1 + 21, rows.v)


def huge(rows: Rows) -> Rows:
    """Make scaled logits near 1e6: a float32 logit there is a multiple of 1/16."""
    scale = rows.q.shape[-1] ** -0.25 * 1000
    return Rows(rows.q * 0.01 + scale, rows.k * 0.01 + scale, rows.v)


def huge_negative(rows: Rows) -> Rows:
    rows = huge(rows)
    return Rows(-rows.q, rows.k, rows.v)


def outliers(rows: Rows) -> Rows:
    q, k, v = rows.q.clone(), rows.k.clone(), rows.v.clone()
    q[..., 3] *= 50
    k[..., 3] *= 50
    k[..., 5] += 100
    v[..., 1] *= 1000
    return Rows(q, k, v)


def one_key(rows: Rows) -> Rows:
    return Rows(rows.q, rows.k[:1].expand_as(rows.k).contiguous(), rows.v)


def one_key_scaled(rows: Rows) -> Rows:
    return Rows(rows.q * 7, rows.k[:1].expand_as(rows.k).contiguous(), rows.v)


def few_keys(rows: Rows) -> Rows:
    """Take three distinct keys over and over, values independent of them."""
    return Rows(rows.q, rows.k[torch.arange(len(rows.k)) % 3], rows.v)


def constant_v(rows: Rows) -> Rows:
    return Rows(rows.q, rows.k, torch.full_like(rows.v, 1.7))


def constant_v_one_key(rows: Rows) -> Rows:
    return constant_v(one_key(rows))


def needle(rows: Rows) -> Rows:
    k = rows.k.clone()
    k[len(k) // 2] = rows.q[-1, : k.shape[1]] * 3
    return Rows(rows.q, k, rows.v)


def nearly_equal(rows: Rows) -> Rows:
    return Rows(rows.q * 1e-3, rows.k, rows.v)


def tiny(rows: Rows) -> Rows:
    return Rows(rows.q * 1e-4, rows.k * 1e-4, rows.v * 1e-4)


def zeros(rows: Rows) -> Rows:
    return Rows(rows.q * 0, rows.k, rows.v)


def zero_v(rows: Rows) -> Rows:
    return Rows(rows.q, rows.k, rows.v * 0)


def positional_v(rows: Rows) -> Rows:
    position = torch.arange(len(rows.v)).reshape(-1, 1, 1) % 64
    return Rows(rows.q, rows.k, (position / 8).expand_as(rows.v).contiguous())


def rising(rows: Rows) -> Rows:
    """Let every key beat those before it: the online softmax rescales at each step."""
    ramp = torch.linspace(-1, 1, len(rows.k)).reshape(-1, 1, 1)
    return Rows(rows.q.abs(), rows.k.abs() * ramp * 3, rows.v)


VALUES = {
    function.__name__: function
    for function in (
        iid, sharp, shifted, huge, huge_negative, outliers, one_key, one_key_scaled, few_keys,
        constant_v, constant_v_one_key, needle, nearly_equal, tiny, zeros, zero_v, positional_v,
        rising,
    )
}  # fmt: skip


def make_rows(
    num_queries: int,
    num_keys: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dim_vo: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    values: Callable[[Rows], Rows] = iid,
    seed: int = 0,
    **options: Any,  # noqa: ANN401  the oracle's options
) -> Rows:
    rows = values(
        Rows(
            normal(seed, num_queries, heads, dim),
            normal(seed + 1, num_keys, kv_heads, dim),
            normal(seed + 2, num_keys, kv_heads, dim_vo),
        )
    )
    return Rows(rows.q.to(dtype), rows.k.to(dtype), rows.v.to(dtype), options)


def worst(found: AttentionOutput, exact: AttentionOutput, bound: AttentionOutput) -> float:
    """Return the largest error over bound of out and lse; an error where 0 is allowed is inf."""
    ratios = []
    for actual, wanted, allowed in zip(found, exact, bound, strict=True):
        same = actual == wanted  # also where both are -inf
        error = torch.where(same, 0.0, (actual - wanted).abs())
        assert not allowed.isnan().any()
        ratio = torch.where(same, 0.0, error / allowed)
        assert not ratio.isnan().any()
        ratios.append(ratio.amax().item() if ratio.numel() else 0.0)
    return max(ratios)


def ratio_of(kernel: Kernel, rows: Rows, out_dtype: torch.dtype = torch.float32) -> float:
    return worst(
        kernel.run(rows, out_dtype), rows.exact(), rows.bound(kernel.arithmetic(), out_dtype)
    )


def assert_all_inside(
    rows: Rows, out_dtype: torch.dtype = torch.float32, kernels: dict[str, Kernel] = KERNELS
) -> None:
    exact = rows.exact()
    bounds: dict[Arithmetic, AttentionOutput] = {}
    for name, kernel in kernels.items():
        arithmetic = kernel.arithmetic()
        if arithmetic not in bounds:
            bounds[arithmetic] = rows.bound(arithmetic, out_dtype)
        ratio = worst(kernel.run(rows, out_dtype), exact, bounds[arithmetic])
        assert ratio <= 1, (name, tuple(rows.q.shape), len(rows.k), rows.q.dtype, out_dtype)


values = pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))


@values
def test_honest_kernels_stay_inside(values: Callable[[Rows], Rows]) -> None:
    for seed, (num_queries, num_keys) in enumerate([(3, 40), (1, 257), (5, 3)]):
        for dtype in (torch.float32, torch.bfloat16):
            rows = make_rows(num_queries, num_keys, values=values, dtype=dtype, seed=seed)
            assert_all_inside(rows)


OPTIONS: dict[str, dict[str, Any]] = {
    "soft cap 1": {"logits_soft_cap": 1.0},
    "soft cap 30": {"logits_soft_cap": 30.0, "sm_scale": 1.0},
    "sinks": {"sinks": torch.tensor([0.0, 5.0, -50.0, 80.0])},
    "scales": {"k_scale": torch.tensor([0.3, 4.0]), "v_scale": torch.tensor([7.0, -0.01])},
    "window": {"window_left": 5},
    "not causal": {"causal": False},
    "everything": {
        "window_left": 20,
        "logits_soft_cap": 5.0,
        "sinks": torch.tensor([0.0, 5.0, -50.0, 80.0]),
        "k_scale": 0.5,
        "v_scale": 3.0,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_options_and_output_formats(options: dict[str, Any], dtype: torch.dtype) -> None:
    chosen = [iid, outliers, needle, tiny, one_key]
    chosen += [huge, shifted] if dtype != torch.float16 else []  # beyond the range of float16
    for seed, values in enumerate(chosen):
        rows = make_rows(4, 70, values=values, dtype=dtype, seed=seed, **options)
        for out_dtype in {dtype, torch.float32}:
            assert_all_inside(rows, out_dtype, QUICK)


@pytest.mark.parametrize("values", [iid, huge, nearly_equal, rising, positional_v])
def test_long_sequences(values: Callable[[Rows], Rows]) -> None:
    rows = make_rows(1, 4097, heads=2, values=values)
    for kernel in (
        Kernel(one_by_one=True),
        Kernel(tile=1),
        Kernel(tile=64, splits=128, order="shuffled", base2=True),
        Kernel(tile=64, probabilities=torch.bfloat16),
    ):
        for out_dtype in (torch.bfloat16, torch.float32):
            assert ratio_of(kernel, rows, out_dtype) <= 1, (kernel, out_dtype)


@pytest.mark.parametrize("limit", [1, 20_000])
def test_the_bound_holds_for_any_block_of_rows(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(40, 60, window_left=30)
    monkeypatch.setattr("kernelproof.reference.attention.softmax.MAX_LOGIT_BYTES", limit)
    assert_all_inside(rows, kernels=QUICK)


def repeated(rows: Rows) -> Rows:
    """Repeat three keys with their own values, as a block table that repeats a page does."""
    index = torch.arange(len(rows.k)) % 3
    return Rows(rows.q, rows.k[index], rows.v[index])


def test_repeated_keys_with_repeated_values() -> None:
    kernel = KERNELS["bf16 probabilities"]
    assert (
        max(ratio_of(kernel, make_rows(1, 1025, values=repeated, seed=seed)) for seed in range(4))
        <= 1
    )


def equal(rows: Rows) -> Rows:
    """Repeat one key with its value, as a cache of the largest codes does."""
    return Rows(rows.q, rows.k[:1].expand_as(rows.k), rows.v[:1].expand_as(rows.v))


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_equal_addends(seed: int) -> None:
    """Their roundings go the same way: sums one by one are off by more than a random walk is."""
    rows = make_rows(1, 4096, heads=2, values=equal, seed=seed, dtype=torch.float32)
    kernel = Kernel(one_by_one=True)
    assert ratio_of(kernel, rows) <= 1
    exact, u = rows.exact().out, 2.0**-24
    off = (kernel.run(rows, torch.float32).out.double() - exact).abs()
    # Of equal values the output is one, however the weights are off: what is left are the sums.
    assert bool((off > 1.2 * (2 * growth(4096) + SUM) * u * exact.abs()).any())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_tightness_on_independent_values(out_dtype: torch.dtype) -> None:
    kernel = KERNELS["bf16 probabilities, online, base 2"]
    ratios = [
        ratio_of(
            kernel,
            make_rows(num_queries, num_keys, dim=dim, dim_vo=dim, seed=seed, causal=False),
            out_dtype,
        )
        for seed, num_keys in enumerate([16, 17, 33, 64, 100, 257, 512])
        for num_queries in (1, 3)
        for dim in (64, 128)
    ]
    middle = sorted(ratios)[len(ratios) // 2]
    assert 0.1 <= middle <= 0.6
    assert max(ratios) <= 1


# What the bound must not forgive


def drop_last_key(rows: Rows) -> Rows:
    return Rows(rows.q, rows.k[:-1], rows.v[:-1], rows.options)


def swap_two_pages_of_keys(rows: Rows) -> Rows:
    k = rows.k.clone()
    k[16:32], k[64:80] = rows.k[64:80], rows.k[16:32]
    return Rows(rows.q, k, rows.v, rows.options)


def scale_by_two_percent(rows: Rows) -> Rows:
    return Rows(rows.q, rows.k, rows.v, {**rows.options, "sm_scale": 1.02 * 128**-0.5})


def read_one_key_more(rows: Rows) -> Rows:
    k, v = (torch.cat([t, t.flip(0)[:1] * 0 + 0.5]) for t in (rows.k, rows.v))
    return Rows(rows.q, k, v, rows.options)


@pytest.mark.parametrize("num_keys", [97, 1025, 4097])
@pytest.mark.parametrize(
    "fault",
    [drop_last_key, read_one_key_more, scale_by_two_percent, swap_two_pages_of_keys],
)
def test_faults_are_caught(fault: Callable[[Rows], Rows], num_keys: int) -> None:
    kernel = Kernel(tile=64, probabilities=torch.bfloat16)
    for seed in range(3):
        rows = make_rows(
            1, num_keys, heads=8, kv_heads=8, dim=128, dim_vo=128, seed=seed * 5, causal=False
        )
        exact, bound = rows.exact(), rows.bound(kernel.arithmetic(), torch.bfloat16)
        assert worst(kernel.run(rows, torch.bfloat16), exact, bound) <= 1
        found = kernel.run(fault(rows), torch.bfloat16)
        if fault is not swap_two_pages_of_keys:  # the same keys have the same normaliser
            assert ((found.lse - exact.lse).abs() > bound.lse).any()
        if fault is not read_one_key_more:  # its value is near the mean of all
            assert ((found.out - exact.out).abs() > bound.out).any()


def test_roundings_that_were_not_declared_are_caught() -> None:
    rows = make_rows(2, 64)
    kernel = KERNELS["bf16 probabilities"]
    exact = rows.exact()
    undeclared = rows.bound(Arithmetic(), torch.float32)
    assert worst(kernel.run(rows), exact, undeclared) > 1
    assert worst(Kernel().run(rows, torch.bfloat16), exact, undeclared) > 1


# Its shape


def test_it_grows_with_the_magnitude_of_the_logits() -> None:
    def bound(logit: float) -> AttentionOutput:
        keys, values = torch.tensor([[[logit]], [[logit]]]), torch.tensor([[[1.0]], [[-1.0]]])
        return Rows(torch.ones((1, 1, 1)), keys, values).bound()

    unit = 2.0**-24
    for logit in (1e2, 1e3, 1e4):
        small, large = bound(logit), bound(10 * logit)
        assert small.lse.item() >= 2 * unit * logit
        assert 8 < large.lse.item() / small.lse.item() < 12
        assert bound(-logit).lse.item() == pytest.approx(small.lse.item(), rel=0.01)
    assert bound(1e4).out.item() > 50 * bound(1e2).out.item()


def test_keys_in_reach_of_the_logits_errors_may_change_places() -> None:
    """Keys that differ in one element of 128 are alike in fixed point; a third never counts."""
    q = torch.full((1, 1, 128), 448.0).to(torch.float8_e4m3fn)
    k = torch.full((3, 1, 128), 448.0)
    k[1, 0, 7], k[2] = 416.0, -448.0
    v = torch.tensor([0.0, 1.0, 64.0]).view(3, 1, 1)
    call: Any = {
        "q": q,
        "k": k.to(q.dtype),
        "v": v.to(q.dtype),
        "qo_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 3], dtype=torch.int32),
        "sm_scale": 1.0,
        "causal": False,
    }
    gap = 448.0 * 32
    exact = ragged_attention(**call)
    assert exact.out.item() == 0
    fixed_point = ragged_attention_error_bound(
        **call, arithmetic=Arithmetic(fp8_products="fixed_point"), out_dtype=torch.float16
    )
    assert 1 <= fixed_point.out.item() < 3
    assert fixed_point.lse.item() >= gap
    exact_products = ragged_attention_error_bound(**call, out_dtype=torch.float16)
    assert exact_products.out.item() < 1e-6
    assert exact_products.lse.item() < gap


def test_keys_that_a_sum_of_float32_loses_one_by_one_are_within_it() -> None:
    # exp(-18) is less than half a unit in the last place of 1: a sum that begins with the first
    # key stays what it is, and what it loses grows with the number of keys, not with its root.
    num_keys, logit = 65_536, 18.0
    k = torch.zeros(num_keys, 1, 4)
    k[:, 0, 1] = torch.arange(num_keys) / 1024.0  # no two keys are equal
    k[0, 0, 0] = logit
    v = torch.ones(num_keys, 1, 4)
    v[0] = 0.5
    rows = Rows(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), k, v, {"sm_scale": 1.0})
    expected, bound = rows.exact(), rows.bound()
    sum_of_float32 = torch.tensor(1.0)
    for _ in range(64):
        sum_of_float32 = sum_of_float32 + math.exp(-logit)
    assert sum_of_float32 == 1
    assert bool(((logit - expected.lse).abs() <= bound.lse).all())
    assert bool(((0.5 - expected.out).abs() <= bound.out).all())
    assert float(bound.lse.max()) < num_keys * 2.0**-23


def test_it_is_zero_where_a_row_sees_nothing() -> None:
    rows = make_rows(5, 3)
    bound = rows.bound(Arithmetic(probabilities="bfloat16"))
    assert torch.equal(bound.out[:2], torch.zeros_like(bound.out[:2]))
    assert torch.equal(bound.lse[:2], torch.zeros_like(bound.lse[:2]))
    assert (bound.out[2:] > 0).all()
    assert (bound.lse[2:] > 0).all()
    empty = make_rows(2, 0).bound()
    assert not empty.out.any()
    assert not empty.lse.any()


def test_a_row_that_sees_only_its_sink() -> None:
    rows = make_rows(5, 3, sinks=torch.tensor([0.0, 1.0, -3e4, 3e4]))
    bound, exact = rows.bound(), rows.exact()
    assert (bound.out[:2] <= 2.0**-133).all()
    assert (bound.lse[:2] <= 2.0**-18 * (1 + exact.lse[:2].abs())).all()


def test_what_is_declared_decides() -> None:
    rows = make_rows(2, 40)
    plain, half, brain = (
        rows.bound(Arithmetic(probabilities=name)) for name in (None, "float16", "bfloat16")
    )
    assert (plain.out < half.out).all()
    assert (half.out < brain.out).all()
    assert torch.equal(plain.lse, brain.lse)  # the row sum is taken before the rounding
    assert torch.equal(rows.bound(Arithmetic(probabilities="inputs")).out, brain.out)
    assert torch.equal(rows.bound(out_dtype=torch.bfloat16).out, plain.out)
    assert (rows.bound(out_dtype=torch.float32).out < plain.out).all()
    double = rows.bound(Arithmetic("float64"), torch.float64)
    assert (double.out < rows.bound(None, torch.float32).out * 1e-7).all()
    wide = Rows(rows.q.float(), rows.k.float(), rows.v.float())
    inputs = wide.bound(Arithmetic(probabilities="inputs"))
    assert torch.equal(inputs.out, wide.bound().out)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_paged_and_ragged_bounds_agree(kv_layout: str) -> None:
    options: dict[str, Any] = {
        "window_left": 9,
        "logits_soft_cap": 3.0,
        "v_scale": torch.tensor([2.0, 0.5]),
    }
    rows = make_rows(4, 48, **options)
    order = torch.tensor([2, 0, 1])

    def cache_of(tensor: torch.Tensor) -> torch.Tensor:
        cache = torch.empty((3, 16, *tensor.shape[1:]), dtype=tensor.dtype)
        cache[order] = tensor.reshape(cache.shape)
        return cache.transpose(1, 2) if kv_layout == "HND" else cache

    metadata = build_metadata([4], [48], order.unsqueeze(0), 16)
    arguments = rows.q, cache_of(rows.k), cache_of(rows.v), metadata
    options["kv_layout"] = kv_layout
    inputs = Arithmetic(probabilities="inputs")
    found = attention_error_bound(*arguments, **options, arithmetic=inputs)
    expected = rows.bound(inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    paged = paged_attention(*arguments, **options)
    assert all(torch.equal(*pair) for pair in zip(paged, rows.exact(), strict=True))


def test_float32_on_request() -> None:
    rows = make_rows(2, 40)
    found = ragged_attention_error_bound(*rows.arguments(), compute_dtype=torch.float32)
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out.double(), rows.bound().out, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [(torch.float32, Arithmetic()), (torch.bfloat16, Arithmetic(probabilities="inputs"))],
)
def test_one_dropped_key_of_4096_is_inside_allclose_and_outside_the_bound(
    dtype: torch.dtype, arithmetic: Arithmetic
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(count, 1, 128).to(dtype) for count in (64, 4096, 4096))
    rows = Rows(q, k, v, {"causal": False})
    expected, dropped = rows.exact().out, Rows(q, k[:-1], v[:-1], rows.options).exact().out
    assert torch.allclose(dropped, expected, rtol=1e-2, atol=1e-2)
    outside = (dropped - expected).abs() > rows.bound(arithmetic).out
    assert outside.double().mean() > 0.03  # 0.47 in float32, 0.04 in bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees() -> None:
    rows = make_rows(3, 40)
    on_device = Rows(rows.q.cuda(), rows.k.cuda(), rows.v.cuda())
    found, expected = on_device.bound(), rows.bound()
    assert found.out.is_cuda
    torch.testing.assert_close(found.out.cpu(), expected.out, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.lse.cpu(), expected.lse, rtol=1e-9, atol=0)
