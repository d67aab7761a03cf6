"""One support rule: what it speaks of, what it says, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from operator import attrgetter
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..targets.registrations import canonical_name
from ..targets.target import FIELDS, Target
from .feature import Feature

LEVELS = ("declared", "reported", "compiled", "selected", "run")
"""Levels of evidence, the weakest first: FlashInfer's sources or documentation, a public report, a
compiler, the release's own choice of a kernel over a driver that records, a GPU."""
CALLED = ("raises", "wrong", "crashes", "hangs", "right")
"""What can become of a call that is made though a rule refuses it: FlashInfer raises before
anything is launched; the answer is wrong; CUDA fails or the process dies; it does not end; the
answer is right, of a small call at least."""
DECLARED, REPORTED, COMPILED, SELECTED, RUN = LEVELS
RIGHT, NOT_RUN = "right", "not run"
FAILED, INCOMPLETE, STUB = "failed", "incomplete", "stub"
REFUSED, OTHER_CHIP, ABSENT, UNJUDGED = "refused", "other-chip", "absent", "unjudged"
STATUSES: Mapping[str, str] = {
    COMPILED: "every object compiled for this chip, and they hold the kernel",
    FAILED: "nvcc refused a source",
    INCOMPLETE: "it compiled without the kernel: calls that need it throw",
    STUB: "it compiled, but the body of the kernel only returns on this chip",
    REFUSED: "FlashInfer generates no such module for this chip",
    OTHER_CHIP: "FlashInfer generates it for other chips, whatever the chip",
    ABSENT: "this release has no such module",
    UNJUDGED: "the machine could not tell: a deadline, memory, a missing header of CUDA",
}
"""What can come of a unit on a chip. Only ``compiled`` speaks for support."""
PACKAGES = ("flashinfer", "cuda", "triton")


@dataclass(frozen=True)
class Rule:
    """A permission or a refusal. Every condition must hold.

    Attributes:
        id: unique.
        effect: ``"allow"`` or ``"refuse"``; a refusal beats any number of permissions.
        operation: the operation of ``feature.OPERATIONS``.
        backend: the backend of ``feature.BACKENDS``.
        chips: exact compute capabilities, None for a CPU; a refusal without any holds everywhere.
        when: conditions on fields of the feature: a value, a list of values, or a table with
            ``min``, ``max``, ``multiple_of`` or ``not``.
        versions: PEP 440 specifiers of flashinfer, cuda, triton and any distribution, by name.
        artifacts: name and the start of its hash. Where the target's artifact is known its hash
            decides, and the version of flashinfer does not count.
        reason: why; one sentence.
        source: public URL or the file of a release that it was read in.
        evidence: one of ``LEVELS``.
        advice: what else to do, beside the alternatives that ``decide`` finds.
        called: what may become of a call that it refuses, of ``CALLED``. Unless it says otherwise
            FlashInfer raises, and the rule only does so earlier.
        fixed: the day on which the fix of what it refuses was merged: development releases of that
            day and later have it.
        issues: public reports, short: ``FI#2939``, ``V#38730``, ``S#21906``.
    """

    id: str
    effect: str
    operation: tuple[str, ...]
    backend: tuple[str, ...]
    reason: str
    source: str
    evidence: str = "declared"
    chips: tuple[int | None, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    issues: tuple[str, ...] = ()
    called: tuple[str, ...] = CALLED[:1]
    fixed: date | None = None

    def __hash__(self) -> int:
        """Hash by what is unique."""
        return hash(self.id)

    @property
    def weight(self) -> int:
        """How many conditions it has: of several rules that hold, the narrowest is quoted."""
        return len(self.when) + len(self.versions) + len(self.artifacts) + bool(self.chips)

    def applies_to(self, target: Target, known: Mapping[str, str]) -> bool:
        """Whether the rule speaks of this machine; ``known`` are its version's artifacts."""
        return not self.unmet_by(target, known)

    def is_fixed_in(self, version: str | None) -> bool:
        """Whether a development release of FlashInfer, which is named by its day, has the fix.

        Raises:
            ValueError: the version is none by PEP 440.
        """
        if self.fixed is None or version is None:
            return False
        day = parse_version(version).dev
        return day is not None and day >= int(f"{self.fixed:%Y%m%d}")

    def unmet_by(self, target: Target, known: Mapping[str, str]) -> list[str]:
        """Name the conditions on the machine that it does not meet."""
        unmet = []
        if self.chips and target.sm not in self.chips:
            unmet.append("chips")
        artifacts = {**known, **dict(target.artifacts)}
        decided = bool(self.artifacts) and set(self.artifacts) <= set(artifacts)
        if decided:
            unmet += [
                name
                for name, start in self.artifacts.items()
                if not artifacts[name].startswith(start)
            ]
        unmet += [
            package
            for package, specifier in self.versions.items()
            if not (decided and package == "flashinfer")
            and not provider_matches(target, package, specifier)
        ]
        return unmet

    def unmet(self, feature: Feature) -> list[str]:
        """Name the fields of the feature that do not meet their condition."""
        return [
            name
            for name, wanted in self.when.items()
            if not condition(wanted)(getattr(feature, name))
        ]


def compiled(rule: Rule) -> Callable[[Feature], bool]:
    """Return the rule's conditions on a feature as one quick test."""
    tests = [(attrgetter(name), condition(wanted)) for name, wanted in rule.when.items()]
    return lambda feature: all(test(get(feature)) for get, test in tests)


def condition(wanted: Any) -> Callable[[Any], bool]:  # noqa: ANN401  a value of a TOML file
    """Make a test of a condition."""
    if isinstance(wanted, Mapping):
        low, high = wanted.get("min"), wanted.get("max")
        step, never = wanted.get("multiple_of"), wanted.get("not", ())
        excluded = never if isinstance(never, (list, tuple)) else (never,)
        return lambda value: (
            (low is None or value >= low)
            and (high is None or value <= high)
            and (step is None or value % step == 0)
            and value not in excluded
        )
    if isinstance(wanted, (list, tuple)):
        allowed = frozenset(wanted)
        return lambda value: value in allowed
    return lambda value: bool(value == wanted)


def in_words(name: str, wanted: Any) -> str:  # noqa: ANN401  a value of a TOML file
    """Return in words what a condition asks of a field."""
    if isinstance(wanted, Mapping):
        words = {"min": "at least", "max": "at most", "multiple_of": "a multiple of", "not": "not"}
        if [*wanted] == ["not"]:
            return f"{name} must not be {_listed(wanted['not'])}"
        said = [f"{words[key]} {_listed(value)}" for key, value in wanted.items()]
        return f"{name} must be {' and '.join(said)}"
    return f"{name} must be {_listed(wanted)}"


def unmet_in_words(name: str, wanted: Any, value: object) -> str:  # noqa: ANN401
    """Return in words what a condition asks of a field, and the value that does not meet it."""
    if isinstance(wanted, Mapping) and "not" in wanted:
        return f"{in_words(name, wanted)}; it is {_listed(value)}"
    return f"{in_words(name, wanted)}, not {_listed(value)}"


def _listed(value: Any) -> str:  # noqa: ANN401  a value of a TOML file
    if isinstance(value, (list, tuple)):
        return " or ".join(map(_listed, value))
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


@lru_cache(maxsize=4096)
def version_matches(version: str | None, specifier: str) -> bool:
    """Whether a version meets a specifier; none meets any, and development releases count.

    Raises:
        ValueError: the version is none by PEP 440.
    """
    if version is None:
        return False
    return SpecifierSet(specifier).contains(parse_version(version), prereleases=True)


def provider_matches(target: Target, provider: str, specifier: str) -> bool:
    """Whether a target's version of a provider meets a specifier.

    Raises:
        ValueError: FlashInfer's, CUDA's, torch's or Triton's version is none by PEP 440.
    """
    try:
        return version_matches(target.version_of(provider), specifier)
    except ValueError:
        if canonical_name(provider) in FIELDS:
            raise
        return False  # of a package that somebody versions in another way


def check_specifier(name: str, specifier: str) -> None:
    """Refuse what is no specifier of versions.

    Raises:
        ValueError: the message begins with the name.
    """
    try:
        SpecifierSet(specifier)
    except InvalidSpecifier as error:
        message = f"{name} is {specifier!r}, no PEP 440 specifier"
        raise ValueError(message) from error


@lru_cache(maxsize=4096)
def parse_version(version: str) -> Version:
    """Read a version.

    Raises:
        ValueError: it is none by PEP 440.
    """
    try:
        return Version(version)
    except InvalidVersion:
        message = f"{version!r} is no version by PEP 440; one looks like 0.6.7.post2"
        raise ValueError(message) from None
