"""A comparison's report made by hand, and a browser to look at its page."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.ci.bump.report.contents import assemble, with_actions
from kernelproof.ci.bump.verdicts.findings import finding
from kernelproof.ci.bump.verdicts.policy import Accepted, Policy
from kernelproof.ci.bump.verdicts.verdict import decide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from selenium.webdriver import Chrome

    from kernelproof.ci.bump.verdicts.findings import Finding

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NAN = "out[0, 3] is NaN, expected 0 (4 of 4 are)"
OFF = "out[0, 3] is 0.5, expected 0.25, off by 0.25, bound 0.001 (1 of 4 elements outside)"
OUT = {"where": "out[0, 3]", "got": "0.5", "expected": "0.25", "bound": "0.001"}
FAIL = {"status": "FAIL", "kind": "numeric", "message": OFF, "ratio": 250.0, "element": OUT}
PASS = {"status": "PASS", "kind": "", "message": "", "ratio": 0.5}
PROBLEM = {"operation": "merge_state", "num_tokens": 3, "id": "0a1b", "told": "MergeProblem(3)"}
REPLAY = {side: f"kernelproof replay case.json --release {side}" for side in ("0.6", "0.7")}


@pytest.fixture(autouse=True)
def _forget_what_a_test_wrote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unload modules from a test's folder: another test may write one of the same name."""
    before, path = set(sys.modules), [*sys.path]
    yield
    sys.path[:] = path
    # Not from all of /tmp: the environment may lie there, and a package of which some modules are
    # unloaded (those without a file stay) cannot be imported again.
    folder = tmp_path_factory.getbasetemp()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]


def some_findings() -> list[Finding]:
    """Return one finding of each look that a page has."""
    return [
        finding(
            "positional-meaning",
            "decode.plan",
            "decode.plan: position 2 was window, now sinks",
            rule="pass window by keyword",
            baseline={"signature": "(q, kv=(1, 2), window=-1)", "source": "decode.py:3"},
            candidate={"signature": "(q, kv=(1, 2), sinks=None, window=-1)", "source": "d.py:4"},
        ),
        finding(
            "new-failure",
            "merge",
            f"merge: right with 0.6, wrong with 0.7: {OFF}",
            chips=(90,),
            rule="do not run merge",
            baseline=PASS,
            candidate=FAIL,
            laws=("parity", "soak"),
            problem=PROBLEM,
            replay=REPLAY,
            entry="merge-empty",
            issue="https://example.org/issues/1",
            reason="merging nothing",
            found_by=("drawn",),
            count=2,
        ),
        finding(
            "enum-number-moved",
            "ActivationType",
            "ActivationType: Identity was 8, now 9",
            rule="by name",
            baseline={"Gelu": 0, "Relu": 1, "Silu": 2, "Swiglu": 3, "Identity": 8},
            candidate={"Gelu": 0, "Relu": 1, "Silu": 2, "Swiglu": 3, "Tanh": 8, "Identity": 9},
        ),
        finding("callable-removed", "mla.Old", "mla.Old is gone", baseline={"mla.Old.run": "(q)"}),
        finding("fixed", "cascade", "wrong, now right", baseline={**FAIL, "message": NAN},
                candidate=PASS, problem=PROBLEM, chips=(80, 90, 100, 120)),
        finding("slower", "append", "append is slower", baseline={"seconds": 1e-5},
                candidate={"seconds": 2e-5}),
        finding("declared-gained", "xqa", "xqa declares SM120", chips=(120,),
                baseline={"chips": [90, 100]}, candidate={"chips": [90, 100, 120]}),
        finding("name-added", "new.names", "new.names: a, b", count=2),
    ]  # fmt: skip


def make_report(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  any field
    """Return a report as a comparison writes it; ``changes`` are to its fields."""
    policy = Policy(
        accepted=(Accepted("surface/callable-removed/*", "nobody calls it"), Accepted("x/*", "y")),
        source="policy.toml",
    )
    found = with_actions(some_findings(), policy)
    verdict = decide(found, {80: "declared", 90: "run", 120: "compiled"}, policy, baseline="0.6")
    side = {"given": "0.6", "flashinfer": "0.6", "own_environment": False, "torch": "2.13.0",
            "triton": None, "cuda": "13.0", "artifacts": {"TRTLLM_GEN_FMHA": "158f6fa1/fmha/"},
            "not_imported": {"flashinfer.deep_gemm": "no module"}}  # fmt: skip
    made = assemble(
        verdict,
        found,
        policy,
        sides={"baseline": side, "candidate": {**side, "given": "0.7", "flashinfer": "0.7"}},
        features=features(),
        machines=[machine()],
        not_tested=[{"what": "calls on SM80", "why": "no such device here", "chips": [80]}],
        failures=["the soak was cut short"],
        command="kernelproof gate --baseline 0.6 --candidate 0.7",
    )
    return {**made, **changes}


def features() -> dict[str, Any]:
    """Return a matrix with a cell that was gained, one that was lost, and evidence of each kind."""
    told = {
        "y": {"status": "supported", "evidence": "declared", "rule": "allow"},
        "c": {"status": "supported", "evidence": "compiled", "rule": "allow"},
        "r": {"status": "supported", "evidence": "run", "rule": "allow"},
        "n": {"status": "refused", "evidence": "reported", "rule": "refuse"},
        "u": {"status": "unknown", "evidence": "", "rule": ""},
    }
    change = {"uy": "gained", "nc": "gained", "yn": "lost"}
    rows = [("decode", ("yc", "yr", "yn")), ("window", ("uy", "nc", "uu"))]
    return {
        "chips": [80, 90, 120],
        "rules": {"refuse": "it hangs"},
        "rows": [
            {
                "title": title,
                "operation": "paged_attention",
                "backend": "fa2",
                "cells": [
                    {"chip": chip, "change": change.get(pair, "same"),
                     "baseline": told[pair[0]], "candidate": told[pair[1]]}
                    for chip, pair in zip((80, 90, 120), pairs, strict=True)
                ],
            }
            for title, pairs in rows
        ],
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """Return what one machine adds to a report."""
    versions = {"flashinfer": "0.6", "torch": "2.13.0", "triton": None, "cuda": "13.0"}
    measured = {"problem": "0a1b", "work": 10, "seconds": {"baseline": 1e-5, "candidate": 2e-5},
                "rounds": {"baseline": [1e-5], "candidate": [2e-5]}, "peak_bytes": {},
                "first_seconds": {"baseline": 1.0, "candidate": 1.0},
                "ratio": 2.0, "low": 1.9, "high": 2.2}  # fmt: skip
    law = {"law": "parity", "judged": 4, "pass": 3, "changes": {"new-failure": 1},
           "worst_ratio": {"baseline": 0.5, "candidate": "inf"}}  # fmt: skip
    return {
        "chip": 90,
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "versions": {"baseline": versions, "candidate": versions},
        "profile": "gate",
        "seed": 0,
        "judged": 4,
        "implementations": [
            {"name": "merge", "reference": "m:merge", "operation": "merge_state", "backend": "cuda",
             "runs": ["baseline", "candidate"], "reasons": {}, "judged": 4, "laws": [law],
             "ratios": {"baseline": [0.0, 0.001, 0.5], "candidate": [0.0, 0.002, 1.0]},
             "bits": {"compared": 3, "changed": 1, "other_inputs": 0}, "modules": 1}
        ],
        "liveness": {"launches": 200, "soaked": [{"name": "merge", "problems": 2, "failed": 0}],
                     "hangs": [], "known": []},
        "compiled": [{"side": "baseline", "sm": 120, "unit": "batch_decode", "status": "compiled",
                      "message": ""}],
        "not_tested": [{"what": "1 implementation: other", "why": "needs SM100"}],
        "timings": {"seconds": 9.0, "parts": {}, "asked": 4, "remembered": 0,
                    "builds": [{"name": "merge", "seconds": {"baseline": [1.5], "candidate": []}}],
                    "speed": [{"name": "merge", "measurements": [measured]}]},
        "command": "kernelproof gate --device cuda",
    }  # fmt: skip


@pytest.fixture
def report() -> Callable[..., dict[str, Any]]:
    """Return ``make_report``: test modules cannot import from a conftest."""
    return make_report


def write_release(folder: Path, version: str, code: str) -> None:
    """Write a made-up release of FlashInfer, whose package has this code."""
    package, metadata = folder / "flashinfer", folder / f"flashinfer_python-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: flashinfer-python\nVersion: {version}\n")


@pytest.fixture(scope="session")
def made_up_release() -> Callable[[Path, str, str], None]:
    """Return ``write_release``."""
    return write_release


@pytest.fixture(scope="session")
def settled() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that leaves out of a report what depends on the clock, see docs/bump.md."""

    def without_clock(report: dict[str, Any]) -> dict[str, Any]:
        machines = [
            {k: v for k, v in each.items() if k not in ("timings", "command")}
            for each in report["machines"]
        ]
        return {**report, "date": "", "command": "", "machines": machines}

    return without_clock


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chrome]:
    """Start a headless browser that tells of its console and its network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        absent = "chromedriver" if binary else "Chromium"
        pytest.skip(f"there is no {absent} here; `make browser` installs it from Debian's packages")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1"  # the driver is here
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: Chrome) -> Chrome:
    """Return the browser as a new user has it: a light page of 1,200 pixels, nothing logged."""
    size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.get("about:blank")
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    for log in ("browser", "performance"):
        chromium.get_log(log)  # type: ignore[no-untyped-call]
    return chromium


@pytest.fixture
def show(browser: Chrome, tmp_path: Path) -> Callable[..., None]:
    """Return a function that opens a page as somebody does who was sent the file."""

    def opened(page: str, fragment: str = "") -> None:
        path = tmp_path / "report.html"
        path.write_text(page, encoding="utf-8")
        browser.get(path.as_uri() + fragment)

    return opened
