"""Adapters to FlashInfer; flashinfer itself is imported at the first call."""
