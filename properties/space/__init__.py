"""The space of problems: axes, strategies, modules, restrictions."""
