"""Device code in Triton; imported when a kernel is first launched."""
