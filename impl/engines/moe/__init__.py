"""Adapters to engines' experts and routers."""
