"""How many programs share the keys of a tile: a decode of one request would fill eight of them."""

from __future__ import annotations

from .support import ceil_div

FEWEST_KEYS = 64
"""Keys a split, at least: one block."""
ALWAYS_WORTH, KEYS_WORTH_ONE_MORE = 16, 512
"""Merging sixteen states pays from sixteen blocks of keys on, and each further one from 512 keys on
(measured on an H200 with one request of 1,024 to 32,768 keys)."""
NEARLY = 1.1
"""What more splits must gain: fewer have less to merge."""


def most_splits(keys: int) -> int:
    """Return the most splits that pay for a request with this number of keys; at least 1."""
    worth = max(ALWAYS_WORTH, keys // KEYS_WORTH_ONE_MORE)
    return max(1, min(ceil_div(keys, FEWEST_KEYS), worth))


def splits_that_fill(programs: int, room: int, most: int) -> int:
    """Choose the fewest splits with which the programs take nearly the least time.

    Programs run in waves, the last of which takes as long as a full one; more splits make them
    shorter.

    Args:
        programs: how many there are without splits.
        room: how many the GPU runs at the same time.
        most: splits that the keys are worth.
    """

    def time(splits: int) -> float:
        return ceil_div(programs * splits, room) / splits

    least = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if time(splits) <= NEARLY * least)
