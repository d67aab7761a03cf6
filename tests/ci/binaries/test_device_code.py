"""Device code of libraries: reading it, and which bodies are stubs."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest

from kernelproof.ci.binaries.wheels.libraries import (
    FAMILY,
    JIT,
    NATIVE,
    NOTHING,
    STUB,
    Kernel,
    function_of,
    read_library,
    same_name,
)
from kernelproof.ci.compile.bodies import bodies_of
from kernelproof.ci.compile.fatbins import CUBIN, MAGIC, PTX, Code, CodeError, codes_in
from kernelproof.ci.compile.nvcc import count_kernels
from kernelproof.tests.ci.binaries.device_code import (
    EXIT,
    MOV,
    NOP,
    PRINTS,
    RETURNS,
    SHORT,
    STORE,
    WHOLE,
    cubin,
    elf,
    entry,
    library,
    ptx,
)

NAME = "_ZN3our4gemmIiEEvPT_"


def kernel(data: bytes, name: str = NAME) -> Kernel:
    found = read_library(data, "a.so")
    assert found is not None
    return next(each for each in found.kernels if each.name == name)


@pytest.mark.parametrize("packing", ["", "lz4", "zstd"])
def test_whatever_packs_it_code_is_read(packing: str) -> None:
    entries = [
        entry(2, "90a", cubin("90a", {NAME: WHOLE}), packing),
        entry(1, "80", ptx("80", {NAME: "st.global.u32 [%rd1], 1;\nret;"}), packing),
    ]
    found = read_library(library(entries, entries[:1]), "a.so")
    assert found is not None
    assert found.targets() == {"sm_90a": 1, "compute_80 (ISA 8.7)": 1}


def test_the_compilers_note_names_the_target_and_else_the_fat_binary() -> None:
    said = [entry(2, "120", cubin("120f", {NAME: WHOLE}))]
    unsaid = [entry(2, "90a", cubin("90", {NAME: WHOLE}, note=False))]
    assert [each.target for each in kernel(library(said)).bodies] == ["sm_120f"]
    assert [each.target for each in kernel(library(unsaid)).bodies] == ["sm_90a"]


@pytest.mark.parametrize(
    ("operations", "calls", "idle"),
    [
        (RETURNS, "", True),
        (PRINTS, "vprintf", True),
        (PRINTS, "__assertfail", True),
        (PRINTS, "_Z6deviceff", False),  # another file's function, which may do anything
        ((0x9C3, 0x8A4, 0x890, 0x88C, *PRINTS), "vprintf", True),  # prints in its first thread
        (SHORT, "", False),  # short, and whole
        (WHOLE, "", False),
        ((MOV, 0x1FF, EXIT, NOP), "", False),  # an operation of a chip to come
        ((MOV,) * 100, "", False),  # nothing is known to be as long and to do nothing
    ],
)
def test_a_body_is_idle_by_what_its_operations_are(
    operations: tuple[int, ...], calls: str, *, idle: bool
) -> None:
    code = Code(CUBIN, 90, "a", cubin("90a", {NAME: operations}, calls=calls))
    assert [each.idle for each in bodies_of(code)] == [idle]


@pytest.mark.parametrize(
    ("body", "idle"),
    [
        ("ret;", True),
        ("ld.param.u64 %rd1, [p];\nmov.u32 %r1, 3;\nret;", True),
        ("{\n.param .b64 a;\ncall.uni (r), \n vprintf, \n(a, b);\n}\nret;", True),
        ("ld.param.u64 %rd1, [p];\nst.global.u32 [%rd1], 3;\nret;", False),
        ("call.uni (r), _Z5otherv, (a);\nret;", False),
        ("red.global.add.u32 [%rd1], 1;\nret;", False),
        ("{\nst.global.u32 [%rd1], 1;\n}\nret;", False),  # of a block, as from inline assembly
        ("$L__BB0_1: st.global.u32 [%rd1], 1;\nret;", False),
    ],
)
def test_ptx_is_idle_by_its_statements(body: str, *, idle: bool) -> None:
    code = Code(PTX, 90, "", ptx("90", {"_Z1av": "ret;", NAME: body}))
    assert {each.name: each.idle for each in bodies_of(code)} == {"_Z1av": True, NAME: idle}


def test_the_code_that_a_chip_runs_decides_what_a_kernel_is() -> None:
    made = kernel(
        library(
            [
                entry(2, "80", cubin("80", {NAME: WHOLE})),
                entry(2, "90", cubin("90", {NAME: PRINTS})),
                entry(2, "100f", cubin("100f", {NAME: WHOLE})),
                entry(2, "103a", cubin("103a", {NAME: RETURNS})),
                entry(1, "90", ptx("90", {NAME: "st.global.u32 [%rd1], 1;\nret;"})),
            ]
        )
    )
    expected = {75: NOTHING, 80: NATIVE, 86: FAMILY, 90: STUB, 100: NATIVE, 103: STUB, 107: FAMILY}
    assert {sm: made.status(sm) for sm in expected} == expected
    assert made.status(120) == JIT
    both = [
        entry(2, "90", cubin("90", {NAME: PRINTS})),
        entry(2, "90a", cubin("90a", {NAME: WHOLE})),
    ]
    assert kernel(library(both)).status(90) == NATIVE  # the driver takes the code of that chip only


def test_what_has_no_effect_anywhere_is_meant_so() -> None:
    both = [entry(2, chip, cubin(chip, {NAME: RETURNS})) for chip in ("90", "100")]
    assert kernel(library(both)).status(90) == NATIVE
    assert kernel(library(both)).status(90, whole_elsewhere=True) == STUB
    # Two files of a library hold it, one of them whole: which is loaded is not known.
    whole = [entry(2, "90", cubin("90", {NAME: WHOLE}))]
    assert kernel(library(both, whole)).status(90) == NATIVE


def test_an_object_is_counted_by_bodies_and_not_by_names() -> None:
    kernels = {"_Z1a5Relu2": WHOLE, "_Z1b5Relu2": RETURNS, "_Z1c4SiLu": WHOLE}
    names = b"\0" + b"\0".join(name.encode() for name in kernels) + b"\0"
    data = library([entry(2, "100a", cubin("100a", kernels))], tail=names)
    assert count_kernels(data, "_Z1.5Relu2") == (1, 1)
    assert count_kernels(data, "_Z1.4SiLu") == (1, 0)


def test_no_whole_kernel_is_a_stub() -> None:
    # 300 kernels, short ones among them, each with one operation that has an effect.
    bodies = {
        f"_Z1k{number}v": (*[MOV] * (number % 60), STORE, *[NOP] * (number % 3), EXIT)
        for number in range(300)
    }
    idle = dict.fromkeys(bodies, RETURNS)
    data = library([entry(2, "90", cubin("90", bodies)), entry(2, "100", cubin("100", idle))])
    found = read_library(data, "a.so")
    assert found is not None
    assert {status: len(each) for status, each in found.statuses(90).items()} == {NATIVE: 300}
    assert {status: len(each) for status, each in found.statuses(100).items()} == {STUB: 300}


CUB, FILE = "CUB_300001_SM_900_1000", "_GLOBAL__N__0a1b2c3d_4_a_cu_12345678_9"
"""Namespaces that differ in every build."""
GOOD = library([entry(2, "90a", cubin("90a", {NAME: WHOLE}), "zstd")])


@pytest.mark.parametrize("size", [0, 3, 40, 70, 100, 200, len(GOOD) // 2, len(GOOD) - 1])
def test_what_is_cut_short_is_refused_in_a_sentence(size: int) -> None:
    with pytest.raises(CodeError, match=r"cut short|no ELF file"):
        [*codes_in(GOOD[:size])]


def test_a_fat_binary_of_no_bytes_is_refused() -> None:
    empty = struct.pack("<IHHQ", MAGIC, 1, 0, 0)
    with pytest.raises(CodeError, match="begins no fat binary"):
        [*codes_in(elf([(".nv_fatbin", 1, empty, 0)]))]


@pytest.mark.parametrize("step", [7, 61])
def test_a_damaged_library_raises_nothing_else(step: int) -> None:
    for place in range(0, len(GOOD), step):
        damaged = bytearray(GOOD)
        damaged[place] ^= 0xFF
        with suppress(CodeError):
            read_library(bytes(damaged), "a.so")


@pytest.mark.parametrize(
    ("name", "function", "same"),
    [
        (NAME, "our::gemm", NAME),
        ("_Z5scalePfi", "scale", "_Z5scalePfi"),
        ("main", "main", "main"),
        (f"_ZN3cub{len(CUB)}{CUB}6detail3runEv", "cub::detail::run", "_ZN3cub6detail3runEv"),
        (f"_ZN{len(FILE)}{FILE}1fEv", "(anonymous)::f", "_ZN1fEv"),
    ],
)
def test_names_of_functions(name: str, function: str, same: str) -> None:
    assert (function_of(name), same_name(name)) == (function, same)
