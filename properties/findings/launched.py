"""The names of the kernels that the calls of an implementation launched, of each specialisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...impl.targets.kernel_names import short_name
from ..verdicts.text import count_of


@dataclass(frozen=True)
class LaunchedCall:
    """A call of one specialisation.

    Attributes:
        id: names the specialisation.
        step: the step of a session, such as ``replay``; empty for a plain call.
        module: the key of what is compiled for it; empty where its library decides by itself.
        features: the optional features of its problem.
        size: the power of 4 of its work.
        kernels: whole names of the kernels that it launched, fillings left out.
    """

    id: str
    step: str
    module: str
    features: tuple[str, ...]
    size: int
    kernels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The short names of its kernels."""
        return tuple(dict.fromkeys(map(short_name, self.kernels)))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        lists = {name: list(getattr(self, name)) for name in ("features", "kernels", "names")}
        return {**vars(self), **lists}


@dataclass
class Launched:
    """What calls launched.

    Attributes:
        calls: a call of each specialisation whose kernels were named, by its id.
        called: ids of all specialisations that were called.
        seconds: seconds that naming took.
        why: why torch's profiler could not be used; empty where it could.
    """

    calls: dict[str, LaunchedCall] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    seconds: float = 0.0
    why: str = ""

    def add(self, told: Mapping[str, Any]) -> None:
        """Add what a worker says of one case."""
        self.called.update(told.get("called", ()))
        self.seconds += told.get("seconds", 0.0)
        self.why = self.why or told.get("why", "")
        for each in told.get("calls", ()):
            parts = {"features": tuple(each["features"]), "kernels": tuple(each["kernels"])}
            self._note(LaunchedCall(**{**each, **parts}))

    def include(self, other: Launched) -> None:
        """Add what other calls launched."""
        for each in other.calls.values():
            self._note(each)
        self.called |= other.called
        self.seconds += other.seconds
        self.why = self.why or other.why

    def _note(self, call: LaunchedCall) -> None:
        known = self.calls.get(call.id)
        # An empty problem launches none where others of its specialisation do.
        if known is None or not known.kernels:
            self.calls[call.id] = call

    @property
    def kernels(self) -> tuple[str, ...]:
        """Whole names of all kernels, each once."""
        return tuple(dict.fromkeys(name for each in self.calls.values() for name in each.kernels))

    def numbers(self) -> dict[str, Any]:
        """Return how many there are, and what it took to name them."""
        return {
            "specialisations": len(self.called | self.calls.keys()),
            "named": len(self.calls),
            "distinct": len(self.kernels),
            "seconds": round(self.seconds, 3),
            "not_recorded": self.not_recorded,
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {**self.numbers(), "calls": [each.to_json() for each in self.calls.values()]}

    @property
    def not_recorded(self) -> str:
        """Why the names of some kernels are not known; empty where all are."""
        if self.why:
            return self.why
        if self.calls and not self.kernels:
            return f"the profiler saw no kernel in {count_of(len(self.calls), 'specialisation')}"
        if left := len(self.called - self.calls.keys()):
            return f"{count_of(left, 'specialisation')} ended before a call of it was profiled"
        return ""


def together(launched: Iterable[Launched]) -> Launched:
    """Return what several have launched."""
    all_of_them = Launched()
    for each in launched:
        all_of_them.include(each)
    return all_of_them


def launched_text(launched: Launched, seconds: float) -> str:
    """Return in a line how many kernels ran; empty where none was to be named.

    Args:
        launched: what calls launched.
        seconds: seconds that all the laws took, of which naming is a share.
    """
    if not launched.called and not launched.why:
        return ""
    known = launched.numbers()
    if launched.why and not launched.calls:
        return f"kernel names: not recorded, {launched.why}"
    share = f", in {launched.seconds / seconds:.1%} of the laws' time" if seconds else ""
    silent = sum(not each.kernels for each in launched.calls.values())
    none = f" ({silent} launched none)" if silent else ""
    told = (
        f"kernels run: {known['distinct']} distinct, in {known['named']} of "
        f"{count_of(known['specialisations'], 'specialisation')}{none}{share}"
    )
    return f"{told}; not recorded: {known['not_recorded']}" if known["not_recorded"] else told


def kernels_of(launched: Launched, told: Mapping[str, Any]) -> list[str]:
    """Return the short names of the kernels of a verdict's calls, as far as they are known."""
    called = told.get("called", ())
    found = (launched.calls[each].names for each in called if each in launched.calls)
    return list(dict.fromkeys(name for names in found for name in names))
