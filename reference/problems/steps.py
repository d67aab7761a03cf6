"""The problem of an engine's steps: what happens to it, one event after another."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

from .base import MAX_SEQ_LEN, BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types
from .preparation import KEYS_OF_WORK

ENGINES: Final = {
    "vllm": {"positions": "kept", "seq_lens": "zero_rows", "page_table": "zero_rows",
             "slot_mapping": "padded", "page_indices": "kept", "token_to_request": "zero_rows"},
    "sglang": {"slot_mapping": "padded", "positions": "kept", "query_starts": "kept",
               "seq_lens": "kept", "kv_indptr": "kept", "page_table": "kept",
               "kv_indices": "kept", "token_seq_lens": "kept"},
}  # fmt: skip
"""The buffers that an engine keeps, in the order in which it builds them: outputs of
``prepare_batch`` with what becomes of the buffer behind the entries, and slots padded with -1."""
EVENTS: Final = ("run", "arrive", "share", "finish", "preempt", "draft", "reject", "pad")
"""What happens to an engine, see ``StepsProblem``; a number follows."""
MOST_REQUESTS: Final = 6
"""Requests that run at once; more do not arrive."""
PAGES: Final = 9973
"""Pages of a pool, of which page 0 is no request's."""
APART: Final = 7919
"""Difference of the ids of two pages that are first used one after the other: pages in a row are
no neighbours. It has no divisor with ``PAGES - 1`` in common, so that each id comes once."""


class Request(NamedTuple):
    """A request in a step.

    Attributes:
        row: its row in the engine's tables; row 0 is no request's.
        computed: its keys before the new tokens.
        new: its new tokens.
        pages: the ids of all pages that it has; rejected tokens leave it more than it needs.
        held: how many of the pages the row had in the step before; 0: the request is new.
        rejected: new tokens that are found to be wrong after the step.
    """

    row: int
    computed: int
    new: int
    pages: tuple[int, ...]
    held: int
    rejected: int = 0

    @property
    def keys(self) -> int:
        """Count its keys, the new tokens included."""
        return self.computed + self.new


class Step(NamedTuple):
    """A batch: its requests, how many a graph adds, and how many events led to it.

    Attributes:
        requests: the requests in the order of the batch.
        padding: requests without keys that fill up a recorded graph's batch.
        events: the events up to the one that ran it.
    """

    requests: tuple[Request, ...]
    padding: int
    events: int


@dataclass(frozen=True)
class StepsProblem(BaseProblem):
    """One call of prepare_steps: all steps of an engine whose buffers persist.

    An event is a word and a number; one that cannot happen is nothing.

    ==========  ==================================================================================
    arrive N    a request with a prompt of N tokens comes
    share N     one whose prompt begins with the full pages of the oldest request
    run N       a step: at most N tokens of each prompt (0: all), one of each request behind it
    draft N     the next step adds N draft tokens to each request behind its prompt
    reject N    N of the last step's drafts were wrong
    pad N       the next step's batch has N requests without keys more
    finish I    request number I, modulo their number, ends; row and pages are free at once
    preempt I   it loses them, and comes back after a step, to be computed again
    ==========  ==================================================================================

    Attributes:
        engine: the engine whose buffers are kept, one of ``ENGINES``.
        events: what happens.
        page_size: keys a page.
        spare: entries, rows and columns of each buffer that no batch needs.
        seed: the seed of garbage and of page ids.
    """

    kind: ClassVar[str] = "steps"
    operation: ClassVar[str] = "prepare_steps"

    engine: str = "vllm"
    events: tuple[str, ...] = ("arrive 1", "run 0")
    page_size: int = 1
    spare: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no engine can look like."""
        check_types(self)
        check_one_of("engine", self.engine, tuple(ENGINES))
        check_at_least(self, (("page_size", 1), ("spare", 0), ("seed", 0)))
        for position, event in enumerate(self.events):
            word, _, number = event.partition(" ")
            if word not in EVENTS or not number.isdecimal() or int(number) > MAX_SEQ_LEN:
                name = f"events[{position}]"
                refuse(name, event, f"one of {', '.join(EVENTS)}, with a number behind it")
        if not self.steps:
            refuse("events", self.events, "events that let a request arrive, and a step run")

    @property
    def steps(self) -> tuple[Step, ...]:
        """The batches that the events lead to."""
        return _steps(tuple(self.events), self.page_size, self.seed)

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Requests and blocks of keys of all steps: engines' kernels take a block at once."""
        return 1 + sum(2 + r.keys // KEYS_OF_WORK for step in self.steps for r in step.requests)


@dataclass
class _Running:
    """A request that the engine knows: what is left of it, and where it is."""

    prompt: int
    row: int = 0
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    held: int = 0
    drafts: int = 0


class _Engine:
    """Rows and pages that are free, and the requests that have the others."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.page_size, self.first = page_size, seed
        self.rows = list(range(MOST_REQUESTS, 0, -1))
        self.free: list[int] = []
        self.users: Counter[int] = Counter()
        self.known = self.drafts = self.padding = 0
        self.running: list[_Running] = []
        self.waiting: list[_Running] = []
        self.steps: list[Step] = []

    def arrive(self, prompt: int) -> _Running | None:
        """Admit a request to a row, where there is one."""
        if not self.rows or not prompt:
            return None
        self.running.append(_Running(prompt, self.rows.pop()))
        return self.running[-1]

    def share(self, prompt: int) -> None:
        """Admit a request that begins with the full pages of the first one."""
        oldest, size = self.running[:1], self.page_size
        request = self.arrive(prompt)
        if request is not None and oldest:
            count = min(oldest[0].computed, prompt - 1) // size
            request.pages, request.computed = oldest[0].pages[:count], count * size
            self.users.update(request.pages)

    def finish(self, number: int) -> _Running | None:
        """Take row and pages from a request; the last ones that were freed are used first."""
        if not self.running:
            return None
        request = self.running.pop(number % len(self.running))
        self.users.subtract(request.pages)
        self.free += [page for page in reversed(request.pages) if not self.users[page]]
        self.rows.append(request.row)
        return request

    def preempt(self, number: int) -> None:
        """Preempt a request: it waits, and all of its tokens are its prompt then."""
        request = self.finish(number)
        if request is not None:
            self.waiting.append(_Running(max(request.prompt, request.computed)))

    def draft(self, number: int) -> None:
        """Add draft tokens to the next step."""
        self.drafts = number

    def pad(self, number: int) -> None:
        """Add requests to the next step."""
        self.padding = number

    def reject(self, number: int) -> None:
        """Take back drafts of the last step."""
        taken = {r.row: min(number, r.drafts) for r in self.running}
        for request in self.running:
            request.computed -= taken[request.row]
            request.drafts -= taken[request.row]
        for step in self.steps[-1:]:
            requests = tuple(
                r._replace(rejected=r.rejected + taken.get(r.row, 0)) for r in step.requests
            )
            self.steps[-1] = step._replace(requests=requests)

    def run(self, most: int, events: int) -> None:
        """Run a step, if there is a request; who was preempted before comes back."""
        batch = []
        for request in self.running:
            left = request.prompt - request.computed
            request.drafts = 0 if left > 0 else self.drafts
            new = min(left, most or left) if left > 0 else 1 + self.drafts
            needed = -(-(request.computed + new) // self.page_size)
            request.pages += [self._page() for _ in range(needed - len(request.pages))]
            pages = tuple(request.pages)
            batch.append(Request(request.row, request.computed, new, pages, request.held))
            request.held = len(pages)
            request.computed += new
        if batch:
            self.steps.append(Step(tuple(batch), self.padding, events))
        self.drafts = self.padding = 0
        waiting, self.waiting = self.waiting, []
        self.waiting = [each for each in waiting if self.arrive(each.prompt) is None]

    def _page(self) -> int:
        """Return a free page."""
        if not self.free:
            self.known += 1
            if self.known >= PAGES:
                refuse("events", f"{self.known} pages", f"events that need less than {PAGES}")
            self.free.append((self.first + self.known * APART) % (PAGES - 1) + 1)
        page = self.free.pop()
        self.users[page] = 1
        return page


@functools.lru_cache(maxsize=64)
def _steps(events: tuple[str, ...], page_size: int, seed: int) -> tuple[Step, ...]:
    engine = _Engine(page_size, seed)
    for number, event in enumerate(events, 1):
        word, _, count = event.partition(" ")
        if word == "run":
            engine.run(int(count), number)
        else:
            getattr(engine, word)(int(count))
    return tuple(engine.steps)
