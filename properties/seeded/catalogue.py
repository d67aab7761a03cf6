"""What a seeded bug is, and the decorator that makes one of a function."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, cast

from ...impl.protocol import Implementation, Operation, Session, Supports, implementation
from ...reference import Arithmetic

Control = Literal["bug", "tile", "hang", "crash", "honest"]


@dataclass(frozen=True)
class SeededBug:
    """An implementation with exactly one fault, or an honest one that no law may accuse.

    Attributes:
        name: the name of the implementation.
        reference: MODULE:NAME.
        operation: the operation that it implements.
        description: what it does wrong, in one sentence.
        law: the law that it was written for; others may kill it too.
        model: the public report that it is modelled on, where there is one.
        control: a bug that gives a wrong answer, such a one of our own Triton kernels (``tile``), a
            hang, a crash, or an honest control.
    """

    name: str
    reference: str
    operation: str
    description: str
    law: str = ""
    model: str = ""
    control: Control = "bug"


def seeded(
    catalogue: list[SeededBug],
    operation: str,
    law: str = "",
    *,
    model: str = "",
    control: Control = "bug",
    supports: Supports | None = None,
    features: Collection[str] = (),
    arithmetic: Arithmetic | None = None,
    writes_out: bool = False,
    session: Callable[[], Session] | None = None,
    hidden_keys: Literal["any", "finite"] = "any",
    runs: Collection[str] = (),
) -> Callable[[Callable[[Any], Any]], Implementation]:
    """Make an implementation of a function and enter it into a catalogue.

    The function's name is the implementation's, and the first line of its docstring says what is
    wrong with it. The other arguments are those of ``SeededBug`` and ``implementation``.
    """

    def decorate(function: Callable[[Any], Any]) -> Implementation:
        made = implementation(
            cast("Operation", operation),
            name=function.__name__.replace("_", "-"),
            supports=supports,
            features=features,
            arithmetic=arithmetic,
            writes_out=writes_out,
            session=session,
            hidden_keys=hidden_keys,
            runs=runs,
        )(function)
        catalogue.append(
            SeededBug(
                name=made.name,
                reference=f"{function.__module__}:{function.__name__}",
                operation=operation,
                description=(function.__doc__ or "").splitlines()[0],
                law=law,
                model=model,
                control=control,
            )
        )
        return made

    return decorate
