"""What pytest prints of a run of the suite, from items made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.impl.gpu.interpreted import NOTE
from kernelproof.properties import plugin
from kernelproof.properties.collection.summary import Tally
from kernelproof.properties.collection.xdist_lock import kept


class Section:
    """Collects what would be printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def line(self, text: str, **_: object) -> None:
        self.lines.append(text)


def item(name: str = "mine", law: str = "parity", **more: object) -> dict[str, Any]:
    base = {"implementation": name, "law": law, "configuration": "", "items": 99}
    return {**base, "failed": False, "outcome": "passed", "judged": 10, **more}


def not_run(code: str, needs: str = "") -> dict[str, Any]:
    told = {"code": code, "needs": needs, "reason": f"{code} says no"}
    return item("cuda", outcome="skipped", judged=0, **told)


def known(entry: str, issue: str = "") -> dict[str, Any]:
    told = {"entry": entry, "issue": issue, "cause": "NaN from nothing"}
    return item(entry, outcome="skipped", status="KNOWN", **told)


def printed(*items: dict[str, Any], verbose: int = 0) -> list[str]:
    reporter: Any = Section()
    config: Any = SimpleNamespace(option=SimpleNamespace(verbose=verbose))
    tally = Tally((), {str(number): each for number, each in enumerate(items)})
    tally.pytest_terminal_summary(reporter, config)
    return list(reporter.lines)


def test_what_the_interpreter_ran_is_named_once() -> None:
    lines = printed(item(interpreted=True), item(law="soak", interpreted=True), item("other"))
    assert [each for each in lines if "interpreted" in each] == [f"interpreted: mine: {NOTE}"]
    assert not [each for each in printed(item()) if "interpreted" in each]


def test_the_verdict_is_first_and_the_rest_in_order() -> None:
    wrong = item(law="soak", failed=True, outcome="failed", status="HANG", replay="kernelproof r")
    short = item(
        "slow", failed=True, outcome="failed", status="INCOMPLETE", reason="INCOMPLETE  slow: soak"
    )
    link = "https://example.org/7"
    needing = [not_run("device", "a GPU") for _ in range(3)]
    items = [item(), *needing, not_run("rules"), known("a", link), short, known("b", link), wrong]
    assert printed(*items) == [
        "kernelproof",
        "NOT CONFORMING: 1 finding, 2 known; 50 problems judged",
        "HANG  mine  soak",
        "  kernelproof r",
        f"KNOWN  2 items of a, b: NaN from nothing ({link})",
        "INCOMPLETE  slow: soak",
        "passed: 1 of 9 items",
        "not run: 4 of 9 items: 3 need a GPU, 1 refused by the support rules (-v names them)",
    ]
    every = printed(*items, verbose=1)
    assert "KNOWN  b  parity: b" in every
    assert every.count("not run: cuda  parity: device says no") == 3


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped", "xfailed"])
def test_what_an_interrupted_process_has_kept_is_printed(
    outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report never came: all that is known of the item is what it kept."""
    monkeypatch.setattr(plugin, "_common_folder", lambda _: tmp_path)
    told = {name: value for name, value in item().items() if name not in ("failed", "outcome")}
    told |= {"status": "FAIL", "replay": "kernelproof r"} if outcome == "failed" else {}
    node: Any = SimpleNamespace(config=None, nodeid="one", user_properties=[*told.items()])
    plugin.keep_judged(node, outcome)
    found = kept(tmp_path)
    reported = "skipped" if outcome == "xfailed" else outcome
    assert found == {"one": item(**told, outcome=reported, failed=outcome == "failed")}
    lines = printed(*found.values())
    assert ("FAIL  mine  parity" in lines) == (outcome == "failed")
    assert f"passed: {int(outcome == 'passed')} of 1 item" in lines


def test_the_word_of_the_verdict() -> None:
    short = item(failed=True, outcome="failed", status="INCOMPLETE", reason="too little")
    broken = item(failed=True, outcome="failed", reason="the suite failed")
    cut = item(ended="stopped", outcome="skipped", code="ended", needs="", reason="interrupted")
    words = [
        printed(*items)[1].partition(":")[0]
        for items in ([item()], [item(), short], [short, broken], [item(), cut], [known("a")])
    ]
    assert words == ["CONFORMING", "INCOMPLETE", "NOT CONFORMING", "INCOMPLETE", "CONFORMING"]
    late = printed(item(ended="time"))
    assert late[1].startswith("CONFORMING: ")  # it reached its floor
    assert "1 item ended early, out of time" in late
    assert not printed()
