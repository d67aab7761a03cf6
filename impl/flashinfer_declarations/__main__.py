"""Collect the declarations of one FlashInfer release, see ``collecting``."""

from __future__ import annotations

import sys

from .collecting import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
