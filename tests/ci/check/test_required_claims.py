"""Claims that an earlier run wrote down, which --require-claims compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.check.required_claims import RequiredClaims, read_claims
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.reports.claims import claims_rows, claims_text, lost_lines
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.claimed_space import AxisClaims
from kernelproof.properties.findings.names import tell_apart
from kernelproof.properties.findings.report import ImplementationReport, RunReport

KERNELS = """
import torch

from kernelproof.impl import implementation


def merged(inputs):
    lse = torch.logsumexp(inputs.lses, dim=0)
    shift = lse.masked_fill(lse.isneginf(), 0.0)
    weights = torch.exp(inputs.lses - shift).unsqueeze(-1)
    return (weights * inputs.outs).sum(dim=0).to(inputs.out_dtype), lse


def once(problem, target):
    return True if problem.num_states <= 4 else "four states at most"


def now(problem, target):
    return True if problem.dtype == "float32" else "in one precision"


first = implementation("merge_state", name="mine", supports=once)(merged)
second = implementation("merge_state", name="mine", supports=now)(merged)
"""


def report(name: str = "mine", **space: AxisClaims) -> ImplementationReport:
    return ImplementationReport(name, f"k:{name}", "merge_state", claimed_space=space or None)


def run(*reports: ImplementationReport) -> RunReport:
    return RunReport("quick", 0, {}, list(reports))


def claims(tmp_path: Path, *implementations: ImplementationReport) -> RequiredClaims:
    path = tmp_path / "claims.json"
    path.write_text(json.dumps({"implementations": [each.to_json() for each in implementations]}))
    return read_claims(path)


ONCE = report(dtype=AxisClaims(("float32", "float16")), causal=AxisClaims(("False", "True")))
NOW = report(
    dtype=AxisClaims(("float32", "fp8"), {"float16": Refusal("no half")}),
    causal=AxisClaims(("False",), {}, ("True",)),
)


def test_a_value_once_claimed_and_now_refused_is_lost_where_others_were_added(
    tmp_path: Path,
) -> None:
    lost = claims(tmp_path, ONCE).lost(run(NOW), gate=False)
    assert [(each.implementation, each.axis, each.value) for each in lost] == [
        ("mine", "dtype", "float16")
    ]
    assert lost_lines(lost) == ["mine: once claimed, now refused: dtype=float16: no half"]
    assert not claims(tmp_path, NOW).lost(run(ONCE), gate=True)


def test_what_refuses_everything_has_lost_all_and_what_the_run_left_out_nothing(
    tmp_path: Path,
) -> None:
    required = claims(tmp_path, ONCE)
    nothing = ImplementationReport("mine", "k:mine", "merge_state", refusal=Refusal("no"))
    assert len(required.lost(run(nothing), gate=False)) == 4
    nothing.refusal = Refusal("--minutes", "time")
    assert not required.lost(run(nothing), gate=False)
    assert not required.lost(
        run(ImplementationReport("mine", "k:mine", error="it failed")), gate=True
    )


def test_an_implementation_that_is_gone_is_lost(tmp_path: Path) -> None:
    required = claims(tmp_path, ONCE, report("other", dtype=AxisClaims(("float32",))))
    assert not required.lost(run(ONCE), gate=False)  # which names what it judges
    (lost,) = required.lost(run(ONCE), gate=True)
    assert (lost.implementation, lost.axis) == ("other", "")
    assert len(required.lost(run(report("renamed")), gate=False)) == 2


def test_two_of_one_name_are_told_apart_by_their_references(tmp_path: Path) -> None:
    second = ImplementationReport(
        "mine", "other:mine", "merge_state", claimed_space=NOW.claimed_space
    )
    required = claims(tmp_path, ONCE, second)
    assert not required.lost(run(ONCE, second), gate=True)
    (lost,) = required.lost(run(NOW, second), gate=True)
    assert lost.value == "float16"


def test_a_second_kernel_of_the_name_loses_no_claim_and_hides_none(tmp_path: Path) -> None:
    """Whichever run has it, and whether or not the report says which name was declared."""

    def two(first: ImplementationReport) -> list[ImplementationReport]:
        second = ImplementationReport(
            "mine", "other:mine", "merge_state", claimed_space=NOW.claimed_space
        )
        reports = [replace(first, declared={"name": "mine"}), second]
        second.declared = {"name": "mine"}
        tell_apart(reports)
        assert reports[0].name == "mine (k:mine)"
        return reports

    alone, both = claims(tmp_path, ONCE), two(ONCE)
    assert not alone.lost(run(*both), gate=True)
    (lost,) = alone.lost(run(*two(NOW)), gate=False)
    assert (lost.implementation, lost.value) == ("mine (k:mine)", "float16")
    for older in (False, True):
        stored = [each.to_json() for each in both]
        if older:
            for each in stored:
                del each["declared_name"]
        path = tmp_path / "claims.json"
        path.write_text(json.dumps({"implementations": stored}))
        required = read_claims(path)
        assert not required.lost(run(*both), gate=True)
        assert not required.lost(run(ONCE), gate=False)
        for now in (run(NOW), run(*two(NOW))):
            (lost,) = required.lost(now, gate=False)
            assert lost.value == "float16"
        moved = replace(NOW, reference="elsewhere:mine")
        (lost,) = required.lost(run(moved, both[1]), gate=True)
        assert (lost.implementation, lost.value) == ("mine", "float16")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ([], "no list of implementations"),
        ({"implementations": []}, "no list of implementations"),
        ({"implementations": [{}]}, "implementations[0] has no name"),
        ({"implementations": [{"name": "a"}]}, "no implementation in it has a claimed_space"),
        ({"implementations": [{"name": "a", "claimed_space": []}]}, "claimed_space is not a table"),
        (
            {"implementations": [{"name": "a", "claimed_space": {"dtype": {"claimed": [1]}}}]},
            "implementations[0].claimed_space.dtype.claimed is not a list of texts",
        ),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_flag(
    tmp_path: Path, content: object, said: str
) -> None:
    path = tmp_path / "claims.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageRefusedError) as error:
        read_claims(path)
    assert error.value.message.startswith(f"--require-claims {path}: ")
    assert said in error.value.message


def test_a_line_and_rows_of_the_claimed_space() -> None:
    one = Refusal("one sentence")
    made = report(
        dtype=AxisClaims(("float32",), {"float16": one, "bfloat16": one}),
        strides=AxisClaims(("",), {"padded": Refusal("not named", "feature", "padded_states")}),
        causal=AxisClaims(("False", "True"), {}, ("True",)),
        heads=AxisClaims(tuple(map(str, range(1, 20))), {"20": one}),
    )
    assert claims_text(made) == (
        "claimed dtype=float32; strides=''; heads=1, 2, 3, 4, 5, 6 and 13 more; "
        "every value of 1 other axis; "
        "refused dtype=float16, bfloat16, heads=20 (one sentence); 1 feature not named; "
        "not drawn 1 value"
    )
    whole = claims_text(made, whole=True)
    assert "strides=padded (not named)" in whole
    assert whole.endswith("not drawn causal=True")
    assert claims_rows(made)[0] == ("dtype", "float32", "float16, bfloat16 (one sentence)", "")
    assert claims_text(ImplementationReport("a", "a")) == ""


def test_a_run_shows_its_claims_and_fails_where_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(KERNELS)

    def check(name: str, *words: str) -> tuple[int, str]:
        options = ("--profile", "quick", "--law", "parity", "--jobs", "1")
        code = main(["check", f"mine.py:{name}", *options, *words])
        return code, capsys.readouterr().out

    code, out = check("first", "--json", "claims.json")
    assert code == 0
    assert "claims: mine: claimed num_states=2, 1, 3, 4; " in out
    assert "refused num_states=7 (four states at most)" in out
    found: dict[str, Any] = json.loads(Path("claims.json").read_text())
    space = found["implementations"][0]["claimed_space"]
    assert space["num_states"]["refused"] == {"7": "four states at most"}
    assert space["dtype"]["claimed"] == ["float32", "float16", "bfloat16"]

    more = ("--require-claims", "claims.json")
    code, out = check("second", *more, "--json", "b.json", "--html", "b.html", "--junit", "b.xml")
    assert code == 1
    assert out.startswith("NOT CONFORMING: 2 claims lost; no new finding")
    line = "mine: once claimed, now refused: dtype=float16, dtype=bfloat16: in one precision"
    assert f"lost claim: {line}" in out.splitlines()
    lost = json.loads(Path("b.json").read_text())["lost_claims"]
    assert lost[0] == {
        "implementation": "mine",
        "axis": "dtype",
        "value": "float16",
        "reason": "in one precision",
    }
    assert line in Path("b.html").read_text()
    assert 'id="claims"' in Path("b.html").read_text()
    assert line in Path("b.xml").read_text()
    assert check("first", *more)[0] == 0
    assert check("first", *more, "--only", "dtype=float32")[0] == 2
