"""FlashInfer's own plan functions: host code, compiled over a CUDA driver that records.

A plan divides a batch among blocks and writes integers. It asks CUDA for little: how many
multiprocessors there are, and how many blocks one of them holds. The driver answers with the
problem's numbers, so that a CPU can judge the plan for any chip. What is compiled is kept, by
release and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...reference import PlanProblem
from ...reference.problems.plan import DECODE, FA2, FA3, MLA
from ...reference.tensors.plan import FLOAT_BYTES, INT_BYTES, PlanInputs
from ..gating.rules import version_matches
from ..protocol import Implementation, implementation
from ..targets.backends import FLASHINFER
from ..targets.cache import cache_folder
from ..targets.optional import missing
from ..targets.refusal import Refusal
from ..targets.target import Target, UnsupportedError
from .calls import version

RELEASES = ">=0.6.13,<0.8"
"""Releases whose plans have the layout that is known here."""
NO_ROOM = "Increase the workspace buffer size"
"""Error by which a release rightly refuses a batch that it has no room for."""
NO_GRAPH = "please consider disabling cuda graph"
"""Error by which it rightly refuses a graph's batch with parts of a fixed size."""
GROUP_SIZES, HEAD_DIMS = (1, 4, 8), (64, 128, 256)
"""Sizes for which ``planner.cu`` has the plan function of decode, which is a template."""
SOURCES = tuple(Path(__file__).with_name(name) for name in ("recording_driver.cpp", "planner.cu"))
"""The driver first: the planner registers its kernels with it as it is loaded."""
LIBRARY = "planner.so"
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-cudart", "none", "-shared", "-Xcompiler", "-fPIC"),
    # Its own CUDA is in it: that of the process, where there is one, must not answer.
    *("-Xlinker", "-Bsymbolic", "-Xlinker", "-z", "-Xlinker", "defs"),
    *("-gencode", "arch=compute_90a,code=compute_90a"),
)
"""Flags of the compiler. Code for the device never runs, and so stays PTX."""
MARKS: Mapping[str, str] = {
    "uniform_q_len": "HAS_UNIFORM_ROWS",
    "staged_int_workspace_bytes": "RETURNS_STAGED_BYTES",
}
"""Macros of the planner, by the parameter of a plan function by which a release has it."""
FLOATS = 1 << 40
"""The address of the workspace of floats, which nothing touches: a plan calculates with it."""
CAPABILITY, SHARED_MEMORY = 90, 232448
LONGEST_VECTOR, LONGEST_MESSAGE = 64, 300


class Buffers(ctypes.Structure):
    """The workspaces of a call, as the planner has them."""

    _fields_ = (
        ("integers", ctypes.c_void_p),
        ("staged", ctypes.c_void_p),
        ("integer_bytes", ctypes.c_size_t),
        ("floats", ctypes.c_void_p),
        ("float_bytes", ctypes.c_size_t),
    )


@functools.cache
def compiler() -> str | None:
    """Return the path of nvcc, in ``$CUDA_HOME`` or on the PATH; None where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")


def _data() -> Path | None:
    """Return the folder of the release's sources, without importing it; None where it is not."""
    try:
        spec = importlib.util.find_spec("flashinfer")
    except ImportError:
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "data" if places else None


def unavailable(target: Target) -> Refusal | None:
    """Return the reason why no plan function can be asked here."""
    if target.device != "cpu":
        return Refusal("plan functions are host code: a CPU judges them", "device", "a CPU")
    if _data() is None and (lacking := missing("flashinfer", "flashinfer")):
        return lacking
    if not version_matches(version(), RELEASES):
        reason = f"plans of flashinfer {version()} have another layout: {RELEASES} is known"
        return Refusal(reason, "package", FLASHINFER)
    if compiler() is None:
        reason = "there is no nvcc: install CUDA's compiler, or set CUDA_HOME"
        return Refusal(reason, "package", "nvcc")
    return None


@functools.cache
def library() -> Path:
    """Return where the release's plan functions lie once they are built."""
    data = _data() or Path()
    told = subprocess.run(
        [str(compiler()), "--version"], check=False, capture_output=True, text=True
    )
    digest = hashlib.sha256(f"{told.stdout} {FLAGS}".encode())
    for source in (*SOURCES, *sorted((data / "include").rglob("*.*h"))):
        digest.update(source.read_bytes())
    name = f"plans-{version()}-{digest.hexdigest()[:16]}"
    return cache_folder() / "launchers" / name / LIBRARY


def build(into: Path) -> None:
    """Compile the plan functions of the release.

    Raises:
        UnsupportedError: the compiler fails.
    """
    data = _data() or Path()
    scheduler = data / "include" / "flashinfer" / "attention" / "scheduler.cuh"
    text = scheduler.read_text(encoding="utf-8")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".plans-", dir=into.parent) as scratch:
        command = [
            *(str(compiler()), *FLAGS, f"-I{data / 'include'}"),
            *(f"-I{data / 'cccl' / part}" for part in ("libcudacxx/include", "cub", "thrust")),
            *(f"-D{macro}" for mark, macro in MARKS.items() if mark in text),
            *map(str, SOURCES),
            *("-o", str(Path(scratch, LIBRARY))),
        ]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch)
        if ended.returncode:
            lines = [line for line in ended.stderr.splitlines() if "error" in line]
            why = next(iter(lines), f"status {ended.returncode}")[:LONGEST_MESSAGE]
            message = f"the plan functions of flashinfer {version()} cannot be built: {why}"
            raise UnsupportedError(message)
        Path(scratch, LIBRARY).replace(into)


@functools.cache
def loaded() -> ctypes.CDLL:
    """Return the plan functions, which are built unless they were before."""
    place = library()
    if not place.is_file():
        build(place)
    found = ctypes.CDLL(str(place))
    found.planner_error.restype = ctypes.c_char_p
    return found


def _call(call: PlanProblem) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """Return the arrays and the numbers of a call, as ``planner.cu`` takes them."""
    queries, pages = call.query_starts, call.page_starts
    if call.family == MLA:
        numbers = (len(call.kv_lens), call.num_qo_heads, int(call.causal), call.head_dim)
        return (queries, pages, call.kv_lens), numbers
    shape = [len(call.kv_lens), call.num_qo_heads, call.num_kv_heads, call.page_size]
    shape += [int(call.graph)]
    if call.family == DECODE:
        return (pages,), [*shape, call.head_dim, call.kv_bytes]
    wide = [*shape, call.head_dim_qk or call.head_dim, call.head_dim, call.kv_bytes]
    wide += [call.graph_rows]
    if call.family == FA3:
        return (queries, pages, call.kv_lens), [*wide, int(call.causal)]
    splits = [call.fixed_split or -1, int(not call.split), call.promised_rows]
    return (queries, pages), [*wide, call.window_left, *splits]


def planned(inputs: PlanInputs) -> torch.Tensor:
    """Return the vector of the release's plan; an empty one where it says that it has no room.

    Raises:
        RuntimeError: the release raises.
    """
    call, planner = inputs.call, loaded()
    planner.recording_chip(CAPABILITY, call.multiprocessors, SHARED_MEMORY)
    planner.recording_occupancy(call.blocks)
    integers, staged = inputs.workspace.data_ptr(), inputs.pinned.data_ptr()
    buffers = Buffers(integers, staged, INT_BYTES, FLOATS, FLOAT_BYTES)
    given, numbers = _call(call)
    arrays = [(ctypes.c_int32 * len(each))(*each) for each in given]
    found = (ctypes.c_int64 * LONGEST_VECTOR)()
    function = getattr(planner, f"plan_{call.family}")
    count = function(
        ctypes.byref(buffers), *arrays, (ctypes.c_int64 * len(numbers))(*numbers), found
    )
    if count < 0:
        error = " ".join(planner.planner_error().decode(errors="replace").split())
        if NO_ROOM in error or (NO_GRAPH in error and call.fixed_split):
            return torch.empty(0, dtype=torch.int64)
        raise RuntimeError(error[:LONGEST_MESSAGE])
    return torch.tensor(found[:count], dtype=torch.int64)


def _adapter(family: str) -> Implementation:
    def supports(problem: PlanProblem, target: Target) -> Refusal | str | bool:
        if refusal := unavailable(target):
            return refusal
        if problem.family != family:
            return f"plans {family} only"
        known = problem.group_size in GROUP_SIZES and problem.head_dim in HEAD_DIMS
        if family == DECODE and not (known and problem.kv_bytes in (1, 2)):
            return f"decode is built for groups of {GROUP_SIZES} and head dims {HEAD_DIMS}"
        return True

    def exists(_: PlanProblem) -> tuple[str, bool]:
        place = library()
        return place.parent.name, place.is_file()

    return implementation(
        "plan",
        name=f"flashinfer-plan-{family}",
        supports=supports,
        compile_key=lambda _: "plans",
        library=exists,
        build_ahead="cpu",
        build_minutes=0.5,
        build_compilers=1,
        provider=FLASHINFER,
    )(planned)


decode, fa2, fa3, mla = (_adapter(family) for family in (DECODE, FA2, FA3, MLA))
