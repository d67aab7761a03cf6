"""Faulty experts and routing, and the honest code that they are made from."""
