"""What an implementation can be asked about without Hypothesis: its worker asks it."""
