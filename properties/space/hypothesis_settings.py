"""Hypothesis settings by profile: those of every search here, and of `--hypothesis-profile`."""

from __future__ import annotations

import hypothesis
from hypothesis import HealthCheck

from .profiles import PROFILES, Profile


def settings_of(profile: Profile) -> hypothesis.settings:
    """Return what a profile means to Hypothesis.

    No deadline: an example may start a process or compile a kernel, and the isolated worker has
    deadlines of its own. No health checks: they measure exactly that.
    """
    explores = {} if profile.explore else {"derandomize": True, "database": None}
    return hypothesis.settings(
        max_examples=profile.problems,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        **explores,  # type: ignore[arg-type]  # each has a type of its own
    )


def register_profiles() -> None:
    """Register `quick`, `gate` and `nightly` with Hypothesis, except for names that are taken."""
    for name, profile in PROFILES.items():
        if not _is_registered(name):
            hypothesis.settings.register_profile(name, settings_of(profile))


def _is_registered(name: str) -> bool:
    try:
        hypothesis.settings.get_profile(name)
    except hypothesis.errors.InvalidArgument:
        return False
    return True
