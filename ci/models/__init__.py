"""Facts of models: the table of real values, and how many of them problems can state."""
