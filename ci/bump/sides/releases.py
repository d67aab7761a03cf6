"""The two sides of a comparison: a release of a package, or an environment of its own.

A version, a wheel or a folder is put in front of this environment's packages: all others stay the
same. Another interpreter brings its own. Kernelproof itself is this one on both sides.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ....impl.targets.unpacked import FROM
from ....properties.isolation.outcome import describe_exit
from ....properties.isolation.workers import WorkerPool
from ....properties.worker.pools import HANDLER, open_pool
from ...answers.identity import code_identity, digest_of
from ...binaries.wheels.finding import find_libraries
from ...console.errors import MACHINE, UsageRefusedError
from ...releases.packages import FLASHINFER_PACKAGE, Package
from ...releases.sandboxes import Tell, installed_folder, quietly, sandbox

BASELINE, CANDIDATE = "baseline", "candidate"
SIDES = (BASELINE, CANDIDATE)
ASK_SECONDS = 60.0
PACKAGES = ("torch", "triton")
_QUESTION = """\
import importlib.util, json, sys
found = {"path": sys.path[1:]}
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    found[name] = spec and spec.origin
print(json.dumps(found))
"""


class InterpreterError(UsageRefusedError):
    """An interpreter that cannot be used; the message says why."""

    exit_code = MACHINE


@dataclass(frozen=True)
class Release:
    """One side, found.

    Attributes:
        given: the release as it was asked for.
        folder: holds the package; the wheel itself where only its libraries are compared.
        executable: interpreter of its workers.
        path: ``sys.path`` of its workers.
        package: the package that is compared.
    """

    given: str
    folder: Path
    executable: str
    path: tuple[str, ...]
    package: Package = FLASHINFER_PACKAGE

    @property
    def own_environment(self) -> bool:
        """Whether its torch and Triton are its own."""
        return self.executable != sys.executable

    @property
    def interpreter(self) -> bool:
        """Whether it was asked for as a Python interpreter."""
        path = Path(self.given).expanduser()
        return not _is_version(self.given) and path.is_file() and path.suffix != ".whl"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its workers."""
        own = {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}
        if self.package.sources:
            folders = [str(self.folder), *filter(None, [os.environ.get(FROM)])]
            # An interpreter has its engine installed, which no folder is to hide.
            own[FROM] = "" if self.own_environment else os.pathsep.join(folders)
        return own

    @property
    def shared(self) -> str:
        """What to ask for on any machine: the version, where ``given`` is a path of this one."""
        if _is_version(self.given) or self.interpreter:
            return self.given
        here = os.path.relpath(Path(self.given).expanduser())
        if not here.startswith(os.pardir):
            return here
        found = (
            each.name.removesuffix(".dist-info").rpartition("-")[2]
            for each in self.folder.glob(self.package.metadata)
        )
        return next(filter(_is_version, found), self.given)

    @contextmanager
    def workers(
        self,
        device: str,
        *,
        size: int = 1,
        standby: bool = False,
        environment: Mapping[str, str] | None = None,
        handler: str = HANDLER,
    ) -> Iterator[WorkerPool]:
        """Open a pool of its workers.

        Args:
            device: the device that they run on.
            size: how many there are.
            standby: whether one more has done its imports when a process dies or is given up.
            environment: further variables.
            handler: what they call for each request.
        """
        pool = open_pool(
            device,
            size=size,
            handler=handler,
            standby=standby,
            environment={**self.environment, **(environment or {})},
            sys_path=self.path,
            executable=self.executable,
        )
        with pool:
            yield pool


def find_release(
    given: str, package: Package = FLASHINFER_PACKAGE, *, cpu: str = "", tell: Tell = quietly
) -> Release:
    """Find a release, installing it into a folder of its own where that is needed.

    Args:
        given: a version, a wheel, a folder with the package in it, or a Python interpreter, such
            as ``/opt/vllm/bin/python``.
        package: the package of ``PACKAGES``.
        cpu: the processor of the wheel, where only its libraries are compared; this machine's if
            empty.
        tell: called with a line of progress now and then.

    Raises:
        UsageRefusedError: there is no such thing, or it cannot be had; SandboxError for a release,
            InterpreterError for an interpreter.
    """
    if not given.strip():  # a variable of a pipeline that is not set; as a path, this folder
        message = f"{given!r} is empty: give a version, a wheel, a folder or an interpreter"
        raise UsageRefusedError(message)
    path = Path(given).expanduser()
    if path.is_file() and path.suffix != ".whl":
        return _of_interpreter(given, path, package)
    if os.sep in given and not path.exists():
        message = f"{given}: there is no such wheel, folder or interpreter"
        raise UsageRefusedError(message)
    here = [entry or str(Path.cwd()) for entry in sys.path]
    if package.libraries_only and not path.is_dir():
        wheel = f"{package.distribution}=={given}" if _is_version(given) else given
        place, _ = find_libraries(wheel, cpu, tell=tell)
        return Release(given, place, sys.executable, tuple(here), package)
    folder = sandbox(given, package, tell=tell)
    # In front of everything only where it is not there anyway: site-packages would hide modules of
    # the standard library that newer packages of the same name replace.
    front = [] if package.sources or _is_installed(folder, package) else [str(folder)]
    return Release(given, folder, sys.executable, (*front, *here), package)


def _is_version(text: str) -> bool:
    """Whether a text is a version that an index may have."""
    try:
        return Version(text).local is None
    except InvalidVersion:
        return False


def _is_installed(folder: Path, package: Package) -> bool:
    try:
        return installed_folder(package) == folder
    except UsageRefusedError:
        return False


def _of_interpreter(given: str, path: Path, package: Package) -> Release:
    # Not looked for on PATH; nor resolved, for a virtual environment is known by where its link is.
    executable = str(path.absolute())
    try:
        asked = subprocess.run(
            [executable, "-c", _QUESTION, "torch", package.module],
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=ASK_SECONDS,
        )
        answer = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2] or describe_exit(error.returncode)
        message = f"{given}: is no Python interpreter that runs ({last})"
        raise InterpreterError(message) from error
    except subprocess.TimeoutExpired as error:
        message = f"{given}: is a Python interpreter that did not answer within {ASK_SECONDS:g} s"
        raise InterpreterError(message) from error
    except (OSError, ValueError, IndexError) as error:
        why = (isinstance(error, OSError) and error.strerror) or "it gives no answer"
        message = f"{given}: is no Python interpreter that runs ({why})"
        raise InterpreterError(message) from error
    for name in ("torch", package.module):
        if not answer[name]:
            message = f"{given}: has no {name}"
            raise InterpreterError(message)
    path_entries = (*answer["path"], str(_link_to_kernelproof()))
    folder = Path(answer[package.module]).parents[1]
    return Release(given, folder, executable, path_entries, package)


def _link_to_kernelproof() -> Path:
    """Return a folder that holds this Kernelproof and nothing else of this environment."""
    folder = Path(tempfile.mkdtemp(prefix="kernelproof-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "kernelproof").symlink_to(Path(__file__).resolve().parents[3])
    return folder


def identity_of(releases: Mapping[str, Release], implementations: Iterable[str]) -> dict[str, str]:
    """Return what the answers of a journal depend on beside what was asked for: the code.

    A folder, a wheel or an environment has the same name after it was built again.

    Args:
        releases: the releases by side.
        implementations: names or MODULE:NAME.
    """
    found = {f"{side} release": release_identity(each) for side, each in releases.items()}
    return {**code_identity(implementations), **found}


def release_identity(release: Release) -> str:
    """Return the version of a release, and what differs in another build of it.

    That is the list of its files with their hashes, as it was installed, or, where somebody may
    have changed them since, each file's size and time.
    """
    if release.folder.is_file():
        known = release.folder.stat()
        return f"{release.folder.name} {known.st_size} {known.st_mtime_ns}"
    named = [each.name for each in sorted(release.folder.glob(release.package.metadata))]
    versions = [name.removesuffix(".dist-info").rpartition("-")[2] for name in named]
    fixed = not (Path(release.given).expanduser().is_dir() or release.own_environment)
    content = _recorded(release) if fixed else _listed(release.folder / release.package.module)
    return ", ".join([*versions, f"files {digest_of(content)}", *_packages(release.path)])


def _recorded(release: Release) -> list[bytes]:
    lines: list[bytes] = []
    for metadata in release.folder.glob(release.package.metadata):
        with suppress(OSError):
            lines += (metadata / "RECORD").read_bytes().splitlines()
    return sorted(line for line in lines if line.startswith(f"{release.package.module}/".encode()))


def _listed(package: Path) -> Iterator[bytes]:
    for folder, inner, names in os.walk(package):
        inner[:] = sorted(name for name in inner if name != "__pycache__")
        for name in sorted(names):
            with suppress(OSError):  # a link to nowhere
                known = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118  thousands
                yield f"{folder}/{name} {known.st_size} {known.st_mtime_ns}\n".encode()


def _packages(path: Iterable[str]) -> Iterator[str]:
    """Name the packages that decide with a release, as they are installed: ``torch-2.9.1``."""
    for package in PACKAGES:
        for entry in path:
            with suppress(OSError):
                found = sorted(Path(entry).glob(f"{package}-*.dist-info"))
                if found:
                    yield found[0].name.removesuffix(".dist-info")
                    break
