"""Results that are kept, without traces and paths of the machine."""

from __future__ import annotations

import re
from typing import Any

OF_ONE_MACHINE: tuple[str, ...] = ("trace", "printed", "replay")
"""Fields that name files and processes of the machine that ran."""
OF_RIGHT_CELLS = ("problem", "called", "meaning", "kind", "message")
"""Fields of a cell that was right, of which there are hundreds: the problem's id is enough."""
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+@~-]+/)+([\w.+@~-]*)")


def as_evidence(data: Any) -> Any:  # noqa: ANN401  JSON
    """Return results without traces, replay commands and paths of the machine."""
    if isinstance(data, dict):
        left_out = OF_ONE_MACHINE
        if "cell" in data and (data["outcome"], data["status"]) == ("right", "ok"):
            left_out += OF_RIGHT_CELLS
        return {key: as_evidence(value) for key, value in data.items() if key not in left_out}
    if isinstance(data, (list, tuple)):
        return [as_evidence(value) for value in data]
    return _PATH.sub(r"\1", data) if isinstance(data, str) else data
