"""What one FlashInfer release declares about where its kernels run, as JSON, without a GPU.

FlashInfer publishes no table of what it supports. What there is lies in decorators, class
attributes, filters of the just-in-time compiler, dispatch macros, launchers' checks and enums.
`declarations` collects it from any release's wheel, each item with its place in the source, in a
process of its own: two releases cannot be imported into one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..targets.capability import CHIPS

__all__ = ["SCHEMA", "DeclarationsError", "declarations"]

SCHEMA = "kernelproof/declarations/1"
"""The name of the declarations' format."""
DEADLINE_SECONDS = 120.0
"""A release takes 5 to 10 s, half of which torch and flashinfer take to import."""
UNSET = ("FLASHINFER_CUBIN_DIR", "TRITON_INTERPRET")
"""Settings of whoever asks that would change the answer."""
_START = f"""\
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.exit(importlib.import_module("{__name__}.collecting").main(sys.argv[2:]))
"""


class DeclarationsError(RuntimeError):
    """A release that cannot be introspected; the message says why in one sentence."""


def declarations(
    folder: Path,
    *,
    chips: Iterable[int] = CHIPS,
    deadline: float = DEADLINE_SECONDS,
    executable: str = sys.executable,
    sys_path: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Collect what the release of FlashInfer in a folder declares.

    Args:
        folder: holds the package ``flashinfer``, see ``kernelproof.ci.releases.sandboxes``.
        chips: the chips that are asked about, compute capability times ten.
        deadline: the deadline in seconds.
        executable: interpreter that imports it; another than this one needs its own ``sys_path``.
        sys_path: where it finds modules, this Kernelproof's among them; if None, as this process
            does, with the folder in front.

    Raises:
        DeclarationsError: there is no flashinfer, it does not import, or it hangs.
    """
    if not (folder / "flashinfer" / "__init__.py").is_file():
        message = f"{folder}: holds no package flashinfer"
        raise DeclarationsError(message)
    with tempfile.TemporaryDirectory(prefix="kernelproof-") as scratch:
        answer, log = Path(scratch) / "answer.json", Path(scratch) / "log"
        place = str(folder.resolve())
        path = [place, *sys.path] if sys_path is None else [*sys_path]
        start = [executable, "-c", _START, json.dumps(path)]
        status = _run([*start, place, str(answer), *map(str, chips)], place, log, deadline)
        if status is None:
            message = f"{folder}: flashinfer did not answer within {deadline:g} s and was stopped"
            raise DeclarationsError(message)
        if status != 0:
            last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            by_signal = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else ""
            reason = last or f"the process ended with {by_signal or f'status {status}'}"
            message = f"{folder}: flashinfer cannot be introspected: {reason}"
            raise DeclarationsError(message)
        declared: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return declared


def _run(command: list[str], folder: str, log: Path, deadline: float) -> int | None:
    """Run a process and whatever it starts; None if it is killed at the deadline."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=_environment(folder, log.parent),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment(folder: str, scratch: Path) -> dict[str, str]:
    """Return the variables of a process that imports the folder's flashinfer, and sees no GPU."""
    paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **{name: value for name, value in os.environ.items() if name not in UNSET},
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",  # some chip: without any, nothing is generated
        # A wheel of kernels of another release may be installed beside it, and is not asked.
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }
