"""Attention, merging, appending and batch metadata by definition, with error bounds."""
