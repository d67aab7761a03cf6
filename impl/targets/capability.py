"""Compute capabilities: one parser for the many ways in which they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...fixtures.suggestions import did_you_mean

NAMES: Mapping[int, tuple[str, ...]] = {
    75: ("T4", "RTX 2080 Ti", "RTX 2080"),
    80: ("A100", "A30", "A800"),
    86: ("A10", "A16", "A2", "A40", "RTX A6000", "RTX A5000", "RTX A4000", "RTX 3090", "RTX 3080"),
    87: ("AGX Orin", "Orin NX", "Orin Nano", "Orin"),
    89: ("L4", "L40", "L40S", "L20", "RTX 6000 Ada", "RTX 5000 Ada", "RTX 4090", "RTX 4080",
         "RTX 4070"),
    90: ("H100", "H200", "GH200", "H20", "H800"),
    100: ("B200", "GB200"),
    103: ("B300", "GB300"),
    # From flashinfer-python 0.7.1, compilation_context.py; NVIDIA's table does not have it yet.
    107: ("Rubin",),
    # The modules of Jetson Thor. Releases of CUDA before 13 called it SM 10.1.
    110: ("T5000", "T4000", "AGX Thor", "Thor"),
    120: ("RTX PRO 6000", "RTX PRO 5000", "RTX PRO 4500", "RTX PRO 4000", "RTX 5090", "RTX 5080",
          "RTX 5070", "RTX 5060"),
    121: ("GB10", "DGX Spark"),
}  # fmt: skip
"""Names of GPUs by compute capability times ten.

The source of each is the row of its compute capability in NVIDIA's table,
https://developer.nvidia.com/cuda-gpus, where no comment names another. "RTX 6000" and its like are
left out: cards of several generations have that name. A800, H20, H800 and L20, which are sold in
China, are not in it: they are the chips of A100, H100 and L40 with other limits.
"""
ARCHITECTURES = {
    75: "Turing", 80: "Ampere", 86: "Ampere", 87: "Ampere", 89: "Ada", 90: "Hopper",
    100: "Blackwell", 103: "Blackwell Ultra", 107: "Rubin", 110: "Blackwell", 120: "Blackwell",
    121: "Blackwell",
}  # fmt: skip
CHIPS = {sm: f"{name} ({', '.join(NAMES[sm])})" for sm, name in ARCHITECTURES.items()}
"""Chips that the support rules speak of, by compute capability times ten."""
OLDEST_MAJOR, NEWEST_MAJOR = 5, 19
"""CUDA 12 compiles for SM 5.0 and later; majors past 19 are a pair that was not split."""
Capability = int | str | tuple[int, int]
"""Compute capability as ``parse_capability`` reads it: 103, "10.3", "sm_103a", (10, 3), "GB300"."""
SPELLINGS = "write 103, (10, 3), '10.3', 'sm_103' or a name such as 'GB300'"
_TEXT = re.compile(
    r"(?:(?:sm|compute)[ _]?)?(?:(?P<major>\d{1,2})\.(?P<minor>\d)|(?P<joined>\d{1,3}))[af]?",
    re.IGNORECASE,
)
_NO_LETTER = re.compile(r"[\W_]+|^(?:nvidia|geforce|tesla|jetson)\W*", re.IGNORECASE)
"""What a chip's name may be written with or without: spaces, hyphens, the maker and the brand."""


_FORM = re.compile(r"\d+gb|hbm\d\w?|sxm\d?|pcie|nvl|blackwell|server|workstation|edition")
"""Words that a driver adds to a chip's name: its memory, its socket, its housing."""


def _plain(name: str) -> str:
    words = re.split(r"[\W_]+", name.strip().lower())
    found = "".join(word for word in words if not _FORM.fullmatch(word))
    while (shorter := _NO_LETTER.sub("", found)) != found:
        found = shorter
    return found


_BY_NAME = {_plain(name): sm for sm, names in NAMES.items() for name in names}
CHIP_NAMES = tuple(name for names in NAMES.values() for name in names)
"""All names of chips, as they are printed."""


def parse_capability(value: object) -> int:
    """Read a compute capability, however it is written.

    Args:
        value: ``103``, ``(10, 3)``, ``"103"``, ``"10.3"``, ``"sm_103a"``, ``"SM 10.3"``,
            ``"compute_103f"``, a name of ``NAMES`` such as ``"GB300"`` or ``"dgx-spark"``, or what
            ``torch.cuda.get_device_capability()`` gives.

    Returns:
        Ten times the major version and the minor version: 103. A chip that no rule knows is read
        too: ``decide`` refuses it by name.

    Raises:
        ValueError: it is ambiguous (``10``: SM 1.0, or 10.0?) or no GPU's (SM 1.0, SM 100.0).
    """
    if isinstance(value, (tuple, list)):
        return _from_pair(value)
    if isinstance(value, str):
        named = _BY_NAME.get(_plain(value))
        if named is not None:
            return named
        found = _TEXT.fullmatch(value.strip())
        if found is None:
            hint = did_you_mean(value.strip(), CHIP_NAMES) + SPELLINGS
            raise _refuse(value, hint, "not a compute capability or a known chip")
        if found["joined"] is None:
            return _from_pair((int(found["major"]), int(found["minor"])), value)
        return _from_joined(int(found["joined"]), value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _from_joined(value, value)
    raise _refuse(value, SPELLINGS)


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
