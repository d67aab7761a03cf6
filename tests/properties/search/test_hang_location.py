"""Where a call that never ends is stuck, as the stacks of its process tell."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernelproof
from kernelproof.properties.laws import find_law
from kernelproof.properties.search.candidate import Candidate
from kernelproof.properties.search.hang_location import stuck_in, stuck_in_launch
from kernelproof.properties.space.axes import Axes
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionProblem

HERE = Path(kernelproof.__file__).parent
DUMP = f"""\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "{HERE}/properties/isolation/worker_main.py", line 9 in beat

Current thread 0x00007f0000000002 (most recent call first):
  File "/site-packages/torch/cuda/streams.py", line 170 in synchronize
  File "/site-packages/triton/backends/nvidia/driver.py", line 713 in __call__
  File "/site-packages/flashinfer/prefill.py", line 2127 in _paged_run
  File "{HERE}/impl/flashinfer/paged.py", line 119 in prefill
  File "{HERE}/impl/protocol.py", line 75 in __call__
  File "{HERE}/properties/verdicts/subject.py", line 121 in call
  File "/site-packages/contextlib.py", line 81 in inner
  File "{HERE}/properties/isolation/worker_main.py", line 130 in _answer
"""
SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"


def test_the_innermost_frame_of_the_code_under_test_is_named() -> None:
    assert stuck_in(DUMP) == "_paged_run (prefill.py:2127)"


def test_a_folder_may_have_the_name_of_a_package_that_launches() -> None:
    inner = '  File "/site-packages/flashinfer/triton/cascade.py", line 7 in merge_state'
    launch = '  File "/site-packages/triton/backends/nvidia/driver.py", line 713 in __call__'
    assert stuck_in(DUMP.replace(launch, f"{launch}\n{inner}")) == "merge_state (cascade.py:7)"


def test_a_stack_of_the_suite_alone_names_nothing() -> None:
    waits = f"""\
Current thread 0x00007f0000000002 (most recent call first):
  File "{HERE}/properties/verdicts/subject.py", line 206 in _wait
  File "{HERE}/properties/isolation/worker_main.py", line 130 in _answer
"""
    assert stuck_in(waits) == ""
    assert stuck_in("") == ""


def test_a_hang_is_looked_at_in_a_process_whose_launches_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernelproof.properties.search.deadlines.DEADLINE_FLOOR", 0.5)
    axes = Axes("paged_attention", {}, 10**6)
    parity = find_law("parity")
    problem = AttentionProblem(seq_lens=(9,))

    hangs = Candidate("hangs", Address(f"{SUBJECTS}:hangs_while_blocking", None, "cpu"), axes)
    told = stuck_in_launch(hangs, parity, problem)
    assert told.startswith("stuck in _hang_while_blocking (engine_subjects.py:")
    assert told.endswith(") with CUDA_LAUNCH_BLOCKING=1")
    ends = Candidate("honest", Address(f"{SUBJECTS}:honest_attention", None, "cpu"), axes)
    assert stuck_in_launch(ends, parity, problem) == "it ends with CUDA_LAUNCH_BLOCKING=1"
