"""Where the support rules disagree with what a FlashInfer release declares about itself.

Neither side is right by itself. A rule may be too generous, or ignorant of a release; a
declaration may be wrong too, which is what rules with evidence ``reported`` are for: they refuse
what FlashInfer admits and somebody has seen fail, and such a disagreement is explained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ...impl.flashinfer_declarations import DeclarationsError, declarations
from ...impl.gating import (
    Decision,
    Feature,
    RuleBook,
    Target,
    capability_name,
    decide,
    load_rules,
)
from ...impl.gating.knowledge import Knowledge
from ...impl.gating.rules import DECLARED
from ...properties.verdicts.text import count_of
from ..console.errors import CONFORMING, MACHINE, NONCONFORMING
from ..console.outputs import Outputs
from ..console.terminal import console
from ..releases.sandboxes import Tell, quietly, sandbox
from ..reports.display import say
from .claims import claims
from .facts import Declarations

SCHEMA = "kernelproof/declared/1"
ALLOWED, REFUSED, UNKNOWN, DATA = "allowed", "refused", "unknown", "data"
"""Kinds: the rules allow what the release refuses; refuse what it admits; do not speak of what it
admits; hold other data than it does."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """One difference between a release and the rules, with both sides' evidence.

    Attributes:
        id: unique among those of one release, and stable.
        topic: the topic of the comparison.
        kind: ``"allowed"``, ``"refused"``, ``"unknown"`` or ``"data"``, see above.
        version: the version of FlashInfer.
        chip: compute capability times ten; None where it is not about one.
        declared, declared_in: what the release says, and where in it.
        status, rule, rule_source, evidence: what the rules say, by which rule; on what evidence.
        explained: whether the rule knows better by evidence of its own.
        sentence: all of it.
        feature: the call that was compared; None for data.
    """

    id: str
    topic: str
    kind: str
    version: str
    chip: int | None = None
    declared: str
    declared_in: str
    status: str
    rule: str = ""
    rule_source: str = ""
    evidence: str = ""
    explained: bool = False
    sentence: str
    feature: Feature | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return asdict(self)


def disagreements(declared: Declarations, book: RuleBook | None = None) -> list[Disagreement]:
    """Compare what a release declares with the rules.

    Args:
        declared: the declarations of ``kernelproof.impl.flashinfer_declarations.declarations``.
        book: the book of rules; the shipped ones if None.

    Returns:
        The disagreements, those that nothing explains first.

    Raises:
        RulesError: the shipped rules cannot be read.
    """
    found = [*_artifacts(declared, book or load_rules())]
    for claim in claims(declared):
        target = Target(sm=claim.sm, flashinfer=declared["flashinfer"])
        decision = decide(claim.feature, target, book=book)
        kind = _kind(claim, decision)
        if kind:
            found.append(_disagreement(kind, claim, decision, declared["flashinfer"]))
    return sorted(found, key=lambda each: each.explained)


def _kind(claim: Knowledge, decision: Decision) -> str:
    """Return the kind of a disagreement; empty where there is none."""
    if not claim.supported:
        return ALLOWED if decision.supported else ""
    if decision.supported or not claim.firm:
        return ""
    return REFUSED if decision.status == "refused" else UNKNOWN


def _disagreement(kind: str, claim: Knowledge, decision: Decision, version: str) -> Disagreement:
    verb = {
        ALLOWED: "supported by the rules",
        REFUSED: "refused by the rules",
        UNKNOWN: "unknown to the rules",
    }[kind]
    rule = f" ({decision.rule}, {decision.evidence})" if decision.rule else ""
    against = "but" if kind == ALLOWED else "although"
    where = f"{claim.feature.backend} on {capability_name(claim.sm)}"
    sentence = (
        f"{claim.topic}: {claim.feature} with {where} is {verb}{rule}, {against} "
        f"flashinfer {version} says: {claim.says}"
    )
    return Disagreement(
        id=f"{claim.topic}/{claim.sm}/{_detail(claim.feature)}".replace(" ", "-"),
        topic=claim.topic,
        kind=kind,
        version=version,
        chip=claim.sm,
        declared=claim.says,
        declared_in=claim.source,
        status=decision.status,
        rule=decision.rule,
        rule_source=decision.source,
        evidence=decision.evidence,
        # What was reported, compiled or run outweighs a declaration.
        explained=kind != UNKNOWN and decision.evidence not in ("", DECLARED),
        sentence=sentence,
        feature=claim.feature,
    )


def _detail(feature: Feature) -> str:
    """Name what of a feature is not the default."""
    plain = Feature(feature.operation, feature.backend)
    return ",".join(f"{k}={v}" for k, v in feature.differences(plain).items()) or "plain"


def _artifacts(declared: Declarations, book: RuleBook) -> Iterator[Disagreement]:
    """Compare the hashes of the precompiled kernels with those that the rules know."""
    version, place = declared["flashinfer"], declared["artifacts"]["source"]
    known: Mapping[str, str] = book.versions.get(version, {})
    if version not in book.versions:
        yield _data(version, "version", f"this is flashinfer {version}", place, "do not know it")
    for name, path in declared["artifacts"]["paths"].items():
        ours, theirs = known.get(name), path.partition("/")[0]
        if ours is not None and not _same_hash(ours, theirs):
            says, rules = f"{name} is {theirs}", f"hold {ours}"
            yield _data(version, f"artifact/{name}", says, place, rules)
    for name in sorted(set(known) - set(declared["artifacts"]["paths"])):
        says, rules = f"there is no artifact {name}", f"hold {known[name]}"
        yield _data(version, f"artifact/{name}", says, place, rules)


def _data(version: str, name: str, says: str, place: str, rules: str) -> Disagreement:
    return Disagreement(
        id=name,
        topic=name,
        kind=DATA,
        version=version,
        declared=says,
        declared_in=place,
        status=rules,
        sentence=f"{name}: the rules {rules}, but flashinfer {version} says: {says}",
    )


def _same_hash(one: str, other: str) -> bool:
    """Compare two hashes of which either may be shortened."""
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]


@dataclass(frozen=True)
class Comparison:
    """One release beside the rules.

    Attributes:
        release: the release as it was asked for.
        version: the version that it is; empty if it could not be had.
        compared: number of calls and chips that were compared.
        disagreements: those that nothing explains first.
        failure: why the release could not be compared, in a sentence; empty if it could.
        code: exit code that is due to the failure.
    """

    release: str
    version: str = ""
    compared: int = 0
    disagreements: tuple[Disagreement, ...] = ()
    failure: str = ""
    code: int = CONFORMING

    @property
    def findings(self) -> list[Disagreement]:
        """Those that nothing explains."""
        return [each for each in self.disagreements if not each.explained]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "release": self.release,
            "flashinfer": self.version,
            "compared": self.compared,
            "failure": self.failure,
            "disagreements": [each.to_json() for each in self.disagreements],
        }


def compare(release: str, *, book: RuleBook | None = None, tell: Tell = quietly) -> Comparison:
    """Compare a release with the rules; the result says so if it cannot be obtained.

    Args:
        release: a version, a wheel or a folder, see ``sandbox``.
        book: the book of rules; the shipped ones if None.
        tell: function that is called with a line of progress now and then.

    Raises:
        RulesError: the shipped rules cannot be read.
    """
    try:
        folder = sandbox(release, tell=tell)
        tell(f"{release}: reading what it declares")
        declared = declarations(folder)
    except click.ClickException as error:
        return Comparison(release, failure=error.message, code=error.exit_code)
    except DeclarationsError as error:
        return Comparison(release, failure=f"{release}: {error}", code=MACHINE)
    found = disagreements(declared, book)
    compared = sum(1 for _ in claims(declared))
    return Comparison(release, declared["flashinfer"], compared, tuple(found))


def compare_releases(
    releases: Sequence[str],
    *,
    book: RuleBook | None = None,
    outputs: Outputs | None = None,
    tell: Callable[[str], None] = quietly,
) -> int:
    """Compare releases with the rules, print the disagreements, and give the exit code.

    Args:
        releases: versions, wheels or folders.
        book: the book of rules; the shipped ones if None.
        outputs: file of the result, named by ``--json``.
        tell: function that is called with a line of progress now and then.

    Returns:
        0 if the rules agree or know better; 1 if there is a finding; where a release could not be
        compared 2 or 3, after the others are printed.

    Raises:
        UsageRefusedError: the file cannot be written.
        RulesError: the shipped rules cannot be read.
    """
    compared = [compare(release, book=book, tell=tell) for release in releases]
    out = console(sys.stdout)
    for each in compared:
        print_comparison(out, each)
    content = {"schema": SCHEMA, "releases": [each.to_json() for each in compared]}
    (outputs or Outputs()).write({"--json": lambda: content})
    failed = max((each.code for each in compared), default=CONFORMING)
    found = any(each.findings for each in compared)
    return failed or (NONCONFORMING if found else CONFORMING)


def print_comparison(out: Console, compared: Comparison) -> None:
    """Print the disagreements of one release: those of one rule about one topic together."""
    if compared.failure:
        out.print(Text(f"--declared {compared.failure}", "bold yellow"), soft_wrap=True)
        return
    print_disagreements(out, compared.disagreements)
    findings = len(compared.findings)
    explained = len(compared.disagreements) - findings
    sentence = (
        f"flashinfer {compared.version}: {compared.compared:,} calls compared with what it "
        f"declares, {count_of(findings, 'finding')}, {explained} explained by reports"
    )
    out.print(Text(sentence, "bold red" if findings else "bold green"), soft_wrap=True)


def print_disagreements(out: Console, found: Iterable[Disagreement]) -> None:
    """Print disagreements: those of one rule about one topic together."""
    for members in _grouped(found):
        first = members[0]
        label = f"explained: {first.kind}" if first.explained else first.kind
        rule = f"  ({first.rule}, {first.evidence}: {first.rule_source})" if first.rule else ""
        chips = ", ".join(dict.fromkeys(capability_name(m.chip) for m in members if m.chip))
        title = f"{label}  {first.topic}  {chips}{rule}"
        more = len(members) - 1
        told = first.sentence + (f"\nand {count_of(more, 'other call')} like it" if more else "")
        style = "KNOWN" if first.explained else "FAIL"
        say(out, title, f"{told}\n{first.declared_in}", style=style)


def _grouped(found: Iterable[Disagreement]) -> Iterable[list[Disagreement]]:
    def key(each: Disagreement) -> tuple[bool, str, str, str]:
        return each.explained, each.kind, each.topic, each.rule

    for _, members in groupby(sorted(found, key=key), key=key):
        yield list(members)
