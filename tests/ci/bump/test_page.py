"""The page of a comparison, as text: what it says, and that nothing in a report becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
from collections import Counter
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from kernelproof.ci.bump.report.outline import alike, print_report, to_markdown
from kernelproof.ci.bump.report.page import EDGES, backends, speeds, spreads, to_page
from kernelproof.ci.bump.report.page_findings import anchors, details, differing, link, parameters
from kernelproof.ci.bump.verdicts.findings import finding
from kernelproof.ci.cli import main
from kernelproof.ci.console.rendering import cut, number, seconds
from kernelproof.impl.gpu.interpreted import CLAIM, NOTE
from kernelproof.properties.findings.files import dumps
from kernelproof.properties.verdicts.comparison import bitwise, within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelproof.ci.bump.report.page_findings import Row

NASTY = (
    "</script></style><img src=//x onerror=hit=1>\"' onclick=hit=1 {{ 7 * 7 }} \x00\x1b \u202e &lt;"
)
FIXED = {"verdict", "action", "area", "change"}
"""Fields of a report whose words are ours."""
VOID = {"meta", "br", "rect", "line", "circle", "input"}


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes.append((name, value or ""))
            self.ids += [value or ""] if name == "id" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data


def nasty(value: Any) -> Any:  # noqa: ANN401  any JSON
    """Replace every free text in a report, and add a name to each dictionary of free names."""
    if isinstance(value, str):
        return NASTY
    if isinstance(value, dict):
        changed = {name: each if name in FIXED else nasty(each) for name, each in value.items()}
        return (
            {**changed, NASTY: NASTY} if value.keys() & {"signature", "FMHA", "Gelu"} else changed
        )
    return [nasty(each) for each in value] if isinstance(value, list | tuple) else value


def row_of(baseline: dict[str, Any], candidate: dict[str, Any], place: str) -> Row:
    told = finding("new-failure", "x", "x", baseline=baseline, candidate=candidate).to_json()
    rows: list[Row] = details(told)["rows"]
    return next(row for row in rows if row.name == place)


def test_it_says_all_that_the_report_has(report: Callable[..., dict[str, Any]]) -> None:
    made = report()
    page = Page(to_page(made))
    text = " ".join(page.text.split())
    assert not page.open
    assert made["message"] in text
    for each in made["findings"]:
        assert each["message"].removeprefix(f"{each['subject']}: ") in text
        assert each["rule"] in text
        assert each["id"] in text
        for command in each["replay"].values():
            assert command in text
    for told in (
        *(each["rule"] for each in made["conditions"]),
        *(each[name] for each in made["not_tested"] for name in ("what", "why")),
        *made["failures"],
        "merge-empty: merging nothing",
        "https://example.org/issues/1",
        "MergeProblem(3)",
        "Accepted: nobody calls it",
        "nothing was found that accept 'x/*' is about",
        "NVIDIA H200",
        "1 implementation: other",
        "needs SM100",
        "seed 0; soaked 1 with 200 launches a problem: 0 hangs, 0 failures",
        "158f6fa1",
        "batch_decodeSM120compiled",
    ):
        assert told in text, told


def test_it_needs_nothing_else(report: Callable[..., dict[str, Any]]) -> None:
    source = to_page(report())
    page = Page(source)
    assert not page.tags.keys() & {"link", "img", "iframe", "object", "base", "video", "audio"}
    assert not {name for name, _ in page.attributes} & {"src", "srcset", "style", "onclick"}
    links = {value for name, value in page.attributes if name == "href" and value[:1] != "#"}
    assert links == {"https://example.org/issues/1"}
    assert "@import" not in source
    assert "url(" not in source


def test_every_link_leads_somewhere(report: Callable[..., dict[str, Any]]) -> None:
    page = Page(to_page(report()))
    assert len(page.ids) == len(set(page.ids))
    targets = {value[1:] for name, value in page.attributes if name == "href" and value[:1] == "#"}
    labels = {value for name, value in page.attributes if name == "aria-labelledby"}
    assert targets | labels <= set(page.ids)


def test_its_policy_allows_its_own_style_and_script_alone(
    report: Callable[..., dict[str, Any]],
) -> None:
    source = to_page(report())
    policy = html.unescape(source)
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_no_text_becomes_markup(report: Callable[..., dict[str, Any]]) -> None:
    plain, page = Page(to_page(report())), Page(to_page(nasty(report())))
    assert not page.open
    assert not page.tags.keys() - plain.tags.keys()
    assert page.tags["script"] == 1
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on") and name != "on"}
    assert not [v for name, v in page.attributes if name == "href" and v[:1] != "#"]
    assert "{{ 7 * 7 }}" in page.text
    assert "\\x00\\x1b" in page.text
    assert not set(page.text) & {"\x00", "\x1b", "\u202e"}


@pytest.mark.parametrize(
    ("address", "followed"),
    [
        ("https://example.org/1", True),
        ("http://example.org/1", True),
        ("javascript:alert(1)", False),
        ("data:text/html,x", False),
        ("https://example.org/ x", False),
        ('https://example.org/"x', False),
        ("merging nothing", False),
        ("", False),
    ],
)
def test_what_is_an_address(address: str, followed: bool) -> None:
    assert link(address) == (address if followed else "")


def test_numbers_stand_beside_those_of_the_oracle() -> None:
    expected = torch.tensor([0.0, 0.25], dtype=torch.float64)
    bound = torch.full((2,), 1e-3, dtype=torch.float64)
    wrong = within("out", torch.tensor([0.0, 0.5]), expected, bound)
    nan = within("out", torch.tensor([0.0, torch.nan]), expected, bound)
    exact = bitwise("out", torch.tensor([0.0, 0.5]), expected.float())
    passed = within("out", expected.clone(), expected, bound)
    place = "out[1]"
    row = row_of(passed.to_json(), wrong.to_json(), place)
    assert (row.baseline[0][0], row.candidate[0][0]) == ("inside the bound", "0.5")
    assert row.oracle == "0.25 ± 0.001"
    row = row_of(nan.to_json(), wrong.to_json(), place)
    assert (row.baseline[0][0], row.candidate[0][0]) == ("NaN", "0.5")
    assert row.oracle == "0.25 ± 0.001"
    assert row_of(passed.to_json(), exact.to_json(), place).oracle == "0.25, exactly"
    assert row_of(passed.to_json(), wrong.to_json(), "error over bound").oracle == "at most 1"


def test_a_side_that_has_no_such_code_has_no_number() -> None:
    element = {"where": "out[0]", "got": "NaN", "expected": "0", "bound": ""}
    wrong = {"status": "FAIL", "kind": "nan", "message": "in any words", "element": element}
    row = row_of({"status": "not there"}, wrong, "out[0]")
    assert (row.baseline[0][0], row.candidate[0][0], row.oracle) == ("", "NaN", "0")


def test_signatures_show_what_moved() -> None:
    old, new = differing(parameters("(a, b='x, y', *, d)"), parameters("(a, c=(1, 2), b='x, y')"))
    assert [text for text, kind in old if kind == "del"] == ["*, d)"]
    assert [text for text, kind in new if kind == "ins"] == ["c=(1, 2), "]
    assert "".join(text for text, _ in old) == "(a, b='x, y', *, d)"
    assert "".join(text for text, _ in new) == "(a, c=(1, 2), b='x, y')"


def test_what_is_the_same_is_told_in_a_line() -> None:
    old = {"A": 0, "B": 1, "C": 2, "D": 3, "E": 8}
    told = finding("enum-number-moved", "T", "m", baseline=old, candidate={**old, "E": 9})
    shown = details(told.to_json())
    assert [row.name for row in shown["rows"]] == ["E"]
    assert shown["same"] == "A 0, B 1, C 2, D 3"


def test_anchors_are_unique_and_plain() -> None:
    given = [{"id": "a/b c"}, {"id": "a/b-c"}, {"id": NASTY}]
    found = anchors(given)
    assert len(set(found.values())) == 3
    assert found["a/b c"] == "f-a-b-c"
    assert all(re.fullmatch(r"f-[A-Za-z0-9_.-]+", each) for each in found.values())


def test_the_matrix_sums_up(report: Callable[..., dict[str, Any]]) -> None:
    (made,) = backends(report()["features"])
    assert [(cell.text, cell.tone, cell.small) for cell in made.total] == [
        ("2/2", "gained", "1c +1"),
        ("2/2", "gained", "1r 1c +1"),
        ("0/2", "lost", "−1"),  # noqa: RUF001  a minus
    ]
    assert (made.gained, made.lost) == (2, 1)
    assert made.notes == ((1, "it hangs"),)
    (_, decode), (_, window) = made.rows
    assert [(cell.text, cell.small) for cell in decode] == [
        ("yes", "c"),
        ("yes", "r"),
        ("yes → no", "1"),
    ]
    assert [cell.tone for cell in decode] == ["yes", "yes", "lost"]
    assert [cell.tone for cell in window] == ["gained", "gained", "unknown"]
    assert list(backends(None)) == []


def test_chips_of_which_the_same_is_said_stand_together(
    report: Callable[..., dict[str, Any]],
) -> None:
    chips = [
        {"chip": chip, "name": f"SM{chip}", "verdict": verdict, "evidence": "declared",
         "blocked_by": [], "conditions": []}
        for chip, verdict in ((80, "bump"), (89, "bump"), (90, "do not bump"))
    ]  # fmt: skip
    assert [each.names for each in alike(chips)] == [("SM90",), ("SM80", "SM89")]
    assert len(alike(report()["chips"])) == 3


def test_distributions_are_drawn_to_one_scale(report: Callable[..., dict[str, Any]]) -> None:
    machine = report()["machines"][0]
    ((name, both, drawn),) = spreads(machine)
    assert name == "merge"
    old, new = both["baseline"], both["candidate"]
    assert (old.count, old.median, old.worst, new.worst) == (3, 0.001, 0.5, 1.0)
    assert (old.counts, new.counts) == (
        (1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1), (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1)
    )  # fmt: skip
    assert len(old.counts) == len(EDGES)  # 1 is in the last bar: the bound itself
    assert "median 0.001 and worst 0.5 with the baseline; median 0.002 and worst 1" in drawn
    machine["implementations"][0]["ratios"] = {"baseline": [], "candidate": ["inf"]}
    assert list(spreads(machine)) == []


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.3, 1.5, "slower"), (0.5, 0.7, "faster"), (0.9, 1.1, "no clear change"),
     (1.0, 3.0, "no clear change")],
)  # fmt: skip
def test_ratios_of_time_in_words(
    report: Callable[..., dict[str, Any]], low: float, high: float, word: str
) -> None:
    machine = report()["machines"][0]
    (one,) = machine["timings"]["speed"][0]["measurements"]
    one.update(low=low, high=high, ratio=(low + high) / 2)
    (made,) = speeds(machine, 1.25)
    assert made.word == word
    assert f"{(low + high) / 2:.2f} times the seconds, from {low:.2f} to {high:.2f}" in made.drawn
    one.update(ratio="nan")
    assert speeds(machine, 1.25) == []


def test_memory_in_words(report: Callable[..., dict[str, Any]]) -> None:
    machine = report()["machines"][0]
    (one,) = machine["timings"]["speed"][0]["measurements"]
    assert speeds(machine, 1.25)[0].memory == ""
    one["peak_bytes"] = {"baseline": 20_480, "candidate": 3_000_000}
    one["workspace_bytes"] = {"baseline": 0, "candidate": None}  # one side has no session
    assert speeds(machine, 1.25)[0].memory == "allocates 20.5 kB and 3.0 MB"
    one["workspace_bytes"] = {"baseline": 0, "candidate": 1_000}
    made = speeds(machine, 1.25)[0].memory
    assert made.endswith("3.0 MB; needs of its workspace 0 bytes and 1.0 kB")


@pytest.mark.parametrize("name", ["verdict", "chips", "findings", "features", "machines"])
def test_what_a_failed_comparison_lacks(report: Callable[..., dict[str, Any]], name: str) -> None:
    empty: dict[str, Any] = {"verdict": "undecided", "features": None}
    page = Page(to_page(report(**{name: empty.get(name, [])})))
    assert not page.open


def test_a_large_report_is_a_page_of_bearable_size(report: Callable[..., dict[str, Any]]) -> None:
    some = report()["findings"]
    many = [{**some[i % len(some)], "id": f"{i}"} for i in range(500)]
    made = report(findings=many)
    made["features"]["rows"] *= 90  # 180 lines, as the support table has
    assert len(to_page(made).encode()) < 2e6


def test_numbers_and_times() -> None:
    assert [number(each) for each in (1234, 0.12345, "inf", None)] == ["1,234", "0.123", "inf", ""]
    assert [seconds(each) for each in (1.5, 0.0123, 2e-5, "nan")] == [
        "1.5 s",
        "12.3 ms",
        "20 µs",
        "nan",
    ]
    assert cut("abc", 3) == "abc"
    assert cut("abcdefgh", 3) == "abc ... (5 more characters: see the JSON)"


def test_merge_writes_the_page_of_several_machines(
    report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    other = report()
    other["machines"][0] |= {"chip": 120, "device_name": "NVIDIA B6000"}
    for name, made in (("a", report()), ("b", other)):
        (tmp_path / f"{name}.json").write_text(dumps(made))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    page = tmp_path / "new" / "all.html"
    assert main(["merge", *files, "--html", str(page)]) == 1
    text = Page(page.read_text(encoding="utf-8")).text
    assert "NVIDIA H200" in text
    assert "NVIDIA B6000" in text
    assert "inf" in text  # a number that JSON has no other way to write


def test_claims_of_what_was_judged_are_told(report: Callable[..., dict[str, Any]]) -> None:
    made = report()
    machine = next(each for each in made["machines"] if each["implementations"])
    first = machine["implementations"][0]
    first |= {"claims": ["declares something"], "judged": 3}
    told = f"{first['name']} declares something"
    assert told in " ".join(Page(to_page(made)).text.split())
    assert f"{first['name']} declares something" in to_markdown(made)
    first["judged"] = 0
    assert "declares something" not in to_page(made) + to_markdown(made)


def test_the_screen_says_what_was_interpreted(report: Callable[..., dict[str, Any]]) -> None:
    made = report()
    machine = next(each for each in made["machines"] if each["implementations"])
    first = machine["implementations"][0]
    first |= {"claims": [], "judged": 3}
    for claims, verbose, said in (
        ([], False, ""),
        ([CLAIM], False, f"interpreted: 1 implementation: {NOTE}"),
        ([CLAIM], True, f"interpreted: {first['name']}: {NOTE}"),
    ):
        first["claims"] = claims
        out = Console(file=io.StringIO(), width=1000)
        print_report(out, made, verbose=verbose)
        told = " ".join(out.file.getvalue().split())  # type: ignore[attr-defined]
        assert said in told
        assert ("interpreted" in told) == bool(claims)
