"""Builds the launcher of a FlashInfer release against a CUDA driver that records.

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

from ...compile.compiling import DEADLINE_SECONDS, Work, as_they_end
from ...compile.generating import Release
from ...compile.nvcc import Nvcc, first_error, without_paths
from ...console.errors import MachineError
from ...releases.sandboxes import cache_folder, quietly
from ...releases.subprocess_runner import run_to_end
from .kernels import HEADER, PLACE, KernelList

DRIVER_SOURCE = Path(__file__).with_name("recording_driver.cpp")
DRIVER, LAUNCHER = "librecording.so", "launcher.so"
"""Names of the two libraries of a build."""
SOURCES = ("trtllm_fmha_kernel_launcher.cu", "fmhaReduction.cu")
"""The sources of FlashInfer's module of trtllm-gen attention."""
PARAMETERS = Path(__file__).with_name("parameter_struct.cu")
"""Our own source beside them."""
_PARAMETERS = "kernelproof_parameters"
UNUSED_HEADERS = ("nvrtc.h", "cublasLt.h", "cublas_v2.h")
"""Headers that the launcher includes without a use: empty ones serve where CUDA is not whole."""
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-cudart", "none", "-Xcompiler", "-fPIC"),
    *("-gencode", "arch=compute_100a,code=compute_100a"),
)
"""Flags of both sources. Code for the device never runs, and so stays PTX."""
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
        """Bytes of parameters that the launcher passes to each attention kernel."""
        with self.launcher.open("rb") as file:
            symbols: Any = ELFFile(file).get_section_by_name(".dynsym")
            return int(symbols.get_symbol_by_name(_PARAMETERS)[0]["st_size"])


def build_launcher(
    release: Release,
    kernels: KernelList,
    nvcc: Nvcc,
    *,
    tell: Callable[[str], None] = quietly,
) -> Build:
    """Build the launcher of a release, unless it was built before.

    Raises:
        BuildError: a compiler fails, or TVM-FFI is not installed.
    """
    driver = build_driver(nvcc)

    def build(into: Path) -> None:
        _build_launcher(release, kernels, nvcc, driver, into, tell)

    name = f"{release.version}-{_key(release, kernels, nvcc)}"
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


def _key(release: Release, kernels: KernelList, nvcc: Nvcc) -> str:
    """Return a hash of all that a launcher is made of."""
    digest = hashlib.sha256(f"{nvcc.version} {_tvm_ffi_version()} {FLAGS} {HOST}".encode())
    digest.update(PARAMETERS.read_bytes())
    data = release.folder / "flashinfer" / "data"
    sources = [data / "csrc" / name for name in SOURCES]
    sources += sorted([*(data / "include").rglob("*.*h"), *(data / "csrc").rglob("*.h*")])
    for source in (kernels.folder / HEADER, *sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build_driver(nvcc: Nvcc, into: Path) -> None:
    # By this name the launcher asks for its CUDA, and has the library that is loaded already.
    words = [*HOST, f"-Wl,-soname,{DRIVER}", f"-I{nvcc.home / 'include'}", str(DRIVER_SOURCE)]
    run_compiler([*words, "-o", str(into / DRIVER)], into, Work(quietly))


def _build_launcher(
    release: Release,
    kernels: KernelList,
    nvcc: Nvcc,
    driver: Path,
    into: Path,
    tell: Callable[[str], None],
) -> None:
    stubs = into / "stubs"
    stubs.mkdir()
    for name in UNUSED_HEADERS:
        (stubs / name).touch()
    data, ffi = release.folder / "flashinfer" / "data", _tvm_ffi()
    includes = [
        *(f"-I{data / 'cccl' / part}" for part in ("libcudacxx/include", "cub", "thrust")),
        *(f"-I{data / part}" for part in ("include", "csrc", "cutlass/include")),
        f"-I{kernels.folder}",
        *("-isystem", str(ffi / "include"), "-isystem", str(stubs)),
        f'-DTLLM_GEN_FMHA_CUBIN_PATH="{kernels.artifact}/{PLACE}/"',
        '-DTLLM_GEN_FMHA_METAINFO_HASH=""',
    ]
    sources = [*(data / "csrc" / name for name in SOURCES), PARAMETERS]
    objects = [str(into / f"{source.name}.o") for source in sources]
    work = Work(tell)
    title = f"building the launcher of flashinfer {release.version} (about a minute, once)"

    def compile_one(source: Path, target: str) -> None:
        with work.shown(source.name):
            run_compiler(
                [str(nvcc.path), *FLAGS, *includes, "-c", str(source), "-o", target], into, work
            )

    work.say(title)
    pool = ThreadPoolExecutor(len(SOURCES))
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
    # A symbol of CUDA that the driver lacks is an error here, not in the middle of a question.
    link = [*HOST, *objects, str(driver), f"-L{ffi / 'lib'}", "-ltvm_ffi", "-Wl,-z,defs"]
    link += [f"-Wl,-rpath,{ffi / 'lib'}", "-o", str(into / LAUNCHER)]
    run_compiler(link, into, Work(quietly))
    work.say(f"built the launcher of flashinfer {release.version}")


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
