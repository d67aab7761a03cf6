"""The laws of planning, by coverage: they say what a plan must achieve, and never how.

No law calculates a plan. Each follows the blocks of the plan that it is given and counts what they
compute: every query row, each key that it sees once, each partial result merged once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from ....reference import PlanProblem
from ....reference.problems.plan import DECODE, FA3, MOST
from ....reference.tensors.plan import FLOAT_BYTES, INT_BYTES, LAYOUTS, PlanInputs
from ....reference.tensors.planner import plan
from ...verdicts.comparison import fail
from ...verdicts.contained import Stop
from ...verdicts.subject import Subject
from ...verdicts.verdict import PASS, VACUOUS, Verdict
from ..law import PLAN, Law, chosen
from .plan_reading import ALL_HEADS, INT, Extent, Item, Plan, place_of, read_plan

LITTLE = 4
"""Share of the workspaces that any plan has room in, if the oracle's takes less."""
BYTES, VECTOR = ("block_valid_mask",), 16
"""Arrays of bytes; and the bytes that are loaded at once of partial results."""

Segment = tuple[int, int, list[Item]]
"""First and last packed row of a part of a request, and the items that compute it."""


@dataclass(frozen=True)
class Case:
    """A plan of one batch.

    Attributes:
        problem: the batch.
        vector: the plan's vector.
        workspace: what it wrote of integers, on the host.
        spilled: whether a byte behind a workspace was written.
    """

    problem: PlanProblem
    vector: tuple[int, ...]
    workspace: torch.Tensor
    spilled: bool

    @cached_property
    def plan(self) -> Plan:
        """The plan as its kernels read it."""
        return read_plan(self.problem, self.vector, self.workspace)

    @cached_property
    def broken_workspace(self) -> str:
        """Why what the kernels use does not lie in the workspaces; empty where it does."""
        return workspace(self)


def planned(
    subject: Subject, problem: PlanProblem, inputs: PlanInputs | None = None
) -> Case | None:
    """Return a plan of a batch; None where the plan function says that it has no room for one.

    Raises:
        Stop: what it returned is no plan.
    """
    inputs = subject.materialise(problem) if inputs is None else inputs
    result = subject.call(problem, inputs)
    found = subject.read(lambda given: given if isinstance(given, torch.Tensor) else None, result)
    if found is None:
        raise Stop(fail("shape", f"the result is a {type(result).__name__}, not a tensor"))
    found = subject.usable("vector", found)
    if found.dtype != torch.int64:
        raise Stop(fail("dtype", f"the vector is {found.dtype}, not int64"))
    if tuple(found.shape) == (0,):
        return None
    wanted = (len(LAYOUTS[problem.family]),)
    if tuple(found.shape) != wanted:
        raise Stop(fail("shape", f"the vector has shape {tuple(found.shape)}, not {wanted}"))
    spilled = any(
        (each[INT_BYTES:] != problem.garbage).any() for each in (inputs.workspace, inputs.pinned)
    )
    integers = inputs.workspace[:INT_BYTES].cpu().clone()
    return Case(problem, tuple(found.tolist()), integers, spilled)


Judge = Callable[[Case], str]
"""Returns why a plan breaks a law, in a sentence; empty where it holds."""


def _of_one_plan(judge: Judge) -> Callable[[Subject, PlanProblem], Verdict]:
    """Return the law that judges one plan; one whose arrays overlap is no plan to be read."""

    def judged(subject: Subject, problem: PlanProblem) -> Verdict:
        case = planned(subject, problem)
        if case is None:
            return _no_room(subject, problem) if judge is workspace else VACUOUS
        if judge is not workspace and case.broken_workspace:
            return VACUOUS
        return _verdict(judge(case), "wrote_outside" if judge is workspace else "numeric")

    judged.__doc__ = judge.__doc__
    return judged


def _no_room(subject: Subject, problem: PlanProblem) -> Verdict:
    """Judge a plan function that says it has no room, by how much of it the oracle's plan takes."""
    if problem.graph and problem.fixed_split:  # of which no graph promises that it fits
        return VACUOUS
    inputs = subject.materialise(problem)
    vector = tuple(plan(inputs).tolist())
    own = Case(problem, vector, inputs.workspace[:INT_BYTES].cpu().clone(), spilled=False)
    used = ((own.plan.integers, INT_BYTES), (own.plan.floats, FLOAT_BYTES))
    if any(each.stop > size // LITTLE for extents, size in used for each in extents):
        return VACUOUS
    return fail("numeric", f"no room for a plan that takes less than 1/{LITTLE} of the workspaces")


def _verdict(why: str, kind: str = "numeric") -> Verdict:
    return fail(kind, why) if why else PASS


def workspace(case: Case) -> str:
    """Judge that what the kernels use lies in the workspaces, and nothing of it in one place."""
    if case.spilled:
        return "the plan wrote behind a workspace of integers"
    pairs = ((case.plan.integers, INT_BYTES, INT), (case.plan.floats, FLOAT_BYTES, VECTOR))
    return next(filter(None, (_outside(*pair) for pair in pairs)), "")


def _outside(used: Sequence[Extent], size: int, aligned: int) -> str:
    extents = sorted((each for each in used if each.start != each.stop), key=lambda e: e.start)
    for each in extents:
        if each.start < 0 or each.stop > size:
            return f"{each.name} is bytes {each.start} to {each.stop} of {size}"
        if each.start % aligned and each.name not in BYTES:
            return f"{each.name} begins at byte {each.start}, which is no multiple of {aligned}"
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


def leftovers(subject: Subject, problem: PlanProblem) -> Verdict:
    """Check that a plan into used buffers is the plan into fresh ones."""
    before = problem.earlier()
    first = planned(subject, problem)
    if first is None or first.broken_workspace or not subject.supports(before):
        return VACUOUS
    second = _planned_after(subject, problem, before)
    if second is None:
        return fail("numeric", "a second plan into the same buffers has no room")
    if second.vector != first.vector:
        return fail("numeric", "a second plan into the same buffers has another vector")
    for name in ("items", "merges", "merged_rows", "stray"):
        if getattr(second.plan, name) != getattr(first.plan, name):
            other = name.replace("_", " ")
            return fail("numeric", f"a second plan into the same buffers has other {other}")
    return PASS


def _planned_after(subject: Subject, problem: PlanProblem, before: PlanProblem) -> Case | None:
    """Return a plan into the buffers that another batch was planned into; None without room."""
    inputs = subject.materialise(before)
    subject.call(before, inputs)
    for each in (inputs.workspace, inputs.pinned):  # what lies behind is judged of one plan only
        each[INT_BYTES:] = problem.garbage
    return planned(subject, problem, replace(inputs, call=problem))


def chips(subject: Subject, problem: PlanProblem) -> Verdict:
    """Check that the same batch is covered on a chip of twice as many multiprocessors."""
    if 2 * problem.multiprocessors > MOST:
        return VACUOUS
    larger = replace(problem, multiprocessors=2 * problem.multiprocessors)
    if not subject.supports(larger):
        return VACUOUS
    case, other = planned(subject, problem), planned(subject, larger)
    if case is None or other is None or case.broken_workspace:
        return VACUOUS
    for judge in (workspace, padding, description, rows, keys, merging):
        # What breaks a law on each chip is that law's finding, and not one about chips.
        if why := judge(other):
            larger_one = f"with {larger.multiprocessors} multiprocessors: {why}"
            return VACUOUS if judge(case) else _verdict(larger_one)
    return PASS


def replays(subject: Subject, problem: PlanProblem) -> Verdict:
    """Check that a later plan of a graph fits the launch that was captured.

    The launch has the vector of the plan that was captured: its number of blocks and all offsets.
    """
    # Of a fixed size of parts the wrappers say that a graph is not guaranteed to fit it.
    if not problem.graph or problem.fixed_split:
        return VACUOUS
    first, verdict = planned(subject, problem), VACUOUS
    for each in later_batches(problem) if first is not None else ():
        if not subject.supports(each):
            continue
        second = _planned_after(subject, each, problem)
        if first is None or second is None:
            continue
        verdict = PASS
        names = LAYOUTS[problem.family]
        for name, was, now in zip(names, first.vector, second.vector, strict=True):
            if was != now:
                why = f"a later batch of {each.query_lens} query tokens has {name} {now}"
                return fail("numeric", f"{why}, the graph has {was}")
    return verdict


def later_batches(problem: PlanProblem) -> Iterator[PlanProblem]:
    """Yield batches for which a graph of a problem may be launched again."""
    later = replace(problem, kv_lens=problem.longer(lambda keys: keys + 1 + keys // 2))
    yield later
    if problem.family == DECODE or problem.promised_rows:
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
    if case.problem.family == FA3 and any(each.head != ALL_HEADS for each in case.plan.items):
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


LAWS = (
    # A run searches them in this order: those that see most faults come first.
    Law(
        "plan_merging",
        PLAN,
        _of_one_plan(merging),
        "each partial result is merged once, into its own row",
    ),
    Law(
        "plan_workspace",
        PLAN,
        _of_one_plan(workspace),
        "what the kernels use lies in the workspaces, each thing apart",
    ),
    Law("plan_keys", PLAN, _of_one_plan(keys), "each key that a row sees is computed once"),
    Law(
        "plan_padding",
        PLAN,
        _of_one_plan(padding),
        "blocks and rows that only a graph has do nothing",
    ),
    Law("plan_rows", PLAN, _of_one_plan(rows), "each query row has work, and no other"),
    Law(
        "plan_description",
        PLAN,
        _of_one_plan(description),
        "what the plan repeats of a request is true",
    ),
    Law("plan_leftovers", PLAN, leftovers, "a plan into used buffers is as one into fresh ones"),
    Law("plan_chips", PLAN, chips, "twice as many multiprocessors cover the same"),
    Law(
        "plan_replays",
        PLAN,
        replays,
        "a later plan fits the launch that a graph captured",
        looks_at=({"graph": chosen},),
    ),
)
