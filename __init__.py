"""Kernelproof tests attention and MoE inference kernels against an oracle before they ship.

The public names live in the sub-packages, each importable without the ones after it:

- ``kernelproof.reference``: the oracle, tensors in and tensors out (``paged_attention``,
  ``ragged_attention``, ``merge_states``, ``append_paged_kv``, ``build_metadata``, error bounds).
  It needs torch and nothing else.
- ``kernelproof.impl``: what is under test, and the decorator ``implementation`` for one's own.
- ``kernelproof.properties``: the laws, the problems that are drawn, and the isolated worker.
- ``kernelproof.fixtures``: data: the ledger of findings, the regression corpus, evidence.
- ``kernelproof.ci``: the command ``kernelproof``. It needs the extra ``suite``.

Importing this package imports no torch and touches no device.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
