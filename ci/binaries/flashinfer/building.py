"""Builds the launcher of a FlashInfer release against a CUDA driver that records.

The sources are the release's own, unchanged, with its own list of kernels. What is built is kept by
release, list and compiler.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from ...compile.compiling import DEADLINE_SECONDS, Work, as_they_end
from ...compile.generating import Release
from ...compile.nvcc import Nvcc, first_error, without_paths
from ...console.errors import MachineError
from ...releases.sandboxes import cache_folder, quietly
from ...releases.subprocess_runner import run_to_end
from .kernels import PLACE, KernelList

DRIVER_SOURCE = Path(__file__).with_name("recording_driver.cpp")
DRIVER, LAUNCHER = "librecording.so", "launcher.so"
"""Names of the two libraries of a build."""
SOURCES = ("trtllm_fmha_kernel_launcher.cu", "fmhaReduction.cu")
"""The sources of FlashInfer's module of trtllm-gen attention."""
UNUSED_HEADERS = ("nvrtc.h", "cublasLt.h", "cublas_v2.h")
"""Headers that the launcher includes without a use: empty ones serve where CUDA is not whole."""
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-cudart", "none", "-Xcompiler", "-fPIC"),
    *("-gencode", "arch=compute_100a,code=compute_100a"),
)
"""Flags of both sources. Code for the device never runs, and so stays PTX."""


class BuildError(MachineError):
    """A launcher that cannot be built here; the message has the compiler's first error."""


@dataclass(frozen=True)
class Build:
    """The two libraries of a release: its launcher, and the driver that records what it does."""

    launcher: Path
    driver: Path


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
    place = cache_folder() / "launchers" / f"{release.version}-{_key(release, kernels, nvcc)}"
    build = Build(place / LAUNCHER, place / DRIVER)
    if build.launcher.is_file():
        return build
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        _build(release, kernels, nvcc, Path(scratch), place, tell)
        shutil.rmtree(place, ignore_errors=True)
        Path(scratch, "built").rename(place)
    return build


def _key(release: Release, kernels: KernelList, nvcc: Nvcc) -> str:
    """Return a hash of all that a build is made of."""
    digest = hashlib.sha256(f"{nvcc.version} {_tvm_ffi_version()} {FLAGS}".encode())
    data = release.folder / "flashinfer" / "data"
    sources = [data / "csrc" / name for name in SOURCES]
    sources += sorted((data / "include" / "flashinfer" / "trtllm").rglob("*.*h"))
    for source in (DRIVER_SOURCE, kernels.folder / "flashInferMetaInfo.h", *sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(
    release: Release,
    kernels: KernelList,
    nvcc: Nvcc,
    scratch: Path,
    place: Path,
    tell: Callable[[str], None],
) -> None:
    built, stubs = scratch / "built", scratch / "stubs"
    for folder in (built, stubs):
        folder.mkdir()
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
    objects = [scratch / f"{name}.o" for name in SOURCES]
    commands = [
        [str(nvcc.path), *FLAGS, *includes, "-c", str(data / "csrc" / name), "-o", str(target)]
        for name, target in zip(SOURCES, objects, strict=True)
    ]
    host = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared"]
    driver = [*host, f"-I{nvcc.home / 'include'}", str(DRIVER_SOURCE), "-o", str(built / DRIVER)]
    work = Work(tell)
    title = f"building the launcher of flashinfer {release.version} (about a minute, once)"

    def make(command: Sequence[str]) -> None:
        source = next(word for word in command if word.endswith((".cu", ".cpp")))
        with work.shown(Path(source).name):
            _run(command, scratch, work)

    work.say(title)
    pool = ThreadPoolExecutor(2)
    try:
        futures = [pool.submit(make, command) for command in (*commands, driver)]
        for _ in as_they_end(futures, lambda: work.say_progress(title)):
            pass
    finally:
        work.stop.set()
        pool.shutdown(cancel_futures=True)
    link = [*host, *map(str, objects), f"-L{built}", "-lrecording", f"-L{ffi / 'lib'}", "-ltvm_ffi"]
    # A symbol of CUDA that the driver lacks is an error here, not in the middle of a question.
    link += ["-Wl,-z,defs", f"-Wl,-rpath,{place}:{ffi / 'lib'}", "-o", str(built / LAUNCHER)]
    _run(link, scratch, Work(tell))
    work.say(f"built the launcher of flashinfer {release.version}")


def _run(command: Sequence[str], folder: Path, work: Work) -> None:
    try:
        ended = run_to_end(command, folder=folder, deadline=DEADLINE_SECONDS, stop=work.stop)
    except OSError as error:
        message = f"{command[0]} does not run: {error.strerror}"
        raise BuildError(message) from error
    if ended.cut_short or ended.status != 0:
        why = ended.cut_short or first_error(ended.told) or f"status {ended.status}"
        message = f"FlashInfer's launcher cannot be built: {without_paths(command[0])}: {why}"
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
