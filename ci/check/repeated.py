"""Whether a check seems to repeat the one before it, by what is known without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..answers.identity import code_identity

PASSED = "passed-"
"""Beginning of the names of files that hold what passed in a check."""
OPTIONS = ("seed", "device", "operation")
"""Options that the identity of a check holds as they were given."""


def seems_repeated(given: Mapping[str, Any]) -> bool:
    """Whether a check passed that was asked for the same, and of whose code nothing has changed.

    Then most likely nothing is asked of workers. A wrong answer costs time only.

    Args:
        given: the values of the command's options and its implementations, by name.
    """
    reuse = given["reuse"] and not given["resume"]
    files = [*given["cases"].glob(f"{PASSED}*.jsonl")] if reuse else []
    with suppress(LookupError, OSError, ValueError):  # what is wrong is said by who needs it
        code = code_identity(given["implementations"]) if files else {}
        asked = {
            **code,
            "implementations": list(given["implementations"]),
            "laws": list(given["laws"]),
            **{name: given[name] for name in OPTIONS},
        }
        for file in files:
            with file.open(encoding="utf-8") as lines:
                known = json.loads(next(lines, "{}")).get("identity", {})
            named = f"Profile(name={given['profile']!r}"
            if known.get("profile", "").startswith(named) and asked.items() <= known.items():
                return True
    return False
