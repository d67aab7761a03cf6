"""What a law's calls of an implementation are: in which phase, and what is timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.subject import Subject
from kernelproof.reference import AttentionOutput, AttentionProblem, oracle
from kernelproof.reference.inputs import PagedAttentionInputs

ENTERED: list[str] = []


class Watched:
    """Phases, of which the latest is known."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Go through one."""
        ENTERED.append(name)
        yield
        ENTERED.pop()


COMPILED_IN: list[str] = []


def launch(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Compile if this is the first call."""
    if not COMPILED_IN:
        COMPILED_IN.append(ENTERED[-1])
    return oracle.attention(inputs)


class Lazy:
    """A session whose plan compiles nothing, as those of Triton kernels."""

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan nothing."""

    def run(self, inputs: PagedAttentionInputs) -> AttentionOutput:
        """Attend."""
        return launch(inputs)


@implementation("paged_attention", name="lazy", session=Lazy, compile_key=lambda _: "one kernel")
def lazy(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend."""
    return launch(inputs)


@pytest.mark.parametrize("law", ["life_cycle", "parity"])
def test_the_first_run_may_compile_whatever_was_planned_before(law: str) -> None:
    ENTERED.clear()
    COMPILED_IN.clear()
    subject = Subject(lazy, Target.here("cpu"), Watched())
    problem = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 9), page_size=4, head_dim_qk=8)
    find_law(law).check(subject, problem)
    assert COMPILED_IN == ["compile"]
