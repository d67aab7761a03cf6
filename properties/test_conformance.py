"""The suite as tests: `pytest --pyargs kernelproof.properties --impl my.module:kernel -n auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from kernelproof import __version__

if TYPE_CHECKING:
    from kernelproof.properties.collection.conformance import Suite
    from kernelproof.properties.collection.surveying import Item


def _suite(config: pytest.Config) -> Suite:
    if not config.pluginmanager.hasplugin("kernelproof"):
        message = "the pytest plugin of Kernelproof is not loaded: add -p kernelproof"
        raise pytest.Collector.CollectError(message)
    from kernelproof.properties.collection.xdist_lock import SuiteRefusedError
    from kernelproof.properties.plugin import suite_of

    try:
        return suite_of(config)
    except SuiteRefusedError as error:
        raise pytest.Collector.CollectError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each stored case, and for each implementation, law and configuration."""
    suite = _suite(metafunc.config)
    timeouts = metafunc.config.pluginmanager.hasplugin("timeout")
    metafunc.parametrize(
        "item",
        [
            pytest.param(
                item, id=item.id, marks=_marks(item, suite.seconds(item) if timeouts else None)
            )
            for item in suite.items
        ],
    )


def _marks(item: Item, seconds: float | None) -> list[pytest.MarkDecorator]:
    marks = [
        pytest.mark.kernelproof(
            implementation=item.implementation.name,
            operation=item.implementation.operation,
            law=item.law,
        )
    ]
    if seconds is not None:
        # The isolated worker has deadlines; a shorter one for all tests must not cut them off.
        marks.append(pytest.mark.timeout(seconds))
    return marks


def test_law(item: Item, request: pytest.FixtureRequest) -> None:
    """Look for a problem on which the law does not hold."""
    from kernelproof.properties.plugin import keep_judged

    suite = _suite(request.config)
    judged = suite.judge(item)
    # Not by record_property, which warns in every run that writes JUnit XML in pytest's own format.
    told: list[tuple[str, object]] = request.node.user_properties
    told += [("kernelproof", __version__), *judged.properties.items()]
    if judged.outcome != "passed":
        told.append(("reason", judged.text.splitlines()[0]))
    keep_judged(request.node, judged.outcome)
    if suite.ending.asked:
        request.session.shouldstop = "kernelproof: interrupted"
    if judged.outcome != "passed":
        _end(judged.outcome, judged.text)


def _end(outcome: str, text: str) -> NoReturn:
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "xfailed":
        pytest.xfail(text)
    pytest.fail(text, pytrace=False)
