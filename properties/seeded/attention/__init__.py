"""Faulty attention kernels, and the honest code that they are made from."""
