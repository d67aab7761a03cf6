"""Stands in for PyTorch, which a machine does not have."""

from __future__ import annotations

message = "No module named 'torch'"
raise ModuleNotFoundError(message, name="torch")
