"""Two made-up releases of precompiled kernels, and what their made-up hosts launch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.binaries.flashinfer.asking import SHARED_MEMORY, Answer, Selection
from kernelproof.ci.binaries.flashinfer.changes import call_changes, list_changes
from kernelproof.ci.binaries.flashinfer.gemms import Gemms
from kernelproof.ci.binaries.flashinfer.kernels import Kernel, KernelList, KernelListError
from kernelproof.ci.binaries.flashinfer.listing import LISTED
from kernelproof.ci.binaries.flashinfer.questions import calls_of
from kernelproof.ci.bump.behaviour import precompiled
from kernelproof.ci.bump.behaviour.precompiled import function_of
from kernelproof.ci.bump.report.merging import merge
from kernelproof.ci.bump.report.page import to_page
from kernelproof.ci.bump.surface.engine_files import EngineFile
from kernelproof.ci.bump.surface.launching import CONTEXT, DECODE, LATENT, functions_named
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import MachineError
from kernelproof.ci.support.selected import Selected
from kernelproof.impl.gating import Feature
from kernelproof.impl.gating.rules import SELECTED

OLD, NEW = "9.9.1", "9.9.2"
FOLDERS = {"old": OLD, "new": NEW}
KINDS = tuple(
    Feature("paged_attention", "trtllm-gen", kv_layout="HND", group_size=group)
    for group in (1, 2, 4, 8, 16)
)
GEMM_KINDS = tuple(
    Feature("moe", "trtllm-gen", quantisation="nvfp4", activation=activation)
    for activation in ("swiglu", "relu2")
)
LAUNCHES = {
    OLD: ("kept", "rebuilt", "gone", "kept", ""),
    NEW: ("kept", "rebuilt", "new", "", "kept"),
}
"""What each kind launches with each release; an empty name is an error."""
GEMMS = {"swiglu": ("bmm_sm103a", "bmm_sm100f"), "relu2": ("bmm_sm100f", "bmm_sm100f")}
"""The two GEMMs that a kind of MoE launches with both releases."""
ERROR = "RuntimeError: Missing kernel"
PASSED = 1152
"""Bytes of parameters that both hosts pass."""


def kernel(name: str, build: str = "103", digest: str = "ab", shared: int = 4096) -> Kernel:
    return Kernel(name, build, shared, digest * 32, {})


def listed(*kernels: Kernel) -> KernelList:
    return KernelList("0123abcd" * 5, Path("include"), Path("cubins"), kernels)


LISTS = {
    OLD: listed(
        kernel("kept"),
        kernel("rebuilt"),
        kernel("gone"),
        kernel("family", "100f", shared=SHARED_MEMORY + 1),
        kernel("other chip", "100"),
    ),
    NEW: listed(
        kernel("kept"),
        kernel("rebuilt", digest="cd", shared=2048),
        kernel("new"),
        kernel("family", "100f", shared=SHARED_MEMORY),
        kernel("other chip", "100", digest="cd"),
    ),
}


def selection(feature: Feature, sm: int, name: str, signal: int = 0) -> Selection:
    if signal:
        return Selection(feature, sm, (), signal)
    answers = [
        Answer(call, name, (1, 1, 1)) if name else Answer(call, error=ERROR)
        for call in calls_of(feature)
    ]
    return Selection(feature, sm, tuple(answers))


def multiplied(feature: Feature, sm: int) -> Selection:
    first, second = GEMMS[feature.activation]
    answers = [
        Answer(call, second, (1, 1, 1), before=(Answer(call, first, (1, 1, 1)),))
        for call in calls_of(feature)
    ]
    return Selection(feature, sm, tuple(answers))


def test_lists_are_compared_by_build_for_those_that_a_chip_may_take() -> None:
    own, family = list_changes(LISTS[OLD], LISTS[NEW], 103)
    assert own.to_json() == {
        "build": "103",
        "kept": 1,
        "rebuilt": 1,
        "gone": 1,
        "new": 1,
        "resized": 1,
        "too_large": [0, 0],
    }
    assert family.to_json() == {
        "build": "100f",
        "kept": 1,
        "rebuilt": 0,
        "gone": 0,
        "new": 0,
        "resized": 1,
        "too_large": [1, 0],
    }
    assert [each.build for each in list_changes(LISTS[OLD], LISTS[NEW], 100)] == ["100", "100f"]


def states(before: Sequence[Selection], after: Sequence[Selection]) -> list[str]:
    return [each.state for each in call_changes(before, after, LISTS[OLD], LISTS[NEW])]


def test_a_kind_of_call_is_the_worst_of_its_calls() -> None:
    before, after = (
        [selection(each, 103, name) for each, name in zip(KINDS, LAUNCHES[of], strict=True)]
        for of in (OLD, NEW)
    )
    assert states(before, after) == [
        *("same kernel", "rebuilt", "other kernel", "raises now", "launches now"),
    ]
    first = before[0].answers
    some = replace(before[0], answers=(Answer(first[0].call, error=ERROR), *first[1:]))
    other = replace(before[0], answers=(*first[:-1], Answer(first[-1].call, "new", (1, 1, 1))))
    assert states(before[:1], [some]) == ["raises now"]
    assert states([some], before[:1]) == ["launches now"]
    assert states(before[:1], [other]) == ["other kernel"]
    nothing = before[4]
    assert states([nothing], [nothing]) == []


def test_a_death_of_the_host_is_a_change_only_where_calls_ran() -> None:
    (kind, *_) = KINDS
    runs, raises, dies = (
        selection(kind, 103, "kept"),
        selection(kind, 103, ""),
        selection(kind, 103, "", signal=8),
    )
    late = replace(dies, signal=14)  # its time was over, which says nothing of the release
    assert states([runs, raises, dies, dies], [dies, dies, runs, raises]) == [
        *("host dies now", "launches now"),
    ]
    assert states([runs, late], [late, runs]) == []


def gemms(_: Path, version: str, family: Gemms, **__: object) -> KernelList:
    """The lists of MoE's GEMMs, which the candidate has built anew; there is no other."""
    if family.artifact != "TRTLLM_GEN_BMM":
        message = "no wheel has them"
        raise KernelListError(message)
    return moe_gemms(version)


def moe_gemms(version: str) -> KernelList:
    digest = {OLD: "ab", NEW: "cd"}[version]
    return listed(kernel("bmm_sm103a", "103a", digest), kernel("bmm_sm100f", "100f"))


@pytest.fixture
def here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made_up_release: Callable[[Path, str, str], None],
) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, version in FOLDERS.items():
        made_up_release(tmp_path / name, version, f"__version__ = {version!r}\n")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the made-up hosts answer, and return what they are asked."""
    found: list[Any] = []

    def select(
        given: str, features: Sequence[Feature], chips: Sequence[int], **_: object
    ) -> Selected:
        version = FOLDERS[Path(given).name]
        found.append((version, list(features), list(chips)))
        if features[0].operation == "moe":
            answers = [multiplied(feature, sm) for sm in chips for feature in features]
            return Selected(version, SELECTED, moe_gemms(version), tuple(answers))
        answers = [
            selection(feature, sm, name)
            for sm in chips
            for feature, name in zip(KINDS, LAUNCHES[version], strict=True)
        ]
        return Selected(version, SELECTED, LISTS[version], tuple(answers), PASSED)

    kinds = {"": KINDS, "moe": GEMM_KINDS}
    monkeypatch.setattr(precompiled, "kinds", lambda operation: kinds.get(operation, ()))
    monkeypatch.setattr(precompiled, "find_kernels", lambda _, version, **__: LISTS[version])
    monkeypatch.setattr(precompiled, "select", select)
    monkeypatch.setattr(precompiled, "find_gemms", gemms)
    return found


WORDS = ("--part", "binaries", "--sm", "90,103", "--json", "report.json")


def bump(*words: str) -> tuple[int, dict[str, Any]]:
    code = main(["bump", "old", "new", *WORDS, *words])
    report: dict[str, Any] = json.loads(Path("report.json").read_text())
    return code, report


@pytest.mark.usefixtures("here", "asked")
@pytest.mark.parametrize(
    ("build", "taken", "found"),
    [
        ("103", PASSED, False),
        ("103", PASSED + 128, True),
        ("100f", PASSED + 128, True),
        ("100", PASSED + 128, False),  # which SM103 does not run
    ],
)
def test_a_host_that_passes_another_struct_blocks(
    build: str, taken: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {OLD: {}, NEW: {"100f": PASSED, build: taken}}
    monkeypatch.setattr(
        KernelList,
        "parameter_bytes",
        property(lambda self: next((sizes[of] for of in LISTS if LISTS[of] is self), {})),
    )
    _, report = bump()
    misfits = [each for each in report["findings"] if each["change"] == "parameters-misfit"]
    assert bool(misfits) == found
    if found:
        assert misfits[0]["action"] == "block"
        assert misfits[0]["message"] == (
            "SM103: the launcher passes 1,152 bytes of parameters to kernels, and those built for "
            f"{build} take 1,280"
        )
    (chip,) = report["kernels"]
    assert chip["parameter_bytes"]["candidate"] == {**sizes[NEW], "passed": PASSED}


@pytest.mark.usefixtures("here")
def test_a_comparison_says_of_each_chip_what_became_of_kernels_and_calls(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = bump("--html", "page.html")
    assert (code, report["verdict"]) == (1, "bump with conditions")
    assert {each["name"]: each["verdict"] for each in report["chips"]} == {
        "SM90": "bump",
        "SM103": "do not bump",
    }
    found = {each["change"]: each for each in report["findings"] if "fused_moe" not in each["id"]}
    assert {change: (each["action"], each["count"]) for change, each in found.items()} == {
        "calls-raise": ("block", 1),
        "calls-rebuilt": ("condition", 1),
        "calls-rerouted": ("condition", 1),
        **dict.fromkeys(("listed-rebuilt", "listed-gone", "listed-new"), ("report", 1)),
        "listed-resized": ("report", 2),
        "listed-too-large": ("report", 1),
        "calls-gained": ("report", 1),
        "calls-unasked": ("condition", 1),
    }
    assert found["calls-unasked"]["message"] == (
        "of the 2 kernels of trtllm-gen GEMMs of MoE for SM103, 1 built for 103a are rebuilt"
    )
    assert f"1 times {ERROR}" in found["calls-raise"]["message"]
    assert "gone, now new" in found["calls-rerouted"]["message"]
    assert found["calls-rebuilt"]["rule"] == (
        "what ran on SM103 with old is no evidence there: run it again"
    )
    assert [(version, each[0].operation) for version, each, _ in asked] == [
        *((OLD, "paged_attention"), (NEW, "paged_attention"), (OLD, "moe"), (NEW, "moe")),
    ]
    assert asked[0][2] == [103]
    (chip,) = report["kernels"]
    assert chip["calls"][0] == {
        "function": DECODE,
        "host dies now": 0,
        "raises now": 1,
        "rebuilt": 1,
        "other kernel": 1,
        "launches now": 1,
        "same kernel": 1,
    }
    (moe,) = chip["gemms"]
    assert moe["title"] == "trtllm-gen GEMMs of MoE"
    assert [(each["build"], each["kept"], each["rebuilt"]) for each in moe["builds"]] == [
        *(("100f", 1, 0), ("103a", 0, 1)),
    ]
    # One of its two GEMMs was rebuilt, the first.
    (four,) = moe["calls"]
    assert (four["function"], four["rebuilt"], four["same kernel"]) == (
        *("fused_moe.trtllm_fp4_block_scale_moe", 1),
        1,
    )
    assert any("nvfp4" in each["message"] and "bmm_sm103a" in each["message"]
               for each in report["findings"] if each["change"] == "calls-rebuilt")  # fmt: skip
    left_out = {each["what"]: each["why"] for each in report["machines"][0]["not_tested"]}
    assert left_out["trtllm-gen GEMMs"] == "no wheel has them"
    told = (
        "Of 4 kernels for SM103, 2 are the same bits; 1 of 4 kinds of call still launch the same "
        "ones, and 1 fail now."
    )
    assert told in " ".join(capsys.readouterr().out.split())
    page = Path("page.html").read_text()
    assert told in page
    assert "<title>Precompiled kernels for SM103</title>" in page
    assert page.count('<rect class="gone"') == page.count('<rect class="new"') == 1
    # A run that goes on asks no release again, and says the same.
    asked.clear()
    again = bump("--resume")[1]
    assert (asked, again["kernels"], again["findings"]) == (
        [],
        report["kernels"],
        report["findings"],
    )
    merged = merge([Path("report.json"), Path("report.json")], None, "merge")
    assert (merged["kernels"], merged["verdict"]) == (report["kernels"], report["verdict"])


@pytest.mark.usefixtures("here", "asked")
def test_a_call_that_launches_fewer_kernels_is_told_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    select: Callable[..., Selected] = vars(precompiled)["select"]

    def select_fewer(
        given: str, features: Sequence[Feature], chips: Sequence[int], **_: object
    ) -> Selected:
        found = select(given, features, chips)
        if FOLDERS[Path(given).name] == OLD or found.selections[0].feature.operation != "moe":
            return found
        fewer = (
            replace(each, answers=tuple(first for one in each.answers for first in one.before))
            for each in found.selections
        )
        return replace(found, selections=tuple(fewer))

    monkeypatch.setattr(precompiled, "select", select_fewer)
    code, report = bump()
    assert (code, report["failures"]) == (1, [])
    (moe,) = (
        each
        for each in report["findings"]
        if each["change"] == "calls-rerouted" and "fused_moe" in each["id"]
    )
    assert moe["count"] == len(GEMM_KINDS)
    assert moe["message"].endswith("bmm_sm103a and bmm_sm100f, now bmm_sm103a")


@pytest.mark.usefixtures("here")
def test_what_the_engine_does_not_call_is_not_asked(asked: list[Any]) -> None:
    engine = (
        "from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla as decode\ndecode()\n"
    )
    Path("engine").mkdir()
    Path("engine/mla.py").write_text(engine)
    code, report = bump("--uses", "engine")
    assert (code, asked) == (0, [])
    assert "calls" not in {each["change"].partition("-")[0] for each in report["findings"]}
    (rebuilt,) = (each for each in report["findings"] if "of MoE" in each["message"])
    assert (rebuilt["change"], rebuilt["action"]) == ("listed-rebuilt", "report")
    Path("engine/decode.py").write_text("import flashinfer\nflashinfer.decode.trtllm_batch_decode"
                                        "_with_kv_cache(q, cache)\n")  # fmt: skip
    code, report = bump("--uses", "engine")
    assert code == 1
    (raised,) = (each for each in report["findings"] if each["change"] == "calls-raise")
    assert (raised["uses"]["status"], raised["action"]) == ("used", "block")


def source(text: str) -> EngineFile:
    return EngineFile("engine.py", "engine", is_package=False, data=text.encode())


def test_a_class_may_lead_to_the_kernels_whatever_its_backend_is() -> None:
    wrapper = source("from flashinfer import BatchPrefillWithPagedKVCacheWrapper")
    assert functions_named([wrapper]) == (CONTEXT,)
    latent = source("flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(q)")
    assert functions_named([latent, wrapper]) == (CONTEXT, LATENT)
    routed = source("fused_moe.trtllm_fp4_block_scale_routed_moe(ids, x)")
    assert functions_named([routed]) == ("fused_moe.trtllm_fp4_block_scale_moe",)
    assert len(functions_named([])) == 4 + 5 + 4


@pytest.mark.usefixtures("here")
def test_an_engine_that_may_lead_to_the_kernels_may_use_them(asked: list[Any]) -> None:
    Path("engine").mkdir()
    Path("engine/decode.py").write_text(
        "from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper\n"
        "wrapper = Wrapper(buffer, backend=chosen)\n"
    )
    _, report = bump("--uses", "engine")
    (raised,) = (each for each in report["findings"] if each["change"] == "calls-raise")
    assert raised["uses"]["status"] == "may be used"
    assert "perhaps of trtllm-gen" in raised["uses"]["places"][0]["how"]
    assert asked


@pytest.mark.usefixtures("here", "asked")
@pytest.mark.parametrize("listed_only", [True, False])
def test_without_answers_what_was_rebuilt_sets_the_condition(
    monkeypatch: pytest.MonkeyPatch, *, listed_only: bool
) -> None:
    def select(given: str, *_: object, **__: object) -> Selected:
        if not listed_only:
            message = "no TVM-FFI here"
            raise MachineError(message)
        return Selected(FOLDERS[Path(given).name], LISTED, LISTS[OLD], ())

    monkeypatch.setattr(precompiled, "select", select)
    code, report = bump()
    assert (code, report["verdict"]) == (1, "bump with conditions")
    one, gemm = (each for each in report["findings"] if each["action"] == "condition")
    assert (one["change"], one["chips"]) == ("calls-unasked", [103])
    assert "trtllm-gen GEMMs of MoE" in gemm["message"]
    assert report["kernels"][0]["calls"] == []
    why = "there is no nvcc" if listed_only else "no TVM-FFI here"
    left_out = {each["what"]: each["why"] for each in report["machines"][0]["not_tested"]}
    assert why in left_out["kernels of calls"]
    assert "these only" in to_page(report)


@pytest.mark.usefixtures("here", "asked")
def test_a_list_that_cannot_be_had_leaves_it_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_kernels(*_: object, **__: object) -> KernelList:
        message = "no release of flashinfer-cubin can be had"
        raise KernelListError(message)

    monkeypatch.setattr(precompiled, "find_kernels", find_kernels)
    code, report = bump()
    assert (code, report["verdict"]) == (3, "undecided")
    assert report["failures"] == [
        "--part binaries: no release of flashinfer-cubin can be had",
    ]


@pytest.mark.usefixtures("here")
def test_other_chips_and_usual_comparisons_ask_nothing(asked: list[Any]) -> None:
    report = bump("--sm", "90")[1]
    assert {each["what"]: each["why"] for each in report["machines"][0]["not_tested"]}[
        "binaries"
    ] == "of SM100, SM103 none is asked about"
    main(["bump", "old", "new", "--part", "surface", "--sm", "103", "--json", "report.json"])
    usual = json.loads(Path("report.json").read_text())
    told = {each["what"]: each["why"] for each in usual["machines"][0]["not_tested"]}
    assert told["binaries"] == "not asked for (--part binaries)"
    assert (usual["kernels"], asked) == ([], [])


def test_each_function_takes_the_kinds_of_one_operation_and_phase() -> None:
    assert function_of(KINDS[0]) == DECODE
    mla = Feature("mla", "trtllm-gen", head_dim_qk=576, head_dim_vo=512)
    assert function_of(mla) == LATENT
