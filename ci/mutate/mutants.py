"""The mutants of a file, a sample of them, and the lines at which a kernel's run is marked."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from .kernel_source import Source, blocks, expressions
from .operators import OF_BLOCKS, OF_NODES, Edits, owned

MARKER = """

def _kernelproof_ran(line, _seen=set()):
    if line not in _seen:
        _seen.add(line)
        with open({path!r}, "a") as ran:
            ran.write(f"{name}:{{line}}\\n")
"""
"""The function that a marked file calls before each statement of its kernels."""


@dataclass(frozen=True)
class Mutant:
    """A file of kernels with one fault.

    Attributes:
        file: the file, relative to the folder of its package.
        kernel: the jitted function.
        operator: the operator that made it.
        line: the line of the statement that is changed.
        text: the whole text of the file with the fault.
        diff: the unified diff, without the names of files.
    """

    file: str
    kernel: str
    operator: str
    line: int
    text: str
    diff: str

    @property
    def id(self) -> str:
        """A name that is the same in every run on the same file."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return f"{Path(self.file).name}:{self.line}:{self.operator}:{digest}"


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all mutants of a file, each once, in the order of their lines.

    A function in one line has none: no line shows whether it ran.
    """
    source, made = Source(text), dict[str, Mutant]()
    for kernel in source.kernels:
        marks = source.marks(kernel)
        for operator, statement, edits in _faults(source, kernel):
            changed = source.edited(edits)
            if statement in marks and changed != text and changed not in made:
                shown = difference(text.splitlines(), changed.splitlines())
                made[changed] = Mutant(
                    file, kernel.name, operator, marks[statement], changed, shown
                )
    return sorted(made.values(), key=lambda each: each.line)


def difference(before: Sequence[str], after: Sequence[str]) -> str:
    """Return the unified diff of two texts with one changed place, without context."""
    most = min(len(before), len(after))
    first = next((n for n in range(most) if before[n] != after[n]), most)
    last = next((n for n in range(most - first) if before[-1 - n] != after[-1 - n]), most - first)
    old, new = before[first : len(before) - last], after[first : len(after) - last]
    head = f"@@ -{first + 1},{len(old)} +{first + 1},{len(new)} @@"
    return "\n".join([head, *(f"-{line}" for line in old), *(f"+{line}" for line in new)])


def _faults(source: Source, kernel: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt, Edits]]:
    for _, block in blocks(kernel):
        for operator, of_block in OF_BLOCKS.items():
            for edits in of_block(source, block):
                start = min(edit.start for edit in edits)
                yield operator, next(s for s in block if start < source.end(s)), edits
        for statement in block:
            nodes = list(expressions(statement))
            taken = [owned(node) for node in nodes]
            for node in nodes:
                for operator, of_node in OF_NODES.items():
                    if operator == "constant" and any(node is each for each in taken):
                        continue
                    for edits in of_node(source, node):
                        yield operator, statement, edits


def sample(mutants: Sequence[Mutant], number: int | None, seed: int) -> list[Mutant]:
    """Return a sample, the same for the same seed, in which kernels and operators are even.

    Each pair of a kernel and an operator is a stratum; rounds over all of them, in an order by
    chance, take one mutant of each.
    """
    chance = random.Random(seed)  # noqa: S311  no secret
    strata: dict[tuple[str, str, str], list[Mutant]] = {}
    for each in mutants:
        strata.setdefault((each.file, each.kernel, each.operator), []).append(each)
    shuffled = [chance.sample(each, len(each)) for each in strata.values()]
    chance.shuffle(shuffled)
    rounds = [each for taken in zip_longest(*shuffled) for each in taken if each is not None]
    return rounds[:number]


def marked(name: str, text: str, path: Path) -> str:
    """Return a file whose kernels write each statement's line into a file before they run it.

    Args:
        name: the name of the file in what is written.
        text: the text of the file.
        path: the file that is written.
    """
    source = Source(text)
    lines = list(source.lines)
    for kernel in source.kernels:
        for statement, line in source.marks(kernel).items():
            if line == statement.lineno:
                code = source.lines[line - 1]
                indent = code[: len(code) - len(code.lstrip())]
                lines[line - 1] = f"{indent}_kernelproof_ran({line})\n{code}"
    return "".join(lines) + MARKER.format(path=str(path), name=name)
