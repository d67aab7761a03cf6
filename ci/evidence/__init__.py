"""Kept runs, and the page that lists them: ``kernelproof evidence``."""
