"""Case files: the smallest problem of a finding, and the command that judges it again."""

from __future__ import annotations

import os
import platform
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...fixtures import CORPUS
from ...impl.registry import BUILT_IN, installed_implementations
from ...impl.targets.unpacked import folders
from .files import Output, OutputError
from .ledger import CASE_SCHEMA, Ledger
from .report import Finding, ImplementationReport, RunReport
from .text_format import description

MUST_FAIL = "unexpected_pass"
"""Kind of a finding whose case passes though the ledger says that it fails."""
LONGEST_NAME = 80


@dataclass
class CaseWriter:
    """Writes each finding's case once, as it comes; may be called from several threads.

    Attributes:
        folder: where the files go.
        operation: the operation of plain functions.
        ledger: known findings are replayed from its own case files.
        flag: the option that named the folder.
        without_rules: support rules that are not asked in the run.
        failed: why a file could not be written, if one could not.
    """

    folder: Path
    operation: str | None
    ledger: Ledger
    flag: str = "--cases"
    without_rules: Sequence[str] = ()
    failed: str = ""
    _written: dict[Path, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write_all(self, report: RunReport) -> None:
        """Write the cases of all findings of a run, and their replay commands into them."""
        for implementation in report.implementations:
            for finding in implementation.findings:
                self.write(finding, implementation, report)

    def write_found(self, finding: Finding, report: RunReport) -> None:
        """Write a finding that has just come, where it is clear whose it is."""
        for implementation in list(report.implementations):
            if any(each is finding for each in implementation.findings):
                self.write(finding, implementation, report)

    def write(self, finding: Finding, implementation: ImplementationReport, run: RunReport) -> None:
        """Write a finding's case unless it has been, and set its replay command."""
        with self._lock:
            if finding.replay:
                return
            known = next((e for e in self.ledger.entries if e.id == finding.entry), None)
            if known is not None and known.case:
                finding.replay = replay_command(known.case)
                return
            name = loading_name(implementation.reference)
            path = self._path(finding, implementation.name, name)
            case_json = case_of(
                finding,
                name,
                operation=self.operation,
                seed=run.seed,
                target=run.target,
                without_rules=self.without_rules,
                soak=run.soak,
                sanitizer=run.sanitizer,
                distrust=run.distrust,
            )
            try:
                Output(self.flag, path).write(case_json)
            except OutputError as error:
                self.failed = str(error)
                return
            self._written[path] = name
            finding.replay = replay_command(path)

    def _path(self, finding: Finding, title: str, name: str) -> Path:
        # The title names the chip too, where there are several: each has its own case.
        plain = re.sub(r"[^\w.-]+", "-", title, flags=re.ASCII).strip("-.")
        stem = f"{plain[:LONGEST_NAME] or 'implementation'}-{finding.law}-{finding.problem.id}"
        path, copies = self.folder / f"{stem}.json", 1
        while self._written.get(path, name) != name:  # two implementations that share a name
            copies += 1
            path = self.folder / f"{stem}-{copies}.json"
        return path


def case_of(
    finding: Finding,
    implementation: str,
    *,
    operation: str | None,
    seed: int,
    target: Mapping[str, Any],
    without_rules: Sequence[str] = (),
    soak: int = 0,
    sanitizer: str = "",
    distrust: bool = False,
) -> dict[str, Any]:
    """Return the content of a finding's case file.

    Args:
        finding: the finding with its smallest problem.
        implementation: the name to load it by.
        operation: the operation of a plain function.
        seed: the seed of the run.
        target: the target of the run.
        without_rules: support rules that were not asked.
        soak: launches under the law of that name, which a replay makes too.
        sanitizer: tool of compute-sanitizer of the run; replays of its own findings use it too.
        distrust: whether another process judges, in a replay too.
    """
    return {
        "schema": CASE_SCHEMA,
        "description": description(finding.law, finding.problem, finding.verdict),
        "law": finding.law,
        "implementation": implementation,
        "operation": operation,
        "problem": finding.problem.to_json(),
        "device": target.get("device", "cpu"),
        "without_rules": list(without_rules),
        "verdict": replace(finding.verdict, error_map=None).to_json(),
        "seed": seed,
        **({"soak": soak} if finding.law == "soak" and soak else {}),
        **({"sanitizer": sanitizer} if sanitizer and finding.verdict.kind == sanitizer else {}),
        **({"distrust": True} if distrust else {}),
        "versions": versions(dict(target)),
    }


def loading_name(reference: str) -> str:
    """Return the registered name of MODULE:NAME, or itself where there is none."""
    for names in (BUILT_IN, installed_implementations()):
        for name, known in names.items():
            if known == reference:
                return name
    return reference


def replay_command(path: Path, named: Sequence[Path] | None = None) -> str:
    """Return the command that judges a case again, to be copied into a shell.

    A case of the shipped corpus goes by its name, wherever Kernelproof is installed.

    Args:
        path: the path of the case.
        named: folders of ``--from``; those of this process if None.
    """
    shipped = path.resolve().parent == CORPUS.resolve()
    engines = folders() if named is None else named
    sources = [word for folder in engines for word in ("--from", from_here(folder))]
    return shlex.join(
        ["kernelproof", "replay", path.name if shipped else from_here(path), *sources]
    )


def from_here(path: Path) -> str:
    """Return a path relative to the current folder where it is below that."""
    here = os.path.relpath(path)
    return str(path.absolute()) if here.startswith(os.pardir) else here


def versions(target: dict[str, Any]) -> dict[str, Any]:
    """Return what ran, by name; None where it is absent."""
    return {
        "kernelproof": __version__,
        "python": platform.python_version(),
        **{name: target.get(name) for name in ("torch", "triton", "flashinfer", "cuda")},
    }
