"""Faulty attention kernels, made from the honest ones in ``seeded/kernels.py``."""
