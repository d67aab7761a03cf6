"""The source of a file of Triton kernels: its jitted functions, its nodes, and its edits."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

SPOKEN_TO_THE_COMPILER = {
    "assume", "debug_barrier", "device_assert", "device_print", "max_constancy", "max_contiguous",
    "multiple_of", "static_assert", "static_print",
}  # fmt: skip
"""Calls that state something to the compiler, and compute nothing."""
OF_THE_LAUNCH = {
    "allow_tf32", "cache_modifier", "disallow_acc_multi_buffer", "dtype", "eviction_policy",
    "flatten", "input_precision", "loop_unroll_factor", "num_stages", "num_warps",
    "warp_specialize",
}  # fmt: skip
"""Keyword arguments that say how fast something is computed, or in which type it is made."""

JIT = {"jit", "device_function"}
"""Names of what makes a function one of a kernel: Triton's, and that of our own kernels."""


class Edit(NamedTuple):
    """A piece of a text, from one character to another, and what stands there instead."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """A file's text and its syntax.

    Attributes:
        text: the whole text.
    """

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """The lines, with their ends."""
        return self.text.splitlines(keepends=True)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(line) for line in self.lines)]

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Return the place of a node's first character."""
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return the place behind a node's last character."""
        return self._place(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _place(self, line: int, column: int) -> int:
        # The columns of a tree count bytes.
        before = self.lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's text, without parentheses around it."""
        return self.text[self.start(node) : self.end(node)]

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """Return the edit that puts a text in a node's place."""
        return Edit(self.start(node), self.end(node), text)

    def operator(self, left: ast.expr, right: ast.expr, before: str, after: str) -> Edit | None:
        """Return the edit that changes the operator between two operands; None if it is hidden."""
        start, end = self.end(left), self.start(right)
        between = self.text[start:end]
        place = between.find(before)
        # A comment there may hold the operator too.
        if place < 0 or "#" in between:
            return None
        return Edit(start + place, start + place + len(before), after)

    def is_infinity(self, node: ast.expr) -> bool:
        """Whether a node is minus infinity."""
        return self.of(node).replace("'", '"') == 'float("-inf")'

    def marks(self, kernel: ast.FunctionDef) -> dict[ast.stmt, int]:
        """Return the line by which one sees that a statement ran, for each of a kernel.

        It is the statement's own, where a line of code can stand before it. What stands behind a
        semicolon has the line of the statement before it; an ``elif``, or what stands behind a
        colon, that of the statement that it is in. On the line of the kernel's own ``def`` no
        statement has one.
        """
        marks: dict[ast.AST, int] = {}
        for owner, block in blocks(kernel):
            before: ast.AST = owner
            for statement in block:
                start = self.lines[statement.lineno - 1].encode()[: statement.col_offset]
                if not start.strip() and not self.of(statement).startswith("elif"):
                    marks[statement] = statement.lineno
                elif before in marks:
                    marks[statement] = marks[before]
                before = statement
        return {each: line for each, line in marks.items() if isinstance(each, ast.stmt)}

    def edited(self, edits: Sequence[Edit]) -> str:
        """Return the text with edits, none of which may overlap another."""
        text = self.text
        for edit in sorted(edits, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    @cached_property
    def kernels(self) -> list[ast.FunctionDef]:
        """The functions that Triton compiles: jitted by a decorator, or by a call on their name."""
        called = {
            node.args[0].id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and _is_jit(node.func)
            and node.args
            and isinstance(node.args[0], ast.Name)
        }
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef)
            and (node.name in called or any(map(_is_jit, node.decorator_list)))
        ]


def _is_jit(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", "")) in JIT


def called(node: ast.AST) -> str:
    """Return the last name of what a call calls; empty for any other node."""
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def blocks(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Yield the owner of each block below a node, and its statements without docstrings."""
    for owner in ast.walk(node):
        for name in ("body", "orelse"):
            block = getattr(owner, name, None)
            if isinstance(block, list) and block:
                yield owner, [one for one in block if not _is_text(one)]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of statements in it and of what is no code."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        yield node
        if called(node) in SPOKEN_TO_THE_COMPILER:
            continue
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            children = [each for each in (node.target, node.value) if each is not None]
        waiting += [
            child
            for child in children
            if not isinstance(child, (ast.stmt, ast.JoinedStr))
            and not (isinstance(child, ast.keyword) and child.arg in OF_THE_LAUNCH)
        ]
