"""Of implementations with one name, each but the first has its file in the name."""

from __future__ import annotations

from kernelproof.properties.findings.names import Names


def test_the_second_of_a_name_has_its_file_in_it() -> None:
    names = Names()
    assert names.tell("mine", "one.py:a") == "mine"
    assert names.tell("mine", "two.py:a") == "mine (two.py:a)"
    assert names.tell("mine", "one.py:a") == "mine"
    assert names.tell("other", "two.py:b") == "other"
