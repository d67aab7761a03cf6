"""Each fault of the engines' kernels replaces a line that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.impl import BUILT_IN
from kernelproof.tests.faults import engine_faults
from kernelproof.tests.faults.engine_faults import FAULTS, Fault, injected


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_is_there_and_becomes_the_slip(fault: Fault, tmp_path: Path) -> None:
    assert fault.adapter in BUILT_IN
    own = engine_faults.ENGINES / fault.engine / fault.file
    if not own.is_file():
        pytest.skip(f"the files of {fault.engine} are not there: `make engines` fetches them")
    changed = injected(fault, tmp_path) / fault.file
    before, after = (file.read_text(encoding="utf-8") for file in (own, changed))
    line, slip = (f"\n{text}\n" for text in (fault.line, fault.slip))
    assert before.count(line) == 1
    assert after == before.replace(line, slip)


def test_a_line_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[0]._replace(file="kernel.py")
    (tmp_path / fault.engine).mkdir()
    (tmp_path / fault.engine / "kernel.py").write_text("acc = 0\n", encoding="utf-8")
    monkeypatch.setattr(engine_faults, "ENGINES", tmp_path)
    with pytest.raises(ValueError, match="has the line 0 times"):
        injected(fault, tmp_path / "copy")
    assert (tmp_path / fault.engine / "kernel.py").read_text(encoding="utf-8") == "acc = 0\n"
