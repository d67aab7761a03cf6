"""Records of what compiled are read back as they were written, and a wrong one is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kernelproof.impl.gating.knowledge import (
    Compilation,
    CompiledUnit,
    EvidenceError,
    read_compilation,
)

FEATURE = {"operation": "moe", "activation": "relu2"}
RECORDS = (
    CompiledUnit("0.6.7", 121, "moe", "incomplete", FEATURE, ("sm_120f",), 1, 0, 56.6, "no kernel"),
    CompiledUnit("0.6.13", 90, "moe", "compiled", FEATURE, ("sm_90a",), 1, 20, 67.0),
    CompiledUnit("0.7.2.post1", 90, "decode", "refused", {}, message="no such chip"),
)
EVIDENCE = Compilation("13.0.88", "2026-11-21", "kernelproof support --compile 90,121", RECORDS)


def written(folder: Path, data: object) -> Path:
    file = folder / "evidence.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_compilation(written(tmp_path, EVIDENCE.to_json())) == EVIDENCE


def test_it_is_written_in_the_order_of_versions_not_of_text() -> None:
    backwards = Compilation("13.0.88", "", "", RECORDS[::-1])
    versions = [record["flashinfer"] for record in backwards.to_json()["records"]]
    assert versions == ["0.6.7", "0.6.13", "0.7.2.post1"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format",), "kernelproof/compile-evidence/2", "format is 'kernelproof/compile-evid"),
        (("nvcc",), 13.0, "Expected `str`, got `float` - at `$.nvcc`"),
        (("interrupted",), "no", "Expected `bool`, got `str` - at `$.interrupted`"),
        (("records",), {}, "Expected `array`, got `object` - at `$.records`"),
        (("colour",), "red", "Object contains unknown field `colour`"),
        (("records", 1), "x", "Expected `object`, got `str` - at `$.records[1]`"),
        (
            ("records", 0, "flashinfer"),
            "six",
            "flashinfer: 'six' is no version by PEP 440",
        ),
        (("records", 0, "sm"), "90", "Expected `int`, got `str` - at `$.records[0].sm`"),
        (("records", 2, "status"), "fine", "Invalid value 'fine' - at `$.records[2].status`"),
        (
            ("records", 0, "feature"),
            [],
            "Expected `object`, got `array` - at `$.records[0].feature`",
        ),
        (
            ("records", 0, "architectures"),
            "sm_90a",
            "Expected `array`, got `str` - at `$.records[0].architectures`",
        ),
        (("records", 0, "kernels"), -1, "Expected `int` >= 0 - at `$.records[0].kernels`"),
        (("records", 0, "chip"), 90, "Object contains unknown field `chip` - at `$.records[0]`"),
    ],
)
def test_a_wrong_field_is_named(
    place: tuple[Any, ...], value: object, message: str, tmp_path: Path
) -> None:
    data: Any = json.loads(json.dumps(EVIDENCE.to_json()))
    *path, last = place
    where = data
    for step in path:
        where = where[step]
    where[last] = value
    file = written(tmp_path, data)
    with pytest.raises(EvidenceError, match=f"^{re.escape(str(file))}.*{re.escape(message)}"):
        read_compilation(file)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    data = EVIDENCE.to_json()
    del data["records"][1]["message"]
    with pytest.raises(EvidenceError, match=r"field `message` - at `\$\.records\[1\]`"):
        read_compilation(written(tmp_path, data))


def test_a_record_that_stands_twice_is_named(tmp_path: Path) -> None:
    data = EVIDENCE.to_json()
    data["records"].append(data["records"][1])
    with pytest.raises(EvidenceError, match=r"records\[3\] repeats records\[1\]"):
        read_compilation(written(tmp_path, data))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"absent\.json: cannot be read \(No such file"):
        read_compilation(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("{", encoding="utf-8")
    with pytest.raises(EvidenceError, match=r"text\.json: not JSON"):
        read_compilation(tmp_path / "text.json")
