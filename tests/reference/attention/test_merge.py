"""Merging attention states: the definition, the algebra, and the bound on an honest merge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    AttentionOutput,
    MergeProblem,
    materialise,
    merge_error_bound,
    merge_states,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.tensors.inputs import MergeInputs

FLOAT64 = torch.float64
INF = math.inf
LOG2_E = math.log2(math.e)

States = tuple[torch.Tensor, torch.Tensor]


def make_states(
    states: int,
    tokens: int = 3,
    heads: int = 2,
    dim: int = 5,
    *,
    seed: int = 0,
    magnitude: float = 3.0,
    shift: float = 0.0,
    empty: float = 0.0,
    garbage: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> States:
    """Make random states, a share of them empty with garbage for an output."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn((states, tokens, heads, dim), generator=generator).to(dtype)
    lses = torch.randn((states, tokens, heads), generator=generator) * magnitude + shift
    is_empty = torch.rand(lses.shape, generator=generator) < empty
    return outs.masked_fill(is_empty.unsqueeze(-1), garbage), lses.masked_fill(is_empty, -INF)


def define(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    """Loop over tokens, heads, states and channels, with correctly rounded sums."""
    states, tokens, heads, dim = outs.shape
    out = torch.zeros((tokens, heads, dim), dtype=FLOAT64)
    lse = torch.full((tokens, heads), -INF, dtype=FLOAT64)
    for token, head in itertools.product(range(tokens), range(heads)):
        present = [s for s in range(states) if lses[s, token, head] != -INF]
        if not present:
            continue
        logs = [float(lses[s, token, head]) for s in present]
        total = math.fsum(math.exp(log - max(logs)) for log in logs)
        lse[token, head] = max(logs) + math.log(total)
        for channel in range(dim):
            out[token, head, channel] = math.fsum(
                math.exp(log - max(logs)) / total * float(outs[s, token, head, channel])
                for s, log in zip(present, logs, strict=True)
            )
    return AttentionOutput(out, lse)


def assert_close(
    found: AttentionOutput, expected: AttentionOutput, tolerance: float = 1e-12
) -> None:
    for name, actual, wanted in zip(("out", "lse"), found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance, msg=name)


def assert_equal(found: AttentionOutput, expected: AttentionOutput) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("states", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FLOAT64])
@pytest.mark.parametrize("empty", [0.0, 0.4])
def test_the_definition(states: int, dtype: torch.dtype, empty: float) -> None:
    made = make_states(states, dtype=dtype, empty=empty, garbage=math.nan)
    found = merge_states(*made)
    assert found.out.dtype == found.lse.dtype == FLOAT64
    assert_close(found, define(*made))


@pytest.mark.parametrize("shift", [0.0, 1e5, -1e5])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 1e3, 1e5])
def test_any_magnitude_of_lse(shift: float, magnitude: float) -> None:
    made = make_states(4, magnitude=magnitude, shift=shift, empty=0.2)
    assert_close(merge_states(*made), define(*made), 1e-10)  # an lse of 1e5 is rounded by 1e-11


def test_by_hand() -> None:
    outs = torch.tensor([8.0, 16.0], dtype=FLOAT64).reshape(2, 1, 1, 1)
    lses = torch.tensor([0.0, math.log(3.0)], dtype=FLOAT64).reshape(2, 1, 1)
    found = merge_states(outs, lses)
    assert found.out.item() == pytest.approx(14.0, rel=1e-15)
    assert found.lse.item() == pytest.approx(math.log(4.0), rel=1e-15)


def test_a_power_of_two_of_equal_states_is_exact() -> None:
    outs = torch.arange(4.0, dtype=FLOAT64).reshape(4, 1, 1, 1)
    found = merge_states(outs, torch.full((4, 1, 1), 0.0))
    assert found.out.item() == 1.5
    assert found.lse.item() == math.log(4.0)


# The algebra


@pytest.mark.parametrize("garbage", [0.0, math.nan, INF, 1e30])
def test_an_empty_state_is_the_identity(garbage: float) -> None:
    outs, lses = make_states(1, empty=0.3, magnitude=1e4, dtype=FLOAT64)
    alone = merge_states(outs, lses)
    assert_equal(alone, AttentionOutput(outs[0], lses[0].double()))
    nothing = torch.full_like(outs, garbage), torch.full_like(lses, -INF)
    for order in ((0, 1), (1, 0), (1, 0, 1), (1, 1, 0)):
        found = merge_states(
            torch.cat([(outs, nothing[0])[i] for i in order]),
            torch.cat([(lses, nothing[1])[i] for i in order]),
        )
        assert_equal(found, alone)


@pytest.mark.parametrize("states", [0, 1, 2, 5])
def test_only_empty_states(states: int) -> None:
    outs = torch.full((states, 3, 2, 5), math.nan)
    found = merge_states(outs, torch.full((states, 3, 2), -INF))
    assert torch.equal(found.out, torch.zeros((3, 2, 5), dtype=FLOAT64))
    assert torch.equal(found.lse, torch.full((3, 2), -INF, dtype=FLOAT64))
    bound = merge_error_bound(outs, torch.full((states, 3, 2), -INF))
    assert not bound.out.any()
    assert not bound.lse.any()


def test_no_tokens() -> None:
    found = merge_states(torch.zeros((2, 0, 4, 8)), torch.zeros((2, 0, 4)))
    assert found.out.shape == (0, 4, 8)
    assert found.lse.shape == (0, 4)


def test_it_is_commutative() -> None:
    outs, lses = make_states(4, empty=0.3, garbage=math.nan)
    expected = merge_states(outs, lses)
    for order in itertools.permutations(range(4)):
        assert_close(merge_states(outs[list(order)], lses[list(order)]), expected)


def pairwise(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    state = AttentionOutput(outs[0].double(), lses[0].double())
    for out, lse in zip(outs[1:].double(), lses[1:].double(), strict=True):
        state = merge_states(torch.stack([state.out, out]), torch.stack([state.lse, lse]))
    return state


@pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e5])
def test_it_is_associative(magnitude: float) -> None:
    outs, lses = make_states(6, empty=0.3, magnitude=magnitude, garbage=math.nan)
    outs[:, 0], lses[:, 0] = math.nan, -INF
    expected = merge_states(outs, lses)
    first, second = merge_states(outs[:2], lses[:2]), merge_states(outs[2:], lses[2:])
    joined = (torch.stack(pair) for pair in zip(first, second, strict=True))
    assert_close(merge_states(*joined), expected)
    outs = outs.nan_to_num()  # the first state of a chain is not merged with anything
    assert_close(pairwise(outs, lses), expected)


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_attention_over_the_union(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn((length, heads, 8), generator=generator)
        for length, heads in ((3, 4), (20, 2), (20, 2))
    )
    tokens = torch.tensor([0, 3])
    cuts = sorted(torch.randint(0, 21, (3,), generator=generator).tolist())
    order = torch.randperm(20, generator=generator)
    parts = [
        ragged_attention(q, k[part], v[part], tokens, torch.tensor([0, len(part)]), causal=False)
        for part in order.tensor_split(cuts)  # some of them empty
    ]
    merged = merge_states(*(torch.stack(each) for each in zip(*parts, strict=True)))
    whole = ragged_attention(q, k, v, tokens, torch.tensor([0, 20]), causal=False)
    assert_close(merged, whole)


def test_garbage_of_an_empty_state_stays_in_its_row() -> None:
    outs, lses = make_states(3)
    expected = merge_states(outs, lses)
    outs[1, 2, 0], lses[1, 2, 0] = math.nan, -INF
    found = merge_states(outs, lses)
    assert found.out.isfinite().all()
    changed = torch.zeros((3, 2), dtype=torch.bool)
    changed[2, 0] = True
    assert torch.equal((found.lse != expected.lse), changed)
    bound = merge_error_bound(outs, lses, out_errors=outs.abs(), lse_errors=lses.abs() * 0 + 1e-3)
    assert bound.out[~changed].isfinite().all()


def test_no_input_is_changed_and_float32_on_request() -> None:
    outs, lses = make_states(3, empty=0.3)
    before = outs.clone(), lses.clone()
    found = merge_states(outs, lses, compute_dtype=torch.float32)
    bound = merge_error_bound(outs, lses, compute_dtype=torch.float32)
    assert {tensor.dtype for tensor in (*found, *bound)} == {torch.float32}
    assert torch.equal(outs, before[0])
    assert torch.equal(lses, before[1])
    exact = merge_states(outs, lses)
    torch.testing.assert_close(found.out.double(), exact.out, rtol=1e-5, atol=1e-5)
    merge_states(outs, lses).out.fill_(9.0)
    assert torch.equal(outs, before[0])


# Honest merges in float32


def flat(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    """Merge all states at once around the largest lse."""
    largest = lses.amax(dim=0)
    largest = torch.where(largest.isneginf(), 0.0, largest)
    weights = torch.exp(lses - largest)
    total = weights.sum(dim=0)
    shares = weights / torch.where(total == 0, 1.0, total)
    defined = torch.where(weights.unsqueeze(-1) == 0, 0.0, outs)
    return AttentionOutput((shares.unsqueeze(-1) * defined).sum(dim=0), largest + torch.log(total))


def base_two(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    """Merge with base-2 lses, converted there and back."""
    in_base_two = lses * LOG2_E
    largest = in_base_two.amax(dim=0)
    largest = torch.where(largest.isneginf(), 0.0, largest)
    out, total = torch.zeros_like(outs[0]), torch.zeros_like(largest)
    for each, lse in zip(outs, in_base_two, strict=True):
        weight = torch.exp2(lse - largest)
        out = out + torch.where(weight.unsqueeze(-1) == 0, 0.0, each) * weight.unsqueeze(-1)
        total = total + weight
    out = out / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return AttentionOutput(out, (largest + torch.log2(total)) / LOG2_E)


def online(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    """Fold the states one by one into (acc, maximum, total), as a persistent kernel does."""
    acc, largest = torch.zeros_like(outs[0]), torch.full_like(lses[0], -INF)
    total = torch.zeros_like(largest)
    for out, lse in zip(outs, lses, strict=True):
        new = torch.maximum(largest, lse)
        safe = torch.where(new.isneginf(), 0.0, new)
        shrink, weight = torch.exp(largest - safe), torch.exp(lse - safe)
        defined = torch.where(weight.unsqueeze(-1) == 0, 0.0, out)
        acc = acc * shrink.unsqueeze(-1) + defined * weight.unsqueeze(-1)
        total = total * shrink + weight
        largest = new
    out = acc / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return AttentionOutput(out, largest + torch.log(total))


Merge = Callable[[torch.Tensor, torch.Tensor], AttentionOutput]
merges = pytest.mark.parametrize("merge", [flat, base_two, online])


def worst(found: AttentionOutput, exact: AttentionOutput, bound: AttentionOutput) -> float:
    """Return the largest error over bound; an error where 0 is allowed is inf."""
    ratios = []
    for actual, wanted, allowed in zip(found, exact, bound, strict=True):
        same = actual.double() == wanted  # also where both are -inf
        ratio = torch.where(same, 0.0, (actual.double() - wanted).abs() / allowed)
        assert not ratio.isnan().any()
        ratios.append(ratio.amax().item())
    return max(ratios)


@merges
@pytest.mark.parametrize("states", [1, 2, 3, 17, 300])
@pytest.mark.parametrize(
    ("magnitude", "shift"),
    [(0.0, 0.0), (1.0, 0.0), (3.0, 40.0), (0.01, 1e5), (2.0, -1e5), (1e4, 0.0), (1e5, 0.0)],
)
def test_honest_merges_stay_inside(
    merge: Merge, states: int, magnitude: float, shift: float
) -> None:
    for seed, (empty, dtype) in enumerate(
        itertools.product([0.0, 0.4], [torch.float32, torch.bfloat16, torch.float16])
    ):
        made = make_states(
            states,
            tokens=4,
            dim=16,
            seed=seed,
            magnitude=magnitude,
            shift=shift,
            empty=empty,
            garbage=math.nan,
            dtype=dtype,
        )
        exact = merge_states(*made)
        found = merge(made[0].float(), made[1])
        assert worst(found, exact, merge_error_bound(*made, out_dtype=torch.float32)) <= 1
        rounded = found._replace(out=found.out.to(dtype))
        assert worst(rounded, exact, merge_error_bound(*made)) <= 1


@merges
def test_equal_and_cancelling_outputs(merge: Merge) -> None:
    outs, lses = make_states(16, tokens=8, magnitude=0.01, shift=300.0)
    for changed in (torch.ones_like(outs), outs * 1e-3 + 1, outs.sign() * 1e20, outs * 1e-30):
        exact = merge_states(changed, lses)
        assert worst(merge(changed, lses), exact, merge_error_bound(changed, lses)) <= 1


@merges
@pytest.mark.parametrize(("magnitude", "shift"), [(1.0, 0.0), (2.0, 1e5), (2.0, -1e5), (1e4, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chains_of_merges(merge: Merge, magnitude: float, shift: float, dtype: torch.dtype) -> None:
    outs, lses = make_states(40, magnitude=magnitude, shift=shift, empty=0.3, dtype=dtype)
    outs = outs.masked_fill(lses.isneginf().unsqueeze(-1), 0.0)
    found = AttentionOutput(outs[0], lses[0])
    exact = AttentionOutput(outs[0].double(), lses[0].double())
    bound = AttentionOutput(torch.zeros_like(exact.out), torch.zeros_like(exact.lse))
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        bound = merge_error_bound(
            torch.stack([exact.out, out.double()]),
            torch.stack([exact.lse, lse.double()]),
            out_errors=torch.stack([bound.out, torch.zeros_like(bound.out)]),
            lse_errors=torch.stack([bound.lse, torch.zeros_like(bound.lse)]),
            out_dtype=dtype,
        )
        exact = merge_states(
            torch.stack([exact.out, out.double()]), torch.stack([exact.lse, lse.double()])
        )
        stacked = torch.stack([found.out, out]).float(), torch.stack([found.lse, lse])
        found = merge(*stacked)
        found = found._replace(out=found.out.to(dtype))
        assert worst(found, exact, bound) <= 1


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 2.0])
@pytest.mark.parametrize("seed", range(8))
def test_errors_of_the_states_are_carried(scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outs, lses = make_states(3, seed=seed, magnitude=2.0, empty=0.2, dtype=FLOAT64)
    lses = lses.double()
    out_errors = torch.rand(outs.shape, generator=generator, dtype=FLOAT64) * scale
    lse_errors = torch.rand(lses.shape, generator=generator, dtype=FLOAT64) * scale
    for size in (1e-8, 1.0, 1e3):  # outputs far smaller and far larger than their errors
        exact = merge_states(outs * size, lses)
        bound = merge_error_bound(outs * size, lses, out_errors=out_errors, lse_errors=lse_errors)
        for signs in itertools.product([-1.0, 1.0], repeat=3):
            sign = torch.tensor(signs, dtype=FLOAT64).reshape(3, 1, 1)
            for other in (1.0, -1.0, sign.unsqueeze(-1)):
                found = merge_states(outs * size + other * out_errors, lses + sign * lse_errors)
                assert worst(found, exact, bound) <= 1


def test_split_attention_inside_the_carried_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((n, 2, 32), generator=generator) for n in (2, 90, 90))
    q = q * 8
    rows = torch.tensor([0, 2])
    parts, bounds, computed = [], [], []
    for start, stop in ((0, 30), (30, 31), (31, 90)):
        part = (q, k[start:stop], v[start:stop], rows, torch.tensor([0, stop - start]))
        parts.append(ragged_attention(*part, causal=False))
        bounds.append(ragged_attention_error_bound(*part, causal=False))
        logits = torch.einsum("thd,shd->hts", q, part[1]) * 32**-0.5
        out = torch.softmax(logits, dim=-1) @ part[2].transpose(0, 1)
        lse = torch.logsumexp(logits, dim=-1)
        computed.append(AttentionOutput(out.transpose(0, 1), lse.transpose(0, 1)))
    stacked = [torch.stack(each) for each in zip(*parts, strict=True)]
    errors = [torch.stack(each) for each in zip(*bounds, strict=True)]
    bound = merge_error_bound(
        *stacked, out_errors=errors[0], lse_errors=errors[1], out_dtype=torch.float32
    )
    found = flat(*(torch.stack(each) for each in zip(*computed, strict=True)))
    whole = ragged_attention(q, k, v, rows, torch.tensor([0, 90]), causal=False)
    assert worst(found, whole, bound) <= 1


def test_faulty_merges_are_caught() -> None:
    outs, lses = make_states(3, tokens=6)
    exact, bound = merge_states(outs, lses), merge_error_bound(outs, lses)
    assert worst(flat(outs, lses), exact, bound) <= 1
    assert worst(flat(outs[:2], lses[:2]), exact, bound) > 1
    assert worst(flat(outs, lses * LOG2_E), exact, bound) > 1
    assert worst(flat(outs, lses * 1.001), exact, bound) > 1
    assert worst(flat(outs[[1, 0, 2]], lses), exact, bound) > 1
    assert worst(AttentionOutput(outs.mean(dim=0), exact.lse), exact, bound) > 1
    in_bf16 = flat(outs.bfloat16(), lses.bfloat16())
    assert worst(in_bf16, exact, bound) > 1


def test_the_bound_grows_with_lse_and_with_the_roundoff() -> None:
    outs, lses = make_states(2, magnitude=0.5)
    bounds = [merge_error_bound(outs, lses + shift) for shift in (0.0, 1e3, 1e4, 1e5)]
    for small, large in itertools.pairwise(bounds):
        assert (small.out < large.out).all()
        assert (small.lse < large.lse).all()
    double = merge_error_bound(outs, lses, arithmetic=Arithmetic("float64"), out_dtype=FLOAT64)
    assert (double.out < bounds[0].out * 1e-6).all()
    assert (merge_error_bound(outs, lses, out_dtype=torch.bfloat16).out > bounds[0].out).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees() -> None:
    made = make_states(3, empty=0.3, garbage=math.nan)
    on_device = [tensor.cuda() for tensor in made]
    for function in (merge_states, merge_error_bound):
        found = function(*on_device)
        assert found.out.is_cuda
        assert_close(AttentionOutput(*(each.cpu() for each in found)), function(*made))


@pytest.mark.parametrize("marks", [(INF, 0.5), (0.5, INF), (INF, -INF), (INF, INF), (-INF, -INF)])
def test_an_lse_of_inf_marks_a_state_of_no_keys_where_that_is_said(
    marks: tuple[float, float],
) -> None:
    outs, _ = make_states(2, tokens=1, heads=1)
    lses = torch.tensor(marks).view(2, 1, 1)
    out, lse = merge_states(outs, lses, inf_marks_empty=True)
    full = [number for number, mark in enumerate(marks) if math.isfinite(mark)]
    assert torch.equal(out, outs[full[0]].double() if full else torch.zeros_like(out))
    assert lse.item() == (marks[full[0]] if full else -INF)
    bound = merge_error_bound(outs, lses, inf_marks_empty=True)
    assert bound.out.isfinite().all()
    assert bound.lse.isfinite().all()
    unmarked = torch.where(lses == INF, -INF, lses)
    for mine, theirs in zip(bound, merge_error_bound(outs, unmarked), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-8, 0.3])
def test_an_output_in_fp8_is_divided_by_its_scale_and_saturates(scale: float) -> None:
    problem = MergeProblem(
        num_states=2, num_tokens=5, num_heads=2, empty="some", output_scale=scale
    )
    inputs = materialise(problem)
    assert isinstance(inputs, MergeInputs)
    assert inputs.out_dtype == torch.float8_e4m3fn
    found = merge_states(inputs.outs, inputs.lses, output_scale=scale)
    bound = merge_error_bound(inputs.outs, inputs.lses, output_scale=scale)
    for token in range(5):
        for head in range(2):
            lses = [float(lse) for lse in inputs.lses[:, token, head]]
            weights = [math.exp(lse) for lse in lses]
            for channel in range(16):
                outs = [float(out) for out in inputs.outs[:, token, head, channel]]
                terms = [w * o for w, o in zip(weights, outs, strict=True) if w]
                out = sum(terms) / (sum(weights) or 1.0) / scale
                place = (token, head, channel)
                assert float(found.out[place]) == pytest.approx(max(min(out, 448.0), -448.0))
                rounded = torch.tensor(found.out[place].item()).to(torch.float8_e4m3fn).double()
                assert abs(rounded - found.out[place]) <= bound.out[place]
    assert float(found.out.abs().max()) == 448.0 or scale > 2.0**-8


def test_a_scale_of_outputs_is_positive() -> None:
    outs, lses = torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1)
    with pytest.raises(ValueError, match=r"output_scale is -1\.0; it must be a positive"):
        merge_states(outs, lses, output_scale=-1.0)
    with pytest.raises(ValueError, match="field output_scale is 0; it must be positive"):
        MergeProblem(output_scale=0)
    assert "output_scale" not in MergeProblem().to_json()
