"""Where the support rules disagree with the kernels that a FlashInfer release selects itself.

A launch over a driver that records says that the release admits a call and has a kernel for it. It
says nothing of hangs and wrong values: a rule that refuses for one of those knows better.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ...impl.gating import Decision, Feature, RuleBook, Target, capability_name, decide
from ...impl.gating.feature import with_fields
from ...impl.gating.rules import CALLED, SELECTED, Rule, parse_version
from ...impl.gating.selections import RAISES, RUNS
from ...properties.verdicts.text import count_of
from ..binaries.flashinfer.asking import (
    CHIPS,
    DIES,
    NOT_ASKED,
    OUTCOMES,
    Answer,
    Selection,
    ask_release,
)
from ..binaries.flashinfer.building import build_launcher
from ..binaries.flashinfer.gemms import FAMILIES, find_gemms
from ..binaries.flashinfer.kernels import KernelList, KernelListError, find_kernels, kernels_of
from ..binaries.flashinfer.listing import LISTED, list_kernels
from ..binaries.flashinfer.questions import BACKEND, GEMM, MOE, OPERATIONS, can_be_asked, kinds
from ..compile.generating import release_in
from ..compile.nvcc import find_nvcc
from ..console.errors import CONFORMING, NONCONFORMING, MachineError, UsageRefusedError
from ..console.outputs import Outputs
from ..console.terminal import console
from ..releases.sandboxes import SandboxError, quietly, sandbox
from .declared import ALLOWED, REFUSED, UNKNOWN, Disagreement, print_disagreements

SCHEMA = "kernelproof/selected/1"
GEMMS = dict(zip((MOE, GEMM), FAMILIES, strict=True))
"""Families of precompiled GEMMs by the operation that launches them."""
SHOWN_ERROR = 160
"""Most characters of an error in a disagreement, so that kinds that fail alike are one group."""


@dataclass(frozen=True)
class Selected:
    """What a release answers about its own calls.

    Attributes:
        version: the release.
        level: ``"selected"``, or ``"listed"`` where only its list of kernels was read.
        kernels: its list of kernels.
        selections: the answers, a kind of call and a chip each.
        passed_bytes: bytes of parameters that its launcher passes to a kernel; 0 where there is
            none.
    """

    version: str
    level: str
    kernels: KernelList
    selections: tuple[Selection, ...]
    passed_bytes: int = 0

    def misfits(self, sm: int) -> dict[str, int]:
        """Return what kernels of a chip take, by build, where its launcher passes another size."""
        builds = {each.build for each in self.kernels.kernels if each.runs_on(sm)}
        taken = self.kernels.parameter_bytes
        return {
            build: taken[build]
            for build in sorted(builds & taken.keys())
            if self.passed_bytes not in {0, taken[build]}
        }

    def to_json(self, *, calls: bool = True) -> dict[str, Any]:
        """Return a JSON-able dictionary. Kinds in which the host dies are counted, not named.

        Args:
            calls: whether each call is in it, and not only each kind.
        """
        died = Counter(each.sm for each in self.selections if each.outcome == DIES)
        lived = [each for each in self.selections if each.outcome not in (DIES, NOT_ASKED)]
        names = sorted({name for each in lived for name in each.kernels})
        known = {name: self.kernels.by_name[name] for name in names if name in self.kernels.by_name}
        return {
            "flashinfer": self.version,
            "level": self.level,
            "artifact": self.kernels.artifact,
            "parameter_bytes": {"passed": self.passed_bytes, **self.kernels.parameter_bytes},
            "dies": {str(sm): count for sm, count in sorted(died.items())},
            "kernels": {
                name: {"build": one.build, "shared_memory": one.shared_memory, "sha256": one.sha256}
                for name, one in known.items()
            },
            "cells": [_cell(each, calls=calls) for each in lived],
        }


def _cell(selection: Selection, *, calls: bool) -> dict[str, Any]:
    feature = selection.feature
    plain = Feature(feature.operation, feature.backend, head_dim_qk=feature.head_dim_qk)
    plain = with_fields(plain, head_dim_vo=0, head_dim_qk=0, kv_dtype="", q_dtype="")
    cell = {
        "sm": selection.sm,
        "feature": {"operation": feature.operation, **feature.differences(plain)},
        "outcome": selection.outcome,
        "kernels": selection.kernels,
        "error": selection.error,
    }
    if calls:
        cell["calls"] = [
            {name: value for name, value in asdict(each).items() if value or name == "call"}
            for each in selection.answers
        ]
    return {name: value for name, value in cell.items() if value}


def select(
    given: str,
    features: Sequence[Feature],
    chips: Sequence[int],
    *,
    tell: Callable[[str], None] = quietly,
) -> Selected:
    """Ask a release which kernels it launches; without a compiler, which ones it lists.

    Args:
        given: a version, a wheel or a folder, see ``sandbox``.
        features: the kinds of call, all of attention, of MoE or of GEMMs.
        chips: the chips, of ``CHIPS``.
        tell: function that is called with a line of progress now and then.

    Raises:
        SandboxError: the release cannot be had.
        MachineError: its list of kernels cannot be had, or it cannot be asked.
    """
    release = release_in(sandbox(given, tell=tell))
    operation = features[0].operation
    if operation in GEMMS:
        family = GEMMS[operation]
        kernels = find_gemms(release.folder, release.version, family, tell=tell)
    else:
        kernels = find_kernels(release.folder, release.version, tell=tell)
    try:
        nvcc = find_nvcc()
    except MachineError as error:
        tell(f"{error.message}; only the list of kernels is read, which is weaker evidence")
        listed = tuple(list_kernels(kernels, features, chips))
        return Selected(release.version, LISTED, kernels, listed)
    build = build_launcher(release, kernels, nvcc, operation, tell=tell)
    found = ask_release(release, build, kernels, features, chips, tell=tell)
    return Selected(release.version, SELECTED, kernels, tuple(found), build.passed_bytes)


def disagreements(selected: Selected, book: RuleBook) -> list[Disagreement]:
    """Compare a release's answers with the rules; those that nothing explains come first."""
    found = []
    for each in selected.selections:
        target = Target(sm=each.sm, flashinfer=selected.version)
        decision = decide(each.feature, target, book=book)
        kind = _kind(each, decision, selected.level)
        if kind:
            found.append(_disagreement(kind, each, decision, selected))
    return sorted(found, key=lambda each: each.explained)


def _kind(selection: Selection, decision: Decision, level: str) -> str:
    """Return the kind of a disagreement; empty where there is none."""
    if selection.outcome == NOT_ASKED:
        return ""
    if selection.outcome != RUNS:
        return ALLOWED if decision.supported else ""
    # That a list has some kernel of these types does not say that the host takes it.
    if decision.supported or level == LISTED:
        return ""
    return REFUSED if decision.status == "refused" else UNKNOWN


def _disagreement(
    kind: str, selection: Selection, decision: Decision, selected: Selected
) -> Disagreement:
    feature, rule = selection.feature, decision.ruling.rule
    form = feature.quantisation if feature.operation in GEMMS else feature.phase
    topic = f"trtllm-gen {feature.operation} {form}"
    where = f"{capability_name(selection.sm)} with flashinfer {selected.version}"
    says = _says(selection, selected.level)
    # What ends the host is counted, and not kept: nothing of a disagreement names the call.
    dies = selection.outcome == DIES
    called = "a kind of call" if dies else str(feature)
    ruled = f"{decision.status} by the rules" + (f" ({rule.id})" if rule else "")
    return Disagreement(
        id=f"{topic}/{selection.sm}/{'dies' if dies else feature}".replace(" ", "-"),
        topic=topic,
        kind=kind,
        version=selected.version,
        chip=selection.sm,
        declared=says,
        declared_in=f"{selected.level}: kernels {selected.kernels.artifact[:8]}",
        status=decision.status,
        rule=decision.rule,
        rule_source=decision.source,
        evidence=decision.evidence,
        # A launch speaks neither of hangs nor of values, for which such a rule refuses.
        explained=kind == REFUSED and rule is not None and rule.called != CALLED[:1],
        sentence=f"{called} on {where} is {ruled}, but the release {says}",
        feature=None if dies else feature,
    )


def _says(selection: Selection, level: str) -> str:
    if selection.outcome != RUNS and level == LISTED:
        return "lists no kernel"
    if selection.outcome == RUNS:
        return f"launches {selection.kernels[0]}"
    if selection.outcome == DIES:
        return "ends the process while it selects a kernel"
    error = selection.error[:SHOWN_ERROR]
    if selection.outcome == RAISES or not selection.raised:
        return f"raises for every length: {error}"
    calls = "; ".join(str(each.call) for each in selection.raised)
    some = f"{len(selection.raised)} of {len(selection.answers)} calls"
    return f"raises for {some} ({calls}): {error}"


def compare_binaries(
    given: str,
    chips: Sequence[int | None],
    asked: Mapping[str, Any],
    *,
    book: RuleBook,
    outputs: Outputs | None = None,
    tell: Callable[[str], None] = quietly,
) -> int:
    """Ask a release about its own calls, print where the rules disagree, and return the exit code.

    Args:
        given: a version, a wheel or a folder, see ``sandbox``.
        chips: the chips; all of ``CHIPS`` if empty.
        asked: fields of one kind of call, whose launches are printed; all kinds if empty.
        book: the book of rules.
        outputs: file of the result, named by ``--json``.
        tell: function that is called with a line of progress now and then.

    Returns:
        0 if the rules agree or know better, else 1.

    Raises:
        UsageRefusedError: the chip or the call cannot be asked about.
        SandboxError, MachineError: see ``select``.
    """
    features = _features(asked)
    selected = select(given, features, _chips(chips), tell=tell)
    found = disagreements(selected, book)
    fixes = list(same_bits(selected, found, book, tell=tell))
    out = console(sys.stdout)
    if len(features) == 1:
        _print_launches(out, selected)
    print_disagreements(out, found)
    for line in fixes:
        out.print(Text(line), soft_wrap=True)
    findings = [each for each in found if not each.explained]
    misfits = [
        misfit_text(selected, sm)
        for sm in dict.fromkeys(each.sm for each in selected.selections)
        if selected.misfits(sm)
    ]
    for line in misfits:
        out.print(Text(line, "bold red"), soft_wrap=True)
    _print_summary(out, selected, len(findings), len(found) - len(findings))
    content = {
        "schema": SCHEMA,
        **selected.to_json(calls=len(features) == 1),
        "disagreements": [each.to_json() for each in found],
        "same_bits": fixes,
    }
    (outputs or Outputs()).write({"--json": lambda: content})
    return NONCONFORMING if findings or misfits else CONFORMING


def misfit_text(selected: Selected, sm: int) -> str:
    """Return in words that a launcher passes another struct than the kernels of a chip take."""
    taken = ", ".join(
        f"those built for {build} take {size:,}" for build, size in selected.misfits(sm).items()
    )
    passed = f"the launcher passes {selected.passed_bytes:,} bytes of parameters to kernels"
    return f"{capability_name(sm)}: {passed}, and {taken}"


def _features(asked: Mapping[str, Any]) -> list[Feature]:
    operation = asked.get("operation", "")
    if asked.keys() <= {"operation"} and operation in ("", *GEMMS, *OPERATIONS):
        return [each for each in kinds(operation) if operation in ("", each.operation)]
    layout = {} if operation in GEMMS else {"kv_layout": "HND"}
    try:
        feature = Feature(**{"backend": BACKEND, **layout, **asked})
    except ValueError as error:
        raise UsageRefusedError(str(error)) from error
    if not can_be_asked(feature):
        message = (
            f"--binaries cannot ask for {feature}: it asks {BACKEND} attention, MoE and GEMMs; "
            "kernels of CUTLASS are in no list, as nvcc makes them of templates on the machine"
        )
        raise UsageRefusedError(message)
    return [feature]


def _chips(given: Sequence[int | None]) -> list[int]:
    for sm in given:
        if sm not in CHIPS:
            names = ", ".join(map(capability_name, CHIPS))
            message = f"--sm: --binaries asks about {names}, not {capability_name(sm)}"
            raise UsageRefusedError(message)
    return [sm for sm in given if sm is not None] or list(CHIPS)


def same_bits(
    selected: Selected,
    found: Sequence[Disagreement],
    book: RuleBook,
    *,
    tell: Callable[[str], None] = quietly,
) -> Iterator[str]:
    """Yield, for each rule on a hang, of how many kinds the fixed release ships the same bits.

    The same bits in a release that does not hang are no proof: only a run on the chip is.
    """
    by_feature = {(each.sm, each.feature): each for each in selected.selections}
    hanging: dict[Rule, list[Selection]] = {}
    for each in found:
        rule = book.find(each.rule)
        # Of MoE no hash of a release names the whole path to its list.
        hangs = rule is not None and "hangs" in rule.called and MOE not in rule.operation
        if each.explained and rule is not None and hangs:
            hanging.setdefault(rule, []).append(by_feature[each.chip or 0, each.feature])  # type: ignore[index]
    for rule, selections in hanging.items():
        fixed = _fixed(rule, selected.version, selections[0].sm, book)
        if fixed is None:
            continue
        try:
            after = kernels_of(book.versions[fixed]["TRTLLM_GEN_FMHA"], fixed, tell=tell)
        except (MachineError, SandboxError, KernelListError) as error:
            yield f"{rule.id}: the kernels of {fixed} cannot be compared: {error.message}"
            continue
        same = sum(_same(each, selected.kernels, after) for each in selections)
        yield (
            f"{rule.id}: {fixed}, which is not refused, ships the same bits for {same:,} of these "
            f"{count_of(len(selections), 'kind')} of call; only a run on the chip admits one"
        )


def _fixed(rule: Rule, version: str, sm: int, book: RuleBook) -> str | None:
    """Return the first later release that a rule does not speak of; None if there is none."""
    later = [each for each in book.versions if parse_version(each) > parse_version(version)]
    for each in sorted(later, key=parse_version):
        if not rule.applies_to(Target(sm=sm, flashinfer=each), book.artifacts_of(each)):
            return each
    return None


def _same(selection: Selection, before: KernelList, after: KernelList) -> bool:
    """Whether both lists have the same files for all kernels that a kind launches."""
    return all(
        name in after.by_name and after.by_name[name].sha256 == before.by_name[name].sha256
        for name in selection.kernels
    )


def _print_launches(out: Console, selected: Selected) -> None:
    for each in selected.selections:
        title = f"{each.feature} on {capability_name(each.sm)}: {each.outcome}"
        out.print(Text(title, "bold"), soft_wrap=True)
        shown: dict[str, list[str]] = {}
        for answer in each.answers:
            for launch in answer.launches:
                grid = f", grid {'x'.join(map(str, launch.grid))}" if launch.grid else ""
                said = _launched(launch, selected)
                shown.setdefault(said, []).append(f"{answer.call}{grid}")
        for said, calls in shown.items():
            out.print(Text(f"  {said}"), soft_wrap=True)
            for call in calls:
                out.print(Text(f"    {call}", "dim"), soft_wrap=True)


def _launched(launch: Answer, selected: Selected) -> str:
    """Return in words which kernel is launched, or why there is none."""
    kernel = selected.kernels.by_name.get(launch.kernel)
    if kernel is None:
        return launch.error
    said = f"{kernel.name}, built for sm_{kernel.build}, "
    if selected.level != LISTED:
        said += f"cluster {launch.cluster}, {launch.shared:,} bytes of shared memory, "
    return f"{said}sha256 {kernel.sha256[:16]}"


def _print_summary(out: Console, selected: Selected, findings: int, explained: int) -> None:
    for sm in dict.fromkeys(each.sm for each in selected.selections):
        counts = Counter(each.outcome for each in selected.selections if each.sm == sm)
        said = ", ".join(f"{counts[name]:,} {name}" for name in OUTCOMES if counts[name])
        out.print(Text(f"{capability_name(sm)}: {said}"), soft_wrap=True)
    if selected.passed_bytes:
        taken = ", ".join(
            f"those built for {build} take {size:,}"
            for build, size in selected.kernels.parameter_bytes.items()
        )
        told = f"its launcher passes {selected.passed_bytes:,} bytes of parameters to a kernel"
        told += f"; {taken}" if taken else "; what kernels take is not known here"
        out.print(Text(told), soft_wrap=True)
    lacking = {each.error for each in selected.selections if each.outcome == NOT_ASKED}
    for error in sorted(lacking):
        out.print(Text(f"not asked: {error}", "bold yellow"), soft_wrap=True)
    sentence = (
        f"flashinfer {selected.version} ({selected.level}): {len(selected.selections):,} kinds of "
        f"call compared with what it selects, {count_of(findings, 'finding')}, {explained} "
        "explained by what a launch does not show"
    )
    out.print(Text(sentence, "bold red" if findings else "bold green"), soft_wrap=True)
