"""What kernels touch in Triton's interpreter: lanes outside are seen, and do nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernelproof.properties.isolation.workers import Worker
from kernelproof.reference import AttentionProblem, MergeProblem, SlotsProblem
from kernelproof.tests.interpreting import ask

LAW = "touched_memory"
OVERREADS = str(Path(__file__).parents[2] / "faults" / "overreads.py")
MERGES = """
import functools
import torch, triton
import triton.language as tl
from kernelproof.impl import implementation
from kernelproof.impl.triton.merge import merge_state

@triton.jit
def touch(array, pointers, first, which: tl.constexpr):
    lanes = first + tl.arange(0, 16)
    inside = (lanes >= 0) & (lanes < 8)
    if which == "stores":
        tl.store(array + lanes, 1.0, mask=lanes < 12)
    elif which == "adds":
        tl.atomic_add(array + lanes, 1.0, mask=lanes < 12)
    elif which == "swaps":
        tl.atomic_cas(array + 4 * tl.arange(0, 4), 0.0, 1.0)
    elif which == "before":
        tl.load(array + lanes, mask=lanes < 8)
    elif which == "by pointers":
        there = tl.load(pointers).to(tl.pointer_type(tl.float32))
        tl.store(there + lanes, 1.0, mask=inside)
    elif which == "described":
        described = tl.make_tensor_descriptor(array, [8], [1], [16])
        described.store([0], described.load([0]) + 1.0)
    elif which == "defined":
        tl.store(array + lanes, tl.load(array + lanes, mask=inside, other=2.0), mask=inside)
    elif which == "one zero":
        one = tl.arange(0, 1)
        tl.store(array + one, tl.load(array + one, mask=one < 0, other=0.0))
    elif which == "undefined":
        total = tl.sum(tl.load(array + lanes, mask=inside))
        tl.store(array + lanes, total, mask=inside)

@functools.cache
def kept():
    array = torch.zeros(8)
    return array, torch.tensor([array.data_ptr()])

@implementation("merge_state", name="kept-pointers", supports=lambda p, t: True)
def keeps(inputs):
    touch[(1,)](torch.zeros(8), kept()[1], 0, which="by pointers")
    return merge_state(inputs)

@implementation("merge_state", name="reads-before-nothing", supports=lambda p, t: True)
def nothing(inputs):
    touch[(1,)](torch.zeros(0), torch.zeros(1), -16, which="before")
    return merge_state(inputs)

def touching(which, first=0):
    @implementation("merge_state", name=which.replace(" ", "-"), supports=lambda p, t: True)
    def run(inputs):
        array = torch.zeros(8)
        pointers = torch.tensor([array.data_ptr()])
        touch[(1,)](array, pointers, first, which=which)
        out, lse = merge_state(inputs)
        return out + array[0].to(out.dtype) * 0, lse
    return run

stores, adds, before = touching("stores"), touching("adds"), touching("before", -4)
swaps = touching("swaps")
by_pointers, described = touching("by pointers"), touching("described")
defined, undefined = touching("defined"), touching("undefined")
one_zero = touching("one zero")

@triton.jit
def read(array, count, extra: tl.constexpr):
    lanes = count - 4 + tl.arange(0, 8)
    tl.load(array + lanes, mask=lanes < count + extra)

def reading(extra):
    @implementation("merge_state", name=f"reads-{extra}-behind-a-state")
    def run(inputs):
        read[(1,)](inputs.states[0], inputs.states[0].numel(), extra=extra)
        return merge_state(inputs)
    return run

within, behind = reading(0), reading(1)

@implementation("merge_state", name="reads-behind-the-context", features=("context_tokens",))
def context(inputs):
    read[(1,)](inputs.lses[0], inputs.lses[0].numel(), extra=0)
    return inputs.states[1], inputs.lses[1]
"""


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kernels") / "merges.py"
    file.write_text(MERGES, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "elements"), [("exact", 0), ("four_bytes", 4), ("twelve_bytes", 12)]
)
def test_reads_behind_an_input_are_seen_and_named(
    name: str, elements: int, interpreter: Worker
) -> None:
    found = ask(
        interpreter, LAW, f"{OVERREADS}:{name}", AttentionProblem(head_dim_qk=16, head_dim_vo=16)
    )
    assert (found.status, found.kind) == (("FAIL", "read_outside") if elements else ("PASS", ""))
    if elements:
        said = rf"copy_end in line \d+ reads {elements} elements .* behind the input q"
        assert re.fullmatch(said, found.message)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("stores", "wrote_outside", "writes 4 elements at once"),
        ("adds", "wrote_outside", "changes 4 elements at once"),
        ("before", "read_outside", "the first 16 bytes before the argument array"),
        ("swaps", "wrote_outside", "changes 2 elements at once"),
        ("nothing", "read_outside", "reads 16 elements at once"),
        ("behind", "read_outside", "reads 1 element outside"),
        ("within", "", ""),
        ("keeps", "", ""),
        ("undefined", "nan", "lanes that a load's mask leaves undefined"),
        ("by_pointers", "", ""),
        ("described", "", ""),
        ("defined", "", ""),
        ("one_zero", "", ""),
    ],
)
def test_lanes_outside_and_undefined_ones(
    name: str, kind: str, said: str, interpreter: Worker, merges: Path
) -> None:
    ask(interpreter, LAW, f"{merges}:{name}", MergeProblem())
    found = ask(interpreter, LAW, f"{merges}:{name}", MergeProblem())
    assert (found.status, found.kind) == (("FAIL", kind) if kind else ("PASS", "")), found.message
    assert said in found.message


def test_a_first_state_ends_with_its_tokens(interpreter: Worker, merges: Path) -> None:
    problem = MergeProblem(num_tokens=8, num_heads=1, context="some")
    found = ask(interpreter, LAW, f"{merges}:context", problem)
    assert (found.status, found.kind) == ("FAIL", "read_outside")
    assert "the input lses" in found.message


def test_a_call_of_several_batches_is_watched_whole(interpreter: Worker) -> None:
    problem = SlotsProblem(steps=(((1,), (3,)), ((2,), (5,))), page_size=4)
    found = ask(interpreter, LAW, "torch-map-slots", problem)
    assert (found.status, found.vacuous) == ("PASS", True), "no kernel was launched"


def test_every_second_problem_ends_with_a_whole_tile(interpreter: Worker) -> None:
    # It reads behind keys that end with a tile: 40 keys do not.
    faulty = "kernelproof.properties.seeded.triton_bugs:channels_behind_the_last_key"
    drawn = [
        AttentionProblem(
            "ragged_attention", seq_lens=(40,), head_dim_qk=24, head_dim_vo=24, seed=seed
        )
        for seed in range(8)
    ]
    assert {ask(interpreter, LAW, faulty, each).status for each in drawn} == {"FAIL", "PASS"}
