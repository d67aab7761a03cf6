"""Findings, cases, the corpus and the ledger."""
