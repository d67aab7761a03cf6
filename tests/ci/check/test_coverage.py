"""The list of FlashInfer's calls: which an engine uses, and which adapters call them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from kernelproof.ci.bump.surface.engine_files import read_engine
from kernelproof.ci.check.adapter_calls import calls_of_adapters
from kernelproof.ci.check.coverage import HERE, NEEDS, coverage, read_table, used_names
from kernelproof.ci.cli import main
from kernelproof.impl.flashinfer_declarations.published import published_names

ENGINE = """\
import flashinfer
import flashinfer.sampling
from flashinfer import merge_state as merge
from flashinfer.fused_moe import cutlass_fused_moe
from . import other

scale = lazy("flashinfer.page", "get_seq_lens")
kernels = importlib.import_module("flashinfer.mla")

def attend(q):
    found = getattr(kernels, "trtllm_batch_decode_with_kv_cache_mla")
    other.rmsnorm_quant(q)
    torch.softmax(q)
    return flashinfer.prefill.trtllm_batch_context_with_kv_cache(q), flashinfer.sampling.top_k(q)
"""
USED = {
    "cutlass_fused_moe",
    "get_seq_lens",
    "merge_state",
    "top_k",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Return a source that uses FlashInfer in every way that is read."""
    (tmp_path / "engine.py").write_text(ENGINE, encoding="utf-8")
    return tmp_path


def test_an_engine_uses_what_it_imports_loads_or_asks_for_by_name(engine: Path) -> None:
    _, table = read_table()
    assert used_names(read_engine(engine)) & {*table} == USED


def test_a_file_without_syntax_uses_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("from flashinfer import merge_state\nprint 1\n")
    assert used_names(read_engine(tmp_path)) == frozenset()


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        ("flashinfer-decode-fa2", "BatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer-decode-fa2-fast-plan", "fast_decode_plan"),
        ("flashinfer-prefill-fa3-graph", "BatchPrefillWithPagedKVCacheWrapper"),
        ("flashinfer-ragged-fa2", "BatchPrefillWithRaggedKVCacheWrapper"),
        ("flashinfer-mla-fa3", "BatchMLAPagedAttentionWrapper"),
        ("flashinfer-xqa-decode", "trtllm_batch_decode_with_kv_cache"),
        ("flashinfer-xqa-ragged", "xqa_batch_decode_with_kv_cache"),
        ("flashinfer-cutlass-moe", "cutlass_fused_moe"),
        ("flashinfer-group-gemm-moe", "SegmentGEMMWrapper"),
        ("flashinfer-top-k-route", "top_k"),
        ("flashinfer-seq-lens", "get_seq_lens"),
        ("flashinfer-trace-merge-state", "_merge_state_reference"),
    ],
)
def test_what_an_adapter_calls_is_read_from_its_source(adapter: str, name: str) -> None:
    assert name in calls_of_adapters()[adapter]


def test_an_adapter_calls_nothing_of_its_neighbours() -> None:
    calls = calls_of_adapters()
    assert "fast_decode_plan" not in calls["flashinfer-decode-fa2"]
    assert "BatchPrefillWithPagedKVCacheWrapper" not in calls["flashinfer-decode"]
    assert "merge_states" not in calls["flashinfer-merge-state"]
    assert "_cutlass_fused_moe_reference" not in calls["flashinfer-trace-bf16-moe"]


def test_every_adapter_calls_something_that_is_published() -> None:
    _, table = read_table()
    known = {*table} | {each for row in table.values() for each in row.references}
    silent = [name for name, called in calls_of_adapters().items() if not called & known]
    # Kernels of Triton, helpers that FlashInfer does not mark, references, and code of its host.
    others = ("-trace-", "-triton-", "-plan-")
    assert [name for name in silent if not any(each in name for each in others)] == []


def test_each_call_has_a_class_and_its_judges(engine: Path) -> None:
    calls = {each["name"]: each for each in coverage([engine])["calls"]}
    assert set(calls) == USED
    assert calls["merge_state"]["judged"] == "yes"
    judges = calls["merge_state"]["judges"]
    assert {judge["operation"] for judge in judges} == {"merge_state"}
    kernel = next(judge for judge in judges if not judge["reference"])
    assert {90, 100} <= {*kernel["chips"]}
    assert calls["trtllm_batch_context_with_kv_cache"]["judged"] == "elsewhere"
    assert calls["trtllm_batch_context_with_kv_cache"]["needs"] == "chip"
    assert calls["get_seq_lens"]["needs"] == "cpu"
    assert all(each["uses"] == [str(engine)] for each in calls.values())


def test_the_table_is_of_names_that_the_installed_release_publishes() -> None:
    flashinfer = pytest.importorskip("flashinfer")
    release, table = read_table()
    if importlib.metadata.version("flashinfer-python") != release:
        pytest.skip(f"the table is of {release}")
    folder = Path(flashinfer.__file__).parent
    assert published_names(folder) - {"my_op"} <= {*table}  # an example in a docstring


def test_the_table_says_what_each_class_needs() -> None:
    _, table = read_table()
    assert {row.needs for row in table.values()} == {*NEEDS}
    for name, row in table.items():
        assert (row.needs == "chip") == bool(row.chips), name
        assert bool(row.needs) == bool(row.source), name
        assert 90 not in row.chips, name


def test_without_flashinfer_the_kept_table_serves(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelproof.ci.check.coverage._installed", lambda: None)
    found = coverage([engine])
    assert not found["installed"]
    assert found["release"] == read_table()[0]
    assert {each["name"] for each in found["calls"]} == USED


def test_the_page_fits_80_columns(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "--coverage", "--uses", str(engine)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("6 calls" in line for line in lines)
    assert any("merge_state" in line and "75 to 121" in line for line in lines)


def test_json_has_all_of_it(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--coverage", "--uses", str(engine), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kernelproof/coverage/1"
    assert {each["name"] for each in found["calls"]} == USED


def test_verbose_lists_every_call(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--coverage", "--uses", str(engine), "-v"]) == 0
    shown = capsys.readouterr().out
    assert all(name[:10] in shown for name in USED)
    assert "flashinfer-m" in shown


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--uses", "."], "--uses goes with --coverage"),
        (["-v"], "--verbose goes with --coverage"),
        (["--coverage", "--uses", "nowhere"], "--uses nowhere: cannot be read"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_what_runs_here_is_sm90_or_a_cpu() -> None:
    assert {NEEDS[each] for each in HERE} == {"runs on SM90", "runs on a CPU"}


def test_what_a_run_of_published_judged_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [
        {"name": "rmsnorm", "api": "norm.rmsnorm", "state": "judged"},
        {"name": "top_k_varlen", "api": "topk_varlen.top_k_varlen", "state": "reference only"},
    ]
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"chip": 90, "calls": calls}))
    judged = {each["name"]: each for each in coverage([], [run])["calls"]}
    (judge,) = judged["rmsnorm"]["judges"]
    assert judge["implementation"] == "published rmsnorm"
    assert judged["rmsnorm"]["judged"] == "yes"
    assert judged["top_k_varlen"]["judged"] != "yes"
    run.write_text("{}")
    assert main(["list", "--coverage", "--published", str(run)]) == 2
    assert "holds no run of published" in capsys.readouterr().err
    assert main(["list", "--published", str(run)]) == 2
