"""A second opinion: the law and the oracle in one process, the calls in another (``--distrust``).

The process that judges never loads the code under test. It makes the inputs, sends them to the
kernel's process, and takes back what the call gave and what became of the inputs. Whatever the
kernel replaces in its own process, no verdict of PASS comes from there.
"""

from __future__ import annotations

import json
import math
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from ...impl import Implementation, Target
from ...impl.protocol import GraphSession, ScratchSession, Session
from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Refusal
from ...reference import Arithmetic, Problem
from ...reference.tensors.inputs import Inputs
from ..verdicts.asked import CALLS
from ..verdicts.comparison import fail
from ..verdicts.contained import Stop, contained, out_of_memory
from ..verdicts.memory_need import NO_ROOM
from ..verdicts.specialising import Stages
from ..verdicts.subject import SESSION, Subject
from ..verdicts.verdict import Verdict
from .link import MOST_CHARACTERS, Link, Packer, Tensors, Unusable, decode, encode, unpack

GARBLED = "garbled answer"
"""Kind of the CRASH of a kernel whose process answers what is no answer, or not at all."""
WITHOUT_RESULT = ("plan", "capture")
"""Methods of sessions whose result means nothing."""
STOPPED = ("status", "kind", "message", "trace")
"""Fields of a verdict that the kernel's process may give: it compares nothing."""
Answer = tuple[dict[str, Any], list[torch.Tensor]]


# In the process of the kernel


class Server:
    """Does what the judging process asks.

    Args:
        subject: the implementation.
        link: the connection to that process, whose answers are trusted.
        stages: the stages of this process.
        attributed: what errors of the suite count as the implementation's in.
    """

    def __init__(
        self,
        subject: Subject,
        link: Link,
        stages: Stages,
        attributed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._subject, self._link, self._stages = subject, link, stages
        self._attributed = attributed
        self._sessions: list[Any] = []
        self._memory: dict[int, torch.Tensor] = {}
        self._tensors: Tensors = {}
        self._given: dict[int, torch.Tensor] = {}
        """What the other side has in that memory, on the host."""

    def serve(self) -> None:
        """Answer until the other side ends the connection."""
        with suppress(EOFError, OSError):
            while True:
                with self._stages.stage("judge"):
                    request = pickle.loads(self._link.receive())  # noqa: S301  no kernel wrote it
                answer, tensors = self._answer(request)
                with self._stages.stage("judge"):
                    self._link.send(json.dumps(answer).encode(), tensors)

    def _answer(self, request: dict[str, Any]) -> Answer:
        do: Callable[..., Answer] = getattr(self, f"_{request.pop('do')}")
        try:
            with self._attributed():
                return do(**request)
        except Stop as stop:
            verdict = stop.verdict
            return {"stop": {name: getattr(verdict, name) for name in STOPPED}}, []
        except (EOFError, OSError):
            raise
        except Exception as error:  # noqa: BLE001  the suite's own: the other side raises it
            failed = message_of(error) if (full := out_of_memory(error)) else traceback.format_exc()
            return {"failed": failed, "full": full}, []

    def _declare(self) -> Answer:
        declared = self._subject.implementation
        return {
            "operation": declared.operation,
            "name": declared.name,
            "features": sorted(declared.features),
            "arithmetic": asdict(declared.arithmetic),
            "wide": [(least, asdict(wide)) for least, wide in declared.wide_arithmetic],
            "writes_out": declared.writes_out,
            "sessions": declared.session is not None,
        }, []

    def _refuse(self, problem: Problem) -> Answer:
        refusal = self._subject.refusal(problem)
        return {"refusal": refusal and refusal.to_json()}, []

    def _works(self) -> Answer:
        return {"works": self._subject.device_works()}, []

    def _session(self) -> Answer:
        session = self._subject.open_session()
        self._sessions.append(session)
        return {
            "session": len(self._sessions) - 1,
            "graphs": isinstance(session, GraphSession),
            "scratch": isinstance(session, ScratchSession),
        }, []

    def _scratch(self, session: int) -> Answer:
        with contained("its scratch raised "):
            for tensor in self._sessions[session].scratch():
                tensor.view(torch.uint8).fill_(255)
        return {}, []

    def _call(
        self,
        problem: Problem,
        record: bytes,
        new: list[tuple[int, int, str]],
        gone: list[int],
        function: tuple[int, str] | None,
    ) -> Answer:
        for number in gone:
            del self._memory[number], self._given[number]
        self._tensors = {at: each for at, each in self._tensors.items() if at[0] not in gone}
        for number, size, device in new:
            self._given[number] = torch.empty(size, dtype=torch.uint8)
            self._link.fill(self._given[number])
            if number not in self._memory:
                self._memory[number] = torch.empty(size, dtype=torch.uint8, device=device)
            self._memory[number].copy_(self._given[number])
        inputs, subject = unpack(record, self._memory, self._tensors), self._subject
        called = None if function is None else getattr(self._sessions[function[0]], function[1])
        before = subject.seconds, subject.calls
        result = subject.call(problem, inputs, called)
        if function and function[1] in WITHOUT_RESULT:
            result = None
        elif subject.implementation.writes_out:
            # What was written is read from memory; of what was returned, that there is no LSE.
            wrote_none = subject.written_lse(result, torch.full((1,), torch.nan)) is None
            result = (None, None) if wrote_none else None
        numbers = {memory.data_ptr(): number for number, memory in self._memory.items()}
        with contained("its result raised "):
            told, tensors = encode(result, subject.target.device, numbers)
        now = {number: memory.cpu() for number, memory in self._memory.items()}
        changed = [each for each in now if not torch.equal(now[each], self._given[each])]
        self._given |= {each: now[each].clone() for each in changed}
        about = {"seconds": subject.seconds - before[0], "calls": subject.calls - before[1]}
        answer = {"result": told, "changed": changed, **about, "interpreted": subject.interpreted}
        return answer, [*(self._given[each] for each in changed), *tensors]


# In the process that judges


class RemoteSubject(Subject):
    """An implementation in another process, as a law sees it.

    Nothing that comes from there is believed but what speaks against it, and what it declares.

    Raises:
        Stop: in every method: the other process answers what is no answer.
    """

    def __init__(
        self, link: Link, target: Target, stages: Stages, *, launches: int, tight: bool = False
    ) -> None:
        self._link, self._stages, self._packer = link, stages, Packer()
        declared = self._ask("declare")
        with _read():
            implementation = _implementation_of(declared)
        super().__init__(implementation, target, stages, launches=launches, tight=tight)

    def refusal(self, problem: Problem) -> Refusal | None:
        """As of ``Subject``; modules that were not built are refused there too."""
        answer = self._ask("refuse", problem=problem)
        with _read():
            return None if answer["refusal"] is None else Refusal(**answer["refusal"])

    def call(
        self,
        problem: Problem,
        inputs: Inputs,
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Any:  # noqa: ANN401  any result
        """As of ``Subject``, but that each call is waited for, and its result is a copy."""
        del wait
        CALLS.note(problem, inputs)
        record, memory, new, gone = self._packer.pack(inputs)
        sizes = [(each, new[each].nbytes, memory[each].device.type) for each in new]
        named = function.args if isinstance(function, partial) else None
        answer = self._ask(
            "call",
            list(new.values()),
            problem=problem,
            record=record,
            new=sizes,
            gone=gone,
            function=named,
        )
        with _read(), self._stages.stage("run"):  # the other process sends, or does not
            for number in answer["changed"]:
                there = torch.empty_like(self._packer.there[number])
                self._link.fill(there)
                memory[number].copy_(there)
                self._packer.there[number] = there
            result = decode(answer["result"], self._link, self.target.device, memory)
            seconds, calls = float(answer["seconds"]), int(answer["calls"])
            if not (0 <= seconds < math.inf and 0 <= calls <= 1):
                raise ValueError(seconds, calls)
            interpreted = bool(answer["interpreted"])
        self.seconds, self.calls = self.seconds + seconds, self.calls + calls
        self.interpreted = self.interpreted or interpreted
        return result

    def usable(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As of ``Subject``; tensors that cannot travel say why themselves."""
        if isinstance(tensor, Unusable):
            kind, message = tensor.why
            raise Stop(fail(kind, f"{name}{message}"))
        return super().usable(name, tensor)

    def open_session(self) -> Session:
        """As of ``Subject``: its methods are calls in the other process."""
        answer = self._ask("session")
        with _read():
            number = int(answer["session"])
            names = [*SESSION, *(("capture", "replay") if answer["graphs"] else ())]
            methods: dict[str, Any] = {name: partial(_elsewhere, number, name) for name in names}
            if answer["scratch"]:
                methods["scratch"] = partial(self._overwritten, number)
        session: Any = SimpleNamespace(**methods)
        return session  # type: ignore[no-any-return]

    def device_works(self) -> bool:
        """As of ``Subject``, of the other process."""
        return bool(self._ask("works").get("works"))

    def _overwritten(self, session: int) -> list[torch.Tensor]:
        """Have the scratch memory of a session overwritten; it does not travel."""
        self._ask("scratch", session=session)
        return []

    def _ask(self, do: str, tensors: list[torch.Tensor] | None = None, **request: Any) -> Any:  # noqa: ANN401
        """Return the answer of the other process, an object.

        Raises:
            Stop: the implementation has failed there.
            RuntimeError: the suite has.
        """
        with _read(), self._stages.stage("run"):
            self._link.send(pickle.dumps({"do": do, **request}), tensors or ())
            answer: dict[str, Any] = json.loads(self._link.receive(MOST_CHARACTERS))
            stop = answer.get("stop")
            verdict = stop and Verdict(**{name: str(stop[name]) for name in STOPPED})  # type: ignore[arg-type]
            # That it found no memory is no failure, and no more than a refusal of ``supports``.
            no_room = verdict and (verdict.status, verdict.kind) == ("UNSUPPORTED", NO_ROOM)
            if verdict and not (verdict.bad or no_room):
                raise ValueError(verdict.status)
        if verdict:
            raise Stop(verdict)
        if "failed" in answer:
            raise (MemoryError if answer.get("full") else RuntimeError)(str(answer["failed"]))
        return answer


@contextmanager
def _read() -> Iterator[None]:
    """Read what the other process says; it says nothing sensible where that raises.

    Raises:
        Stop: CRASH.
        MemoryError: there is no room for it here.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise MemoryError(message_of(error)) from error
        message = f"its process gave no answer that can be read: {type(error).__name__}"
        raise Stop(Verdict("CRASH", GARBLED, message)) from error


def _implementation_of(declared: Mapping[str, Any]) -> Implementation:
    """Return what an implementation declares as a record that cannot be called."""
    return Implementation(
        operation=str(declared["operation"]),
        name=str(declared["name"]),
        function=_elsewhere,
        supports=None,
        features=frozenset(map(str, declared["features"])),
        arithmetic=Arithmetic(**declared["arithmetic"]),
        writes_out=bool(declared["writes_out"]),
        compile_key=None,
        session=_elsewhere if declared["sessions"] else None,
        wide_arithmetic=[(int(least), Arithmetic(**wide)) for least, wide in declared["wide"]],
    )


def _elsewhere(*_: object) -> NoReturn:
    """Stand for what is called in the other process only."""
    raise NotImplementedError
