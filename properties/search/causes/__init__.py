"""Telling the causes of new findings apart by experiment: see ``experiments``."""
