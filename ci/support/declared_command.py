"""The run of `kernelproof support --declared`: releases found, introspected and compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ...impl.flashinfer_declarations import DeclarationsError, declarations
from ...impl.gating import RuleBook, capability_name
from ...properties.verdicts.text import count_of
from ..console.errors import CONFORMING, MACHINE, NONCONFORMING
from ..console.outputs import Outputs
from ..console.terminal import console
from ..releases.sandboxes import Tell, quietly, sandbox
from ..reports.display import say
from .claims import claims
from .declared import Disagreement, disagreements

SCHEMA = "kernelproof/declared/1"


@dataclass(frozen=True)
class Comparison:
    """One release beside the rules.

    Attributes:
        release: as it was asked for.
        version: that it is; empty if it could not be had.
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
        book: of rules; the shipped ones if None.
        tell: is given a line of progress now and then.

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
        book: of rules; the shipped ones if None.
        outputs: file of the result, named by ``--json``.
        tell: is given a line of progress now and then.

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
    for members in _grouped(compared.disagreements):
        first = members[0]
        label = f"explained: {first.kind}" if first.explained else first.kind
        rule = f"  ({first.rule}, {first.evidence}: {first.rule_source})" if first.rule else ""
        chips = ", ".join(dict.fromkeys(capability_name(m.chip) for m in members if m.chip))
        title = f"{label}  {first.topic}  {chips}{rule}"
        more = len(members) - 1
        told = first.sentence + (f"\nand {count_of(more, 'other call')} like it" if more else "")
        style = "KNOWN" if first.explained else "FAIL"
        say(out, title, f"{told}\n{first.declared_in}", style=style)
    findings = len(compared.findings)
    explained = len(compared.disagreements) - findings
    sentence = (
        f"flashinfer {compared.version}: {compared.compared:,} calls compared with what it "
        f"declares, {count_of(findings, 'finding')}, {explained} explained by reports"
    )
    out.print(Text(sentence, "bold red" if findings else "bold green"), soft_wrap=True)


def _grouped(found: Iterable[Disagreement]) -> Iterable[list[Disagreement]]:
    def key(each: Disagreement) -> tuple[bool, str, str, str]:
        return each.explained, each.kind, each.topic, each.rule

    for _, members in groupby(sorted(found, key=key), key=key):
        yield list(members)
