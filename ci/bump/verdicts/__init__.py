"""Findings of a comparison, the policy on them, and the verdict."""
