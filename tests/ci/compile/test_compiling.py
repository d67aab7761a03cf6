"""Compile evidence, with a compiler that does what its source says, and once with nvcc itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.compile import compiling
from kernelproof.ci.compile.compiling import compile_modules, compile_support, recall, remember
from kernelproof.ci.compile.generating import (
    Job,
    Plan,
    Release,
    choose_units,
    release_in,
    runs_on,
)
from kernelproof.ci.compile.nvcc import (
    Compiled,
    Nvcc,
    compile_object,
    count_kernels,
    find_nvcc,
    first_error,
    without_paths,
)
from kernelproof.ci.console.errors import MachineError, UsageRefusedError
from kernelproof.impl.flashinfer.modules import Unit
from kernelproof.impl.gating.knowledge import Compilation, read_compilation
from kernelproof.impl.targets.cache import CACHE_VARIABLE, cache_folder

FAKE = """\
#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit ;;
  --dryrun) echo "#$ TOP={top}/bin/.."; exit ;;
esac
echo run >> {top}/runs
for out; do :; done
. "$2"
"""
COMPILES = 'printf "\\0_Z6relu2_kernel\\0" > "$out"\n'
FAILS = 'echo "/usr/include/x.h(3): error: no such thing as /opt/cuda/y.h" >&2; exit 2\n'
HANGS = "exec sleep 600\n"
NO_HEADER = 'echo "a.h:1:2: fatal error: cublasLt.h: No such file or directory"; exit 1\n'


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def compiler(tmp_path: Path) -> Nvcc:
    """A compiler that runs its source as a shell script; ``$out`` is where the object goes."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "nvcc"
    program.write_text(FAKE.format(top=home), encoding="utf-8")
    program.chmod(0o755)
    return Nvcc(program, "13.0.88", home)


def runs(compiler: Nvcc) -> int:
    file = compiler.home / "runs"
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


class Sources:
    """Stands for a release: units whose sources are given here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.units, self.plans = folder, dict[str, Unit](), list[Plan]()
        monkeypatch.setattr(compiling, "plan_units", lambda *_, **__: list(self.plans))

    def add(self, name: str, *sources: str, kernel: str = "_Z6relu2", state: str = "") -> None:
        unit = Unit(name, {"operation": "moe"}, lambda _: None, kernel)
        jobs = []
        for number, text in enumerate(sources):
            file = self.folder / f"{name}-{number}.cu"
            file.write_text(text, encoding="utf-8")
            words = ("nvcc", "-c", str(file), "-O3", "-o", "/nowhere/else.o")
            jobs.append(Job("0.6.7", 103, unit, file.name, words, f"{name}-{number}"))
        self.units[name] = unit
        state, message = state or "generated", "why" if state else ""
        self.plans.append(Plan("0.6.7", 103, unit, state, message, ("sm_103a",), tuple(jobs)))

    def compile(
        self, compiler: Nvcc, tell: Callable[[str], None] = lambda _: None, command: str = ""
    ) -> Compilation:
        return compile_modules(
            [Release("0.6.7", self.folder)],
            [103],
            list(self.units.values()),
            nvcc=compiler,
            jobs=2,
            tell=tell,
            command=command,
        )


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(tmp_path, monkeypatch)


def statuses(evidence: Compilation) -> dict[str, str]:
    return {record.unit: record.status for record in evidence.records}


class TestObjects:
    def object_of(
        self,
        compiler: Nvcc,
        tmp_path: Path,
        text: str,
        *,
        deadline: float = 30.0,
        kernel: str = "_Z",
    ) -> Compiled:
        file = tmp_path / "unit.cu"
        file.write_text(text, encoding="utf-8")
        words = ["theirs", "-c", str(file), "-o", "x.o"]
        return compile_object(compiler, words, deadline=deadline, kernel=kernel)

    def test_one_that_compiles(self, compiler: Nvcc, tmp_path: Path) -> None:
        compiled = self.object_of(compiler, tmp_path, COMPILES, kernel=r"_Z\d+relu2")
        assert (compiled.state, compiled.kernels, compiled.message) == ("compiles", 1, "")

    def test_one_that_fails_says_why_without_paths(self, compiler: Nvcc, tmp_path: Path) -> None:
        compiled = self.object_of(compiler, tmp_path, FAILS)
        assert compiled.state == "fails"
        assert compiled.message == "x.h(3): error: no such thing as y.h"

    def test_a_hang_is_ended_and_judges_nothing(self, compiler: Nvcc, tmp_path: Path) -> None:
        compiled = self.object_of(compiler, tmp_path, HANGS, deadline=0.3)
        assert (compiled.state, compiled.message) == ("undecided", "it takes longer than 0.3 s")

    @pytest.mark.parametrize(
        "text",
        [
            NO_HEADER,
            "kill -9 $$\n",
            "exit 0\n",
            "echo \"nvcc error : 'cicc' died due to signal 9 (Kill signal)\"; exit 9\n",
            "echo \"nvcc fatal : Unsupported gpu architecture 'compute_121a'\"; exit 1\n",
        ],
        ids=["toolkit", "killed", "nothing written", "out of memory", "old nvcc"],
    )
    def test_the_machines_faults_are_no_verdict(
        self, compiler: Nvcc, tmp_path: Path, text: str
    ) -> None:
        assert self.object_of(compiler, tmp_path, text).state == "undecided"

    def test_a_header_that_the_release_lacks_is_its_own_fault(
        self, compiler: Nvcc, tmp_path: Path
    ) -> None:
        text = NO_HEADER.replace("cublasLt.h", "cutlass/cutlass.h")
        assert self.object_of(compiler, tmp_path, text).state == "fails"


class TestMessages:
    @pytest.mark.parametrize(
        ("told", "expected"),
        [
            ("warning: x\n/a/b/c.cu(1): error: bad\nc(2): error: worse", "c.cu(1): error: bad"),
            (
                "/v/site-packages/flashinfer/data/include/flashinfer/a.cuh:3:1: fatal error: b.h",
                "include/flashinfer/a.cuh:3:1: fatal error: b.h",
            ),
            (
                "ptxas /tmp/tmpxft_00ab_00000000-6_unit.ptx, line 3; error   : no 'x' on sm_90",
                "ptxas (temporary file), line 3; error : no 'x' on sm_90",
            ),
            (
                "a.h(3): error: static assertion failed\n  static_assert(N == 1);\n  ^",
                "a.h(3): error: static assertion failed: static_assert(N == 1);",
            ),
            ("nothing like it\nat all", "at all"),
            ("", ""),
        ],
    )
    def test_the_first_error(self, told: str, expected: str) -> None:
        assert first_error(told) == expected

    def test_what_is_no_path_stays(self) -> None:
        text = "sm_90/sm_100: see https://example.org/a/b and a/b"
        assert without_paths(text) == text

    def test_a_kernel_is_counted_once_and_by_its_whole_name(self) -> None:
        data = b"x\0_Z1a5Relu2\0_Z1a5Relu2\0_ZZ_Z1a5Relu2\0_Z1b4SiLu\0"
        assert count_kernels(data, "_Z1a.*5Relu2") == (1, 0)
        assert count_kernels(data, "_Z1c") == (0, 0)


class TestFinding:
    def test_in_cuda_home(self, compiler: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(compiler.home))
        assert find_nvcc() == Nvcc(compiler.path, "13.0.88", compiler.home.resolve())

    def test_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(MachineError, match=r"there is no nvcc in .*: install CUDA's compiler"):
            find_nvcc()
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MachineError, match="there is no nvcc on the PATH"):
            find_nvcc()

    def test_one_that_is_no_nvcc(self, compiler: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler.path.write_text("#!/bin/sh\necho hello\n", encoding="utf-8")
        monkeypatch.setenv("CUDA_HOME", str(compiler.home))
        with pytest.raises(MachineError, match="names no version of CUDA: 'hello'"):
            find_nvcc()

    @pytest.mark.parametrize(
        ("number", "suffix", "sm", "expected"),
        [
            (90, "a", 90, True),
            (90, "a", 100, False),
            (100, "f", 103, True),
            (100, "a", 103, False),
            (120, "f", 121, True),
            (121, "a", 120, False),
            (121, "f", 120, False),
            (80, "", 89, True),
            (80, "", 90, False),
        ],
    )
    def test_which_chip_runs_which_code(
        self, number: int, suffix: str, sm: int, expected: bool
    ) -> None:
        assert runs_on(number, suffix, sm) is expected


class TestRuns:
    def test_each_status(self, sources: Sources, compiler: Nvcc) -> None:
        sources.add("good", COMPILES, COMPILES)
        sources.add("bad", COMPILES, FAILS)
        sources.add("lacks", COMPILES, kernel="_Z9gelu_kern")
        sources.add("holds", COMPILES, kernel=r"_Z\d+relu2")
        sources.add("no-cublas", NO_HEADER)
        sources.add("refused", state="refused")
        sources.add("elsewhere", state="other-chip")
        sources.add("broken", state="broken")
        lines: list[str] = []
        evidence = sources.compile(compiler, tell=lines.append, command="this")
        assert statuses(evidence) == {
            "bad": "failed",
            "broken": "unjudged",
            "elsewhere": "other-chip",
            "good": "compiled",
            "holds": "compiled",
            "lacks": "incomplete",
            "no-cublas": "unjudged",
            "refused": "refused",
        }
        found = {record.unit: record for record in evidence.records}
        assert found["bad"].message == "bad-1.cu: x.h(3): error: no such thing as y.h"
        assert (found["good"].objects, found["good"].architectures) == (2, ("sm_103a",))
        assert (found["holds"].kernels, found["lacks"].kernels) == (1, 0)
        assert "no kernel in it matches _Z9gelu_kern" in found["lacks"].message
        assert (evidence.nvcc, evidence.command) == ("13.0.88", "this")
        assert any("bad-1.cu: fails: " in line for line in lines)
        assert "7 of 7 objects" in lines[-1]

    def test_what_came_of_an_object_is_remembered(self, sources: Sources, compiler: Nvcc) -> None:
        sources.add("good", COMPILES)
        sources.add("bad", FAILS)
        sources.add("no-cublas", NO_HEADER)
        first = sources.compile(compiler)
        assert runs(compiler) == 3
        lines: list[str] = []
        again = sources.compile(compiler, tell=lines.append)
        assert runs(compiler) == 4  # the machine may have been mended
        assert statuses(again) == statuses(first)
        assert "2 known from before" in lines[-1]

    def test_an_unreadable_cache_is_no_cache(self) -> None:
        assert recall("ab12") is None
        assert remember("ab12", Compiled("compiles", 1.0)) == ""
        assert recall("ab12") == Compiled("compiles", 1.0)
        (cache_folder() / "compile" / "ab" / "ab12.json").write_text("{", encoding="utf-8")
        assert recall("ab12") is None

    def test_a_cache_that_cannot_be_written_costs_nothing(
        self, sources: Sources, compiler: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
        sources.add("good", COMPILES, COMPILES)
        lines: list[str] = []
        assert statuses(sources.compile(compiler, tell=lines.append)) == {"good": "compiled"}
        assert sum("nothing can be kept there" in line for line in lines) == 1

    def test_ctrl_c_keeps_what_is_done_and_ends_the_rest(
        self, sources: Sources, compiler: Nvcc, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sources.add("good", COMPILES)
        sources.add("hangs", HANGS)
        sources.add("waits", HANGS)
        sources.add("half", COMPILES, HANGS)
        sources.add("failed", FAILS, HANGS)
        monkeypatch.setattr(compiling, "TICK_SECONDS", 1.0)

        def interrupt(line: str) -> None:
            if "objects; at work: " in line or "do not compile; at work: " in line:
                raise KeyboardInterrupt

        evidence = sources.compile(compiler, tell=interrupt)
        assert evidence.interrupted
        assert "hangs" not in statuses(evidence)
        assert set(statuses(evidence).values()) <= {"compiled", "failed"}

    def test_progress_names_what_is_at_work(
        self, sources: Sources, compiler: Nvcc, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiling, "TICK_SECONDS", 0.1)
        sources.add("slow", f"sleep 1\n{COMPILES}")
        lines: list[str] = []
        sources.compile(compiler, tell=lines.append)
        assert any("0 of 1 objects; at work: 0.6.7 SM103 slow slow-0.cu" in line for line in lines)


class TestCommand:
    def test_it_writes_what_can_be_read_back(
        self,
        sources: Sources,
        compiler: Nvcc,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.provide(sources, compiler, monkeypatch)
        sources.add("good", COMPILES)
        sources.add("bad", FAILS)
        file = tmp_path / "new" / "evidence.json"
        words = ["--flashinfer", str(tmp_path), "--compile", "sm_103,10.3", "--json", str(file)]
        assert main(["support", *words]) == 0
        assert capsys.readouterr().out == "1 compiled, 1 failed\n"
        evidence = read_compilation(file)
        assert statuses(evidence) == {"bad": "failed", "good": "compiled"}
        assert evidence.command == "kernelproof support --compile 103 --flashinfer 0.6.7"
        assert str(tmp_path) not in file.read_text(encoding="utf-8")

    def test_a_machine_that_can_compile_nothing_is_an_error(
        self, sources: Sources, compiler: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.provide(sources, compiler, monkeypatch)
        sources.add("no-cublas", NO_HEADER)
        with pytest.raises(MachineError, match=r"nothing could be compiled: .*cublasLt"):
            compile_support([str(tmp_path)], ["103"])

    def test_no_nvcc(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert main(["support", "--flashinfer", str(tmp_path), "--compile", "90"]) == 3
        assert "there is no nvcc in" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--compile", "10"], "--compile: '10' is ambiguous"),
            (["--compile", "90", "--unit", "decode"], "--unit 'decode' is none of moe-cutlass"),
            (["--compile", "90"], "flashinfer"),
        ],
    )
    def test_bad_input(
        self,
        arguments: list[str],
        message: str,
        compiler: Nvcc,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("CUDA_HOME", str(compiler.home))
        assert main(["support", "--flashinfer", str(tmp_path), *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_units_are_found_by_name(self) -> None:
        names = ["decode-bf16-hd128", "merge-state", "decode-bf16-hd128"]
        assert [unit.name for unit in choose_units(names)] == ["decode-bf16-hd128", "merge-state"]
        with pytest.raises(UsageRefusedError, match="no-such"):
            choose_units(["no-such"])

    def provide(self, sources: Sources, compiler: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(compiler.home))
        release = Release("0.6.7", sources.folder)
        monkeypatch.setattr(compiling, "_release", lambda *_: release)


def test_a_release_is_found_in_a_folder(tmp_path: Path) -> None:
    about = tmp_path / "flashinfer_python-0.6.7.post2.dist-info"
    about.mkdir()
    metadata = "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.7.post2\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    with pytest.raises(UsageRefusedError, match="no flashinfer-python"):
        release_in(tmp_path)
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    assert release_in(tmp_path) == Release("0.6.7.post2", tmp_path.resolve())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
def test_nvcc_itself_compiles_for_a_chip_that_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    compiler = find_nvcc()
    assert (compiler.home / "include" / "cuda_runtime.h").is_file()
    file = tmp_path / "tiny.cu"
    file.write_text("template <int N> __global__ void tiny(int* x) { *x = N; }\n", encoding="utf-8")
    words = ["nvcc", "-c", str(file), "-gencode=arch=compute_90,code=sm_90", "-o", "x.o"]
    pattern = r"_Z4tinyILi3EE"
    lacks = compile_object(compiler, words, deadline=120, kernel=pattern)
    assert (lacks.state, lacks.kernels) == ("compiles", 0)
    with file.open("a", encoding="utf-8") as more:
        more.write("void f(int* x) { tiny<3><<<1, 1>>>(x); }\n")
    holds = compile_object(compiler, words, deadline=120, kernel=pattern)
    assert (holds.state, holds.kernels) == ("compiles", 1)
    file.write_text("int x = no_such_name;\n", encoding="utf-8")
    fails = compile_object(compiler, words, deadline=120, kernel=pattern)
    assert fails.state == "fails"
    assert fails.message == 'tiny.cu(1): error: identifier "no_such_name" is undefined'
