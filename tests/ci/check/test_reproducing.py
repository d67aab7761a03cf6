"""Keeping the wrong call of a law, saving its tensors, and a script that makes it again."""

from __future__ import annotations

import functools
import json
import runpy
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernelproof.ci.check import reproducing
from kernelproof.ci.check.reproducing import Kernel, no_script, write_script
from kernelproof.ci.check.saving import save_tensors
from kernelproof.impl import Target, UnsupportedError, implementation
from kernelproof.properties.findings.files import OutputError
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.asked import CALLS, with_calls
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.operations import OPERATIONS
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.keeping import Keeper, Kept, read_kept
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    MoEProblem,
    Problem,
    QuantizeProblem,
    materialise,
)
from kernelproof.reference.formats.quantizers import code_bounds, codes_of
from kernelproof.reference.operations import OPERATIONS as ORACLES

FEATURES = ("e2m1_codes", "e4m3_scales", "e8m0_scales", "swizzled_scales", "power_rules")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelproof.impl import Implementation

MINE = Kernel("my_kernel:kernel", "cpu")


class Stages:
    def stage(self, name: str) -> nullcontext[None]:
        del name
        return nullcontext()


def right(inputs: Any, operation: str) -> Any:  # noqa: ANN401  any operation's
    answer = ORACLES[operation].answer(inputs)
    if operation == "norm_and_quantize":
        if inputs.residual is not None:
            inputs.residual.copy_(answer.residual)
        return answer[:2]
    if operation == "rope_and_append":
        for cache, written in zip(inputs.caches, answer[1:], strict=False):
            cache.copy_(written)
        return answer.q
    if operation in ("moe", "batched_moe"):
        return answer.to(inputs.out_dtype)
    if hasattr(inputs, "out_dtype"):
        return answer.out.to(inputs.out_dtype), answer.lse.float()
    return answer


def wrong(inputs: Any, operation: str) -> Any:  # noqa: ANN401
    """Return the right answer with another first element of its first tensor."""
    answer = right(inputs, operation)
    if isinstance(answer, dict):
        return {**answer, "positions": answer["positions"] + 1}
    if operation in ("quantize", "norm_and_quantize"):
        codes = answer[0].clone()
        codes.view(torch.uint8).flatten()[0] ^= 8
        return codes, answer[1]
    if operation == "rope_and_append":
        answer.view(torch.uint8).flatten()[0] ^= 8
        return answer
    fields = answer.tensors() if hasattr(answer, "tensors") else None
    first = (
        answer if isinstance(answer, torch.Tensor) else fields["qo_indptr"] if fields else answer[0]
    )
    first = first.clone()
    first.flatten()[0] += 1
    if fields:
        return types.SimpleNamespace(
            **{**fields, "qo_indptr": first}, page_size=getattr(answer, "page_size", 0)
        )
    return first if isinstance(answer, torch.Tensor) else (first, *answer[1:])


def kernel_of(
    operation: Any,  # noqa: ANN401  a name
    answer: Callable[[Any, str], Any],
    **options: Any,  # noqa: ANN401
) -> Implementation:
    return implementation(operation, name="mine", **options)(
        lambda inputs: answer(inputs, operation)
    )


def judged(
    made: Implementation, problem: Problem, folder: Path, law: str = ""
) -> tuple[Verdict, Kept | None]:
    subject = Keeper(made, Target.here("cpu"), Stages())
    subject.folder = folder
    try:
        verdict = find_law(law or OPERATIONS[problem.operation].law).check(subject, problem)
    except Stop as stop:
        verdict = stop.verdict
    return verdict, read_kept(folder)


QUANTISED = QuantizeProblem(2, 16, regime="zeros")


def test_a_zero_of_the_other_sign_is_a_wrong_code(tmp_path: Path) -> None:
    def signless(inputs: Any, operation: str) -> Any:  # noqa: ANN401
        codes, scales = right(inputs, operation)
        code = codes.view(torch.uint8)
        return torch.where(code == 0x80, 0, code).view(codes.dtype), scales

    verdict, kept = judged(kernel_of("quantize", signless), QUANTISED, tmp_path)
    assert verdict.bad
    assert kept is not None
    assert kept.wrong


def test_a_code_that_an_arithmetic_may_give_is_not_wrong(tmp_path: Path) -> None:
    def least(inputs: Any, operation: str) -> Any:  # noqa: ANN401
        scales = right(inputs, operation).scales
        low, _ = code_bounds(inputs.x, scales, inputs.to, Arithmetic(quotients="reciprocal"))
        return codes_of(low, inputs.to.dtype), scales

    problem = QuantizeProblem(40, 512, block_channels=32, regime="ties", dtype="float32", seed=3)
    floor = replace(problem, regime="iid")
    honest = kernel_of("quantize", least, arithmetic=Arithmetic(quotients="reciprocal"))
    for each in (problem, floor):
        verdict, kept = judged(honest, each, tmp_path)
        assert not verdict.bad
        assert kept is not None
        assert not kept.wrong


@pytest.mark.parametrize("given", [None, 0.5])
def test_a_kept_answer_of_a_quantiser_has_the_tensors_that_there_are(
    tmp_path: Path, given: float | None
) -> None:
    problem = QuantizeProblem(2, 16, scale=given, block_rows=0 if given else 1)
    verdict, kept = judged(kernel_of("quantize", right), problem, tmp_path)
    assert not verdict.bad
    assert kept is not None
    assert not kept.wrong
    assert set(kept.expected) == ({"codes"} if given else {"codes", "scales"})


@pytest.mark.parametrize("dies_in", [1, 2])
def test_what_was_being_written_when_the_process_died_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: int
) -> None:
    saved: list[Path] = []

    def save(data: object, path: Path) -> None:
        saved.append(path)
        path.write_bytes(b"PK")
        if len(saved) == dies_in:
            raise SystemExit
        torch_save(data, path)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(SystemExit):
        judged(kernel_of("merge_state", right), problem_of("merge_state"), tmp_path)
    kept = read_kept(tmp_path)
    assert (kept is None) if dies_in == 1 else (kept is not None and kept.result is None)


def problem_of(operation: str) -> Problem:
    kind = ORACLES[operation].problem
    return kind(operation=operation) if kind is AttentionProblem else kind()


def run_script(path: Path, monkeypatch: pytest.MonkeyPatch, function: Any) -> int:  # noqa: ANN401
    module = types.ModuleType("my_kernel")
    module.kernel = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_kernel", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("operation", [name for name in ORACLES if name not in ("route", "plan")])
@pytest.mark.parametrize("most_inside", [0, 1 << 20])
def test_a_script_fails_as_the_law_does_and_passes_once_the_kernel_is_right(
    operation: str, most_inside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproducing, "MOST_INSIDE", most_inside)
    problem = problem_of(operation)
    verdict, kept = judged(kernel_of(operation, wrong), problem, tmp_path)
    assert verdict.bad
    assert kept is not None
    assert (kept.wrong, kept.number) == (True, 1)
    assert no_script(MINE, kept, verdict) == ""
    script = tmp_path / "repro.py"
    files = write_script(script, MINE, kept, verdict, "parity", problem)
    assert [each.name for each in files] == [
        "repro.py",
        *([] if most_inside else ["repro.tensors.pt"]),
    ]
    assert "import kernelproof" not in script.read_text().replace("from kernelproof", "import k")
    inputs = materialise(problem)
    written = ("k_cache", "v_cache") if operation == "rope_and_append" else ()

    def answered(given: Any, answer: Any) -> Any:  # noqa: ANN401
        for name in written:
            getattr(given, name).copy_(getattr(inputs, name))
        return answer

    for answer, code in ((wrong(inputs, operation), 1), (right(inputs, operation), 0)):
        assert run_script(script, monkeypatch, functools.partial(answered, answer=answer)) == code


@pytest.mark.parametrize(
    "problem",
    [
        QuantizeProblem(
            3, 32, codes="e2m1", scale_format="e4m3", block_channels=16, global_scale=0.0372,
            scale_layout="swizzled",
        ),
        QuantizeProblem(
            3, 64, codes="e2m1", scale_format="e8m0", block_channels=32, power_rule="down"
        ),
    ],
)  # fmt: skip
def test_a_script_of_codes_of_four_bits(
    problem: QuantizeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, kept = judged(kernel_of("quantize", wrong, features=FEATURES), problem, tmp_path)
    assert verdict.bad
    assert kept is not None
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "quantize_parity", problem)
    inputs = materialise(problem)
    for answer, code in ((wrong, 1), (right, 0)):
        result = answer(inputs, "quantize")
        assert run_script(script, monkeypatch, lambda given, a=result: (given, a)[1]) == code


@pytest.mark.parametrize("kv_cache", ["int8_zero_point", "int4_zero_point"])
def test_a_script_reads_codes_by_their_zero_points(
    kv_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong by what is read alone: codes and scales of new tokens have no bound of their own."""

    def moved(inputs: Any, operation: str) -> Any:  # noqa: ANN401
        *others, v_scales = right(inputs, operation)
        new = v_scales != inputs.kv_cache_sf[1]
        return *others, torch.where(new, v_scales * 2, v_scales)

    # A page of one key, which is new.
    problem = AttentionProblem("append_paged_kv", seq_lens=(1,), dtype="float16", kv_cache=kv_cache)
    verdict, kept = judged(kernel_of("append_paged_kv", moved), problem, tmp_path)
    assert verdict.bad
    assert kept is not None
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "append_parity", problem)
    inputs = materialise(problem)
    for answer, code in ((moved, 1), (right, 0)):
        result = answer(inputs, "append_paged_kv")
        assert run_script(script, monkeypatch, lambda given, a=result: (given, a)[1]) == code


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(seq_lens=(5,), strided_q=True, strided_kv=True, kv_layout="HND"),
        AttentionProblem(seq_lens=(5,), kv_cache="nvfp4", sinks=True, custom_mask=True),
        AttentionProblem(seq_lens=(5,), kv_cache="float8_e4m3fn", per_head_scales=True),
        MoEProblem(num_tokens=3),
    ],
)  # fmt: skip
def test_the_stand_in_has_what_the_record_has(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, kept = judged(kernel_of(problem.operation, wrong), problem, tmp_path)
    assert kept is not None
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "parity", problem)
    inputs = materialise(problem)

    def compare(given: Any) -> Any:  # noqa: ANN401
        for name in kept.record["record"]:
            mine, theirs = getattr(inputs, name), getattr(given, name)
            if isinstance(mine, torch.Tensor):
                assert mine.stride() == theirs.stride()
                assert torch.equal(*(each.double().nan_to_num() for each in (mine, theirs)))
            elif isinstance(mine, bool | int | float | str | torch.dtype | None):
                assert mine == theirs
        if hasattr(inputs, "keywords"):
            assert given.keywords().keys() == inputs.keywords().keys()
        return wrong(inputs, problem.operation)

    assert run_script(script, monkeypatch, compare) == 1


def test_a_script_says_what_its_stand_in_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = AttentionProblem()
    verdict, kept = judged(kernel_of("paged_attention", wrong), problem, tmp_path)
    assert kept is not None
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "parity", problem)
    assert run_script(script, monkeypatch, lambda given: given.metadata.validate()) == 2
    assert "the stand-in for inputs has no validate" in capsys.readouterr().out


def test_a_script_shows_a_changed_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(inputs: Any, operation: str) -> Any:  # noqa: ANN401
        answer = right(inputs, operation)
        inputs.outs.zero_()
        return answer

    problem = problem_of("merge_state")
    made = kernel_of("merge_state", spoil)
    verdict, kept = judged(made, problem, tmp_path, "inputs_unchanged")
    assert verdict.kind == "mutated_input"
    assert kept is not None
    assert not kept.wrong
    assert no_script(MINE, kept, verdict) == ""
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "inputs_unchanged", problem)
    answer = right(materialise(problem), "merge_state")
    assert run_script(script, monkeypatch, lambda given: (given.outs.zero_(), answer)[1]) == 1
    assert run_script(script, monkeypatch, lambda given: (given, answer)[1]) == 0


def test_an_answer_in_given_buffers_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(inputs: Any, operation: str = "merge_state") -> None:  # noqa: ANN401
        for name, each in zip(("out", "lse"), wrong(inputs, operation), strict=True):
            getattr(inputs, name).copy_(each)

    problem = problem_of("merge_state")
    made = kernel_of("merge_state", fill, writes_out=True)
    verdict, kept = judged(made, problem, tmp_path)
    assert kept is not None
    assert kept.wrong
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "parity", problem)
    answer = right(materialise(problem), "merge_state")

    def mend(given: Any) -> None:  # noqa: ANN401
        for name, each in zip(("out", "lse"), answer, strict=True):
            getattr(given, name).copy_(each)

    assert run_script(script, monkeypatch, mend) == 0
    assert run_script(script, monkeypatch, lambda _: None) == 1


def test_an_answer_without_an_lse_is_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(inputs: Any, operation: str = "merge_state") -> tuple[torch.Tensor, None]:  # noqa: ANN401
        inputs.out.copy_(wrong(inputs, operation)[0])
        return inputs.out, None

    problem = problem_of("merge_state")
    verdict, kept = judged(kernel_of("merge_state", fill, writes_out=True), problem, tmp_path)
    assert kept is not None
    assert kept.result is not None
    assert kept.result.keys() == {"out"}
    script = tmp_path / "repro.py"
    write_script(script, MINE, kept, verdict, "parity", problem)
    answer = right(materialise(problem), "merge_state")
    assert run_script(script, monkeypatch, lambda given: given.out.copy_(answer[0])) == 0


def test_the_inputs_of_a_call_that_raises_are_kept(tmp_path: Path) -> None:
    def refuse(_: object, operation: str) -> None:
        raise UnsupportedError(operation)

    verdict, kept = judged(kernel_of("merge_state", refuse), problem_of("merge_state"), tmp_path)
    assert verdict.status == "REJECTED"
    assert kept is not None
    assert kept.result is None
    assert kept.inputs.keys() == {"outs", "lses", "states.0", "states.1"}
    assert no_script(MINE, kept, verdict) == ""


def test_where_a_script_cannot_show_a_failure(tmp_path: Path) -> None:
    problem = problem_of("merge_state")
    _, kept = judged(kernel_of("merge_state", right), problem, tmp_path)
    assert kept is not None
    bad = Verdict("FAIL", "numeric", "off")
    crash = Verdict("CRASH", "KeyError", "supports raised KeyError")
    assert no_script(MINE, kept, Verdict("PASS")).startswith("the case does not fail")
    assert no_script(Kernel("kernelproof.impl.torch.moe:route", "cpu"), kept, bad).startswith(
        "the kernel is a part of Kernelproof"
    )
    assert no_script(MINE, None, crash) == "the kernel was not called: it failed before"
    assert no_script(MINE, replace(kept, session=True), bad).startswith("the law plans and runs")
    assert no_script(MINE, kept, bad).startswith("each call is within its bound by itself")
    routed = replace(kept, operation="route", wrong=True)
    assert no_script(MINE, routed, bad).startswith("of equal scores either expert is right")
    assert no_script(MINE, routed, crash) == ""


@pytest.mark.parametrize("installed", [False, True])
def test_the_tensors_are_saved_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, installed: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if installed else None)
    if installed:
        stand_in = types.SimpleNamespace(save_file=torch.save)
        monkeypatch.setitem(sys.modules, "safetensors.torch", stand_in)
    _, kept = judged(kernel_of("merge_state", wrong), problem_of("merge_state"), tmp_path)
    assert kept is not None
    folder = tmp_path / "a" / "b"
    files = save_tensors(kept, folder, {"law": "parity"})
    suffix = ".safetensors" if installed else ".pt"
    names = ["inputs", "result", "oracle", "bound"]
    assert files == [*(folder / f"{name}{suffix}" for name in names), folder / "index.json"]
    index = json.loads((folder / "index.json").read_text())
    assert (index["law"], index["call"], index["wrong"]) == ("parity", 1, True)
    for each in index["tensors"]:
        with (folder / each["file"]).open("rb") as file:
            tensor = torch.load(file, weights_only=True)[each["name"]]
        assert (list(tensor.shape), f"torch.{each['dtype']}") == (each["shape"], str(tensor.dtype))
    inputs = {"outs", "lses", "states.0", "states.1"}
    assert {each["name"] for each in index["tensors"]} == {*inputs, "out", "lse"}
    # A result of an earlier case does not stay beside the tensors of a call without one.
    save_tensors(replace(kept, result=None), folder, {})
    assert not (folder / f"result{suffix}").exists()
    (tmp_path / "oracle.pt").touch()
    with pytest.raises(OutputError, match=r"oracle\.pt is there, and was not written by --save"):
        save_tensors(kept, tmp_path, {})
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"--save .* cannot be written"):
        save_tensors(kept, tmp_path / "file" / "x", {})


def test_a_script_shows_the_problem_that_its_call_was_asked(tmp_path: Path) -> None:
    """And which calls the law compared, where it has made them of another problem."""

    def without_window(inputs: Any, operation: str) -> Any:  # noqa: ANN401  any operation's
        return right(replace(inputs, window_left=-1), operation)

    CALLS.begin()
    made = kernel_of("paged_attention", without_window)
    drawn = AttentionProblem(seq_lens=(6,))
    found, kept = judged(made, drawn, tmp_path, "sensitivity")
    verdict = with_calls(found, drawn)
    assert verdict.bad
    assert kept is not None
    write_script(tmp_path / "repro.py", MINE, kept, verdict, "sensitivity", drawn)
    text = (tmp_path / "repro.py").read_text().partition("Exit code")[0]
    assert "AttentionProblem(seq_lens=(6,), window_left=3)\n" in text
    assert "The law made it of AttentionProblem(seq_lens=(6,))\n" in text
    assert "Call 1 was the problem\nCall 2 was the problem with window_left=3\n" in text
