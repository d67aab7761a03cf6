"""Autotuned kernels in Triton's interpreter, where there is no device to time them on.

``triton.autotune`` runs every configuration and keeps the fastest. Timing asks the driver for a
GPU, and functions that prune configurations ask torch for its compute capability: without a GPU
either fails.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def smallest_configurations(tensor: torch.Tensor) -> Iterator[None]:
    """Let autotuned kernels that are launched on CPU tensors take their smallest blocks."""
    if tensor.is_cuda:
        yield
        return
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    with (
        mock.patch.object(tuner, "prune_configs", _all),
        mock.patch.object(tuner, "_bench", _size),
    ):
        yield


def _all(tuner: Any, _: dict[str, Any]) -> list[Any]:  # noqa: ANN401  an Autotuner
    configurations: list[Any] = tuner.configs
    return configurations


def _size(_: Any, *__: object, config: Any, **___: object) -> list[float]:  # noqa: ANN401
    """Return the product of a configuration's sizes in the place of three times."""
    sizes = [value for value in config.kwargs.values() if isinstance(value, int)]
    return [float(math.prod(sizes))] * 3
