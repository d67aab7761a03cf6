"""NVIDIA's Multi-Process Service (MPS): kernels of several processes run on a GPU at the same time.

Without it processes have the GPU in turns, and small kernels leave most of it idle. Its price is
that an illegal access in one process ends the CUDA contexts of all that share the GPU, and so may
the end of a process whose kernels have not ended: what fails there accuses nobody before it has
failed in a process that does not share (`workers.py`).

A daemon of this run only serves it, by a folder of its own: no setting of the GPU is changed, and
other programs have the GPU as before.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from . import mps_keeper
from .gpus import VISIBLE

if TYPE_CHECKING:
    from typing_extensions import Self

CONTROL: Final = "nvidia-cuda-mps-control"
"""The program of the daemon; it comes with NVIDIA's driver."""
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
MOST_FAULTS: Final = 6
"""Faults after which processes have the GPU in turns again: each costs all of them their start."""

NOT_SHARED: Final = (
    f"processes had it in turns: {CONTROL} is not on the PATH, or serves no process here"
)
"""Words on a run that was to share the GPU, and could not."""


@dataclass(frozen=True)
class Client:
    """What makes a process share the GPU.

    Attributes:
        number: which of the run's daemons it is a client of.
        environment: variables that it needs before it first calls CUDA.
    """

    number: int
    environment: dict[str, str]


class SharedGpu:
    """The daemon of a run; after a fault the next one, since the old one serves nobody new."""

    def __init__(self) -> None:
        self.faults = 0
        """How many faults have ended the contexts of all clients."""
        self._lock = threading.Lock()
        self._daemon: _Daemon | None = _Daemon()
        self._old: list[_Daemon] = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the daemon."""
        self.close()

    def text(self, processes: int) -> str:
        """Return in words how many processes share the GPU, and what they have lost by it."""
        told = f"{processes} processes shared the GPU by NVIDIA's MPS"
        if not self.faults:
            return told
        faults = "a fault" if self.faults == 1 else f"each of {self.faults} faults"
        then = "; from then on they had it in turns" if self.faults >= MOST_FAULTS else ""
        return f"{told}; {faults} ended the work of all, which was judged again{then}"

    def client(self) -> Client | None:
        """Return what makes a process share the GPU; None once it is not shared any more."""
        with self._lock:
            if self._daemon is None:
                return None
            return Client(self.faults, self._daemon.environment)

    def serves(self, client: Client) -> bool:
        """Whether no fault has ended the contexts of its daemon's clients."""
        return client.number == self.faults

    def note_fault(self, client: Client) -> None:
        """Go on with another daemon, or none, after a fault in a client: it ends all of them."""
        with self._lock:
            if client.number != self.faults or self._daemon is None:
                return  # of the same fault as others
            self.faults += 1
            # Its clients are still there. It ends with the run, or by itself after them.
            self._old.append(self._daemon)
            self._daemon = None
            if self.faults < MOST_FAULTS:
                with contextlib.suppress(OSError):
                    self._daemon = _Daemon()

    def close(self) -> None:
        """End the daemons, whose clients have ended."""
        with self._lock:
            every = [*self._old, *([self._daemon] if self._daemon else [])]
            self._old, self._daemon = [], None
        for each in every:
            each.end()


class _Daemon:
    """A process of NVIDIA's program, and the folder by which its clients find it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kernelproof-mps-")
        self.environment = {PIPES: self._folder, LOGS: self._folder}
        # All devices: clients choose by the numbers that they have without it.
        every = {name: value for name, value in os.environ.items() if name != VISIBLE}
        devices = [os.environ[VISIBLE]] if VISIBLE in os.environ else []
        # The program goes into the background and outlives whoever has started it. Its keeper ends
        # it at the end of this process too, however that comes.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", mps_keeper.__file__, CONTROL, self._folder, *devices],
            env={**every, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        if self._told() != mps_keeper.READY:
            self.end()
            raise OSError(CONTROL)

    def _told(self) -> bytes:
        assert self._keeper.stdout is not None  # noqa: S101  it is a pipe
        return self._keeper.stdout.readline()

    def end(self) -> None:
        """End it; its clients have ended."""
        self._keeper.communicate()


def is_of_use(device: str, processes: int) -> bool:
    """Whether a daemon would have processes of a device share it that do not."""
    # Whoever names a folder has a daemon already, which its processes share by themselves.
    return device == "cuda" and processes > 1 and PIPES not in os.environ


def share_gpu(device: str, processes: int) -> SharedGpu | None:
    """Begin to share the GPU between processes; None where that is not possible, or of no use.

    Args:
        device: the device of the run.
        processes: how many are to share it.
    """
    if not is_of_use(device, processes):
        return None
    try:
        return SharedGpu()
    except OSError:
        return None
