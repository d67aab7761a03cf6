"""The laws of planning, by coverage: they say what a plan must achieve, and never how.

No law calculates a plan. Each follows the blocks of the release's own plan and counts what they
compute: every query row, each key that it sees once, each partial result merged once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from .answers import Answer, Planner
from .problems import DECODE, FA3, FLOAT_BYTES, INT_BYTES, PlanProblem
from .reading import ALL_HEADS, Extent, Item, Plan, place_of, read_plan

ADVICE = ("Increase the workspace buffer size", "please consider disabling cuda graph")
"""Errors by which a release rightly refuses a problem that it has no room for."""
CHIPS_LAW = "chips"
"""The law that judges a plan of another chip."""
Mend = Callable[[PlanProblem, Answer, Plan], Plan]
"""Takes a known effect out of a plan; returns the plan itself where it has none."""
LeaveOut = Callable[[PlanProblem, PlanProblem], bool]
Segment = tuple[int, int, list[Item]]
"""First and last packed row of a part of a request, and the items that compute it."""


@dataclass(frozen=True)
class Law:
    """A law of planning.

    Attributes:
        name: its name.
        states: what it demands, in a sentence.
        judge: returns why a plan breaks it, in a sentence; empty where it holds.
    """

    name: str
    states: str
    judge: Callable[[Case], str]


class Case:
    """One problem, the release's plan of it, and the planner to ask for others.

    Attributes:
        planner, problem: the planner, and what it was asked.
        mends: what takes known effects out of a plan that was read.
        left_out: whether a known effect keeps a graph of the first problem from the second.
        answer: the planner's answer.
        without: names of laws that have a finding already.
    """

    def __init__(
        self,
        planner: Planner,
        problem: PlanProblem,
        mends: Sequence[Mend] = (),
        left_out: Sequence[LeaveOut] = (),
        answer: Answer | None = None,
    ) -> None:
        self.planner, self.problem = planner, problem
        self.mends, self.left_out = tuple(mends), tuple(left_out)
        self.answer = planner.plan(problem) if answer is None else answer
        self.without: Sequence[str] = ()

    @cached_property
    def plan(self) -> Plan:
        """The plan as its kernels read it, without known effects."""
        return self.read(self.answer)

    @cached_property
    def on_a_larger_chip(self) -> Case:
        """The same batch on a chip of twice as many multiprocessors."""
        larger = replace(self.problem, multiprocessors=2 * self.problem.multiprocessors)
        return Case(self.planner, larger, self.mends, self.left_out)

    def read(self, answer: Answer) -> Plan:
        """Return another plan of the problem as its kernels read it, without known effects."""
        found = read_plan(self.problem, answer)
        for mend in self.mends:
            found = mend(self.problem, answer, found)
        return found

    def mended(self, mends: Sequence[Mend], left_out: Sequence[LeaveOut]) -> Case:
        """Return the case without more known effects."""
        mends, left_out = (*self.mends, *mends), (*self.left_out, *left_out)
        return Case(self.planner, self.problem, mends, left_out, self.answer)

    @property
    def refused(self) -> bool:
        """Whether the release rightly has no plan for the problem."""
        return any(advice in self.answer.error for advice in ADVICE)


def answers(case: Case) -> str:
    """Judge that there is a plan, or a refusal that says what to do."""
    if case.answer.died:
        return why_it_died(case.answer)
    return "" if case.refused or not case.answer.error else f"it raises: {case.answer.error}"


def why_it_died(answer: Answer) -> str:
    """Return what became of the process of a plan function that gave no answer."""
    return answer.error or "the process of the plan function ended"


def workspace(case: Case) -> str:
    """Judge that what the kernels use lies in the workspaces, and nothing of it in one place."""
    if case.answer.spilled:
        return "the plan wrote behind a workspace of integers"
    pairs = ((case.plan.integers, INT_BYTES), (case.plan.floats, FLOAT_BYTES))
    return next(filter(None, (_outside(used, size) for used, size in pairs)), "")


def _outside(used: Sequence[Extent], size: int) -> str:
    extents = sorted((each for each in used if each.start != each.stop), key=lambda e: e.start)
    for each in extents:
        if each.start < 0 or each.stop > size:
            return f"{each.name} is bytes {each.start} to {each.stop} of {size}"
    for one, other in pairwise(extents):
        if one.stop > other.start:
            begin = f"behind the begin {other.start} of {other.name}"
            return f"{one.name} ends at byte {one.stop}, {begin}"
    return ""


def padding(case: Case) -> str:
    """Judge that blocks and rows that only a graph has do nothing."""
    if case.plan.stray:
        return next(iter(case.plan.stray.values()))
    rows, visited = case.problem.query_starts[-1] * case.problem.packed, case.plan.merged_rows
    if visited not in (-1, rows):
        return f"{visited} rows are merged of a batch that has {rows}"
    return ""


def description(case: Case) -> str:
    """Judge that what an item repeats of its request is that request's."""
    problem = case.problem
    for item in case.plan.items:
        request = item.request
        known = {
            "qo_indptr": problem.query_starts[request],
            "kv_indptr": problem.page_starts[request],
            "qo_len": problem.query_lens[request],
            "kv_len": problem.kv_lens[request],
        }
        for name, value in item.stated.items():
            if value != known[name]:
                where = f"work {item.block} of request {request}"
                return f"{where} has {name} {value}, which is {known[name]}"
    return ""


def rows(case: Case) -> str:
    """Judge that each row of each request has work, and no other row."""
    problem = case.problem
    for request, head, segments in _requests(case):
        total, at = problem.query_lens[request] * problem.packed, 0
        where = _where(request, head)
        for first, last, _ in segments:
            if first > at:
                return f"{where}: no work has rows {at} to {first - 1}"
            at = last + 1
        if at != total:
            return f"{where}: work has rows up to {at}, of {total}"
    return ""


def keys(case: Case) -> str:
    """Judge that each key that a row sees is computed once, and no key that is not there."""
    for request, head, segments in _requests(case):
        for first, last, items in segments:
            begin, end = case.problem.visible(request, first, last)
            where = f"{_where(request, head)}, rows {first} to {last}"
            spans = sorted(item.keys for item in items if item.keys[0] < item.keys[1])
            at = begin
            for start, stop in spans:
                if start < 0 or stop > case.problem.kv_lens[request]:
                    return f"{where}: work has keys {start} to {stop - 1}, which are not there"
                if start > at and at < end:
                    return f"{where}: no work has keys {at} to {min(start, end) - 1}"
                if start < at and at > begin and start < end:
                    return f"{where}: keys {start} to {min(at, stop) - 1} are computed twice"
                at = max(at, stop)
            if at < end:
                return f"{where}: no work has keys {at} to {end - 1}"
    return ""


def merging(case: Case) -> str:
    """Judge that each row's partial results are merged once, with nothing of another row."""
    problem, plan = case.problem, case.plan
    for request, head, segments in _requests(case):
        for first, last, items in segments:
            final = sum(item.partial is None for item in items)
            if final and len(items) > 1:
                where = f"{_where(request, head)}, rows {first} to {last}"
                return f"{where}: of {len(items)} works {final} write the result without merging"
    owned = defaultdict[int, list[int]](list)
    for item in plan.items:
        base = problem.query_starts[item.request] * problem.packed
        for row in range(*item.rows) if item.partial is not None else ():
            owned[base + row].append(place_of(item, row, problem.packed))
    places = Counter(place for each in owned.values() for place in each)
    twice = next((place for place, count in places.items() if count > 1), None)
    if twice is not None:
        return f"two works leave their partial result at place {twice}"
    for row in sorted({*owned, *(row for row, merged in plan.merges.items() if merged)}):
        merged, found = plan.merges.get(row, ()), owned.get(row, [])
        if sorted(merged) != sorted(found):
            return f"row {row} is merged of places {_few(merged)}, its parts are at {_few(found)}"
    return ""


def _few(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(values)[:4])) or "none"
    return f"{shown}, ... ({len(values)})" if len(values) > 4 else shown  # noqa: PLR2004


def leftovers(case: Case) -> str:
    """Judge that a plan into used buffers is the plan into fresh ones."""
    second = case.planner.plan(case.problem, after=case.problem.earlier())
    if second.error or second.died:
        return f"a second plan into the same buffers raises: {second.error or 'its process ends'}"
    if second.info != case.answer.info:
        return "a second plan into the same buffers has another vector"
    other = case.read(second)
    for name in ("items", "merges", "merged_rows", "stray"):
        if getattr(other, name) != getattr(case.plan, name):
            return f"a second plan into the same buffers has other {name.replace('_', ' ')}"
    return ""


def chips(case: Case) -> str:
    """Judge that the same batch is covered on a chip of twice as many multiprocessors."""
    other = case.on_a_larger_chip
    if other.refused:
        return ""
    for law in (answers, workspace, padding, description, rows, keys, merging):
        # What breaks a law on each chip is that law's finding, and not one about chips.
        why = "" if law.__name__ in case.without else law(other)
        if why:
            return f"with {other.problem.multiprocessors} multiprocessors: {why}"
    return ""


def replays(case: Case) -> str:
    """Judge that a later plan of a graph fits the launch that was captured.

    The launch has the vector of the plan that was captured: its number of blocks and all offsets.
    """
    problem = case.problem
    # Of a fixed size of parts the wrappers say that a graph is not guaranteed to fit it.
    if not problem.graph or problem.fixed_split:
        return ""
    for each in later_batches(problem):
        if any(left_out(problem, each) for left_out in case.left_out):
            continue
        second = case.planner.plan(each, after=problem)
        if any(advice in second.error for advice in ADVICE):
            continue
        if second.error or second.died:
            return f"a later batch raises: {second.error or 'its process ends'}"
        if second.info != case.answer.info:
            pairs = enumerate(zip(case.answer.info, second.info, strict=True))
            place = next(number for number, (one, other) in pairs if one != other)
            was, now = case.answer.info[place], second.info[place]
            return f"a later batch has {now} at place {place} of the vector, the graph has {was}"
    return ""


def later_batches(problem: PlanProblem) -> Iterator[PlanProblem]:
    """Yield batches for which a graph of a problem may be launched again."""
    later = replace(problem, kv_lens=tuple(keys + 1 + keys // 2 for keys in problem.kv_lens))
    yield later
    if problem.kind == DECODE or problem.promised_rows:
        return
    # One request has all rows of the batch, and all rows that the graph has.
    for rows in dict.fromkeys((sum(problem.query_lens), problem.graph_rows)):
        spare = problem.graph_rows - rows
        most = (rows, *[0] * (len(problem.query_lens) - 1))
        each = replace(later, query_lens=most, spare_rows=spare)
        if not each.promised_rows:  # which would be another call of the plan function
            yield each


def _requests(case: Case) -> Iterator[tuple[int, int, list[Segment]]]:
    """Yield each request and head with its rows in parts, within which all have the same items."""
    heads: Sequence[int] = (ALL_HEADS,)
    if case.problem.kind == FA3 and any(each.head != ALL_HEADS for each in case.plan.items):
        heads = range(case.problem.num_qo_heads)
    by = defaultdict[tuple[int, int], list[Item]](list)
    for item in case.plan.items:
        if item.rows[0] < item.rows[1]:
            by[item.request, item.head].append(item)
    for request in range(len(case.problem.kv_lens)):
        for head in heads:
            yield request, head, _parts(by[request, head])


def _parts(items: list[Item]) -> list[Segment]:
    """Return the rows of some items in parts, within which all rows have the same items."""
    starting, ending = defaultdict[int, list[Item]](list), defaultdict[int, list[Item]](list)
    for item in items:
        starting[item.rows[0]].append(item)
        ending[item.rows[1]].append(item)
    present: dict[int, Item] = {}
    found = list[Segment]()
    for first, end in pairwise(sorted({*starting, *ending})):
        for item in ending[first]:
            present.pop(id(item), None)
        present |= {id(item): item for item in starting[first]}
        if present:
            found.append((first, end - 1, list(present.values())))
    return found


def _where(request: int, head: int) -> str:
    return f"request {request}" if head == ALL_HEADS else f"request {request}, head {head}"


LAWS: tuple[Law, ...] = (
    Law("answers", "A plan exists, or the error says what to do.", answers),
    Law("workspace", "What the kernels use lies in the workspaces, each thing apart.", workspace),
    Law("padding", "Blocks and rows that only a graph has do nothing.", padding),
    Law("description", "What the plan repeats of a request is true.", description),
    Law("rows", "Each query row has work, and no other.", rows),
    Law("keys", "Each key that a row sees is computed once.", keys),
    Law("merging", "Each partial result is merged once, into its own row.", merging),
    Law("leftovers", "A plan into used buffers is as one into fresh ones.", leftovers),
    Law(CHIPS_LAW, "Twice as many multiprocessors cover the same.", chips),
    Law("replays", "A later plan fits the launch that a graph captured.", replays),
)
"""The laws, in the order in which a plan is judged by them."""
NAMES = tuple(law.name for law in LAWS)


def judge(
    case: Case, without: Sequence[str] = (), excused: Collection[str] = ()
) -> tuple[str, str]:
    """Return the first law that a plan breaks and why; two empty texts where it breaks none.

    A refused problem breaks none, and of a plan that is not there nothing else is judged.

    Args:
        case: the plan.
        without: laws that have a finding already.
        excused: laws that a known finding explains on this plan.
    """
    case.without = without
    for law in LAWS:
        if case.refused or (case.answer.error and law.name != "answers"):
            break
        why = law.judge(case) if law.name not in (*without, *excused) else ""
        if why:
            return law.name, why
    return "", ""


def broken(case: Case) -> list[str]:
    """Return the names of all laws that a plan breaks."""
    if case.answer.error or case.answer.died:
        return [] if case.refused else ["answers"]
    return [law.name for law in LAWS if law.judge(case)]
