"""Layers of experts that models have, from the table of real values, and how they are drawn."""
