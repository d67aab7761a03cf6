"""Libraries with device code, written byte by byte: no compiler and no chip is needed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import lz4.block
import zstandard

MOV, EXIT, NOP, CALL, STORE = 0x802, 0x94D, 0x918, 0x343, 0x986
"""Operations as sm_90 writes them, with the bits of their operands."""
RETURNS = (MOV, EXIT, NOP, NOP)
PRINTS = (MOV, CALL, EXIT, NOP)
WHOLE = (*[MOV] * 90, STORE, EXIT)
"""Operations of bodies: one that returns, one that prints and returns, one with an effect."""
SHORT = (MOV, STORE, EXIT)
"""One that is short and has an effect."""


def elf(sections: Sequence[tuple[str, int, bytes, int]], machine: int = 62) -> bytes:
    """Return a little-endian ELF file of 64 bits, with a table of section names.

    Args:
        sections: name, type, content and link of each; the first is section 1.
        machine: 62 for x86_64, 190 for CUDA.
    """
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    every = [*sections, (".shstrtab", 3, names, 0)]
    content, headers = b"", struct.pack("<IIQQQQIIQQ", *[0] * 10)
    for name, kind, data, link in every:
        place = 64 + len(content)
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        width = 24 if kind == 2 else 0  # of a symbol
        headers += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, place, len(data), link, 0, 8, width)
        content += data + bytes(-len(data) % 8)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    numbers = (3, machine, 1, 0, 0, 64 + len(content), 0, 64, 0, 0, 64, len(every) + 1, len(every))
    return ident + struct.pack("<HHIQQQIHHHHHH", *numbers) + content + headers


def cubin(
    target: str, kernels: Mapping[str, Sequence[int]], *, calls: str = "vprintf", note: bool = True
) -> bytes:
    """Return a cubin of kernels by name, each with its operations.

    Args:
        target: such as ``90a``.
        kernels: operations by mangled name.
        calls: the function outside of the file that bodies with a call name.
        note: whether the compiler's note says what the target is.
    """
    strings, symbols, texts = b"\0", struct.pack("<IBBHQQ", *[0] * 6), []
    for number, (name, operations) in enumerate(kernels.items()):
        text = b"".join(struct.pack("<QQ", each, 0) for each in operations)
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, 3 + number, 0, len(text))
        strings += name.encode() + b"\0"
        texts.append((f".text.{name}", 1, text, 0))
    symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 0, 0, 0)
    strings += calls.encode() + b"\0"
    # A payload of 4 bytes, EXTERNS: the index of the last symbol.
    called = struct.pack("<BBHI", 4, 0x0F, 4, len(kernels) + 1)
    infos = [(f".nv.info.{name}", 1, called, 0) for name in kernels if CALL in kernels[name]]
    text = f"ptxas -arch sm_{target} -m 64 \0".encode()
    notes = [(".note.nv.tkinfo", 7, text, 0)] if note else []
    sections = [(".symtab", 2, symbols, 2), (".strtab", 3, strings, 0), *texts, *infos, *notes]
    return elf(sections, machine=190)


def cubin_taking(size: int, *kernels: str) -> bytes:
    """Return a cubin that says of kernels how many bytes of parameters they take."""
    # A payload of 4 bytes, EXTERNS, and the value of CBANK_PARAM_SIZE.
    info = struct.pack("<BBHI", 4, 0x0F, 4, 0x03190001) + struct.pack("<BBH", 3, 0x19, size)
    return elf([(f".nv.info.{name}", 1, info, 0) for name in kernels], machine=190)


def ptx(target: str, kernels: Mapping[str, str], isa: str = "8.7") -> bytes:
    """Return PTX of kernels by name, each with its statements."""
    entries = "".join(
        f".visible .entry {name}(\n.param .u64 p\n)\n{{\n.reg .b32 %r<2>;\n{body}\n}}\n"
        for name, body in kernels.items()
    )
    return f".version {isa}\n.target sm_{target}\n.address_size 64\n{entries}\0".encode()


def entry(kind: int, target: str, data: bytes, packing: str = "") -> bytes:
    """Return one entry of a fat binary: PTX (1) or a cubin (2) for a target."""
    number, suffix = int(target.rstrip("af")), target.lstrip("0123456789")
    flags = {"": 0, "a": 0x100000, "f": 0x200000}[suffix]
    packed = data
    if packing == "lz4":
        flags, packed = flags | 0x2000, lz4.block.compress(data, store_size=False)
    elif packing == "zstd":
        flags, packed = flags | 0x8000, zstandard.ZstdCompressor().compress(data)
    padded = packed + bytes(-len(packed) % 8)
    size = len(packed) if packing else 0
    header = (kind, 0x101, 64, len(padded), size, 0, 8, 1, number, 0, 0, flags, 0, len(data))
    return struct.pack("<HHIQIIHHIIIQQQ", *header) + padded


def library(entries: Iterable[bytes], *others: Iterable[bytes], tail: bytes = b"") -> bytes:
    """Return a library with a fat binary of each group of entries."""
    groups = [b"".join(each) for each in (entries, *others)]
    fats = b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(each)) + each for each in groups)
    return elf([(".nv_fatbin", 1, fats, 0), (".rodata", 1, tail, 0)])
