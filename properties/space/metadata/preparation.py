"""Drawing problems of preparing batches."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from ....reference import BatchProblem
from ....reference.attention.drafts import LONGEST_MODEL
from ....reference.attention.preparation import OUTPUTS
from ....reference.attention.splits import USUAL_SPLITS
from ....reference.problems.preparation import BRANCHED, KEYS_OF_WORK
from ..attention_strategies import lengths
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled
from .axes import SHIFTED, is_verified
from .strategies import NEW_TOKENS

MOST_KEYS = 4200
"""Most keys of a request: more than the 4096 that the widest block of the kernels covers."""
MOST_REQUESTS, MOST_STEPS, MOST_SPARE_ROWS = 6, 4, 7
MOST_DRAFTS = 9
"""Most tokens that are verified at once, and drafted."""
MOST_KEYS_OF_A_MASK = 1024
"""Most keys of a request whose mask, or tree, has an entry for each token and key."""
MOST_KEYS_OF_BRANCHES = 1300
"""Most keys of a request whose every branch has an entry for each key, of every step."""
FEW_BRANCHED, FEW_DRAFTS = 2, (1, 2, 3)
"""Most requests that have branches where there are few requests, and their drafts: kernels launch
a program for each branch of each draft, which takes milliseconds interpreted."""
TREES = ("tree_mask", "tree_positions", "first_children", "next_siblings", "packed_mask")
"""Outputs for which few tokens are verified at once."""
SPLITS = (tuple(USUAL_SPLITS), (8, 8, 16, 132), (64, 2, 8, 108), (40, 8, 1, 148), (96, 1, 64, 8))
"""Heads, key-value heads, most parts and cores: groups of one head, of few, and of more than 16."""
BRANCHES = ((1, 0, 0), (2, 0, 0), (4, 0, 0), (1, 64, 0), (3, 1, 0), (2, 128, 4), (8, 600, 2))
"""Branches that are drafted of a request, last keys that each of them sees, and first ones."""


def narrow_tables(axes: Axes) -> list[BatchProblem]:
    """Return a batch for each table, whose requests have one page: few drawn ones have no more."""
    size = max(axes.allows("page_size"))
    steps = (((1, 2), (1, size)), ((1,), (size,))) if size > 1 else (((1, 1), (1, 1)),)
    window = axes.allows("window_left")[0]
    return [
        BatchProblem(output, steps, page_size=size, rest=rest, window_left=window)
        for output, rest in axes.allows("outputs")
        if OUTPUTS[output].is_table and not is_verified(output)
    ]


def few_rows(problem: BatchProblem) -> BatchProblem:
    """Return a problem with few spare rows of a table: some kernels launch a program for each."""
    if not OUTPUTS[problem.output].is_table:
        return problem
    return replace(problem, spare_entries=min(problem.spare_entries, MOST_SPARE_ROWS))


@st.composite
def draft_problems(
    draw: st.DrawFn, problem: BatchProblem, most_keys: int, axes: Axes
) -> BatchProblem:
    """Draw batches of requests whose drafts are verified, in place of those of a problem."""
    width = draw(st.integers(1, MOST_DRAFTS))
    # Most engines' kernels ask that each request has a token, and keeps one.
    least, may_be_whole = draw(sampled((*[(1, False)] * 4, (0, False), (0, True))))
    least = 1 if problem.output == "num_kv_splits" else least
    are_alike = draw(st.booleans())
    news = st.just(width) if are_alike else st.integers(least, width)
    is_matrix = problem.output in TREES
    most_keys = min(most_keys, MOST_KEYS_OF_A_MASK) if is_matrix else most_keys
    is_branched = problem.output in BRANCHED
    if is_branched:
        most_keys = min(most_keys, MOST_KEYS_OF_BRANCHES)
    if not are_alike and not is_matrix and draw(st.booleans()):
        news |= sampled((*NEW_TOKENS, most_keys))
    befores = st.just(0) | st.integers(1, 2) | lengths(most_keys, problem.page_size)
    if problem.output == "num_kv_splits" and draw(st.booleans()):  # all are almost as long
        longest = draw(st.integers(min(64, most_keys), most_keys))
        befores = st.integers(longest - longest // 6, longest)

    @st.composite
    def requests(draw: st.DrawFn) -> tuple[int, int, int]:
        tokens, before = draw(news), draw(befores)
        before = max(min(before, most_keys - tokens), 0)
        most = tokens if may_be_whole else max(tokens - 1, 0)
        return tokens, tokens + before, draw(st.integers(0, min(most, MOST_DRAFTS)))

    padding = st.lists(st.just((0, 0, 0)), max_size=0 if least else 2)
    most = axes.max_requests or MOST_REQUESTS
    drafts: tuple[int, ...] = (1, 2, 3, 7, MOST_DRAFTS, 0)
    if axes.max_requests and is_branched:
        most, drafts = FEW_BRANCHED, FEW_DRAFTS
    step = st.builds(list.__add__, st.lists(requests(), max_size=most), padding)
    steps = draw(st.lists(step, min_size=1, max_size=axes.max_steps or MOST_STEPS))
    longest = max((keys for step in steps for _, keys, _ in step), default=0)
    if is_branched:
        problem = replace(problem, branches=draw(sampled(BRANCHES)))
    return replace(
        problem,
        steps=tuple((tuple(t for t, _, _ in step), tuple(s for _, s, _ in step)) for step in steps),
        rejected=tuple(tuple(j for _, _, j in step) for step in steps),
        drafts=draw(sampled(drafts)),
        is_shifted=problem.output in SHIFTED or draw(st.booleans()),
        is_tree=draw(st.booleans()),
        splits=draw(sampled(SPLITS)),
        max_model_len=draw(sampled((LONGEST_MODEL, max(longest, 1), max(longest - 1, 1)))),
    )


@st.composite
def batch_problems(draw: st.DrawFn, axes: Axes) -> BatchProblem:
    """Draw a sequence of batches of decodes, prefills and chunks, for one of the outputs."""
    output, rest = draw(sampled(axes.allows("outputs")))
    page_size = draw(sampled(axes.allows("page_size")))
    window = draw(sampled(axes.allows("window_left")))
    spare = draw(sampled(axes.allows("spare_entries")))
    world, interleave = draw(st.sampled_from((2, 3, 8))), draw(st.sampled_from((1, 2, 4, 16)))
    group = world * interleave if output == "local_seq_lens" else 1
    blocks = axes.max_work // (4 * MOST_REQUESTS)
    cap = max(min(blocks * KEYS_OF_WORK, MOST_KEYS), 2)
    keys = st.integers(1, 2) | lengths(cap, page_size) | lengths(cap, group)
    request = st.tuples(sampled((*NEW_TOKENS, 0)), keys).map(lambda pair: (min(pair), pair[1]))
    padding = st.lists(st.just((0, 0)), max_size=2)
    most = axes.max_requests or MOST_REQUESTS
    step = st.builds(list.__add__, st.lists(request, max_size=most), padding)
    steps = draw(st.lists(step, min_size=1, max_size=axes.max_steps or MOST_STEPS))
    if cap < MOST_KEYS and draw(sampled((False, False, True))):  # work for one long request
        longest = draw(lengths(min(axes.max_work * KEYS_OF_WORK, MOST_KEYS), page_size))
        # Of what has an entry for each new token every other one is a whole prefill, of blocks.
        is_prefill = OUTPUTS[output].size == "tokens" and longest % 2
        steps = [[(longest if is_prefill else 1, longest)]]
    if is_verified(output):  # drawn anew below
        steps = [[(1, 1)]]
    problem = BatchProblem(
        output=output,
        steps=tuple((tuple(t for t, _ in step), tuple(s for _, s in step)) for step in steps),
        page_size=page_size,
        rest=rest,
        window_left=window,
        world=world if group > 1 else 1,
        rank=draw(st.integers(0, world - 1)) if group > 1 else 0,
        interleave=interleave if group > 1 else 1,
        spare_rows=draw(st.integers(0, 3)),
        spare_columns=draw(st.integers(0, 3)),
        spare_entries=spare,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )
    problem = few_rows(problem)
    return draw(draft_problems(problem, cap, axes)) if is_verified(output) else problem
