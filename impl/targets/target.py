"""Where an implementation is to run, and the refusal to run there."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata

from .capability import Capability, parse_capability
from .registrations import canonical_name, registrations
from .unpacked import unpacked

FIELDS = {
    "flashinfer": "flashinfer",
    "flashinfer-python": "flashinfer",
    "cuda": "cuda",
    "torch": "torch",
    "triton": "triton",
}
"""Field of a target by the name of the package whose version it is."""
CPUS = ("x86_64", "aarch64")
"""Processors for which wheels with kernels are published."""
_SAME_CPUS = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


class UnsupportedError(RuntimeError):
    """A call that cannot run here, refused before anything was launched."""


@dataclass(frozen=True, init=False)
class Target:
    """The machine that gating decides about, which need not be this one.

    Attributes:
        sm: compute capability times ten (90 for an H200); None on a CPU. Whatever
            ``parse_capability`` reads may be given.
        flashinfer: version of flashinfer-python; None where absent.
        cuda: CUDA version that torch was built for; None on a CPU build, or where it is not known.
        artifacts: names and hashes of FlashInfer's binary artifacts, where they are not those of
            the version: pairs, or a mapping such as ``{"TRTLLM_GEN_FMHA": "55bba5592..."}``.
        device: ``"cpu"`` or ``"cuda"``; by ``sm`` if empty.
        device_name: what the driver calls it, or the processor's architecture.
        torch, triton: versions; None where absent.
        providers: versions of further distributions; those that are not given are the installed
            ones, see ``version_of``.
        cpu: the processor's architecture, one of ``CPUS``: wheels of one version for two of them
            hold kernels for different chips. Empty where it does not matter.

    Raises:
        ValueError: ``sm`` is no compute capability, or ``cpu`` no processor of ``CPUS``.
    """

    sm: int | None
    flashinfer: str | None
    cuda: str | None
    artifacts: tuple[tuple[str, str], ...]
    device: str
    device_name: str
    torch: str | None
    triton: str | None
    providers: tuple[tuple[str, str | None], ...]
    cpu: str
    _asked: dict[str, str | None] = field(init=False, repr=False, compare=False)

    # Written out: what may be given is more than what the fields hold.
    def __init__(  # noqa: PLR0917  as many as there are fields
        self,
        sm: Capability | None = None,
        flashinfer: str | None = None,
        cuda: str | None = None,
        artifacts: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        device: str = "",
        device_name: str = "",
        torch: str | None = None,
        triton: str | None = None,
        providers: Mapping[str, str | None] | Iterable[tuple[str, str | None]] = (),
        cpu: str = "",
    ) -> None:
        """Bring chip, artifacts and providers to one form."""
        chip = None if sm is None else parse_capability(sm)
        pairs = artifacts.items() if isinstance(artifacts, Mapping) else artifacts
        given = {canonical_name(name): version for name, version in dict(providers).items()}
        fields = {
            "sm": chip,
            "flashinfer": flashinfer,
            "cuda": cuda,
            "artifacts": tuple(sorted((str(name), str(value)) for name, value in pairs)),
            "device": device or ("cpu" if chip is None else "cuda"),
            "device_name": device_name,
            "torch": torch,
            "triton": triton,
            "providers": tuple(sorted(given.items())),
            "cpu": parse_cpu(cpu) if cpu else "",
            "_asked": given,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def here(cls, device: str = "cpu") -> Target:
        """Describe this machine.

        Raises:
            UnsupportedError: ``device`` is cuda and torch sees no CUDA device.
        """
        # Imported when it is asked: a question about another machine is answered without torch.
        import torch

        sm, name = None, platform.machine()
        if device == "cuda":
            if not torch.cuda.is_available():
                message = "--device cuda: torch sees no CUDA device on this machine"
                raise UnsupportedError(message)
            sm = parse_capability(torch.cuda.get_device_capability())
            name = torch.cuda.get_device_name()
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
        """Return a JSON-able dictionary, with the versions of the providers that were asked for."""
        data = asdict(self)
        del data["providers"], data["_asked"]
        if not self.cpu:
            del data["cpu"]
        return {**data, "providers": dict(sorted(self._asked.items()))} if self._asked else data

    def version_of(self, provider: str) -> str | None:
        """Return the version of a distribution; None where it is not installed.

        ``flashinfer`` is flashinfer-python; of it, CUDA, torch and triton the target has fields.
        """
        name = canonical_name(provider)
        if name in FIELDS:
            known: str | None = getattr(self, FIELDS[name])
            return known
        if name not in self._asked:
            self._asked[name] = installed_version(name)
        return self._asked[name]


def parse_cpu(text: str) -> str:
    """Return a processor of ``CPUS`` by one of its names.

    Raises:
        ValueError: there is none of that name.
    """
    name = text.strip().lower()
    if (found := _SAME_CPUS.get(name, name)) not in CPUS:
        message = f"cpu is {text!r}; it must be {' or '.join(CPUS)}"
        raise ValueError(message)
    return found


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None where there is none.

    Of an engine whose package lies in a folder of ``KERNELPROOF_FROM``, it is that one's.
    """
    package = unpacked(canonical_name(distribution))
    if package is not None:
        return package.version
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def distribution_of(module: str) -> str:
    """Return the distribution that installed a module, or "" for a module that none installed."""
    package = module.partition(".")[0]
    if package == __name__.partition(".")[0]:
        return package  # also in a checkout that is not installed
    owners = metadata.packages_distributions().get(package, ())
    # An editable installation may list no module, but it registers some.
    registered = (
        each.distribution
        for each in registrations()
        if each.reference.startswith((f"{package}.", f"{package}:"))
    )
    return next(iter((*owners, *registered)), "")
