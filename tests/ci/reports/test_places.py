"""Findings at the lines of their kernels: SARIF, annotations of GitHub Actions, JUnit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from kernelproof.ci.reports.annotations import annotation_lines
from kernelproof.ci.reports.run_outline import to_junit
from kernelproof.ci.reports.sarif import to_sarif
from kernelproof.ci.reports.summary import Summary, summarise
from kernelproof.properties.findings.kernels import FileRun, KernelRuns
from kernelproof.properties.findings.ledger import Entry, Ledger
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.tasks import source_place
from kernelproof.reference import MergeProblem

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
LEVELS = {"enum": ["none", "note", "warning", "error"]}
LOCATIONS = {
    "type": "array",
    "minItems": 1,  # of GitHub
    "items": {
        "type": "object",
        "properties": {
            "physicalLocation": {
                "type": "object",
                "properties": {
                    "artifactLocation": {
                        "properties": {"uri": {"type": "string", "pattern": "^(file://)?[^: ]+$"}},
                        "required": ["uri"],
                    },
                    "region": {"properties": {"startLine": {"type": "integer", "minimum": 1}}},
                },
                "required": ["artifactLocation", "region"],
            }
        },
        "required": ["physicalLocation"],
    },
}
NEEDED = {
    "type": "object",
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "tool": {
                        "properties": {
                            "driver": {
                                "properties": {
                                    "name": {"type": "string"},
                                    "rules": {
                                        "items": {
                                            "properties": {"shortDescription": TEXT},
                                            "required": ["id"],
                                        },
                                        "uniqueItems": True,
                                    },
                                },
                                "required": ["name"],
                            }
                        },
                        "required": ["driver"],
                    },
                    "invocations": {
                        "items": {
                            "properties": {
                                "toolExecutionNotifications": {
                                    "items": {
                                        "properties": {"message": TEXT, "level": LEVELS},
                                        "required": ["message"],
                                    }
                                }
                            },
                            "required": ["executionSuccessful"],
                        }
                    },
                    "results": {
                        "items": {
                            "properties": {
                                "message": TEXT,
                                "level": LEVELS,
                                "locations": LOCATIONS,
                                "relatedLocations": LOCATIONS,
                                "suppressions": {
                                    "items": {
                                        "properties": {"kind": {"enum": ["inSource", "external"]}},
                                        "required": ["kind"],
                                    }
                                },
                            },
                            "required": ["message", "ruleId", "locations"],
                        }
                    },
                },
                "required": ["tool"],
            },
        },
    },
    "required": ["version", "runs"],
}
"""What SARIF 2.1.0 and GitHub's code scanning require of the parts that are written."""
ENTRY = Entry(
    id="merge-empty",
    implementation="mine",
    status="FAIL",
    where={},
    reason="no rows",
    case=Path("c"),
)
BAD = Verdict("FAIL", "numeric", "out[0, 1] is 100% wrong\n::error::x")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with a file of kernels in a folder whose name is no URI, and enter it."""
    (tmp_path / ".git").mkdir()
    file = tmp_path / "my src" / "kernels.py"
    file.parent.mkdir()
    file.write_text("one\n" * 20)
    monkeypatch.chdir(file.parent)
    return file


def ended(*laws: LawReport, place: Any = None, **more: Any) -> Summary:  # noqa: ANN401  JSON
    report = ImplementationReport("mine", "kernels:mine", "merge_state", laws=list(laws))
    report.declared = {"place": place}
    run = RunReport("quick", 0, {"device": "cpu"}, [replace(report, **more)])
    return summarise(run, Ledger((ENTRY,)), gate=False, command="kernelproof check mine")


def law(
    name: str, *lines: int, file: Path = Path("none.py"), entry: str | None = None
) -> LawReport:
    runs = KernelRuns({str(file): FileRun(launched={line: {} for line in lines})} if lines else {})
    found = Finding("mine", name, BAD, MergeProblem(seed=len(lines)), entry=entry)
    known = Counter({entry: 1} if entry else {})
    return LawReport(name, judged=3, finding=found, kernels=runs, known=known)


def results(summary: Summary) -> list[dict[str, Any]]:
    log = to_sarif(summary)
    jsonschema.validate(log, NEEDED)
    (run,) = log["runs"]
    rules = [each["id"] for each in run["tool"]["driver"]["rules"]]
    assert {each["ruleId"] for each in run["results"]} <= set(rules)
    assert len(rules) == len(set(rules))
    found: list[dict[str, Any]] = run["results"]
    return found


def where(result: dict[str, Any], name: str = "locations") -> list[tuple[str, int]]:
    found = [each["physicalLocation"] for each in result.get(name, ())]
    return [(unquote(e["artifactLocation"]["uri"]), e["region"]["startLine"]) for e in found]


def test_a_finding_stands_at_the_kernels_that_its_law_launched(kernels: Path) -> None:
    made = ended(law("parity", 5, 9, file=kernels), place=[str(kernels), 14])
    (result,) = results(made)
    assert (result["level"], where(result)) == ("error", [("my src/kernels.py", 5)])
    assert where(result, "relatedLocations") == [("my src/kernels.py", 9)]
    (line,) = annotation_lines(made)
    assert line.startswith(
        "::error file=my src/kernels.py,line=5,title=FAIL numeric parity::mine: "
    )
    (case,) = ET.fromstring(to_junit(made)).iter("testcase")  # noqa: S314
    assert (case.get("file"), case.get("line")) == ("my src/kernels.py", "5")


def test_without_a_kernel_it_stands_at_the_implementation(kernels: Path) -> None:
    (result,) = results(ended(law("parity"), place=[str(kernels), 14]))
    assert where(result) == [("my src/kernels.py", 14)]


def notes_of(summary: Summary) -> list[dict[str, Any]]:
    (invocation,) = to_sarif(summary)["runs"][0]["invocations"]
    found: list[dict[str, Any]] = invocation["toolExecutionNotifications"]
    return found


@pytest.mark.parametrize("file", ["<ipython-input-1>", "a\0b", "gone.py"])
@pytest.mark.usefixtures("kernels")
def test_a_finding_without_a_file_is_a_notification(file: str) -> None:
    made = ended(law("parity", 3, file=Path(file)), place=[file, 1])
    assert results(made) == []
    (note,) = notes_of(made)
    assert (note["level"], note["associatedRule"]) == ("error", {"id": "parity"})
    (line,) = annotation_lines(made)
    assert line.startswith("::error title=FAIL numeric parity::")


def test_installed_packages_are_no_files_of_the_repository(kernels: Path) -> None:
    file = kernels.parent / ".venv" / "lib" / "site-packages" / "theirs.py"
    file.parent.mkdir(parents=True)
    file.touch()
    kernel = law("parity", 3, file=file)
    assert where(results(ended(kernel, place=[str(kernels), 14]))[0]) == [("my src/kernels.py", 14)]
    made = ended(kernel)
    (result,) = results(made)
    assert where(result) == [(f"file://{file}", 3)]
    (line,) = annotation_lines(made)
    assert line.startswith("::error title=")


def test_a_known_finding_is_a_warning_with_its_reason(kernels: Path) -> None:
    made = ended(law("merge_identity", 5, file=kernels, entry="merge-empty"))
    (result,) = results(made)
    assert result["level"] == "warning"
    assert result["suppressions"] == [{"kind": "external", "justification": "no rows"}]
    (line,) = annotation_lines(made)
    assert line.startswith("::warning file=my src/kernels.py,line=5,title=KNOWN merge_identity::")
    assert not list(annotation_lines(ended(law("merge_identity", entry="merge-empty"))))


@pytest.mark.usefixtures("kernels")
def test_an_annotation_is_one_line_whatever_a_kernel_says() -> None:
    (line,) = annotation_lines(ended(law("parity")))
    assert "\n" not in line
    assert "is 100%25 wrong%0A" in line
    assert line.count("::error") == 1
    (named,) = annotation_lines(ended(error="a,b: 50%\r\n::warning::"))
    assert named.startswith("::error title=kernelproof::mine: a,b: 50%25")


@pytest.mark.usefixtures("kernels")
def test_what_could_not_be_judged_is_told_too() -> None:
    made = ended(error="there is no module 'a'")
    assert results(made) == []
    (note,) = notes_of(made)
    assert note["message"]["text"] == "mine: there is no module 'a'"
    assert not to_sarif(made)["runs"][0]["invocations"][0]["executionSuccessful"]


def decorated(function: Any) -> Any:  # noqa: ANN401  any function
    return function


@decorated
@decorated
def written_here() -> None: ...


def test_the_line_of_a_function_is_that_of_its_name() -> None:
    lines = Path(__file__).read_text().splitlines()
    assert source_place(written_here) == (
        __file__,
        1 + lines.index("def written_here() -> None: ..."),
    )


@pytest.mark.parametrize("function", [len, print, eval("lambda: 0"), object(), None])  # noqa: S307
def test_what_has_no_source_has_no_line(function: object) -> None:
    assert source_place(function) is None
