"""Releases of other packages than FlashInfer are compared: made-up ones of each kind."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.ci.bump.command import _concerned
from kernelproof.ci.bump.sides.releases import find_release
from kernelproof.ci.bump.surface import callables
from kernelproof.ci.bump.surface.callables import Used, callables_of, used_of
from kernelproof.ci.bump.surface.comparison import called_findings
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.releases.packages import PACKAGES
from kernelproof.impl.registry import BUILT_IN, built_in_compiler, built_in_provider
from kernelproof.impl.targets.backends import TRITON, VLLM
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM

OLD, NEW = "9.9.1", "9.9.2"
WORDS = ("--json", "report.json", "--profile", "quick", "--law", "parity", "--jobs", "1",
         "--implementation", "subject.py:subject")  # fmt: skip
KNOWN = (
    "'flashinfer', 'triton', 'torch', 'vllm', 'sglang', 'sglang-kernel', 'lmdeploy', "
    "'nvidia-cutlass-dsl'"
)
MERGE = """
import torch


def merge(inputs, *, broken=False, shift=False):
    outs, lses = inputs.outs.double(), inputs.lses.double()
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse.isneginf() & (not broken), 0.0, lse)).unsqueeze(-1)
    out = (weights * outs).sum(dim=0)
    return out.to(inputs.out_dtype), lse.float() * (1 + 2.0**-23 if shift else 1.0)
"""
SUBJECT = """
import sys
from kernelproof.impl import implementation
from made import merge
{imports}


@implementation("merge_state", name="subject")
def subject(inputs):
    {body}
"""
OF_TRITON = SUBJECT.format(
    imports="import triton", body="return merge(inputs, broken=triton.BROKEN, shift=triton.SHIFT)"
)
OF_VLLM = SUBJECT.format(
    imports="from kernelproof.impl.engines.sources import load\ndef stubs(): return {}",
    body="with load('vllm.ops.merging', stubs) as made:\n        return made.run(merge, inputs)",
)
OF_TORCH = SUBJECT.format(imports="", body="return merge(inputs, broken='engine' in sys.prefix)")
ADAPTER = '''
import importlib
import other.language as ol
import pack
import pack.language as pl
from pack import jit
from pack.errors import Error as PackError

NAME = "kernels.merging"
FILE = (f"pack.{NAME}", f"pack.old.{NAME}")
"""pack.not_code"""


@jit
def kernel(x):
    pl.store(x, pl.load(x).to(pl.float32))
    ol.load(x)


def run():
    with load(FILE, stubs) as kernels:
        kernels.merge[(1,)](1)
    self.kernels = kernels
    self.kernels.plan(helper(kernels.merge))
    rename = kernels.other
    rename(2)
    inner = importlib.import_module("pack.inner")
    inner.touch()
    raise PackError
'''
RELEASE = {
    "__init__.py": "from .runtime import *\nfrom . import language\n",
    "runtime.py": (
        "from typing import overload\n@overload\ndef jit(fn): ...\n"
        "def jit(fn=None, *, debug=False): ...\n"
    ),
    "errors.py": "import builtins\nclass Error(Exception):\n    def __init__(self, why): ...\n",
    "inner.py": "if True:\n    def touch(): ...\nelse:\n    touch = None\n",
    "language/__init__.py": "from .core import load, store as store\nfrom .core import float32\n",
    "language/core.py": (
        "def load(pointer, mask=None, cache='', _semantic=None): ...\n"
        "def put(pointer, value, /, **more): ...\nstore = put\nfloat32 = object()\n"
    ),
    "old/kernels/merging.py": "def merge(out, lse=None): ...\nclass plan: ...\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def release(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a release: a package and its metadata."""
    write(folder / name, files)
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return write(folder, {f"{name}-{version}.dist-info/METADATA": head}).resolve()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(FROM, raising=False)
    return write(tmp_path, {"made.py": MERGE})


def bump(package: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Compare two sides by one law, and give the exit code and the report."""
    code = main(["bump", "--package", package, *arguments, *WORDS])
    report: dict[str, Any] = json.loads(Path("report.json").read_text())
    assert report["exit_code"] == code
    return code, report


def changes(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["change"]: each for each in report["findings"]}


TRITON_FILES = {"language/__init__.py": "def load(pointer, mask=None{more}): ...\n"}


def triton(folder: Path, version: str, *, broken: bool, shift: bool, more: str = "") -> None:
    init = f"__version__, BROKEN, SHIFT = {version!r}, {broken}, {shift}\n"
    language = TRITON_FILES["language/__init__.py"].format(more=more)
    release(folder, "triton", version, {"__init__.py": init, "language/__init__.py": language})


def test_two_releases_of_triton_are_compared(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, {"subject.py": OF_TRITON})
    triton(here / "old", OLD, broken=False, shift=False, more=", *, other=None")
    triton(here / "new", NEW, broken=False, shift=True)
    code, report = bump(
        "triton", "old", "new", "--part", "surface", "--part", "behaviour", "--html", "page.html"
    )
    assert (code, report["verdict"], report["package"]) == (1, "do not bump", "triton")
    assert [report[side]["version"] for side in ("baseline", "candidate")] == [OLD, NEW]
    assert [report[side]["triton"] for side in ("baseline", "candidate")] == [OLD, NEW]
    found = changes(report)
    assert found.keys() == {"parameter-removed", "bits-changed"}
    assert found["parameter-removed"]["subject"] == "triton.language.load"
    assert found["parameter-removed"]["message"].endswith("the parameter other is gone")
    assert found["bits-changed"]["action"] == "report"
    assert [each["chip"] for each in report["chips"]] == ["cpu"]  # nothing is declared of others
    left_out = {each["what"]: each["why"] for each in report["machines"][0]["not_tested"]}
    assert left_out["declarations"] == "does not apply to triton"
    assert f"triton {OLD} (old) to {NEW} (new)" in capsys.readouterr().out
    page = Path("page.html").read_text()
    assert '<th scope="row">triton</th><td data-of="baseline">9.9.1</td>' in page
    assert page.count('<th scope="row">triton</th>') == 1


def test_a_failure_is_replayed_with_the_release_of_the_package(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, {"subject.py": OF_TRITON})
    triton(here / "old", OLD, broken=False, shift=False)
    triton(here / "new", NEW, broken=True, shift=False)
    code, report = bump("triton", "old", "new", "--part", "behaviour")
    assert (code, report["verdict"]) == (1, "do not bump")
    failure = changes(report)["new-failure"]
    assert f"right with {OLD}, wrong with {NEW}" in failure["message"]
    command = failure["replay"]["candidate"]
    assert command.endswith(" --release new --package triton")
    assert main(shlex.split(command)[1:]) == 1
    # The journal is of this package's comparison.
    assert Path(".kernelproof/gate/triton-old-new-cpu.jsonl").exists()
    resumed, again = bump("triton", "old", "new", "--part", "behaviour", "--resume")
    assert (resumed, again["findings"]) == (code, report["findings"])
    assert again["machines"][0]["timings"]["asked"] == 0
    write(here / "engine", {"vllm/__init__.py": ""})
    words = ["--package", "triton", "old", "new", "--part", "behaviour", "--from", "engine"]
    assert main(["bump", *words, "--resume", *WORDS]) == 2
    assert "is of another run: its from is []" in " ".join(capsys.readouterr().err.split())


def test_a_side_of_an_engine_is_its_python_files(here: Path) -> None:
    write(here, {"subject.py": OF_VLLM})
    for folder, version, broken in (("old", OLD, False), ("new", NEW, True)):
        merging = f"def run(merge, inputs): return merge(inputs, broken={broken})\n"
        files = {"__init__.py": "raise RuntimeError('not to run')\n", "ops/merging.py": merging}
        release(here / folder, "vllm", version, files)
    code, report = bump("vllm", "old", "new", "--part", "behaviour")
    assert (code, report["verdict"], report["package"]) == (1, "do not bump", "vllm")
    assert [report[side]["version"] for side in ("baseline", "candidate")] == [OLD, NEW]
    versions = report["machines"][0]["versions"]
    assert [versions[side]["vllm"] for side in ("baseline", "candidate")] == [OLD, NEW]
    assert changes(report).keys() == {"new-failure"}


RANKS_FILE, BATCH_FILE = "v1/worker/gpu/cp_utils.py", "v1/worker/gpu/input_batch.py"
RANKS = """
def prepare_dcp_local_seq_lens(out, seq_lens, num_reqs, dcp_size, dcp_rank, cp_interleave):
    turns, rest = seq_lens // (dcp_size * cp_interleave), seq_lens % (dcp_size * cp_interleave)
    rest = (rest - dcp_rank * cp_interleave).clamp(0, cp_interleave)
    out.zero_()
    out[:num_reqs] = turns * cp_interleave + rest + {more}
"""
BATCHES = """
import torch
_prepare_pos_seq_lens_kernel = None

def prepare_pos_seq_lens(idx_mapping, query_start_loc, num_computed_tokens, pos, seq_lens):
    news, before = query_start_loc.diff(), num_computed_tokens[idx_mapping.long()]
    seq_lens.zero_()
    seq_lens[: len(news)] = before + news
    places = [torch.arange(n) + b for n, b in zip(news.tolist(), before.tolist())]
    pos[: int(query_start_loc[-1])] = torch.cat([pos[:0], *places])
"""


@pytest.mark.skipif(missing("triton", "triton") is not None, reason="adapters ask for triton")
def test_an_engines_builder_that_changed_is_found_and_a_missing_one_named_with_its_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    right = {"__init__.py": "", RANKS_FILE: RANKS.format(more=0), BATCH_FILE: BATCHES}
    release(here / "old", "vllm", OLD, right)
    release(here / "new", "vllm", NEW, {"__init__.py": "", RANKS_FILE: RANKS.format(more=1)})
    words = [*WORDS[: WORDS.index("--law")], "--law", "batch_parity", "--jobs", "1"]
    asked = [f"--implementation={name}" for name in ("vllm-local-seq-lens", "vllm-positions")]
    bumped = ["bump", "--package", "vllm", "old", "new", "--part", "behaviour"]
    assert main([*bumped, *asked, *words]) == 1
    found = changes(json.loads((here / "report.json").read_text()))
    assert found.keys() == {"new-failure", "implementation-lost"}
    assert found["new-failure"]["subject"] == "vllm-local-seq-lens"
    lost = found["implementation-lost"]
    assert lost["subject"] == "vllm-positions"
    assert f"vllm {NEW} has no vllm/{BATCH_FILE}" in lost["message"]


def test_folders_of_other_engines_stay(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FROM, "others")
    folder = release(here / "old", "vllm", OLD, {"__init__.py": ""})
    found = find_release("old", PACKAGES["vllm"])
    assert found.environment[FROM] == f"{folder}:others"
    assert str(folder) not in found.path  # whose modules only adapters load
    assert FROM not in find_release(sys.executable, PACKAGES["torch"]).environment


def test_torch_is_compared_by_interpreters(here: Path) -> None:
    write(here, {"subject.py": OF_TORCH})
    venv.create(here / "engine", symlinks=True)
    (packages,) = (here / "engine").glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    code, report = bump("torch", sys.executable, "engine/bin/python", "--part", "behaviour")
    assert (code, report["verdict"], report["package"]) == (1, "do not bump", "torch")
    versions = [report[side]["version"] for side in ("baseline", "candidate")]
    assert versions == [torch.__version__, torch.__version__]
    assert report["candidate"]["own_environment"]
    assert changes(report).keys() == {"new-failure"}


RAISING = "raise ImportError('libcudart.so.13: cannot open')\n"


def test_a_candidate_that_does_not_import_is_a_finding(here: Path) -> None:
    write(here, {"subject.py": OF_TRITON})
    triton(here / "old", OLD, broken=False, shift=False)
    release(here / "new", "triton", NEW, {"__init__.py": RAISING})
    code, report = bump("triton", "old", "new")
    assert (code, report["verdict"]) == (1, "do not bump")
    (broken,) = report["findings"]
    assert broken["change"] == "release-broken"
    said = "new: triton cannot be imported: ImportError: libcudart.so.13: cannot open"
    assert broken["message"] == said


def test_a_torch_without_its_dependencies_says_nothing_of_the_release(here: Path) -> None:
    write(here, {"subject.py": OF_TORCH})
    release(here / "new", "torch", NEW, {"__init__.py": RAISING})
    code, report = bump("torch", torch.__version__, "new")
    assert (code, report["verdict"], report["findings"]) == (3, "undecided", [])
    (failure,) = report["failures"]
    assert failure.startswith("--candidate: new: torch cannot be imported: ImportError: libcudart")
    assert failure.endswith(
        "(its dependencies may be missing: give a Python interpreter that has them too)"
    )


def test_what_is_judged_follows_from_the_package() -> None:
    judged = {
        name: {each for each in _concerned(package, all_of_them=False) if each in BUILT_IN}
        for name, package in PACKAGES.items()
    }
    assert judged["torch"] == set(BUILT_IN)
    assert judged["triton"] == {name for name in BUILT_IN if built_in_compiler(name) == TRITON}
    assert {"triton-attention", "flashinfer-triton-merge-state"} <= judged["triton"]
    assert judged["vllm"] == {name for name in BUILT_IN if built_in_provider(name) == VLLM}
    assert judged["nvidia-cutlass-dsl"] == {"flashinfer-cute-dsl-moe-bf16"}
    # An interpreter is compared as a whole only where no package was named.
    every = set(_concerned(PACKAGES["flashinfer"], all_of_them=True))
    assert set(BUILT_IN) <= every
    assert set(_concerned(PACKAGES["triton"], all_of_them=True)) < every


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--package", "nosuch", "1", "2"], f"'nosuch' is not one of {KNOWN}"),
        (["--package", "tritn", "1", "2"], "did you mean triton?"),
        (["--package", "triton", "1", "2", "--part", "declarations"],
         "--part declarations does not apply to triton"),
        (["--package", "torch", "1", "2", "--part", "surface"],
         "--part surface does not apply to torch"),
        (["--package", "vllm", "1", "2", "--compile", "90"], "--compile does not apply to vllm"),
        (["--package", "vllm", "1", "2", "--uses", "."], "--uses does not apply to vllm"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_what_does_not_apply_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["bump", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_package_that_cannot_be_fetched_says_what_to_give(here: Path) -> None:
    code = main(["bump", "--package", "nvidia-cutlass-dsl", "1", "2", "--json", "report.json"])
    failures = json.loads((here / "report.json").read_text())["failures"]
    assert code == 2
    assert failures[0].startswith("--baseline: 1: nvidia-cutlass-dsl cannot be fetched: ")
    assert "give a Python interpreter" in failures[0]


def test_pins_are_of_the_package(here: Path) -> None:
    write(here, {"now.txt": "triton==3.8.0\n", "next.txt": "torch==2.9.1\ntriton==3.8.0\n"})
    files = ["--baseline-from", "now.txt", "--candidate-from", "next.txt"]
    assert main(["bump", "--package", "triton", *files]) == 0  # both pin the same


class TestSurface:
    """What adapters call, and what a release has of it, read from source."""

    def used(self, folder: Path) -> tuple[Used, ...]:
        return used_of("pack", write(folder / "adapters", {"inner/adapter.py": ADAPTER}))

    def test_names_are_read_from_adapters(self, tmp_path: Path) -> None:
        used = self.used(tmp_path)
        assert {each.names[0]: each.is_called for each in used} == {
            "pack.errors.Error": False,
            "pack.inner.touch": True,
            "pack.jit": True,
            "pack.kernels.merging.merge": True,
            "pack.kernels.merging.other": True,
            "pack.kernels.merging.plan": True,
            "pack.language.float32": False,
            "pack.language.load": True,
            "pack.language.store": True,
        }
        assert (
            Used(("pack.kernels.merging.merge", "pack.old.kernels.merging.merge"), is_called=True)
            in used
        )

    def test_parameters_are_read_behind_imports(self, tmp_path: Path) -> None:
        found = callables_of(write(tmp_path / "pack", RELEASE).parent, self.used(tmp_path))
        told = {
            name: [each["name"] for each in entry["parameters"]]
            for name, entry in found.items()
            if "parameters" in entry
        }
        assert told == {
            "pack.inner.touch": [],
            "pack.jit": ["fn", "debug"],
            "pack.kernels.merging.merge": ["out", "lse"],
            "pack.language.load": ["pointer", "mask", "cache"],
            "pack.language.store": ["pointer", "value", "more"],
        }
        assert {name: found[name] for name in found.keys() - told.keys()} == {
            "pack.errors.Error": {"source": "pack/errors.py:2"},
            "pack.kernels.merging.plan": {"source": "pack/old/kernels/merging.py:2"},
            "pack.language.float32": {"source": "pack/language/core.py:4"},
        }
        kinds = [each["kind"] for each in found["pack.language.store"]["parameters"]]
        assert kinds == ["positional_only", "positional_only", "var_keyword"]
        assert found["pack.language.load"]["parameters"][2]["default"] == "''"

    def test_what_reads_them_is_named_where_it_is_missing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "griffe", None)
        with pytest.raises(UsageRefusedError, match=r"needs griffe: .*suite.* brings it"):
            importlib.reload(callables)

    def test_a_class_is_called_by_its_parameters(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "pack", RELEASE).parent
        (found,) = callables_of(folder, [Used(("pack.errors.Error",), is_called=True)]).values()
        assert [each["name"] for each in found["parameters"]] == ["why"]

    def test_what_changed_of_them_is_found(self, tmp_path: Path) -> None:
        newer = {
            **RELEASE,
            "inner.py": "",
            "errors.py": "",
            # It moved, which the adapter knows.
            "kernels/merging.py": "def merge(out, scale, lse=None): ...\nplan = merge\n",
            "language/core.py": RELEASE["language/core.py"].replace("cache=''", "cache='ca'"),
        }
        old, new = (
            {"signatures": callables_of(write(tmp_path / side / "pack", files).parent, used)}
            for used in [self.used(tmp_path)]
            for side, files in (("old", RELEASE), ("new", newer))
        )
        found = [(each.change, each.subject) for each in called_findings(old, new)]
        assert sorted(found) == [
            ("callable-removed", "pack.errors.Error"),
            ("callable-removed", "pack.inner.touch"),
            ("default-changed", "pack.language.load"),
            ("parameter-required", "pack.kernels.merging.merge"),
            ("positional-meaning", "pack.kernels.merging.merge"),
        ]
        assert ("callable-added", "pack.inner.touch") in {
            (each.change, each.subject) for each in called_findings(new, old)
        }

    def test_every_name_that_adapters_call_of_triton_is_there(self) -> None:
        triton = pytest.importorskip("triton")
        used = used_of("triton")
        assert {("triton.jit",), ("triton.language.dot",)} < {each.names for each in used}
        found = callables_of(Path(triton.__file__).parents[1], used)
        assert found.keys() == {each.names[0] for each in used}

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("vllm", "vllm.v1.attention.ops.triton_merge_attn_states.merge_attn_states"),
            ("sglang", "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd"),
        ],
    )
    def test_names_of_files_that_adapters_compute_are_known(self, module: str, name: str) -> None:
        (found,) = [each for each in used_of(module) if each.names[0] == name]
        assert found.is_called
        assert len(found.names) > 1  # older releases have the file elsewhere
