"""The ledger: what it refuses to read, what an entry explains, and the entries that ship."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kernelproof.fixtures import CORPUS, LEDGER
from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.gating import decide, load_rules
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.findings.expectations import read_expectations
from kernelproof.properties.findings.ledger import (
    Entry,
    Ledger,
    LedgerError,
    load_ledger,
    read_case,
)
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import LAWS, laws_of
from kernelproof.properties.space.attention_axes import ATTENTION_AXES
from kernelproof.properties.verdicts.verdict import BAD, FAIL_KINDS, Verdict
from kernelproof.properties.worker.pools import HANDLER
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import AttentionProblem, MergeProblem, Problem, RouteProblem

CASE = {
    "schema": "kernelproof/case/1",
    "law": "parity",
    "implementation": "mine",
    "problem": MergeProblem(empty="all").to_json(),
}
GOOD = """
id = "mine-empty"
implementation = "mine"
laws = ["parity", "well_formed"]
status = "FAIL"
kinds = ["nan"]
where = { empty = ["some", "all"] }
reason = "It divides by zero."
case = "case.json"
"""
EMPTY = MergeProblem(empty="all")
NAN = Verdict("FAIL", "nan")
HERE = Target(flashinfer="0.7.2.post1", torch="2.13.0+cpu", triton="3.9.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "case.json").write_text(json.dumps(CASE), encoding="utf-8")
    return tmp_path


def write(folder: Path, *entries: str) -> str:
    path = folder / "ledger.toml"
    path.write_text("".join(f"[[finding]]{entry}" for entry in entries), encoding="utf-8")
    return str(path)


def changed(line: str, key: str) -> str:
    """Return the good entry with the line of this key replaced, or removed."""
    lines = [each for each in GOOD.splitlines() if not each.startswith(f"{key} =")]
    return "\n".join([*lines, line, ""])


def refusal(path: str) -> str:
    with pytest.raises(LedgerError) as caught:
        load_ledger(path)
    said = str(caught.value)
    assert said.startswith(path)
    assert "\n" not in said
    return said


class TestReading:
    def test_a_good_entry(self, folder: Path) -> None:
        (entry,) = load_ledger(write(folder, GOOD)).entries
        assert (entry.id, entry.laws, entry.kinds) == (
            "mine-empty",
            ("parity", "well_formed"),
            ("nan",),
        )
        assert entry.case == folder / "case.json"
        assert entry.load_case() == ("parity", EMPTY)

    def test_none_and_empty(self, folder: Path) -> None:
        assert load_ledger("none") == Ledger()
        assert load_ledger(write(folder)) == Ledger()

    def test_no_file(self, folder: Path) -> None:
        assert "cannot be read (No such file" in refusal(str(folder / "other.toml"))

    def test_a_folder(self, folder: Path) -> None:
        assert "cannot be read" in refusal(str(folder))

    def test_no_toml(self, folder: Path) -> None:
        assert "not TOML" in refusal(write(folder, "\nid = "))
        path = folder / "ledger.toml"
        path.write_bytes(b"\xff\xfe")
        assert "not TOML" in refusal(str(path))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("title = 1", "Object contains unknown field `title`"),
            ("findings = 3", "Object contains unknown field `findings`; did you mean finding?"),
            ("finding = 3", "Expected `array`, got `int` - at `$.finding`"),
            ("finding = [1]", "Expected `object`, got `int` - at `$.finding[0]`"),
            ("[other]\na=1", "Object contains unknown field `other`"),
        ],
    )
    def test_something_else_than_findings(self, folder: Path, text: str, said: str) -> None:
        path = folder / "ledger.toml"
        path.write_text(text, encoding="utf-8")
        assert refusal(str(path)) == f"{path}: {said}"

    def test_the_same_id_twice(self, folder: Path) -> None:
        assert "the id 'mine-empty' is given 2 times" in refusal(write(folder, GOOD, GOOD))

    def test_an_entry_without_id_is_counted(self, folder: Path) -> None:
        said = refusal(write(folder, GOOD, changed("", "id")))
        assert said.endswith("ledger.toml: Object missing required field `id` - at `$.finding[1]`")

    @pytest.mark.parametrize("key", ["implementation", "status", "where", "reason"])
    def test_a_missing_field(self, folder: Path, key: str) -> None:
        said = refusal(write(folder, changed("", key)))
        missing = f"'mine-empty': Object missing required field `{key}` - at `$.finding[0]`"
        assert said.endswith(f"ledger.toml: {missing}")

    def test_a_missing_case(self, folder: Path) -> None:
        without = changed("", "case")
        said = refusal(write(folder, without))
        assert (
            "ledger.toml: 'mine-empty': case is missing: only a HANG, or a CRASH without an "
            "exception, has none - at `$.finding[0]`" in said
        )
        path = write(folder, without.replace("FAIL", "HANG"))
        (entry,) = load_ledger(path).entries
        assert entry.case is None
        assert entry.load_case() is None
        assert read_expectations(path).entries == (entry,)
        crash = without.replace("FAIL", "CRASH")
        (entry,) = load_ledger(write(folder, crash.replace("nan", "SIGSEGV"))).entries
        assert entry.case is None
        assert "case is missing" in refusal(write(folder, crash.replace("nan", "ValueError")))

    @pytest.mark.parametrize(
        ("key", "line", "said"),
        [
            ("extra", "extra = 1", "Object contains unknown field `extra` - at `$.finding[0]`"),
            ("law", 'law = "parity"', "Object contains unknown field `law` - at `$.finding[0]`"),
            ("laws", 'laws = "parity"', "Expected `array`, got `str` - at `$.finding[0].laws`"),
            (
                "laws",
                'laws = ["parity", "parties"]',
                "Invalid value 'parties' - at `$.finding[0].laws[1]`",
            ),
            ("laws", "laws = [[1]]", "Expected `str`, got `array` - at `$.finding[0].laws[0]`"),
            ("status", "status = 3", "Expected `str`, got `int` - at `$.finding[0].status`"),
            ("status", 'status = "PASS"', "Invalid value 'PASS' - at `$.finding[0].status`"),
            ("status", 'status = "KNOWN"', "Invalid value 'KNOWN' - at `$.finding[0].status`"),
            ("kinds", 'kinds = ["NaN"]', "kinds[0] is 'NaN'; did you mean nan? known: "),
            ("where", 'where = "empty"', "Expected `object`, got `str` - at `$.finding[0].where`"),
            (
                "where",
                "where = { emtpy = 1 }",
                "Invalid value 'emtpy' - at `key` in `$.finding[0].where`",
            ),
            (
                "where",
                "where = { seed = { least = 1 } }",
                "where.seed: Object contains unknown field `least`",
            ),
            (
                "where",
                'where = { seed = { min = "1" } }',
                "where.seed: Expected `float`, got `str` - at `$.min`",
            ),
            (
                "versions",
                'versions = { "vllm!" = ">=1" }',
                "Expected `str` that names a distribution, such as vllm - at `key` in ",
            ),
            (
                "versions",
                'versions = { torch = "2.13" }',
                "versions.torch is '2.13', no PEP 440 specifier",
            ),
            (
                "versions",
                "versions = { torch = 2 }",
                "Expected `str`, got `int` - at `$.finding[0].versions['torch']`",
            ),
            ("device", 'device = "gpu"', "Invalid value 'gpu' - at `$.finding[0].device`"),
            ("sm", "sm = 90", "Expected `array`, got `int` - at `$.finding[0].sm`"),
            ("sm", 'sm = ["90"]', "Expected `int`, got `str` - at `$.finding[0].sm[0]`"),
            (
                "quarantine",
                'quarantine = "no"',
                "Expected `bool`, got `str` - at `$.finding[0].quarantine`",
            ),
            ("reason", "reason = 1", "Expected `str`, got `int` - at `$.finding[0].reason`"),
            ("case", "case = 1", "Expected `str`, got `int` - at `$.finding[0].case`"),
        ],
    )
    def test_a_malformed_field(self, folder: Path, key: str, line: str, said: str) -> None:
        refused = refusal(write(folder, changed(line, key)))
        assert f"ledger.toml: 'mine-empty': {said}" in refused
        assert "`$.finding[0]" in refused

    def test_kinds_of_a_crash_are_free(self, folder: Path) -> None:
        entry = changed('kinds = ["SIGSEGV"]', "kinds").replace('"FAIL"', '"CRASH"')
        assert load_ledger(write(folder, entry)).entries[0].kinds == ("SIGSEGV",)


class TestCases:
    def test_it_reads_back(self, folder: Path) -> None:
        law, problem, data = read_case(folder / "case.json")
        assert (law, problem, data) == ("parity", EMPTY, CASE)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("[]", "bad.json: Expected `object`, got `array`"),
            ("{}", "bad.json: Object missing required field `law`"),
            ('{"schema": "kernelproof/case/9"}', "its schema is 'kernelproof/case/9'"),
            ('{"law": 1}', "Expected `str`, got `int` - at `$.law`"),
            (
                '{"law": "parity", "implementation": "m", "problem": 1}',
                "Expected `object`, got `int` - at `$.problem`",
            ),
            (
                '{"law": "parity", "implementation": "m", "problem": {"schema": "x"}}',
                "problem field schema",
            ),
        ],
    )
    def test_a_malformed_file(self, folder: Path, text: str, said: str) -> None:
        path = folder / "bad.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(LedgerError, match=r"bad\.json: ") as caught:
            read_case(path)
        assert said in str(caught.value)

    def test_no_file(self, folder: Path) -> None:
        with pytest.raises(LedgerError, match="cannot be read"):
            read_case(folder / "missing.json")


def entry(**changes: Any) -> Entry:  # noqa: ANN401  fields of any type
    given: dict[str, Any] = {
        "id": "e", "implementation": "mine", "laws": ("parity",), "status": "FAIL",
        "where": {}, "reason": "r", "case": Path("case.json"), **changes,
    }  # fmt: skip
    return Entry(**given)


class TestApplies:
    def test_the_implementation(self) -> None:
        assert entry().applies_to("mine", HERE)
        assert not entry().applies_to("mine-too", HERE)

    @pytest.mark.parametrize(
        ("specifier", "version", "applies"),
        [
            (">=0.6.6,<=0.7.2.post1", "0.7.2.post1", True),
            (">=0.6.6,<=0.7.2", "0.7.2.post1", False),
            (">=0.7,<=0.7.2.post1", "0.7.2.post2", False),
            (">=0.7,<=0.7.2.post1", "0.7.0", True),
            (">=0.7,<=0.7.2.post1", "0.6.14", False),
            ("==0.7.2", "0.7.2.post1", False),
            ("==0.7.2.*", "0.7.2.post1", True),
            (">=0.7", "0.8.0rc1", True),
            (">=0.7", "0.8.0.dev20260101", True),
            (">=0.7", None, False),
        ],
    )
    def test_versions(self, specifier: str, version: str | None, applies: bool) -> None:
        given = entry(versions={"flashinfer": specifier})
        assert given.applies_to("mine", replace(HERE, flashinfer=version)) is applies

    def test_local_versions_and_all_packages_count(self) -> None:
        given = entry(versions={"torch": "==2.13.0", "triton": ">=3.6,<=3.9"})
        assert given.applies_to("mine", HERE)
        assert not given.applies_to("mine", replace(HERE, triton="3.5.1"))
        assert not given.applies_to("mine", replace(HERE, torch="2.12.0"))

    def test_any_distribution_counts(self) -> None:
        pytest_here = metadata.version("pytest")
        given = entry(versions={"PyTest": f"=={pytest_here}"})
        assert given.applies_to("mine", HERE)
        assert not given.applies_to("mine", replace(HERE, providers=(("pytest", "1.0"),)))
        assert not entry(versions={"not-installed-here": ">=0"}).applies_to("mine", HERE)
        odd = replace(HERE, providers=(("odd", "as of monday"),))
        assert not entry(versions={"odd": ">=0"}).applies_to("mine", odd)
        same = entry(versions={"flashinfer-python": ">=0.7"})
        assert same.applies_to("mine", replace(HERE, flashinfer="0.7.2"))

    def test_device_and_chip(self) -> None:
        h200 = replace(HERE, device="cuda", sm=90)
        assert entry(device="cpu").applies_to("mine", HERE)
        assert not entry(device="cpu").applies_to("mine", h200)
        assert entry(device="cuda", sm=(90, 103)).applies_to("mine", h200)
        assert not entry(sm=(103,)).applies_to("mine", h200)
        assert not entry(sm=(90,)).applies_to("mine", HERE)

    def test_siblings_have_the_same_code(self) -> None:
        given = entry(siblings=("yours", "ours-*-graph"))
        for name, covered in (
            ("mine", True), ("yours", True), ("ours-decode-graph", True), ("ours-decode", False),
            ("yours-too", False), ("theirs", False),
        ):  # fmt: skip
            assert given.covers(name, HERE) is covered, name
            found = Ledger((given,)).explanation(name, "parity", NAN, EMPTY, HERE)
            assert (found is not None) is covered, name
        # Its case is of one implementation.
        assert not given.applies_to("yours", HERE)
        assert not entry(sm=(90,), siblings=("yours",)).covers("yours", HERE)


class TestExplains:
    def test_without_laws_any_law_shows_the_cause(self) -> None:
        given = entry(laws=(), kinds=("nan",), where={"empty": "all"})
        assert given.explains("parity", NAN, EMPTY)
        assert given.explains("soak", NAN, EMPTY)
        assert not given.explains("soak", Verdict("FAIL", "numeric"), EMPTY)
        assert not given.explains("soak", NAN, MergeProblem())

    def test_law_status_and_kind(self) -> None:
        given = entry(kinds=("nan",))
        assert given.explains("parity", NAN, EMPTY)
        assert not given.explains("well_formed", NAN, EMPTY)
        assert not given.explains("parity", Verdict("CRASH", "nan"), EMPTY)
        assert not given.explains("parity", Verdict("FAIL", "numeric"), EMPTY)
        assert entry().explains("parity", Verdict("FAIL", "numeric"), EMPTY)

    @pytest.mark.parametrize(
        ("where", "holds"),
        [
            ({}, True),
            ({"empty": "all"}, True),
            ({"empty": "some"}, False),
            ({"empty": ["some", "all"]}, True),
            ({"empty": ["none"]}, False),
            ({"num_states": 3}, True),
            ({"num_states": {"min": 3}}, True),
            ({"num_states": {"min": 4}}, False),
            ({"num_states": {"max": 3}}, True),
            ({"num_states": {"max": 2}}, False),
            ({"num_states": {"min": 2, "max": 5}}, True),
            ({"num_states": {}}, True),
            ({"empty": "all", "num_states": 2}, False),
            ({"exact": False}, True),
            ({"exact": True}, False),
            ({"page_size": 1}, False),  # a field that merges do not have
            ({"dtype": {"min": 1}}, False),  # no number
        ],
    )
    def test_predicates(self, where: dict[str, Any], holds: bool) -> None:
        problem = MergeProblem(num_states=3, empty="all")
        assert entry(where=where).explains("parity", NAN, problem) is holds

    def test_predicates_on_attention(self) -> None:
        problem = AttentionProblem(seq_lens=(3,), page_size=4, window_left=7)
        for where, holds in (
            ({"partial_last_page": True}, True),
            ({"rows_without_keys": True}, False),
            ({"window_left": {"min": 0, "max": 15}}, True),
            ({"num_qo_heads": 1, "head_dim_qk": [16, 32]}, True),
            ({"sm_scale": {"max": 0.5}}, False),  # none is given
            ({"scale": {"max": 0.5}}, True),
        ):
            assert entry(where=where).explains("parity", NAN, problem) is holds, where

    def test_predicates_on_the_problem_that_the_law_made(self) -> None:
        """Sensitivity switches a mask off, and it is without one that the subject is wrong."""
        problem = AttentionProblem(seq_lens=(3,), causal=True)
        without = replace(problem, causal=False)
        known = entry(where={"causal": False})
        assert not known.explains("parity", NAN, problem)
        wrong = replace(NAN, about=without.to_json())
        assert known.explains("parity", wrong, problem)
        assert Verdict.from_json(wrong.to_json()) == wrong
        assert "about" not in NAN.to_json()

    def test_the_first_entry_that_explains_is_given(self) -> None:
        ledger = Ledger((entry(id="a", where={"empty": "some"}), entry(id="b"), entry(id="c")))
        found = ledger.explanation("mine", "parity", NAN, EMPTY, HERE)
        assert found is not None
        assert found.id == "b"
        assert ledger.explanation("other", "parity", NAN, EMPTY, HERE) is None


SHIPPED = load_ledger().entries
FEW_SIZES = 4
WITH_CASE = [each for each in SHIPPED if each.case]
FORCEFUL = [each for each in SHIPPED if each.is_forceful]
FEATURES = {"custom_mask", "tree", "q_dtype", "window_left", "grouped", "num_experts"}


def stored_in(entry: Entry) -> tuple[str, Problem]:
    stored = entry.load_case()
    assert stored is not None
    return stored


OTHERWISE: tuple[dict[str, Any], ...] = (
    {"empty": "none"}, {"regime": "iid"}, {"dtype": "float32"}, {"num_tokens": 1},
    {"query_lens": (1,), "seq_lens": (16,)}, {"query_lens": (), "seq_lens": ()},
    {"page_size": 1}, {"kv_cache": ""}, {"kv_cache": "float8_e4m3fn"}, {"v_scale": 1.0},
    {"custom_mask": False}, {"num_groups": 1, "topk_groups": 1}, {"q_dtype": ""}, {"bias": False},
    {"head_dim_qk": 64, "head_dim_vo": 64}, {"num_heads": 1}, {"top_k": 1}, {"num_kv_heads": 1},
    {"top_k": 2}, {"top_k": 8}, {"sink_tokens": 0}, {"sinks": False}, {"chunk": 0},
    {"two_sided_window": False}, {"window_left": -1}, {"graph": False}, {"group_size": 1},
)  # fmt: skip
"""What a problem may be besides, so that it is none that an entry is about."""


def changed_problem(problem: Problem, changes: dict[str, Any]) -> Problem | None:
    """Return a problem with other fields; None where there is no such problem."""
    try:
        made: Problem = replace(problem, **changes)
    except (TypeError, ValueError):
        return None
    return made


class TestShipped:
    def test_the_ledger_is_read_from_the_fixtures(self) -> None:
        assert load_ledger(str(LEDGER)).entries == SHIPPED
        assert len(SHIPPED) > 10

    def test_the_corpus_holds_the_case_of_each_entry(self) -> None:
        cases = [each.case for each in WITH_CASE]
        assert len(set(cases)) == len(cases)
        assert set(cases) <= set(CORPUS.glob("*.json"))

    @pytest.mark.parametrize("shipped", FORCEFUL, ids=lambda each: each.id)
    def test_nothing_is_kept_that_hangs_or_crashes_the_software_of_others(
        self, shipped: Entry
    ) -> None:
        assert shipped.case is None
        assert shipped.quarantine
        assert set(shipped.where) <= FEATURES, "never lengths or values"
        assert not any(path.stem == shipped.id for path in CORPUS.glob("*.json"))

    @pytest.mark.parametrize("shipped", WITH_CASE, ids=lambda each: each.id)
    def test_an_entry_and_its_case_belong_together(self, shipped: Entry) -> None:
        assert shipped.case is not None
        law, problem, data = read_case(shipped.case)
        assert shipped.case.stem == shipped.id
        assert data["schema"] == "kernelproof/case/1"
        assert data["implementation"] == shipped.implementation
        assert shipped.implementation in BUILT_IN
        assert shipped.of_law(law)
        for sibling in shipped.siblings:
            assert any(fnmatchcase(name, sibling) for name in BUILT_IN), sibling
        assert set(shipped.laws) <= {each.name for each in laws_of(problem.operation)}
        assert {each.name for each in LAWS} >= set(shipped.laws)
        kind = shipped.kinds[0] if shipped.kinds else ""
        said = Verdict.from_json({"status": shipped.status, "kind": kind})
        assert shipped.explains(law, said, problem)
        assert shipped.versions
        assert len(shipped.reason.split()) > 10
        assert not shipped.issue or shipped.issue.startswith("https://github.com/")

    @pytest.mark.parametrize("shipped", WITH_CASE, ids=lambda each: each.id)
    def test_rules_allow_the_case_of_an_entry(self, shipped: Entry) -> None:
        """A case that the support rules refuse is never called, and counts as mended."""
        asked = find_implementation(shipped.implementation)
        if not (asked.backend or asked.chosen_backend) or shipped.device != "cuda":
            pytest.skip(f"{shipped.implementation} is asked for no rule on a GPU")
        assert shipped.case is not None
        _, problem, data = read_case(shipped.case)
        book = load_rules().without(frozenset(data.get("without_rules", ())))
        chips = [
            Target(sm=sm, flashinfer=version, device="cuda")
            for sm in shipped.sm or (90, 100)
            for version in ("0.6.13", "0.7.2.post1")
        ]
        held = [each for each in chips if shipped.applies_to(shipped.implementation, each)]
        allowed = [
            each
            for each in held
            if not decide(asked.feature_of(problem, each), each, book=book).refusal
        ]
        assert {each.flashinfer for each in held} == {each.flashinfer for each in allowed}

    def test_only_wrappers_with_one_buffer_for_their_plans_have_them_overwritten(self) -> None:
        hopper = Target(sm=90, flashinfer="0.7.2.post1", device="cuda")
        ahead = [each for each in SHIPPED if each.laws == ("host_runs_ahead",)]
        for name in ("decode", "decode-fa2-graph", "prefill-fa3-graph", "ragged-fa3"):
            assert any(each.covers(f"flashinfer-{name}", hopper) for each in ahead), name
        assert not any(each.covers("flashinfer-mla-fa2", hopper) for each in ahead)

    @pytest.mark.parametrize("shipped", WITH_CASE, ids=lambda each: each.id)
    def test_an_entry_does_not_explain_another_bug(self, shipped: Entry) -> None:
        """Of another kind or status, or on a problem that its predicate is not about."""
        law, problem = stored_in(shipped)
        kinds = shipped.kinds or ("run",)
        for status in BAD:
            for kind in (*FAIL_KINDS, "ValueError", *kinds):
                said = Verdict(status, kind)
                mine = status == shipped.status and (not shipped.kinds or kind in kinds)
                assert shipped.explains(law, said, problem) is mine, said
        changed = [changed_problem(problem, each) for each in OTHERWISE]
        others = [each for each in changed if each is not None]
        known = Verdict.from_json({"status": shipped.status, "kind": kinds[0]})
        assert not all(shipped.explains(law, known, each) for each in others), shipped.where

    @pytest.mark.parametrize(
        "laws", [each.laws for each in SHIPPED if each.laws], ids=lambda laws: laws[0]
    )
    def test_a_law_is_named_where_the_predicate_says_less_than_it(
        self, laws: tuple[str, ...]
    ) -> None:
        assert set(laws) <= {
            "page_size_invariance", "chunked_prefill", "appended_pairs", "scale_homogeneity",
            *(each.name for each in laws_of("plan")),
            "host_runs_ahead", "contiguity", "life_cycle", "unused_memory", "verify_chain",
            "row_containment", "tree_siblings", "tree_paths", "slack_rows", "extreme_codes",
            "pages_behind_window",
        }  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    preload, interpret = ("torch", "kernelproof.properties.worker.tasks"), {"TRITON_INTERPRET": "1"}
    with (
        WorkerPool(HANDLER, preload=preload, environment=interpret, standby=False) as pool,
        pool.lease() as lent,
    ):
        yield lent


def ask(worker: Worker, implementation: str, law: str, problem: Problem) -> Verdict:
    payload = {
        "task": "judge", "law": law, "implementation": implementation,
        "problem": problem.to_json(), "device": "cpu",
    }  # fmt: skip
    return verdict_of(worker.run(payload, Deadlines(run=60.0)))


@pytest.mark.parametrize("shipped", WITH_CASE, ids=lambda each: each.id)
def test_a_shipped_case_still_fails_as_its_entry_says(shipped: Entry, worker: Worker) -> None:
    reason = missing("triton", "triton") or missing("flashinfer", "flashinfer")
    if reason:
        pytest.skip(reason)
    here = Target.here()
    if not shipped.applies_to(shipped.implementation, here):
        pytest.skip(f"{shipped.id} speaks of {dict(shipped.versions)}, not of what is installed")
    law, problem = stored_in(shipped)
    verdict = ask(worker, shipped.implementation, law, problem)
    assert shipped.explains(law, verdict, problem), verdict


DEEPSEEK = RouteProblem(num_tokens=3, num_experts=4, method="deepseek_v3", bias=True)


@pytest.mark.parametrize(
    ("entry", "law", "inside", "outside"),
    [
        (
            "groups-of-one",
            "routing_parity",
            replace(DEEPSEEK, num_groups=4),
            (
                replace(DEEPSEEK, num_groups=2),
                replace(DEEPSEEK, num_experts=1),
            ),
        ),
        (
            "uninitialised",
            "routing_bias_shift",
            replace(DEEPSEEK, num_experts=129),
            (
                replace(DEEPSEEK, num_experts=128),
                replace(DEEPSEEK, num_experts=129, bias=False),
                replace(DEEPSEEK, num_experts=129, top_k=8),
                replace(DEEPSEEK, num_experts=130, num_groups=2),
            ),
        ),
        (
            "uninitialised-blocks",
            "routing_parity",
            replace(DEEPSEEK, num_experts=129, bias=False, num_tokens=4096),
            (
                replace(DEEPSEEK, num_experts=129, bias=False, num_tokens=4095),
                replace(DEEPSEEK, num_experts=128, bias=False, num_tokens=4096),
                replace(DEEPSEEK, num_experts=129, num_tokens=4096),
            ),
        ),
    ],
)
def test_entries_of_routing_cover_what_their_reasons_say(
    entry: str, law: str, inside: RouteProblem, outside: tuple[RouteProblem, ...]
) -> None:
    whole = f"flashinfer-fused-topk-deepseek-{entry}"
    (found,) = (each for each in load_ledger().entries if each.id == whole)
    wrong = Verdict("FAIL", "numeric")
    assert found.explains(law, wrong, inside)
    assert not any(found.explains(law, wrong, each) for each in outside)


@pytest.mark.parametrize("size", ["page_size", "head_dim_qk", "head_dim_vo", "num_tokens"])
def test_no_entry_lists_most_of_the_sizes_that_are_drawn(size: str) -> None:
    # A list misses what is drawn later; limits do not.
    listed = [each.where.get(size) for each in SHIPPED]
    assert not [each for each in listed if isinstance(each, list) and len(each) > FEW_SIZES]


@pytest.mark.parametrize("page_size", ATTENTION_AXES["page_size"])
def test_a_chunk_that_ends_inside_a_page_of_any_size_is_known(page_size: int) -> None:
    # The entry named sizes in a list, which missed those of hybrid models.
    whole = "flashinfer-trace-paged-prefill-chunk-tail"
    (found,) = (each for each in SHIPPED if each.id == whole)
    problem = AttentionProblem(
        query_lens=(2,), seq_lens=(2 * page_size,), page_size=page_size, causal=True
    )
    wrong = Verdict("FAIL", "numeric")
    assert found.explains("verify_chain", wrong, problem) == (page_size > 1)
