"""The commands that judge: ``check``, ``gate``, ``replay``, ``list``."""
