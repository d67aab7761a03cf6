"""Hypothesis strategies over gating questions: near a rule as often as anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from ...impl.gating import CHIPS, Feature, Rule, RuleBook, Target
from ...impl.gating.feature import CHOICES, INTEGERS, SWITCHES
from ...impl.gating.rules import condition
from ...impl.targets.target import FIELDS

NUMBERS: Mapping[str, tuple[int, ...]] = {
    "head_dim_qk": (16, 32, 40, 64, 72, 80, 96, 128, 192, 256, 320, 512, 576, 1024),
    "head_dim_vo": (64, 128, 256, 512),
    "page_size": (1, 3, 8, 16, 32, 64, 128, 256, 1024),
    "group_size": (1, 2, 3, 4, 5, 6, 7, 8, 16, 32),
    "query_len": (1, 2, 4, 8, 16, 40),
    "num_experts": (0, 8, 128, 256, 385),
    "top_k": (0, 1, 8, 22),
    "hidden_size": (0, 2880, 4096),
    "intermediate_size": (0, 704, 768),
}
UNKNOWN_CHIPS = (70, 88, 101, 104, 109, 112, 122, 130)
ODD_VERSIONS = ("0.2.0", "0.6.5", "0.6.7.dev20260401", "0.6.7.post9", "0.6.99", "0.7.3", "99")
"""Neighbours that no rule was written for, older and newer."""
VERSIONS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("12.1", "12.6", "12.8", "12.9", "13.0"),
    "triton": ("2.1.0", "3.1.0", "3.2.0", "3.6.0"),
}
Question = tuple[Feature, Target]


def questions(book: RuleBook) -> st.SearchStrategy[Question]:
    """Draw what is asked and of which machine: anything, or near a rule."""
    anything = st.tuples(_any_feature(), _any_target(book))

    def near(rules: Sequence[Rule]) -> st.SearchStrategy[Question]:
        return st.sampled_from(rules).flatmap(
            lambda rule: st.tuples(near_rule(rule), near_target(rule, book) | _any_target(book))
        )

    # Few rules have these conditions, and they are the easiest to get wrong.
    rare = (
        [rule for rule in book.rules if rule.artifacts],
        [rule for rule in book.rules if "post" in rule.versions.get("flashinfer", "")],
        [rule for rule in book.rules if any(map(_is_multiple, rule.when.values()))],
    )
    return st.one_of(anything, near(book.rules), *(near(rules) for rules in rare if rules))


def _is_multiple(wanted: object) -> bool:
    return isinstance(wanted, Mapping) and "multiple_of" in wanted


def _any_feature() -> st.SearchStrategy[Feature]:
    fields: dict[str, st.SearchStrategy[Any]] = {
        **{name: st.sampled_from(_choices(name)) for name in (*CHOICES, *INTEGERS)},
        **{name: st.booleans() for name in SWITCHES},
    }
    return st.builds(Feature, **fields)


def _any_target(book: RuleBook) -> st.SearchStrategy[Target]:
    return st.builds(
        Target,
        sm=st.sampled_from((*CHIPS, None, *UNKNOWN_CHIPS)),
        flashinfer=st.sampled_from((None, *sorted(book.versions), *ODD_VERSIONS)),
        cuda=st.sampled_from((None, *VERSIONS["cuda"])),
        triton=st.sampled_from((None, *VERSIONS["triton"])),
        artifacts=st.just(()) | st.tuples(st.sampled_from(_hashes(book) or [("none", "none")])),
    )


def _hashes(book: RuleBook) -> list[tuple[str, str]]:
    return sorted({pair for table in book.versions.values() for pair in table.items()})


@st.composite
def near_rule(draw: st.DrawFn, rule: Rule) -> Feature:
    """Draw a feature that meets a rule's conditions, or all but one."""
    given: dict[str, Any] = {
        "operation": draw(st.sampled_from(rule.operation)),
        "backend": draw(st.sampled_from(rule.backend)),
        "phase": draw(st.sampled_from(("decode", "prefill"))),
    }
    for name in draw(st.lists(st.sampled_from((*INTEGERS, *SWITCHES)), max_size=2, unique=True)):
        given[name] = draw(st.sampled_from(_choices(name)))
    broken = draw(st.sampled_from((None, *rule.when)))
    for name, wanted in rule.when.items():
        values = values_of(name, wanted, meeting=name != broken)
        if values:
            given |= draw(st.sampled_from(values))
    return Feature(**given)


def values_of(name: str, wanted: Any, *, meeting: bool) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return settings of a field, or of those it follows from, that meet a condition or do not."""
    meets = condition(wanted)
    if name == "query_rows":
        return [
            {"query_len": rows, "group_size": group}
            for rows in NUMBERS["query_len"]
            for group in NUMBERS["group_size"]
            if meets(rows * group) == meeting
        ]
    pool = set(_choices(name))
    for limit in wanted.values() if isinstance(wanted, Mapping) else [wanted]:
        for each in limit if isinstance(limit, list) else [limit]:
            pool |= {max(1, each - 1), each, each + 1} if name in NUMBERS else {each}
    return [{name: value} for value in sorted(pool, key=str) if meets(value) == meeting]


@st.composite
def near_target(draw: st.DrawFn, rule: Rule, book: RuleBook) -> Target:
    """Draw a machine that a rule speaks of, or one beside it: a version before, a hash named."""
    given: dict[str, Any] = {
        "sm": draw(st.sampled_from(rule.chips or (*CHIPS, None))),
        "cuda": draw(st.sampled_from(VERSIONS["cuda"])),
        "triton": draw(st.sampled_from(VERSIONS["triton"])),
        "flashinfer": draw(st.sampled_from((*sorted(book.versions), *ODD_VERSIONS))),
    }
    for package, specifier in rule.versions.items():
        if draw(st.booleans()):
            drawn = draw(st.sampled_from(edges_of(specifier)))
            given |= {package: drawn} if package in FIELDS else {"providers": {package: drawn}}
    matching = [
        (name, value)
        for name, value in _hashes(book)
        if name in rule.artifacts and value.startswith(rule.artifacts[name])
    ]
    by_hash: bool = draw(st.booleans())
    if matching and by_hash:
        given["artifacts"] = (draw(st.sampled_from(matching)),)
    return Target(**given)


def edges_of(specifier: str) -> Sequence[str]:
    """Return the versions that a specifier names, and releases just after them."""
    named = re.findall(r"[\d][\w.]*", specifier)
    plain = [each for each in named if "post" not in each and "dev" not in each]
    return [*named, *(f"{each}.post9" for each in plain)]


def _choices(name: str) -> tuple[Any, ...]:
    """Return values of a field, one backend and one phase at a time."""
    if name in NUMBERS:
        return NUMBERS[name]
    if name in SWITCHES:
        return (False, True)
    if name == "phase":
        return ("decode", "prefill")
    return tuple(choice for choice in CHOICES[name] if choice != "auto")
