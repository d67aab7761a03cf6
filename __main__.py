"""The command ``kernelproof``, also as ``python -m kernelproof``.

The commands need packages that the oracle does not. Where one is missing, this says so in one
sentence instead of a traceback.
"""

from __future__ import annotations

import gc
import sys

# What the extra `suite` installs, by import name.
SUITE_MODULES = frozenset(
    {
        *("click", "griffe", "hypothesis", "jinja2", "msgspec", "packaging", "pytest", "rich"),
        *("tomli", "tomlkit", "xdist"),
    }
)


def main() -> None:
    """Run the command line; exit with status 2 where the extra ``suite`` is not installed."""
    # What is imported is no garbage: to look for some took a quarter of the start.
    gc.set_threshold(100_000, 20, 20)
    try:
        # Imported here: the import itself is what fails without the extra.
        from .ci.cli import main as command

        sys.exit(command())
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SUITE_MODULES:
            raise
        sys.exit(_explain(missing))


def _explain(missing: str) -> int:
    from .fixtures.suggestions import how_to_install

    sys.stderr.write(
        f"kernelproof: the commands need the package {missing}, which is not installed; "
        f"{how_to_install('suite')} brings it\n"
    )
    return 2


if __name__ == "__main__":
    main()
