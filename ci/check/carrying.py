"""A function as a file that a worker can import: its source, and all that it uses by name.

Nothing can import a notebook, and to import a script is to run it again. What such a function uses
of importable modules stays a reference to them.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import itertools
import linecache
import math
import pickle
import re
import symtable
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

from ...impl import Implementation, implementation
from ...impl.protocol import Operation
from ...impl.registry import NOT_OF_USERS
from ...properties.findings.cases import LONGEST_NAME, from_here
from ...properties.findings.files import Output
from ..options import FOLDER

CALLS = FOLDER.parent / "calls"
"""Folder of the files that hold functions of notebooks, beside that of the cases."""
NAME = "checked"
"""Name of the implementation in the file, where it has none of its own."""
MOST_BYTES = 1 << 20
"""Most bytes of a pickled value that a file holds."""
LITERALS = (bool, int, float, str, bytes, tuple, list, dict, set, type(None))
FUTURE = "from __future__ import annotations\n"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


class CarryError(ValueError):
    """What a worker cannot be given; the message names it."""


def reference_of(value: Any) -> str:  # noqa: ANN401  a function or an implementation
    """Return MODULE:NAME, or FILE.py:NAME, by which a worker finds it; empty where nothing does."""
    if (home := _home_of(value)) is None:
        return ""
    module, name = home
    file = Path(getattr(sys.modules[module], "__file__", None) or "")
    # A name is looked for in the current folder first, by the shell that replays a case too.
    if (
        "." in module
        or file.suffix != ".py"
        or file.parent in (Path.cwd(), *map(Path, NOT_OF_USERS))
    ):
        return f"{module}:{name}"
    return f"{from_here(file)}:{name}"


def written(made: Implementation, folder: Path) -> str:
    """Write a file that makes an implementation, and return FILE.py:NAME.

    Raises:
        CarryError: something that it uses cannot be carried; all such things are named.
        OutputError: the file cannot be written.
    """
    carrier = _Carrier()
    function = _function_in(made)
    own = getattr(function, "__name__", NAME)
    # Other functions of a notebook may speak of it by its name.
    name = own if getattr(function, "__globals__", {}).get(own) is made else NAME
    carrier.bind(name, made)
    if carrier.failures:
        message = f"{made.name} cannot be taken to another process: {'; '.join(carrier.failures)}"
        raise CarryError(message)
    text = carrier.text()
    word = re.sub(r"\W+", "_", made.name, flags=re.ASCII)[:LONGEST_NAME]
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder / f"{word}_{digest}.py"
    Output("", path).write(text)
    return f"{from_here(path)}:{name}"


class _Carrier:
    """Collects the code of values by name, each behind what it uses."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._bound: dict[str, Any] = {}
        self._words: dict[str, str] = {}  # for names that nobody has given
        self._parts: list[str] = []
        self._folders: dict[str, None] = {}
        self._future = False

    def text(self) -> str:
        """Return the code."""
        first = ['"""Written by kernelproof.check: a function and what it uses."""\n']
        first += [FUTURE] * self._future
        if self._folders:
            first.append(f"import sys\n\nsys.path += {[*self._folders]!r}\n")
        return "\n".join([*first, *self._parts])

    def bind(self, name: str, value: Any) -> None:  # noqa: ANN401  anything that a function uses
        """Add code behind which a name stands for a value."""
        if name in self._bound:
            if not _is_same(self._bound[name], value):
                self.failures.append(f"{name} stands for two things in what it uses: rename one")
            return
        self._bound[name] = value
        try:
            self._add(name, value)
        except CarryError as error:
            self.failures.append(f"{self._words.get(name, name)} {error}")

    def _add(self, name: str, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, ModuleType):
            if not _is_importable(value.__name__):
                message = f"is the module {value.__name__}, which no other process can import"
                raise CarryError(message)
            self._note_folder(value.__name__)
            alias = "" if name == value.__name__ else f" as {name}"
            self._parts.append(f"import {value.__name__}{alias}\n")
        elif (home := _home_of(value)) is not None:
            module, path = home
            self._note_folder(module)
            alias = "" if name == path else f" as {name}"
            plain = f"from {module} import {path}{alias}\n"
            deep = f"{name} = __import__({module!r}, fromlist=['_']).{path}\n"
            self._parts.append(deep if "." in path else plain)
        elif isinstance(value, Implementation):
            self._add_implementation(name, value)
        elif isinstance(value, type) or _function_in(value) is not None:
            self._define(name, value)
        else:
            self._parts.append(f"{name} = {self._expression(value)}\n")

    def _add_implementation(self, name: str, made: Implementation) -> None:
        """Add the function of an implementation, and what was declared of it."""
        function = f"{name}_function"
        self._words[function] = "it"
        self.bind(function, made.function)
        given = {"provider" if n == "declared_provider" else n: v for n, v in _declared(made)}
        for option, value in given.items():
            self._words[f"{name}_{option}"] = option
            self.bind(f"{name}_{option}", value)
        self.bind("implementation", implementation)
        words = ", ".join(f"{option}={name}_{option}" for option in given)
        self._parts.append(f"{name} = implementation({made.operation!r}, {words})({function})\n")

    def _define(self, name: str, value: Any) -> None:  # noqa: ANN401  a function, class or wrapper
        """Add the definition of a function or class, behind what it uses."""
        function = _function_in(value)
        if function is None:
            message = f"is {_what(value)}, of which no source is found: define it in a file"
            raise CarryError(message)
        node, text = _source_of(function, value if isinstance(value, type) else None)
        scope = {**function.__globals__, **_closure_of(function)}
        made_by_decorators = False
        if isinstance(node, DEFINITIONS):
            if node.decorator_list and _is_ours(node.decorator_list[0], scope):
                del node.decorator_list[0]  # an implementation says itself what it declares
                text = ast.unparse(node) + "\n"
            made_by_decorators = bool(node.decorator_list)
        if value is not function and not isinstance(value, type) and not made_by_decorators:
            message = f"is {_what(value)}, made by a call: use a decorator, or call it in a def"
            raise CarryError(message)
        if shared := _assigned_around(node, function):
            message = f"assigns {shared}, which is a variable of the function around it"
            raise CarryError(message)
        future = function.__code__.co_flags & __future__.annotations.compiler_flag
        self._future |= bool(future)
        defaults = self._without_defaults(name, node, function) if value is function else None
        if defaults is not None:
            text = ast.unparse(node) + "\n"
        for used in _names_in(text, future=bool(future)):
            if used in scope and used not in (name, getattr(node, "name", "")):
                self.bind(used, scope[used])
        # What `import a.b` binds is a, which has no b where that was not imported.
        self._parts += [f"__import__({each!r})\n" for each in _submodules_in(text, scope)]
        if isinstance(node, ast.Lambda):
            text = f"{name} = {text}"
        self._parts.append(text)
        self._name(name, getattr(node, "name", name), value)
        self._parts += [f"{name}.{each} = {code}\n" for each, code in (defaults or {}).items()]

    def _name(self, name: str, own: str, value: Any) -> None:  # noqa: ANN401  as of ``_define``
        """Bind what is defined by its own name to the one that it has here.

        Raises:
            CarryError: its own name stands for something else.
        """
        if own == name:
            return
        before = self._bound.setdefault(own, value)
        if not _is_same(before, value) and getattr(before, "function", None) is not value:
            message = f"is defined as {own}, which stands for something else here: rename one"
            raise CarryError(message)
        self._parts.append(f"{name} = {own}\n")

    def _without_defaults(
        self,
        name: str,
        node: ast.AST,
        function: Any,  # noqa: ANN401
    ) -> dict[str, str] | None:
        """Take defaults that are no literals from a definition, which had a value when it was made.

        Returns:
            Code for ``__defaults__`` and ``__kwdefaults__``; None where each is a literal.
        """
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            return None
        given = [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        if all(isinstance(each, ast.Constant) for each in given):
            return None
        nothing = ast.Constant(None)
        node.args.defaults = [nothing for _ in node.args.defaults]
        node.args.kw_defaults = [each and nothing for each in node.args.kw_defaults]
        positional, named = [], []
        for place, default in enumerate(function.__defaults__ or ()):
            self._words[f"{name}_default_{place}"] = "a default"
            self.bind(f"{name}_default_{place}", default)
            positional.append(f"{name}_default_{place},")
        for option, default in (function.__kwdefaults__ or {}).items():
            self._words[f"{name}_default_{option}"] = f"the default of {option}"
            self.bind(f"{name}_default_{option}", default)
            named.append(f"{option!r}: {name}_default_{option}")
        return {
            "__defaults__": f"({' '.join(positional)})",
            "__kwdefaults__": f"{{{', '.join(named)}}}",
        }

    def _expression(self, value: Any) -> str:  # noqa: ANN401
        """Return code for a value: as it is written, else pickled."""
        if type(value) is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        try:
            if type(value) in LITERALS and ast.literal_eval(repr(value)) == value:
                return repr(value)
        except (ValueError, SyntaxError):  # something else inside of a list
            pass
        try:
            data = pickle.dumps(value)
        except Exception as error:  # objects raise what they like
            message = f"is {_what(value)}, which cannot be pickled ({error}): make it in a function"
            raise CarryError(message) from error
        if len(data) > MOST_BYTES:
            message = f"is {_what(value)} of {len(data):,} bytes: make it in a function"
            raise CarryError(message)
        if b"__main__" in data:
            message = f"is {_what(value)}, whose class no other process can import"
            raise CarryError(message)
        return f"__import__('pickle').loads({data!r})"

    def _note_folder(self, module: str) -> None:
        """Have the file find a module that is the user's own, wherever a case is replayed."""
        top = sys.modules[module.partition(".")[0]]
        file = getattr(top, "__file__", None)
        if file is None or file.startswith(NOT_OF_USERS):
            return
        folder = Path(file).resolve().parents[1 if hasattr(top, "__path__") else 0]
        self._folders[str(folder)] = None


def _declared(made: Implementation) -> Iterator[tuple[str, Any]]:
    """Yield the name of an implementation, and each option that is not as without a word."""
    plain = implementation(cast("Operation", made.operation), name=f"not {made.name}")(
        made.function
    )
    for each in fields(Implementation):
        value = getattr(made, each.name)
        if value is not getattr(plain, each.name) and value != getattr(plain, each.name):
            yield each.name, value


def _is_same(one: Any, other: Any) -> bool:  # noqa: ANN401
    plain = (bool, int, float, str, bytes, type(None))
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)


def _what(value: Any) -> str:  # noqa: ANN401
    return f"a {type(value).__name__}"


def _is_importable(name: str) -> bool:
    """Whether a process with this one's ``sys.path`` imports this very module by its name."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return False
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    path = origin = None
    for part in itertools.accumulate(name.split("."), "{}.{}".format):
        specs = (each.find_spec(part, path) for each in sys.meta_path if hasattr(each, "find_spec"))
        if (spec := next(filter(None, specs), None)) is None:
            return False
        path, origin = spec.submodule_search_locations, spec.origin
    return origin == getattr(module, "__file__", None)


def _home_of(value: Any) -> tuple[str, str] | None:  # noqa: ANN401
    """Return the importable module of a value and its name there; None where there is none."""
    made = isinstance(value, Implementation)
    module = getattr(value.function if made else value, "__module__", None)
    if not isinstance(module, str) or not _is_importable(module):
        return None
    if made:
        names = (name for name, each in vars(sys.modules[module]).items() if each is value)
        return next(((module, name) for name in names), None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None


def _function_in(value: Any) -> FunctionType | None:  # noqa: ANN401
    """Return the function inside of decorators' wrappers, or one of a class; None if none is."""
    if isinstance(value, type):
        inside = map(_function_in, vars(value).values())
        # Those that were made while running, as a dataclass's __init__, have no source.
        return next((f for f in inside if f and linecache.getlines(f.__code__.co_filename)), None)
    for _ in range(100):
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            return value
        names = ("__wrapped__", "function", "fn")  # of functools, of ours, of Triton's
        wrapped = (each for name in names if callable(each := getattr(value, name, None)))
        value = next(wrapped, None)
        if value is None:
            return None
    return None


def _source_of(function: FunctionType, owner: type | None) -> tuple[Definition, str]:
    """Return the definition of a function, or of the class that it is a method of.

    Raises:
        CarryError: its source is not kept, or there are several lambdas in its line.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    where = f"{code.co_filename}:{code.co_firstlineno}"
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        lines, tree = [], ast.Module([], [])
    found = [
        each for each in ast.walk(tree) if _is_of(each, code.co_firstlineno, code.co_name, owner)
    ]
    if len(found) > 1:
        message = f"is one of several lambdas at {where}: define it by def"
        raise CarryError(message)
    if not found:
        message = f"has no source ({where}): define it in a file, or in a cell of a notebook"
        raise CarryError(message)
    node: Any = found[0]
    if isinstance(node, ast.Lambda) or node.col_offset:
        return node, ast.unparse(node) + "\n"
    return node, "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip() + "\n"


def _is_of(node: ast.AST, line: int, name: str, owner: type | None) -> bool:
    """Whether a node defines the function that begins at a line, or the class around it."""
    if owner is not None:
        inside = isinstance(node, ast.ClassDef) and node.name == owner.__name__
        return inside and node.lineno <= line <= (node.end_lineno or 0)  # type: ignore[attr-defined]
    if isinstance(node, ast.Lambda):
        return name == "<lambda>" and node.lineno == line
    return isinstance(node, DEFINITIONS) and node.name == name and _first_line(node) == line


def _first_line(node: Any) -> int:  # noqa: ANN401  a definition
    return int(min([node.lineno, *(each.lineno for each in node.decorator_list)]))


def _is_ours(decorator: ast.expr, scope: dict[str, Any]) -> bool:
    """Whether a decorator is ``implementation(...)``, by whatever name it was imported."""
    words = ast.unparse(decorator.func).split(".") if isinstance(decorator, ast.Call) else [""]
    found = scope.get(words[0])
    for word in words[1:]:
        found = getattr(found, word, None)
    return found is implementation


def _closure_of(function: FunctionType) -> dict[str, Any]:
    """Return what a function uses of the functions around it."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # One that is assigned later is empty, and equal to no other.
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def _assigned_around(node: ast.AST, function: FunctionType) -> str:
    """Return a variable of the functions around one that this one assigns; empty if none."""
    named = {
        name for each in ast.walk(node) if isinstance(each, ast.Nonlocal) for name in each.names
    }
    return min(named.intersection(function.__code__.co_freevars), default="")


def _submodules_in(text: str, scope: dict[str, Any]) -> list[str]:
    """Return the modules that code reaches as attributes of others."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(text)):
        root, *path = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        module = scope.get(root)
        name = ".".join([module.__name__, *path]) if isinstance(module, ModuleType) else ""
        if _is_importable(name):
            found[name] = None
    return list(found)


def _names_in(text: str, *, future: bool) -> list[str]:
    """Return the names that code takes from around it.

    Args:
        text: the code.
        future: whether annotations are text there, whose names nothing takes.
    """
    found: dict[str, None] = {}

    def visit(table: symtable.SymbolTable) -> None:
        outermost = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() if outermost else symbol.is_global():
                found[symbol.get_name()] = None
        for inner in table.get_children():
            visit(inner)

    visit(symtable.symtable(FUTURE * future + text, "<carried>", "exec"))
    return list(found)
