"""Releases as wheels, folders and interpreters, and the pins of a project."""
