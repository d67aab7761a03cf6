"""Why a problem is not for an implementation: a sentence for people, a code for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, final, get_args

Code = Literal[
    "machine",
    "rules",
    "package",
    "device",
    "supports",
    "time",
    "module",
    "only",
    "feature",
    "operation",
    "memory",
]
CODES: tuple[Code, ...] = get_args(Code)
"""Codes of refusals, the most telling first: what the support rules refuse was right in all else,
and a feature that an implementation does not name says less than whatever else is wanting."""

OF_THE_MACHINE: tuple[Code, ...] = ("machine", "package", "device")
"""Codes of refusals that hold for every problem: who refuses one with them refuses all."""
MOST_CHARACTERS = 1_000
"""Length of a reason in characters beyond which it is cut: thousands of them travel at once."""


@final
class Refusal(str):
    """The sentence, which carries what is decided on.

    It is a string because ``supports`` answers with one, and whoever prints a reason needs no more.

    Attributes:
        code: who refuses, one of ``CODES``: the support rules, which on this chip with these
            versions allow no call of the backend (``machine``), or not this one (``rules``), a
            package that is missing, the device, ``supports`` itself, the time of the run, which is
            too short to build a module (``time``), a module that was not built for this run, the
            option ``--only``, a feature that is not named, another operation, or a GPU without
            room for the problem (``memory``).
        about: id of the rule, name of the package, the feature or the operation, or what the device
            lacks, such as "a GPU"; else empty.
    """

    __slots__ = ("about", "code")
    code: Code
    about: str

    def __new__(cls, reason: str, code: Code = "supports", about: str = "") -> Refusal:
        """Make one; its fields by name are those of ``to_json``.

        Raises:
            ValueError: there is no such code.
        """
        if code not in CODES:
            message = f"code is {code!r}; it must be one of {', '.join(CODES)}"
            raise ValueError(message)
        made = super().__new__(cls, str(reason)[:MOST_CHARACTERS])
        made.code, made.about = code, about
        return made

    def to_json(self) -> dict[str, str]:
        """Return a JSON-able dictionary: as JSON, the string itself would lose its code."""
        return {"reason": str(self), "code": self.code, "about": self.about}


def first_reason(*conditions: tuple[object, str]) -> str | None:
    """Return the reason of the first condition that holds; None if none does."""
    return next((why for holds, why in conditions if holds), None)


def most_telling(refusals: Iterable[Refusal | None]) -> Refusal | None:
    """Return the refusal that says most, the first of several with its code; None if all are."""
    given = (refusal for refusal in refusals if refusal)
    return min(given, key=lambda refusal: CODES.index(refusal.code), default=None)
