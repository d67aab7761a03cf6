"""Comparing tensors with bounds: what passes, what fails, and what is said of it."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from kernelproof.properties.verdicts.comparison import (
    Check,
    against_oracle,
    agree,
    all_within,
    bitwise,
    fail,
    same_bits,
    within,
    worse,
)
from kernelproof.properties.verdicts.verdict import BAD, PASS, VACUOUS, Verdict
from kernelproof.reference import AttentionOutput
from kernelproof.reference.attention.bounds import Bounded

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class TestWithin:
    def test_inside_the_bound(self) -> None:
        verdict = within("out", tensor(1.0, 2.5), tensor(1.0, 2.0), tensor(0.0, 1.0))
        assert (verdict.status, verdict.ratio) == ("PASS", 0.5)

    def test_the_first_failure_of_a_process_is_as_quick_as_the_others(self) -> None:
        # sympy, which some of torch's functions import, takes seconds to do so.
        code = (
            "import sys, torch; from kernelproof.properties.verdicts.comparison import within; "
            "one = torch.ones(2); assert within('out', one, 2 * one, 0 * one).bad; "
            "print('sympy' in sys.modules)"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert ran.stdout.strip() == b"False"

    def test_on_the_bound(self) -> None:
        assert within("out", tensor(3.0), tensor(2.0), tensor(1.0)) == Verdict("PASS", ratio=1.0)

    def test_outside_the_bound(self) -> None:
        verdict = within("out", tensor(1.0, 2.0, 7.0), tensor(1.0, 1.0, 1.0), tensor(1.0, 0.5, 1.0))
        assert (verdict.status, verdict.kind, verdict.ratio) == ("FAIL", "numeric", 6.0)
        assert verdict.message.startswith("out[2] is 7, expected 1, off by 6, bound 1")
        assert "(2 of 3 elements outside)" in verdict.message

    def test_the_place_has_an_index_for_each_axis(self) -> None:
        actual = torch.zeros(2, 3, 4)
        actual[1, 2, 3] = 1.0
        verdict = within("lse", actual, torch.zeros(2, 3, 4).double(), torch.zeros(2, 3, 4))
        assert "lse[1, 2, 3] is 1" in verdict.message

    def test_a_bound_of_zero_asks_for_equality(self) -> None:
        assert within("out", tensor(0.0, -0.0), tensor(0.0, 0.0), tensor(0.0, 0.0)) == Verdict(
            "PASS", ratio=0.0
        )
        verdict = within("out", tensor(1e-300), tensor(0.0), tensor(0.0))
        assert (verdict.kind, verdict.bad) == ("numeric", True)

    def test_an_unexpected_nan(self) -> None:
        verdict = within("out", tensor(1.0, NAN, NAN), tensor(1.0, 2.0, 3.0), tensor(9.0, 9.0, 9.0))
        assert (verdict.status, verdict.kind) == ("FAIL", "nan")
        assert verdict.message == "out[1] is NaN, expected 2 (2 of 3 are)"

    def test_nan_is_outside_even_an_infinite_bound(self) -> None:
        assert within("out", tensor(NAN), tensor(1.0), tensor(INF)).kind == "nan"

    @pytest.mark.parametrize("value", [INF, -INF])
    def test_infinities_must_stand_in_the_same_places(self, value: float) -> None:
        assert within("lse", tensor(value), tensor(value), tensor(0.0)).status == "PASS"
        for actual, expected in ((value, 1.0), (1.0, value), (-value, value)):
            verdict = within("lse", tensor(actual), tensor(expected), tensor(1.0))
            assert (verdict.status, verdict.kind) == ("FAIL", "numeric"), (actual, expected)
            assert verdict.ratio == INF

    def test_a_finite_sentinel_is_not_minus_infinity(self) -> None:
        verdict = within("lse", tensor(-34657.0), tensor(-INF), tensor(0.0))
        assert "lse[0] is -34657, expected -inf" in verdict.message

    def test_another_shape(self) -> None:
        verdict = within("out", torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3, 2))
        assert (verdict.kind, verdict.message) == ("shape", "out has shape [2, 3], not [3, 2]")
        # Broadcasting must not make up for it.
        assert within("out", torch.zeros(1), torch.zeros(3), torch.zeros(3)).kind == "shape"

    @pytest.mark.parametrize("shape", [(0,), (0, 4, 8), (3, 0)])
    def test_empty_tensors_agree(self, shape: tuple[int, ...]) -> None:
        empty = torch.zeros(shape)
        assert within("out", empty, empty.double(), empty.double()) == Verdict("PASS", ratio=0.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_low_precision_is_compared_in_the_oracle_s(self, dtype: torch.dtype) -> None:
        expected = tensor(1 / 3)
        error = (expected.to(dtype).double() - expected).abs()
        assert within("out", expected.to(dtype), expected, error).ratio == pytest.approx(1.0)
        assert within("out", expected.to(dtype), expected, 0.99 * error).bad

    def test_an_overflow_to_infinity_is_seen(self) -> None:
        assert within("out", tensor(INF, dtype=torch.float16), tensor(7e4), tensor(100.0)).bad

    def test_nans_must_stand_in_the_same_places(self) -> None:
        assert not within("out", tensor(NAN, 1.0), tensor(NAN, 1.0), tensor(0.0, 0.0)).bad
        verdict = within("out", tensor(NAN, 1.0), tensor(NAN, NAN), tensor(0.0, 9.0))
        assert verdict.message == "out[1] is 1, expected NaN"

    def test_a_bound_that_is_no_number_allows_nothing(self) -> None:
        assert within("out", tensor(1.0), tensor(1.5), tensor(NAN)).bad


class TestAllWithin:
    """Several tensors at once are judged as one after another."""

    fine = Check("fine", tensor(1.0, NAN), tensor(1.5, NAN), tensor(1.0, 0.0))
    closer = Check("closer", tensor(1.0), tensor(1.5), tensor(2.0))
    wrong = Check("wrong", tensor(1.0), tensor(1.5), tensor(0.25))
    nan = Check("nan", tensor(NAN), tensor(1.5), tensor(INF))
    empty = Check("empty", tensor(), tensor(), tensor())
    short = Check("short", tensor(1.0), tensor(1.0, 2.0), tensor(1.0, 1.0))

    def test_the_largest_ratio_counts(self) -> None:
        checks = [self.closer, self.empty, self.fine, self.closer]
        assert all_within(checks) == Verdict("PASS", ratio=0.5)
        assert all_within([]) == Verdict("PASS", ratio=0.0)

    @pytest.mark.parametrize("name", ["wrong", "nan", "short"])
    def test_the_first_failure_is_told(self, name: str) -> None:
        failing: Check = getattr(self, name)
        verdict = all_within([self.fine, failing, self.wrong, self.nan])
        assert verdict.bad
        assert verdict == within(*failing)


class TestBitwise:
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
    def test_equal(self, dtype: torch.dtype) -> None:
        values = torch.tensor([1, 2, 3], dtype=dtype)
        assert bitwise("out", values, values.clone()) == Verdict("PASS", ratio=0.0)

    def test_zeros_of_either_sign_and_nans_are_equal(self) -> None:
        assert not bitwise("out", tensor(0.0, NAN, INF), tensor(-0.0, NAN, INF)).bad

    def test_the_smallest_difference(self) -> None:
        one = torch.ones(3)
        other = one.clone()
        other[1] = torch.nextafter(one[1], torch.tensor(2.0))
        verdict = bitwise("out", other, one)
        assert (verdict.status, verdict.kind) == ("FAIL", "numeric")
        assert "out[1] is 1.00000012, expected exactly 1 (1 of 3 differ)" in verdict.message

    def test_nan_on_one_side(self) -> None:
        assert bitwise("out", tensor(NAN), tensor(1.0)).kind == "nan"
        assert bitwise("out", tensor(1.0), tensor(NAN)).kind == "nan"

    def test_integers(self) -> None:
        verdict = bitwise("indptr", torch.tensor([0, 3]), torch.tensor([0, 2]))
        assert "indptr[1] is 3, expected exactly 2" in verdict.message

    def test_shapes(self) -> None:
        assert bitwise("out", torch.zeros(2), torch.zeros(2, 1)).kind == "shape"
        assert not bitwise("out", torch.zeros(0, 2), torch.zeros(0, 2)).bad


def judged(out: torch.Tensor, lse: torch.Tensor, bound: float) -> Bounded:
    bounds = AttentionOutput(torch.full_like(out, bound), torch.full_like(lse, bound))
    return Bounded(AttentionOutput(out, lse), bounds)


class TestAgainstOracle:
    OUT, LSE = torch.ones(2, 1, 3).double(), torch.zeros(2, 1).double()

    def test_both_are_checked(self) -> None:
        truth = judged(self.OUT, self.LSE, 0.5)
        good = (self.OUT.float() + 0.25, self.LSE.float() + 0.5)
        assert against_oracle(good, truth, exact=False) == Verdict("PASS", ratio=1.0)
        bad_out = against_oracle((self.OUT + 1, self.LSE), truth, exact=False)
        assert bad_out.message.startswith("out[0, 0, 0] is 2")
        bad_lse = against_oracle((self.OUT, self.LSE - 1), truth, exact=False)
        assert bad_lse.message.startswith("lse[0, 0] is -1")

    def test_no_lse(self) -> None:
        truth = judged(self.OUT, self.LSE, 0.5)
        assert not against_oracle((self.OUT, None), truth, exact=False).bad

    def test_an_exact_problem_allows_out_nothing_and_lse_its_bound(self) -> None:
        truth = judged(self.OUT, self.LSE, 0.5)
        near = torch.nextafter(self.OUT.float(), torch.tensor(2.0))
        assert against_oracle((near, self.LSE), truth, exact=True).bad
        assert not against_oracle((near, self.LSE), truth, exact=False).bad
        assert not against_oracle((self.OUT.float(), self.LSE + 0.5), truth, exact=True).bad

    def test_an_exact_problem_is_compared_in_the_output_s_dtype(self) -> None:
        # Far below half a unit of the output's last place: what other keys weigh in float64.
        truth = judged(self.OUT + 1e-12, self.LSE, 0.0)
        assert not against_oracle((self.OUT.bfloat16(), None), truth, exact=True).bad


class TestAgree:
    BOUND = AttentionOutput(tensor(0.5), tensor(0.25))

    def test_the_bounds_of_both_runs_are_allowed(self) -> None:
        bounds = (self.BOUND, self.BOUND)
        one, other = (tensor(1.0), tensor(0.0)), (tensor(2.0), tensor(0.5))
        assert agree(one, other, bounds, exact=False) == Verdict("PASS", ratio=1.0)
        beyond = (tensor(2.001), tensor(0.0))
        assert agree(one, beyond, bounds, exact=False).bad
        assert (
            "lse[0] is 0.6" in agree(one, (tensor(1.0), tensor(0.6)), bounds, exact=False).message
        )

    def test_exact_problems_must_agree_bitwise(self) -> None:
        bounds = (self.BOUND, self.BOUND)
        assert agree((tensor(1.0), None), (tensor(1.0001), None), bounds, exact=True).bad
        near = ((tensor(1.0), tensor(0.0)), (tensor(1.0), tensor(0.1)))
        assert not agree(*near, bounds, exact=True).bad

    def test_what_only_one_of_them_has_is_not_compared(self) -> None:
        bounds = (self.BOUND, self.BOUND)
        assert not agree((tensor(1.0), None), (tensor(1.0), tensor(9.0)), bounds, exact=False).bad

    def test_a_nan_in_either_run_is_found(self) -> None:
        bounds = (self.BOUND, self.BOUND)
        good, bad = (tensor(1.0), None), (tensor(NAN), None)
        assert agree(good, bad, bounds, exact=False).kind == "nan"
        assert agree(bad, good, bounds, exact=False).bad

    def test_low_precision(self) -> None:
        bounds = (self.BOUND, self.BOUND)
        one = (tensor(1.0, dtype=torch.bfloat16), None)
        other = (tensor(2.0, dtype=torch.bfloat16), None)
        assert not agree(one, other, bounds, exact=False).bad


def test_the_worse_of_two() -> None:
    bad = fail("numeric", "no", 3.0)
    low, high = Verdict("PASS", ratio=0.1), Verdict("PASS", ratio=0.9)
    assert worse(bad, high) == worse(high, bad) == bad
    assert worse(low, high) == worse(high, low) == high
    assert worse(PASS, low) == low


def test_bits() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert same_bits(torch.tensor([NAN]), torch.tensor([NAN]))
    assert same_bits(torch.tensor([True, False]), torch.tensor([True, False]))
    assert not same_bits(torch.tensor([1], dtype=torch.int8), torch.tensor([2], dtype=torch.int8))
    strided = torch.arange(6.0).view(2, 3).T
    assert same_bits(strided, strided.contiguous())


def test_verdicts_are_json_and_back() -> None:
    verdict = Verdict("CRASH", "SIGSEGV", "died", 2.0, vacuous=False, seconds=0.5, trace="...")
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert {Verdict(status).bad for status in BAD} == {True}
    assert not any(Verdict(status).bad for status in ("PASS", "UNSUPPORTED", "FLAKY", "KNOWN"))
    assert VACUOUS.vacuous
    assert not VACUOUS.bad
