"""The command ``kernelproof``, also as ``python -m kernelproof``.

The commands need packages that the oracle does not. Where one is missing, this says so in one
sentence instead of a traceback.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line; exit with status 2 where the extra ``suite`` is not installed."""
    # What is imported is no garbage: to look for some took a quarter of the start.
    gc.set_threshold(100_000, 20, 20)
    try:
        # Imported here: the import itself is what fails without the extra.
        from .ci.cli import main as command

        sys.exit(command())
    except ModuleNotFoundError as error:
        from .fixtures.suggestions import missing_of_suite

        if not (why := missing_of_suite(error)):
            raise
        sys.stderr.write(f"kernelproof: the commands need {why}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
