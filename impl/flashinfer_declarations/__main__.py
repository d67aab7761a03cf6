"""Collect the declarations of one FlashInfer release, see ``collecting``."""

from __future__ import annotations

import sys

from .collecting import main

sys.exit(main(sys.argv[1:]))
