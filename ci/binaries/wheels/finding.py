"""Finding the wheel or folder whose libraries are to be read."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from ....impl.targets.target import CPUS, parse_cpu
from ...console.errors import UsageRefusedError
from ...releases.sandboxes import Tell, fetched_wheel, quietly

_CPU = re.compile(rf"_({'|'.join(CPUS)})(?=[.-])")


def usual_cpu() -> str:
    """Return the processor whose wheels are read if none is named: this machine's."""
    try:
        return parse_cpu(platform.machine())
    except ValueError:
        return CPUS[0]


def find_libraries(given: str, cpu: str = "", *, tell: Tell = quietly) -> tuple[Path, str]:
    """Return a wheel or a folder with libraries, and the processor that it is for.

    Args:
        given: a wheel, a folder, or a package and its version, such as ``sglang-kernel==0.4.4``.
        cpu: the processor of the wheel to download; this machine's if empty.
        tell: function that is called with a line of progress now and then.

    Raises:
        UsageRefusedError: there is no such thing, or it cannot be had.
    """
    path = Path(given).expanduser()
    if "==" in given and not path.exists():
        cpu = cpu or usual_cpu()
        return fetched_wheel(given, cpu, tell=tell), cpu
    if not path.exists():
        message = f"{given}: there is no such wheel or folder; of a package write NAME==VERSION"
        raise UsageRefusedError(message)
    if path.is_file() and path.suffix != ".whl":
        message = f"{given}: is no wheel, no folder, and no package such as sglang-kernel==0.4.4"
        raise UsageRefusedError(message)
    found = _CPU.search(path.name)
    named = found[1] if found else ""
    if cpu and named and cpu != named:
        message = f"--cpu {cpu}: {path.name} is a wheel for {named}"
        raise UsageRefusedError(message)
    return path, named or cpu
