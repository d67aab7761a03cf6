"""Number formats: FP8, FP4, block scales, the cache format, roundings of arithmetic."""
