"""The laws. Each knows an implementation and a problem, and gives a verdict; none knows pytest."""

from __future__ import annotations

from ...fixtures.suggestions import did_you_mean
from . import (
    append,
    attention,
    far,
    general,
    hidden,
    host_ahead,
    life_cycle,
    merge,
    moe_inert,
    moe_options,
    moe_order,
    moe_sums,
    nan_codes,
    padding,
    partition,
    quantised,
    quantisers,
    routing,
    slack,
    soak,
    trees,
)
from .law import Law
from .metadata import (
    builders,
    context_parallel,
    planning,
    preparation,
    promises,
    rearranging,
    steps,
)

LAWS: tuple[Law, ...] = (
    *general.LAWS,
    *attention.LAWS,
    *partition.LAWS,
    *trees.LAWS,
    *quantised.LAWS,
    *nan_codes.LAWS,
    *padding.LAWS,
    *slack.LAWS,
    *hidden.LAWS,
    *far.LAWS,
    *life_cycle.LAWS,
    *soak.LAWS,
    *host_ahead.LAWS,
    *merge.LAWS,
    *builders.LAWS,
    *preparation.LAWS,
    *promises.LAWS,
    *steps.LAWS,
    *planning.LAWS,
    *context_parallel.LAWS,
    *append.LAWS,
    *quantisers.LAWS,
    *rearranging.LAWS,
    *routing.LAWS,
    *moe_order.LAWS,
    *moe_sums.LAWS,
    *moe_inert.LAWS,
    *moe_options.LAWS,
)
"""All laws, the most telling of each operation first."""


def laws_of(operation: str) -> tuple[Law, ...]:
    """Return the laws that speak of an operation."""
    return tuple(law for law in LAWS if operation in law.operations)


def find_law(name: str) -> Law:
    """Return the law of this name.

    Raises:
        LookupError: there is none.
    """
    for law in LAWS:
        if law.name == name:
            return law
    meant = did_you_mean(name, [law.name for law in LAWS])
    message = f"there is no law {name!r}; {meant}`kernelproof list` names them all"
    raise LookupError(message)


__all__ = ["LAWS", "Law", "find_law", "laws_of"]
