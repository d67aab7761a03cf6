"""Builds the launchers of a FlashInfer release against a CUDA driver that records.

The sources are the release's own, unchanged, with its own list of kernels. What is built is kept by
release, list and compiler.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, util
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from ....impl import flashinfer as adapters
from ....impl.targets.cache import cache_folder
from ...compile.compiling import DEADLINE_SECONDS, Work, as_they_end
from ...compile.generating import Release
from ...compile.nvcc import Nvcc, first_error, without_paths
from ...console.errors import MachineError
from ...releases.sandboxes import quietly
from ...releases.subprocess_runner import run_to_end
from .kernels import KernelList
from .recipes import Recipe, recipe_of

DRIVER_SOURCE = Path(adapters.__file__).with_name("recording_driver.cpp")
DRIVER, LAUNCHER = "librecording.so", "launcher.so"
"""Names of the two libraries of a build."""
_PARAMETERS = "kernelproof_parameters"
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-cudart", "none", "-Xcompiler", "-fPIC"),
    *("-gencode", "arch=compute_100a,code=compute_100a"),
)
"""Flags of all sources. Code for the device never runs, and so stays PTX."""
COMPILERS = 2
"""Compilers at a time: the largest source takes half of the time, and about 1 GB."""
HOST = ("g++", "-std=c++17", "-O2", "-fPIC", "-shared")
"""The command that makes a library of the host's code."""
_MISSING = re.compile(r"undefined reference to [`'](\w+)")


class BuildError(MachineError):
    """A launcher that cannot be built here; the message has the compiler's first error."""


@dataclass(frozen=True)
class Build:
    """The two libraries of a release: its launcher, and the driver that records what it does."""

    launcher: Path
    driver: Path

    @cached_property
    def passed_bytes(self) -> int:
        """Bytes of parameters that the launcher passes to each attention kernel; 0 of MoE."""
        with self.launcher.open("rb") as file:
            symbols: Any = ELFFile(file).get_section_by_name(".dynsym")
            found = symbols.get_symbol_by_name(_PARAMETERS)
            return int(found[0]["st_size"]) if found else 0


def build_launcher(
    release: Release,
    kernels: KernelList,
    nvcc: Nvcc,
    operation: str = "",
    *,
    tell: Callable[[str], None] = quietly,
) -> Build:
    """Build the launcher of a release, unless it was built before.

    Args:
        release: the release.
        kernels: its list of the kernels that the launcher launches.
        nvcc: the compiler.
        operation: ``"moe"`` or ``"gemm"``; any other is attention.
        tell: function that is called with a line of progress now and then.

    Raises:
        BuildError: a compiler fails, or TVM-FFI is not installed.
    """
    driver, recipe = build_driver(nvcc), recipe_of(operation, release, kernels)

    def build(into: Path) -> None:
        _build_launcher(recipe, nvcc, driver, into, tell)

    name = f"{release.version}-{_key(recipe, nvcc)}"
    return Build(kept_library(name, LAUNCHER, build), driver)


def build_driver(nvcc: Nvcc) -> Path:
    """Return the library of the driver that records, built unless it was before.

    Raises:
        BuildError: the compiler fails.
    """
    name = f"driver-{_driver_key(nvcc)}"
    return kept_library(name, DRIVER, lambda into: _build_driver(nvcc, into))


def kept_library(name: str, library: str, build: Callable[[Path], None]) -> Path:
    """Return a library of a folder that is kept by its name, built if need be."""
    place = cache_folder() / "launchers" / name
    if not (place / library).is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=place.parent) as scratch:
            build(Path(scratch))
            place.mkdir(exist_ok=True)
            Path(scratch, library).replace(place / library)
    return place / library


def _driver_key(nvcc: Nvcc) -> str:
    return hashlib.sha256(nvcc.version.encode() + DRIVER_SOURCE.read_bytes()).hexdigest()[:16]


def _key(recipe: Recipe, nvcc: Nvcc) -> str:
    """Return a hash of all that a launcher is made of."""
    words = (nvcc.version, _tvm_ffi_version(), FLAGS, HOST, recipe.flags, recipe.stubs)
    digest = hashlib.sha256(str(words).encode())
    for source in (*recipe.headers, *recipe.sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build_driver(nvcc: Nvcc, into: Path) -> None:
    # By this name the launcher asks for its CUDA, and has the library that is loaded already.
    words = [*HOST, f"-Wl,-soname,{DRIVER}", f"-I{nvcc.home / 'include'}", str(DRIVER_SOURCE)]
    run_compiler([*words, "-o", str(into / DRIVER)], into, Work(quietly))


def _build_launcher(
    recipe: Recipe, nvcc: Nvcc, driver: Path, into: Path, tell: Callable[[str], None]
) -> None:
    stubs, links = into / "stubs", into / "links"
    for folder in (stubs, links):
        folder.mkdir()
    for name, text in recipe.stubs.items():
        (stubs / name).write_text(text, encoding="utf-8")
    for name, target in recipe.links.items():
        (links / name).parent.mkdir(parents=True)
        (links / name).symlink_to(target, target_is_directory=True)
    ffi, sources = _tvm_ffi(), recipe.sources
    includes = [
        *(f"-I{folder}" for folder in (*recipe.includes, links)),
        *("-isystem", str(ffi / "include"), "-isystem", str(stubs)),
        *recipe.flags,
    ]
    objects = [str(into / f"{number}-{each.name}.o") for number, each in enumerate(sources)]
    work, title = Work(tell), f"building {recipe.title} ({recipe.takes}, once)"

    def compile_one(source: Path, target: str) -> None:
        with work.shown(source.name):
            run_compiler(
                [str(nvcc.path), *FLAGS, *includes, "-c", str(source), "-o", target], into, work
            )

    work.say(title)
    pool = ThreadPoolExecutor(COMPILERS)
    try:
        futures = [
            pool.submit(compile_one, source, target)
            for source, target in zip(sources, objects, strict=True)
        ]
        for _ in as_they_end(futures, lambda: work.say_progress(title)):
            pass
    finally:
        work.stop.set()
        pool.shutdown(cancel_futures=True)
    if recipe.left_out:
        objects.append(_stand_ins(objects, recipe.left_out, into))
    # A symbol of CUDA that the driver lacks is an error here, not in the middle of a question.
    link = [*HOST, *objects, str(driver), f"-L{ffi / 'lib'}", "-ltvm_ffi", "-Wl,-z,defs"]
    # Both sources of GEMMs have the loader of kernels, which is one header.
    link += ["-Wl,-z,muldefs"]
    link += [f"-Wl,-rpath,{ffi / 'lib'}", "-o", str(into / LAUNCHER)]
    run_compiler(link, into, Work(quietly))
    work.say(f"built {recipe.title}")


def _stand_ins(objects: Sequence[str], begins: tuple[str, ...], into: Path) -> str:
    """Compile functions that do nothing, for symbols that no object has and that begin so."""
    wanted, there = set[str](), set[str]()
    for name in objects:
        with Path(name).open("rb") as file:
            table: Any = ELFFile(file).get_section_by_name(".symtab")
            for symbol in table.iter_symbols():
                undefined = symbol["st_shndx"] == "SHN_UNDEF"
                (wanted if undefined else there).add(symbol.name)
    names = sorted(each for each in wanted - there if each.startswith(begins))
    source, target = into / "stand-ins.cpp", str(into / "stand-ins.o")
    text = "".join(f'extern "C" void {name}() {{}}\n' for name in names)
    source.write_text(text, encoding="utf-8")
    run_compiler([*HOST[:-1], "-c", str(source), "-o", target], into, Work(quietly))
    return target


def run_compiler(command: Sequence[str], folder: Path, work: Work, what: str = "launcher") -> None:
    """Run a compiler or linker; what it makes is named in an error.

    Raises:
        BuildError: it does not run, or fails.
    """
    try:
        ended = run_to_end(command, folder=folder, deadline=DEADLINE_SECONDS, stop=work.stop)
    except OSError as error:
        message = f"{command[0]} does not run: {error.strerror}"
        raise BuildError(message) from error
    if ended.cut_short or ended.status != 0:
        missing = sorted(set(_MISSING.findall(ended.told)))
        why = f"the recording driver lacks {', '.join(missing)}" if missing else ""
        why = ended.cut_short or why or first_error(ended.told) or f"status {ended.status}"
        message = f"FlashInfer's {what} cannot be built: {without_paths(command[0])}: {why}"
        raise BuildError(message)


def _tvm_ffi() -> Path:
    """Return the folder of the package TVM-FFI, through which Python calls the launcher.

    Raises:
        BuildError: it is not installed.
    """
    found = util.find_spec("tvm_ffi")
    if found is None or found.origin is None:
        message = "FlashInfer's launcher needs the package apache-tvm-ffi, which is not installed"
        raise BuildError(message)
    return Path(found.origin).parent


def _tvm_ffi_version() -> str:
    _tvm_ffi()
    return metadata.version("apache-tvm-ffi")
