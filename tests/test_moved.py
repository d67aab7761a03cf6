"""Modules that moved into rooms are importable by their old names, for one release."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from kernelproof.fixtures.moved import moved_modules

ROOMS = [old for old in moved_modules() if importlib.util.find_spec(f"kernelproof.{old}")]
"""Old names of modules that are names of rooms now."""


@pytest.mark.parametrize("new", sorted(set(moved_modules().values())))
def test_a_new_name_is_a_module(new: str) -> None:
    assert importlib.util.find_spec(f"kernelproof.{new}") is not None


def test_an_old_name_is_the_same_module_and_says_its_new_one() -> None:
    expected = (
        r"kernelproof\.reference\.kv_format is now kernelproof\.reference\.formats\.kv_format"
    )
    with pytest.warns(DeprecationWarning, match=expected) as caught:
        from kernelproof.reference.kv_format import KVCacheFormat  # type: ignore[import-not-found]
    import kernelproof.reference.formats.kv_format as module

    assert caught[0].filename == __file__
    assert module.KVCacheFormat is KVCacheFormat
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == "kernelproof.reference.formats.kv_format"


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("properties.isolation", "WorkerPool"),
        ("ci.support", "support"),
        ("reference.attention", "BatchMetadata"),
        ("reference.moe", "product"),
    ],
)
def test_a_room_with_the_name_of_a_module_has_its_names(old: str, name: str) -> None:
    room = importlib.import_module(f"kernelproof.{old}")
    moved = importlib.import_module(f"kernelproof.{moved_modules()[old]}")
    with pytest.warns(DeprecationWarning, match=f"kernelproof.{old} is now {moved.__name__}"):
        assert getattr(room, name) is getattr(moved, name)


def test_an_old_name_leaves_the_function_of_that_name_in_place() -> None:
    import kernelproof.reference
    from kernelproof.reference.materialise import (  # type: ignore[import-not-found]
        materialise as function,
    )

    assert kernelproof.reference.materialise is function
    assert callable(function)


def test_no_room_invents_a_name() -> None:
    with pytest.raises(ImportError, match="no_such_name"):
        from kernelproof.properties.isolation import no_such_name  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("kernelproof.reference.no_such_module")


def test_nothing_here_uses_an_old_name() -> None:
    loaded = "import kernelproof.ci.cli, kernelproof.properties.plugin"
    ended = subprocess.run(
        [sys.executable, "-W", "error:kernelproof.:DeprecationWarning", "-c", loaded],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
