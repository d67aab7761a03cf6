"""Files that a wheel holds compressed, read by the names that they go by."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

from kernelproof.fixtures import files_of
from kernelproof.impl.targets.data_files import read_bytes, read_json

if TYPE_CHECKING:
    from pathlib import Path


def test_a_compressed_file_goes_by_its_plain_name(tmp_path: Path) -> None:
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'{"b": 1}'))
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "c.toml").touch()
    names = files_of(tmp_path)
    assert names == [tmp_path / "a.json", tmp_path / "b.json"]
    assert [read_json(name, ValueError) for name in names] == [{"a": 1}, {"b": 1}]
    assert files_of(tmp_path, "b-*.json") == files_of(tmp_path / "none") == []


def test_a_plain_file_is_taken_before_a_compressed_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('"plain"')
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'"compressed"'))
    assert files_of(tmp_path) == [tmp_path / "a.json"]
    assert read_json(tmp_path / "a.json", ValueError) == "plain"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{}", "not gzip"),
        (gzip.compress(b"a" * 100, mtime=0)[:-9], "is cut off, or larger than 1 MiB"),
        (gzip.compress(bytes((1 << 20) + 1), mtime=0), "is cut off, or larger than 1 MiB"),
    ],
)
def test_what_is_not_compressed_well_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.json\.gz: {said}"):
        read_bytes(tmp_path / "a.json", ValueError, 1 << 20)


def test_as_much_as_is_read_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    assert read_bytes(tmp_path / "a.json", ValueError, 1 << 20) == bytes(1 << 20)
