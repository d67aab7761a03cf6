"""The attention of a model as questions to the rules, from the table of real values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...fixtures import read_real_values
from ...fixtures.suggestions import did_you_mean
from ...impl.gating.decision import PREFERENCE
from .rows import Row, rows_like

SHAPE = ("head_dim_qk", "head_dim_vo", "group_size", "window", "soft_cap", "sinks", "mask")
"""Fields of a feature that a model states."""
STATED = ("operation", *SHAPE)
"""Fields that are not asked beside a model."""
WITHOUT_CACHE = ("enc", "mla_prefill")
"""Kinds of layers that attend to the call's own keys: ragged prefills."""
NOT_ASKED = ("chunk", "encwin")
"""Kinds of layers whose masks no field of a feature states, with or without their figures."""
ASKED = {
    "causal", "sinks", "values_in_keys", "window_left", "logits_soft_cap", "sm_scale",
    "custom_mask", "mask_pattern",
}  # fmt: skip
"""Fields of a problem's mask and logits that a feature states, or that decide nothing."""
LATENT_PAGE = 64
"""Keys a page of a latent cache where the table has no number."""


def model_names() -> list[str]:
    """Return the families of the table that have attention."""
    rows = read_real_values()
    return sorted({row["family"] for row in rows if row["class"] == "attention"})


def model_rows(model: str, asked: Mapping[str, Any]) -> tuple[list[Row], tuple[str, ...]]:
    """Return the rows of a model's shapes, and the kinds of its layers that cannot be asked.

    Args:
        model: a family's name, however it is written, or the name of a public configuration.
        asked: further fields, which every call has.

    Raises:
        ValueError: no row of the table has this name, or a field is one that a model states.
    """
    if stated := next((name for name in STATED if name in asked), ""):
        message = f"{stated} is stated by --model: leave one of them out"
        raise ValueError(message)
    shapes: dict[str, dict[str, Any]] = {}
    left_out: dict[str, None] = {}
    for row in _layers(model):
        if shape := _shape(row):
            shapes.setdefault(_in_words(shape), shape)
        else:
            left_out[row["kind"]] = None
    for shape in _with_sinks(shapes.values()):
        shapes.setdefault(_in_words(shape), shape)
    found = [
        Row(f"{words}, {each.title}".removesuffix(", "), each.feature)
        for words, shape in shapes.items()
        for each in _calls(shape, asked)
    ]
    found.sort(key=lambda row: (row.feature.operation, _rank(row)))
    return found, tuple(left_out)


def _with_sinks(shapes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return windowed shapes with sinks, of a model that has either with the same heads.

    The table states sinks and windows in rows of their own, whether or not a layer has both.
    """
    known = list(shapes)
    with_sinks = [{**each, "sinks": True} for each in known if each["window"]]
    return [each for each in with_sinks if {**each, "window": False} in known]


def _calls(shape: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Row]:
    phase = asked.get("phase", "prefill")
    if shape["operation"] != "ragged_attention":
        yield from rows_like({**shape, **asked})
    elif phase == "prefill":
        yield from rows_like({**shape, **asked, "phase": phase})


def _rank(row: Row) -> int:
    known = PREFERENCE[row.feature.operation]
    return known.index(row.feature.backend) if row.feature.backend in known else len(known)


def _layers(model: str) -> list[dict[str, str]]:
    """Return the rows of attention of a family, or of a public configuration."""
    rows = [row for row in read_real_values() if row["class"] == "attention"]
    word = _plain(model)
    found = [row for row in rows if _plain(row["family"]) == word]
    # A configuration's name may leave out who published it.
    found = found or [
        row
        for row in rows
        if word in (_plain(row["source"]), _plain(row["source"].rpartition("/")[2]))
    ]
    if found:
        return found
    meant = did_you_mean(re.sub(r"\W", "_", model), model_names())
    table = "fixtures/real/values.tsv"
    message = f"model is {model!r}; {meant}it must be a family, or a configuration, of {table}"
    raise ValueError(message)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _shape(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a feature that a row states; none where they cannot state it."""
    # Imported here: completion asks for names only, and may not wait for torch.
    from ...impl.gating.of_problem import feature_of
    from ...properties.space.real_values import PLAIN, WINDOWS, fields_of_row
    from ...reference import AttentionProblem

    fields = fields_of_row(row)
    kind, page = row["kind"], int(row["page_size"] or 0)
    if kind in NOT_ASKED or any(fields[name] != PLAIN[name] for name in PLAIN.keys() - ASKED):
        return {}
    if kind in WINDOWS and fields["window_left"] < 0:  # only its number is not known
        fields["window_left"] = 1
    call = AttentionProblem(query_lens=(1,), seq_lens=(1,), page_size=page or LATENT_PAGE, **fields)
    feature = feature_of(call, "auto")
    found = {name: getattr(feature, name) for name in SHAPE}
    if page or feature.operation == "mla":
        found["page_size"] = feature.page_size
    operation = "ragged_attention" if kind in WITHOUT_CACHE else feature.operation
    return {"operation": operation, **found}


def _in_words(shape: Mapping[str, Any]) -> str:
    qk, vo = shape["head_dim_qk"], shape["head_dim_vo"]
    words = [f"dim {qk}" if qk == vo else f"dim {qk}/{vo}", f"group {shape['group_size']}"]
    words += [name.replace("_", " ") for name in ("window", "soft_cap", "sinks") if shape[name]]
    words += {"causal": [], "none": ["no mask"]}.get(shape["mask"], ["sparse"])
    return ", ".join(words)
