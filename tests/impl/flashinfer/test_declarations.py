"""What a release declares is collected from a small made-up one, and from the installed one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelproof.impl.flashinfer_declarations import DeclarationsError, declarations
from kernelproof.impl.targets.target import installed_version

FILES = {
    "__init__.py": "__version__ = '9.9.1'\n",
    "utils.py": """
import enum, functools


class PosEncodingMode(enum.Enum):
    NONE = 0


def supported_compute_capability(ccs):
    def decorate(function):
        function.is_compute_capability_supported = lambda cc: cc in ccs
        return function
    return decorate


def backend_requirement(backend_checks, common_check=None):
    def decorate(function):
        def has_backend_choices():
            return bool(backend_checks)

        def is_backend_supported(backend, cc=None):
            return backend_checks[backend].is_compute_capability_supported(cc)

        def is_compute_capability_supported(cc):
            return common_check.is_compute_capability_supported(cc)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        wrapper.has_backend_choices = has_backend_choices
        wrapper.is_backend_supported = is_backend_supported
        wrapper.is_compute_capability_supported = is_compute_capability_supported
        return wrapper
    return decorate


def is_fa3_backend_supported(mode, fp16_qk, custom_mask, q, kv):
    return not custom_mask and q == kv
""",
    "gemm.py": """
from .utils import backend_requirement, supported_compute_capability


@supported_compute_capability([100, 103])
def _fast(a, backend):
    return True


@supported_compute_capability([89, 90])
def _slow(a, backend):
    return True


@backend_requirement({"fast": _fast, "slow": _slow})
def mm(a, backend="fast"):
    return a


@supported_compute_capability([120, 121])
def alone(a):
    return a
""",
    "unimportable.py": """
import cutlass_that_is_not_here
from .utils import backend_requirement, supported_compute_capability

CCS = (100, 103)


@supported_compute_capability(CCS)
def _check(a):
    return True


@supported_compute_capability(supported_ccs=sorted({90, 89}))
def _other(a):
    return True


@backend_requirement({"only": _other}, common_check=_check)
def grouped(a):
    return a
""",
    "compilation_context.py": """
import os


class CompilationContext:
    def __init__(self):
        from .jit.cpp_ext import is_cuda_version_at_least

        major, minor = os.environ["FLASHINFER_CUDA_ARCH_LIST"].rstrip("a").split(".")
        if int(major) == 12 and not is_cuda_version_at_least("12.9"):
            raise RuntimeError("too old")
        self.archs = [(int(major), minor)]

    def get_nvcc_flags_list(self, supported_major_versions=None):
        kept = [a for a in self.archs if a[0] in (supported_major_versions or [a[0]])]
        if not kept:
            raise RuntimeError("No supported CUDA architectures found")
        return [f"-gencode=arch=compute_{a}{b}" for a, b in kept] + ["-DX"]
""",
    "jit/__init__.py": "",
    "jit/cpp_ext.py": "def is_cuda_version_at_least(version):\n    raise OSError('no nvcc')\n",
    "jit/xqa.py": """
from ..compilation_context import CompilationContext

MAJORS = (9, 12)


def gen_xqa_module(input_dtype, page_size, head_dim, other=None):
    if page_size not in (16, 32):
        raise ValueError("page_size")
    if head_dim % 16 or head_dim > 128:
        raise ValueError("head_dim")
    CompilationContext().get_nvcc_flags_list(supported_major_versions=list(MAJORS))


def gen_moe_module():
    CompilationContext().get_nvcc_flags_list(supported_major_versions=[10, 11])


def gen_fixed_module():
    return sm90a_nvcc_flags
""",
    "fused_moe/__init__.py": "",
    "fused_moe/core.py": """
from ..utils import PosEncodingMode


def get_cutlass_fused_moe_module(backend="100"):
    if backend in ("100", "110"):
        module = gen_moe_module().build()
    elif backend == "90":
        module = gen_sm90_module()
    else:
        raise ValueError(backend)
    return module


class Runner:
    _supported_archs = (103, 100)


class Config:
    @classmethod
    def supported(cls, arch):
        return arch in (100, 107)


class Open:
    @classmethod
    def supported(cls, arch):
        return arch >= 110


class Bare:
    _supported_archs: tuple
""",
    "xqa.py": """
def xqa(q):
    if get_compute_capability(q)[0] not in [9, 12]:
        raise RuntimeError("XQA is not there")
""",
    "decode.py": """
from typing import Optional


def trtllm_batch_decode_with_kv_cache(query, *, backend: str = "auto", sinks=None):
    if backend == "auto":
        backend = "trtllm-gen"
    if backend in ("trtllm-gen", "xqa"):
        return query
""",
    "artifacts.py": """
class ArtifactPath:
    TRTLLM_GEN_FMHA: str = "abc123/fmha/"
    DSL_FMHA_ARCHS: tuple[str, ...] = ("sm_100a",)


class CheckSumHash:
    TRTLLM_GEN_FMHA: str = "beef"
    computed: dict = {join("a"): 1}
""",
    "tllm_enums.py": """
from enum import IntEnum


class ActivationType(IntEnum):
    Gelu = 0
    Relu2 = 6
""",
    "broken_syntax.py": "backend_requirement = (",
    "data/include/flashinfer/utils.cuh": """
#define DISPATCH_GQA_GROUP_SIZE(group_size, GROUP_SIZE, ...) \\
  if (group_size == 1) {                                     \\
    constexpr size_t GROUP_SIZE = 1;                         \\
  } else if (group_size == 8) {                              \\
    constexpr size_t GROUP_SIZE = 8;                         \\
  }

#define DISPATCH_MASK(mask, MASK, ...) \\
  switch (mask) {                      \\
    case MaskMode::kNone: {            \\
    }                                  \\
  }
""",
    "data/include/flashinfer/math.cuh": "constexpr float inf = 5e4;\n",
    "data/include/flashinfer/trtllm/fmha/fmhaRunner.cuh": """
class TllmGenFmhaRunner {
    FLASHINFER_CHECK(mSM == kSM_100 ||
                     mSM == kSM_103, "Unsupported architecture");
    FLASHINFER_CHECK(
        mDtypeQ == DATA_TYPE_E4M3 || mDtypeQ == DATA_TYPE_BF16, "Unsupported");
};
""",
    "data/include/flashinfer/trtllm/fmha/fmhaKernels.cuh": """
constexpr bool isSMCompatible(int gpuSM, int kernelSM) {
  if (gpuSM == kSM_103) {
    return kernelSM == kSM_100f || kernelSM == kSM_103;
  }
  return gpuSM == kernelSM;
}
""",
    "data/csrc/trtllm_moe_launcher.cu": 'TVM_FFI_ICHECK(major == 10 || major == 12) << "x";\n',
    "data/csrc/trtllm_fused_moe_runner.cu": """
    case ActivationType::Swiglu:
    case ActivationType::Relu2:
    case ActivationType::InvalidType:
""",
    "data/cutlass/elsewhere.py": "supported_major_versions=[1]\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write(tmp_path_factory.mktemp("release"), FILES)
    information = folder / "flashinfer_python-9.9.1.dist-info" / "METADATA"
    information.parent.mkdir()
    information.write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 9.9.1\n")
    return declarations(folder)


def test_the_answer_names_its_schema_and_release(made_up: dict[str, Any]) -> None:
    assert made_up["schema"] == "kernelproof/declarations/1"
    assert made_up["flashinfer"] == "9.9.1"
    assert json.loads(json.dumps(made_up)) == made_up


def test_decorated_callables_are_asked(made_up: dict[str, Any]) -> None:
    found = {each["api"]: each for each in made_up["capabilities"]}
    assert found["gemm.mm"]["how"] == "asked"
    assert found["gemm.mm"]["backends"] == {"fast": [100, 103], "slow": [89, 90]}
    assert found["gemm.mm"]["common"] is None
    assert found["gemm.alone"]["common"] == [120, 121]
    assert found["gemm.alone"]["source"].startswith("flashinfer/gemm.py:")
    assert not any(name.startswith("gemm._") for name in found)  # checkers are no callables


def test_a_module_that_does_not_import_is_read_and_listed(made_up: dict[str, Any]) -> None:
    found = {each["api"]: each for each in made_up["capabilities"]}
    assert found["unimportable.grouped"]["how"] == "read"
    assert found["unimportable.grouped"]["backends"] == {"only": [89, 90]}
    assert found["unimportable.grouped"]["common"] == [100, 103]
    reason = made_up["not_imported"]["flashinfer.unimportable"]
    assert reason.startswith("ModuleNotFoundError")
    assert "cutlass_that_is_not_here" in reason


def test_the_filter_of_architectures_is_asked_for_every_chip(made_up: dict[str, Any]) -> None:
    found = {each["generator"]: each for each in made_up["jit_filters"]}
    assert found["gen_xqa_module"]["majors"] == [9, 12]
    assert found["gen_xqa_module"]["chips"] == [90, 120, 121]
    assert found["gen_moe_module"]["chips"] == [100, 103, 107, 110]
    assert "compute_121" in made_up["targets"]["121"]["flags"][0]  # nvcc was not asked
    assert [each["generator"] for each in made_up["fixed_flags"]] == ["gen_fixed_module"]


def test_modules_runners_and_checks_of_python(made_up: dict[str, Any]) -> None:
    assert made_up["fused_moe_modules"]["modules"] == {
        "100": "gen_moe_module",
        "110": "gen_moe_module",
        "90": "gen_sm90_module",
    }
    assert [(each["runner"], each["chips"]) for each in made_up["runners"]] == [
        ("Runner", [100, 103])
    ]
    shown = [(each["config"], each["chips"], each["open_ended"]) for each in made_up["configs"]]
    assert shown == [("Config", [100, 107], False), ("Open", [110, 120, 121], True)]
    (check,) = made_up["python_checks"]
    assert (check["function"], check["test"], check["majors"]) == ("xqa", "not in", [9, 12])


def test_functions_are_asked_about_shapes_and_dtypes(made_up: dict[str, Any]) -> None:
    assert made_up["xqa"]["page_sizes"] == [16, 32]
    assert max(made_up["xqa"]["head_dims"]) == 128
    assert 72 not in made_up["xqa"]["head_dims"]
    assert ["bfloat16", "bfloat16"] in made_up["fa3"]["dtypes"]
    assert made_up["fa3"]["custom_mask"] is False
    assert made_up["fa3"]["head_dims"] is None


def test_the_surface(made_up: dict[str, Any]) -> None:
    assert made_up["artifacts"]["paths"] == {"TRTLLM_GEN_FMHA": "abc123/fmha/"}
    assert made_up["artifacts"]["checksums"] == {"TRTLLM_GEN_FMHA": "beef"}
    assert made_up["artifacts"]["archs"] == {"DSL_FMHA_ARCHS": ["sm_100a"]}
    assert made_up["enums"]["ActivationType"]["members"] == {"Gelu": 0, "Relu2": 6}
    name = "decode.trtllm_batch_decode_with_kv_cache"
    parameters = made_up["signatures"][name]["parameters"]
    assert [each["name"] for each in parameters] == ["query", "backend", "sinks"]
    assert parameters[1] == {"name": "backend", "kind": "keyword_only", "default": "'auto'"}
    assert made_up["signatures"][name]["source"] == "flashinfer/decode.py:5"
    assert made_up["backend_choices"][name]["choices"] == ["auto", "trtllm-gen", "xqa"]


def test_the_headers(made_up: dict[str, Any]) -> None:
    assert made_up["dispatch"]["DISPATCH_GQA_GROUP_SIZE"]["values"] == [1, 8]
    assert made_up["dispatch"]["DISPATCH_MASK"]["values"] == ["kNone"]
    assert made_up["fmha_runner"]["chips"]["values"] == [100, 103]
    assert made_up["fmha_runner"]["mDtypeQ"]["values"] == ["E4M3", "BF16"]
    assert made_up["compatible_cubins"]["chips"] == {"103": ["100f", "103"]}
    assert made_up["launcher_majors"][0]["majors"] == [10, 12]
    assert made_up["activations"]["trtllm-gen"]["values"] == ["Swiglu", "Relu2"]
    assert made_up["constants"]["inf"]["infinite"] is False


def test_a_folder_without_flashinfer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeclarationsError, match="holds no package flashinfer"):
        declarations(tmp_path)


def test_a_release_that_does_not_import_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"__init__.py": "raise OSError('libcuda is gone')"})
    with pytest.raises(
        DeclarationsError, match=r"cannot be introspected: OSError: libcuda is gone"
    ):
        declarations(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_release_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
    write(tmp_path, {"__init__.py": code})
    with pytest.raises(DeclarationsError, match="did not answer within 20 s"):
        declarations(tmp_path, deadline=20.0)
    assert not alive(int(started.read_text()))


@pytest.fixture(scope="module")
def installed(installed_declarations: dict[str, Any]) -> dict[str, Any]:
    return installed_declarations


def test_the_installed_release_is_collected_whole(installed: dict[str, Any]) -> None:
    assert installed["flashinfer"] == installed_version("flashinfer-python")
    empty = {name for name, value in installed.items() if not value} - {"not_imported"}
    assert empty <= {"runners", "configs"}  # before 0.7 there were none


def test_every_item_of_the_installed_release_has_a_place(installed: dict[str, Any]) -> None:
    root = next(
        Path(path) for path in sys.path if (Path(path) / "flashinfer" / "__init__.py").is_file()
    )
    places = [
        each["source"]
        for section in ("capabilities", "jit_filters", "fixed_flags", "python_checks")
        for each in installed[section]
    ] + [each["source"] for each in installed["dispatch"].values()]
    assert places
    for place in places:
        name, _, line = place.rpartition(":")
        assert len((root / name).read_text().splitlines()) >= int(line) > 0


def test_known_facts_of_the_installed_release(installed: dict[str, Any]) -> None:
    mm_fp4 = next(
        each for each in installed["capabilities"] if each["api"] == "gemm.gemm_base.mm_fp4"
    )
    assert 103 in mm_fp4["backends"]["cutlass"]
    assert 120 not in mm_fp4["backends"]["trtllm"]
    assert {1, 2, 4, 8} <= set(installed["dispatch"]["DISPATCH_GQA_GROUP_SIZE"]["values"])
    assert {100, 103} <= set(installed["fmha_runner"]["chips"]["values"])
    assert {64, 128, 256} <= set(installed["xqa"]["head_dims"])
    assert installed["enums"]["ActivationType"]["members"]["Relu2"] == 6
    assert len(installed["artifacts"]["paths"]["TRTLLM_GEN_FMHA"].partition("/")[0]) == 40
