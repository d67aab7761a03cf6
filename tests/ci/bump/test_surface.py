"""Made-up signatures are compared: each finding is a call that means something else, or raises."""

# ruff: noqa: ARG005  the parameters are what is looked at
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kernelproof.ci.bump.surface.comparison import surface_findings
from kernelproof.ci.bump.verdicts.findings import CHANGES

NAME = "cascade.merge_state"


def release(function: Callable[..., Any]) -> dict[str, Any]:
    """Declare a release with one callable, as ``impl.flashinfer_declarations`` does."""
    parameters = [
        {
            "name": each.name,
            "kind": each.kind.name.lower(),
            **({} if each.default is each.empty else {"default": repr(each.default)}),
        }
        for each in inspect.signature(function).parameters.values()
    ]
    return {
        "signatures": {NAME: {"parameters": parameters, "source": "flashinfer/cascade.py:1"}},
        "exports": {},
        "enums": {},
        "refusals": {},
        "constants": {},
        "not_imported": {},
    }


def found(old: Callable[..., Any], new: Callable[..., Any]) -> dict[str, str]:
    """Return the messages of what changed, by change and detail."""
    findings = list(surface_findings(release(old), release(new)))
    ids = [each.id for each in findings]
    assert len(ids) == len(set(ids))
    return {each.id.partition("/")[2].replace(f"/{NAME}", ""): each.message for each in findings}


def test_what_stayed_is_no_finding() -> None:
    assert found(lambda q, /, k, *a, s=1, **o: 0, lambda q, /, k, *a, s=1, **o: 0) == {}


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        (lambda q, k, /, scale=1.0: 0, {"parameter-removed/q", "parameter-removed/k"}),
        (lambda q, k, /, scale=1.0, **options: 0, {"parameter-removed/q", "parameter-removed/k"}),
        # **kwargs takes what is named, and the default its place.
        (lambda q, k=None, /, scale=1.0, **options: 0, {"parameter-removed/q"}),
    ],
)
def test_a_parameter_that_is_taken_by_position_alone_cannot_be_named(
    new: Callable[..., Any], changes: set[str]
) -> None:
    changed = found(lambda q, k, scale=1.0: 0, new)
    assert changed.keys() == changes
    assert changed["parameter-removed/q"] == (
        f"{NAME}: the parameter q is taken by position alone: a call that names it raises"
    )


def test_what_was_never_named_may_be_called_otherwise() -> None:
    assert found(lambda q_in, k, /: 0, lambda q_out, k, /: 0) == {}


def test_open_ends_that_are_gone() -> None:
    changed = found(lambda q, *args, **kwargs: 0, lambda q, k=None, *, scale=1.0: 0)
    assert changed["positional-refused/*args"] == (
        f"{NAME}: *args is gone: with more than 2 values by position it raises"
    )
    assert changed["parameter-removed/**kwargs"] == (
        f"{NAME}: **kwargs is gone: a call that names anything else than its parameters raises"
    )
    assert changed.keys() == {
        "positional-meaning",
        "positional-refused/*args",
        "parameter-removed/**kwargs",
        "parameter-added",
    }
    assert CHANGES["parameter-removed"].action == "block"


@pytest.mark.parametrize("new", [
    lambda q, k=None, *args: 0, lambda q, k=None: 0, lambda q, k=None, /, *args: 0,
])  # fmt: skip
def test_what_came_by_args_and_meets_a_parameter_means_something_else(
    new: Callable[..., Any],
) -> None:
    (moved,) = (
        each
        for each in surface_findings(release(lambda q, *args: 0), release(new))
        if each.change == "positional-meaning"
    )
    assert moved.message == f"{NAME}: position 1 was of *args, now k"
    assert moved.rule == f"pass no more than 1 value by position to {NAME}, and accept this finding"
    assert CHANGES[moved.change].action == "block"


def test_what_came_by_args_is_counted_with_the_parameters_that_moved() -> None:
    changed = found(lambda q, k, *args: 0, lambda k, q, v=None, s=None: 0)
    assert changed["positional-meaning"] == (f"{NAME}: position 0 was q, now k (and 3 more)")


@pytest.mark.parametrize("new", [lambda q, *args, k=None: 0, lambda q, *args: 0, lambda *args: 0])
def test_what_still_comes_by_args_means_the_same(new: Callable[..., Any]) -> None:
    assert "positional-meaning" not in found(lambda q, *args: 0, new)


def test_open_ends_by_another_name_are_the_same() -> None:
    assert found(lambda q, *args, **kwargs: 0, lambda q, *more, **options: 0) == {}


@pytest.mark.parametrize(
    ("new", "renamed"),
    [
        (lambda v_first, s_a, v_b: 0, {"v_first"}),
        (lambda v_a, s_first, v_b: 0, {"s_first"}),
        (lambda v_first, s_first, v_b: 0, {"v_first", "s_first"}),  # one after the other
    ],
)
def test_a_parameter_by_another_name_is_recognised_anywhere(
    new: Callable[..., Any], renamed: set[str]
) -> None:
    changed = found(lambda v_a, s_a, v_b: 0, new)
    assert changed.keys() == {f"parameter-renamed/{name}" for name in renamed}


def test_a_parameter_in_another_place_is_another_parameter() -> None:
    changed = found(lambda v_a, s_a: 0, lambda s_a, v_first: 0)
    assert changed.keys() == {
        "positional-meaning",
        "parameter-removed/v_a",
        "parameter-required/v_first",
    }
