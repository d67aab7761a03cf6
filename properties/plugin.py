"""The pytest plugin: options, markers, the summary.

Loaded in every pytest run of every project that has Kernelproof installed. So it imports nothing
heavy, and does nothing until the suite's own test module is collected
(`pytest --pyargs kernelproof.properties`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.properties.collection.summary import Tally
from kernelproof.properties.collection.xdist_lock import (
    LEFT,
    REFUSAL,
    SuiteRefusedError,
    keep,
    kept,
    stop,
)
from kernelproof.properties.isolation.gpus import processes_for, share_of, visible_devices
from kernelproof.properties.isolation.machine import cores
from kernelproof.properties.space.profiles import PROFILES

if TYPE_CHECKING:
    from kernelproof.properties.collection.conformance import Suite

CASES = Path(".kernelproof", "cases")
PACKAGE = Path(__file__).resolve().parent
MODULE = "test_conformance.py"
OPTIONS: dict[str, dict[str, Any]] = {
    "impl": {
        "action": "append",
        "default": [],
        "metavar": "MODULE:NAME",
        "help": "Judge this implementation (may be repeated); everything registered by default.",
    },
    "profile": {
        "choices": list(PROFILES),
        "default": "gate",
        "help": "How hard to look: seconds, minutes, hours an implementation (default: gate).",
    },
    "device": {
        "choices": ["cpu", "cuda"],
        "default": "cpu",
        "help": "Where the implementations run (default: cpu).",
    },
    "expectations": {
        "metavar": "FILE|none",
        "help": "Ledger of known findings instead of the shipped one.",
    },
    "only": {
        "action": "append",
        "default": [],
        "metavar": "FIELD=VALUE,...",
        "help": "Draw only problems with one of these values of a field (may be repeated).",
    },
    "costs": {
        "metavar": "FILE",
        "help": "Cost classes instead of measured ones: the seed draws the same problems anywhere.",
    },
}
"""Options by the contract's names: `--impl` where that is free, `--kernelproof-impl` always."""

_suite = pytest.StashKey["Suite"]()
_common = pytest.StashKey[str]()
_interruptible: list[Path] = []
"""Folders of runs under xdist: the hook at Ctrl-C does not get the run's configuration."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options under names that nobody else takes."""
    group = parser.getgroup("kernelproof", "kernelproof: pytest --pyargs kernelproof.properties")
    for name, attributes in OPTIONS.items():
        group.addoption(f"--kernelproof-{name}", dest=f"kernelproof_{name}", **attributes)
    group.addoption(
        "--kernelproof-cases",
        metavar="DIR",
        help=f"Folder of failures, replayed first (default: {CASES} in the rootdir).",
    )
    group.addoption(
        "--kernelproof-seed",
        type=int,
        default=0,
        metavar="N",
        help="Of the search (nightly: 0 draws a new one).",
    )
    group.addoption(
        "--kernelproof-examples",
        metavar="PLACE[,PLACE]",
        help="Share failing examples (nightly): a folder, github:OWNER/REPO, a Redis URL "
        "(default: $KERNELPROOF_EXAMPLES).",
    )
    group.addoption(
        "--kernelproof-allow-incomplete",
        action="store_true",
        help="Skip a law that had no time to judge enough problems, instead of failing it.",
    )
    group.addoption(
        "--kernelproof-distrust",
        action="store_true",
        help="Judge in another process, which never loads the kernel.",
    )
    group.addoption("--kernelproof-operation", metavar="OP", help="What plain functions implement.")


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, None, None]:
    """Add the short names that are still free once all plugins and conftests have theirs.

    Options such as `--device` and `--profile` are common. One name twice is an error of argparse
    that ends pytest, in a project that perhaps has nothing to do with Kernelproof.
    """
    yield
    group = parser.getgroup("kernelproof")
    for name, attributes in OPTIONS.items():
        if _is_free(parser, f"--{name}"):
            group.addoption(f"--{name}", dest=f"kernelproof_{name}", **attributes)


def _is_free(parser: pytest.Parser, option: str) -> bool:
    try:
        return option in parser.parse_known_and_unknown_args([option])[1]
    except pytest.UsageError:  # it is known, and wants a value
        return False


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the Hypothesis profile that was asked for by its name."""
    config.addinivalue_line(
        "markers",
        "kernelproof(implementation, operation, law): an item of the conformance suite.",
    )
    if not _is_worker(config):
        tally = Tally(tuple(config.getoption("kernelproof_impl")))
        config.pluginmanager.register(tally, "kernelproof-tally")
    if config.getoption("hypothesis_profile", None) in PROFILES:
        from kernelproof.properties.space.hypothesis_settings import register_profiles

        register_profiles()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return what the suite was asked to do."""
    if not _is_meant(config):
        return None
    names = ", ".join(config.getoption("kernelproof_impl")) or "everything registered"
    profile, device = (config.getoption(f"kernelproof_{name}") for name in ("profile", "device"))
    return f"kernelproof: {names}; profile {profile}, device {device}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ask about what was named before anything is collected: what is wrong with it ends the run.

    Under xdist the first of its processes that collects does so, for all of them.
    """
    config = session.config
    named = config.getoption("kernelproof_impl") and _is_meant(config)
    if not named or _is_worker(config) or _is_controller(config):
        return
    try:
        suite_of(config)
    except SuiteRefusedError as error:
        raise pytest.UsageError(str(error)) from None


def keep_judged(node: pytest.Item, outcome: str) -> None:
    """Keep what became of an item where the process that prints finds it.

    Args:
        node: the item.
        outcome: the outcome of its judgement; pytest's report of an expected failure says that it
            was skipped.
    """
    told = {"failed": outcome == "failed", "outcome": outcome.replace("xfailed", "skipped")}
    keep(_common_folder(node.config), node.nodeid, {**dict(node.user_properties), **told})


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Wait until the processes of xdist have ended their searches, whose findings then count."""
    del excinfo
    for common in _interruptible:
        stop(common)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit as at wrong usage where the processes of xdist were refused; count what they kept."""
    config = session.config
    common = config.stash.get(_common, None)
    tally: Any = config.pluginmanager.get_plugin("kernelproof-tally")
    if _suite in config.stash:
        config.stash[_suite].close()
        left, shared = config.stash[_suite].left(), _common_folder(config)
        if tally is not None:
            tally.left += left
        elif left and shared is not None:
            with (shared / LEFT).open("a", encoding="utf-8") as file:
                file.writelines(f"{each}\n" for each in left)
    if common is not None:
        tally.told = {**kept(Path(common)), **tally.told}
        if Path(common, LEFT).exists():
            tally.left += Path(common, LEFT).read_text(encoding="utf-8").splitlines()
    if common is not None and Path(common, REFUSAL).exists():
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def suite_of(config: pytest.Config) -> Suite:
    """Return the suite of this process; it starts when it is first asked for.

    Raises:
        SuiteRefusedError: it cannot run as it was asked to.
    """
    if _suite not in config.stash:
        from kernelproof.properties.collection.conformance import Suite
        from kernelproof.properties.collection.surveying import Choices
        from kernelproof.properties.search.examples import shared_examples
        from kernelproof.properties.space.hypothesis_settings import register_profiles
        from kernelproof.properties.space.restrictions import Only, OnlyError

        register_profiles()
        try:
            only = Only.read(config.getoption("kernelproof_only"))
        except OnlyError as error:
            raise SuiteRefusedError(str(error)) from error
        here, costs = config.invocation_params.dir, config.getoption("kernelproof_costs")
        device = config.getoption("kernelproof_device")
        cases = config.getoption("kernelproof_cases")
        choices = Choices(
            tuple(config.getoption("kernelproof_impl")),
            config.getoption("kernelproof_operation"),
            PROFILES[config.getoption("kernelproof_profile")],
            device,
            config.getoption("kernelproof_seed"),
            config.getoption("kernelproof_expectations"),
            here / cases if cases else config.rootpath / CASES,
            shared_examples(config.getoption("kernelproof_examples")),
            only,
            here / costs if costs else None,
            config.getoption("kernelproof_allow_incomplete"),
            config.getoption("kernelproof_distrust"),
        )
        process = _process(config)
        number = int(process.get("workerid", "gw0").removeprefix("gw"))
        config.stash[_suite] = Suite(
            choices,
            common=_common_folder(config),
            environment=share_of(number) if device == "cuda" else None,
            jobs=process.get("workercount", 1),
        )
    return config.stash[_suite]


def _process(config: pytest.Config) -> dict[str, Any]:
    """Return what xdist has passed to a process that it started; nothing in any other."""
    return getattr(config, "workerinput", {})


def _is_worker(config: pytest.Config) -> bool:
    return bool(_process(config))


def _is_controller(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("dsession")


def _is_meant(config: pytest.Config) -> bool:
    """Whether the command line leads to the suite's test module."""
    for argument in config.args:
        name = argument.partition("::")[0]
        path = (config.invocation_params.dir / name).resolve()
        if name.partition(".")[0] == "kernelproof" or PACKAGE in (path, *path.parents):
            return True
    return False


def _common_folder(config: pytest.Config) -> Path | None:
    """Return the folder that the processes of an xdist run share; None if there is one process."""
    if _is_worker(config):
        folder = _process(config).get("kernelproof")
        return Path(folder) if folder else None
    if not _is_controller(config):
        return None
    if _common not in config.stash:
        config.stash[_common] = tempfile.mkdtemp(prefix="kernelproof-")
        _interruptible.append(Path(config.stash[_common]))
    return Path(config.stash[_common])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401  xdist's WorkerController
    """Pass the folder that all processes share to a process of xdist."""
    node.workerinput["kernelproof"] = str(_common_folder(node.config))


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # xdist's own answer is the number of cores
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Count GPUs for `-n auto`: a few processes each, by cores and by free memory."""
    if config.getoption("kernelproof_device") != "cuda" or not _is_meant(config):
        return None
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    # Each has a process that draws, and a worker that judges.
    return processes_for(visible_devices(), max(1, cores() // 2)) or None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the suite's test module also where a project names its own by another pattern."""
    if file_path.name != MODULE or file_path.resolve().parent != PACKAGE:
        return None
    patterns = parent.config.getini("python_files")
    if parent.session.isinitpath(file_path) or any(file_path.match(each) for each in patterns):
        return None  # pytest does
    return pytest.Module.from_parent(parent, path=file_path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put stored cases before searches again where a plugin has shuffled them."""
    ours = [i for i, item in enumerate(items) if item.get_closest_marker("kernelproof")]
    if ours:
        first = sorted((items[i] for i in ours), key=_is_search)
        for position, item in zip(ours, first, strict=True):
            items[position] = item


def _is_search(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("kernelproof")
    return bool(marker and marker.kwargs.get("law"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the isolated worker."""
    if _suite in config.stash:
        config.stash[_suite].close()
    if _common in config.stash:
        shutil.rmtree(config.stash[_common], ignore_errors=True)
        _interruptible.remove(Path(config.stash[_common]))
