"""The libraries of both releases: which kernels lost their code for a chip, and which are stubs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....impl.targets.capability import capability_name
from ....properties.verdicts.text import count_of
from ...binaries.wheels.finding import find_libraries
from ...binaries.wheels.libraries import (
    FAMILY,
    JIT,
    NATIVE,
    NOTHING,
    SERVED,
    STATUSES,
    STUB,
    Kernel,
    Library,
    functions,
    read_libraries,
    same_name,
)
from ...console.errors import UsageRefusedError
from ...releases.packages import BINARIES
from ...releases.sandboxes import Tell
from ..sides.releases import BASELINE, CANDIDATE, SIDES, Release
from ..verdicts.findings import Finding, finding
from .records import Comparison

LOST, EMPTIED, LATE, REPLACED, NEW = (
    "kernel-lost",
    "kernel-stub",
    "kernel-jit",
    "kernel-replaced",
    "kernel-gained",
)
SAID: Mapping[str, str] = {
    LOST: "have no code there any more",
    EMPTIED: "are stubs now: their bodies only return, or print and return",
    LATE: "are compiled by the driver at their first load now, from PTX",
    REPLACED: "are gone, and others of the same functions are there",
    NEW: "have code there now",
}
"""What became of kernels, by change."""


def compare_binaries(
    comparison: Comparison, parts: Sequence[str], cpu: str, tell: Tell
) -> Comparison:
    """Compare the device code of both releases, if it is a part and both have some."""
    if BINARIES not in parts or BINARIES not in comparison.package.parts:
        return comparison
    chips = [chip for chip in comparison.chips if isinstance(chip, int)]
    if not chips:
        return comparison.skipping({BINARIES: "no chip is named: give --sm"})
    if set(comparison.releases) != set(SIDES):
        return comparison.skipping({BINARIES: "one of the releases could not be had"})
    started = time.monotonic()
    found: dict[str, Sequence[Library]] = {}
    try:
        for side in SIDES:
            place = _place(comparison.releases[side], cpu, tell)
            found[side] = read_libraries(place, tell=tell)
    except UsageRefusedError as error:
        return comparison.failing(f"--{side}: {error.message}", error.exit_code)
    without = next((comparison.given[side] for side in SIDES if not found[side]), None)
    if without is None:
        changes = binary_findings(found[BASELINE], found[CANDIDATE], chips)
        comparison = comparison.with_findings(changes)
    elif comparison.package.libraries_only:
        comparison = comparison.failing(f"{without} holds no library with CUDA code")
    else:
        comparison = comparison.skipping({BINARIES: f"{without} holds no library with CUDA code"})
    return comparison.timed(BINARIES, started)


def _place(release: Release, cpu: str, tell: Tell) -> Path:
    """Return the wheel of a release, or the folder with its libraries."""
    given, package = release.given, release.package
    if release.folder.is_file() or release.own_environment or Path(given).is_dir():
        return release.folder if release.folder.is_file() else release.folder / package.module
    wheel = given if Path(given).is_file() else f"{package.distribution}=={given}"
    return find_libraries(wheel, cpu, tell=tell)[0]


def binary_findings(
    before: Sequence[Library], after: Sequence[Library], chips: Sequence[int]
) -> Iterator[Finding]:
    """Return what became of the kernels of each library, on chips where it is the same.

    Args:
        before: the libraries of the baseline.
        after: those of the candidate.
        chips: compute capabilities times ten.
    """
    now = {library.stem: library for library in after}
    everywhere = [kernel for library in after for kernel in library.kernels]
    for library in before:
        then = now.get(library.stem) or _moved(library, after)
        kernels = then.kernels if then else everywhere
        found: dict[tuple[str, str], list[tuple[int, list[Kernel]]]] = {}
        for sm in chips:
            for change, changed in _changes(library.kernels, kernels, sm).items():
                found.setdefault((change, functions(changed)), []).append((sm, changed))
        for (change, named), where in found.items():
            yield _finding(change, named, where, library, then)


def _moved(library: Library, after: Sequence[Library]) -> Library | None:
    """Return the one library that has the name of another in some other folder."""
    name = Path(library.stem).name
    found = [each for each in after if Path(each.stem).name == name]
    return found[0] if len(found) == 1 else None


def _changes(before: Sequence[Kernel], after: Sequence[Kernel], sm: int) -> dict[str, list[Kernel]]:
    """Return the kernels of each change on a chip."""
    known: dict[str, list[Kernel]] = {}
    for each in after:  # several in anonymous namespaces may have one name, each for its chips
        known.setdefault(same_name(each.name), []).append(each)
    served, serves = _functions(before, sm), _functions(after, sm)
    found: dict[str, list[Kernel]] = {}
    had = set[str]()
    for kernel in before:
        was, name, function = kernel.status(sm), same_name(kernel.name), kernel.function
        if was not in SERVED:
            continue
        had.add(name)
        there = known.get(name, ())
        found_now = {each.status(sm, whole_elsewhere=kernel.whole) for each in there}
        is_now = next((status for status in STATUSES if status in found_now), NOTHING)
        if is_now == STUB:
            change = EMPTIED
        elif is_now == NOTHING:
            # Other template arguments under another name; fewer of them are some that went.
            as_many = not there and serves[function] >= served[function]
            change = REPLACED if as_many else LOST
        elif is_now == JIT and was in {NATIVE, FAMILY}:
            change = LATE
        else:
            continue
        found.setdefault(change, []).append(kernel)
    new = (kernel for name, kernels in known.items() if name not in had for kernel in kernels)
    gained = [kernel for kernel in new if kernel.status(sm) in SERVED]
    return {**found, **({NEW: gained} if gained else {})}


def _functions(kernels: Sequence[Kernel], sm: int) -> Counter[str]:
    """Count the kernels of each function that a chip runs."""
    return Counter(each.function for each in kernels if each.status(sm) in SERVED)


def _finding(
    change: str,
    named: str,
    where: Sequence[tuple[int, Sequence[Kernel]]],
    library: Library,
    then: Library | None,
) -> Finding:
    chips = tuple(sm for sm, _ in where)
    names = ", ".join(capability_name(sm) for sm in chips)
    count = max(len(kernels) for _, kernels in where)
    told = f"{library.stem} on {names}: {count_of(count, 'kernel')} {SAID[change]} ({named})"
    sides: dict[str, dict[str, Any]] = {
        BASELINE: {"targets": dict(library.targets())},
        CANDIDATE: {"targets": dict(then.targets()) if then else {}},
    }
    if then is None:
        told += "; the candidate has no such library"
    elif then.stem != library.stem:
        told += f"; the library is {then.stem} now"
    elif gone := sorted({*library.targets()} - {*then.targets()}):
        told += f"; targets that went: {', '.join(gone)}"
    return finding(
        change,
        library.stem,
        told,
        detail=",".join(map(str, chips)),
        chips=chips,
        count=count,
        baseline=sides[BASELINE],
        candidate=sides[CANDIDATE],
    )
