"""Comparison of two FlashInfer releases, or two environments, and one verdict."""
