"""Machines and releases: compute capabilities, backends, optional packages."""
