"""Into how many parts SGLang's Triton attention divides the keys of each request, by definition."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

WIDEST_BLOCK: Final = 16
"""Most query heads of one key-value head that a program takes."""
GROWING_FROM: Final = 64
"""Keys of the longest request from which on more programs are planned than there are cores."""


class Splits(NamedTuple):
    """What the numbers of parts depend on, beside the lengths.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key-value heads.
        most: most parts of a request.
        cores: multiprocessors of the GPU.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    most: int = 8
    cores: int = 132


USUAL_SPLITS: Final = Splits()
"""What numbers of parts depend on where nothing else is said."""


def num_kv_splits(seq_lens: list[int], queries: int, splits: Splits) -> list[int]:
    """Return the parts of each request's keys.

    The longest request has as many parts as the shortest fits into it, one where it is longer by
    less than a quarter; parts of that size are the others', too. Where cores are idle then, the
    parts are smaller, so that each core has a program.

    Args:
        seq_lens: keys of the requests, one at least each.
        queries: query tokens of each request.
        splits: what the numbers depend on.

    Raises:
        ValueError: a request has no key.
    """
    if not seq_lens:
        return []
    longest, shortest = max(seq_lens), min(seq_lens)
    if shortest < 1:
        request = seq_lens.index(shortest)
        message = f"seq_lens[{request}] is {shortest}; a request to divide has a key"
        raise ValueError(message)
    if 8 * longest < 10 * shortest:  # as long as each other, almost
        shortest = longest
    by_length = min(-(-longest // shortest), splits.most)
    group = splits.num_heads // splits.num_kv_heads
    programs = len(seq_lens) * queries * -(-splits.num_heads // min(WIDEST_BLOCK, group))
    by_cores = min(-(-int(planned(longest, splits.cores)) // programs), splits.most)
    chunks = [-(-longest // parts) for parts in (by_length, by_cores)]
    return [max(-(-length // chunk) for chunk in chunks) for length in seq_lens]


def planned(longest: int, cores: int) -> float:
    """Return how many programs are planned for: more than cores for long requests, in float32."""
    growth = torch.log2(torch.tensor(longest / GROWING_FROM, dtype=torch.float32))
    return float(cores * growth.clamp(min=1.0))
