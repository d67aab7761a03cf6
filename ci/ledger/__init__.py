"""Changing the ledger and the corpus: ``kernelproof expectations`` and ``corpus``."""
