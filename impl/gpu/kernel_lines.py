# ruff: noqa: ANN401  what Triton hands on is of no type that this file could name
"""Which lines of ``@triton.jit`` functions ran, and the values that their constexprs took.

Triton's interpreter runs a copy of a function, which it makes from the function's syntax tree. In
that copy each statement is preceded by a mark, one store into an array of bytes. So every problem
is seen, on each Python, for about a thousandth of the interpreter's time: ``sys.monitoring`` is
there from Python 3.12 on only, and tracing makes the interpreter's own calls slower too.

On a GPU no lines are seen. What is known there is which specialisations were compiled.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from . import launch_names

MOST_VALUES = 16
"""Most values of a constexpr that are kept."""
MOST_CHARACTERS = 60
"""Most characters of a value of a constexpr."""
JIT = "triton.runtime.jit"
"""Name of the module of what launches compiled kernels."""
_DIGITS = bytes([48, 49]) + bytes(254)
_MARKED = "_kernelproof_marks_lines"

Constexprs = dict[str, list[str]]
"""Values that each constexpr of a function took, in the order in which they were seen."""


class FileRecord(TypedDict):
    """What ran of one file, as JSON.

    ``ran`` is a number in hexadecimal digits. Bit 2 * n is set where the statement in line n ran,
    bit 2 * n + 1 where the condition of an ``if`` in line n was false and there is no ``else``.
    ``launched`` has the constexprs of each kernel that was launched, by the line of its ``def``,
    ``compiled`` the number of its specialisations.
    """

    ran: str
    launched: dict[str, Constexprs]
    compiled: dict[str, int]


def lines_of(ran: int) -> Iterator[int]:
    """Yield the lines that ran, from the bits of a record."""
    digits = bin(ran)[:1:-1]
    return (number for number in range((len(digits) + 1) // 2) if digits[2 * number] == "1")


class _Records:
    """What has run in this process since it was last cleared."""

    def __init__(self) -> None:
        self.marks: dict[str, bytearray] = {}
        self.launched: dict[tuple[str, int], dict[str, dict[str, None]]] = {}
        self.on_gpu: dict[int, Any] = {}


_RECORDS = _Records()


def clear() -> None:
    """Forget what has run."""
    for marks in _RECORDS.marks.values():
        marks[:] = bytes(len(marks))
    _RECORDS.launched.clear()
    _RECORDS.on_gpu.clear()


def recorded() -> dict[str, FileRecord]:
    """Return what has run since the last ``clear``, by file."""
    found: dict[str, FileRecord] = {}
    for file, marks in _RECORDS.marks.items():
        if any(marks):
            _of(found, file)["ran"] = f"{int(marks[::-1].translate(_DIGITS), 2):x}"
    for (file, line), values in _RECORDS.launched.items():
        _of(found, file)["launched"][str(line)] = {k: list(v) for k, v in values.items()}
    for function in _RECORDS.on_gpu.values():
        if (compiled := _compiled(function)) is not None:
            file, line, constexprs, count = compiled
            record = _of(found, file)
            record["launched"][str(line)] = constexprs
            record["compiled"][str(line)] = count
    return found


def _of(found: dict[str, FileRecord], file: str) -> FileRecord:
    return found.setdefault(file, {"ran": "", "launched": {}, "compiled": {}})


def mark_lines(interpreter: Any) -> None:
    """Have the interpreter, a module, mark the lines of its copies, and note its launches.

    In a release of Triton that makes its copies in another way, nothing is recorded.
    """
    rewriter = getattr(interpreter, "FunctionRewriter", None)
    transform = getattr(rewriter, "_transform_ast", None)
    if rewriter is None or transform is None or hasattr(transform, _MARKED):
        return

    @functools.wraps(transform)
    def transformed(self: Any, *arguments: Any) -> Any:
        tree = transform(self, *arguments)
        _mark(tree, self.filename, self.fn.__globals__)
        return tree

    setattr(transformed, _MARKED, True)
    rewriter._transform_ast = transformed  # noqa: SLF001  there is no public way to it
    interpreter.InterpretedFunction.rewritten_fn.clear()  # copies without marks
    executor = interpreter.GridExecutor
    executor.__call__ = _noted(executor.__call__)


def _mark(tree: ast.Module, file: str, names: dict[str, Any]) -> None:
    """Put a mark before each statement of a function."""
    if not file or _is_of_triton(file):
        return
    marks = _RECORDS.marks.setdefault(file, bytearray())
    name = f"_kernelproof_marks_{list(_RECORDS.marks).index(file)}"
    # Read through the globals of the function, as the names that the interpreter adds there.
    names[name] = marks
    last = 0
    for function in tree.body:
        last = max(last, getattr(function, "end_lineno", 0) or 0)
        _mark_blocks(function, name)
    ast.fix_missing_locations(tree)
    marks.extend(bytes(max(0, 2 * (last + 1) - len(marks))))


def _mark_blocks(node: ast.AST, name: str) -> None:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for statement in block:
            _mark_blocks(statement, name)
        if field in ("handlers", "cases"):
            continue
        marked = [(_store(name, 2 * each.lineno, each), each) for each in block if _runs(each)]
        plain = [each for each in block if not _runs(each)]  # a docstring comes first
        setattr(node, field, [*plain, *itertools.chain.from_iterable(marked)])
    if isinstance(node, ast.If) and not node.orelse:
        node.orelse = [_store(name, 2 * node.lineno + 1, node)]


def _runs(statement: ast.stmt) -> bool:
    """Whether a statement does something: one that is a constant is a docstring."""
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _store(name: str, place: int, at: ast.stmt) -> ast.stmt:
    array = ast.Name(id=name, ctx=ast.Load())
    element = ast.Subscript(value=array, slice=ast.Constant(value=place), ctx=ast.Store())
    made = ast.Assign(targets=[element], value=ast.Constant(value=1))
    ast.copy_location(made, at)
    made.end_lineno, made.end_col_offset = at.lineno, at.col_offset
    return made


@functools.cache
def _is_of_triton(file: str) -> bool:
    """Whether a file is of Triton's own library, which no implementation is judged for."""
    origin: str | None = getattr(importlib.util.find_spec("triton"), "origin", None)
    return origin is not None and Path(origin).parent in Path(file).parents


def _noted(launch: Any) -> Any:
    @functools.wraps(launch)
    def launched(executor: Any, *arguments: Any, **options: Any) -> Any:
        code = getattr(executor.fn, "__code__", None)
        if code is not None and not _is_of_triton(code.co_filename):
            place = (code.co_filename, code.co_firstlineno)
            launch_names.note(code.co_name)
            values = _RECORDS.launched.setdefault(place, {})
            passed = {
                **_defaults(executor.fn),
                **dict(zip(executor.arg_names, arguments, strict=False)),
                **options,
            }
            _note(values, {name: passed.get(name) for name in executor.constexprs})
        return launch(executor, *arguments, **options)

    return launched


@functools.cache
def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _note(values: dict[str, dict[str, None]], taken: Mapping[str, Any]) -> None:
    for name, value in taken.items():
        kept = values.setdefault(name, {})
        if len(kept) < MOST_VALUES:
            kept[_text(value)] = None


def _text(value: Any) -> str:
    value = getattr(value, "value", value)  # of tl.constexpr
    if isinstance(value, bool | int | float | str | None):
        return repr(value)[:MOST_CHARACTERS]
    return str(getattr(value, "__name__", value))[:MOST_CHARACTERS]


def watch_launches() -> None:
    """Note which compiled kernels are launched, once Triton is imported."""
    if (jit := sys.modules.get(JIT)) is not None:
        _watch(jit)


def _watch(jit: Any) -> None:
    function = getattr(jit, "JITFunction", None)
    run = getattr(function, "run", None)
    if function is None or run is None or hasattr(run, _MARKED):
        return

    @functools.wraps(run)
    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        _RECORDS.on_gpu[id(self)] = self  # its hash reads its source
        kernel = run(self, *arguments, **options)
        if (name := getattr(kernel, "name", None)) is not None:  # none of other releases
            launch_names.note(str(name), str(getattr(kernel, "hash", "")))
        return kernel

    setattr(noted, _MARKED, True)
    function.run = noted


def _compiled(function: Any) -> tuple[str, int, Constexprs, int] | None:
    """Return file, line, constexprs and number of specialisations of a compiled kernel.

    None where the release of Triton keeps them in another way, and for Triton's own kernels.
    """
    try:
        code = function.fn.__code__
        if _is_of_triton(code.co_filename):
            return None
        line = function.starting_line_number + _decorators(function.raw_src)
        kernels = [each for entry in function.device_caches.values() for each in entry[0].values()]
        values: dict[str, dict[str, None]] = {}
        for kernel in kernels:
            constants = dict(kernel.src.constants)
            at = {path[0] if isinstance(path, tuple) else path: v for path, v in constants.items()}
            _note(values, {function.arg_names[n]: at[n] for n in function.constexprs if n in at})
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError):
        return None
    return code.co_filename, line, {k: list(v) for k, v in values.items()}, len(kernels)


def _decorators(lines: Sequence[str]) -> int:
    """Return how many lines of a function's source stand before its ``def``."""
    return next(number for number, line in enumerate(lines) if line.lstrip().startswith("def "))
