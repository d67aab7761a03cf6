"""What is kept of runs: adding to it."""
