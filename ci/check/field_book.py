"""The page of fields: of each operation's problems, and of what its implementations are given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from ... import reference
from ...impl.features import DRAWN, PROMISED
from ...properties.space.axes import FIELDS, all_axes
from ...properties.space.real_values import OF_LAYERS, TABLE, layers_of, rows_of
from ...reference.operations import OPERATIONS

HEAD = """\
# Fields of problems and inputs

For whoever writes an adapter, reads a case or restricts a run with `--only FIELD=VALUE`. Each
operation has two tables. A *problem* is one call as JSON: cases hold it, and `supports=` gets it.
The *inputs* are the tensors and options that the kernel gets, under the oracle's own names. The
last tables hold the words of `features=`.

Values are those that problems are usually drawn with; `--only` takes any other that a problem may
have. A field that has one value throughout an operation is left out. Written by
`kernelproof list --markdown fields.md` from the dataclasses, their docstrings and the tables of
axes.
"""
ORACLE = {"merge_state": "merge_states", "prepare_steps": "prepare_batch"}
"""Names of the oracle's functions, where they are not the operation's."""
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w[\w, \n]*): (.*(?:\n {8}.*|\n(?= {4}))*)", re.MULTILINE)
ELSEWHERE = re.compile(r"^as in `(\w+)`")
MOST_VALUES = 14
"""Most values of a field that a row lists; of more, the first ones and the last."""


def field_book() -> str:
    """Return the page as Markdown."""
    sections = ["\n".join(_section(name)) for name in OPERATIONS]
    return "\n".join([HEAD, *sections, *_features()])


def _features() -> Iterator[str]:
    """Yield the words that an implementation may name in ``features``."""
    for heading, words in (("Features that are drawn only where named", DRAWN),
                           ("Features that change or promise something", PROMISED)):  # fmt: skip
        yield from (f"## {heading}", "", "| word | what it means |", "|---|---|")
        yield from (_row(f"`{word}`", meaning) for word, meaning in words.items())
        yield ""


def _section(operation: str) -> list[str]:
    entry = OPERATIONS[operation]
    meanings = _described(entry.problem)
    lines = [
        f"## {operation}",
        "",
        f"### Problems of {operation}",
        "",
        f"`{entry.problem.__name__}`.",
    ]
    lines += ["", "| field | default | values drawn | what it is |", "|---|---|---|---|"]
    drawn = _drawn(operation)
    lines += [
        _row(f"`{each.name}`", _default(each), values, meanings[each.name])
        for each in fields(entry.problem)
        if (values := drawn.pop(each.name, "any")) and each.name != "operation"
    ]
    lines += ["", real] if (real := _of_models(operation)) else []
    drawn |= _pairs(operation)
    if drawn:
        lines += ["", "Further words of `--only`, each of which sets several fields:", ""]
        lines += [f"- `{name}`: {values}" for name, values in drawn.items()]
    oracle = getattr(reference, ORACLE.get(operation, operation))
    meanings = {**_described(oracle), **_described(entry.inputs)}
    lines += ["", f"### Inputs of {operation}", "", f"`{entry.inputs.__name__}`."]
    lines += ["", "| attribute | what it is |", "|---|---|"]
    lines += [_row(f"`{each.name}`", meanings[each.name]) for each in fields(entry.inputs)]
    return [*lines, ""]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(field: Field[Any]) -> str:
    return "" if field.default is MISSING else f"`{_spelled(field.default)}`"


def _spelled(value: object) -> str:
    """Return a value as JSON and ``--only`` spell it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_spelled, value)) + "]"
    return str(value) if value != "" else '""'


def _drawn(operation: str) -> dict[str, str]:
    """Return the values of each field that are drawn, and those of axes that are no field."""
    found = {}
    for axis, values in all_axes(operation).items():
        if axis == "real":
            continue
        columns = list(zip(*values, strict=False)) if axis in FIELDS else [values]
        for name, column in zip(FIELDS.get(axis, (axis,)), columns, strict=False):
            found[name] = _listed(list(dict.fromkeys(column)))
    return found


def _pairs(operation: str) -> dict[str, str]:
    """Return the axes of two numbers each, which are named as 64x32, and their usual values."""
    axes = all_axes(operation)
    return {
        name: f"{' and '.join(FIELDS[name])}: "
        + _listed(["x".join(map(str, each)) for each in axes[name]])
        for name in ("head_dims", "sizes")
        if name in axes
    }


def _of_models(operation: str) -> str:
    """Return the ranges of the values that rows of the table of models have."""
    if "real" not in all_axes(operation):
        return ""
    if operation in OF_LAYERS:
        return _of_layers(operation)
    rows = rows_of(operation)
    several = [real.values(operation) for real in rows]
    ranges = {"key-value heads": [n for real in rows for n in real.kv_heads]}
    if operation != "append_paged_kv":
        ranges["query heads of each"] = [n for real in rows for n in real.groups]
    for name in ("page_size", "window_left", "logits_soft_cap", "chunk"):
        ranges[f"`{name}`"] = [v for each in several if (v := each.get(name, 0)) and v > 0]
    dims = sorted({each["head_dims"][:2] for each in several})
    said = [f"{words} {_range(found)}" for words, found in ranges.items() if found]
    first, last = (f"{qk} and {vo}" for qk, vo in (dims[0], dims[-1]))
    return (
        f"At most one problem in eight has a row of `{TABLE}`, which other values are drawn "
        f"beside: {len(rows)} rows; head dims from {first} to {last}; {'; '.join(said)}."
    )


def _of_layers(operation: str) -> str:
    """Return the ranges of the routers, or the experts, that rows of the table have."""
    layers = layers_of(operation)
    numbers = ("num_experts", "top_k", "num_groups", "topk_groups", "scaling_factor")
    found = {
        name: [layer.fields[name] for layer in layers if name in layer.fields]
        for name in (*numbers, "method", "activation")
    }
    said = [f"`{name}` {_range(found[name])}" for name in numbers if found[name]]
    said += [
        f"`{name}` {', '.join(sorted({*found[name]}))}"
        for name in ("method", "activation")
        if found[name]
    ]
    if operation == "moe":
        hidden, inter = zip(*(layer.sizes for layer in layers), strict=True)
        said.append(
            f"`hidden` {_range(hidden)} and `inter` {_range(inter)}, smaller where too dear"
        )
    return (
        f"About one problem in eight has a row of `{TABLE}`, in place of its own values: "
        f"{len(layers)} rows; {'; '.join(said)}."
    )


def _range(numbers: Sequence[float]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _listed(values: Sequence[object]) -> str:
    shown = [f"`{_spelled(value)}`" for value in values]
    if len(shown) > MOST_VALUES:
        shown = [*shown[: MOST_VALUES - 2], "…", shown[-1]]
    return ", ".join(shown) if len(shown) > 1 else ""


def _described(documented: Any) -> dict[str, str]:  # noqa: ANN401  a class or a function
    """Return what a docstring says of each argument or attribute, those of base classes included.

    An entry that points to another function is replaced by what that one says.
    """
    found: dict[str, str] = {}
    bases = inspect.getmro(documented) if inspect.isclass(documented) else (documented,)
    for each in reversed(bases):
        found.update(_entries(each))
    for name, text in found.items():
        if (pointer := ELSEWHERE.match(text)) is not None:
            there = dict(_entries(getattr(reference, pointer[1])))
            found[name] = there.get(name, text)
    return found


def _entries(documented: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401  a class or a function
    section = SECTION.search(inspect.cleandoc(documented.__doc__ or "") + "\n")
    for entry in ENTRY.finditer(section[1] if section else ""):
        text = " ".join(entry[2].split()).rstrip(".")
        for name in re.split(r",\s*", entry[1]):
            yield name, text.replace("``", "`")
