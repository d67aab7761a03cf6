"""Names of kernels that this process launched, as whoever launches them notes them.

Triton's launches note theirs, compiled and interpreted, see ``kernel_lines``: no profiler is needed
for them. So may any code under test where no profiler is.
"""

from __future__ import annotations

_LAUNCHED: dict[tuple[str, str], None] = {}
_EVER: set[str] = set()


def note(name: str, specialisation: str = "") -> None:
    """Note a launch.

    Args:
        name: the name of the kernel.
        specialisation: the hash of what was compiled for it; empty where nothing was.
    """
    _LAUNCHED[name, specialisation] = None
    _EVER.add(name)


def begin() -> None:
    """Forget what was launched before."""
    _LAUNCHED.clear()


def launched() -> tuple[tuple[str, str], ...]:
    """Return names and specialisations of what was launched since, each once, in order."""
    return tuple(_LAUNCHED)


def ever() -> frozenset[str]:
    """Return names of what was launched in this process: a recorded graph launches it unseen."""
    return frozenset(_EVER)
