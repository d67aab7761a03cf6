"""Which keys a query row sees, where masks have a structure: spans, chunks, dilation, first keys.

Positions are those of a request: its keys are 0 to S - 1, and its query row i of T is at i + S - T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .alibi import Span
from .options import Options


def structured(options: Options) -> bool:
    """Whether a row may see other keys than those between two ends, a custom mask aside."""
    return (
        options.spans is not None
        or options.attention_chunk_size > 0
        or options.window_dilation > 1
        or options.sink_tokens > 0
    )


def seen_range(
    options: Options, spans: Sequence[Span], positions: range, num_keys: int, *, causal: bool
) -> range:
    """Return a range of keys that has all that queries at some positions see.

    Args:
        options: the options of the call.
        spans: the spans of the request.
        positions: the positions of the queries; some may be negative.
        num_keys: number of keys of the request.
        causal: whether the request is.
    """
    if not positions:
        return range(0)
    first, last = positions[0], positions[-1]
    start, stop, chunk = 0, num_keys, options.attention_chunk_size
    if causal:
        stop = min(stop, last + 1)
    if options.window_right >= 0:
        stop = min(stop, last + options.window_right + 1)
    if options.window_left >= 0:
        start = max(start, first - options.window_left)
    firsts_stop = min(options.sink_tokens, stop)
    if chunk:
        start, stop = max(start, first // chunk * chunk), min(stop, (last // chunk + 1) * chunk)
    ends = [(start, stop), (0, firsts_stop)]
    ends += [span for span in spans if span[0] <= last and first < span[1]]
    ends = [(a, min(b, num_keys)) for a, b in ends if a < min(b, num_keys)]
    if not ends:
        # Nothing is seen: an empty range, where the one of rows in between would be.
        start = min(max(start, 0), max(stop, 0))
        return range(start, start)
    return range(max(min(a for a, _ in ends), 0), max(b for _, b in ends))


def seen(
    options: Options,
    position: torch.Tensor,
    key: torch.Tensor,
    causal: torch.Tensor,
    spans: torch.Tensor | None,
) -> torch.Tensor:
    """Return which keys queries see, a custom mask aside.

    Args:
        options: the options of the call.
        position: [N, rows, 1] int64, of queries.
        key: [N, 1, S'] int64, positions of keys.
        causal: [N, 1, 1] bool.
        spans: [N, n, 2] int64; None where there are none.

    Returns:
        Bool [N, rows, S'].
    """
    distance = position - key
    near = torch.ones_like(distance, dtype=torch.bool)
    if options.window_left >= 0:
        near &= distance <= options.window_left
    if options.attention_chunk_size:
        chunk = options.attention_chunk_size
        near &= position.div(chunk, rounding_mode="floor") == key // chunk
    if options.window_dilation > 1:
        near &= distance % options.window_dilation == 0
    if options.sink_tokens:
        near |= key < options.sink_tokens
    near &= ~causal | (distance >= 0)
    if options.window_right >= 0:
        near &= distance >= -options.window_right
    if spans is not None:
        for ends in spans.unbind(1):
            start, stop = (each.view(-1, 1, 1) for each in ends.unbind(1))
            both = (position >= start) & (position < stop) & (key >= start) & (key < stop)
            if options.spans_in_window and options.window_left >= 0:
                both &= distance <= options.window_left
            near |= both
    return near
