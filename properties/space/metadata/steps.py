"""Drawing what happens to an engine, step after step.

A problem is the whole list of events, drawn at once, and no ``RuleBasedStateMachine``: a state
machine of Hypothesis calls what it tests while it draws, in its own process, and its failure is no
problem that a worker can be asked again, that shrinks across a hang, or that lies in a file.
Every list of events is a problem, so that shrinking takes out any of them.
"""

from __future__ import annotations

from hypothesis import strategies as st

from ....reference import StepsProblem
from ..attention_strategies import lengths
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled

MOST_KEYS = 600
"""Most tokens of a prompt: more than the 512 keys that the kernels of pools take at once."""
FEW_EVENTS, MOST_EVENTS, WORK_OF_AN_EVENT = 24, 60, 40
"""Most events of a problem of a slow implementation and of others, and the work of one."""
OFTEN = 4
"""Times that a step is run as often as anything else happens."""


@st.composite
def steps_problems(draw: st.DrawFn, axes: Axes) -> StepsProblem:
    """Draw events, of which the first two let a request arrive, and run a step."""
    page_size = draw(sampled(axes.allows("page_size")))
    most = max(FEW_EVENTS, min(axes.max_work // WORK_OF_AN_EVENT, MOST_EVENTS))
    prompt = st.integers(1, 9) | lengths(MOST_KEYS, page_size)
    drafts, number = st.integers(1, 4), st.integers(0, 5)
    numbers: dict[str, st.SearchStrategy[int]] = {
        "run": st.sampled_from((0, 0, 0, 1, 2, 5, 64)),
        "arrive": prompt,
        "finish": number,
        "share": prompt,
        "draft": drafts,
        "reject": drafts,
        "pad": st.integers(1, 3),
        "preempt": number,
    }
    words = st.sampled_from((*["run"] * OFTEN, *numbers, "draft", "reject"))
    event = words.flatmap(lambda word: numbers[word].map(f"{word} {{}}".format))
    begins = [f"{word} {draw(numbers[word])}" for word in ("arrive", "run")]
    # Lists are short by themselves: what a step leaves behind shows several steps later.
    least = draw(st.sampled_from((0, most // 2, most)))
    return StepsProblem(
        engine=draw(sampled(axes.allows("engine"))),
        events=(*begins, *draw(st.lists(event, min_size=least, max_size=most))),
        page_size=page_size,
        spare=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, LARGEST_SEED)),
    )
