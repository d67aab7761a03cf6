"""Results that are kept, without traces and paths of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...properties.isolation.outcome import is_forceful

OF_ONE_MACHINE: tuple[str, ...] = ("trace", "printed", "replay")
"""Fields that name files and processes of the machine that ran."""
OF_RIGHT_CELLS = ("problem", "called", "meaning", "kind", "message")
"""Fields of a cell that was right, of which there are hundreds: the problem's id is enough."""
OF_THE_CALL = ("problem_id", "called", "meaning")
"""Fields that hold a call beside its problem. Of a hang or crash nothing is kept that could harm
the software of others."""
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+@~-]+/)+([\w.+@~-]*)")


def as_evidence(data: Any) -> Any:  # noqa: ANN401  JSON
    """Return results without traces, replay commands and paths of the machine."""
    if isinstance(data, dict):
        left_out = OF_ONE_MACHINE
        if "cell" in data and (data["outcome"], data["status"]) == ("right", "ok"):
            left_out += OF_RIGHT_CELLS
        if _is_forceful(data):
            data, left_out = {**data, "problem": None}, left_out + OF_THE_CALL
        return {key: as_evidence(value) for key, value in data.items() if key not in left_out}
    if isinstance(data, (list, tuple)):
        return [as_evidence(value) for value in data]
    return _PATH.sub(r"\1", data) if isinstance(data, str) else data


def _is_forceful(result: Mapping[str, Any]) -> bool:
    """Whether a result, or that of one of two releases, is a hang or a crash that nobody raised."""
    sides = (result, result.get("baseline"), result.get("candidate"))
    return bool(result.get("problem")) and any(
        isinstance(each, Mapping) and is_forceful(str(each.get("kind", ""))) for each in sides
    )
