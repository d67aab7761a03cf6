"""JSON Schemas of the files that other programs read, made from the shapes that declare them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from ...impl.targets.schemas import CHOICES
from ...properties.findings.ledger import CASE_SCHEMA, Case
from ...reference.operations import PROBLEM_TYPES
from ...reference.problems.base import SCHEMA as PROBLEM_SCHEMA
from ..answers.journal import SCHEMA as JOURNAL_SCHEMA
from ..answers.journal import Head, Line
from ..bump.report.contents import SCHEMA as BUMP_SCHEMA
from ..bump.report.shape import Report as BumpReport
from ..reports.shape import SCHEMA as REPORT_SCHEMA
from ..reports.shape import Report

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class WrittenCase(Case):
    """A case: the problem that is judged again, and what the run that wrote it found."""

    description: list[str] = msgspec.field(default_factory=list)
    verdict: dict[str, Any] = msgspec.field(default_factory=dict)
    seed: int = 0
    versions: dict[str, str | None] = msgspec.field(default_factory=dict)


def _schema(about: str, shape: Any, *more: Any, problems: bool = False) -> dict[str, Any]:  # noqa: ANN401
    """Return the schema of a file.

    Args:
        about: what the file says of itself in its field ``schema``.
        shape: the type that declares what has this field.
        more: other types that the file may be of.
        problems: whether problems stand in it.
    """
    roots, parts = msgspec.json.schema_components((shape, *more), ref_template="#/$defs/{name}")
    named = parts[shape.__name__]
    named["properties"] = {**named["properties"], "schema": {"const": about}}
    named["required"] = sorted({*named["required"], "schema"})
    parts = {**parts, **(_problems() if problems else {})}
    made = {"$schema": DIALECT, "title": about, "anyOf": [*roots], "$defs": parts}
    found: dict[str, Any] = _readable(made)
    return found


def _problems() -> dict[str, Any]:
    """Return the schemas of problems by type, and of any one."""
    refs, parts = msgspec.json.schema_components(
        PROBLEM_TYPES.values(), ref_template="#/$defs/{name}"
    )
    for name, kind in PROBLEM_TYPES.items():
        part = parts[kind.__name__]
        known = {"schema": {"const": PROBLEM_SCHEMA}, "type": {"const": name}}
        part["required"], part["additionalProperties"] = [*known], False
        part["properties"] = {**known, **part["properties"]}
    return {**parts, "Problem": {"oneOf": [*refs]}}


def _readable(schema: Any) -> Any:  # noqa: ANN401  JSON
    """Return a schema with words in place of patterns that list them, and even docstrings."""
    if isinstance(schema, (list, tuple)):
        return [_readable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _readable(value) for name, value in schema.items()}
    if isinstance(words := found.get("description"), str):
        found["description"] = inspect.cleandoc(words)
    if isinstance(pattern := found.get("pattern"), str) and pattern in CHOICES:
        del found["pattern"]
        found["enum"] = list(CHOICES[pattern])
    return found


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "report.schema.json": partial(_schema, REPORT_SCHEMA, Report, problems=True),
    "bump.schema.json": partial(_schema, BUMP_SCHEMA, BumpReport),
    "case.schema.json": partial(_schema, CASE_SCHEMA, WrittenCase, problems=True),
    "journal.schema.json": partial(_schema, JOURNAL_SCHEMA, Head, Line),
}
"""What makes each schema, by the name of its file; a journal's is that of each of its lines."""
