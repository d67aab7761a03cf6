"""The two releases under comparison, what is asked of them, and the journal of answers."""
