"""Recording which lines of Triton kernels run within a block of code, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...impl.gpu import kernel_lines
from ...impl.gpu.kernel_lines import FileRecord


@dataclass
class Recording:
    """What ran.

    Attributes:
        files: the record of each file with ``@triton.jit`` functions that ran.
    """

    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def lines(self) -> dict[str, frozenset[int]]:
        """Lines of statements that Triton's interpreter ran, by file."""
        return {
            file: frozenset(kernel_lines.lines_of(int(record["ran"] or "0", 16)))
            for file, record in self.files.items()
        }


@contextmanager
def recording() -> Iterator[Recording]:
    """Record which lines of kernels run within a with block; the record is filled at its end.

    Kernels are seen from the first call of ``Subject`` on, see ``hasten``.
    """
    found = Recording()
    kernel_lines.clear()
    try:
        yield found
    finally:
        found.files = kernel_lines.recorded()
