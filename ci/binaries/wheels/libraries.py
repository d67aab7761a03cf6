"""Libraries with device code, and what each of their kernels is on a chip."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...compile.bodies import Body, bodies_of
from ...compile.fatbins import ELF, CodeError, codes_in
from ...compile.generating import runs_on
from ...console.errors import UsageRefusedError
from ...releases.sandboxes import Tell, quietly

NATIVE, FAMILY, JIT, STUB, NOTHING = "native", "family", "JIT", "stub", "nothing"
STATUSES: Mapping[str, str] = {
    NATIVE: "code for this very chip",
    FAMILY: "code for an earlier chip of its family, which runs on it",
    JIT: "PTX only, which the driver compiles when it is loaded",
    STUB: "a body that only returns, or prints and returns; on another chip it is whole",
    NOTHING: "no code that runs on it",
}
"""What a kernel of a library can be on a chip."""
SERVED = (NATIVE, FAMILY, JIT)
LIBRARY = re.compile(r"\.so(?:\.[\d.]+)?$")
_LENGTH = re.compile(r"\d{1,4}")
"""Length of a part of a mangled name, before the part."""
_INLINE = re.compile(r"[A-Z]+(?:_[A-Z\d]+)*_\d+(?:_[A-Z\d]+)*")
"""Inline namespaces that hold a version and the chips of a build, as those of CUB."""
_ANONYMOUS = "_GLOBAL__N_"


@dataclass(frozen=True)
class Kernel:
    """A kernel of a library.

    Attributes:
        name: the mangled name.
        bodies: its bodies, the largest of each target.
    """

    name: str
    bodies: tuple[Body, ...]

    @property
    def function(self) -> str:
        """The name of the function, without the arguments of templates."""
        return function_of(self.name)

    @property
    def whole(self) -> bool:
        """Whether one of its bodies has an effect."""
        return not all(each.idle for each in self.bodies)

    def body_on(self, sm: int) -> Body | None:
        """Return the body that runs on a chip: the nearest cubin, or else the newest PTX."""
        cubins = [each for each in self.bodies if not each.isa]
        running = [each for each in cubins if runs_on(each.number, each.suffix, sm)]
        compiled = [each for each in self.bodies if each.isa and _compiles(each, sm)]
        best = sorted(running or compiled, key=lambda each: (each.number, "fa".find(each.suffix)))
        return best[-1] if best else None

    def status(self, sm: int, *, whole_elsewhere: bool = False) -> str:
        """Return what it is on a chip, one of ``STATUSES``.

        Args:
            sm: compute capability times ten.
            whole_elsewhere: whether it is known to be whole, if not by a body of its own.
        """
        body = self.body_on(sm)
        if body is None:
            return NOTHING
        # One that has no effect anywhere is meant so: by one of its own, CUB asks the driver.
        if body.idle and (self.whole or whole_elsewhere):
            return STUB
        if body.isa:
            return JIT
        return NATIVE if body.number == sm else FAMILY


def _compiles(ptx: Body, sm: int) -> bool:
    """Whether the driver compiles PTX for a chip, by CUDA's rules for suffixes."""
    return runs_on(ptx.number, ptx.suffix, sm) if ptx.suffix else ptx.number <= sm


@dataclass(frozen=True)
class Library:
    """A library of a wheel that holds device code.

    Attributes:
        path: where it lies in the wheel.
        kernels: its kernels in the order of their names.
    """

    path: str
    kernels: tuple[Kernel, ...]

    @property
    def stem(self) -> str:
        """Its path without what names Python, the platform or a version."""
        folder, _, name = self.path.rpartition("/")
        return f"{folder}/{name.partition('.')[0]}".removeprefix("/")

    def targets(self) -> Counter[str]:
        """Count the kernels of each target, and of each version of PTX."""
        return Counter(
            f"{body.target} (ISA {body.isa})" if body.isa else body.target
            for kernel in self.kernels
            for body in kernel.bodies
        )

    def statuses(self, sm: int) -> dict[str, list[Kernel]]:
        """Return the kernels of each status on a chip, without statuses that none has."""
        found: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            found.setdefault(kernel.status(sm), []).append(kernel)
        return {status: found[status] for status in STATUSES if status in found}


def function_of(name: str) -> str:
    """Return the qualified name of a function from its mangled name, without arguments.

    Inline namespaces of a build, as of ``same_name``, are left out.
    """
    rest, parts = name.removeprefix("_Z").removeprefix("N").removeprefix("L"), list[str]()
    while rest:
        if rest.startswith("St"):  # the namespace std
            rest = rest[2:]
        elif found := _LENGTH.match(rest):
            end = found.end() + int(found[0])
            parts.append(rest[found.end() : end])
            rest = rest[end:]
        else:
            break
    kept = (each for each in parts if not _INLINE.fullmatch(each))
    said = ["(anonymous)" if each.startswith(_ANONYMOUS) else each for each in kept]
    return "::".join(said) or name


def same_name(name: str) -> str:
    """Return a mangled name without what differs in every build.

    That are inline namespaces of a version and its chips, and anonymous ones, which have a hash.
    """
    kept, place = list[str](), 0
    for found in _LENGTH.finditer(name):
        part = name[found.end() : found.end() + int(found[0])]
        of_build = _INLINE.fullmatch(part) or part.startswith(_ANONYMOUS)
        if of_build and found.start() >= place:
            kept.append(name[place : found.start()])
            place = found.end() + len(part)
    return "".join(kept) + name[place:]


def functions(kernels: Iterable[Kernel], most: int = 3) -> str:
    """Name the functions of kernels, the most frequent first, each with its number of kernels."""
    found = Counter(each.function for each in kernels).most_common()
    others = len(found) - most
    named = [f"{name} {count:,}" for name, count in found[:most]]
    return ", ".join([*named, *([f"{others} more"] if others > 0 else [])])


def read_library(data: bytes, path: str) -> Library | None:
    """Read the device code of a library; None where it has none.

    Raises:
        CodeError: it cannot be read.
    """
    found: dict[str, dict[str, Body]] = {}
    for code in codes_in(data):
        for body in bodies_of(code):
            bodies = found.setdefault(body.name, {})
            before = bodies.get(body.target)
            # Several files of a library may hold a kernel: where one is whole, it may be the one.
            if before is None or (before.idle, -before.size) > (body.idle, -body.size):
                bodies[body.target] = body
    if not found:
        return None
    kernels = (Kernel(name, tuple(bodies.values())) for name, bodies in sorted(found.items()))
    return Library(path, tuple(kernels))


def read_libraries(place: Path, *, tell: Tell = quietly) -> tuple[Library, ...]:
    """Read all libraries with device code of a wheel or of a folder.

    Args:
        place: the wheel or the folder.
        tell: called with a line of progress for each library.

    Raises:
        UsageRefusedError: the wheel or a library in it cannot be read.
    """
    found: list[Library] = []
    try:
        for path, data in _files(place):
            if not data.startswith(ELF):
                continue
            tell(f"{place.name}: reading {path} ({len(data) >> 20} MB)")
            try:
                library = read_library(data, path)
            except CodeError as error:
                message = f"{place.name}: {path}: {error}"
                raise UsageRefusedError(message) from error
            found += [library] if library else []
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        message = f"{place}: is no wheel that can be read ({error})"
        raise UsageRefusedError(message) from error
    return tuple(found)


def _files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and bytes of libraries, each content once."""
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            if LIBRARY.search(path.name) and path.is_file() and not path.is_symlink():
                yield path.relative_to(place).as_posix(), path.read_bytes()
        return
    with zipfile.ZipFile(place) as archive:
        seen: set[tuple[int, int]] = set()
        for each in sorted(archive.infolist(), key=lambda each: each.filename):
            content = each.CRC, each.file_size
            if LIBRARY.search(each.filename) and content not in seen:
                seen.add(content)
                yield each.filename, archive.read(each)
