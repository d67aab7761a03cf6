"""The command support: the matrix, one call, the difference of two versions, wrong usage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelproof.ci.cli import main
from kernelproof.ci.support.command import support
from kernelproof.ci.support.rendering import support_matrix
from kernelproof.ci.support.rows import ALL_CHIPS, all_rows, differences, matrix
from kernelproof.impl.gating import load_rules

ROOT = Path(__file__).parents[3]
BOOK = load_rules()


def run(*words: str, columns: int = 200) -> tuple[int, str]:
    done = CliRunner().invoke(support, list(words), env={"COLUMNS": str(columns)})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def returned(*words: str) -> int:
    """Return what the command returns, which click leaves out of a group."""
    code = support.main(list(words), standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_the_whole_matrix_has_every_chip_and_backend() -> None:
    code, said = run()
    assert code == 0
    for chip in ALL_CHIPS:
        assert f"SM{chip}" in said
    for name in ("paged_attention ", "trtllm-gen", "cutlass", "mla "):
        assert name in said
    assert f"flashinfer-python {BOOK.newest}" in said


def test_one_call_on_one_chip_says_why_and_what_instead() -> None:
    words = ["--sm", "103", "--flashinfer", "0.6.7", "--backend", "trtllm-gen", "--phase", "decode"]
    code, said = run(*words)
    assert code == 0
    assert "no  trtllm-gen decode: " in said
    assert "2939" in said
    assert "Use backend=" in " ".join(said.split())
    assert returned(*words, "--require") == 1
    assert returned("--sm", "10.3", *words[2:3], "0.6.7.post2", *words[4:], "--require") == 0


def test_each_backend_that_could_serve_a_call_is_listed() -> None:
    _, said = run("--sm", "90", "--head-dim", "512", "--kv-dtype", "fp8")
    for backend in ("fa2", "fa3", "xqa", "trtllm-gen"):
        assert re.search(f"^paged_attention .* {backend} ", said, re.MULTILINE)


QUESTIONS = (
    "--sm 120 --kv-dtype nvfp4", "--head-dim 512", "--sm GB300 --head-dim 512 --kv-dtype fp8",
    "--operation mla", "--operation moe --sm 90 --quantisation nvfp4",
    "--model gemma-4", "--model gemma2 --sm h100", "--model Qwen3-8B --sm rtx-pro-6000",
    "--operation moe", "--operation paged_attention", "--sm H100 --operation paged_attention",
    "--sm GB300", "--sm H100", "--sm rtx-pro-6000", "--sm dgx-spark", "--sm thor",
    "--backend trtllm-gen",
)  # fmt: skip


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("words", QUESTIONS)
def test_one_question_has_one_answer_of_25_lines(words: str, columns: int) -> None:
    code, said = run(*words.split(), columns=columns)
    assert code == 0
    assert len(said.splitlines()) <= 25
    assert len(re.findall("─{9}", said)) > 0
    reasons = re.findall(r"^(?:yes|no|-)  \S.*?: (.*)$", said, re.MULTILINE)
    assert len(reasons) == len(set(reasons)) or columns == 80  # a line has a reason's beginning


def test_letters_stand_for_chips_where_only_they_fit() -> None:
    assert "A: 100,103; B: 100-107" in run("--operation", "moe", columns=120)[1].replace("\n", " ")
    assert "A: " not in run("--operation", "moe", columns=140)[1]


def test_a_chip_is_answered_by_what_each_backend_serves() -> None:
    _, said = run("--sm", "thor", columns=120)
    assert re.search(r"^ragged_attention +fa2, triton +all +$", said, re.MULTILINE)
    assert re.search(r"^ragged_attention +cutlass +all but head dim 256 +$", said, re.MULTILINE)
    assert "trtllm-gen" not in said.partition("\nno  ")[0]
    assert "100,103: all | 107: all but fp8 KV" in run("--backend", "trtllm-gen", columns=80)[1]
    _, verbose = run("--sm", "thor", "-v", columns=120)
    assert re.search(r"^merge_state +cuda +triton *$", verbose, re.MULTILINE)
    assert "more reasons" in said
    assert "more reasons" not in verbose


def test_a_model_asks_for_each_of_its_shapes_at_once(tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    code, said = run("--model", "gemma-3-mm", "--sm", "H100,dgx spark", "--json", str(made))
    assert code == 0
    assert "not asked, since no field of a call states them: mmprefix" in said
    data: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    assert data["chips"] == [90, 121]
    names = ("operation", "head_dim_qk", "group_size", "window", "mask")
    shapes = {tuple(row["feature"][name] for name in names) for row in data["rows"]}
    paged = {("paged_attention", dim, 2, window, "causal")
             for dim in (128, 256) for window in (False, True)}  # fmt: skip
    assert shapes == {*paged, ("ragged_attention", 72, 1, False, "none")}
    phases = {row["feature"]["phase"] for row in data["rows"]}
    assert phases == {"decode", "prefill"}


def test_layers_may_have_both_a_window_and_sinks() -> None:
    _, said = run("--model", "gpt-oss", "--sm", "90", "-v")
    assert "window, sinks, decode" in " ".join(said.split())


def test_a_latent_model_is_asked_before_and_after_absorption() -> None:
    _, said = run("--model", "DeepSeek-V3", "--sm", "103", "--page-size", "32")
    assert "mla " in said
    assert "dim 192/128, group 1, prefill" in said
    assert "dim 576/512, group 128" in said
    assert returned("--model", "deepseek-v3", "--sm", "103", "--require") == 0
    assert returned("--model", "deepseek-v3", "--sm", "75", "--require") == 1


def test_explain_walks_the_rules_of_one_call() -> None:
    code, said = run("--explain", "--sm", "103", "--flashinfer", "0.6.7", "--backend", "trtllm-gen")
    assert code == 0
    assert re.search(r"^holds  refuse ", said, re.MULTILINE)
    assert "does not hold" in said
    assert "differs in" in said
    assert "head_dim_vo must not be 128; it is 128" in " ".join(said.split())
    assert run("--explain")[0] == 2


def test_the_difference_of_two_versions(tmp_path: Path) -> None:
    made, page = tmp_path / "changes.json", tmp_path / "changes.md"
    versions = ("--flashinfer", "0.6.7", "--against", "0.6.8")
    outputs = ("--json", str(made), "--markdown", str(page))
    code, said = run(*versions, "--sm", "103,121", *outputs)
    assert code == 0
    data: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    assert data["schema"] == "kernelproof/support-difference/1"
    assert (data["flashinfer"], data["against"]) == ("0.6.7", "0.6.8")
    text, told = page.read_text(encoding="utf-8"), data["differences"]
    assert told
    for each in told:
        assert set(each["chips"]) <= {103, 121}
        assert (each["before"]["status"] == "supported") != (each["after"]["status"] == "supported")
        assert each["title"] in text
    count = f"{len(told)} differences in support between 0.6.7 and 0.6.8"
    assert count in text
    assert count in said
    assert "relu2" in said
    assert len(said.splitlines()) < len(told)  # the calls of one reason stand together
    same = [matrix(all_rows(), "0.6.8", (103,), BOOK) for _ in range(2)]
    assert differences(*same) == []


def test_json_and_markdown(tmp_path: Path) -> None:
    made, page = tmp_path / "matrix.json", tmp_path / "matrix.md"
    code, _ = run("--sm", "90,cpu", "--json", str(made), "--markdown", str(page))
    assert code == 0
    data: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    assert data["schema"] == "kernelproof/support/1"
    assert data["chips"] == [90, "cpu"]
    cell = data["rows"][0]["cells"][0]
    assert {"sm", "status", "reason", "rule", "source", "evidence", "alternatives"} == set(cell)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Support matrix\n")
    assert "|  | SM90 | CPU |" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sm", "10"], "--sm 10: '10' is ambiguous"),
        (["--sm", "10,0"], "--sm 10,0: '10' is ambiguous"),
        (["--sm", "ten"], "'ten' is not a compute capability"),
        (
            ["--sm", "90,gb30"],
            "'gb30' is not a compute capability or a known chip: did you mean GB300? write 103, ",
        ),
        (["--model", "gema-4"], "--model: model is 'gema-4'; did you mean gemma4? "),
        (["--model", "gemma4", "--window"], "--window: window is stated by --model"),
        (["--model", "gemma4", "--explain"], "--explain needs one call: leave out --model"),
        (["--model", "bloom"], "none of whose attention calls the rules can be asked for"),
        (["--flashinfer", "latest"], "'latest' is no version by PEP 440"),
        (["--against", "x"], "'x' is no version by PEP 440"),
        (
            ["--operation", "attention"],
            "'attention'; did you mean paged_attention or ragged_attention?",
        ),
        (["--backend", "fa9"], "backend is 'fa9'; did you mean fa3 or fa2? it must be one of"),
        (["--kv-dtype", "int3"], "kv_dtype is 'int3'; it must be one of"),
        (["--kv-dtype", "int8"], "kv_dtype is 'int8'; did you mean int8_per_token_head or"),
        (["--kv-dtype", "uint8"], "kv_dtype is 'uint8', which does not say what the bytes hold"),
        (["--head-dim", "0"], "head_dim_qk is 0; it must be an integer of at least 1"),
        (["--rules", "/nonexistent"], "there are no support rules"),
        (["--json", "/proc/none.json"], "--json /proc/none.json: cannot be written ("),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(words: list[str], said: str) -> None:
    code, output = run(*words)
    assert code == 2
    assert said in output.replace("\n", " ")


def test_a_rules_file_with_a_typo_is_named(tmp_path: Path) -> None:
    tmp_path.joinpath("mine.toml").write_text("[[rule]]\nid = 'x'\nefect = 'allow'\n")
    code, output = run("--rules", str(tmp_path))
    assert code == 2
    assert "mine.toml: 'x': Object contains unknown field `efect` - at `$.rule[0]`" in output


def test_an_unknown_chip_and_a_future_release_are_told_apart() -> None:
    _, chip = run("--sm", "130", "--backend", "fa2", "--phase", "decode")
    assert "SM130 is a chip that the rules do not know" in chip
    _, release = run("--sm", "90", "--flashinfer", "9.0", "--backend", "fa2", "--phase", "decode")
    assert f"to {BOOK.newest}, not 9.0" in release


def test_the_page_of_the_documentation_is_what_the_command_makes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run("--markdown", str(page))[0] == 0
    assert page.read_text(encoding="utf-8") == support_matrix()


def test_the_snippet_on_the_page_refuses_at_start() -> None:
    text = (ROOT / "docs" / "gating.md").read_text(encoding="utf-8")
    found = re.search(
        r"```python\n(from kernelproof\.impl\.gating import [\w, ]*require.*?)```", text, re.DOTALL
    )
    assert found, "docs/gating.md shows no use of require"
    code = found[1] + "\nprint(decision.supported)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UnsupportedError" in done.stderr or done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpu", "aarch64"], "--cpu goes with --binaries"),
        (["--binaries", "0.6.13", "--require"], "--require does not go with --binaries"),
        (["--binaries", "0.6.13", "--cpu", "arm64"], "--cpu does not go with --binaries of Flash"),
        (["--binaries", "a==1", "--head-dim", "64"], "--head-dim goes with --binaries of Flash"),
    ],
)
def test_what_would_be_ignored_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["support", *words]) == 2
    assert said in capsys.readouterr().err
