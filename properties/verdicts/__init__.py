"""Verdicts, and the comparison of results that they rest on."""
