"""Every way in which a compute capability is written, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.impl.targets.capability import (
    CHIPS,
    NAMES,
    capability_name,
    parse_capability,
)


@given(st.sampled_from(sorted(CHIPS)), st.sampled_from(["", "a", "f"]))
def test_all_spellings_of_a_chip_agree(sm: int, suffix: str) -> None:
    major, minor = divmod(sm, 10)
    spellings = [
        sm,
        (major, minor),
        [major, minor],
        str(sm) + suffix,
        f"{major}.{minor}{suffix}",
        f"sm_{sm}{suffix}",
        f"SM{sm}{suffix}",
        f"sm {major}.{minor}",
        f" compute_{sm}{suffix} ",
    ]
    assert {parse_capability(each) for each in spellings} == {sm}


@pytest.mark.parametrize("value", [10, "10", "sm_10", 12, 9, "9"])
def test_a_lone_major_is_ambiguous(value: object) -> None:
    with pytest.raises(ValueError, match=r"ambiguous: it may be SM \d\.\d or SM \d+\.0; write "):
        parse_capability(value)


@pytest.mark.parametrize(
    "value",
    [0, -100, 35, 1000, "1.0", (1, 0), "sm_35", (10, 30), (10, -1), (100, 0), (20, 0), "20.0"],
)
def test_what_no_gpu_has_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"not a compute capability|ambiguous") as caught:
        parse_capability(value)
    assert repr(value) in str(caught.value)


def test_a_joined_pair_is_told_what_it_may_have_meant() -> None:
    with pytest.raises(ValueError, match=r"\(10, 3\) is SM 10\.3"):
        parse_capability((103, 0))


@pytest.mark.parametrize(
    "value", [None, 10.0, True, (True, 0), (10,), (10, 0, 0), ("10", "0"), "ten", "", "10,0", "sm"]
)
def test_what_is_no_spelling_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="compute capability"):
        parse_capability(value)


def test_a_chip_that_no_rule_knows_is_read() -> None:
    assert parse_capability("sm_130a") == 130
    assert 130 not in CHIPS


def test_a_chip_is_known_by_the_names_of_its_gpus() -> None:
    assert NAMES.keys() == CHIPS.keys()
    for sm, names in NAMES.items():
        for name in names:
            spelt = (name, name.lower().replace(" ", "-"), f"NVIDIA {name}", name.replace(" ", "_"))
            assert {parse_capability(each) for each in spelt} == {sm}
    known = {"GB300": 103, "b200": 100, "H100": 90, "H200": 90, "A100": 80, "L4": 89, "L40S": 89,
             "RTX PRO 6000": 120, "DGX Spark": 121, "Jetson AGX Thor": 110,
             "GeForce RTX 4090": 89}  # fmt: skip
    assert {name: parse_capability(name) for name in known} == known


@pytest.mark.parametrize(("name", "meant"), [("gb30", "GB300"), ("H1000", "H100"),
                                             ("RTX 6000", "RTX 6000 Ada")])  # fmt: skip
def test_a_name_that_no_chip_has_is_answered_with_those_like_it(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not .*did you mean {meant}"):
        parse_capability(name)


@pytest.mark.parametrize(
    ("name", "sm"),
    [
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA A800-SXM4-80GB", 80),
        ("H20", 90),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120),
    ],
)
def test_a_name_as_a_driver_gives_it(name: str, sm: int) -> None:
    assert parse_capability(name) == sm


def test_names() -> None:
    assert capability_name(103) == "SM103"
    assert capability_name(None) == "CPU"
