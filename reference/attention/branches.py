"""Keys of the branches that are drafted behind a request, in SGLang's layout, by definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple


class Branches(NamedTuple):
    """Branches that are drafted, and what each of their tokens sees of a request.

    Attributes:
        topk: branches of each request.
        window: last keys of a request that a branch sees; 0: all.
        sinks: first keys of a request that a branch sees beside a window.
    """

    topk: int = 1
    window: int = 0
    sinks: int = 0

    def seen(self, keys: int) -> list[int]:
        """Return the keys of a request that a branch sees."""
        if not self.window or keys <= self.window + self.sinks:
            return list(range(keys))
        return [*range(self.sinks), *range(keys - self.window, keys)]

    def room(self, keys: int, steps: int, page_size: int) -> int:
        """Return how many keys behind a request's one branch has room for.

        Several branches have pages of their own, where a page has several keys: each begins in a
        copy of the request's last page, at the place behind the request's keys.
        """
        if self.topk == 1:
            return steps
        return -(-(keys % page_size + steps) // page_size) * page_size

    def drafted(self, keys: int, steps: int, page_size: int) -> Iterator[range]:
        """Yield the positions of each branch's tokens.

        Args:
            keys: the keys of a request, behind which its branches lie.
            steps: tokens of each branch.
            page_size: keys a page.
        """
        room = self.room(keys, steps, page_size)
        for branch in range(self.topk):
            yield range(keys + branch * room, keys + branch * room + steps)


ONE_BRANCH: Final = Branches()
"""A chain, which sees all keys."""
