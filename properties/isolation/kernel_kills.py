"""How often the kernel has ended a process for lack of memory (Linux)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
WHOLE_MACHINE = Path("/proc/vmstat")


def kills() -> int | None:
    """Return how many processes were ended for lack of memory so far; None if nobody counts.

    Those of this process's cgroup count, or of the whole machine where its cgroup does not.
    """
    place = _place()
    return None if place is None else _count_in(place)


@cache
def _place() -> Path | None:
    places = (*_of_cgroups(), WHOLE_MACHINE)
    return next((each for each in places if _count_in(each) is not None), None)


def _count_in(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _of_cgroups() -> list[Path]:
    """Return where the kernel may count for this process's cgroup, of both versions."""
    found = []
    lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines() if MEMBERSHIP.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; a container may see its own cgroup as the root
            roots, name = [CGROUPS, CGROUPS / "unified"], "memory.events"
        elif "memory" in controllers.split(","):
            roots, name = [CGROUPS / "memory"], "memory.oom_control"
        else:
            continue
        found += [folder / name for root in roots for folder in (root / path.strip("/"), root)]
    return found
