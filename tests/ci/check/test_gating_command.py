"""`kernelproof check --gating`: rules that tell the truth about a kernel, and rules that lie."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from kernelproof.ci.check import checking, gate, gating_command
from kernelproof.ci.cli import main
from kernelproof.properties.gating import trying
from kernelproof.properties.isolation.workers import Deadlines

KERNELS = dedent(
    """
    import os, time
    from kernelproof.impl import implementation
    from kernelproof.reference import merge_states

    def behave(inputs):
        out, lse = merge_states(inputs.outs.double(), inputs.lses.double())
        out, lse = out.to(inputs.out_dtype), lse.float()
        if inputs.outs.shape[-1] == 16:
            raise ValueError("there is no tile for head dim 16")
        if inputs.outs.shape[-1] == 64:
            return out + 1.0, lse
        if inputs.outs.shape[-1] == 80:
            os.abort()
        while inputs.outs.shape[-1] == 256:
            time.sleep(0.01)
        return out, lse

    kernel = implementation("merge_state", name="kernel", backend="torch-sdpa")(behave)
    ungated = implementation("merge_state", name="ungated")(behave)

    @implementation("merge_state", name="slow-to-build", backend="torch-sdpa", build_ahead=True,
                    compile_key=lambda problem: (problem.dtype, problem.head_dim))
    def slow_to_build(inputs):
        if inputs.outs.shape[-1] == 4:
            raise RuntimeError("Ninja build failed. Ninja output:\\nno such instruction")
        return behave(inputs)
    """
)
TRUTH = {
    "works": 'effect = "allow"\nchips = ["cpu"]\nwhen = { head_dim_qk = [4, 128] }',
    "no-tile": 'effect = "refuse"\nwhen = { head_dim_qk = 16 }',
    "wrong": 'effect = "refuse"\nwhen = { head_dim_qk = 64 }\ncalled = ["wrong"]',
    "aborts": 'effect = "refuse"\nwhen = { head_dim_qk = 80 }\ncalled = ["wrong", "crashes"]',
    "hangs": 'effect = "refuse"\nwhen = { head_dim_qk = 256 }\ncalled = ["hangs"]',
}
OUTCOMES = {
    "head dim 4": "right",
    "head dim 16": "raises",
    "head dim 64": "wrong",
    "head dim 80": "crashes",
    "head dim 256": "hangs",
}


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str
    data: dict[str, Any]

    @property
    def outcomes(self) -> dict[str, str]:
        """What became of each head dim."""
        return {
            trial["cell"].removeprefix("merge, "): trial["outcome"] for trial in self.data["trials"]
        }

    @property
    def findings(self) -> dict[str, str]:
        """What each finding says of the rules, by cell."""
        return {
            trial["cell"].removeprefix("merge, "): trial["meaning"]
            for trial in self.data["trials"]
            if trial["status"] == "finding"
        }


Command = Callable[..., Ended]


@pytest.fixture
def gating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # else a cell's text may be broken, by the longest path
    monkeypatch.setattr(trying, "CALLING_SLOWLY", Deadlines(run=1.5))

    def command(*words: str, rules: dict[str, str] | None = None) -> Ended:
        folder = tmp_path / f"rules-{len(list(tmp_path.glob('rules-*')))}"  # rules are read once
        folder.mkdir()
        (folder / "rules.toml").write_text(
            "".join(
                f'[[rule]]\nid = "{name}"\noperation = ["merge_state"]\nbackend = ["torch-sdpa"]\n'
                f'reason = "so it is"\nsource = "here"\n{text}\n'
                for name, text in (rules or TRUTH).items()
            )
        )
        capfd.readouterr()
        code = main(
            ["check", "--gating", "--jobs", "1", *words, "--rules", str(folder), "--json", "o.json"]
        )
        out, err = capfd.readouterr()
        path = Path("o.json")
        return Ended(code, out, err, json.loads(path.read_text()) if path.exists() else {})

    return command


def test_rules_that_tell_the_truth(gating: Command) -> None:
    ended = gating("kernels:kernel")
    assert ended.code == 0, ended.out
    assert {title: ended.outcomes[title] for title in OUTCOMES} == OUTCOMES
    assert ended.outcomes["merge"] == ended.outcomes["float16"] == "right"
    assert ended.data["verdict"] == "conforming"
    assert (ended.data["findings"], ended.data["known"]) == (0, 3)
    statuses = {trial["cell"]: trial["status"] for trial in ended.data["trials"]}
    assert statuses["merge, head dim 16"] == "ok"
    assert statuses["merge, head dim 80"] == "known"
    for told in ("no-tile", "refused cleanly: ValueError: there is no tile", "hung: did not end"):
        assert told in ended.out
    assert "of 8 cells tried" in ended.out


def test_cells_for_which_there_is_no_time_are_named(gating: Command) -> None:
    ended = gating("kernels:kernel", "--minutes", "0.00001")
    assert (ended.code, ended.data["verdict"], ended.data["ended"]) == (4, "incomplete", "time")
    assert "INCOMPLETE: the time was over (--minutes) before every cell was tried" in ended.out
    assert gating("kernels:kernel", "--minutes", "0.00001", "--allow-incomplete").code == 0


def test_a_gate_shares_its_minutes_among_laws_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def judged(request: checking.Request) -> int:
        given.append(request.minutes)
        return 0

    def tried(request: gating_command.GatingRequest) -> None:
        given.append(request.minutes)
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "examine", judged)
    monkeypatch.setattr(gate, "tried", tried)
    assert main(["gate", "--gating", "--minutes", "10"]) == 130
    laws, table = given
    assert laws == 6.0
    assert table == pytest.approx(10.0, abs=0.1)  # what the laws leave


@pytest.mark.parametrize(("flags", "code", "tables"), [(["-x"], 1, 0), ([], 1, 1), (["-x"], 4, 1)])
def test_a_gate_that_ends_at_its_first_finding_tries_no_table(
    flags: list[str], code: int, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[gating_command.GatingRequest] = []

    def stop(request: gating_command.GatingRequest) -> None:
        tried.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "examine", lambda _: code)
    monkeypatch.setattr(gate, "tried", stop)
    assert main(["gate", "--gating", *flags]) == (130 if tables else code)
    assert len(tried) == tables


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_a_gate_that_allows_what_fails(gating: Command, dim: int) -> None:
    lie = f'effect = "allow"\nchips = ["cpu"]\nwhen = {{ head_dim_qk = {dim} }}'
    ended = gating("kernels:kernel", rules={"works": TRUTH["works"], "lie": lie})
    assert ended.code == 1
    assert ended.findings == {f"head dim {dim}": "lie allows what does not work"}
    finding = next(trial for trial in ended.data["trials"] if trial["meaning"])
    assert finding["outcome"] == OUTCOMES[f"head dim {dim}"]
    words = shlex.split(finding["replay"])
    assert words[:2] == ["kernelproof", "replay"]
    assert finding["replay"] in ended.out


def test_a_gate_that_refuses_what_works(gating: Command) -> None:
    lie = 'effect = "refuse"\nwhen = { head_dim_qk = 4 }'
    ended = gating("kernels:kernel", rules={"works": TRUTH["works"], "lie": lie})
    assert ended.code == 1
    assert ended.findings == {"head dim 4": "lie refuses what works: it may be too strict"}
    # What is right in small and known to fail in large says so.
    documented = lie + '\ncalled = ["wrong", "right"]'
    assert gating("kernels:kernel", rules={"works": TRUTH["works"], "lie": documented}).code == 0


@pytest.mark.parametrize(("rule", "dim"), [("wrong", 64), ("aborts", 80)])
def test_a_rule_that_calls_a_dirty_refusal_clean(gating: Command, rule: str, dim: int) -> None:
    lie = TRUTH[rule].partition("\ncalled")[0]
    ended = gating("kernels:kernel", rules={"works": TRUTH["works"], rule: lie})
    assert ended.code == 1
    outcome = OUTCOMES[f"head dim {dim}"]
    assert ended.findings == {
        f"head dim {dim}": f"{rule} does not say that the call {outcome} (its `called`)"
    }


def test_a_finding_is_replayed_without_flags(gating: Command) -> None:
    lie = TRUTH["wrong"].partition("\ncalled")[0]
    ended = gating("kernels:kernel", rules={"wrong": lie})
    replay = next(trial["replay"] for trial in ended.data["trials"] if trial["replay"])
    case = Path(shlex.split(replay)[2])
    assert json.loads(case.read_text())["without_rules"] == ["*"]
    # The shipped rules know nothing of this backend's merges: they are not asked.
    assert main(["replay", str(case)]) == 1


def test_only_the_modules_that_are_wanted_are_built(gating: Command) -> None:
    rules = {name: TRUTH[name] for name in ("works", "no-tile", "wrong")}
    ended = gating("kernels:slow_to_build", "--modules", "3", rules=rules)
    assert ended.code == 0, ended.out
    report = ended.data["implementations"][0]
    assert (report["modules"], report["tried"], report["cells"]) == (3, 3, 6)
    # The simplest first, and then one for each rule that there is.
    assert {title for title, outcome in ended.outcomes.items() if outcome != "not run"} == {
        "merge",
        "head dim 16",
        "head dim 64",
    }
    messages = {trial["message"] for trial in ended.data["trials"] if trial["outcome"] == "not run"}
    assert messages == {"its module is not among those that were to be built"}
    everything = gating("kernels:slow_to_build", rules=rules)
    assert everything.code == 1
    assert everything.data["implementations"][0]["modules"] == 6
    assert everything.outcomes["head dim 4"] == "raises"
    assert everything.findings == {"head dim 4": "works allows what does not work"}
    unbuilt = [each for each in everything.data["implementations"][0]["builds"] if each["message"]]
    assert [each["key"] for each in unbuilt] == ["('bfloat16', 4)"]


def test_only_the_cells_that_are_asked_for_are_tried(gating: Command) -> None:
    ended = gating("kernels:kernel", "--only", "head_dim=16,64", "--only", "dtype=bfloat16")
    assert ended.code == 0, ended.out
    assert ended.outcomes == {
        "head dim 16": OUTCOMES["head dim 16"],
        "head dim 64": OUTCOMES["head dim 64"],
    }
    none = gating("kernels:kernel", "--only", "dtype=float32", "--only", "head_dim=16")
    assert none.code == 3
    assert "none of its 8 cells has dtype=float32 head_dim=16" in none.out


def test_what_no_rule_is_about(gating: Command) -> None:
    ended = gating("kernels:ungated")
    assert ended.code == 3
    assert "names no backend" in ended.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--law", "parity"], "--law does not go with --gating"),
        (["--html", "page.html"], "--html does not go with --gating"),
        (["--from", "."], "--from does not go with --gating"),
        (["--only", "dtype=float8"], "--only: dtype=float8 is no value of it"),
        (["--only", "phase=decode"], "--only phase does not go with --gating"),
        (["--expectations", "absent.toml"], "--expectations: absent.toml"),
        (["kernels:absent"], "has no 'absent'"),
    ],
)
def test_wrong_usage(gating: Command, words: list[str], told: str) -> None:
    ended = gating("kernels:kernel", *words)
    assert ended.code == 2
    assert told in ended.out + ended.err


def test_rules_that_cannot_be_read(gating: Command) -> None:
    lie = TRUTH["no-tile"] + '\ncalled = ["explodes"]'
    ended = gating("kernels:kernel", rules={"no-tile": lie})
    assert ended.code == 2
    assert "'no-tile': Invalid value 'explodes' - at `$.rule[0].called[0]`" in ended.err
    lie = TRUTH["works"] + '\ncalled = ["right"]'
    said = "'a': called speaks of a call that is refused"
    assert said in gating("kernels:kernel", rules={"a": lie}).err


def test_rules_go_with_gating(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "torch-sdpa-paged", "--rules", "."]) == 2
    assert "--rules goes with --gating" in capfd.readouterr().err
