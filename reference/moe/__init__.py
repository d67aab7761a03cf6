"""Routing and experts by definition, with error bounds."""
