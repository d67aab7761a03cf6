"""The device code in a library: fat binaries, each with the same kernels for several chips.

NVIDIA documents no part of this format. The fields are those that cuobjdump prints.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.block
import zstandard
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
"""Sections with fat binaries: those that are loaded, and those that nvlink has yet to link."""
MAGIC = 0xBA55ED50
ELF = b"\x7fELF"
"""First bytes of an ELF file."""
PTX, CUBIN = 1, 2
_HEADER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of the header, bytes of what follows it."""
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
"""Kind, version, bytes of the header, bytes of the code with its padding, compressed bytes, an
unknown field, minor and major version, chip, place and length of a name, flags, an unknown field,
bytes once it is unpacked."""
LZ4, ZSTANDARD, ONE_CHIP, FAMILY = 0x2000, 0x8000, 0x100000, 0x200000
"""Flags of an entry: how it is compressed, and whether its target ends with ``a`` or ``f``."""
UNREADABLE = (
    *(ELFError, ConstructError, struct.error, AttributeError, LookupError, TypeError),
    *(ValueError, OverflowError, MemoryError),
)
"""Errors of pyelftools at a file that is cut short or damaged."""
MOST_BYTES = 1 << 31
"""Most bytes of one entry once it is unpacked; a larger number is not one that a compiler wrote."""


class CodeError(ValueError):
    """Device code that cannot be read; the message says why, without the name of the file."""


@dataclass(frozen=True)
class Code:
    """The code of one chip, or PTX, in a fat binary.

    Attributes:
        kind: ``PTX`` or ``CUBIN``.
        number: compute capability times ten.
        suffix: ``"a"`` for that chip only, ``"f"`` for its family, or empty. Releases of CUDA
            before 13 put it here, and the note of the compiler in the cubin does not exist.
        data: PTX as text, or an ELF file.
    """

    kind: int
    number: int
    suffix: str
    data: bytes


def codes_in(library: bytes) -> Iterator[Code]:
    """Yield the device code of a library or of an object; nothing where it has none.

    Raises:
        CodeError: it is no ELF file, it is cut short, or its compression is unknown.
    """
    try:
        file = ELFFile(io.BytesIO(library))
        sections = [each for each in file.iter_sections() if each.name in SECTIONS]
    except UNREADABLE as error:
        message = "it is no ELF file, or it is cut short"
        raise CodeError(message) from error
    for section in sections:
        start, size = section["sh_offset"], section["sh_size"]
        if start + size > len(library):
            message = f"it is cut short: {section.name} ends after the file"
            raise CodeError(message)
        yield from _codes_of(memoryview(library)[start : start + size])


def _codes_of(section: memoryview) -> Iterator[Code]:
    place = 0
    while place + _HEADER.size <= len(section):
        magic, _, header, size = _HEADER.unpack_from(section, place)
        if magic == 0:  # the linker's padding, up to the next multiple of 8
            place += 8
            continue
        end = place + header + size
        if magic != MAGIC or header < _HEADER.size or end > len(section):
            message = f"byte {place} of its device code begins no fat binary"
            raise CodeError(message)
        place += header
        while place < end:
            code, place = _code_at(section, place, end)
            if code is not None:
                yield code


def _code_at(section: memoryview, place: int, end: int) -> tuple[Code | None, int]:
    """Return the code at a place, if it is of a known kind, and the place of the next."""
    if place + _ENTRY.size > end:
        message = f"byte {place} of its device code is within a header that is cut short"
        raise CodeError(message)
    fields = _ENTRY.unpack_from(section, place)
    kind, header, size, packed, number, flags, whole = (fields[i] for i in (0, 2, 3, 4, 8, 11, 13))
    after = place + header + size
    if header < _ENTRY.size or after > end:
        message = f"byte {place} of its device code begins code that is cut short"
        raise CodeError(message)
    if kind not in {PTX, CUBIN}:  # such as the intermediate code of link-time optimisation
        return None, after
    data = bytes(section[place + header : after])
    suffix = "a" if flags & ONE_CHIP else "f" if flags & FAMILY else ""
    return Code(kind, number, suffix, _unpacked(data, packed, whole, flags)), after


def _unpacked(data: bytes, packed: int, whole: int, flags: int) -> bytes:
    if not flags & (LZ4 | ZSTANDARD):
        return data
    message = "its device code cannot be unpacked"
    if whole > MOST_BYTES or packed > len(data):
        raise CodeError(message)
    data = data[: packed or len(data)]
    try:
        if flags & LZ4:
            return bytes(lz4.block.decompress(data, uncompressed_size=whole))
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=whole)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError, ValueError) as error:
        raise CodeError(message) from error
