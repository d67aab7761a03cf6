"""What the page of a run draws: its sentences and numbers, without a browser."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kernelproof.ci.reports.figures import error_maps, heat, spreads
from kernelproof.ci.reports.pictures import grid, histogram, level, meter, quantile_edge, ranges
from kernelproof.properties.findings.causes import Cause
from kernelproof.properties.findings.report import (
    RATIO_EDGES,
    Finding,
    ImplementationReport,
    LawReport,
)
from kernelproof.properties.verdicts.comparison import error_map
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import MergeProblem, MoEProblem, Problem

PROBLEM = MergeProblem(num_tokens=130, num_heads=4)


def failing(ratio: torch.Tensor, tensor: str = "out") -> Verdict:
    return Verdict("FAIL", "numeric", "off", error_map=error_map(tensor, ratio))


def found(verdict: Verdict, problem: Problem, *firsts: Verdict) -> Cause:
    members = [
        Finding("mine", law, verdict, problem, first=(PROBLEM, first) if first else None)
        for law, first in zip(("parity", "soak"), firsts or (None,), strict=False)
    ]
    return Cause(tuple(members), ("numeric",), {}, 1, 0, 0)


def test_a_map_says_in_words_which_tokens_and_heads_are_wrong() -> None:
    ratio = torch.zeros(130, 4, 16)
    ratio[5, 1, 2], ratio[129, 3, 0], ratio[60, 0, 0] = 3.0, 250.0, 1.0
    small = failing(torch.full((1, 1, 16), 9.0))
    less = failing(ratio[:3])
    (one,) = error_maps(found(small, MergeProblem(), less, failing(ratio)))  # one cell needs none
    assert one.title == "As first found under soak"  # which has the largest map
    assert one.problem == "MergeProblem(num_tokens=130, num_heads=4)"
    assert one.sentence == (
        "out: 2 of 176 cells are outside the bound, in token 3 to 5, 129 and head 1, 3. "
        "The worst is 250 times the bound, at token 129, head 3."
    )
    assert one.rows == (("3 to 5", "1", "3"), ("129", "3", "250"))


def test_the_smallest_problem_has_a_map_unless_it_is_the_first() -> None:
    wrong = failing(torch.tensor([[2.0, math.inf]]), "lse")
    titles = [each.title for each in error_maps(found(wrong, MergeProblem(), wrong))]
    assert titles == ["As first found under parity", "Shrunk to the smallest problem"]
    (one,) = error_maps(found(wrong, PROBLEM, wrong))
    assert one.title == "Shrunk to the smallest problem"
    assert one.sentence.endswith("is NaN, or wrong where every bit counts, at token 0, head 1.")
    assert error_maps(found(Verdict("HANG", "run"), PROBLEM)) == []


def test_what_the_axes_are() -> None:
    (one,) = error_maps(found(failing(torch.full((3, 8), 2.0)), MoEProblem()))
    assert one.axes == ("token", "channel")
    (one,) = error_maps(found(failing(torch.full((3, 8, 2, 4), 2.0), "k_cache"), PROBLEM))
    assert one.axes == ("page", "slot")
    (one,) = error_maps(found(failing(torch.full((3,), math.inf), "qo_indptr"), PROBLEM))
    assert one.axes == ("entry", "column")


def test_how_errors_are_spread() -> None:
    inside = RATIO_EDGES.index(1.0)
    laws = [
        LawReport("parity", judged=9, ratios=Counter({0: 90, inside: 6}), passing_ratio=0.9),
        LawReport("soak", judged=4, ratios=Counter({inside + 1: 3, len(RATIO_EDGES): 1})),
    ]
    report = ImplementationReport("mine", "k:mine", "merge_state", laws=laws)
    (one,) = spreads([report, ImplementationReport("idle", "k:idle")])
    assert (one.count, one.outside, one.half, one.most, one.worst) == (
        100,
        4,
        "≤ 1e-05",
        "≤ 1",
        0.9,
    )
    assert one.drawn.count("<rect") == 4
    assert one.drawn.count('class="over"') == 2


def test_laws_of_many_implementations_stand_in_several_tables() -> None:
    reports = [
        ImplementationReport(
            f"k{n}",
            f"k:{n}",
            "moe" if n == 3 else "merge_state",
            laws=[
                LawReport("parity", judged=3, passing_ratio=0.999),
                LawReport("soak", judged=0, unsupported=2),
            ][: 1 + n % 2],
        )
        for n in range(12)
    ]
    first, second, other = heat(reports)
    assert (len(first.names), len(second.names), other.names) == (6, 5, ("k3",))
    (parity, cells), (soak, others) = first.rows
    assert (parity, soak) == ("parity", "soak")
    assert cells[0] is not None
    assert (cells[0].text, cells[0].tone) == ("0.99", "pass2")  # 1.00 would be the bound
    assert [each and each.text for each in others][:2] == [None, "–"]  # noqa: RUF001  a dash


@pytest.mark.parametrize(
    ("part", "edge"), [(0.4, 1.0), (0.5, 1.0), (0.6, 10.0), (0.9, 10.0), (0.95, math.inf)]
)
def test_quantiles_by_the_edge_of_their_bin(part: float, edge: float) -> None:
    assert quantile_edge([5, 4, 1], [1.0, 10.0], part) == edge


def test_numbers_as_ranges() -> None:
    assert ranges([3, 1, 2, 7]) == "1 to 3, 7"
    assert ranges([0, 2, 4, 6, 8, 10]) == "0, 2, 4, 6, and 2 more"
    assert ranges([]) == ""


def test_levels() -> None:
    ratios = (0.0, 0.1, 1.0, 1.01, 10.0, 1000.0, 1001.0, math.inf, math.nan)
    assert [level(each) for each in ratios] == [0, 0, 1, 2, 2, 3, 4, 4, 4]


def test_no_text_becomes_markup_in_a_picture() -> None:
    nasty = "<script>\x00\"' &"
    drawn = [
        histogram(nasty, nasty, (0.1, 1.0), [1, 0]),
        grid(nasty, nasty, (nasty, nasty), [[1.0, 2.0]]),
        meter(nasty, 1, 2),
    ]
    for each in drawn:
        assert "<script" not in each
        assert "\x00" not in each
        assert "&lt;script&gt;\\x00" in each


def test_a_map_of_any_size_is_no_wider_than_a_telephone() -> None:
    for rows, columns in ((1, 1), (64, 32), (2, 32), (64, 1)):
        drawn = grid("t", "d", ("token", "head"), [[1.0] * columns] * rows)
        width = float(drawn.split('width="')[1].split('"')[0])
        assert 90 <= width <= 342
        assert drawn.count("<rect") == rows * columns
