"""The number of splits of split-KV attention: how many programs share the keys of one request.

Without splits a decode of one request runs on as few programs as it has key-value heads.
"""

from __future__ import annotations

from .support import ceil_div

FEWEST_KEYS = 64
"""Fewest keys of a split: one block."""
# Measured on an H200 with one request of 1,024 to 32,768 keys.
ALWAYS_WORTH = 16
"""Number of splits that pay as soon as each has its fewest keys."""
KEYS_WORTH_ONE_MORE = 512
"""Keys that each split needs where there are more splits than that."""
NEARLY = 1.1
"""Ratio to the least time up to which fewer splits are preferred: they leave less to merge."""


def most_splits(keys: int) -> int:
    """Return the most splits that pay for a request with this number of keys; at least 1."""
    worth = max(ALWAYS_WORTH, keys // KEYS_WORTH_ONE_MORE)
    return max(1, min(ceil_div(keys, FEWEST_KEYS), worth))


def splits_that_fill(programs: int, room: int, most: int) -> int:
    """Return the fewest splits with which the programs take nearly the least time.

    Programs run in waves, and the last wave takes as long as a full one. More splits make each
    wave shorter.

    Args:
        programs: number of programs without splits.
        room: number of programs that the GPU runs at the same time.
        most: most splits that pay for the keys.
    """

    def time(splits: int) -> float:
        return ceil_div(programs * splits, room) / splits

    least = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if time(splits) <= NEARLY * least)
