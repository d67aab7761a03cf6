"""The table of real values, and which rows of facts are problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.ci.models.__main__ import main
from kernelproof.ci.models.stating import counted, stated
from kernelproof.ci.models.table import figures, lines_of, read_rows, table_of
from kernelproof.fixtures import REAL_VALUES
from kernelproof.properties.space.real_values import COLUMNS
from kernelproof.reference import AttentionProblem, MoEProblem, RouteProblem

FACTS = """\
family	class	kind	parameters	stateable	compared with (library 1.0)	max error
a	attention	swa	16/4 heads, 128, causal, window_left 511	problem	conf_a	1e-15
a	moe	swiglu	experts swiglu	problem	conf_a	1e-15
a	moe	r:dsv3g	route deepseek_v3, bias, top 2 of 8, 2 of 4 groups	problem	conf_a	0
b	attention	full	32/8 heads, 128, causal	problem
b	attention	relbias	32/8 heads, 128, additive bias [heads, queries, keys]	no words
c	attention	full	4/4 heads, 64, causal	problem	conf_c	1e-15
c	attention	mla	MLA prefill, 4 heads, QK 128+64, V 128; \
MLA absorbed, 4 heads, 512+64, V in K	problem	conf_c	1e-15
c	attention	dsa	MLA over the top-k keys of each query (indices [tokens, k])	oracle
c	indexer	idx	indexer: sum over heads	no words
d	attention	full	8/2 heads, 80, causal	problem	conf_d	1e-15
"""
CONFIGURATIONS = """\
family	kind	query_heads	kv_heads	head_dim_qk	head_dim_vo	window_left	window_right\
	soft_cap	chunk	page_size	hidden	inter	experts	top_k	source	date
a	swa	64	8	128	128	1023					4096	768	8	2	org/a	2025-01
a	cap	64	8	128	128			50			4096	768			org/a	2025-01
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    facts, configurations = tmp_path / "facts.tsv", tmp_path / "configurations.tsv"
    facts.write_text(FACTS)
    configurations.write_text(CONFIGURATIONS)
    return facts, configurations


def test_rows_have_a_source_and_families_without_one_are_left_out(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = tmp_path / "values.tsv"
    assert main(["--date", "2026-01-02", *map(str, files), str(made)]) == 0
    rows = read_rows(made)
    assert list(rows[0]) == list(COLUMNS)
    found = [(row["family"], row["kind"], row["query_heads"], row["source"]) for row in rows]
    assert found == [
        ("a", "cap", "64", "org/a"),
        ("a", "swa", "64", "org/a"),
        ("a", "r:dsv3g", "", "library 1.0 configuration conf_a"),
        ("a", "swiglu", "", "org/a"),
        ("c", "mla", "4", "library 1.0 configuration conf_c"),
        ("c", "mla_prefill", "4", "library 1.0 configuration conf_c"),
        ("d", "full", "8", "library 1.0 configuration conf_d"),
    ]
    assert "left out: 1 families without a source: b" in capsys.readouterr().out
    window, route, experts = rows[1], rows[2], rows[3]
    assert (window["window_left"], window["ranks"], window["hidden"]) == (
        "1023",
        "1,2,4,8,16",
        "4096",
    )
    assert (route["experts"], route["top_k"], route["date"]) == ("8", "2", "2026-01-02")
    assert (experts["hidden"], experts["inter"], experts["experts"]) == ("4096", "768", "8")
    assert (rows[4]["head_dim_qk"], rows[4]["head_dim_vo"], rows[4]["kv_heads"]) == (
        "576",
        "512",
        "1",
    )
    assert rows[6]["ranks"] == "1,2,4,8"


def test_the_order_of_the_files_changes_nothing(files: tuple[Path, Path]) -> None:
    facts, public = map(read_rows, files)
    one, other = (table_of(each, "2026") for each in ([facts, public], [public[::-1], facts]))
    assert list(lines_of(one)) == list(lines_of(other))


def test_the_table_is_what_its_sources_make(repository: Path) -> None:
    folder = repository / "fixtures" / "real"
    inputs = [read_rows(folder / name) for name in ("models.tsv", "configurations.tsv")]
    assert REAL_VALUES.read_text().splitlines() == list(lines_of(table_of(inputs, "2026-11-27")))
    for row in read_rows(REAL_VALUES):
        assert row["source"]
        assert row["date"]


def test_rows_are_stated_as_problems_which_the_oracle_answers(files: tuple[Path, Path]) -> None:
    rows = read_rows(files[0])
    count = counted(rows)
    assert (count.attention, count.of_attention) == (7, 7)
    assert (count.experts, count.of_experts) == (2, 2)
    assert (count.families, count.of_families) == (3, 4)  # an indexer is no problem
    assert [(row["kind"], why) for row, why in count.not_stated] == [("idx", "no words")]
    problems = {(row["family"], row["kind"]): stated(row, rows) for row in rows}
    (window,) = problems["a", "swa"]
    assert isinstance(window, AttentionProblem)
    assert (window.num_kv_heads, window.group_size, window.window_left) == (4, 4, 511)
    (biased,) = problems["b", "relbias"]
    assert isinstance(biased, AttentionProblem)
    assert biased.logits_bias == "dense"
    (sparse,) = problems["c", "dsa"]
    assert isinstance(sparse, AttentionProblem)
    assert (sparse.head_dim_qk, sparse.values_in_keys, sparse.mask_pattern) == (576, True, "sparse")
    (route,) = problems["a", "r:dsv3g"]
    assert isinstance(route, RouteProblem)
    assert (route.num_experts, route.num_groups, route.topk_groups, route.bias) == (8, 4, 2, True)
    assert isinstance(problems["a", "swiglu"][0], MoEProblem)
    assert [each.head_dim_qk for each in problems["c", "mla"]] == [192, 576]  # type: ignore[union-attr]


def test_most_layers_of_models_can_be_stated(repository: Path) -> None:
    count = counted(read_rows(repository / "fixtures" / "real" / "models.tsv"))
    assert (count.attention, count.of_attention) == (467, 467)
    assert count.of_experts == 185
    assert count.experts >= 184
    assert count.of_families == 243
    assert count.families >= 206
    left = {(row["family"], row["kind"]) for row, _ in count.not_stated if row["class"] == "moe"}
    assert left <= {("longcat_flash", "zeroexp")}


def test_rows_of_experts_are_stated_by_their_words(repository: Path) -> None:
    rows = read_rows(repository / "fixtures" / "real" / "models.tsv")
    found = {row["kind"]: stated(row, [row]) for row in rows if row["class"] == "moe"}

    def field(kind: str, name: str) -> object:
        (problem,) = found[kind]
        return getattr(problem, name)

    assert field("swiglulim", "swiglu_parameters") == "limit"
    assert field("gateshared", "shared_gate") == "logits"
    assert field("swiglustep", "activation") == "swiglu_step"
    assert field("mova", "one_product")
    assert field("postnorm", "output_norm") == "gain"
    assert field("r:perexpert", "expert_scales")
    assert field("r:hash", "hash_vocabulary")
    assert field("r:groupeach", "best_of_each_group")
    assert field("r:joint", "shared_experts") == 2
    assert field("r:sparsemixer", "method") == "sparsemixer"
    assert field("r:logitbias", "num_experts") == 384
    assert field("r:default+b", "bias")


def test_words_without_figures_have_none() -> None:
    row = {"class": "attention", "kind": "dsa", "parameters": "MLA over the top-k keys"}
    assert not figures(row)
