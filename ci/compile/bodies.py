"""The bodies of kernels in device code, and whether one has any effect.

A kernel whose source the preprocessor empties for a chip is there by name all the same, with a body
that returns, or prints that the chip is not supported and returns.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section

from .fatbins import PTX, UNREADABLE, Code, CodeError

STUB_BYTES = 1024
"""Most bytes of a body without effect; those that were seen have 128 to 768."""
OLDEST = 70
"""Chip times ten from which on an instruction is 16 bytes, with its operation in the lowest 9 bits;
the 3 bits above them are the kinds of its operands."""
IDLE = frozenset(
    {
        *(0x002, 0x005, 0x00C, 0x010, 0x011, 0x012, 0x019, 0x01C, 0x024, 0x025, 0x027, 0x031),
        *(0x035, 0x036, 0x082, 0x08C, 0x090, 0x092, 0x0A4, 0x0B9, 0x118, 0x119, 0x141, 0x143),
        *(0x145, 0x147, 0x14D, 0x14E, 0x15C, 0x182, 0x187, 0x189, 0x1AC, 0x1C3),
    }
)
"""Operations that change no memory but the thread's own stack, by nvdisasm: MOV, CS2R, ISETP,
IADD3, LEA, LOP3, SHF, PLOP3, IMAD, IMAD.WIDE, IMAD.HI, HFMA2, IADD, VIADD, UMOV, UISETP, UIADD3,
ULOP3, UIMAD, ULDC, NOP, S2R, BSYNC, CALL.ABS, BSSY, BRA, EXIT, LEPC, BPT, LDC, STL, SHFL, LDCU and
S2UR. Whatever is not among them counts as an effect, so that an operation of a later chip never
makes a kernel a stub."""
CALL = 0x143
PRINTERS = frozenset({"vprintf", "__assertfail"})
"""Functions of the driver that a body without effect may call."""
_EXTERNS = 0x0F
"""Attribute of ``.nv.info``: the functions outside of the file that a kernel calls."""
_PARAMETER_BYTES = 0x19
"""Attribute of ``.nv.info``: the bytes of a kernel's parameters."""
_SIZED = 4
"""Form of an attribute whose value is a payload."""
_ARCHITECTURE = re.compile(rb"-arch sm_(\d+)([af]?)")
_FUNCTION, _ENTRY_POINT = 2, 0x10
_ISA = re.compile(r"^\s*\.version\s+(\d+\.\d+)", re.MULTILINE)
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)[^{;]*\{")
_PTX_IDLE = re.compile(
    r"(?:@!?%\w+\s+)?(?:ret|exit|trap|mov|cvta|bra|setp|selp|add|sub|mul|mad|and|or|xor|not|shl|shr"
    r"|cvt|ld\.param|st\.local|st\.param"
    r"|call[.\w]*\s+\(\w+\),\s*(?:vprintf|__assertfail))\b"
    r"|\.(?:reg|param|local|pragma|loc|file)\b"
)
"""Statements of PTX without effect, and declarations."""


@dataclass(frozen=True)
class Body:
    """A kernel's code for one target.

    Attributes:
        name: the mangled name of the kernel.
        number, suffix: the target, as of ``Code``; of a cubin, by its compiler's note.
        size: the bytes of its instructions; of PTX, the characters.
        idle: whether it has no effect: it returns, or prints and returns or traps.
        isa: the version of PTX, such as ``8.7``; empty for a cubin.
    """

    name: str
    number: int
    suffix: str
    size: int
    idle: bool
    isa: str = ""

    @property
    def target(self) -> str:
        """The target as nvcc names it."""
        return f"{'compute' if self.isa else 'sm'}_{self.number}{self.suffix}"


def bodies_of(code: Code) -> Iterator[Body]:
    """Yield the kernels of a piece of device code.

    Raises:
        CodeError: it cannot be read.
    """
    if code.kind == PTX:
        yield from _bodies_of_ptx(code)
        return
    try:
        yield from _bodies_of_cubin(code)
    except UNREADABLE as error:
        message = f"the code for sm_{code.number}{code.suffix} in it cannot be read"
        raise CodeError(message) from error


def _bodies_of_cubin(code: Code) -> Iterator[Body]:
    file = ELFFile(io.BytesIO(code.data))
    number, suffix = code.number, code.suffix
    for note in file.iter_sections(type="SHT_NOTE"):
        # sm_90a and sm_90 have equal flags in the ELF header: only this note differs.
        if found := _ARCHITECTURE.search(note.data()):
            number, suffix = int(found[1]), found[2].decode()
            break
    table = next(file.iter_sections(type="SHT_SYMTAB"), None)
    if table is None:
        return
    strings = file.get_section(table["sh_link"]).data()
    symbols = [*struct.iter_unpack("<IBBHQQ", table.data())]
    names = [strings[each[0] : strings.index(b"\0", each[0])].decode() for each in symbols]
    for name, (_, kind, other, section, start, size) in zip(names, symbols, strict=True):
        if kind & 0xF != _FUNCTION or not other & _ENTRY_POINT:
            continue
        idle = False
        if number >= OLDEST and 0 < size <= STUB_BYTES:
            text = file.get_section(section).data()[start : start + size]
            operations = {word & 0x1FF for word, _ in struct.iter_unpack("<QQ", text)}
            idle = operations <= IDLE
            if idle and CALL in operations:
                called = _called(file.get_section_by_name(f".nv.info.{name}"), names)
                idle = bool(called) and called <= PRINTERS
        yield Body(name, number, suffix, size, idle)


def parameter_bytes(cubin: bytes, kernel: str) -> int:
    """Return how many bytes of parameters a kernel takes.

    Raises:
        CodeError: the file cannot be read, or says nothing of that kernel.
    """
    message = f"it does not say how many bytes of parameters {kernel} takes"
    try:
        info = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".nv.info.{kernel}")
        said = {attribute: value for attribute, value, _ in _attributes(info)}
    except UNREADABLE as error:
        raise CodeError(message) from error
    if _PARAMETER_BYTES not in said:
        raise CodeError(message)
    return said[_PARAMETER_BYTES]


def _called(info: Section | None, names: list[str]) -> set[str]:
    """Return the functions outside of the file that a kernel calls, by its attributes."""
    found = set[str]()
    for attribute, size, payload in _attributes(info):
        if attribute == _EXTERNS:
            found |= {names[each] for each in struct.unpack_from(f"<{size // 4}I", payload)}
    return found


def _attributes(info: Section | None) -> Iterator[tuple[int, int, bytes]]:
    """Yield the attributes of a kernel, each with its value and, where it has one, its payload."""
    data, place = info.data() if info else b"", 0
    while place + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, place)
        place += 4
        size = value if form == _SIZED else 0  # only then a payload follows
        yield attribute, value, data[place : place + size]
        place += size


def _bodies_of_ptx(code: Code) -> Iterator[Body]:
    text = code.data.rstrip(b"\0").decode(errors="replace")
    isa = _ISA.search(text)
    if isa is None:
        message = f"the PTX for compute_{code.number}{code.suffix} in it names no version"
        raise CodeError(message)
    entries = [*_PTX_ENTRY.finditer(text)]
    for entry, after in zip(entries, [*entries[1:], None], strict=True):
        end = text.find("\n}", entry.end(), after.start() if after else len(text))
        body = text[entry.end() : end if end > 0 else len(text)]
        plain = re.sub(r"//[^\n]*|^\s*[$\w]+:", "", body, flags=re.MULTILINE)
        statements = re.split(r"[;{}]", plain)
        idle = all(_PTX_IDLE.match(each.strip()) or not each.strip() for each in statements)
        yield Body(entry[1], code.number, code.suffix, len(body), idle, isa[1])
