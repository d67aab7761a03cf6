"""What is wrong with a file is named: the place, by key and position, and what may stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from kernelproof.fixtures import LEDGER
from kernelproof.impl.targets.data_files import read_json, read_toml
from kernelproof.impl.targets.schemas import Table, Text, converted, one_of

REPORT = Path(__file__).parents[2] / "ci" / "bump" / "report.json"
Colour = Annotated[str, one_of(("red", "green"))]


class Inner(Table, frozen=True):
    """A part of the table."""

    id: Text
    numbers: tuple[int, ...] = ()
    by_name: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if 13 in self.numbers:
            message = "numbers holds 13"
            raise ValueError(message)


class Outer(Table, frozen=True):
    """A table."""

    inner: tuple[Inner, ...] = ()
    one: Inner | None = None
    colours: dict[Colour, Colour] = msgspec.field(default_factory=dict)
    many: dict[str, dict[str, Colour]] = msgspec.field(default_factory=dict)
    mixed: bool | tuple[Literal["a", "b"], ...] | Inner = True
    place: Path = Path()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "Expected `object`, got `array`"),
        ({"inner": [{"id": "x"}, {"id": "y", "numbers": [1, "2"]}]},
         "'y': Expected `int`, got `str` - at `$.inner[1].numbers[1]`"),
        ({"inner": [{"id": " "}]}, "' ': Expected `str` with something in it - at `$.inner[0].id`"),
        ({"inner": [{"id": "x", "by_name": {"p": {}, "q.r": {"s": 1, "t": True}}}]},
         "'x': Expected `int`, got `bool` - at `$.inner[0].by_name['q.r']['t']`"),
        ({"inner": [{"id": "x", "numbers": [13]}]}, "'x': numbers holds 13 - at `$.inner[0]`"),
        ({"one": {"number": 1}},
         "Object contains unknown field `number` - at `$.one`; did you mean numbers?"),
        ({"colour": {}}, "Object contains unknown field `colour`; did you mean colours?"),
        ({"inner": [{"id": "x", "numbrs": []}]},
         "'x': Object contains unknown field `numbrs` - at `$.inner[0]`; did you mean numbers?"),
        ({"mixed": {"idd": 1}},
         "Object contains unknown field `idd` - at `$.mixed`; did you mean id?"),
        ({"one": {}}, "Object missing required field `id` - at `$.one`"),
        ({"colours": {"red": "green", "gren": "red"}},
         "Invalid value 'gren' - at `key` in `$.colours`; did you mean green? known: red, green"),
        ({"colours": {"green": "blue"}},
         "Invalid value 'blue' - at `$.colours['green']`; known: red, green"),
        ({"many": {"a": {"b": "red"}, "c": {"d": "gren"}, "e": 1}},
         "Invalid value 'gren' - at `$.many['c']['d']`; did you mean green? known: red, green"),
        ({"mixed": ["a", "c"]}, "Invalid enum value 'c' - at `$.mixed[1]`"),
        ({"mixed": {"id": 1}}, "Expected `str`, got `int` - at `$.mixed.id`"),
        ({"mixed": 1}, "Expected `bool | object | array`, got `int` - at `$.mixed`"),
        ({"place": 1}, "Expected `str`, got `int` - at `$.place`"),
    ],
)  # fmt: skip
def test_the_place_and_what_may_stand_there_are_named(data: Any, said: str) -> None:  # noqa: ANN401  any
    with pytest.raises(ValueError, match=r"^file: ") as caught:
        converted(data, Outer, "file", ValueError)
    assert str(caught.value) == f"file: {said}"


def test_what_is_right_is_read() -> None:
    data = {"inner": [{"id": "x"}], "mixed": ["a"], "place": "here"}
    assert converted(data, Outer, "file", ValueError) == Outer(
        (Inner("x"),), mixed=("a",), place=Path("here")
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for read in (read_toml, read_json):
        with pytest.raises(LookupError, match=r"file: cannot be read \(No such file"):
            read(path, LookupError)
    path.write_bytes(b"\xff")
    for read, language in ((read_toml, "TOML"), (read_json, "JSON")):
        with pytest.raises(LookupError, match=f"file: not {language} "):
            read(path, LookupError)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_every_shape_is_read_inside_of_its_memory(tmp_path: Path) -> None:
    """msgspec 0.22.0 writes before a block for a pattern beside a list; this allocator sees it."""
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[actions]\nslower = "block"\n[limits]\nslower = 2\n[chips]\nrequired = [90]\n'
        '[[accept]]\nfinding = "*"\nreason = "seen"\nchips = ["cpu"]\n'
    )
    run(
        "from pathlib import Path\n"
        "from kernelproof.ci.bump.report.shape import read_report\n"
        "from kernelproof.ci.bump.verdicts.policy import load_policy\n"
        "from kernelproof.impl.gating import load_rules\n"
        "from kernelproof.properties.findings.ledger import load_ledger\n"
        f"assert read_report(Path({str(REPORT)!r}))\n"
        f"assert load_policy(Path({str(policy)!r})).slower == 2\n"
        "assert load_rules().rules\n"
        f"assert load_ledger({str(LEDGER)!r}).entries\n",
        PYTHONMALLOC="debug",
    )


def test_an_interpreter_without_msgspec_reads_the_same_rules_and_evidence() -> None:
    """One that Kernelproof is lent to has what FlashInfer brings, and no more."""
    code = (
        "from kernelproof.impl.gating import knowledge, load_rules\n"
        "print([*map(repr, load_rules().rules)], load_rules().versions)\n"
        "print(sorted(map(repr, knowledge.table().modules)), len(knowledge.table().values))"
    )
    assert run(f"import sys; sys.modules['msgspec'] = None\n{code}") == run(code)
