"""A made-up list of kernels, a host of plain functions, and the driver itself where CUDA is."""

from __future__ import annotations

import base64
import builtins
import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.ci.binaries.flashinfer import kernels as kernels_module
from kernelproof.ci.binaries.flashinfer.asking import (
    DIES,
    Answer,
    Selection,
    ask_release,
    held,
    plain_error,
)
from kernelproof.ci.binaries.flashinfer.building import DRIVER_SOURCE, Build, build_launcher
from kernelproof.ci.binaries.flashinfer.experts import ENUMS
from kernelproof.ci.binaries.flashinfer.gemms import FAMILIES, find_gemms, read_gemms
from kernelproof.ci.binaries.flashinfer.host import (
    Host,
    answers_in_forks,
    remember_failed_imports,
)
from kernelproof.ci.binaries.flashinfer.kernels import (
    KERNELS,
    VARIABLE,
    Kernel,
    KernelList,
    KernelListError,
    artifact_of,
    find_kernels,
    read_kernels,
)
from kernelproof.ci.binaries.flashinfer.listing import ABSENT, list_kernels
from kernelproof.ci.binaries.flashinfer.questions import (
    GEMM_FUNCTIONS,
    HIDDEN,
    MOE_FUNCTIONS,
    calls_of,
    can_be_asked,
    kinds,
)
from kernelproof.ci.compile.generating import release_in
from kernelproof.ci.compile.nvcc import find_nvcc
from kernelproof.ci.releases.sandboxes import SandboxError
from kernelproof.impl.gating import Feature
from kernelproof.impl.gating.selections import RAISES, RAISES_FOR_SOME, RUNS
from kernelproof.impl.targets.cache import CACHE_VARIABLE, cache_folder
from kernelproof.tests.ci.binaries.device_code import cubin_taking

ARTIFACT = "0123456789" * 4
COLUMNS = (
    "Data_type mDataTypeQ; Data_type mDataTypeKv; int mHeadDimQk; int mHeadDimV; int mSM; "
    "const char* mFuncName; int mSharedMemBytes; int mQkvLayout; int mKernelType; "
    "const char* sha256;"
)
ROW = '{{ DATA_TYPE_BF16, DATA_TYPE_{kv}, 128, 128, kSM_{sm}, "{name}", 4096, 2, 2, "{sha}"}},\n'
SHA = "ab" * 32
DECODE = Feature("paged_attention", "trtllm-gen", kv_layout="HND", group_size=8)


def header(*rows: str) -> str:
    """Return a list with a second table behind it, as some releases have one."""
    table = "sTllmGenFmhaKernelMetaInfos[] = {\n"
    return (
        f"struct TllmGenFmhaKernelMetaInfo\n{{\n{COLUMNS}\n}};\n"
        f"static const TllmGenFmhaKernelMetaInfo {table}{''.join(rows)}}};\n"
        f"static const Other sOther[] = {{\n{{ 1, 2 }},\n}};\n"
    )


ROWS = (
    ROW.format(kv="BF16", sm="100f", name="family", sha=SHA),
    ROW.format(kv="E4M3", sm="103", name="own", sha=SHA),
)


def write_list(root: Path, *rows: str) -> Path:
    folder = root / ARTIFACT / "fmha" / "trtllm-gen"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "flashInferMetaInfo.h").write_text(header(*rows), encoding="utf-8")
    (folder / "family.cubin").touch()
    return root


@pytest.fixture(autouse=True)
def _nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv(CACHE_VARIABLE, str(request.getfixturevalue("tmp_path") / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    (folder / "flashinfer").mkdir(parents=True)
    source = f'class ArtifactPath:\n    TRTLLM_GEN_FMHA: str = "{ARTIFACT}/fmha/trtllm-gen/"\n'
    (folder / "flashinfer" / "artifacts.py").write_text(source, encoding="utf-8")
    return folder


def test_a_list_is_read_by_its_own_columns_and_to_its_own_end(tmp_path: Path) -> None:
    found = read_kernels(write_list(tmp_path, *ROWS), ARTIFACT)
    assert [(each.name, each.build, each.shared_memory) for each in found.kernels] == [
        ("family", "100f", 4096),
        ("own", "103", 4096),
    ]
    assert [found.by_name["family"].runs_on(sm) for sm in (90, 100, 103, 110)] == [
        *(False, True),
        *(True, False),
    ]
    assert [found.by_name["own"].runs_on(sm) for sm in (100, 103)] == [False, True]
    assert found.shipped == {"family": ""}


def test_a_list_that_is_none_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    root = write_list(tmp_path, "{ 1, 2 },\n")
    with pytest.raises(KernelListError, match=r"flashInferMetaInfo\.h: no list of kernels can be"):
        read_kernels(root, ARTIFACT)


def test_a_list_of_gemms_is_read_and_found(release: Path, tmp_path: Path) -> None:
    folder = f"{'fedcba9876' * 4}/batched_gemm-1-2"
    place = tmp_path / "cubins" / folder / "include"
    place.mkdir(parents=True)
    rows = "".join(
        f'{{nullptr, 0, {shared}, "bmm_c1_{build}", 256, "{SHA}", "", nullptr, {{ /* mA */ 1\n'
        for shared, build in ((214144, "sm100f"), (77600, "sm103a"))
    )
    header = place / "flashinferMetaInfo.h"
    header.write_text(f"size_t tllmGenBatchedGemmListLen = 2;\n{rows}}};\n", encoding="utf-8")
    source = release / "flashinfer" / "artifacts.py"
    text = f'{source.read_text()}    TRTLLM_GEN_BMM: str = (\n        "{folder}/"\n    )\n'
    source.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path / "cubins"))
        found = find_gemms(release, "9.9.9", FAMILIES[0])
        with pytest.raises(KernelListError, match="names no TRTLLM_GEN_GEMM"):
            find_gemms(release, "9.9.9", FAMILIES[1])
    assert [(each.name, each.build, each.shared_memory) for each in found.kernels] == [
        *(("bmm_c1_sm100f", "100f", 214144), ("bmm_c1_sm103a", "103a", 77600)),
    ]
    assert [each.runs_on(103) for each in found.kernels] == [True, True]
    assert [each.runs_on(100) for each in found.kernels] == [True, False]
    assert FAMILIES[0].may_be_called([b"", b"from flashinfer import trtllm_fp4_block_scale_moe"])
    assert not FAMILIES[0].may_be_called([b"moe = trtllm_moes"])
    assert FAMILIES[0].may_be_called([])
    header.write_text(f"size_t tllmGenBatchedGemmListLen = 3;\n{rows}", encoding="utf-8")
    with pytest.raises(KernelListError, match=r"flashinferMetaInfo.h: .*2 of 3 rows"):
        read_gemms(tmp_path / "cubins", folder)
    header.write_text(f"list[] = {{\n{rows}}};\n", encoding="utf-8")
    assert len(read_gemms(tmp_path / "cubins", folder).kernels) == 2
    header.write_text("list[] = {};\n", encoding="utf-8")
    with pytest.raises(KernelListError, match="0 of 0 rows"):
        read_gemms(tmp_path / "cubins", folder)


def test_what_a_wheel_ships_is_read_from_its_record(tmp_path: Path) -> None:
    root = write_list(tmp_path / KERNELS, *ROWS)
    digest = base64.urlsafe_b64encode(bytes.fromhex(SHA)).rstrip(b"=").decode()
    place = f"{KERNELS}/{ARTIFACT}/fmha/trtllm-gen"
    record = tmp_path / "flashinfer_cubin-0.6.13.dist-info" / "RECORD"
    record.parent.mkdir()
    lines = [f"{place}/own.cubin,sha256={digest},5", f"{place}/include/a.h,sha256={digest},5"]
    record.write_text("\n".join(lines), encoding="utf-8")
    assert read_kernels(root, ARTIFACT).shipped == {"own": SHA}


def test_a_list_is_found_on_the_machine_or_in_a_wheel_of_any_release_that_has_it(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    has: dict[str, Path] = {}

    def sandbox(version: str, *_: object, **__: object) -> Path:
        asked.append(version)
        if version in has:
            return has[version]
        message = f"{version}: there is none"
        raise SandboxError(message)

    monkeypatch.setattr(kernels_module, "sandbox", sandbox)
    monkeypatch.setattr(kernels_module, "_releases_with", lambda *_: ["0.6.17", "0.6.12"])
    with pytest.raises(KernelListError, match=r"01234567.*tried 0\.6\.17, 0\.6\.12; FLASHINFER_CU"):
        find_kernels(release, "0.6.17")
    assert artifact_of(release) == ARTIFACT
    has["0.6.12"] = tmp_path / "wheel"
    write_list(has["0.6.12"] / KERNELS, *ROWS)
    assert len(find_kernels(release, "0.6.17").kernels) == 2
    write_list(release / KERNELS, ROWS[0])  # an offline folder with both packages
    asked.clear()
    assert len(find_kernels(release, "0.6.17").kernels) == 1
    monkeypatch.setenv(VARIABLE, str(write_list(tmp_path / "chosen", ROWS[1])))
    assert find_kernels(release, "0.6.17").kernels[0].name == "own"
    assert asked == []


def test_what_parameters_kernels_take_is_read_of_one_of_each_build(tmp_path: Path) -> None:
    found = read_kernels(write_list(tmp_path, *ROWS), ARTIFACT)
    assert found.parameter_bytes == {}  # a file that is cut short says nothing
    place = tmp_path / ARTIFACT / "fmha" / "trtllm-gen"
    (place / "family.cubin").write_bytes(cubin_taking(1280, "another", "family"))
    (place / "own.cubin").write_bytes(cubin_taking(1152, "own"))
    (place / "unlisted.cubin").write_bytes(cubin_taking(8, "unlisted"))
    assert replace(found).parameter_bytes == {"100f": 1280, "103": 1152}
    (place / "own.cubin").write_bytes(cubin_taking(8, "another"))
    assert replace(found).parameter_bytes == {"100f": 1280}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on the PATH")
def test_what_a_launcher_passes_is_the_size_of_a_symbol(tmp_path: Path) -> None:
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text('extern "C" { char kernelproof_parameters[1152] = {1}; }\n')
    words = ["g++", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(words, check=True)
    assert Build(library, library).passed_bytes == 1152


def test_a_release_that_names_no_kernels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelListError, match="names no TRTLLM_GEN_FMHA"):
        artifact_of(tmp_path)


def test_kinds_are_distinct_and_each_is_asked_by_several_calls() -> None:
    every = list(kinds())
    assert len(every) == len(set(every)) > 12_000
    assert all(map(can_be_asked, every))
    assert {len(calls_of(feature)) for feature in every} == {2, 3, 5, 12}
    assert {str(each).split(",")[0] for each in calls_of(DECODE)} == {
        f"batch {batch}" for batch in (1, 8, 64, 256)
    }
    assert not can_be_asked(Feature("paged_attention", "fa2"))
    assert not can_be_asked(Feature("paged_attention", "trtllm-gen", soft_cap=True))


class Recorder:
    """Stands for the driver: what the functions of the test say is recorded."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def clear(self) -> None:
        self.entries.clear()

    def log(self) -> list[dict[str, Any]]:
        return list(self.entries)


LAUNCH = {"launch": "k", "grid": [1, 2, 3], "block": 384, "cluster": 2, "shared": 4096}


def host_of(function: Callable[..., None], recorder: Recorder) -> Host:
    return Host(dict.fromkeys(("decode", "context", "ragged", "latent"), function), recorder)


def call(**changes: int) -> dict[str, int]:
    return {"batch": 2, "query_len": 1, "kv_len": 48, "kv_heads": 2, **changes}


def test_a_call_is_answered_by_what_it_launches_or_by_its_error() -> None:
    recorder = Recorder()
    given: dict[str, Any] = {}
    recorded_by_batch: dict[int, list[dict[str, Any]]] = {
        2: [LAUNCH, {"reduction": "r"}],
        3: [{"refused": "a cluster of 32 blocks"}],
        4: [],
    }

    def decode(kv_cache_sf: object = None, **arguments: Any) -> None:  # noqa: ANN401  of the API
        given.update(arguments, kv_cache_sf=kv_cache_sf)
        if arguments["max_seq_len"] > 48:
            message = "Missing kernel"
            raise RuntimeError(message)
        batch = arguments["query"].shape[0]
        recorder.entries += recorded_by_batch[batch]

    host = host_of(decode, recorder)
    fields = Feature(**{**DECODE.to_json(), "kv_dtype": "nvfp4", "window": True}).to_json()
    assert host.ask(fields, call()) == {
        **{name: value for name, value in LAUNCH.items() if name != "launch"},
        "kernel": "k",
        "reduces": True,
    }
    assert given["query"].shape == (2, 16, 128)
    assert [part.shape for part in given["kv_cache"]] == [(8, 2, 16, 64)] * 2
    assert [part.shape for part in given["kv_cache_sf"]] == [(8, 2, 16, 8)] * 2
    assert (given["block_tables"].shape, given["window_left"]) == ((2, 3), 127)
    assert host.ask(fields, call(batch=3)) == {"error": "the driver refuses a cluster of 32 blocks"}
    assert host.ask(fields, call(batch=4)) == {"error": "nothing was launched"}
    assert host.ask(fields, call(kv_len=49)) == {"error": "RuntimeError: Missing kernel"}


def test_a_kernel_that_is_not_shipped_is_an_error() -> None:
    recorder = Recorder()

    def latent(**_: object) -> None:
        host.missing.append("k")
        recorder.entries.append(LAUNCH)

    host = host_of(latent, recorder)
    mla = Feature("mla", "trtllm-gen", head_dim_qk=576, head_dim_vo=512, page_size=32)
    assert host.ask(mla.to_json(), call()) == {"error": "the kernel k is not shipped"}


def test_a_host_that_dies_costs_the_kind_that_it_dies_of() -> None:
    recorder = Recorder()

    def ragged(**arguments: Any) -> None:  # noqa: ANN401  of the API
        if arguments["max_kv_len"] == 7:
            os.kill(os.getpid(), signal.SIGFPE)
        recorder.entries.append(LAUNCH)

    host = host_of(ragged, recorder)
    feature = Feature(
        "ragged_attention", "trtllm-gen", phase="prefill", head_dim_qk=192, head_dim_vo=128
    ).to_json()
    cells = [json.dumps((feature, [call(kv_len=length)])) for length in (5, 7, 9)]
    found = list(answers_in_forks(host, cells))
    assert [each[0].get("kernel", each[0]) for each in found] == [
        *("k", {"died": signal.SIGFPE}),
        "k",
    ]


def test_an_import_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "tries_in_vain.py"
    lines = "import builtins\nbuiltins.tries += 1\nimport there_is_no_such_module\n"
    module.write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builtins, "tries", 0, raising=False)
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    remember_failed_imports()
    for _ in range(3):
        with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
            import tries_in_vain  # type: ignore[import-not-found]  # noqa: F401
    assert vars(builtins)["tries"] == 1


def test_what_our_own_host_cannot_ask_is_no_death_of_a_release() -> None:
    def never(**_: object) -> None:
        message = "it was called"
        raise AssertionError(message)

    host = host_of(never, Recorder())
    cells = [json.dumps(({"operation": "ragged_attention"}, [call()]))]  # fields are missing
    with pytest.raises(RuntimeError, match=r"asking about .* failed"):
        list(answers_in_forks(host, cells))
    late = Selection(DECODE, 100, (), signal.SIGALRM)
    assert (late.outcome, replace(late, signal=signal.SIGFPE).outcome) == ("not asked", "host dies")


def test_an_error_is_told_without_places() -> None:
    raised = "RuntimeError: Error in function 'loadKernel' at /a/b.cu:12: not found:\n x=1"
    assert plain_error(raised) == "RuntimeError: loadKernel: not found: x=1"


def test_a_list_alone_says_whether_there_is_a_kernel_of_the_types(tmp_path: Path) -> None:
    found = read_kernels(write_list(tmp_path, *ROWS), ARTIFACT)
    mixed = Feature(**{**DECODE.to_json(), "kv_dtype": "float8_e4m3fn"})
    listed = list(list_kernels(found, [DECODE, mixed], [100, 103]))
    assert [(each.sm, each.outcome, each.kernels) for each in listed] == [
        (100, RUNS, ("family",)),
        (100, RAISES, ()),
        (103, RUNS, ("family",)),
        (103, RUNS, ("own",)),
    ]
    assert listed[1].error == ABSENT


MOE = Feature("moe", "trtllm-gen", quantisation="nvfp4")


def test_kinds_of_moe_are_distinct_and_state_no_sizes() -> None:
    every = list(kinds("moe"))
    assert len(every) == len(set(every)) == 720
    assert all(map(can_be_asked, every))
    assert {each.operation for each in every} == {"moe"}
    assert len(calls_of(MOE)) == 9
    stated = replace(MOE, num_experts=160, top_k=6, hidden_size=5120, intermediate_size=1536)
    assert [str(each) for each in calls_of(stated)] == [
        f"{tokens} tokens, 160 experts, 32 of them here, top 6, 5120 x 1536 channels"
        for tokens in (1, 64, 4096)
    ]
    assert all("top 1," in str(each) for each in calls_of(replace(MOE, routing="llama4")))
    for other in (
        replace(MOE, backend="cutlass"),
        replace(MOE, quantisation="fp8_per_channel"),
        replace(MOE, activation="gelu_tanh"),
        replace(MOE, q_dtype="float16"),
    ):
        assert not can_be_asked(other)


class Enums:
    """Stands for the enums of a release: each member is there, except what is named."""

    def __init__(self, lacking: str = "") -> None:
        self.lacking = lacking

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  a member of an enum
        if name == self.lacking:
            raise AttributeError(name)
        return SimpleNamespace(name=name, value=name)


SIZES = {"tokens": 4, "num_experts": 64, "local_experts": 32, "top_k": 8}
SIZES |= {"hidden_size": 512, "intermediate_size": 256}
EXPERTS = {  # first weight, its scales, hidden states, their scales
    "none": ((32, 8, 512, 64), None, (4, 512), None),
    "fp8_per_tensor": ((32, 512, 512), None, (4, 512), None),
    "fp8_block": ((32, 512, 512), (32, 4, 4), (4, 512), (4, 4)),
    "mxfp8": ((32, 512, 512), (32, 512, 16), (4, 512), (4, 16)),
    "nvfp4": ((32, 512, 256), (32, 512, 32), (4, 256), (4, 32)),
    "mxfp4": ((32, 512, 256), (32, 512, 16), (4, 512), None),
    "mxfp8_mxfp4": ((32, 512, 256), (32, 512, 16), (4, 512), (4, 16)),
    "w4a16": ((32, 512, 256), (32, 512, 16), (4, 512), None),
    "w4a8": ((32, 512, 256), (32, 512, 16), (4, 512), None),
}


@pytest.mark.parametrize("quantisation", HIDDEN)
def test_a_moe_is_called_with_the_tensors_of_its_quantisation(quantisation: str) -> None:
    recorder, given = Recorder(), dict[str, Any]()

    def moe(**arguments: Any) -> None:  # noqa: ANN401  of the API
        given.update(arguments)
        recorder.entries += [{**LAUNCH, "launch": "first"}, {"reduction": "r"}, LAUNCH]

    host = Host({MOE_FUNCTIONS[quantisation]: moe}, recorder, dict.fromkeys(ENUMS, Enums()))
    feature = replace(MOE, quantisation=quantisation, activation="geglu", routing="deepseek_v3")
    (first,) = (answer := host.ask(feature.to_json(), SIZES)).pop("before")
    assert (first["kernel"], answer["kernel"], answer["reduces"]) == ("first", "k", False)
    names = ("gemm1_weights", "gemm1_weights_scale", "hidden_states", "hidden_states_scale")
    tensors = [given.get(name) for name in names]
    shapes = tuple(None if each is None else tuple(each.shape) for each in tensors)
    assert shapes == EXPERTS[quantisation]
    assert (given["activation_type"], given["routing_method_type"]) == ("Geglu", "DeepSeekV3")
    assert (given["n_group"], given["topk_group"], given["local_num_experts"]) == (8, 4, 32)
    host.ask({**feature.to_json(), "activation": "swiglu_oai", "routing": "default"}, SIZES)
    assert (given["gemm1_alpha"].shape, given["n_group"]) == ((32,), None)


GEMM_TENSORS = {  # the input, the weight
    "nvfp4": ((4, 256), (256, 384)),
    "mxfp8": ((4, 512), (512, 384)),
    "fp8_block": ((4, 512), (384, 512)),
    "fp8_per_tensor": ((4, 512), (4, 384, 128)),
}


@pytest.mark.parametrize("quantisation", GEMM_FUNCTIONS)
def test_a_gemm_is_called_with_the_tensors_of_its_quantisation(quantisation: str) -> None:
    recorder, given = Recorder(), dict[str, Any]()

    def multiply(**arguments: Any) -> None:  # noqa: ANN401  of the API
        given.update(arguments)
        recorder.entries.append(LAUNCH)

    host = Host({GEMM_FUNCTIONS[quantisation]: multiply}, recorder)
    feature = Feature("gemm", "trtllm-gen", quantisation=quantisation)
    sizes = {"tokens": 4, "hidden_size": 512, "intermediate_size": 384}
    assert host.ask(feature.to_json(), sizes)["kernel"] == "k"
    assert (given["a"].shape, given["b"].shape) == GEMM_TENSORS[quantisation]
    assert given["backend"].startswith("trtllm")
    assert given["out_dtype"] == torch.bfloat16


def test_kinds_of_gemm_are_asked_by_the_sizes_that_they_state() -> None:
    every = list(kinds("gemm"))
    assert len(every) == len(set(every)) == 8
    assert all(map(can_be_asked, every))
    assert not can_be_asked(replace(every[0], quantisation="none"))
    assert len(calls_of(every[0])) == 16
    assert [str(each) for each in calls_of(replace(every[0], hidden_size=2880))][:2] == [
        "1 tokens, 2880 to 6144 channels",
        "1 tokens, 2880 to 2048 channels",
    ]


def test_a_launcher_may_be_given_tensors_as_a_gpus() -> None:
    pytest.importorskip("tvm_ffi")
    from kernelproof.ci.binaries.flashinfer.on_gpu import Calls

    def devices(*given: Any) -> list[Any]:  # noqa: ANN401  what a launcher is given
        return [str(each.device) if hasattr(each, "device") else each for each in given]

    here, there = torch.empty(3, 4), torch.empty(2, dtype=torch.float8_e4m3fn)
    calls = Calls(SimpleNamespace(devices=devices), lambda tensor: tensor is there)
    assert calls.devices(here, 7, there, None) == ["cpu", 7, "cuda:0", None]
    assert str(there.device) == "cpu"


def test_what_a_release_lacks_is_its_answer() -> None:
    host = Host({}, Recorder(), dict.fromkeys(ENUMS, Enums("MiniMax2")))
    found = host.ask(replace(MOE, routing="minimax2").to_json(), SIZES)
    assert found == {"error": "RoutingMethodType has no MiniMax2"}
    found = host.ask(replace(MOE, quantisation="w4a16").to_json(), SIZES)
    assert found == {"error": "the release has no trtllm_mxint4_block_scale_moe"}


def test_a_kernel_of_another_chip_is_no_launch() -> None:
    call = calls_of(MOE)[0]
    own, other = (Kernel(f"k{build}", build, 0, SHA, {}) for build in ("100f", "103a"))
    kernels = KernelList(ARTIFACT, Path("include"), Path("cubins"), (own, other))
    launched = Answer(call, "k100f", before=(Answer(call, "k103a"),))
    assert held(launched, 103, kernels) == launched
    refused = held(launched, 100, kernels)
    assert (refused.kernel, refused.error) == (
        *("", "the launcher takes k103a, which is built for sm_103a"),
    )


def test_a_list_of_gemms_alone_says_whether_there_is_one_of_types_and_activation() -> None:
    names = (
        "bmm_E2m1_E2m1E2m1_Fp32_Ab16_swiGlu_dynB_sm100f",
        "bmm_E4m3_E4m3E4m3_Fp32_t128_noShfl_dsFp8_sm100f",
        "bmm_E4m3_E4m3E4m3_Fp32_t128_relu2_sm103a",
        "bmm_Bfloat16_MxE2m1Bfloat16_castBfloat16_patch_Fp32_Ab32_swiGlu_sm100f",
    )
    gemms = tuple(Kernel(name, name[name.rindex("_sm") + 3 :], 0, SHA, {}) for name in names)
    kernels = KernelList(ARTIFACT, Path("include"), Path("cubins"), gemms)
    asked = {
        MOE: (True, True),
        replace(MOE, activation="geglu"): (False, False),
        replace(MOE, quantisation="fp8_block"): (True, True),
        replace(MOE, quantisation="mxfp4"): (True, True),
        replace(MOE, quantisation="fp8_per_tensor"): (False, False),
        replace(MOE, quantisation="fp8_per_tensor", activation="relu2"): (False, True),
        replace(MOE, quantisation="fp8_per_tensor", activation="relu"): (False, False),
    }
    found = list(list_kernels(kernels, list(asked), [100, 103]))
    outcomes = {(each.feature, each.sm): each.outcome == RUNS for each in found}
    for feature, expected in asked.items():
        assert (outcomes[feature, 100], outcomes[feature, 103]) == expected
    plain = Kernel("gemm_Bfloat16_E4m3E4m3_Fp32_t128_dsFp8_sm100f", "100f", 0, SHA, {})
    blocks = Feature("gemm", "trtllm-gen", quantisation="fp8_block")
    forms = [blocks, replace(blocks, q_dtype="float16"), replace(blocks, quantisation="nvfp4")]
    only = KernelList(ARTIFACT, Path("include"), Path("cubins"), (plain,))
    assert [each.outcome for each in list_kernels(only, forms, [100])] == [RUNS, RAISES, RAISES]


needs_cuda = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("driver") / "librecording.so"
    words = ["g++", "-std=c++17", "-Wall", "-Werror", "-fPIC", "-shared", str(DRIVER_SOURCE)]
    include = find_nvcc().home / "include"
    subprocess.run([*words, f"-I{include}", "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.recording_log.restype = ctypes.c_char_p
    return found


def recorded(driver: ctypes.CDLL) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = json.loads(f"[{driver.recording_log().decode()}]")
    driver.recording_clear()
    return found


@needs_cuda
def test_the_driver_holds_a_kernel_to_the_chips_shared_memory(driver: ctypes.CDLL) -> None:
    driver.recording_chip(103, 148, 232448)
    function, dynamic_shared_memory = ctypes.c_void_p(), 8
    assert driver.cuModuleGetFunction(ctypes.byref(function), None, b"a_kernel") == 0
    assert driver.cuFuncSetAttribute(function, dynamic_shared_memory, 232448) == 0
    assert recorded(driver) == []
    assert driver.cuFuncSetAttribute(function, dynamic_shared_memory, 232449) != 0
    assert recorded(driver) == [{"refused": "shared memory of 232449 bytes, of 232448"}]


@needs_cuda
def test_the_driver_says_which_chip_it_is(driver: ctypes.CDLL) -> None:
    driver.recording_chip(103, 148, 232448)
    value, asked = ctypes.c_int(), {"major": 75, "minor": 76, "multiprocessors": 16, "shared": 97}
    told = {}
    for name, attribute in asked.items():
        assert driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
        assert driver.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
        told[name] = value.value
    assert told == {"major": 10, "minor": 3, "multiprocessors": 148, "shared": 232448}


@pytest.mark.slow
@needs_cuda
def test_a_release_that_is_kept_answers_itself() -> None:
    folder = cache_folder() / "flashinfer" / "0.6.13"
    if not folder.is_dir():
        pytest.skip("`kernelproof support --binaries 0.6.13` has not fetched the release")
    kept = release_in(folder)
    found = find_kernels(folder, kept.version)
    assert {kernel.name: kernel.sha256 for kernel in found.kernels} == found.shipped
    build: Build = build_launcher(kept, found, find_nvcc())
    wide = Feature(**{**DECODE.to_json(), "head_dim_qk": 512, "head_dim_vo": 512, "page_size": 128})
    few = Feature(
        "mla", "trtllm-gen", head_dim_qk=576, head_dim_vo=512, page_size=64, group_size=96
    )
    asked = ask_release(kept, build, found, [DECODE, wide, few], [100, 103])
    outcomes = {(each.sm, each.feature): each.outcome for each in asked}
    for sm in (100, 103):
        assert [outcomes[sm, each] for each in (DECODE, wide, few)] == [
            *(RUNS, RAISES),
            RAISES_FOR_SOME,
        ]
    assert found.by_name[asked[0].kernels[0]].build in {"100", "100f"}
    assert Selection(DECODE, 100, ()).outcome == DIES
