"""The compiled function of docs/plug-in.md: what is compiled inside a call is no HANG."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.properties.isolation.workers import Deadlines
from kernelproof.properties.worker.pools import open_pool
from kernelproof.properties.worker.requests import Address, verdict_of
from kernelproof.reference import MergeProblem

PAGE = Path(__file__).parents[1] / "docs" / "plug-in.md"
NAME = "my_compiled"
TRIED = (
    MergeProblem(num_states=3, num_tokens=5, num_heads=4),
    MergeProblem(num_states=2, num_tokens=7, num_heads=4),
    MergeProblem(num_states=3, num_tokens=1, num_heads=4),  # compiled anew: a size of 1
    MergeProblem(num_states=3, num_tokens=6, num_heads=1),  # and once more
)
SECONDS = 1.0
COMPILER = """
import functools, time, torch


def compiler(graph, _):
    time.sleep(1.5)
    return graph


torch.compile = functools.partial(torch.compile, backend=compiler)
"""
"""It takes as long everywhere, and no C++ compiler; TorchDynamo asks it as it asks Inductor."""


def test_shapes_that_compile_anew_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"```python\n# {NAME}.py\n")[2]
    code = text.partition("```")[0]
    assert "@torch.compile(" in code
    (tmp_path / f"{NAME}.py").write_text(COMPILER + code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    address, seconds = Address(f"{NAME}:merge", None, "cpu"), []
    with open_pool("cpu", standby=False) as pool, pool.lease() as worker:
        for problem in TRIED:
            outcome = worker.run(address.case("parity", problem), Deadlines(run=SECONDS))
            assert verdict_of(outcome).status == "PASS", (problem, verdict_of(outcome))
            seconds.append(outcome.seconds)
    assert max(seconds[1:]) > SECONDS, "nothing was shown: no later call compiled"
