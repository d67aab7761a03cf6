"""Finding implementations: built in, by entry point, by MODULE:NAME and by FILE.py:NAME."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kernelproof.impl import BUILT_IN, ImplementationNotFoundError, find_implementation, registry
from kernelproof.impl.registry import resolve_name
from kernelproof.impl.targets.registrations import ENTRY_POINTS
from kernelproof.impl.targets.target import distribution_of

MODULE = """
from kernelproof.impl import implementation

@implementation("merge_state", name="mine")
def mine(inputs):
    return inputs

def plain(inputs):
    return inputs

class Kernels:
    best = mine

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_kernels.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_kernels", None)


Distribution = Callable[..., None]


@pytest.fixture
def distribution(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """Return what makes a distribution that registers implementations."""
    monkeypatch.syspath_prepend(folder)

    def make(name: str, version: str, **points: str) -> None:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        lines = [f"{each} = {reference}" for each, reference in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINTS}]", *lines]))

    return make


def refusal(name: str, operation: str | None = None) -> str:
    with pytest.raises(ImplementationNotFoundError) as caught:
        find_implementation(name, operation)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_names(name: str) -> None:
    found = find_implementation(name)
    assert found.name == name
    assert resolve_name(name) == BUILT_IN[name]
    assert find_implementation(BUILT_IN[name]) is found


def test_a_module_in_the_current_folder(folder: Path) -> None:
    del folder
    found = find_implementation("my_kernels:mine")
    assert (found.name, found.operation) == ("mine", "merge_state")
    assert resolve_name("my_kernels:mine") == "my_kernels:mine"
    assert find_implementation("my_kernels:Kernels.best") is found
    assert find_implementation("my_kernels:mine", "merge_state") is found


def test_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert find_implementation(f"{folder}/my_kernels.py:mine").name == "mine"


def test_a_file_in_the_current_folder(folder: Path) -> None:
    del folder
    assert find_implementation("my_kernels.py:mine").name == "mine"


def test_a_plain_function_with_its_operation(folder: Path) -> None:
    del folder
    found = find_implementation("my_kernels:plain", "paged_attention")
    assert (found.name, found.operation) == ("my_kernels:plain", "paged_attention")
    assert found(5) == 5
    with pytest.raises(ValueError, match="operation is 'attention'"):
        find_implementation("my_kernels:plain", "attention")


def test_a_plain_function_without_operation(folder: Path) -> None:
    del folder
    said = refusal("my_kernels:plain")
    assert said.startswith("my_kernels:plain: it is function, not an implementation: decorate it")
    assert "--operation" in said
    assert "my_kernels:number: it is int" in refusal("my_kernels:number", "merge_state")


def test_another_operation_than_its_own(folder: Path) -> None:
    del folder
    said = refusal("my_kernels:mine", "paged_attention")
    assert said == "my_kernels:mine: it implements merge_state, not paged_attention"


def test_unknown_names(folder: Path) -> None:
    said = refusal("sdpa")
    assert said.startswith("sdpa: no MODULE:NAME and no registered implementation")
    assert "did you mean torch-sdpa-cudnn or torch-sdpa-default or " in said
    assert "did you mean triton-moe" in refusal("triton_moe")
    assert refusal("?").endswith("implementation; `kernelproof list` names them all")
    assert refusal("my_kernels:other").endswith("module 'my_kernels' has no 'other'")
    assert "there is no module 'kernels_of_mine'" in refusal("kernels_of_mine:mine")
    assert "there is no module 'kernelproof.nothing.here'" in refusal("kernelproof.nothing.here:x")
    assert f"there is no file '{folder}/other.py'" in refusal(f"{folder}/other.py:mine")


def test_a_module_is_a_name_of_its_package(folder: Path) -> None:
    (folder / "outer").mkdir()
    (folder / "outer" / "__init__.py").write_text("from .first import one\n", encoding="utf-8")
    (folder / "outer" / "first.py").write_text("from . import second as _\none = 1\n")
    (folder / "outer" / "second.py").write_text(MODULE, encoding="utf-8")
    assert find_implementation("outer:second.mine").name == "mine"
    assert refusal("outer:third.mine").endswith("module 'outer' has no 'third.mine'")


def test_an_import_that_fails_names_the_innermost_line_of_the_users(folder: Path) -> None:
    text = "import json\n\ndef read():\n    json.loads('{')\n\nread()\n"
    (folder / "broken_kernels.py").write_text(text, encoding="utf-8")
    assert refusal("broken_kernels:mine").endswith(f"({folder / 'broken_kernels.py'}:4)")


@pytest.mark.parametrize(
    "line",
    [
        "from kernelproof.reference import Arithmetic; Arithmetic(accumulate='float12')",
        "from kernelproof.reference import MoEProblem; MoEProblem(hidden=0)",
        "exec(compile('1 / 0', '<made>', 'exec'))",
    ],
)
def test_an_error_in_code_of_no_file_is_placed_at_the_line_that_ran_it(
    folder: Path, line: str
) -> None:
    (folder / "broken_kernels.py").write_text(f"\n{line}\n", encoding="utf-8")
    said = refusal("broken_kernels:mine")
    assert said.endswith(f"({folder / 'broken_kernels.py'}:2)")
    assert "<" not in said.rpartition("(")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import surely_not_installed", "needs 'surely_not_installed', not installed"),
        ("import kernelproof.nothing", "needs 'kernelproof.nothing', not installed"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("def broken(:", "failed: SyntaxError: "),
        (
            "from kernelproof.impl import implementation as i; i('attention', name='x')",
            "failed: ValueError: operation is 'attention'",
        ),
    ],
)
def test_a_module_that_does_not_import(folder: Path, text: str, said: str) -> None:
    (folder / "broken_kernels.py").write_text(text, encoding="utf-8")
    message = refusal("broken_kernels:mine")
    assert message.startswith("broken_kernels:mine: importing 'broken_kernels' ")
    assert said in message


def test_entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    point = EntryPoint("theirs", "my_kernels:mine", ENTRY_POINTS)
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda *, group: [point] if group == "kernelproof.implementations" else [],
    )
    assert registry.installed_implementations() == {"theirs": "my_kernels:mine"}
    assert find_implementation("theirs").name == "mine"
    assert "theirs" in refusal("their")


def test_a_module_whose_own_lookup_raises(folder: Path) -> None:
    text = "def __getattr__(name):\n    raise KeyboardInterrupt(name)\n"
    (folder / "looked_up.py").write_text(text, encoding="utf-8")
    with pytest.raises(ImplementationNotFoundError, match="looking up 'mine' raised Keyboard"):
        find_implementation("looked_up:mine")


def test_distributions_register_implementations(folder: Path, distribution: Distribution) -> None:
    distribution("Zeta.Kernels", "2.5", theirs="my_kernels:mine", taken="my_kernels:Kernels.best")
    distribution("alpha", "1.0", taken="my_kernels:mine", short="my_kernels")
    distribution("mid", "3", **{"triton-route": "my_kernels:mine"})
    (folder / "nameless-1.dist-info").mkdir()
    assert registry.installed_implementations() == {
        "taken": "my_kernels:mine",
        "theirs": "my_kernels:mine",
    }
    assert [each.text for each in registry.installed() if each.reason] == [
        "alpha 1.0 registers 'short': 'my_kernels' is no MODULE:NAME",
        "mid 3 registers 'triton-route': Kernelproof has an implementation of this name",
        "Zeta.Kernels 2.5 registers 'taken': alpha has an implementation of this name",
    ]


def test_who_registers_a_module_that_no_distribution_lists_is_its_provider(
    distribution: Distribution,
) -> None:
    distribution("editable-kernels", "0.3", theirs="my_kernels:mine")
    distribution_of.cache_clear()
    found = find_implementation("theirs")
    assert (found.provider, found.provider_version) == ("editable-kernels", "0.3")
    distribution_of.cache_clear()
