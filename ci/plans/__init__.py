"""Judges the plan functions of FlashInfer releases: host code, which a CPU can run and decide."""
