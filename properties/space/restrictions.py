"""Looking at a part of the space of problems: ``--only FIELD=VALUE[,VALUE...]``.

A field is a problem's, or an axis of several fields (``phase``, ``head_dims`` such as 192x128). A
number need not be one that is usually drawn: any that a problem may have will do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...fixtures.suggestions import did_you_mean
from ...impl.gating.feature import DTYPE_ALIASES
from ...reference import Problem
from ...reference.operations import OPERATIONS as REFERENCE
from ...reference.problems.cache_names import cache_fits, multiples_of
from ...reference.problems.moe import MULTIPLES
from .attention_axes import PAIR, head_fields
from .axes import all_axes, example, has
from .given_lengths import LENGTHS, conflict, has_lengths
from .operations import OPERATIONS
from .real_values import OF_LAYERS, layers_of, rows_of

PARTS = {
    "head_dim_qk": ("head_dims", 0),
    "head_dim_vo": ("head_dims", 1),
    "kv_cache": ("caches", 0),
    "q_dtype": ("caches", 1),
    "hidden": ("sizes", 0),
    "inter": ("sizes", 1),
    "quantized": ("quantisation", 0),
    "quantized_hidden": ("quantisation", 1),
    "num_groups": ("groups", 0),
    "topk_groups": ("groups", 1),
    "pad_to": ("widths", 0),
    "pad_states": ("widths", 1),
}
"""Fields whose values are drawn together: their axis, and their place in its values."""
UNSPOKEN = ("caches", "quantisation", "groups", "real")
"""Axes that are named only by their fields."""
NUMBERS = ("head_dims", "sizes", "groups", "widths")
"""Axes of which any pair may be drawn that a problem can have, not only the usual ones."""


LACKS = "have no"


class OnlyError(ValueError):
    """A part of the space that does not exist; the message names option, field and value."""

    def __init__(self, message: str) -> None:
        super().__init__(f"--only: {message}")


@dataclass(frozen=True)
class Only:
    """The part of the space that ``--only`` asks for; all of it by default.

    Attributes:
        values: allowed values by field, in the order in which they were given.
    """

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, texts: Sequence[str]) -> Only:
        """Read FIELD=VALUE[,VALUE...]; a field that is given twice has the values of both.

        Raises:
            OnlyError: an unknown field or value, or fields whose values never meet.
        """
        found: dict[str, tuple[Any, ...]] = {}
        for text in texts:
            name, equals, rest = text.partition("=")
            known = _known()
            meant = "" if name in known else did_you_mean(name, known)
            if not equals:
                message = f"{text!r} is no FIELD=VALUE[,VALUE...]; {meant}".rstrip("; ")
                raise OnlyError(message)
            if name not in known and any(
                name in each.problem.__dataclass_fields__ for each in REFERENCE.values()
            ):
                there = f"these may be chosen: {', '.join(sorted(known))}"
                message = f"{name} of a problem follows from others, or from the seed; {meant}"
                message += there
                raise OnlyError(message)
            if name not in known:
                there = f"there are {', '.join(sorted(known))}"
                message = f"{name!r} is no field of a problem; {meant}{there}"
                raise OnlyError(message)
            if name in LENGTHS:
                found[name] = _lengths(name, rest, twice=name in found)
                continue
            values = [_value(name, word.strip()) for word in rest.split(",")]
            found[name] = tuple(dict.fromkeys([*found.get(name, ()), *values]))
        only = cls(found)
        # Any operation that has such problems is enough: one command may check kernels of several.
        refused = [error for operation in OPERATIONS if (error := only.refusal(operation))]
        if len(refused) == len(OPERATIONS):
            # What an operation with all of these fields says is more than that one is not there.
            raise next((each for each in refused if LACKS not in str(each)), refused[0])
        return only

    def refusal(self, operation: str) -> OnlyError | None:
        """Return why no problem of an operation is asked for; None if some are."""
        try:
            self.axes(operation)
        except OnlyError as error:
            return error
        return None

    def axes(self, operation: str) -> dict[str, tuple[Any, ...]]:
        """Return the axes of an operation, with no other values than these.

        Raises:
            OnlyError: the operation's problems have no such field, or none of its values.
        """
        # Fields narrow one after another: head_dim_qk, then head_dim_vo of what is left.
        kept = all_axes(operation)
        lengths = {name: wanted for name, wanted in self.values.items() if name in LENGTHS}
        for name, wanted in self.values.items():
            if name in lengths and has_lengths(operation):
                if why := conflict(operation, lengths):
                    raise OnlyError(why)
                kept[name] = (wanted,)
                continue
            axis, place = PARTS.get(name, (name, None))
            if axis not in kept:
                message = f"problems of {operation} {LACKS} {name}"
                raise OnlyError(message)
            if place is not None:
                kept[axis] = _pairs(operation, name, kept[axis], wanted)
            else:
                kept[axis] = _among(operation, name, kept[axis], wanted)
            if not kept[axis]:
                words = ", ".join(map(word_of, wanted))
                others = "" if place is None else ", with the other values that were asked for"
                message = f"no problem of {operation} has {name}={words}{others}"
                raise OnlyError(message)
        if "real" in kept:
            kept["real"] = tuple(each for each in kept["real"] if self._has_row(operation, each))
        _drop_what_no_cache_fits(operation, kept)
        if {"sizes", "hidden", "inter"} & self.values.keys():
            _drop_what_no_size_fits(operation, kept)
        return kept

    def _has_row(self, operation: str, number: int) -> bool:
        """Whether a row of what models have has none but the wanted values; 0 stands for none."""
        if not number:
            return True
        if operation in OF_LAYERS:
            # Sizes of a row are made smaller as the work of a problem asks for.
            own = layers_of(operation)[number - 1].fields
            return not {"sizes", "hidden", "inter"} & self.values.keys() and all(
                own[name] in values for name, values in self.values.items() if name in own
            )
        real = rows_of(operation)[number - 1]
        fields = real.problem_fields(operation)
        # Ranks have several numbers of heads.
        if {"num_kv_heads", "group_size"} & self.values.keys():
            return False
        dims = self.values.get("head_dims", ())
        return (not dims or real.head_dims in dims or real.head_dims[:PAIR] in dims) and all(
            fields[name] in values for name, values in self.values.items() if name in fields
        )

    def meets(self, problem: Problem) -> bool:
        """Whether a problem has one of the wanted values in each field; none has a phase."""
        return all(
            _has_lengths(problem, name, values)
            if name in LENGTHS
            else any(has(problem, name, value) for value in values)
            for name, values in self.values.items()
        )

    def __str__(self) -> str:
        """Return what is asked for as it is written on the command line."""
        return " ".join(
            f"{name}={','.join(map(word_of, each))}" for name, each in self.values.items()
        )


WHOLE_SPACE = Only()


def _lengths(name: str, words: str, *, twice: bool) -> tuple[int, ...]:
    """Read the lengths of all requests, or of each one.

    Raises:
        OnlyError: they are no numbers, or are given a second time.
    """
    if twice:
        message = f"{name} is given twice; write the lengths of one batch behind each other: 1,5"
        raise OnlyError(message)
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        message = (
            f"{name}={words} is no length; give one number for every request, or one for each "
            "request, as in 8200,17"
        )
        raise OnlyError(message) from None


def _has_lengths(problem: Problem, name: str, wanted: tuple[int, ...]) -> bool:
    """Whether every request has the one length, or each its own."""
    found = getattr(problem, name, ())
    return set(found) == {*wanted} if len(wanted) == 1 else found == wanted


def _among(
    operation: str, name: str, axis: tuple[Any, ...], wanted: Collection[Any]
) -> tuple[Any, ...]:
    """Return the wanted values of an axis, the usual ones first, then other numbers."""
    usual = tuple(value for value in axis if value in wanted)
    # An axis of one value is not free; appending takes powers of two for scales alone.
    fixed = len(axis) == 1 or name in OPERATIONS[operation].fixed
    others = () if fixed else tuple(value for value in wanted if value not in axis)
    return usual + others


def _pairs(
    operation: str, name: str, axis: tuple[Any, ...], wanted: Collection[Any]
) -> tuple[Any, ...]:
    """Return the pairs of an axis with the wanted values of a field: usual ones, then others."""
    whole, place = PARTS[name]
    found = [pair for pair in axis if pair[place] in wanted]
    if whole not in NUMBERS:
        return tuple(found)
    for number in wanted:
        if any(pair[place] == number for pair in found):
            continue
        others = list(dict.fromkeys(pair[1 - place] for pair in axis))
        if len(others) > 1:  # as hidden and inter of gpt-oss are both 2880
            others.insert(0 if whole == "head_dims" else len(others), number)
        pairs = [(number, each) if place == 0 else (each, number) for each in others]
        found += [pair for pair in pairs if _exists(operation, whole, pair)]
    return tuple(dict.fromkeys(found))


def _drop_what_no_cache_fits(operation: str, kept: dict[str, tuple[Any, ...]]) -> None:
    """Keep the head dims and page sizes that some of the wanted caches can have."""
    names = list(dict.fromkeys(pair[0] for pair in kept.get("caches", ())))
    if not names or not all(multiples_of(name) for name in names):
        return
    free = {"head_dim_qk": 0, "head_dim_vo": 0, "page_size": 0}
    for axis in ("head_dims", "page_size"):
        fitting = tuple(
            value
            for value in kept[axis]
            if any(cache_fits(name, {**free, **_fields_of(axis, value)}) for name in names)
        )
        if not fitting:
            words = ", ".join(map(word_of, kept[axis]))
            message = f"no cache of {', '.join(names)} has {axis}={words} ({operation})"
            raise OnlyError(message)
        kept[axis] = fitting


def _drop_what_no_size_fits(operation: str, kept: dict[str, tuple[Any, ...]]) -> None:
    """Keep the formats of weights that some of the wanted sizes can have."""
    fitting = tuple(
        each
        for each in kept["quantisation"]
        if any(not any(n % MULTIPLES.get(each[0], 1) for n in size) for size in kept["sizes"])
    )
    if not fitting:
        sizes, formats = (
            ", ".join(map(word_of, each))
            for each in (kept["sizes"], dict.fromkeys(each[0] for each in kept["quantisation"]))
        )
        message = f"no weights of {formats} have the sizes {sizes} ({operation})"
        raise OnlyError(message)
    kept["quantisation"] = fitting


def _exists(operation: str, axis: str, value: Any) -> bool:  # noqa: ANN401  a value of any axis
    """Whether a problem of an operation may have a value that is not usually drawn."""
    first = {name: values[0] for name, values in all_axes(operation).items()}
    try:
        found = example(operation, {**first, axis: value})
    except (ValueError, ZeroDivisionError):
        return False
    return axis in ("phase", "verify") or has(found, axis, value)


def _fields_of(axis: str, value: Any) -> dict[str, Any]:  # noqa: ANN401  a value of any axis
    return head_fields(value) if axis == "head_dims" else {axis: value}


def _known() -> dict[str, list[Any]]:
    """Return the usual values of every field and axis that may be named, over all operations."""
    found: dict[str, list[Any]] = {}
    for operation in OPERATIONS:
        for axis, values in all_axes(operation).items():
            names = [name for name, (whole, _) in PARTS.items() if whole == axis]
            for name in names:
                found.setdefault(name, []).extend(value[PARTS[name][1]] for value in values)
            if axis not in UNSPOKEN:
                found.setdefault(axis, []).extend(values)
    found |= {name: [] for name in LENGTHS}
    return {name: list(dict.fromkeys(values)) for name, values in found.items()}


def _value(name: str, word: str) -> Any:  # noqa: ANN401  a value of any field
    """Read one value.

    Raises:
        OnlyError: the field has no such value.
    """
    usual = _known()[name]
    spelled = {word_of(value): value for value in usual}
    # As problems are printed: True, False, None.
    plain = word.lower() if word in ("True", "False", "None") else word
    if plain in spelled:
        return spelled[plain]
    number = _number(name, word, usual)
    if number is None:
        choices = ", ".join(text or "'' (nothing)" for text in spelled)
        meant = "" if word.isdecimal() else _meant(word, spelled)  # 40 is not meant by 0
        more = ", and other numbers that a problem may have" if _is_free(usual) else ""
        message = f"{name}={word} is no value of it; {meant}there are {choices}{more}"
        raise OnlyError(message)
    return number


def _meant(word: str, spelled: Collection[str]) -> str:
    """Ask whether a usual value is meant, or that of another field by the same name of a dtype."""
    full = DTYPE_ALIASES.get(word.lower(), word)
    known = _known().items()
    others = [f"{name}={full}" for name, values in known if full in map(word_of, values)]
    if full == word or full in spelled or not others:
        return did_you_mean(full, spelled)
    return did_you_mean(full, others)


def _is_free(usual: Iterable[Any]) -> bool:
    numbers = [v for v in usual if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return bool(numbers)


def _number(name: str, word: str, usual: list[Any]) -> Any:  # noqa: ANN401  a value of any field
    """Read a number, or a pair of numbers, that is not usually drawn; None if it is none."""
    try:
        if name in ("head_dims", "sizes"):
            parts = [int(part) for part in word.split("x")]
            pair = (parts[0], parts[-1])
            whole = PAIR if name == "sizes" else len(parts)
            return pair if whole == len(parts) <= PAIR and _may_be(name, pair) else None
        if not _is_free(usual):
            return None
        number = int(word) if all(isinstance(value, int) for value in usual) else float(word)
    except ValueError:
        return None
    return number if _may_be(name, number) else None


def _may_be(name: str, value: Any) -> bool:  # noqa: ANN401  a value of any field
    """Whether a problem of some operation may have a value of an axis, or of a part of one."""
    axis, place = PARTS.get(name, (name, None))
    there = [operation for operation in OPERATIONS if axis in all_axes(operation)]
    if place is None:
        return any(_exists(operation, axis, value) for operation in there)
    return any(_pairs(each, name, all_axes(each)[axis], (value,)) for each in there)


def word_of(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
