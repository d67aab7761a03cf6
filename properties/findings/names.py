"""Names of the implementations of one run, none of which is another's."""

from __future__ import annotations


class Names:
    """The names of implementations in a report, each of them of one implementation."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    def tell(self, name: str, reference: str) -> str:
        """Return the name; with where it comes from, if another implementation has it already."""
        owner = self._owners.setdefault(name, reference)
        return name if owner == reference else f"{name} ({reference})"
