"""What one FlashInfer release declares, as facts about chips that calls can be compared with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RUBIN = 107
HOPPER = 90
Declarations = Mapping[str, Any]
"""What ``kernelproof.impl.flashinfer_declarations`` collects."""
RUNNER_NAMES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
    "nvfp4": "E2M1",
}
"""What trtllm-gen's attention runner calls each element format."""


@dataclass(frozen=True)
class Fact:
    """One declaration, read as the chips that it admits.

    Attributes:
        says: the declaration, a clause.
        source: its place in the release.
        chips: the chips that it admits; none of them for something that the release does not have.
        named: the chips among those that it names; none where it does not speak of chips.
    """

    says: str
    source: str
    chips: frozenset[int]
    named: frozenset[int]


def fact(says: str, source: str, chips: Iterable[int], named: Iterable[int] | None = None) -> Fact:
    """Return a fact; its chips are those that it admits, unless the arguments say otherwise."""
    admitted = frozenset(chips)
    return Fact(says, source, admitted, admitted if named is None else admitted & set(named))


def listed(chips: Iterable[object]) -> str:
    """List chips or names in a sentence."""
    return ", ".join(map(str, chips)) or "none"


def everywhere(declared: Declarations, says: str, source: str, *, holds: bool) -> Fact:
    """Make a fact that does not depend on the chip."""
    return fact(says, source, declared["chips"] if holds else (), named=())


def named_chips(declared: Declarations) -> frozenset[int]:
    """Return the chips that the release names by number somewhere, and can compile for.

    SM107 is built as the 100 family or not at all: no released CUDA knows compute_107.
    """
    named = {
        chip
        for each in declared["capabilities"]
        for chips in (each["common"], *each["backends"].values())
        for chip in chips or ()
    }
    named |= {chip for each in declared["runners"] for chip in each["chips"]}
    named |= {
        chip for each in declared["configs"] if not each["open_ended"] for chip in each["chips"]
    }
    named |= set(declared["fmha_runner"].get("chips", {}).get("values", ()))
    named |= {int(chip) for chip in declared["fused_moe_modules"]["modules"]}
    told = " ".join(declared["targets"].get(str(RUBIN), {}).get("flags", ()))
    return frozenset(named - {RUBIN} if f"compute_{RUBIN}" in told else named)


def capability(declared: Declarations, api: str) -> Fact | None:
    """Return the common check of a decorated callable; it admits nothing where there is none.

    None where its chips could not be read.
    """
    for each in declared["capabilities"]:
        if each["api"].rpartition(".")[2] == api:
            if each["common"] is None:
                return None
            says = f"{api} declares {listed(each['common'])}"
            return fact(says, each["source"], each["common"])
    return fact(f"the release has no {api}", "", ())


def jit_filter(declared: Declarations, generator: str, *, narrow: bool = False) -> Fact | None:
    """Return what the compiler's filter admits for a generator; None where it has none.

    Args:
        declared: what the release declares.
        generator: function that makes the module.
        narrow: the shortest list of a generator with several, rather than the longest.
    """
    found = [
        each
        for each in declared["jit_filters"]
        if each["generator"].rpartition(".")[2] == generator and each["chips"] is not None
    ]
    if not found:
        return None
    chosen = sorted(found, key=lambda each: len(each["chips"]))[0 if narrow else -1]
    rubin = ", SM107 as sm_100f" if chosen["map_sm107_to_100f"] else ""
    says = f"{generator} compiles for majors {chosen['text']} only{rubin}"
    named = {*family_heads(chosen["chips"]), *((RUBIN,) if chosen["map_sm107_to_100f"] else ())}
    return fact(says, chosen["source"], chosen["chips"], named)


def family_heads(chips: Iterable[int]) -> set[int]:
    """Return the chips that a test for their major version speaks of.

    It admits chips that nobody thought of too: tests for major 10 admitted SM107 long before a
    release knew of it, and SM103 before anybody had run it. That is no declaration of support.
    """
    return {chip for chip in chips if chip < HOPPER or chip % 10 == 0}


def fixed_flags(declared: Declarations, generator: str, flags: str, chip: int) -> Fact | None:
    """Return the only architecture that a generator compiles for; None if its flags say more."""
    for each in _entries(declared, "fixed_flags", generator=generator, flags=flags):
        return fact(f"{generator} compiles with {flags}", each["source"], [chip])
    return None


def major_check(
    declared: Declarations, module: str, function: str, *, test: str = "not in", last: bool = False
) -> Fact | None:
    """Return the majors that a function compares the device's with; None if it has no such check.

    Args:
        declared: what the release declares.
        module, function: where the check is.
        test: ``"not in"`` for a check that raises outside its majors, ``"in"`` for an assertion.
        last: whether of several checks the last counts, rather than the one with the most majors.
    """
    found = _entries(declared, "python_checks", module=module, function=function, test=test)
    if not found:
        return None
    chosen = found[-1] if last else max(found, key=lambda each: len(each["majors"]))
    return majors_fact(declared, function, chosen)


def majors_fact(declared: Declarations, name: str, check: Mapping[str, Any]) -> Fact:
    """Make a fact of a check for major versions, whose message may name chips."""
    chips = [chip for chip in declared["chips"] if chip // 10 in check["majors"]]
    spoken = {int(chip) for chip in re.findall(r"SM(\d{2,3})", check.get("message", ""))}
    says = f"{name} checks for major {listed(check['majors'])}"
    return fact(says, check["source"], chips, spoken or family_heads(chips))


def launcher(declared: Declarations, name: str) -> Fact | None:
    """Return the majors that a C++ launcher checks for; None where it checks for none."""
    for each in _entries(declared, "launcher_majors", launcher=name):
        return majors_fact(declared, name, each)
    return None


def attention_runner(declared: Declarations) -> Fact | None:
    """Return the chips that trtllm-gen's attention runner checks for."""
    entry = declared["fmha_runner"].get("chips")
    if entry is None:
        return None
    says = f"TllmGenFmhaRunner checks for {listed(entry['values'])}"
    return fact(says, entry["source"], entry["values"])


def runner_dtype(declared: Declarations, name: str, dtype: str, *members: str) -> Fact | None:
    """Whether trtllm-gen's attention runner accepts a data type; None where it checks for none.

    Args:
        declared: what the release declares.
        name: what has the data type, such as the query.
        dtype: the data type, by our name.
        members: names of the member in different releases; the first that there is counts.
    """
    entries = (declared["fmha_runner"].get(member) for member in members)
    entry = next(filter(None, entries), None)
    if entry is None or not entry["values"]:
        return None
    holds = RUNNER_NAMES[dtype] in entry["values"]
    says = f"TllmGenFmhaRunner {'accepts' if holds else 'refuses'} {name} dtype {dtype}"
    return everywhere(declared, says, entry["source"], holds=holds)


def moe_module(declared: Declarations) -> Fact | None:
    """Return the chips that a CUTLASS MoE module is built for, by name and by the filter."""
    entry = declared["fused_moe_modules"]
    if not entry["modules"]:
        return None
    admitted = set()
    for chip, generator in entry["modules"].items():
        allowed = jit_filter(declared, generator)
        if allowed is None or int(chip) in allowed.chips:
            admitted.add(int(chip))
    says = f"get_cutlass_fused_moe_module builds for {listed(sorted(admitted))}"
    return fact(says, entry["source"], admitted)


def moe_runner(declared: Declarations, name: str) -> Fact | None:
    """Return the architectures of a MoE runner class; None where there is none of that name."""
    for each in _entries(declared, "runners", runner=name):
        return fact(f"{name} declares {listed(each['chips'])}", each["source"], each["chips"])
    return None


def moe_config(declared: Declarations, name: str) -> Fact | None:
    """Return what a MoE configuration class answers; None where there is none of that name."""
    for each in _entries(declared, "configs", config=name):
        says = f"{name}.supported admits {listed(each['chips'])}"
        named = () if each["open_ended"] else None
        return fact(says, each["source"], each["chips"], named)
    return None


def activation_kernel(declared: Declarations, backend: str, member: str) -> Fact | None:
    """Whether a backend's switch has a kernel for an activation; None without a switch."""
    entry = declared["activations"].get(backend)
    return _has(declared, entry, "values", f"{backend}'s switch", "case for", member)


def enum_member(declared: Declarations, enum: str, member: str) -> Fact | None:
    """Whether an enum has a member; None without such an enum."""
    return _has(declared, declared["enums"].get(enum), "members", enum, "member", member)


def macro_branch(declared: Declarations, macro: str, value: object) -> Fact | None:
    """Whether a dispatch macro has a branch for a value; None without such a macro."""
    entry = declared["dispatch"].get(macro)
    return _has(declared, entry, "values", macro, "branch for", value)


def _has(
    declared: Declarations,
    entry: Mapping[str, Any] | None,
    field: str,
    owner: str,
    what: str,
    value: object,
) -> Fact | None:
    """Whether a field of an entry holds a value; None without the entry."""
    if entry is None:
        return None
    holds = value in entry[field]
    says = f"{owner} has {'a' if holds else 'no'} {what} {value}"
    return everywhere(declared, says, entry["source"], holds=holds)


def parameter(declared: Declarations, function: str, *names: str) -> Fact:
    """Whether a public callable takes a parameter, by any of its names."""
    entry = declared["signatures"].get(function)
    if entry is None:
        return everywhere(declared, f"the release has no {function}", "", holds=False)
    given = [each["name"] for each in entry["parameters"]]
    taken = next((name for name in names if name in given), None)
    says = f"{function} takes {taken}" if taken else f"{function} takes no {' or '.join(names)}"
    return everywhere(declared, says, entry["source"], holds=taken is not None)


def callable_there(declared: Declarations, function: str) -> Fact:
    """Whether a public callable exists."""
    entry = declared["signatures"].get(function)
    says = f"the release has {'a function' if entry else 'no'} {function}"
    return everywhere(declared, says, entry["source"] if entry else "", holds=entry is not None)


def _entries(declared: Declarations, section: str, **fields: str) -> list[Mapping[str, Any]]:
    """Return the entries of a section whose fields are these."""
    asked = fields.items()
    return [each for each in declared[section] if all(each[name] == value for name, value in asked)]
