"""Isolated worker processes: their start, their deadlines, their end."""
