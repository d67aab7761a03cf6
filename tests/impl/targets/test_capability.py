"""Every way in which a compute capability is written, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.impl.targets.capability import CHIPS, capability_name, parse_capability


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


def test_names() -> None:
    assert capability_name(103) == "SM103"
    assert capability_name(None) == "CPU"
