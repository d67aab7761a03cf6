"""Gates that are wrong, each in a way that a real one was or could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from ...impl.gating import Feature, Rule, RuleBook, Target, book, decision, rules
from ...impl.targets import capability, target

Patch = Callable[[Any, str, Any], None]
"""Sets an attribute until the wrong decision is taken away."""
Apply = Callable[[Patch, RuleBook], RuleBook]


@dataclass(frozen=True)
class GatingBug:
    """A wrong decision.

    Attributes:
        name: the name of the bug.
        apply: patches the code, or gives another book.
        model: the report that it is modelled on.
    """

    name: str
    apply: Apply
    model: str = ""


BUGS: list[GatingBug] = []


def bug(model: str = "") -> Callable[[Apply], Apply]:
    """Register a wrong decision under its function's name."""

    def register(apply: Apply) -> Apply:
        BUGS.append(GatingBug(apply.__name__.replace("_", "-"), apply, model))
        return apply

    return register


@contextmanager
def seeded(wrong: GatingBug, shipped: RuleBook) -> Iterator[RuleBook]:
    """Put wrong decisions in the place of the right ones."""
    with ExitStack() as stack:
        _forget()
        stack.callback(_forget)

        def patch(owner: Any, name: str, value: Any) -> None:  # noqa: ANN401
            stack.enter_context(mock.patch.object(owner, name, value))

        yield wrong.apply(patch, shipped)


def _forget() -> None:
    book.index_of.cache_clear()
    rules.version_matches.cache_clear()


def _patch_machine(
    patch: Patch, matches: Callable[[int | None, tuple[int | None, ...]], bool]
) -> None:
    """Compare chips otherwise."""
    honest = Rule.unmet_by

    def unmet_by(rule: Rule, machine: Target, known: Mapping[str, str]) -> list[str]:
        unmet = [name for name in honest(rule, machine, known) if name != "chips"]
        return unmet if not rule.chips or matches(machine.sm, rule.chips) else ["chips", *unmet]

    patch(Rule, "unmet_by", unmet_by)


@bug("vllm#38730")
def family_instead_of_chip(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Admit every chip of a family from its first one on, SM107 too."""
    _patch_machine(
        patch,
        lambda sm, chips: any(
            sm == chip or (sm is not None and chip is not None and sm - sm % 10 == chip)
            for chip in chips
        ),
    )
    return shipped


@bug("vllm#39825")
def major_only(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Compare major versions only."""

    def major(sm: int | None) -> int | None:
        return None if sm is None else sm // 10

    _patch_machine(patch, lambda sm, chips: major(sm) in {major(chip) for chip in chips})
    return shipped


@bug()
def at_least_the_chip(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Admit the chips that a rule lists, and all newer ones."""
    _patch_machine(
        patch,
        lambda sm, chips: (
            sm in chips or (sm is not None and sm >= min(c for c in chips if c is not None))
            if any(chip is not None for chip in chips)
            else sm in chips
        ),
    )
    return shipped


@bug()
def versions_as_texts(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Compare versions letter by letter: 0.6.13 comes before 0.6.7 then."""

    def matches(version: str | None, specifier: str) -> bool:
        if version is None:
            return False
        clauses = [clause.strip() for clause in specifier.split(",")]
        return all(
            (clause.startswith(">=") and version >= clause[2:])
            or (clause.startswith("<=") and version <= clause[2:])
            or (clause.startswith("==") and version == clause[2:])
            or (clause.startswith("<") and not clause.startswith("<=") and version < clause[1:])
            or (clause.startswith(">") and not clause.startswith(">=") and version > clause[1:])
            or (clause.startswith("!=") and version != clause[2:])
            for clause in clauses
        )

    patch(rules, "version_matches", matches)
    return shipped


@bug("flashinfer#2939")
def post_releases_left_out(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Compare only the base of a version: 0.6.7.post2 is 0.6.7 then."""
    honest = rules.version_matches

    def matches(version: str | None, specifier: str) -> bool:
        return honest(version and rules.parse_version(version).base_version, specifier)

    patch(rules, "version_matches", matches)
    return shipped


@bug("vllm#38730")
def pair_read_by_its_major(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Take the first of ``10, 0`` for the capability: SM 1.0."""
    honest = capability.parse_capability

    def parse(value: Any) -> int:  # noqa: ANN401  whatever is written
        return int(value[0]) if isinstance(value, tuple) else honest(value)

    patch(target, "parse_capability", parse)
    return shipped


@bug()
def last_condition_dropped(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Check all conditions on a feature but the last."""
    honest = rules.compiled

    def compiled(rule: Rule) -> Callable[[Feature], bool]:
        return honest(replace(rule, when=dict(list(rule.when.items())[:-1])))

    patch(book, "compiled", compiled)
    return shipped


@bug()
def multiples_not_checked(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Check limits, but not that a head dim is a multiple."""
    honest = rules.condition

    def condition(wanted: Any) -> Callable[[Any], bool]:  # noqa: ANN401  of a TOML file
        if isinstance(wanted, Mapping):
            wanted = {key: value for key, value in wanted.items() if key != "multiple_of"}
        return honest(wanted)

    patch(rules, "condition", condition)
    return shipped


@bug("flashinfer#2939")
def hashes_not_looked_at(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Go by versions only where a target names its artifacts."""
    honest = Rule.unmet_by

    def unmet_by(rule: Rule, machine: Target, known: Mapping[str, str]) -> list[str]:
        del known
        return honest(rule, replace(machine, artifacts=()), {})

    patch(Rule, "unmet_by", unmet_by)
    return shipped


def _unless_allowed(
    holds: Callable[[Feature], bool], allowed: book.Tests
) -> Callable[[Feature], bool]:
    return lambda feature: holds(feature) and not any(also(feature) for _, also in allowed)


@bug()
def permissions_beat_refusals(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Ask permissions first."""
    honest = book.index_of

    def index_of(rules_: RuleBook, machine: Target) -> book.Index:
        index = honest(rules_, machine)
        refusals = {
            key: tuple(
                (rule, _unless_allowed(holds, index.permissions.get(key, ())))
                for rule, holds in tests
            )
            for key, tests in index.refusals.items()
        }
        return index._replace(refusals=refusals)

    patch(decision, "index_of", index_of)
    return shipped


@bug("sglang#36558")
def unknown_is_supported(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Let pass what no rule speaks of."""
    honest = decision._rule_on  # noqa: SLF001  the decision that is made wrong

    def rule_on(
        feature: Feature, index: book.Index, backends: tuple[str, ...] | None = None
    ) -> decision.Ruling:
        said = honest(feature, index, backends)
        return said._replace(status="supported") if said.status == "unknown" else said

    patch(decision, "_rule_on", rule_on)
    return shipped


@bug()
def future_releases_let_in(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Believe that permissions hold for releases that nobody has tried."""
    honest = RuleBook.releases_of

    def releases_of(book: RuleBook, version: str | None) -> tuple[str, ...]:
        return honest(book, version) or (() if version is None else (version,))

    patch(RuleBook, "releases_of", releases_of)
    return shipped


@bug()
def development_releases_taken_for_their_own(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Decide a development release by the release that it leads to, not by the one before too."""
    honest = RuleBook.releases_of
    patch(RuleBook, "releases_of", lambda book, version: honest(book, version)[-1:])
    return shipped


@bug()
def alternatives_not_asked_about(patch: Patch, shipped: RuleBook) -> RuleBook:
    """Offer the next backend of the list, supported or not."""

    def offer(feature: Feature, *_: Any) -> tuple[Feature, ...]:  # noqa: ANN401
        return (replace(feature, backend=decision.PREFERENCE[feature.operation][0]),)

    patch(decision, "_alternatives", offer)
    return shipped
