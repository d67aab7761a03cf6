"""Records of a run as JSON, from which the same records are made again.

The reports that people get leave out what only a run that goes on needs: each problem that a law
has judged, and what laws leave to those after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args

from ...impl.targets.refusal import Refusal
from ...properties.findings.claimed_space import AxisClaims
from ...properties.findings.coverage import Coverage, Gap
from ...properties.findings.kernels import FileRun, KernelRuns
from ...properties.findings.launched import Launched, LaunchedCall
from ...properties.findings.report import (
    CorpusReport,
    Finding,
    ImplementationReport,
    LawReport,
    Milestones,
    ProblemVerdict,
    RunReport,
    Separation,
)
from ...properties.isolation.leftovers import Left
from ...properties.search.candidate import Deadly
from ...properties.search.plan import Learned
from ...properties.space.axes import Axes
from ...properties.space.profiles import Cost
from ...properties.verdicts.verdict import Verdict
from ...reference import Problem

KIND = ""
"""Key under which the name of a record's class stands; no other dictionary of a run has it."""
PARTS = "of"
"""Key of the parts of a record that has no fields by name."""
KINDS: Mapping[str, type[Any]] = {
    each.__name__: each
    for each in (
        AxisClaims, Axes, CorpusReport, Cost, Counter, Coverage, Deadly, FileRun, Finding, Gap,
        ImplementationReport, KernelRuns, Launched, LaunchedCall, LawReport, Learned, Left,
        Milestones, ProblemVerdict, Refusal, RunReport, Separation, Verdict, dict, int, set, tuple,
        *get_args(Problem),
    )
}  # fmt: skip
"""The classes of records by name: a journal makes objects of no others."""
LARGEST = 2**63
"""JSON has numbers below this one: a larger one, such as the bits of a file's lines, is written in
hexadecimal digits."""


def to_data(value: Any) -> Any:  # noqa: ANN401  a record or a part of one
    """Return a record as JSON; fields that have their defaults are left out.

    Raises:
        TypeError: an object in it is of none of ``KINDS``.
    """
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        return value if abs(value) < LARGEST else {KIND: "int", PARTS: [f"{value:x}"]}
    if type(value) is list:
        return [to_data(each) for each in value]
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: to_data(each) for name, each in value.items()}
    kind = type(value).__name__
    if KINDS.get(kind) is not type(value):
        message = f"{kind} is no record that a journal keeps"
        raise TypeError(message)
    if is_dataclass(value):
        given = {
            each.name: to_data(own)
            for each in fields(value)
            if not _is_default(each, own := getattr(value, each.name))
        }
        return {KIND: kind, **given}
    parts = [*value.items()] if isinstance(value, dict) else value
    if isinstance(value, Refusal):
        parts = str(value), value.code, value.about
    return {KIND: kind, PARTS: [to_data(each) for each in parts]}


def _is_default(field: Field[Any], value: object) -> bool:
    made = field.default_factory
    default = field.default if made is MISSING else made()
    return type(value) is type(default) and value == default


def from_data(data: Any) -> Any:  # noqa: ANN401  JSON, and a record or a part of one
    """Return the record that ``to_data`` has written.

    Raises:
        KeyError, TypeError, ValueError: it has not written this.
    """
    if isinstance(data, list):
        return [from_data(each) for each in data]
    if not isinstance(data, dict):
        return data
    given = {name: from_data(each) for name, each in data.items() if name != KIND}
    if KIND not in data:
        return given
    kind = KINDS[data[KIND]]
    if is_dataclass(kind):
        return kind(**given)
    parts = given[PARTS]
    if issubclass(kind, dict):
        parts = [dict(parts)]
    elif kind is int:
        parts = [int(parts[0], 16)]
    elif kind not in (ProblemVerdict, Refusal):
        parts = [parts]
    return kind(*parts)
