"""An implementation is judged with its first module while its others are built."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.properties.findings.report import Finding, ImplementationReport, LawReport
from kernelproof.properties.search.building import Builder
from kernelproof.properties.search.engine import EARLY_PROBLEMS, Examined, Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.space.profiles import Profile
from kernelproof.reference import AttentionProblem, Problem
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

TINY = Profile("tiny", problems=8, max_work=20_000, shrink_seconds=1.0, seconds=60.0, modules=3)
FOLDER = "KERNELPROOF_TEST_FOLDER"
WAIT_SECONDS = 50.0


def head_dim(problem: Problem) -> Hashable:
    assert isinstance(problem, AttentionProblem)
    return problem.head_dim_qk


def three_head_dims(problem: Problem, target: Target) -> bool | str:
    del target
    assert isinstance(problem, AttentionProblem)
    return problem.head_dim_qk in (16, 32, 64) or "only three head dims"


def compiled(inputs: PagedAttentionInputs) -> None:
    """Compile: all modules but the first one called take until somebody has judged a problem."""
    folder, dim = Path(os.environ[FOLDER]), inputs.q.shape[-1]
    first = folder / "first"
    if not first.exists():
        first.write_text(f"{dim}", encoding="ascii")
    until = time.monotonic() + WAIT_SECONDS
    while first.read_text(encoding="ascii") != f"{dim}" and not (folder / "judged").exists():
        if time.monotonic() > until:
            (folder / "late").touch()
            return
        time.sleep(0.01)


def compiled_first(name: str, error: float) -> Implementation:
    """Return an implementation whose modules are built, with an error that it adds."""

    def run(inputs: PagedAttentionInputs) -> object:
        from kernelproof.properties.seeded.honest import float32

        compiled(inputs)
        out, lse = float32(inputs)
        return out + error, lse

    return implementation(
        "paged_attention",
        name=name,
        supports=three_head_dims,
        compile_key=head_dim,
        build_ahead=True,
    )(run)


builds, builds_wrong = compiled_first("builds", 0.0), compiled_first("builds-wrong", 1.0)


def exists(problem: Problem) -> tuple[str, bool]:
    return f"library {head_dim(problem)}", True


def slow_to_survey(problem: Problem, target: Target) -> bool | str:
    """Be known once somebody has judged a problem."""
    folder = Path(os.environ[FOLDER])
    until = time.monotonic() + WAIT_SECONDS
    while not (folder / "judged").exists():
        if time.monotonic() > until:
            (folder / "late").touch()
            break
        time.sleep(0.01)
    return three_head_dims(problem, target)


@implementation(
    "paged_attention",
    name="exists",
    supports=three_head_dims,
    compile_key=head_dim,
    build_ahead=True,
    library=exists,
)
def known_soon(inputs: PagedAttentionInputs) -> object:
    from kernelproof.properties.seeded.honest import float32

    return float32(inputs)


@implementation(
    "paged_attention",
    name="late",
    supports=slow_to_survey,
    compile_key=head_dim,
    build_ahead=True,
    library=exists,
)
def known_late(inputs: PagedAttentionInputs) -> object:
    return known_soon(inputs)


class Judging(Progress):
    """Takes note of the first verdict, and counts findings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.findings = folder, list[Finding]()

    def judged(self, name: str, count: int) -> None:
        del name, count
        (self.folder / "judged").touch()

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)
        (self.folder / "judged").touch()


@pytest.mark.parametrize(("name", "findings"), [("builds", 0), ("builds_wrong", 1)])
def test_the_first_module_is_judged_while_others_are_built(
    name: str, findings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    progress = Judging(tmp_path)
    plan = Plan([f"{__file__}:{name}"], TINY, laws=("parity",), jobs=1)
    (report,) = Run(plan, progress).execute().implementations
    assert not report.error
    assert not (tmp_path / "late").exists()
    assert report.modules == 3
    (law,) = report.laws
    assert len(progress.findings) == len(report.findings) == findings
    if not findings:
        assert law.judged >= TINY.problems + EARLY_PROBLEMS
        assert set(report.coverage.unseen.get("head_dims", ())).isdisjoint(
            f"({dim}, {dim})" for dim in (16, 32, 64)
        )


def test_what_exists_is_judged_before_all_implementations_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    plan = Plan(
        [f"{__file__}:known_late", f"{__file__}:known_soon"], TINY, laws=("parity",), jobs=2
    )
    reports = Run(plan, Judging(tmp_path)).execute().implementations
    assert not (tmp_path / "late").exists()
    for report in reports:
        assert not report.error
        assert report.modules == 3
        assert report.laws[0].judged >= TINY.problems + EARLY_PROBLEMS


class Held(Run):
    """A run whose first law on first problems takes until all modules are built."""

    early: ClassVar[list[str]] = []

    def _search(self, *given: Any) -> LawReport:  # noqa: ANN401  the method's own arguments
        _, _, law, options = given
        if options.problems == EARLY_PROBLEMS and options.floor == 0:
            self.early.append(law.name)
            (Path(os.environ[FOLDER]) / "judged").touch()
            assert self.prepared.wait(WAIT_SECONDS)
        return super()._search(*given)

    def _begin(self, *given: Any) -> None:  # noqa: ANN401
        super()._begin(*given)
        self.prepared.set()

    prepared = threading.Event()


def test_laws_that_have_not_begun_on_first_problems_are_left_to_all_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    laws = ("parity", "well_formed", "inputs_unchanged")
    run = Held(Plan([f"{__file__}:builds"], TINY, laws=laws, jobs=1))
    (report,) = run.execute().implementations
    assert not report.error
    assert run.early == ["parity"]
    assert [law.law for law in report.laws] == [*laws]
    assert all(law.judged > 0 for law in report.laws)


def test_what_is_prepared_is_not_searched_early_any_more() -> None:
    """Where all modules exist, both come at the same moment, in any order."""
    run = Run(Plan([f"{__file__}:known_soon"], TINY))
    report = ImplementationReport("exists", "exists")
    examined = Examined(report, ready=True)
    run._begin_early(examined, cast("Any", None))  # which is not looked into
    assert examined.prepared is None
    run._pool.close()


def test_nothing_is_built_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "judged").touch()
    built: list[int] = []
    build = Builder.build

    def noted(self: Builder, address: Any, modules: Any, *rest: Any) -> None:  # noqa: ANN401
        built.append(len(modules))
        build(self, address, modules, *rest)

    monkeypatch.setattr(Builder, "build", noted)
    plan = Plan(
        [f"{__file__}:known_late", f"{__file__}:known_soon"], TINY, laws=("parity",), jobs=2
    )
    reports = Run(plan, Judging(tmp_path)).execute().implementations
    assert [report.modules for report in reports] == [3, 3]
    assert set(built) == {0}


class Begun(Progress):
    """Notes the laws that begin."""

    def __init__(self) -> None:
        self.laws = list[str]()

    def law_begun(self, name: str, law: str) -> None:
        del name
        self.laws.append(law)


def test_a_run_for_one_finding_has_each_feature_and_then_a_few_problems_of_each_law() -> None:
    progress, laws = Begun(), ("parity", "batch_independence")
    plan = Plan(
        ["kernelproof.properties.seeded.honest:float32"],
        TINY,
        laws=laws,
        jobs=1,
        exit_first=True,
        deck=False,
    )
    (report,) = Run(plan, progress).execute().implementations
    assert not report.error
    assert progress.laws == ["parity", *laws, *laws]
