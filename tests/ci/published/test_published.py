"""Published calls of a stand-in release, whose functions each break one law; the bounds; faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.published import command, judging
from kernelproof.ci.published.answers import NoAnswerError, Said, ask
from kernelproof.ci.published.asking import NO_MEMORY, Asked, Calls, UnpublishedError, read
from kernelproof.ci.published.calling import Called
from kernelproof.ci.published.comparing import compare
from kernelproof.ci.published.faults import FAULTS, seeded
from kernelproof.ci.published.host import HANDLER
from kernelproof.ci.published.judging import LostDeviceError
from kernelproof.ci.published.known import ARITHMETIC, On, known_text
from kernelproof.ci.published.release import Published
from kernelproof.ci.published.summary import findings_of, summarise, summary_lines
from kernelproof.properties.findings.report import TIME
from kernelproof.properties.isolation.outcome import KILLED_FOR_MEMORY, Outcome
from kernelproof.properties.search.ending import Ending
from kernelproof.properties.worker.pools import open_pool
from kernelproof.tests.ci.published.stand_in import FEW, stand_in

BROKEN = {
    "norm_code_off": "parity",
    "norm_offset": "parity",
    "norm_outside": "outside",
    "norm_input": "inputs",
    "norm_repeats": "repeats",
    "norm_strides": "strides",
    "norm_rows": "rows",
    "norm_order": "order",
    "norm_empty": "empty",
    "sample_next": "parity",
    "norm_into_clearing": "inputs",
    "norm_into_nothing": "parity",
    "norm_dies": "crashes",
    "norm_hangs": "hangs",
    "norm_with_heads": "parity",
}
"""The law that each faulty function of the stand-in breaks."""
NAMES_RIGHT = [
    *("norm_right", "norm_in_place", "norm_codes", "norm_expanded", "norm_graph"),
    *("norm_into", "norm_far", "norm_compiles", "sample_right", "Wrapper.run:run"),
    *("norm_backend", "top_k_ragged_transform"),
]
"""Those that break none; norm_graph and norm_far are right on a CPU, which is asked no far rows."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("release")
    report = folder / "report.json"
    code = main(["published", stand_in(folder), "--json", str(report), "--seconds", "25"])
    found: dict[str, Any] = {"exit code": code, **json.loads(report.read_text())}
    return found


def findings(report: dict[str, Any], name: str) -> set[str]:
    """Return the laws that a call broke."""
    (call,) = (each for each in report["calls"] if each["name"] == name)
    return {finding["law"] for finding in findings_of(call)}


@pytest.mark.parametrize(("name", "law"), BROKEN.items())
def test_a_faulty_function_breaks_its_law(judged: dict[str, Any], name: str, law: str) -> None:
    assert law in findings(judged, name)


@pytest.mark.parametrize("name", NAMES_RIGHT)
def test_a_right_function_breaks_no_law(judged: dict[str, Any], name: str) -> None:
    (call,) = (each for each in judged["calls"] if each["name"] == name)
    assert call["state"] == "judged"
    assert not findings(judged, name)


def test_a_backend_that_is_here_answers_for_one_that_is_not(judged: dict[str, Any]) -> None:
    (call,) = (each for each in judged["calls"] if each["name"] == "norm_backend")
    backends = {each["backend"] for each in call["problems"] if "backend" in each}
    assert backends == {"here"}


def test_an_axis_of_one_element_too_many_is_the_only_finding(judged: dict[str, Any]) -> None:
    (call,) = (each for each in judged["calls"] if each["name"] == "norm_with_heads")
    assert {finding["why"].split(":")[0] for finding in findings_of(call)} == {"shape"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_was_found(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Timer(2.0, lambda: os.kill(os.getpid(), number))

    def show(said: dict[str, Any], _: object) -> None:
        if said["problems"]:
            sent.start()

    monkeypatch.setattr(command, "show_call", show)
    report = tmp_path / "report.json"
    names = ["norm_codes", "norm_hangs"]
    assert main(["published", stand_in(tmp_path), *names, "--json", str(report)]) == code
    right, hangs = json.loads(report.read_text())["calls"]
    assert (right["state"], hangs["state"]) == ("judged", "ended")
    assert (hangs["why"], hangs["findings"]) == ("cut short by the end of the run, in run", [])


def test_what_did_not_answer_is_counted_apart(judged: dict[str, Any]) -> None:
    states = {each["name"]: each["state"] for each in judged["calls"]}
    assert states["norm_refuses"] == "reference only"
    assert states["norm_unpublished"] == "unasked"
    assert states["norm_dies"] == "ended"
    assert states["draws"] == "reference only"
    summary = judged["summary"]
    # Two end their process.
    assert summary["judged"] == len(BROKEN) - 2 + len(NAMES_RIGHT)
    assert summary["findings"] == sorted(BROKEN)
    assert not summary["known"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_that_answers_otherwise_breaks_its_law(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    asked = ["published", stand_in(tmp_path), "norm_graph", "norm_right", "--device", "cuda"]
    assert main([*asked, "--json", str(report)]) == 1
    judged = json.loads(report.read_text())
    assert findings(judged, "norm_graph") == {"graph"}
    assert findings(judged, "norm_right") == set()


def test_modules_that_exist_come_first_and_others_are_named(tmp_path: Path) -> None:
    path = [stand_in(tmp_path), *sys.path]
    asked = Asked("cpu", 0, 1, 25.0, Ending())
    told: list[str] = []
    with open_pool("cpu", handler=HANDLER, sys_path=path) as pool:
        release = {"version": "9.9", "chip": 0, "calls": read(pool, asked)["calls"]}
        names = ["norm_compiles", "norm_right"]
        calls = Calls(asked, release, names, lambda said: told.append(said["name"]))
        calls.ask(pool, 1, calls.chosen, last=False)
        first = calls.to_json()
        assert told == ["norm_right"]
        assert first["not compiled"] == {"norm_module": ["norm_compiles"]}
        assert [each["state"] for each in first["calls"]] == ["not compiled", "judged"]
        assert "modules not compiled: norm_module (norm_compiles)" in summary_lines(
            first, summarise(first)
        )
        calls.ask(pool, 1, calls.uncompiled(), last=True)
        then = calls.to_json()
        assert not then["not compiled"]
        assert [each["state"] for each in then["calls"]] == ["judged", "judged"]
        asked.ending.end(TIME)
        calls.ask(pool, 1, calls.chosen, last=True)
        assert calls.to_json() == then


def test_rows_that_are_far_apart_have_a_law(tmp_path: Path) -> None:
    asked = Asked("cpu", 0, 1, 25.0, Ending())
    with open_pool("cpu", handler=HANDLER, sys_path=[stand_in(tmp_path), *sys.path]) as pool:
        places = {each["name"]: n for n, each in enumerate(read(pool, asked)["calls"])}
        found: dict[str, Any] = {}
        with pool.lease() as worker:
            for name in ("norm_far", "norm_right", "norm_strides"):
                question = {"device": "cpu", "seed": 0, "compile": True, "part": "far"}
                outcome = worker.run({**question, "call": places[name]}, asked.deadlines())
                assert outcome.result is not None, outcome.kind
                found[name] = outcome.result["problems"]
    answers = {name: each["answer"] for name, (each,) in found.items()}
    assert answers["norm_right"] == {"state": "answered", "laws": ["far"], "findings": []}
    assert [each["law"] for each in answers["norm_far"]["findings"]] == ["far"]
    assert answers["norm_strides"]["laws"] == []  # its findings are those of strides


def test_far_rows_that_answer_otherwise_are_a_finding_without_a_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: object) -> None:
        message = "its reference raises ValueError: not here"
        raise NoAnswerError(message)

    alike = iter((True, False))
    called: Any = Called.__new__(Called)
    monkeypatch.setattr(judging, "problems_of", lambda *_: [({}, {"input": torch.zeros(2, 2)})])
    monkeypatch.setattr(judging, "drawn_inputs", lambda _, made: made)
    monkeypatch.setattr(judging, "may_be_far", lambda _: True)
    monkeypatch.setattr(judging, "alike", lambda *_: next(alike))
    monkeypatch.setattr(judging, "call", lambda *_, **__: called)
    monkeypatch.setattr(judging, "reference_arguments", refuses)
    stages: Any = None
    published = Published("one", "one", None, SimpleNamespace(reference=None))
    (found,) = judging.judge_far(published, "cpu", 0, stages)
    (finding,) = found["answer"]["findings"]
    assert finding["law"] == "far"
    assert finding["why"].endswith("its reference raises ValueError: not here")


def test_a_device_that_a_parts_first_call_loses_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loses(law: str, error: Exception) -> None:
        raise LostDeviceError(law, error)

    monkeypatch.setattr(judging, "problems_of", lambda *_: [({"tokens": 3}, {})])
    monkeypatch.setattr(judging, "drawn_inputs", lambda _, made: made)
    monkeypatch.setattr(judging, "call", lambda *_: 1 // 0)
    monkeypatch.setattr(judging, "check_device", loses)
    stages: Any = None
    for part in (judging.judge_far, judging.judge_graph):
        (found,) = part(Published("one", "one", None, None), "cuda", 0, stages)
        assert found["answer"]["lost"]
        assert [each["law"] for each in found["answer"]["findings"]] == ["crashes"]


def test_a_release_without_templates_says_so_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    asked = Asked("cpu", 0, 1, 25.0, Ending())
    for text, why in (
        ("__version__ = '0.6'", "flashinfer 0.6 publishes no templates"),
        ("import nothing_of_that_name", "flashinfer cannot be imported: No module named"),
    ):
        (tmp_path / "flashinfer" / "__init__.py").write_text(text)
        path = [str(tmp_path), *sys.path]
        with (
            open_pool("cpu", handler=HANDLER, sys_path=path) as pool,
            pytest.raises(UnpublishedError, match=why),
        ):
            read(pool, asked)


H200 = On(90, "0.7.2.post1")


def test_findings_that_are_settled_are_known() -> None:
    assert "without an error" in known_text("silu_and_mul", "strides", "of input: ...", H200)
    assert not known_text("silu_and_mul", "parity", "", H200)
    assert not known_text("silu_and_mul_quantize", "strides", "", H200)
    assert "compiled to nothing" in known_text("fp4_quantize", "repeats", "", H200)
    assert known_text("mono_moe", "parity", "elements: 0: 9 of 10 elements", H200)
    assert not known_text("mono_moe", "parity", "nan: 0: 9 elements are NaN", H200)
    segments = "SegmentGEMMWrapper.run:segment_gemm_run"
    assert "read as dense" in known_text(segments, "strides", "of x: nan: 0: ...", H200)
    assert not known_text(segments, "empty", "shape: 0: ...", H200)


@pytest.mark.parametrize("name", ["silu_and_mul", "fp4_quantize", "mono_moe"])
@pytest.mark.parametrize(
    ("on", "known"),
    [
        (On(90, "0.6.13"), True),
        (On(90, "0.7.2.post1+cu130"), True),
        (On(90, "0.7.3"), False),
        (On(90, "0.8.0rc1"), False),
        (On(0, "0.7.2.post1"), False),
        (On(90, "main"), False),
    ],
)
def test_known_findings_are_those_of_a_gpu_and_of_releases(
    name: str, on: On, *, known: bool
) -> None:
    law = "strides" if name == "silu_and_mul" else "parity"
    assert bool(known_text(name, law, "elements: 0: wrong", on)) is known


def test_a_chip_bounds_what_is_known_of_it() -> None:
    assert not known_text("fp4_quantize", "repeats", "", On(100, "0.7.2.post1"))


def test_infinities_have_a_sign_and_formats_are_not_coarser() -> None:
    logits = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    (expected,) = ask(lambda x: torch.logsumexp(x, -1), {"x": logits}).outputs
    assert compare(expected, expected.honest) is None
    for wrong in (torch.inf, torch.finfo(torch.float32).max, torch.nan, 0.0):
        assert compare(expected, torch.tensor([expected.honest[0], wrong])) is not None
    (sums,) = ask(product, {"a": drawn(8, 64).float(), "b": drawn(64, 8, seed=1).float()}).outputs
    assert compare(sums, sums.honest.to(torch.float8_e4m3fn)) is not None
    (places,) = ask(choose, {"x": drawn(8, 64)}).outputs
    assert compare(places, places.honest + 0.9) is not None


def test_a_logarithm_near_1_has_an_absolute_error() -> None:
    x = drawn(8, 64).float() * 0.5 - 4
    (expected,) = ask(lambda x: torch.nn.functional.softplus(x) * 8, {"x": x}).outputs
    exact = expected.exact
    assert compare(expected, (exact + 8 * 2.0**-21.5).float()) is None
    assert compare(expected, (exact + 8 * 2.0**-19).float()) is not None


def test_partial_sums_may_be_in_16_bits_where_that_is_known() -> None:
    states = drawn(17, 3, 64)
    honest = ask(mean, {"states": states}).outputs[0]
    halves = torch.stack([states[:9].float().sum(0), states[9:].float().sum(0)])
    rounded = (halves.bfloat16().float().sum(0) / 17).float()
    assert compare(honest, rounded) is not None
    said = ask(mean, {"states": states}, known=ARITHMETIC["merge_states"])
    assert compare(said.outputs[0], rounded) is None
    assert said.arithmetic == "dot product of 17, partial results in 16 bits"


def test_codes_may_be_rounded_twice_where_that_is_known() -> None:
    rows = drawn(64, 512) * 3
    twice = rows.float().mul(1.003).bfloat16().float().to(torch.float8_e4m3fn)
    (once,) = ask(code, {"rows": rows}).outputs
    assert compare(once, twice) is not None
    (expected,) = ask(code, {"rows": rows}, known=ARITHMETIC["layernorm_quant"]).outputs
    assert compare(expected, twice) is None
    assert compare(expected, (rows.float() * 1.05).to(torch.float8_e4m3fn)) is not None


def code(rows: torch.Tensor) -> torch.Tensor:
    """Scale and quantise, as a reference does."""
    return (rows.to(torch.float32) * 1.003).to(torch.float8_e4m3fn)


def mean(states: torch.Tensor) -> torch.Tensor:
    """Average states, as a reference does."""
    return states.to(torch.float32).mean(0)


def test_no_seeded_fault_is_accepted(judged: dict[str, Any]) -> None:
    assert judged["summary"]["faults"] >= 30
    assert not judged["summary"]["accepted"]
    assert not judged["summary"]["accused"]


def test_findings_and_nothing_judged_have_exit_codes(
    judged: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = stand_in(tmp_path)
    assert judged["exit code"] == 1
    assert main(["published", folder, "norm_right"]) == 0
    assert main(["published", folder, "norm_refuses"]) == 4
    assert "no function of the release answered here" in capfd.readouterr().out
    shutil.rmtree(tmp_path / "flashinfer")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text('__version__ = "9.9"\n')
    assert main(["published", folder]) == 3


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply as a reference does."""
    return (a.to(torch.float32) @ b.to(torch.float32)).to(a.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend as a reference does."""
    logits = q.to(torch.float32) @ k.to(torch.float32).T * q.shape[-1] ** -0.5
    return (torch.softmax(logits, dim=-1) @ v.to(torch.float32)).to(q.dtype)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to FP8 with a scale a row, as a reference does."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True) / 448
    return (wide / scale).to(torch.float8_e4m3fn), scale


def choose(x: torch.Tensor) -> torch.Tensor:
    """Choose the largest, as a reference does."""
    return torch.topk(torch.softmax(x.to(torch.float32), dim=-1), 4).indices


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def said_of(name: str) -> Said:
    """Return what a reference says of a problem."""
    if name == "product":
        return ask(product, {"a": drawn(16, 512), "b": drawn(512, 64, seed=1)})
    if name == "attend":
        keys = {"k": drawn(300, 64, seed=1), "v": drawn(300, 64, seed=2)}
        return ask(attend, {"q": drawn(64, 64), **keys})
    if name == "quantise":
        return ask(quantise, {"x": drawn(16, 256)})
    return ask(choose, {"x": drawn(64, 100)})


@pytest.mark.parametrize("name", ["product", "attend", "quantise", "choose"])
def test_faults_over_a_reference_are_refused_and_itself_is_not(name: str) -> None:
    for expected in said_of(name).outputs:
        assert compare(expected, expected.honest) is None
        for fault, answer in seeded(expected).items():
            assert compare(expected, answer) is not None, fault


def test_the_class_of_arithmetic_is_named() -> None:
    assert said_of("product").arithmetic == "dot product of 512"
    assert said_of("attend").arithmetic == "dot product of 300, softmax"
    assert "codes" in said_of("quantise").arithmetic
    assert said_of("choose").arithmetic == "softmax, integers"


def test_kernels_may_round_what_tensor_cores_round() -> None:
    q, k, v = drawn(64, 64), drawn(300, 64, seed=1), drawn(300, 64, seed=2)
    (expected,) = ask(attend, {"q": q, "k": k, "v": v}).outputs
    logits = q.float() @ k.float().T / 8
    weights = torch.softmax(logits, dim=-1).to(torch.bfloat16)
    assert compare(expected, (weights.float() @ v.float()).to(torch.bfloat16)) is None
    dropped = torch.softmax(logits[:, :-1], dim=-1) @ v[:-1].float()
    assert compare(expected, dropped.to(torch.bfloat16)) is not None


def weigh(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum heads by their weights, as a reference does."""
    return torch.relu(logits.to(torch.float32)) @ weights


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rotate halves and round them to 16 bits before their codes, as a reference does."""
    one, two = x.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat([one * 0.6 - two * 0.8, two * 0.6 + one * 0.8], dim=-1)
    return turned.to(torch.bfloat16).to(torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn)


def test_each_part_of_what_is_rounded_together_is_rounded() -> None:
    (expected,) = ask(turn, {"x": drawn(512, 256) * 20}).outputs
    assert compare(expected, expected.honest) is None


def test_inputs_of_float32_are_not_rounded_to_16_bits() -> None:
    logits, weights = drawn(40, 64), drawn(64, seed=1).to(torch.float32) * 1.2345
    (expected,) = ask(weigh, {"logits": logits, "weights": weights}).outputs
    assert compare(expected, weigh(logits, weights)) is None
    assert compare(expected, weigh(logits, weights.to(torch.bfloat16).to(torch.float32)))


def test_an_answer_of_another_shape_or_with_a_nan_is_refused() -> None:
    (expected,) = said_of("product").outputs
    shorter, nan = expected.honest[:-1], expected.honest.clone()
    nan[0, 0] = float("nan")
    for answer, law in ((shorter, "shape"), (nan, "nan")):
        found = compare(expected, answer)
        assert found is not None
        assert found.law == law


def test_a_reference_that_raises_gives_no_answer() -> None:
    with pytest.raises(NoAnswerError, match="ValueError: no"):
        ask(_refuses, {"x": drawn(2, 2)})


def _refuses(x: torch.Tensor) -> torch.Tensor:
    message = f"no {x.dim()} axes"
    raise ValueError(message)


def test_each_fault_changes_an_answer() -> None:
    found = {name for expected in said_of("quantise").outputs for name in seeded(expected)}
    assert found == set(FAULTS)


ONE = {"name": "one", "api": "flashinfer.one", "lacks": ""}


def pool_of(*outcomes: Outcome) -> Any:  # noqa: ANN401  what has the pool's methods
    """Return a pool of one worker that has these outcomes in turn."""
    said = iter(outcomes)
    worker = SimpleNamespace(run=lambda *_: next(said), renew=lambda: None)
    return SimpleNamespace(lease=lambda *_: nullcontext(worker))


def done(**changes: Any) -> Outcome:  # noqa: ANN401  what JSON has
    """Return the outcome of a call that was judged."""
    answer = {"state": "answered", "laws": ["parity"], "findings": []}
    problem = {"axes": {}, "arithmetic": "", "accused": [], "faults": {}, "answer": answer}
    result = {**ONE, "state": "judged", "lost": False, "problems": [problem], **changes}
    return Outcome("done", result)


CROWDED = """

@flashinfer_api(trace=template())
def norm_crowded(input, weight):
    COUNT.append(len(input))
    if len(set(COUNT)) > 2 or len(input) > 1 and input.stride(0) != input.shape[1]:
        raise torch.OutOfMemoryError("no memory")
    return reference(input, weight) + 0.009
"""
"""A call that is wrong, and finds no memory for rows further apart and for a second problem."""


def test_what_is_found_stays_where_something_raises_later(tmp_path: Path) -> None:
    asked = Asked("cpu", 0, 2, 25.0, Ending())
    path = [stand_in(tmp_path, FEW + CROWDED), *sys.path]
    with open_pool("cpu", handler=HANDLER, sys_path=path) as pool:
        calls = read(pool, asked)["calls"]
        number = next(n for n, each in enumerate(calls) if each["name"] == "norm_crowded")
        found = asked.found_of(pool, number, calls[number], compiles=True)
    assert (found["state"], found["why"]) == ("judged", "OutOfMemoryError: no memory")
    (first,) = (each["answer"] for each in found["problems"] if each["axes"].get("tokens"))
    assert [each["law"] for each in first["findings"]] == ["parity"]
    assert first["why"] == "OutOfMemoryError: no memory"


def calls_of(asked: Asked, told: list[dict[str, Any]]) -> Calls:
    """Return the calls of a release that has one."""
    return Calls(asked, {"version": "9.9", "chip": 90, "calls": [ONE]}, [], told.append)


def test_a_name_that_no_call_has_is_refused() -> None:
    asked, release = Asked("cpu", 0, 1, 25.0, Ending()), {"calls": [ONE]}
    with pytest.raises(UsageRefusedError, match=r"onee: did you mean one[?] no published call"):
        Calls(asked, release, ["on", "onee"], print)


def test_a_second_answer_that_ends_keeps_what_the_first_has_found() -> None:
    asked, told = Asked("cpu", 0, 1, 25.0, Ending()), list[dict[str, Any]]()
    calls = calls_of(asked, told)
    wrong = {"state": "answered", "findings": [{"law": "parity", "why": "wrong"}]}
    problem = {"axes": {}, "arithmetic": "", "accused": [], "faults": {}, "answer": wrong}
    first = done(problems=[problem], module="norm", why="module norm is not compiled")
    calls.ask(pool_of(first, done(problems=[])), 1, [0], last=False)
    assert (calls.uncompiled(), told) == ([0], [])
    calls.ask(pool_of(Outcome("crash", kind="SIGSEGV", stage="run")), 1, [0], last=True)
    assert calls.uncompiled() == []
    assert [each["law"] for each in findings_of(told[0])] == ["crashes", "parity"]


@pytest.mark.parametrize(("status", "law"), [("hang", "hangs"), ("crash", "crashes")])
def test_a_part_that_ends_its_process_keeps_its_law(status: Any, law: str) -> None:  # noqa: ANN401
    asked = Asked("cpu", 0, 1, 25.0, Ending())
    pool = pool_of(done(), Outcome(status, kind="SIGSEGV", stage="run", seconds=3))
    found = asked.found_of(pool, 0, ONE, compiles=True)
    why = "asked for empty: SIGSEGV in stage run after 3 s"
    assert found["findings"] == [{"law": law, "why": why}]


CROWDS = {
    "whole": (
        Outcome(
            "done",
            {
                **ONE,
                "state": "unasked",
                "problems": [],
                "lost": False,
                "why": "OutOfMemoryError: no memory",
            },
        ),
    ),
    "part": (done(), Outcome("crash", kind=KILLED_FOR_MEMORY, stage="run", starved=True)),
}
"""Outcomes of a call without memory: of all of it, and of a part."""


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_call_without_memory_is_told_once(crowd: str) -> None:
    asked, told = Asked("cpu", 0, 1, 25.0, Ending()), list[dict[str, Any]]()
    calls = calls_of(asked, told)
    for last in (False, True):
        calls.ask(pool_of(*CROWDS[crowd]), 1, [0], last=last)
        assert (calls.crowded(), told) == ([0], [])
    calls.tell_others()
    assert [each["name"] for each in told] == ["one"]
    calls.tell_others()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (
            Outcome("crash", kind=KILLED_FOR_MEMORY, stage="run", starved=True),
            f"{NO_MEMORY} of the host: SIGKILL (out of memory) in stage run after 0 s",
        ),
        (
            Outcome("crash", kind="SIGSEGV", stage="specialise", seconds=9),
            "SIGSEGV in stage specialise after 9 s",
        ),
    ],
)
def test_a_process_ended_by_others_accuses_no_call(outcome: Outcome, why: str) -> None:
    found = Asked("cpu", 0, 1, 25.0, Ending()).found_of(pool_of(outcome), 0, ONE, compiles=True)
    assert (found["state"], found["findings"], found["why"]) == ("ended", [], why)


def test_a_worker_that_the_end_of_a_run_takes_away_accuses_nobody() -> None:
    def closed(*_: object) -> None:
        message = "the worker pool is closed"
        raise RuntimeError(message)

    worker: Any = SimpleNamespace(run=closed)
    pool: Any = SimpleNamespace(lease=lambda _: nullcontext(worker))
    asked, call = Asked("cpu", 0, 1, 25.0, Ending()), {"name": "one", "lacks": ""}
    with pytest.raises(RuntimeError, match="closed"):
        asked.found_of(pool, 0, call, compiles=True)
    asked.ending.end(TIME)
    found = asked.found_of(pool, 0, call, compiles=True)
    assert (found["state"], found["why"]) == ("ended", "cut short by the end of the run, in run")
    assert (found["findings"], found["cut"]) == ([], True)
