"""What the libraries of a wheel ship for each chip: `kernelproof support --binaries`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ...impl.gating import capability_name
from ...properties.verdicts.text import count_of
from ..binaries.wheels.finding import find_libraries
from ..binaries.wheels.libraries import (
    NOTHING,
    STATUSES,
    STUB,
    Kernel,
    Library,
    functions,
    read_libraries,
)
from ..console.errors import CONFORMING, UsageRefusedError
from ..console.outputs import Outputs
from ..console.terminal import console
from ..releases.sandboxes import quietly
from .rendering import MOST_LINES

SCHEMA = "kernelproof/binaries/1"
MOST_FUNCTIONS = 3
"""Functions with stubs that a line names."""


@dataclass(frozen=True)
class Shipped:
    """The libraries of a wheel, and the chips that are asked about.

    Attributes:
        name: the name of the wheel or of the folder.
        cpu: the processor that it is for; empty where that is not known.
        chips: compute capabilities times ten.
        libraries: those with device code.
    """

    name: str
    cpu: str
    chips: tuple[int, ...]
    libraries: tuple[Library, ...]

    @property
    def heading(self) -> str:
        """What it is, in one line."""
        kernels = sum(len(each.kernels) for each in self.libraries)
        count = len(self.libraries)
        libraries = f"{count} {'library' if count == 1 else 'libraries'} with CUDA code"
        return f"{self.name}: {libraries}, {count_of(kernels, 'kernel')}"

    def by_answer(self, library: Library) -> dict[str, list[int]]:
        """Return what the kernels of a library are, each answer with the chips that have it."""
        found: dict[str, list[int]] = {}
        for sm in self.chips:
            found.setdefault(_answer(library.statuses(sm)), []).append(sm)
        return found

    def stubs(self, library: Library) -> int:
        """Count the stubs of a library on all chips."""
        return sum(len(library.statuses(sm).get(STUB, ())) for sm in self.chips)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "schema": SCHEMA,
            "wheel": self.name,
            "cpu": self.cpu,
            "chips": list(self.chips),
            "libraries": [self._library_json(each) for each in self.libraries],
        }

    def _library_json(self, library: Library) -> dict[str, Any]:
        return {
            "path": library.path,
            "targets": dict(sorted(library.targets().items())),
            "kernels": [
                {
                    "name": kernel.name,
                    "function": kernel.function,
                    "bodies": [
                        {"target": body.target, **_sizes(asdict(body))} for body in kernel.bodies
                    ],
                    "chips": {str(sm): kernel.status(sm) for sm in self.chips},
                }
                for kernel in library.kernels
            ],
        }


def _sizes(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("size", "idle", "isa")}


def _answer(statuses: Mapping[str, Sequence[Kernel]]) -> str:
    if set(statuses) == {NOTHING}:
        return NOTHING
    said = ", ".join(f"{len(kernels):,} {status}" for status, kernels in statuses.items())
    stubs = statuses.get(STUB, ())
    return f"{said}; stubs: {functions(stubs, MOST_FUNCTIONS)}" if stubs else said


def answer_binaries(
    given: str,
    chips: Sequence[int | None],
    *,
    cpu: str = "",
    outputs: Outputs | None = None,
    verbose: bool = False,
    tell: Callable[[str], None] = quietly,
) -> int:
    """Read a wheel's libraries, print what they hold for each chip, and write what was asked for.

    Args:
        given: a wheel, a folder, or a package and its version.
        chips: compute capabilities times ten; None, a CPU, is refused.
        cpu: the processor of a wheel that is downloaded; this machine's if empty.
        outputs: files of the answer, named by ``--json`` and ``--markdown``.
        verbose: whether the answer may have any number of lines.
        tell: called with a line of progress now and then.

    Raises:
        UsageRefusedError: there is no such wheel, it cannot be read, or it has no device code.
    """
    wanted = tuple(sm for sm in chips if sm is not None)
    if len(wanted) < len(chips):
        message = "--sm cpu: --binaries is about GPUs"
        raise UsageRefusedError(message)
    try:
        place, cpu = find_libraries(given, cpu, tell=tell)
        libraries = read_libraries(place, tell=tell)
    except UsageRefusedError as error:
        if error.message.startswith("--"):
            raise
        message = f"--binaries {error.message}"
        raise type(error)(message) from error
    if not libraries:
        message = f"--binaries {place.name}: holds no library with CUDA code"
        raise UsageRefusedError(message)
    shipped = Shipped(place.name, cpu, wanted, libraries)
    page = (outputs or Outputs()).write
    page({"--json": shipped.to_json, "--markdown": lambda: _page(shipped)})
    _print(console(sys.stdout), shipped, math.inf if verbose else MOST_LINES)
    return CONFORMING


def _print(out: Console, shipped: Shipped, space: float) -> None:
    """Print the answer, the libraries with stubs first; lines beyond the space are counted."""
    lines = [Text(shipped.heading, "bold"), *_lines(shipped)]
    for number, line in enumerate(lines):
        space -= len(line.wrap(out, out.width))
        if space < (number < len(lines) - 1):
            more = count_of(len(lines) - number, "more line")
            out.print(Text(f"{more}: give --sm, -v or --json FILE", "dim"))
            return
        out.print(line)


def _lines(shipped: Shipped) -> Iterator[Text]:
    for library in sorted(shipped.libraries, key=lambda each: (-shipped.stubs(each), each.path)):
        targets = ", ".join(f"{name} {count:,}" for name, count in _targets(library))
        yield Text(library.path, "bold").append(f": {targets}", "not bold")
        for said, chips in shipped.by_answer(library).items():
            style = "red" if STUB in said else "dim" if said == NOTHING else ""
            yield Text(f"    SM{', '.join(map(str, chips))}: {said}", style)


def _targets(library: Library) -> list[tuple[str, int]]:
    """Return the targets in the order of their chips, PTX last."""

    def key(target: tuple[str, int]) -> tuple[bool, int, str]:
        kind, _, rest = target[0].partition("_")
        number = "".join(each for each in rest.partition(" ")[0] if each.isdigit())
        return kind != "sm", int(number), rest

    return sorted(library.targets().items(), key=key)


def _page(shipped: Shipped) -> str:
    """Return the answer as a page of Markdown."""
    lines = [f"# {shipped.heading}", ""]
    lines += [f"- {status}: {means}" for status, means in STATUSES.items()]
    for library in shipped.libraries:
        targets = ", ".join(f"{name} {count:,}" for name, count in _targets(library))
        lines += ["", f"## {library.path}", "", targets, ""]
        lines += ["| chip | " + " | ".join(STATUSES) + " |", "|---" * (len(STATUSES) + 1) + "|"]
        for sm in shipped.chips:
            found = library.statuses(sm)
            counts = " | ".join(f"{len(found.get(status, ())):,}" for status in STATUSES)
            lines.append(f"| {capability_name(sm)} | {counts} |")
        named = {sm: library.statuses(sm).get(STUB, []) for sm in shipped.chips}
        stubs = [
            f"- SM{sm}: {functions(found, len(found))}" for sm, found in named.items() if found
        ]
        lines += ["", "Stubs:", "", *stubs] if stubs else []
    return "\n".join(lines) + "\n"
