"""A first signal ends a run, a second one the process; those that come together are one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernelproof.ci.console import signals

SCRIPT = """
import os, signal, subprocess, sys, time
from kernelproof.ci.console import signals
from kernelproof.properties.isolation.spawning import start_group

child = "import subprocess; subprocess.run(['sleep', '600'], start_new_session=True)"
start_group([sys.executable, "-c", child], scratch=True)
subprocess.Popen(["sleep", "600"], start_new_session=True)
signals.TWICE_SECONDS = 600
with signals.ended_by_signals(lambda why: print(why, flush=True)):
    for _ in range(3):
        signal.raise_signal(getattr(signal, sys.argv[1]))
    signals.TWICE_SECONDS = 0
    print("goes on", flush=True)
    time.sleep(600)
"""


def below(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [
        int(child)
        for task in path.parents[1].iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [far for child in children for far in below(child)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "code", "ended"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_a_second_signal_ends_the_process_and_all_that_it_has_started(
    name: str, code: int, ended: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        # Three that come together are one.
        assert [process.stdout.readline() for _ in range(2)] == [f"{ended}\n", "goes on\n"]
        until = time.monotonic() + 60
        while len(family := below(process.pid)) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(family) == 4  # the process above, the child, what that has started, and another
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == f"\nkernelproof: {ended} again: ended at once\n"
    while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)


def test_ctrl_c_twice_is_an_exception_where_the_process_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "TWICE_SECONDS", 0)
    heard: list[str] = []
    before = {number: signal.getsignal(number) for number in signals.ENDINGS}
    with signals.interrupted_once(heard.append):
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert heard == ["interrupted"]
    assert {number: signal.getsignal(number) for number in signals.ENDINGS} == before
