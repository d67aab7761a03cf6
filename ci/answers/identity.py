"""What the answers of a run depend on, by names for people: the code, and what was asked for."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...impl.registry import resolve_name
from ...properties.search.plan import Plan
from .journal import Journal

ANSWERING = ("reference", "impl", "properties", "fixtures/support")
"""Folders of Kernelproof whose code the workers run."""
DIGITS = 12
OWN = __package__.partition(".")[0]
"""Name of Kernelproof's package."""


def plan_identity(plan: Plan) -> dict[str, Any]:
    """Return what the results of a plan depend on.

    How long it may take and how many workers it has is no part of it: a run that goes on may have
    more of both.
    """
    return {
        **code_identity(plan.implementations),
        "implementations": list(plan.implementations),
        "profile": repr(plan.profile),
        "device": plan.device,
        "seed": plan.seed,
        "laws": list(plan.laws),
        "only": repr(plan.only),
        "operation": plan.operation,
        "rules left out": list(plan.without_rules),
        "ledger": digest_of(repr(entry).encode() for entry in plan.ledger.entries),
        "corpus": digest_of(f"{case.law} {case.problem.id}".encode() for case in plan.corpus),
        "share": plan.share,
        "costs": {name: repr(cost) for name, cost in plan.costs.items()},
        "sanitizer": plan.sanitizer,
        "distrust": plan.distrust,
    }


def with_seed(plan: Plan, journal: Journal) -> Plan:
    """Return a plan with a seed of its own where it explores, the same when a run goes on."""
    if not plan.profile.explore or plan.seed:
        return plan
    return replace(plan, seed=journal.ask({"seed": ""}, lambda: secrets.randbelow(2**31) or 1))


def code_identity(implementations: Iterable[str]) -> dict[str, str]:
    """Return fingerprints of Kernelproof and of the files that implementations name.

    Args:
        implementations: names or MODULE:NAME.
    """
    found = {"code of kernelproof": f"{__version__} ({_own_code()})"}
    for name in implementations:
        module = resolve_name(name).rpartition(":")[0]
        if (path := _file_of(module)) is not None:
            found[f"implementation {module}"] = digest_of([path.read_bytes()])
    return found


def _file_of(module: str) -> Path | None:
    """Return the file of a module; None for Kernelproof's own, and where there is none.

    It is looked for by its name only: this process imports nothing of others.
    """
    if module.partition(".")[0] == OWN:
        return None
    places = [Path(entry, *module.split(".")) for entry in ("", *sys.path)]
    files = (file for each in places for file in (each.with_suffix(".py"), each / "__init__.py"))
    return next(filter(Path.is_file, [Path(module), *files]), None)


def _own_code() -> str:
    root = Path(__file__).resolve().parents[2]
    files = (path for name in ANSWERING for path in sorted((root / name).rglob("*.*")))
    suffixes = (".py", ".toml")
    return digest_of(path.read_bytes() for path in files if path.suffix in suffixes)


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a short fingerprint of bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]
