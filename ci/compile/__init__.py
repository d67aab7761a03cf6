"""Compiling what a release would build, without a GPU."""
