"""What a run is to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .ledger import Ledger
from .profiles import Profile


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        implementations: names or MODULE:NAME.
        profile: how hard to look.
        operation: of plain functions.
        device: ``"cpu"`` or ``"cuda"``.
        seed: of the search; two runs with the same draw the same problems.
        ledger: known failures.
        jobs: workers at a time; the number of cores if 0, one on a GPU.
        laws: names of the laws to run; all if empty.
        shrink_all: search and shrink in full under every law; otherwise only until the first
            finding of an implementation: laws after it judge ``LATER_PROBLEMS``, unshrunk.
        confirm: replay each finding in a fresh process.
        share: of the profile's problems: a gate over many implementations takes fewer of each.
        cases: folder for an example database, where the profile explores.
    """

    implementations: Sequence[str]
    profile: Profile
    operation: str | None = None
    device: str = "cpu"
    seed: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    jobs: int = 0
    laws: Sequence[str] = ()
    shrink_all: bool = True
    confirm: bool = True
    share: float = 1.0
    cases: Path | None = None
