"""What releases declare, item by item, and which items are gone rather than not to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Declarations = Mapping[str, Any]
EMPTY_IF_UNREAD = ("xqa", "fa3", "fmha_runner", "dispatch", "activations", "backend_choices")
"""Sections in which a release that is written otherwise leaves nothing."""
CHECKS = ("jit_filters", "fmha_runner")
"""Sections of what is refused otherwise: a check that is gone refuses nothing."""


@dataclass(frozen=True)
class Item:
    """Something that a release declares.

    Attributes:
        name: the name that findings use.
        values: chips, or what else it covers; None where the release does not say.
        section: the section of the declarations.
        module: the module that was imported to learn it; empty if none was.
        api: callable whose decorator it is of; empty if it is of none.
    """

    name: str
    values: frozenset[Any] | None
    section: str
    module: str = ""
    api: str = ""


def compared(
    items: Callable[[Declarations], Iterable[Item]],
    baseline: Declarations,
    candidate: Declarations,
) -> Iterator[tuple[str, frozenset[Any], frozenset[Any]]]:
    """Return the names of what the baseline declares, with both sides' values.

    What the candidate has no more has no values. What it does not say, or could not be asked, is
    left out.
    """
    old, new = _by_name(items(baseline)), _by_name(items(candidate))
    for name, before in sorted(old.items()):
        after = new.get(name)
        if after is None and not _unread(before, candidate) and _gone(before, baseline, candidate):
            after = Item(name, frozenset(), before.section)
        if before.values is not None and after is not None and after.values is not None:
            yield name, before.values, after.values


def _by_name(items: Iterable[Item]) -> dict[str, Item]:
    found: dict[str, Item] = {}
    for each in items:
        if each.values is not None or each.name not in found:
            found[each.name] = each
    return found


def _unread(item: Item, declared: Declarations) -> bool:
    """Whether a release could not be asked for an item, so that its absence means nothing."""
    empty = item.section in EMPTY_IF_UNREAD and not declared[item.section]
    return empty or item.section in CHECKS or item.module in declared["not_imported"]


def _gone(item: Item, baseline: Declarations, candidate: Declarations) -> bool:
    """Whether a decorated callable is gone, or the backend of one that is still decorated.

    One that is there without its decorator is restricted no more, or in another way.
    """
    if not item.api:
        return True
    decorated = [each for each in candidate["capabilities"] if each["api"] == item.api]
    if decorated:
        # Where the decorators' source is read instead, a backend may be missed.
        return bool(decorated[0]["how"] == "asked")
    offered = _offered(baseline).intersection(item.api.split("."))
    return bool(offered) and offered.isdisjoint(_offered(candidate))


def _offered(declared: Declarations) -> set[str]:
    return {name for names in declared["exports"].values() for name in names}


def chip_items(declared: Declarations) -> Iterator[Item]:
    """Return the chips of each thing that declares chips."""
    for each in declared["capabilities"]:
        api, section = each["api"], "capabilities"
        yield Item(api, _set(each["common"]), section, api=api)
        for backend, chips in each["backends"].items():
            yield Item(f"{api} with {backend}", _set(chips), section, api=api)
    for each in declared["runners"]:
        module = _module(each["source"])
        yield Item(f"runner {each['runner']}", _set(each["chips"]), "runners", module)
    for each in declared["configs"]:
        module = _module(each["source"])
        yield Item(f"config {each['config']}", _set(each["chips"]), "configs", module)
    for each in declared["jit_filters"]:
        if each["generator"]:
            name = f"compiler filter of {each['generator']}"
            yield Item(name, _set(each["chips"]), "jit_filters")
    built = map(int, declared["fused_moe_modules"]["modules"])
    yield Item("modules of cutlass_fused_moe", _set(built), "fused_moe_modules")
    cubins = map(int, declared["compatible_cubins"].get("chips", {}))
    yield Item("binaries of trtllm-gen attention", _set(cubins), "compatible_cubins")


def value_items(declared: Declarations) -> Iterator[Item]:
    """Return what is declared of head dims, dtypes, backends and activations, on no single chip."""
    for part in ("xqa", "fa3"):
        for name, values in declared[part].items():
            if isinstance(values, list | None):
                yield Item(f"{part} {name.replace('_', ' ')}", _texts(values), part)
    for name, each in declared["backend_choices"].items():
        module = f"flashinfer.{name.partition('.')[0]}"
        choices = frozenset(each["choices"])
        yield Item(f"backends of {name}", choices, "backend_choices", module)
    for section, label in (
        ("activations", "activations of {} MoE"),
        ("fmha_runner", "trtllm-gen attention: {}"),
        ("dispatch", "templates {}"),
    ):
        for name, each in declared[section].items():
            yield Item(label.format(name), _texts(each["values"]), section)


def _set(values: Iterable[int] | None) -> frozenset[int] | None:
    return None if values is None else frozenset(values)


def _texts(values: Iterable[object] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(map(str, values))


def _module(source: str) -> str:
    """Return the module of a place such as ``flashinfer/fused_moe/core.py:316``."""
    path = source.partition(":")[0].removesuffix(".py").removesuffix("/__init__")
    return path.replace("/", ".")
