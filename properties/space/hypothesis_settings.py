"""Hypothesis settings by profile, and drawing the same problems whatever else is imported.

Settings are those of every search here, and of `--hypothesis-profile`. Hypothesis draws now and
then a number that stands in the source of a local module (since 6.131). Which modules are local
depends on how Kernelproof was installed and what kernel is checked, and which are imported by then
on what ran before: the same seed would draw other problems.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
from hypothesis import HealthCheck
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from .profiles import PROFILES, Profile

REMEMBERED = 1024
"""Limits of numbers for which it is remembered what may be drawn, as Hypothesis does."""
_lock = threading.Lock()
_within = 0
_usual: dict[str, Any] = {}


@contextmanager
def without_local_constants() -> Iterator[None]:
    """Draw numbers of the source of local modules no more often than any others.

    There is no public setting for it. A Hypothesis that keeps them elsewhere draws them as before;
    a test sees that.
    """
    global _within  # noqa: PLW0603  threads of one process draw at the same time
    with _lock:
        _within += 1
        if _within == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if _within == 0:
                for name, value in _usual.items():
                    setattr(providers, name, value)
                _usual.clear()


def _replace() -> None:
    names = ("_get_local_constants", "CONSTANTS_CACHE")
    if not all(hasattr(providers, name) for name in names):
        return
    none = Constants()
    # What may be drawn is remembered by its limits, together with the local ones.
    replaced = {
        "_get_local_constants": lambda: none,
        "CONSTANTS_CACHE": type(providers.CONSTANTS_CACHE)(REMEMBERED),
    }
    for name, value in replaced.items():
        _usual[name] = getattr(providers, name)
        setattr(providers, name, value)


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
