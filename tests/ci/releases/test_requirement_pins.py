"""The release that a requirements file pins."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.ci.bump.command import Request
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.releases.requirement_pins import pinned_release

VLLM = """\
-r common.txt

numba == 0.61.2
torch==2.11.0
torchvision==0.26.0 # Required for phi3v processor. See https://github.com/pytorch/vision
# FlashInfer should be updated together with the Dockerfile
flashinfer-python==0.6.13
flashinfer-cubin==0.6.13
"""


def write(folder: Path, text: str, name: str = "cuda.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(("line", "version"), [
    ("flashinfer-python==0.7.2.post1", "0.7.2.post1"),
    ("flashinfer_python == 0.7.2.post1  # see the Dockerfile", "0.7.2.post1"),
    ("FlashInfer.Python[cu13]==0.7.2", "0.7.2"),
    ("flashinfer-python==0.7.2; platform_machine != 'nothing'", "0.7.2"),
    ("flashinfer-python==0.7.2 --hash=sha256:aa --hash=sha256:bb", "0.7.2"),
    ("flashinfer-python==0.7.2 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb", "0.7.2"),
    ("flashinfer-python==0.7.2\nflashinfer-python==0.7.2", "0.7.2"),
    ("flashinfer-python==0.6.6; platform_system == 'Nothing'\nflashinfer-python==0.7.2", "0.7.2"),
    ("--extra-index-url https://flashinfer.example\nflashinfer-python==0.7.2", "0.7.2"),
    ("./local\nhttps://host/other.whl#egg=other\nflashinfer-python==0.7.2", "0.7.2"),
    ("\ufeffflashinfer-python==0.7.2", "0.7.2"),
    ("flashinfer-python==0.7.2-post1", "0.7.2.post1"),
])  # fmt: skip
def test_pins(line: str, version: str, tmp_path: Path) -> None:
    assert pinned_release(write(tmp_path, line)) == version


def test_a_file_of_a_serving_stack(tmp_path: Path) -> None:
    write(tmp_path, "regex\ncachetools\n", "common.txt")
    assert pinned_release(write(tmp_path, VLLM)) == "0.6.13"


@pytest.mark.parametrize("words", ["-r", "-r ", "--requirement ", "--requirement="])
def test_included_files_are_read_once(words: str, tmp_path: Path) -> None:
    write(tmp_path, f"flashinfer-python==0.7.2\n{words}cuda.txt", "kernels.txt")
    assert pinned_release(write(tmp_path, f"{words}kernels.txt")) == "0.7.2"


def test_a_project(tmp_path: Path) -> None:
    text = """
        [project]
        name = "engine"
        dependencies = ["torch", "flashinfer_python==0.6.14 ; platform_machine != 'nothing'"]
        [project.optional-dependencies]
        blackwell = ["flashinfer-cubin==0.6.14"]
    """
    assert pinned_release(write(tmp_path, text, "pyproject.toml")) == "0.6.14"
    extra = text.replace("flashinfer_python==0.6.14 ;", "einops ;")
    extra = extra.replace("flashinfer-cubin", "flashinfer-python")
    assert pinned_release(write(tmp_path, extra, "pyproject.toml")) == "0.6.14"


@pytest.mark.parametrize(("text", "told"), [
    ("torch\nflashinfer-cubin==0.7.2\nflashinfer-python-extras==1", "pins no flashinfer-python"),
    ("# flashinfer-python==0.7.2", "pins no flashinfer-python"),
    ("torch\n\nflashinfer-python", "cuda.txt:3: 'flashinfer-python' does not pin one version"),
    ("flashinfer-python>=0.7", "cuda.txt:1: 'flashinfer-python>=0.7' does not pin one version"),
    ("flashinfer-python==0.7,!=0.7.1", "does not pin one version"),
    ("flashinfer-python==0.7.*", "pins a series"),
    ("flashinfer-python=0.7", "is no requirement"),
    ("flashinfer-python @ git+https://host/flashinfer", "does not pin one version"),
    ("flashinfer-python==0.7\nflashinfer-python==0.6.6", "several releases of flashinfer-python"),
    ("-r absent.txt", "absent.txt: cannot be read"),
])  # fmt: skip
def test_what_pins_nothing(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageRefusedError) as refused:
        pinned_release(write(tmp_path, text))
    assert refused.value.message.startswith("--candidate-from ")
    assert told in refused.value.message
    assert "\n" not in refused.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    write(tmp_path, "[project", "pyproject.toml")
    for name, told in (
        ("absent.txt", "cannot be read"),
        ("absent.toml", "cannot be read"),
        ("binary.txt", "UTF-8"),
        ("pyproject.toml", "not TOML"),
    ):
        with pytest.raises(UsageRefusedError, match=told):
            pinned_release(tmp_path / name, option="--baseline-from")


@pytest.mark.parametrize(("text", "told"), [
    ("project = 3", "Expected `object`, got `int` - at `$.project`"),
    ("[project]\ndependencies = 'torch'", "Expected `array`, got `str` - at `$.project.depend"),
    (
        "[project]\noptional-dependencies = []",
        "Expected `object`, got `array` - at `$.project.optional-dependencies`",
    ),
    (
        "[project.optional-dependencies]\ncuda = 'torch'",
        "Expected `array`, got `str` - at `$.project.optional-dependencies['cuda']`",
    ),
])  # fmt: skip
def test_a_project_of_another_shape_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = write(tmp_path, text, "pyproject.toml")
    with pytest.raises(UsageRefusedError) as refused:
        pinned_release(path)
    assert refused.value.message.startswith(f"--candidate-from {path}: {told}")


def test_what_two_files_pin_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def bump(request: Request) -> int:
        asked.append((request.baseline, request.candidate))
        return 1

    monkeypatch.setattr("kernelproof.ci.bump.command.bump", bump)
    old = write(tmp_path, "flashinfer-python==0.6.13", "old.txt")
    new = write(tmp_path, "flashinfer-python==0.7.2.post1", "new.txt")
    both = ["--baseline-from", str(old), "--candidate-from", str(new)]
    assert main(["bump", *both]) == 1
    assert main(["bump", "0.6.14", "--candidate-from", str(new)]) == 1
    assert main(["bump", "--baseline-from", str(old), "0.7.1"]) == 1
    assert asked == [("0.6.13", "0.7.2.post1"), ("0.6.14", "0.7.2.post1"), ("0.6.13", "0.7.1")]
    asked.clear()
    # The name of earlier versions, which says so.
    assert main(["gate", "--baseline", "0.6.14", "--candidate-from", str(new)]) == 1
    assert asked == [("0.6.14", "0.7.2.post1")]
    (told,) = capsys.readouterr().err.splitlines()
    assert told.endswith("the command is `bump A B`")


def test_a_pin_that_did_not_change_is_no_bump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write(tmp_path, VLLM.replace("-r common.txt", "")))
    assert main(["bump", "--baseline-from", file, "--candidate-from", file]) == 0
    assert "Both files pin 0.6.13" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "told"), [
    ([], "the baseline is missing"),
    (["--baseline-from", "{new}"], "the candidate is missing"),
    (["--candidate-from", "{new}"], "the baseline is missing"),
    (["a", "b", "--candidate-from", "{new}"], "the candidate is named already, b"),
    (["--candidate-from", "absent.txt", "0.7.1"], "--candidate-from absent.txt: can"),
])  # fmt: skip
def test_wrong_usage(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = write(tmp_path, "flashinfer-python==0.7.2.post1")
    assert main(["bump", *[word.format(new=new) for word in words]]) == 2
    assert told in capsys.readouterr().err
