"""Faulty appending to a paged cache."""
