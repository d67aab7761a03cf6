"""nvcc: finding it, one object at a time, and what it has to say in one line."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..console.errors import MachineError
from ..releases.subprocess_runner import run_to_end
from .bodies import bodies_of
from .fatbins import ELF, CodeError, codes_in

COMPILES, FAILS, UNDECIDED = "compiles", "fails", "undecided"
LONGEST_MESSAGE = 300
ANSWER_SECONDS = 60.0
"""Most seconds until nvcc has printed its version."""

# Of gcc and cudafe++ (`file:1:2: error: `, `file(1): error: `), of ptxas (`error   : `), of nvcc.
_ERROR = re.compile(r"\b(?:error|fatal)\s*:", re.IGNORECASE)
_MACHINE = re.compile(
    r"fatal error: (?:cu(?:blas|da|dnn|fft|rand|solver|sparse|pti|b/)|thrust/|nv(?:rtc|ml|tx|/)"
    r"|nccl|Python\.h|tvm/|dlpack)[^:]*: No such file"
    r"|died (?:due to signal|with status)|Unsupported gpu architecture|unsupported GNU version"
    r"|No space left on device|[Cc]annot allocate memory|out of memory|host compiler"
)
"""Messages that are no fault of what is compiled, but of the machine or of an old CUDA."""
_BARE = "static assertion failed"
"""Message of an assertion without a text: the line of source that follows says which it was."""
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+@~-]+/)+([\w.+@~-]*)")
_SCRATCH = re.compile(r"\btmpxft_\w+(?:-\d+)?(?:_[\w.]*)?")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Attributes:
        path: the path of the program.
        version: such as ``13.0.88``.
        home: the home of CUDA, in which ``bin/nvcc`` and ``include`` lie.
    """

    path: Path
    version: str
    home: Path


@dataclass(frozen=True)
class Compiled:
    """The result of compiling one object.

    Attributes:
        state: ``COMPILES``, ``FAILS``, or ``UNDECIDED`` where the machine is at fault.
        seconds: the seconds of nvcc.
        message: its first error.
        kernels: how many kernels of the one asked for it holds.
        stubs: how many more it holds by name only, with a body that has no effect.
    """

    state: str
    seconds: float
    message: str = ""
    kernels: int = 0
    stubs: int = 0


def find_nvcc() -> Nvcc:
    """Find nvcc: in ``$CUDA_HOME``, or on the PATH.

    Raises:
        MachineError: there is none, or it does not run.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    if found is None:
        where = f"in {home}/bin" if home else "on the PATH"
        message = f"there is no nvcc {where}: install CUDA's compiler, or set CUDA_HOME"
        raise MachineError(message)
    told = _answer([found, "--version"])
    version = re.search(r"\bV(\d+(?:\.\d+)+)", told)
    if version is None:
        message = f"{found} --version names no version of CUDA: {told.strip()[:80]!r}"
        raise MachineError(message)
    # It may be a script that starts the one of a CUDA folder, which is what FlashInfer must know.
    plan = _answer([found, "--dryrun", "-c", "-x", "cu", os.devnull])
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    place = Path(top[1].strip()) if top else Path(found).resolve().parent.parent
    return Nvcc(Path(found), version[1], place.resolve())


def _answer(words: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="kernelproof-nvcc-") as scratch:
        try:
            ended = run_to_end(words, folder=Path(scratch), deadline=ANSWER_SECONDS)
        except OSError as error:
            message = f"{words[0]} does not run: {error.strerror}"
            raise MachineError(message) from error
    if ended.cut_short:
        message = f"{words[0]} does not answer: {ended.cut_short}"
        raise MachineError(message)
    return ended.told


def compile_object(
    nvcc: Nvcc,
    command: Sequence[str],
    *,
    kernel: str,
    deadline: float,
    stop: threading.Event | None = None,
) -> Compiled:
    """Compile one source; the object is examined and thrown away.

    Args:
        nvcc: the compiler.
        command: a compiler's command, whose first word names the compiler. Where the output goes is
            replaced, nothing else.
        kernel: a regular expression for the mangled names of the kernels to count.
        deadline: seconds that it may take.
        stop: ends it.
    """
    with tempfile.TemporaryDirectory(prefix="kernelproof-nvcc-") as scratch:
        target = Path(scratch, "unit.o")
        words = [str(nvcc.path), *_without_output(command[1:]), "-o", str(target)]
        ended = run_to_end(words, folder=Path(scratch), deadline=deadline, stop=stop)
        if ended.cut_short:
            return Compiled(UNDECIDED, ended.seconds, ended.cut_short)
        if ended.status != 0:
            message = first_error(ended.told) or f"nvcc ends with status {ended.status}, silently"
            killed = ended.status is None or ended.status < 0
            state = UNDECIDED if killed or _MACHINE.search(ended.told) else FAILS
            return Compiled(state, ended.seconds, message)
        if not target.is_file():
            return Compiled(UNDECIDED, ended.seconds, "nvcc ends with status 0 and writes nothing")
        try:
            kernels, stubs = count_kernels(target.read_bytes(), kernel)
        except CodeError as error:
            return Compiled(UNDECIDED, ended.seconds, f"the object cannot be read: {error}")
        return Compiled(COMPILES, ended.seconds, kernels=kernels, stubs=stubs)


def _without_output(words: Sequence[str]) -> list[str]:
    places = {index + shift for index, word in enumerate(words) if word == "-o" for shift in (0, 1)}
    return [word for index, word in enumerate(words) if index not in places]


def count_kernels(data: bytes, pattern: str) -> tuple[int, int]:
    """Count the kernels of an object whose mangled name matches a regular expression.

    An object holds, as a string, the name of each kernel that it registers with CUDA: of all that
    were instantiated. One that the preprocessor emptied for the chip is among them, as a stub.

    Returns:
        The number of kernels that have an effect, and that of stubs.

    Raises:
        CodeError: the device code of the object cannot be read.
    """
    wanted = re.compile(pattern.encode())
    names = {
        name.decode() for name in re.findall(rb"(?<=\0)_Z[\w$.]+(?=\0)", data) if wanted.match(name)
    }
    idle: dict[str, bool] = {}
    if data.startswith(ELF):
        for body in (body for code in codes_in(data) for body in bodies_of(code)):
            idle[body.name] = body.idle and idle.get(body.name, True)
    stubs = sum(idle.get(name, False) for name in names)
    return len(names) - stubs, stubs


def first_error(told: str) -> str:
    """Return the first error of a compiler's output, without the machine's paths."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if _ERROR.search(line):
            source = lines[number + 1 : number + 2] if line.endswith(_BARE) else []
            return shortened(": ".join([line, *source]))
    return shortened(lines[-1]) if lines else ""


def shortened(text: str) -> str:
    """Return one line of bounded length, without the machine's paths."""
    clean = without_paths(" ".join(text.split()))
    return clean if len(clean) <= LONGEST_MESSAGE else f"{clean[: LONGEST_MESSAGE - 3]}..."


def without_paths(text: str) -> str:
    """Leave of each absolute path what lies below FlashInfer's data, or its last part."""
    return _SCRATCH.sub("(temporary file)", _PATH.sub(_relative, text))


def _relative(found: re.Match[str]) -> str:
    _, package, rest = found[0].rpartition("/flashinfer/data/")
    return rest if package else found[1]
