"""The JSON Schemas hold what commands write, and the files that are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.check.json_schemas import SCHEMAS
from kernelproof.ci.cli import main
from kernelproof.fixtures import CORPUS
from kernelproof.reference.operations import PROBLEM_TYPES

KERNELS = """
import torch
from kernelproof.impl import implementation
from kernelproof.reference import merge_states


@implementation("merge_state", name="wrong")
def wrong(inputs):
    out, lse = merge_states(inputs.outs, inputs.lses)
    return (out + 1).to(inputs.out_dtype), lse.float()


@implementation("merge_state", name="raising")
def raising(inputs):
    raise ValueError("not today")
"""
COMPARISON = Path(__file__).parents[1] / "bump" / "report.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Check two wrong implementations and one that is not there; return the folder of results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("run"))
        Path("kernels.py").write_text(KERNELS)
        names = ("kernels.py:wrong", "kernels.py:raising", "kernels.py:absent")
        laws = ("--law", "parity", "--law", "merge_union", "--law", "well_formed")
        main(["check", *names, "--profile", "quick", *laws, "--json", "r.json"])
        yield folder


def errors(
    name: str, data: object, change: Callable[[Any], Any] = lambda schema: schema
) -> list[str]:
    """Return what a schema refuses of a file, of the alternative that it comes closest to."""
    schema = change(SCHEMAS[name]())
    jsonschema.Draft202012Validator.check_schema(schema)
    best = jsonschema.exceptions.best_match
    found = jsonschema.Draft202012Validator(schema).iter_errors(data)
    return [f"{each.json_path}: {each.message[:200]}" for one in found if (each := best([one]))]


def strict(schema: Any) -> Any:  # noqa: ANN401  JSON
    """Return a schema that refuses fields which it does not declare."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(value) for name, value in schema.items()}
    closed = schema.get("type") == "object" and "properties" in schema
    return {**found, "additionalProperties": False} if closed else found


def test_a_report_has_the_fields_that_are_declared(run: Path) -> None:
    data = json.loads((run / "r.json").read_text())
    assert {each["status"] for each in data["findings"]} == {"FAIL", "CRASH"}
    assert any(each["error_map"] for each in data["findings"])
    assert errors("report.schema.json", data, strict) == []


def test_a_report_without_a_field_is_refused(run: Path) -> None:
    data = json.loads((run / "r.json").read_text())
    del data["findings"][0]["law"]
    (error,) = errors("report.schema.json", data)
    assert error == "$.findings[0]: 'law' is a required property"


def test_the_cases_of_a_run_have_the_fields_that_are_declared(run: Path) -> None:
    cases = [*(run / ".kernelproof" / "cases").glob("*.json")]
    assert len(cases) >= 2
    for each in cases:
        assert errors("case.schema.json", json.loads(each.read_text()), strict) == [], each.name


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_each_stored_case_has_the_fields_that_are_declared(path: Path) -> None:
    assert errors("case.schema.json", json.loads(path.read_text()), strict) == []


@pytest.mark.parametrize("name", PROBLEM_TYPES)
def test_the_simplest_problem_of_each_type_is_one(name: str) -> None:
    case = {"schema": "kernelproof/case/1", "law": "parity", "implementation": "mine"}
    problem = json.loads(json.dumps(PROBLEM_TYPES[name]().to_json()))
    assert errors("case.schema.json", {**case, "problem": problem}) == []
    assert errors("case.schema.json", {**case, "problem": {**problem, "nope": 1}}) != []


def test_the_lines_of_a_journal_are_what_is_declared(tmp_path: Path) -> None:
    with Journal(path := tmp_path / "journal.jsonl") as journal:
        journal.start({"profile": "quick", "seed": 0})
        journal.ask({"law": "parity"}, lambda: {"judged": 3})
    head, line = map(json.loads, path.read_text().splitlines())
    assert errors("journal.schema.json", head, strict) == []
    assert errors("journal.schema.json", line, strict) == []
    assert errors("journal.schema.json", {**head, "schema": "another"}) != []
    assert errors("journal.schema.json", {"question": "q"}) != []


def test_a_comparison_is_what_is_declared() -> None:
    assert errors("bump.schema.json", json.loads(COMPARISON.read_text())) == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_command_writes_each_schema(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--schema", str(tmp_path / name)]) == 0
    written = json.loads((tmp_path / name).read_text())
    jsonschema.Draft202012Validator.check_schema(written)
    assert written["title"].startswith("kernelproof/")
    assert capsys.readouterr().err == f"wrote {tmp_path / name}\n"


def test_another_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--schema", str(tmp_path / "s.json")]) == 2
    assert "no schema has this name; there are report.schema.json, " in capsys.readouterr().err
