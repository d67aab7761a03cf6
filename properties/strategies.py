"""Problems for people's own tests: ``@given(strategies.problems("paged_attention", ...))``.

These are the problems that the laws are searched with. ``kernelproof.reference.materialise`` makes
their tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from hypothesis import strategies as st

from ..impl.features import drawn_features
from ..impl.protocol import Operation, implementation
from ..impl.targets.refusal import Refusal
from ..reference import Problem
from .space.axes import example, narrow
from .space.given_lengths import LENGTHS
from .space.profiles import PROFILES
from .space.restrictions import PARTS, Only, OnlyError, word_of
from .space.rounds import problems as drawn_from

__all__ = ["problems"]


def problems(
    operation: Operation = "paged_attention",
    *,
    features: str | Collection[str] = (),
    max_work: int = PROFILES["quick"].max_work,
    **restrictions: Any,  # noqa: ANN401  values of any field
) -> st.SearchStrategy[Any]:
    """Return a Hypothesis strategy of an operation's problems.

    Args:
        operation: one of ``kernelproof.impl.OPERATIONS``.
        features: optional features that problems may need, of those that ``implementation`` takes;
            what a restriction names is drawn without.
        max_work: most work of one problem, about the multiply-adds of its products.
        restrictions: fields of a problem with the values that are drawn, one or several each, as
            for ``kernelproof check --only``: ``dtype="bfloat16"``, ``page_size=(16, 64)``,
            ``seq_lens=8200``.

    Raises:
        ValueError: an operation, a feature, a field or a value that does not exist; it is named.
    """
    if isinstance(max_work, bool) or not isinstance(max_work, int) or max_work < 1:
        message = f"max_work is {max_work!r}; it must be a number from 1 on"
        raise ValueError(message)
    features = (features,) if isinstance(features, str) else features
    implementation(operation, name="problems", features=features)  # refuses what is not there
    try:
        only = Only.read([f"{name}={_words(name, each)}" for name, each in restrictions.items()])
        kept = only.axes(operation)
    except OnlyError as error:
        message = str(error).removeprefix("--only: ")
        raise ValueError(message) from None
    simplest = {axis: values[0] for axis, values in kept.items()}
    asked_for = {PARTS.get(name, (name,))[0] for name in only.values} - {*LENGTHS}
    named = {
        feature
        for axis in asked_for
        for value in kept[axis]
        for feature in drawn_features(example(operation, {**simplest, axis: value}))
    }
    allowed = named.union(features)

    def refused(asked: Collection[Problem]) -> list[Refusal | None]:
        return [_refusal(each, allowed) for each in asked]

    axes = narrow(operation, refused, max_work, axes=kept)
    if axes is None:
        message = f"no problem of {operation} has {only}"
        raise ValueError(message)
    # Some features need two values together, which were asked about one by one.
    return drawn_from(axes).filter(lambda problem: _refusal(problem, allowed) is None)


def _words(name: str, values: Any) -> str:  # noqa: ANN401
    """Return the values of a field as ``--only`` has them."""
    one = isinstance(values, str) or not isinstance(values, Iterable)
    several = [values] if one else [*values]
    if not several:
        message = f"{name} is {values!r}, which holds no value"
        raise ValueError(message)
    return ",".join(word_of(each).removeprefix("torch.") for each in several)


def _refusal(problem: Problem, allowed: Collection[str]) -> Refusal | None:
    """Return the first feature that a problem needs and that nobody asked for."""
    needed = (each for each in drawn_features(problem) if each not in allowed)
    return next((Refusal(f"needs {each}", "feature", each) for each in needed), None)
