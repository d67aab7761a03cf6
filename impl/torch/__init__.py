"""Implementations in plain torch."""
