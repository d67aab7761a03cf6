"""Laws of attention over quantised KV caches: codes, scales and formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.formats.cache_elements import QUANTISED_KV
from ...reference.formats.kv_format import checked_cache
from ...reference.problems.cache_names import KV_CACHES, cache_fits, query_dtypes
from ...reference.tensors.inputs import PagedAttentionInputs
from ..verdicts.comparison import Result, against_oracle, agree, same_bits, worse
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .general import run, run_on
from .law import PAGED, Law, Values

FACTORS = {"sm_scale": "scale"}
"""What a problem calls the number that the inputs hold."""
Bytes = tuple[int, ...]


def dequantised(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Run on the cache, and on its values in the queries' dtype, which holds them exactly."""
    plain = replace(problem, kv_cache="", q_dtype="", q_scale=1.0)
    if not problem.kv_cache or not subject.supports(problem) or not subject.supports(plain):
        return VACUOUS
    inputs: PagedAttentionInputs = subject.materialise(problem)
    widened = _widened(inputs, getattr(torch, problem.dtype))
    exact = _widened(inputs, torch.float64)
    for name in ("q", "k_cache", "v_cache"):
        if not torch.equal(getattr(widened, name).double(), getattr(exact, name)):
            return VACUOUS  # scaled queries beyond float16, or scales of tokens with many digits
    first, first_bounded = run_on(subject, problem, inputs)
    second, second_bounded = run_on(subject, plain, widened)
    return agree(
        first, second, (first_bounded.bound, second_bounded.bound), exact=subject.exact(problem)
    )


def _widened(inputs: PagedAttentionInputs, dtype: torch.dtype) -> PagedAttentionInputs:
    """Return the same queries, keys and values without codes; powers of two change no digit."""
    cache = checked_cache(
        inputs.k_cache, inputs.v_cache, inputs.kv_layout, inputs.kv_format, inputs.kv_cache_sf
    )
    decode = cache.kv_format.decode
    return replace(
        inputs,
        q=(inputs.q.double() * _per_head(inputs.q_scale)).to(dtype),
        q_scale=1.0,
        k_cache=decode(cache.k, cache.k_scales).to(dtype),
        v_cache=decode(cache.v, cache.v_scales)[..., : cache.head_dim_vo].to(dtype),
        kv_format=None,
        kv_cache_sf=None,
    )


def _per_head(scale: float | torch.Tensor) -> float | torch.Tensor:
    """Return q_scale so that it multiplies [tokens, qo_heads, head_dim]."""
    return scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale


def scale_homogeneity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Double v_scale, or k_scale with half of sm_scale, or block scales with half of theirs.

    The first doubles the output, the others change nothing; powers of two round alike. An output
    in FP8 saturates instead.
    """
    problem = replace(problem, output_scale=None)
    claimed = [
        (change, factor)
        for change, factor in _rescalings(problem)
        if subject.supports(replace(problem, regime="iid", **change))
    ]
    if not claimed or not subject.supports(problem):
        return VACUOUS
    inputs: PagedAttentionInputs = subject.materialise(problem)
    before, bounded = run_on(subject, problem, inputs)
    verdict = VACUOUS
    for change, factor in claimed:
        rescaled = _rescaled(inputs, problem, change)
        if rescaled is None:
            continue
        after, other = run_on(subject, problem, rescaled)
        expected: Result = (before[0].double() * factor, before[1])
        bound = type(bounded.bound)(bounded.bound.out * factor, bounded.bound.lse)
        found = agree(expected, after, (bound, other.bound), exact=False)
        verdict = found if verdict.vacuous else worse(verdict, found)
    return verdict


def _rescalings(problem: AttentionProblem) -> list[tuple[dict[str, Any], float]]:
    """Return other scales, none of them of zero, and what each makes of the output."""
    if 0 in (problem.k_scale, problem.v_scale, problem.scale):
        return []
    found = [
        ({"v_scale": problem.v_scale * 2}, 2.0),
        ({"k_scale": problem.k_scale * 2, "sm_scale": problem.scale / 2}, 1.0),
    ]
    if problem.cache_entry.scaled:
        found.append(({"k_scale": problem.k_scale / 2, "v_scale": problem.v_scale / 2}, 1.0))
    return found


def _rescaled(
    inputs: PagedAttentionInputs, problem: AttentionProblem, change: dict[str, Any]
) -> PagedAttentionInputs | None:
    """Return the same keys and values with other scales; None if a block scale would overflow."""
    changes: dict[str, Any] = {
        name: getattr(inputs, name) * (value / getattr(problem, FACTORS.get(name, name)))
        for name, value in change.items()
    }
    if {"k_scale", "v_scale"} <= set(change):
        assert inputs.kv_cache_sf is not None  # noqa: S101  by _rescalings
        if not _may_double(inputs.kv_cache_sf):
            return None
        k, v = (_doubled(each, problem) for each in inputs.kv_cache_sf)
        changes["kv_cache_sf"] = (k, v)
    return replace(inputs, **changes)


def _doubled(scales: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Return twice the scales of blocks or tokens, with the same zero points."""
    doubled = (scales.float() * 2).to(scales.dtype)
    if problem.cache_entry.zero_point:
        doubled[..., 1] = scales[..., 1]
    return doubled


def _may_double(scales: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether twice each scale is a scale; NaN is one."""
    return all(not (2 * each.float() > torch.finfo(each.dtype).max).any() for each in scales)


def extreme_codes(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Fill the cache with zeros, with the smallest codes, and with the largest, of either sign."""
    # The largest value of e5m2, 57344, is within float16, but not once it is scaled up: some
    # kernels multiply keys and values by their scales before they round them to it.
    k_scale = problem.k_scale
    if problem.kv_element == "float8_e5m2":
        k_scale = min(k_scale, 1.0)
    problem = replace(problem, regime="iid", k_scale=k_scale, v_scale=1.0, per_head_scales=False)
    if not problem.kv_cache or not subject.supports(problem):
        return VACUOUS
    verdict = PASS
    for codes, scale in _extreme(problem):
        inputs: PagedAttentionInputs = subject.materialise(problem)
        scales = inputs.kv_cache_sf or ()
        for tensors, pattern in (((inputs.k_cache, inputs.v_cache), codes), (scales, scale)):
            for tensor in tensors:
                _fill(tensor, pattern)
        result, expectation = run_on(subject, problem, inputs)
        verdict = worse(verdict, against_oracle(result, expectation, exact=False))
    return verdict


def _fill(tensor: torch.Tensor, pattern: Bytes) -> None:
    """Repeat bytes over the last axis; none leave the tensor as it is."""
    if pattern:
        as_bytes = tensor.view(torch.uint8)
        place = torch.arange(as_bytes.shape[-1], device=as_bytes.device) % len(pattern)
        as_bytes.copy_(torch.tensor(pattern, device=as_bytes.device)[place].expand_as(as_bytes))


def _extreme(problem: AttentionProblem) -> list[tuple[Bytes, Bytes]]:
    """Return bytes of codes and of block scales, empty where these are the problem's own.

    Extreme block scales come with the largest codes.
    """
    entry = problem.cache_entry
    scaled = [(entry.extremes[-1], scale) for scale in entry.extreme_scales]
    return [*((codes, ()) for codes in entry.extremes), *scaled]


def formats_in_turn(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Run on a cache, then on caches of other formats with the same queries, then on the first."""
    others = [
        replace(problem, kv_cache=name)
        for name in KV_CACHES
        if name != problem.kv_cache
        and cache_fits(name, vars(problem))
        and problem.q_dtype in query_dtypes(name)
    ]
    claimed = [other for other in others if subject.supports(other)]
    if not claimed or not subject.supports(problem):
        return VACUOUS
    (out, lse), _ = run(subject, problem)
    verdict = PASS
    for other in claimed[problem.seed % len(claimed) :][:2]:
        result, expectation = run(subject, other)
        verdict = worse(verdict, against_oracle(result, expectation, exact=subject.exact(other)))
    (again, lse_again), bounded = run(subject, problem)
    if "nondeterministic" in subject.implementation.features:
        same = agree((out, lse), (again, lse_again), (bounded.bound, bounded.bound), exact=False)
        return worse(verdict, same)
    verdict = worse(verdict, same_bits_of("out", out, again))
    if lse is not None and lse_again is not None:
        verdict = worse(verdict, same_bits_of("lse", lse, lse_again))
    return verdict


def same_bits_of(name: str, first: torch.Tensor, second: torch.Tensor) -> Verdict:
    """Compare two answers to one call bit by bit."""
    if same_bits(first, second):
        return PASS
    message = f"{name} of the same call differs after calls on caches of other formats"
    return Verdict("FAIL", "nondeterministic", message)


def _quantised(caches: Values) -> Values:
    return tuple(pair for pair in caches if pair[0])


def _first(values: Values) -> Values:
    return values[:1]


LAWS = (
    Law(
        "dequantised",
        PAGED,
        dequantised,
        "a quantised cache and its values in the queries' dtype give the same answer",
        weight=0.5,
        needs=QUANTISED_KV,
        looks_at=({"caches": _quantised},),
        overlap="parity sees every element; this asks no oracle",
    ),
    Law(
        "scale_homogeneity",
        PAGED,
        scale_homogeneity,
        "twice v_scale is twice the output; twice k_scale, or block scales, is half of the other",
        weight=0.5,
        overlap="parity sees every scale that is lost; this asks no oracle",
    ),
    Law(
        "extreme_codes",
        PAGED,
        extreme_codes,
        "caches of zeros, of the smallest and of the largest codes are read right",
        weight=0.5,
        needs=QUANTISED_KV,
        looks_at=({"caches": _quantised, "regime": _first},),  # it writes the codes itself
    ),
    Law(
        "formats_in_turn",
        PAGED,
        formats_in_turn,
        "the same call gives the same bits after calls on caches of other formats",
        weight=0.5,
        needs=QUANTISED_KV,
        looks_at=({"caches": _quantised},),
    ),
)
