"""What the answers of a run depend on, by names for people: the code, and what was asked for."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...fixtures import DECK
from ...impl import Target
from ...impl.registry import resolve_name
from ...impl.targets.unpacked import folders, packages_in
from .journal import Journal

if TYPE_CHECKING:
    from ...properties.search.plan import Plan

ANSWERING = ("reference", "impl", "properties", "fixtures/support")
"""Folders of Kernelproof whose code the workers run."""
DIGITS = 12
OWN = __package__.partition(".")[0]
"""Name of Kernelproof's package."""


def plan_identity(plan: Plan) -> dict[str, Any]:
    """Return what the results of a plan depend on, whichever machine carries it out.

    How long it may take and how many workers it has is no part of it: a run that goes on may have
    more of both.
    """
    return {
        **code_identity(plan.implementations),
        **asked_of(plan),
        "ledger": digest_of(repr(entry).encode() for entry in plan.ledger.entries),
        "corpus": digest_of(f"{case.law} {case.problem.id}".encode() for case in plan.corpus),
        "costs": {name: repr(cost) for name, cost in plan.costs.items()},
        "--from": {
            str(folder.absolute()): [package.title for package in packages_in(folder)]
            for folder in folders()
        },
    }


def machine_identity(device: str) -> dict[str, Any]:
    """Return what results depend on of the machine that carries a plan out, this one.

    Raises:
        UnsupportedError: the device is not there.
    """
    return {
        "python": platform.python_version(),
        **Target.here(device).to_json(),
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", ""),
    }


def journal_path(folder: Path, plan: Plan) -> Path:
    """Return the path of a run's journal, which a run that is asked for the same has too."""
    asked = json.dumps(asked_of(plan), sort_keys=True)
    return folder / f"journal-{digest_of([asked.encode()])}.jsonl"


def asked_of(plan: Plan) -> dict[str, Any]:
    """Return what a plan was asked for, whatever code answers it."""
    return {
        "implementations": list(plan.implementations),
        "profile": repr(plan.profile),
        "device": plan.device,
        "seed": plan.seed,
        "laws": list(plan.laws),
        "only": repr(plan.only),
        "operation": plan.operation,
        "rules left out": list(plan.without_rules),
        "share": plan.share,
        "deck": plan.deck and digest_of(path.read_bytes() for path in sorted(DECK.glob("*.json"))),
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

    The Python files beside them count: an implementation imports them.

    Args:
        implementations: names or MODULE:NAME.
    """
    found = {"code of kernelproof": f"{__version__} ({own_code(ANSWERING)})"}
    for name in implementations:
        module = resolve_name(name).rpartition(":")[0]
        if module.partition(".")[0] == OWN:
            continue
        for file in filter(Path.is_file, files_of(name)):
            beside = {file, *filter(Path.is_file, file.parent.glob("*.py"))}
            parts = (part for each in sorted(beside) for part in (each.name.encode(), _read(each)))
            found[f"implementation {module}"] = digest_of(parts)
    return found


def files_of(name: str) -> list[Path]:
    """Return the files that may hold an implementation, by its name; nothing is imported.

    An import would run the code of the implementation in this process, which a check never does.
    """
    module, _, _ = resolve_name(name).rpartition(":")
    return [Path(module)] if module.endswith(".py") else files_of_module(module)


def files_of_module(module: str) -> list[Path]:
    """Return the file of a module, by its dotted name; nothing is imported."""
    top, *rest = module.split(".")
    spec = None
    with suppress(ValueError):  # no name, or a module without a spec, such as __main__
        spec = importlib.util.find_spec(top)  # of a top-level name, which imports nothing
    if spec is not None and spec.origin and not rest:
        return [Path(spec.origin)]
    packages = list(spec.submodule_search_locations or ()) if spec else []
    places = [Path(top, *rest), *(Path(package, *rest) for package in packages)]
    found = (file for each in places for file in (each.with_suffix(".py"), each / "__init__.py"))
    return [file for file in found if file.is_file()][:1]


def _read(file: Path) -> bytes:
    """Return the content of a file; nothing where it cannot be read, as a worker cannot either."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def own_code(folders: Iterable[str]) -> str:
    """Return a fingerprint of these folders of Kernelproof."""
    root = Path(__file__).resolve().parents[2]
    files = (path for name in folders for path in sorted((root / name).rglob("*.*")))
    suffixes = (".py", ".toml", ".json", ".tsv", ".jinja", ".css")
    return digest_of(path.read_bytes() for path in files if path.suffix in suffixes)


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a short fingerprint of bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]
