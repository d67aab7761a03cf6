"""A law in one process and its calls in another: the same verdicts, whatever the other one says."""

from __future__ import annotations

import json
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Implementation, Target, UnsupportedError, implementation
from kernelproof.impl.protocol import Operation
from kernelproof.properties.findings.cases import case_of
from kernelproof.properties.findings.corpus import load_case
from kernelproof.properties.findings.report import Finding
from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.isolation.workers import LAST_REPLY, Worker
from kernelproof.properties.laws import LAWS, find_law, laws_of, life_cycle
from kernelproof.properties.laws.batches import PLANNED, batches_of
from kernelproof.properties.laws.life_cycle import CAPTURE, REPLAY, RUN
from kernelproof.properties.seeded.attention import graph_bugs, session_bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.distrust import GARBLED, RemoteSubject, Server
from kernelproof.properties.worker.link import Link, Packer, unpack
from kernelproof.properties.worker.requests import ON_ITS_GPU, Address
from kernelproof.properties.worker.room import judged_with_room
from kernelproof.reference import (
    AttentionProblem,
    BatchedMoEProblem,
    BatchProblem,
    ContextParallelProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    NormQuantizeProblem,
    PlanProblem,
    Problem,
    QuantizeProblem,
    RearrangeProblem,
    RopeAppendProblem,
    RouteProblem,
    SlotsProblem,
    StepsProblem,
)
from kernelproof.reference.operations import OPERATIONS

CPU = Target.here("cpu")


class Stages:
    """Nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Be in a stage."""
        return nullcontext()


@contextmanager
def beside(serve: Callable[[socket.socket], object]) -> Iterator[RemoteSubject]:
    """Yield a subject whose other process is a thread that does this."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    try:
        yield RemoteSubject(Link(ours), CPU, Stages(), launches=4)
    finally:
        Link(ours).end()
        thread.join()
        ours.close()
        theirs.close()


def apart(kernel: Implementation) -> Any:  # noqa: ANN401  a context
    def serve(connection: socket.socket) -> None:
        Server(Subject(kernel, CPU, Stages()), Link(connection), Stages(), nullcontext).serve()

    return beside(serve)


def verdict_of(subject: Subject, law: Any, problem: Problem) -> Verdict:  # noqa: ANN401
    try:
        verdict: Verdict = law.check(subject, problem)
    except Stop as stop:
        verdict = stop.verdict
    return replace(verdict, trace="")


def honest(operation: Operation) -> Implementation:
    answer = OPERATIONS[operation].answer

    def kernel(inputs: Any) -> Any:  # noqa: ANN401
        found = answer(inputs)
        if operation == "moe":
            return found.to(inputs.out_dtype)
        if operation == "norm_and_quantize":
            if inputs.residual is not None:
                inputs.residual.copy_(found.residual)
            return found.codes, found.scales
        if operation == "rope_and_append":
            for cache, written in zip(inputs.caches, found[1:], strict=False):
                cache.copy_(written)
            return found.q
        if hasattr(found, "lse"):
            return found.out.to(inputs.out_dtype), found.lse
        return found

    return implementation(operation, name="honest")(kernel)


TRIED: dict[str, Problem] = {
    "paged_attention": AttentionProblem(query_lens=(2, 1), seq_lens=(3, 5), page_size=2),
    "ragged_attention": AttentionProblem("ragged_attention", (2, 1), (3, 5)),
    "append_paged_kv": AttentionProblem("append_paged_kv", (2, 1), (3, 5)),
    "merge_state": MergeProblem(num_states=3),
    "build_metadata": MetadataProblem(),
    "slice_context_parallel": ContextParallelProblem(),
    "map_slots": SlotsProblem((((1, 2), (3, 5)), ((1,), (1,))), world=2),
    "prepare_batch": BatchProblem(steps=(((1, 2), (3, 5)), ((1,), (1,)))),
    "prepare_steps": StepsProblem(events=("arrive 3", "run 0", "run 0")),
    "plan": PlanProblem("fa2", (5, 2), (900, 30), page_size=16, graph=True),
    "route": RouteProblem(num_tokens=3, num_experts=8),
    "moe": MoEProblem(num_tokens=3),
    "batched_moe": BatchedMoEProblem(counts=(2, 1), most_rows=3),
    "quantize": QuantizeProblem(3, 32, block_rows=1, block_channels=16),
    "norm_and_quantize": NormQuantizeProblem(3, 32, residual=True),
    "rearrange": RearrangeProblem(matrices=2, rows=3, columns=5),
    "rope_and_append": RopeAppendProblem((2, 1), (5, 3)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_law_says_what_it_says_in_one_process(operation: Operation) -> None:
    kernel, problem = honest(operation), TRIED[operation]
    judged = 0
    for law in laws_of(operation):
        here = verdict_of(Subject(kernel, CPU, Stages(), launches=4), law, problem)
        with apart(kernel) as subject:
            assert verdict_of(subject, law, problem) == here, law.name
        judged += here.status == "PASS" and not here.vacuous
    assert judged >= 2


def adds_to_q(inputs: Any) -> Any:  # noqa: ANN401
    inputs.q.add_(1.0)
    return honest("paged_attention")(inputs)


def writes_behind(inputs: Any) -> None:  # noqa: ANN401
    memory = inputs.out.untyped_storage()
    torch.empty(0, dtype=inputs.out.dtype).set_(memory).zero_()


def writes_right_out(inputs: Any) -> tuple[torch.Tensor, None]:  # noqa: ANN401
    inputs.out.copy_(OPERATIONS["paged_attention"].answer(inputs).out)
    return inputs.out, None


def raises(_inputs: object) -> None:
    message = "no"
    raise UnsupportedError(message)


class OddSize:
    """Metadata whose page size is no number; no law of metadata reads it."""

    page_size = None

    def __init__(self, inputs: Any) -> None:  # noqa: ANN401
        vars(self).update(OPERATIONS["build_metadata"].answer(inputs).tensors(), page_size=object())


@pytest.mark.parametrize(
    ("law", "function", "options", "status", "kind"),
    [
        ("inputs_unchanged", adds_to_q, {}, "FAIL", "mutated_input"),
        ("inputs_unchanged", writes_behind, {"writes_out": True}, "FAIL", "wrote_outside"),
        ("parity", writes_right_out, {"writes_out": True}, "PASS", ""),
        ("parity", lambda inputs: inputs.q.to_sparse(), {}, "FAIL", "shape"),
        ("parity", lambda inputs: (inputs.q.to_sparse(), None), {}, "FAIL", "shape"),
        ("parity", lambda inputs: (inputs.q, None), {}, "FAIL", "numeric"),
        ("parity", lambda _: [], {}, "FAIL", "shape"),
        ("parity", raises, {}, "REJECTED", "UnsupportedError"),
        ("parity", lambda inputs: inputs.q.float().numpy(), {}, "FAIL", "shape"),
        ("parity", lambda inputs: (inputs.q.float().numpy(), None), {}, "FAIL", "shape"),
        ("parity", lambda _: torch.Tensor, {}, "FAIL", "shape"),
        ("parity", lambda _: 3, {}, "FAIL", "shape"),
    ],
)
def test_what_is_wrong_in_the_other_process_is_found_here(
    law: str, function: Callable[[Any], Any], options: dict[str, Any], status: str, kind: str
) -> None:
    kernel = implementation("paged_attention", name="wrong", **options)(function)
    problem = TRIED["paged_attention"]
    here = verdict_of(Subject(kernel, CPU, Stages()), find_law(law), problem)
    with apart(kernel) as subject:
        assert verdict_of(subject, find_law(law), problem) == here
    assert (here.status, here.kind) == (status, kind)


def test_a_terabyte_of_one_element_has_the_wrong_shape() -> None:
    kernel = implementation("paged_attention", name="wide")(
        lambda inputs: (inputs.q.flatten()[:1].clone().expand(10**12), None)
    )
    with apart(kernel) as subject:
        said = verdict_of(subject, find_law("parity"), TRIED["paged_attention"])
    assert (said.status, said.kind) == ("FAIL", "shape")
    assert "out has shape [1000000000000]" in said.message


def test_a_page_size_that_no_law_reads_may_be_anything() -> None:
    kernel = implementation("build_metadata", name="odd")(OddSize)
    with apart(kernel) as subject:
        said = verdict_of(subject, find_law("metadata_parity"), TRIED["build_metadata"])
    assert said.status == "PASS", said


@pytest.mark.parametrize(
    ("kernel", "walk"),
    [
        (session_bugs.plan_keeps_host_buffers, (PLANNED, life_cycle.OVERWRITE_PLAN, RUN)),
        (session_bugs.cache_gathered_once, (PLANNED, RUN, life_cycle.REWRITE)),
        (session_bugs.scratch_assumed_zero, (PLANNED, life_cycle.OVERWRITE_SCRATCH, RUN)),
        (graph_bugs.graph_scratch_not_reset, (PLANNED, CAPTURE, REPLAY, REPLAY)),
    ],
)
def test_a_session_sees_what_is_written_into_what_it_keeps(
    kernel: Implementation, walk: Sequence[str]
) -> None:
    problem = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=2)
    with apart(kernel) as subject:
        batches = batches_of(subject, problem)
        assert not life_cycle._outcome(subject, batches, [PLANNED, RUN]).bad
        assert life_cycle._outcome(subject, batches, walk).bad


def test_memory_keeps_its_place_and_is_given_up_with_its_tensor() -> None:
    packer, memory = Packer(), dict[int, torch.Tensor]()
    base = torch.arange(6.0)
    parcel = packer.pack({"a": base[1:4], "b": base.view(2, 3).T})
    memory |= parcel.new
    there = unpack(parcel.record, memory, {})
    assert torch.equal(there["a"], base[1:4])
    assert torch.equal(there["b"], base.view(2, 3).T)
    base[1] = 9.0
    parcel = packer.pack(torch.zeros(1))
    assert len(parcel.new) == 2  # what is still in use is brought up to date
    del base, parcel
    assert len(packer.pack(None).gone) == 2
    assert not packer.there


DECLARED = {"operation": "paged_attention", "name": "liar", "features": [], "arithmetic": {},
            "wide": [], "writes_out": False, "sessions": False}  # fmt: skip
CALLED = {"changed": [], "seconds": 0.0, "calls": 1}
OUT = {"dtype": "float32", "shape": [3, 1, 16]}


def framed(text: bytes) -> bytes:
    return struct.pack("!Q", len(text)) + text


def told(result: object, **more: object) -> bytes:
    return framed(json.dumps({**CALLED, "result": result, **more}).encode())


class Ran:
    """Fails the test that reads it as a pickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("unpickled",)


LIES: dict[str, bytes] = {
    "nothing": b"",
    "half a frame": b"\0\0\0",
    "no JSON": framed(b"PASS"),
    "a pickle": framed(pickle.dumps(Ran())),
    "no object": framed(b"[]"),
    "100,000 brackets": framed(b"[" * 100_000),
    "more than a frame may have": struct.pack("!Q", 1 << 62),
    "a verdict of its own": framed(b'{"status": "PASS"}'),
    "a stop that passes": framed(b'{"stop": {"status": "PASS"}}'),
    "a stop without fields": framed(b'{"stop": [1]}'),
    "an unknown type": told({"new": True, "dtype": "load", "shape": [1]}),
    "a shape below zero": told({"new": True, "dtype": "float32", "shape": [-4, -4]}),
    "a terabyte": told({"new": True, "dtype": "float32", "shape": [1 << 38]}),
    "bytes that never come": told({"pair": [{"new": True, **OUT}, None]}),
    "memory that was not given": told({"input": 99, **OUT, "offset": 0, "stride": [16, 16, 1]}),
    "behind the inputs": told({"input": 0, **OUT, "offset": 1 << 40, "stride": [16, 16, 1]}),
    "just behind the inputs": told({"input": 0, **OUT, "offset": 1 << 20, "stride": [16, 16, 1]}),
    "much out of little": told({"input": 0, **OUT, "shape": [1 << 38], "offset": 0, "stride": [0]}),
    "three of a pair": told({"pair": [None, None, None]}),
    "a change of nothing": told(None, changed=[99]),
    "time that runs back": told(None, seconds=-1.0),
    "no number": told(None, seconds=float("nan")),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_none_is_a_crash_of_the_kernel(lie: str) -> None:
    def serve(connection: socket.socket) -> None:
        link = Link(connection)
        link.receive()
        link.send(json.dumps(DECLARED).encode())
        link.receive()
        with suppress(OSError):  # the other side need not read all of it
            connection.sendall(LIES[lie])
            connection.shutdown(socket.SHUT_WR)

    with beside(serve) as subject:
        said = verdict_of(subject, find_law("parity"), TRIED["paged_attention"])
    assert (said.status, said.kind) == ("CRASH", GARBLED), said


@contextmanager
def answering(*answers: bytes) -> Iterator[RemoteSubject]:
    """Yield a subject whose other process sends these after what it declares."""

    def serve(connection: socket.socket) -> None:
        link = Link(connection)
        link.receive()
        link.send(json.dumps(DECLARED).encode())
        link.receive()
        for each in answers:
            connection.sendall(each)

    with beside(serve) as subject:
        yield subject


def test_a_failure_of_the_other_process_brings_no_elements_along() -> None:
    stop = {"status": "FAIL", "kind": "numeric", "message": "m", "trace": "", "worst": [3],
            "about": "x", "error_map": {}}  # fmt: skip
    with answering(framed(json.dumps({"stop": stop}).encode())) as subject:
        said = verdict_of(subject, find_law("parity"), TRIED["paged_attention"])
    assert said == Verdict("FAIL", "numeric", "m")


def test_a_call_without_room_in_the_other_process_is_no_crash() -> None:
    stop = {"status": "UNSUPPORTED", "kind": "memory", "message": "too large", "trace": ""}
    with answering(framed(json.dumps({"stop": stop}).encode())) as subject:
        said = verdict_of(subject, find_law("parity"), TRIED["paged_attention"])
    assert said == Verdict("UNSUPPORTED", "memory", "too large")


def test_the_suite_without_room_in_the_other_process_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> object:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")  # noqa: TRY003, EM101

    monkeypatch.setattr("kernelproof.properties.worker.distrust.unpack", full)
    with apart(honest("paged_attention")) as subject:
        said = judged_with_room(
            lambda: verdict_of(subject, find_law("parity"), TRIED["paged_attention"]), "cpu"
        )
    assert (said.status, said.kind) == ("UNSUPPORTED", "memory"), said


def test_an_answer_for_which_there_is_no_room_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise MemoryError

    monkeypatch.setattr("kernelproof.properties.worker.distrust.decode", full)
    with apart(honest("paged_attention")) as subject:
        said = judged_with_room(
            lambda: verdict_of(subject, find_law("parity"), TRIED["paged_attention"]), "cpu"
        )
    assert (said.status, said.kind) == ("UNSUPPORTED", "memory"), said


def test_what_the_other_process_sends_is_read_while_its_deadline_runs() -> None:
    noted: list[str] = []

    class Noting:
        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            noted.append(name)
            yield
            noted.pop()

    answer = told({"pair": [{"new": True, **OUT}, None]})
    with answering(answer, bytes(4 * 3 * 16)) as subject, pytest.MonkeyPatch.context() as patch:
        subject._stages = Noting()
        filled, fill = list[list[str]](), Link.fill

        def noting(link: Link, tensor: torch.Tensor) -> None:
            filled.append(list(noted))
            fill(link, tensor)

        patch.setattr(Link, "fill", noting)
        verdict_of(subject, find_law("parity"), TRIED["paged_attention"])
    assert filled
    assert all("run" in each for each in filled)


PASSES: dict[str, object] = {"status": "PASS", "kind": "", "message": ""}
FAILS: dict[str, object] = {"status": "FAIL", "kind": "numeric", "message": ""}
CRASHES: dict[str, object] = {"status": "CRASH", "kind": "KeyError", "message": ""}
HUNG = {"status": "hang", "kind": "run", "stage": "run"}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Outcome("done", {}), Outcome("done", FAILS), ("done", FAILS)),
        (Outcome("done", PASSES), Outcome("done", FAILS), ("done", FAILS)),
        (
            Outcome("done", {"ended": {"status": "done", "result": PASSES}}),
            Outcome("done", FAILS),
            ("done", FAILS),
        ),
        (  # whoever reads it looks at "ended" first
            Outcome("done", {**CRASHES, "ended": {"status": "done", "result": PASSES}}),
            Outcome("done", FAILS),
            ("done", FAILS),
        ),
        (Outcome("done", {**CRASHES, "ended": [1]}), Outcome("done", FAILS), ("done", FAILS)),
        (Outcome("done", CRASHES), Outcome("done", PASSES), ("done", CRASHES)),
        (  # what it says of its memory would excuse it
            Outcome("done", {"ended": {**HUNG, "starved": True, "memory": {"need": 1 << 40}}}),
            Outcome("done", PASSES),
            ("done", {"ended": HUNG}),
        ),
        (
            Outcome("done", {"ended": HUNG}),
            Outcome("done", PASSES),
            ("done", {"ended": HUNG}),
        ),
        (Outcome("crash", kind="SIGSEGV"), Outcome("done", PASSES), ("crash", None)),
        (Outcome("done", PASSES), Outcome("hang", kind="run"), ("hang", None)),
        (Outcome("done", PASSES), Outcome("crash", kind="SIGKILL"), ("error", None)),
        (
            Outcome("done", {LAST_REPLY: True}),
            Outcome("done", PASSES),
            ("done", {**PASSES, LAST_REPLY: True}),
        ),
    ],
)
def test_of_the_kernels_process_only_failures_count(
    first: Outcome, second: Outcome, expected: tuple[str, Any]
) -> None:
    worker: Any = object.__new__(Worker)
    worker._process = SimpleNamespace(end=lambda: None)
    worker._second = SimpleNamespace(ended=False, answer=lambda: second)
    outcome = Worker._of_both(worker, first)
    assert (outcome.status, outcome.result) == expected


def test_a_case_is_judged_in_a_second_process_where_that_can_be() -> None:
    address = Address("m:n", None, "cuda", distrust=True)
    problem = TRIED["merge_state"]
    assert address.case("parity", problem)["second"] == "oversee"
    assert set(ON_ITS_GPU) < {law.name for law in LAWS}
    assert {address.case(law, problem)["second"] for law in ON_ITS_GPU} == {""}
    assert replace(address, device="cpu").case("soak", problem)["second"] == "oversee"
    assert "second" not in replace(address, distrust=False).case("parity", problem)


def test_a_case_of_such_a_run_remembers_it(tmp_path: Path) -> None:
    finding = Finding("torch-moe", "parity", Verdict("FAIL"), TRIED["moe"])
    written = case_of(finding, "torch-moe", operation=None, seed=0, target={}, distrust=True)
    path = tmp_path / "case.json"
    path.write_text(json.dumps(written))
    request = load_case(path).request(Address("m:n", None, "cpu"))
    assert request["second"] == "oversee"
