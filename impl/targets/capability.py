"""Compute capabilities: one parser for the many ways in which they are written."""

from __future__ import annotations

import re

CHIPS = {
    75: "Turing (T4, RTX 20)",
    80: "Ampere (A100, A30)",
    86: "Ampere (A10, A40, RTX 30)",
    87: "Ampere (Orin)",
    89: "Ada (L4, L40S, RTX 40)",
    90: "Hopper (H100, H200, GH200)",
    100: "Blackwell (B200, GB200)",
    103: "Blackwell Ultra (B300, GB300)",
    107: "Rubin",
    110: "Blackwell (Thor)",
    120: "Blackwell (RTX 50, RTX PRO 6000)",
    121: "Blackwell (DGX Spark, GB10)",
}
"""Chips that the support rules speak of, by compute capability times ten. NVIDIA, CUDA GPUs."""
OLDEST_MAJOR, NEWEST_MAJOR = 5, 19
"""CUDA 12 compiles for SM 5.0 and later; majors past 19 are a pair that was not split."""
Capability = int | str | tuple[int, int]
"""Compute capability as ``parse_capability`` reads it: 103, "10.3", "sm_103a", (10, 3)."""
_TEXT = re.compile(
    r"(?:(?:sm|compute)[ _]?)?(?:(?P<major>\d{1,2})\.(?P<minor>\d)|(?P<joined>\d{1,3}))[af]?",
    re.IGNORECASE,
)


def parse_capability(value: object) -> int:
    """Read a compute capability, however it is written.

    Args:
        value: ``103``, ``(10, 3)``, ``"103"``, ``"10.3"``, ``"sm_103a"``, ``"SM 10.3"``,
            ``"compute_103f"``, or what ``torch.cuda.get_device_capability()`` gives.

    Returns:
        Ten times the major version and the minor version: 103. A chip that no rule knows is read
        too: ``decide`` refuses it by name.

    Raises:
        ValueError: it is ambiguous (``10``: SM 1.0, or 10.0?) or no GPU's (SM 1.0, SM 100.0).
    """
    if isinstance(value, (tuple, list)):
        return _from_pair(value)
    if isinstance(value, str):
        found = _TEXT.fullmatch(value.strip())
        if found is None:
            raise _refuse(value, "write 103, (10, 3), '10.3' or 'sm_103'")
        if found["joined"] is None:
            return _from_pair((int(found["major"]), int(found["minor"])), value)
        return _from_joined(int(found["joined"]), value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _from_joined(value, value)
    raise _refuse(value, "write 103, (10, 3), '10.3' or 'sm_103'")


def capability_name(sm: int | None) -> str:
    """Return the name of a chip as reports print it: SM103, or CPU where there is none."""
    return "CPU" if sm is None else f"SM{sm}"


def _from_joined(joined: int, value: object) -> int:
    major, minor = divmod(joined, 10)
    if 1 <= joined <= NEWEST_MAJOR and major < OLDEST_MAJOR:
        meant = f"write {10 * joined} or ({joined}, 0)"
        hint = f"it may be SM {major}.{minor} or SM {joined}.0; {meant}"
        raise _refuse(value, hint, "ambiguous")
    if not OLDEST_MAJOR <= major <= NEWEST_MAJOR:
        raise _refuse(value, f"no GPU that CUDA compiles for has SM {major}.{minor}")
    return joined


def _from_pair(pair: tuple[object, ...] | list[object], value: object = None) -> int:
    value = pair if value is None else value
    parts = [part for part in pair if isinstance(part, int) and not isinstance(part, bool)]
    if len(parts) != len(pair) or len(parts) != 2:  # noqa: PLR2004  major and minor
        raise _refuse(value, "a pair is (major, minor), such as (10, 3)")
    major, minor = parts
    if not 0 <= minor <= 9:  # noqa: PLR2004  one digit
        raise _refuse(value, "the minor version is one digit")
    if not OLDEST_MAJOR <= major <= NEWEST_MAJOR:
        hint = f"no GPU that CUDA compiles for has SM {major}.{minor}"
        if 10 * OLDEST_MAJOR <= major <= 10 * NEWEST_MAJOR + 9 and minor == 0:
            hint += f"; ({major // 10}, {major % 10}) is SM {major // 10}.{major % 10}"
        raise _refuse(value, hint)
    return 10 * major + minor


def _refuse(value: object, hint: str, fault: str = "not a compute capability") -> ValueError:
    return ValueError(f"{value!r} is {fault}: {hint}")
