"""The command list --coverage: the calls of FlashInfer, who uses them, and what judges them."""

from __future__ import annotations

import ast
import csv
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from rich import box
from rich.table import Table
from rich.text import Text

from ...fixtures import FLASHINFER_CALLS
from ...impl import Implementation
from ...impl.flashinfer_declarations.published import published_names
from ...impl.gating.book import RuleBook, load_rules
from ...impl.registry import find_implementation
from ...impl.targets.capability import CHIPS
from ...properties.findings.files import dumps
from ..bump.surface.engine_files import FLASHINFER, EngineFile, read_engine
from ..console.errors import UsageRefusedError
from ..console.terminal import console
from .adapter_calls import calls_of_adapters

SCHEMA = "kernelproof/coverage/1"
NEEDS = {
    "sm90": "runs on SM90",
    "cpu": "runs on a CPU",
    "chip": "needs another chip",
    "gpus": "needs several GPUs",
    "": "not classified",
}
"""What a call needs, in the words of the page."""
HERE = ("sm90", "cpu")
SM90 = 90
TRACE = "flashinfer-trace"
"""The backend of published references, which are no kernels."""


class Known(NamedTuple):
    """A row of the kept table.

    Attributes:
        needs: a key of ``NEEDS``.
        chips: compute capabilities, times ten, that a call which needs another chip runs on.
        references: the published references of the call.
        source: where it was read.
    """

    needs: str
    chips: tuple[int, ...]
    references: tuple[str, ...]
    source: str


UNKNOWN = Known("", (), (), "")


class Judge(TypedDict):
    """An implementation that calls a name.

    Its chips are those on which a support rule allows its backend some call of its operation.
    Without any no rule speaks of it, and it runs on a CPU.
    """

    implementation: str
    operation: str
    backend: str | None
    reference: bool
    chips: list[int]


class Call(TypedDict):
    """A name that FlashInfer publishes; ``uses`` are the engines that were given and use it."""

    name: str
    needs: str
    chips: list[int]
    source: str
    judged: str
    judges: list[Judge]
    uses: list[str]


class Coverage(TypedDict):
    """What ``list --coverage --json`` writes."""

    schema: str
    release: str
    installed: bool
    engines: list[str]
    calls: list[Call]


def print_coverage(
    engines: Sequence[Path], *, runs: Sequence[Path] = (), as_json: bool, verbose: bool
) -> int:
    """Print it.

    Raises:
        UsageRefusedError: an engine's source or a run cannot be read, or it holds no Python.
    """
    found = coverage(engines, runs)
    if as_json:
        sys.stdout.write(dumps(found))
    else:
        _print(found, verbose=verbose)
    return 0


def coverage(engines: Sequence[Path], runs: Sequence[Path] = ()) -> Coverage:
    """Return what FlashInfer publishes; with engines only what one of them uses.

    Args:
        engines: folders, wheels or files of engines' sources.
        runs: what ``published --json`` has written.

    Raises:
        UsageRefusedError: one of them cannot be read, or holds no Python.
    """
    used = {str(path): used_names(read_engine(path)) for path in engines}
    release, table = read_table()
    names = {*table}
    folder = _installed()
    if folder is not None:
        release = importlib.metadata.version("flashinfer-python")
        names |= published_names(folder)
    if used:
        names &= set[str]().union(*used.values())
    judges = [*_judges(), *(each for path in runs for each in _published_judges(path))]
    calls = [_call(name, table.get(name, UNKNOWN), judges) for name in sorted(names)]
    for each in calls:
        each["uses"] = [path for path, found in used.items() if each["name"] in found]
    return Coverage(
        schema=SCHEMA, release=release, installed=folder is not None, engines=[*used], calls=calls
    )


def read_table() -> tuple[str, dict[str, Known]]:
    """Return the release of the kept table, and its rows by name."""
    with FLASHINFER_CALLS.open(encoding="utf-8", newline="") as file:
        release = next(file).split()[-1]
        rows = list(csv.DictReader(file, delimiter="\t"))
    return release, {
        row["name"]: Known(
            row["needs"],
            tuple(map(int, row["chips"].split())),
            tuple(row["references"].split()),
            row["source"],
        )
        for row in rows
    }


def _installed() -> Path | None:
    """Return the folder of the installed FlashInfer, which is not imported."""
    spec = importlib.util.find_spec(FLASHINFER)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def used_names(files: Sequence[EngineFile]) -> frozenset[str]:
    """Return the last parts of the names that an engine imports or loads from FlashInfer.

    Whether each is called in the end is not followed: ``bump --uses`` does, for a minute.
    """
    naming = (each.data for each in files if FLASHINFER.encode() in (each.data or b""))
    return frozenset(name for data in naming for name in _names_in(data or b""))


def _names_in(source: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    nodes = [*ast.walk(tree)]
    modules = {name for node in nodes for name in _modules_bound(node)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and _is_flashinfer(node.module):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Attribute) and {*_ends(node.value)} & modules:
            yield node.attr
        elif isinstance(node, ast.Call):
            texts = [e.value for e in node.args if isinstance(e, ast.Constant)]
            named = {end for each in node.args[:1] for end in _ends(each)} & modules
            if named or any(isinstance(each, str) and _is_flashinfer(each) for each in texts):
                # Read by getattr, loaded lazily by module and name, or named with both in one text.
                yield from (str(each).rpartition(".")[2] for each in texts)


def _modules_bound(node: ast.AST) -> Iterator[str]:
    """Return the names that a statement binds to FlashInfer or to what lies in it."""
    if isinstance(node, ast.Import):
        for each in node.names:
            if _is_flashinfer(each.name):
                yield each.asname or FLASHINFER
    elif isinstance(node, ast.ImportFrom) and _is_flashinfer(node.module):
        yield from (each.asname or each.name for each in node.names)
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        texts = [e.value for e in node.value.args if isinstance(e, ast.Constant)]
        if any(isinstance(each, str) and _is_flashinfer(each) for each in texts):
            yield from (name for target in node.targets for name in _ends(target))


def _is_flashinfer(module: str | None) -> bool:
    return (module or "").partition(".")[0] == FLASHINFER


def _ends(node: ast.AST) -> Iterator[str]:
    """Return the first and the last part of a dotted name; nothing of any other expression."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name) and node.id != "self":
        yield node.id


def _judges() -> list[tuple[Judge, frozenset[str]]]:
    """Return the adapters to FlashInfer, each with the names that it may call."""
    book = load_rules()
    return [
        (_judge(find_implementation(name), book), called)
        for name, called in calls_of_adapters().items()
    ]


def _published_judges(path: Path) -> Iterator[tuple[Judge, frozenset[str]]]:
    """Yield what a run of ``published`` judged, each with the names of its call.

    Raises:
        UsageRefusedError: the file holds no such run.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        judged = [each for each in run["calls"] if each["state"] == "judged"]
        chips = [run["chip"]] if run.get("chip") else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"--published: {path} holds no run of published: {error}"
        raise UsageRefusedError(message) from error
    for each in judged:
        judge = Judge(
            implementation=f"published {each['name']}",
            operation="published",
            backend=None,
            reference=False,
            chips=chips,
        )
        # A wrapper's method is known by the wrapper.
        yield judge, frozenset(each["api"].split(".")[-2:])


def _judge(adapter: Implementation, book: RuleBook) -> Judge:
    allowed: set[int] = set()
    for rule in book.rules:
        speaks = adapter.operation in rule.operation and adapter.backend in rule.backend
        if speaks and rule.effect == "allow":
            allowed |= {chip for chip in rule.chips or CHIPS if chip is not None}
    return Judge(
        implementation=adapter.name,
        operation=adapter.operation,
        backend=adapter.backend,
        reference=adapter.backend == TRACE,
        chips=sorted(allowed),
    )


def _call(name: str, known: Known, judges: Sequence[tuple[Judge, frozenset[str]]]) -> Call:
    wanted = {name, *known.references}
    found = [judge for judge, called in judges if wanted & called]
    kernels = [each for each in found if not each["reference"]]
    runs_here = known.needs in (*HERE, "")
    if runs_here and any(SM90 in each["chips"] or not each["chips"] for each in kernels):
        judged = "yes"
    else:
        judged = "elsewhere" if kernels else "reference" if found else "no"
    return Call(
        name=name,
        needs=known.needs,
        chips=[*known.chips],
        source=known.source,
        judged=judged,
        judges=found,
        uses=[],
    )


def _print(found: Coverage, *, verbose: bool) -> None:
    out = console(sys.stdout)
    calls = found["calls"]
    of = f"FlashInfer {found['release']}" + ("" if found["installed"] else " (the kept table)")
    out.print(Text(f"{of}: {_users(found)}"))
    out.print(_counts(calls))
    if verbose:
        out.print(_every(calls))
        return
    judged = [each for each in calls if each["judged"] == "yes"]
    if judged:
        out.print(_judged(judged))
    for words, names in {
        "An adapter calls them, on chips other than SM90 only": _named(calls, "elsewhere"),
        "Only their published references are judged": _named(calls, "reference"),
        "Not judged, though SM90 or a CPU runs them": _named(calls, "no", HERE),
    }.items():
        if names:
            out.print(Text(f"{words}: {', '.join(names)}.\n"))
    out.print(Text("-v lists every call; --json writes all of it.", "dim"))


def _named(calls: Sequence[Call], judged: str, needs: Collection[str] = tuple(NEEDS)) -> list[str]:
    return [each["name"] for each in calls if each["judged"] == judged and each["needs"] in needs]


def _users(found: Coverage) -> str:
    calls = found["calls"]
    if not found["engines"]:
        return f"{len(calls)} calls are published; --uses PATH leaves those of an engine."
    counts = [
        f"{Path(path).name} uses {sum(path in each['uses'] for each in calls)}"
        for path in found["engines"]
    ]
    return f"{len(calls)} calls; {', '.join(counts)}."


COLUMNS = {
    "yes": "judged",
    "elsewhere": "bound",
    "reference": "reference",
    "no": "none",
}
"""Headings of what judges a call: a kernel on SM90 or a CPU; an adapter to kernels of other chips;
its published reference only; nothing."""


def _counts(calls: Sequence[Call]) -> Table:
    table = _table("", "calls", *COLUMNS.values())
    for needs, words in {**NEEDS, "all": "all"}.items():
        some = [each for each in calls if needs in (each["needs"], "all")]
        if some:
            counts = [sum(each["judged"] == judged for each in some) for judged in COLUMNS]
            table.add_row(words, *map(str, (len(some), *counts)))
    return table


def _judged(calls: Sequence[Call]) -> Table:
    table = _table("call", "judged as", "adapters", "SM")
    for each in calls:
        kernels = [judge for judge in each["judges"] if not judge["reference"]]
        operations = sorted({judge["operation"] for judge in kernels})
        chips = sorted({chip for judge in kernels for chip in judge["chips"]})
        operation = ", ".join(operations)
        table.add_row(Text(each["name"]), operation, str(len(kernels)), _ranges(chips))
    return table


def _every(calls: Sequence[Call]) -> Table:
    table = _table("call", "needs", "judged", "by", "source")
    for each in calls:
        by = ", ".join(judge["implementation"] for judge in each["judges"])
        needs = " ".join([NEEDS[each["needs"]], *map(str, each["chips"])])
        table.add_row(Text(each["name"]), needs, COLUMNS[each["judged"]], by, Text(each["source"]))
    return table


def _ranges(chips: Sequence[int]) -> str:
    """Return the first and the last of many chips, or a few."""
    few = 3
    some = " ".join(map(str, chips)) if len(chips) <= few else f"{chips[0]} to {chips[-1]}"
    return some or "CPU"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
