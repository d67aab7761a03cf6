"""The order in which modules are built."""

from __future__ import annotations

import threading
import time

import pytest

from kernelproof.properties.search.building import BuildScheduler


def order_of(builds: list[tuple[str, float]], at_a_time: int) -> list[str]:
    """Queue builds behind one that holds every turn, and give the order in which they begin."""
    turns, begun = BuildScheduler(at_a_time), list[str]()
    hold = threading.Event()

    def one(owner: str, minutes: float) -> None:
        with turns.turn(owner, minutes):
            if owner == "first":
                hold.wait(30)
            else:
                begun.append(owner)

    threads = [threading.Thread(target=one, args=("first", 1.0)) for _ in range(at_a_time)]
    threads += [threading.Thread(target=one, args=build) for build in builds]
    for thread in threads:
        thread.start()
        while not (turns._waiting or turns._free < at_a_time):
            time.sleep(0.001)
    while len(turns._waiting) < len(builds):
        time.sleep(0.001)
    hold.set()
    for thread in threads:
        thread.join(30)
    return begun


def test_each_has_its_first_module_before_any_has_its_second() -> None:
    builds = [("decode", 1.5), ("fa2", 5.5), ("fa3", 15.0), ("decode", 1.5), ("fa3", 15.0)]
    builds += [("fa3", 15.0), ("old", 0.0), ("old", 0.0)]
    order = ["old", "old", "fa3", "fa2", "decode", "fa3", "decode", "fa3"]
    assert order_of(builds, 1) == order


def test_a_build_that_fails_gives_its_turn_back() -> None:
    turns = BuildScheduler(1)
    with pytest.raises(ZeroDivisionError), turns.turn("a", 1.0):
        _ = 1 / 0
    with turns.turn("b", 1.0):
        pass


def test_no_more_than_may_run_at_a_time() -> None:
    turns, running, most = BuildScheduler(3), [0], [0]
    lock, three = threading.Lock(), threading.Barrier(3)

    def one(number: int) -> None:
        with turns.turn(f"{number % 4}", float(number)):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            three.wait(30)
            with lock:
                running[0] -= 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most[0] == 3


def test_builds_take_the_shares_that_they_ask_for() -> None:
    turns, running, most = BuildScheduler(4), [0], [0]
    lock = threading.Lock()

    def one(share: int) -> None:
        with turns.turn(f"{share}", 1.0, share):
            with lock:
                running[0] += share
                most[0] = max(most[0], running[0])
            time.sleep(0.005)
            with lock:
                running[0] -= share

    threads = [threading.Thread(target=one, args=(1 + number % 3,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert running == [0]
    assert 3 <= most[0] <= 4
