"""Where an implementation is to run, and the refusal to run there."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata

import torch


class UnsupportedError(RuntimeError):
    """A call that cannot run here, refused before anything was launched."""


@dataclass(frozen=True)
class Target:
    """A machine as far as gating looks at it.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        sm: compute capability times ten (90 for an H200); None on a CPU.
        device_name: what the driver calls it, or the processor's architecture.
        torch, triton, flashinfer: versions; None where absent.
        cuda: CUDA version that torch was built for; None on a CPU build.
    """

    device: str = "cpu"
    sm: int | None = None
    device_name: str = ""
    torch: str | None = None
    triton: str | None = None
    flashinfer: str | None = None
    cuda: str | None = None

    @classmethod
    def here(cls, device: str = "cpu") -> Target:
        """Describe this machine.

        Raises:
            UnsupportedError: ``device`` is cuda and torch sees no CUDA device.
        """
        sm, name = None, platform.machine()
        if device == "cuda":
            if not torch.cuda.is_available():
                message = "--device cuda: torch sees no CUDA device on this machine"
                raise UnsupportedError(message)
            major, minor = torch.cuda.get_device_capability()
            sm, name = 10 * major + minor, torch.cuda.get_device_name()
        return cls(
            device=device,
            sm=sm,
            device_name=name,
            torch=installed_version("torch"),
            triton=installed_version("triton"),
            flashinfer=installed_version("flashinfer-python"),
            cuda=torch.version.cuda,
        )

    def to_json(self) -> dict[str, object]:
        """Give a JSON-able dictionary."""
        return asdict(self)


def installed_version(distribution: str) -> str | None:
    """Give the version of an installed distribution, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
