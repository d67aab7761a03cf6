"""The process that has one release of FlashInfer on its path: a fault in it ends it, and no other.

It reads the number of a published call a line and writes what is found of it as JSON.

    python -m kernelproof.ci.published.host DEVICE SEED
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from typing import Any


def main() -> None:
    """Answer questions until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    device, seed = sys.argv[1], int(sys.argv[2])
    # What libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    import flashinfer
    import torch

    from .judging import judge
    from .release import read_release

    torch.set_num_threads(1)
    release = read_release()
    names = [{"name": each.name, "api": each.api, "lacks": each.lacks} for each in release]
    say({"version": flashinfer.__version__, "chip": _chip(device), "calls": names})
    for line in sys.stdin:
        published = release[int(line)]
        try:
            found = judge(published, device, seed)
        except Exception as error:  # noqa: BLE001  else the host ends with it
            traceback.print_exc()
            found = {
                "name": published.name,
                "api": published.api,
                "problems": [],
                "state": "unasked",
                "why": f"{type(error).__name__}: {str(error).strip()[:160]}",
            }
        lost = device == "cuda" and _lost()
        say({**found, "lost": lost, **({"state": "ended"} if lost else {})})
        if lost:
            return


def _chip(device: str) -> int:
    """Return the compute capability of the device, times ten; 0 of a CPU."""
    import torch

    if device == "cpu":
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _lost() -> bool:
    """Whether the process has lost its device, as after an access outside of memory."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
