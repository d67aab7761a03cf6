"""What a law's calls of an implementation are: in which stage, and what is timed."""

from __future__ import annotations

import bdb
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.contained import crash
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionOutput, AttentionProblem, BatchMetadata, oracle
from kernelproof.reference.tensors.allocation import FENCE
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

ENTERED: list[str] = []


class Watched:
    """Stages, of which the latest is known."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Go through one."""
        ENTERED.append(name)
        yield
        ENTERED.pop()


FIRST: dict[str, str] = {}
LATER: dict[str, set[str]] = {}
"""The stage of the first call of each function, which compiles, and those of the later ones."""


def note(name: str) -> None:
    """Note the stage that a function is called in."""
    if name in FIRST:
        LATER.setdefault(name, set()).add(ENTERED[-1])
    FIRST.setdefault(name, ENTERED[-1])


class Lazy:
    """A session whose plan compiles nothing and whose graph has a kernel of its own."""

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Keep a copy of the batch."""
        note("plan")
        copies = {name: each.clone() for name, each in inputs.metadata.tensors().items()}
        self._metadata = BatchMetadata(**copies, page_size=inputs.metadata.page_size)

    def run(self, inputs: PagedAttentionInputs) -> AttentionOutput:
        """Attend."""
        note("run")
        return oracle.attention(replace(inputs, metadata=self._metadata))

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Capture nothing."""
        del inputs
        note("capture")

    def replay(self, inputs: PagedAttentionInputs) -> AttentionOutput:
        """Attend."""
        note("replay")
        return oracle.attention(replace(inputs, metadata=self._metadata))


@implementation("paged_attention", name="lazy", session=Lazy, compile_key=lambda _: "one kernel")
def lazy(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend."""
    note("call")
    return oracle.attention(inputs)


@pytest.mark.parametrize(
    ("law", "functions"),
    [("life_cycle", {"plan", "run", "capture", "replay"}), ("repeated_calls", {"call"})],
)
def test_the_first_call_of_each_function_may_compile(law: str, functions: set[str]) -> None:
    ENTERED.clear()
    FIRST.clear()
    LATER.clear()
    subject = Subject(lazy, Target.here("cpu"), Watched())
    for seed in range(4):
        problem = AttentionProblem(
            query_lens=(2, 1), seq_lens=(5, 9), page_size=4, head_dim_qk=8, seed=seed
        )
        said = find_law(law).check(subject, problem)
        assert said.status == "PASS", said
    stages = {name: (FIRST[name], LATER[name]) for name in FIRST}
    assert stages == {name: ("compile", {"run"}) for name in functions}


def test_a_breakpoint_without_a_terminal_names_the_command_that_has_one() -> None:
    assert crash(bdb.BdbQuit()).message.endswith("; use `kernelproof replay --in-process`")
    assert "--in-process" not in crash(ValueError("mine")).message


@pytest.mark.parametrize(("tool", "behind"), [("memcheck", 0), ("", FENCE)])
def test_under_a_sanitizer_the_memory_of_an_input_ends_where_the_input_ends(
    tool: str, behind: int
) -> None:
    problem = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 9), page_size=4, head_dim_qk=8)
    request = Address("lazy", None, "cpu", tool=tool).case("parity", problem)
    subject = Subject(lazy, Target.here("cpu"), Watched(), tight=bool(request.get("tight")))
    for options in ({}, {"unused": float("nan")}):
        inputs = subject.materialise(problem, **options)
        for tensor in (inputs.q, inputs.k_cache, inputs.block_table):
            home = tensor.untyped_storage().nbytes() // tensor.element_size()
            room = home - tensor.storage_offset() - tensor.numel()
            assert room == 0 if tool else room >= behind
