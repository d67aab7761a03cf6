"""Side folders that hold one release each, beside the environment that runs the suite.

A release is installed without its dependencies: the small ones are in the environment that runs
kernelproof, and the large ones are CUDA packages that introspection does not need. Of a serving
engine only the Python files are kept. A folder appears whole or not at all, and is kept for the
next time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ...impl.targets.cache import cache_folder
from ...impl.targets.target import CPUS
from ..console.errors import MACHINE, UsageRefusedError
from .packages import FLASHINFER_PACKAGE, Package

DISTRIBUTION = FLASHINFER_PACKAGE.distribution
PIP_FLAGS = (
    "--no-deps",
    "--only-binary=:all:",  # building one from source takes an hour, and nvcc
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
    "--retries=2",
    "--timeout=20",
)
INSTALL = ("install", "--no-compile", "--target")
MANYLINUX = ("_2_39", "_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "2014", "1")
"""Versions of the C library that wheels name."""
PIP_PROGRESS = re.compile(r"\s*(?:Collecting|Downloading|Processing|Installing collected)\b")
NAME = re.compile(r"[A-Za-z\d](?:[\w.-]*[A-Za-z\d])?")
"""Name of a distribution."""
LONGEST_REASON = 300
ABANDONED_SECONDS = 24 * 3600
"""Age from which a folder that an installation left behind, killed on its way, is removed."""

Tell = Callable[[str], None]


class SandboxError(UsageRefusedError):
    """A release that cannot be had; the message says which and why in one sentence."""


class SandboxMachineError(SandboxError):
    """One that may exist but cannot be had here: no network, no room, no pip."""

    exit_code = MACHINE


def quietly(line: str) -> None:
    """Print nothing."""
    del line


def sandbox(
    given: str | Path, package: Package = FLASHINFER_PACKAGE, *, tell: Tell = quietly
) -> Path:
    """Return a folder that holds one release of a package, installed if need be.

    Args:
        given: a version, a wheel, or a folder with the package in it, such as ``site-packages``.
        package: the package of ``PACKAGES``.
        tell: function that is called with a line of progress now and then.

    Raises:
        SandboxError: there is no such version or file, it cannot be downloaded or installed.
    """
    version = _version(str(given))
    if version is None:
        path = Path(given).expanduser()
        if path.is_dir():
            return _unpacked(path, package)
        if path.suffix != ".whl":
            message = f"{given}: is no version such as 0.6.7.post2, no wheel and no folder"
            raise SandboxError(message)
        _refuse_unfetched(given, package)
        return _from_wheel(path, package, tell)
    if version == installed_version(package):
        return installed_folder(package)
    _refuse_unfetched(given, package)
    requirement = f"{package.distribution}=={version}"
    return _installed(requirement, cache_folder() / package.name / version, package, tell)


def _refuse_unfetched(given: str | Path, package: Package) -> None:
    if package.unfetched:
        message = f"{given}: {package.distribution} cannot be fetched: {package.unfetched}"
        raise SandboxError(message)


def installed_version(package: Package = FLASHINFER_PACKAGE) -> str | None:
    """Return the release in this environment; None if there is none."""
    try:
        return str(Version(metadata.version(package.distribution)))
    except metadata.PackageNotFoundError:
        return None


def installed_folder(package: Package = FLASHINFER_PACKAGE) -> Path:
    """Return the folder of the release in this environment.

    Raises:
        SandboxError: there is none.
    """
    try:
        found = metadata.distribution(package.distribution)
        return _unpacked(Path(str(found.locate_file(""))), package)
    except metadata.PackageNotFoundError as error:
        message = f"{package.distribution} is not installed; name a version"
        raise SandboxError(message) from error


def _version(text: str) -> str | None:
    try:
        return str(Version(text))
    except InvalidVersion:
        return None


def _unpacked(folder: Path, package: Package) -> Path:
    for candidate in (folder, folder.parent):
        named = candidate == folder or folder.name == package.module
        if (candidate / package.marker).is_file() and named:
            return candidate.resolve()
    message = f"{folder}: holds no package {package.module}"
    raise SandboxError(message)


def _from_wheel(wheel: Path, package: Package, tell: Tell) -> Path:
    try:
        with wheel.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        message = f"{wheel}: cannot be read ({error.strerror})"
        raise SandboxError(message) from error
    place = cache_folder() / package.name / f"wheel-{digest.hexdigest()[:16]}"
    return _installed(str(wheel.resolve()), place, package, tell)


def _installed(requirement: str, place: Path, package: Package, tell: Tell) -> Path:
    """Install a package by pip into a folder, unless it is there."""
    if (place / package.marker).is_file():
        return place
    name = Path(requirement).name
    started = time.monotonic()
    tell(f"{name}: installing into {place}, once")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        with _temporary(place) as scratch:
            folder = scratch / "folder"
            if package.sources:
                _extract_sources(requirement, folder, scratch, package, tell)
            else:
                _pip(INSTALL, requirement, folder, scratch, tell)
            if not (folder / package.marker).is_file():
                message = f"{name}: the wheel holds no package {package.module}"
                raise SandboxError(message)
            _publish(folder, place, package)
    except OSError as error:
        message = f"{name}: {place} cannot be written ({error.strerror})"
        raise SandboxMachineError(message) from error
    tell(f"{name}: installed in {time.monotonic() - started:.0f} s")
    return place


def download(cpu: str) -> tuple[str, ...]:
    """Return the words by which pip downloads a wheel for a processor, up to the folder.

    What a wheel holds for GPUs depends on no Python: the one for 3.11 stands for all.
    """
    return (
        *("download", "--implementation=cp", "--python-version=3.11"),
        *(f"--abi={abi}" for abi in ("cp311", "abi3", "cp38", "none")),
        *(f"--platform=manylinux{each}_{cpu}" for each in MANYLINUX),
        *("--platform=any", "--dest"),
    )


def fetched_wheel(requirement: str, cpu: str, *, tell: Tell = quietly) -> Path:
    """Return a wheel of the cache, downloaded if it is not there.

    Args:
        requirement: a distribution and its version, such as ``sglang-kernel==0.4.4``.
        cpu: the processor, one of ``CPUS``.
        tell: function that is called with a line of progress now and then.

    Raises:
        SandboxError: there is no such release, or it cannot be downloaded.
    """
    name, _, text = requirement.partition("==")
    version = _version(text.strip())
    if version is None or not NAME.fullmatch(name.strip()):
        message = f"{requirement}: is no package and version, such as sglang-kernel==0.4.4"
        raise SandboxError(message)
    place = cache_folder() / "wheels" / cpu
    wanted = canonicalize_name(name.strip()), Version(version)
    if kept := _kept_wheel(place, wanted):
        return kept
    tell(f"{requirement}: downloading its wheel for {cpu} into {place}, once")
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place / "wheel")
        with _temporary(place / "wheel") as scratch:
            _pip(download(cpu), "==".join(map(str, wanted)), scratch / "fetched", scratch, tell)
            for each in (scratch / "fetched").glob("*.whl"):
                each.replace(place / each.name)
    except SandboxMachineError as error:
        message = f"{error.message}; or put the wheel into {place}"
        raise SandboxMachineError(message) from error
    except SandboxError as error:
        message = f"{error.message}, for {cpu}"
        raise SandboxError(message) from error
    except OSError as error:
        message = f"{requirement}: {place} cannot be written ({error.strerror})"
        raise SandboxMachineError(message) from error
    if kept := _kept_wheel(place, wanted):
        return kept
    message = f"{requirement}: pip downloaded no wheel of it for {cpu}"
    raise SandboxError(message)


def _kept_wheel(place: Path, wanted: tuple[str, Version]) -> Path | None:
    for path in sorted(place.glob("*.whl")):
        with suppress(InvalidWheelFilename):
            if parse_wheel_filename(path.name)[:2] == wanted:
                return path
    return None


@contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    """Return a folder beside a place, gone afterwards with what is left in it."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    for scratch in place.parent.glob(f".{place.name}-*"):
        if time.time() - scratch.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(scratch, ignore_errors=True)


def _publish(folder: Path, place: Path, package: Package) -> None:
    """Rename the finished folder; where another process was faster, its folder serves as well."""
    try:
        folder.rename(place)
    except OSError:
        if not (place / package.marker).is_file():
            raise


def _extract_sources(
    requirement: str, folder: Path, scratch: Path, package: Package, tell: Tell
) -> None:
    """Keep some files of a wheel, which is downloaded where it is not given.

    Raises:
        SandboxError: pip fails, or the wheel cannot be read.
    """
    wheels = [Path(requirement)]
    if wheels[0].suffix != ".whl":
        fetched = scratch / "fetched"
        _pip(download(CPUS[0]), requirement, fetched, scratch, tell)
        wheels = [*fetched.glob("*.whl")]
    try:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, package.keeps(archive.namelist()))
    except zipfile.BadZipFile as error:
        message = f"{Path(requirement).name}: cannot be installed ({error})"
        raise SandboxError(message) from error


def _pip(what: Sequence[str], requirement: str, folder: Path, scratch: Path, tell: Tell) -> None:
    """Install or download a requirement into a folder, by way of a folder on the same disk.

    Args:
        what: ``INSTALL`` or ``DOWNLOAD``.
        requirement: the requirement that pip is given.
        folder: the folder of the result.
        scratch: folder for what pip leaves behind.
        tell: called with a line of progress now and then.

    Raises:
        SandboxError: pip fails; the message ends with what it said last.
    """
    verb, *flags = what
    command = [sys.executable, "-m", "pip", verb, *PIP_FLAGS, *flags, str(folder), requirement]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None  # noqa: S101  it is piped
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.strip())
            if PIP_PROGRESS.match(line):
                tell(line.strip())
        status = process.wait()
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait()
    if status != 0:
        raise _failure(Path(requirement).name, [line for line in lines if line])


def _failure(name: str, lines: list[str]) -> SandboxError:
    """Return the error of a version that does not exist, or of a network that cannot be reached."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if not errors or errors[-1].startswith("Exception:"):  # pip's own traceback follows
        errors = lines or ["pip ended without a word"]
    said = errors[-1].rstrip(".")
    if "No space left" in said:  # a line for each file, in one
        said = "no space left on the device"
    last = textwrap.shorten(said, LONGEST_REASON, placeholder=" ...")
    if any("connection broken by" in line for line in lines):
        message = f"{name}: the package index cannot be reached ({last})"
        return SandboxMachineError(message)
    unusable = any(fault in last for fault in ("no space left", "No module named pip", "Errno"))
    message = f"{name}: cannot be installed ({last})"
    return SandboxMachineError(message) if unusable else SandboxError(message)
