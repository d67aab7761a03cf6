"""The shell completes names that exist, and does not wait for torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from kernelproof.ci.cli import cli
from kernelproof.impl.gating.feature import CHOICES
from kernelproof.impl.registry import registered
from kernelproof.properties.laws import LAWS
from kernelproof.reference.operations import OPERATIONS


def completed(*words: str) -> list[str]:
    """Return what the last word is completed to."""
    shell = ShellComplete(cli, {}, "kernelproof", "_KERNELPROOF_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_names_are_completed() -> None:
    """Laws are read from their sources, and operations from a table: both must be whole."""
    assert sorted(completed("check", "--law", "")) == sorted(law.name for law in LAWS)
    assert sorted(completed("check", "--operation", "")) == sorted(OPERATIONS)
    assert completed("new", "mine", "--operation", "mo") == ["moe"]
    assert completed("check", "") == registered()
    assert completed("bump", "a", "b", "--implementation", "torch-mo") == ["torch-moe"]
    assert set(completed("support", "--backend", "")) == set(CHOICES["backend"])
    assert completed("support", "--kv-dtype", "nv") == ["nvfp4", "nvfp4_ds_mla"]
    assert completed("support", "--model", "gemma4") == ["gemma4", "gemma4_mm", "gemma4_unified"]
    assert completed("support", "--sm", "90,gb") == ["90,GB200", "90,GB300", "90,GB10"]
    assert completed("bump", "--sm", "dgx") == ["DGX-Spark"]
    assert completed("check", "--profile", "ni") == ["nightly"]
    assert completed("gate", "--bas") == []


@pytest.mark.parametrize(
    "words",
    ["check torch", "check --law p", "support --backend t", "support --model g", "support --sm H"],
)
def test_nothing_heavy_is_imported(words: str) -> None:
    """What imports torch answers after seconds."""
    code = (
        "import sys; from kernelproof.ci.cli import main\n"
        "try: main([])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert not {'torch', 'numpy', 'hypothesis', 'rich'} & set(sys.modules)\n"
    )
    environment = {
        **os.environ,
        "COMP_WORDS": f"kernelproof {words}",
        "COMP_CWORD": str(len(words.split())),
        "_KERNELPROOF_COMPLETE": "bash_complete",
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert f"plain,{words.rsplit(maxsplit=1)[-1]}" in ended.stdout
