"""Adapters of engines' kernels that build what attention reads: slots, batches, drafts, steps."""
