"""The report of a comparison, and every form that it is written in."""
