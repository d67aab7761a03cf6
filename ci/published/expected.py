"""One output of a published reference: its answer, and how far roundings may move it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scales:
    """The scales of blocks of codes, which are an output too.

    Attributes:
        name: the output that has them.
        bases: scales and codes of the exact answer, and of those whose scales are others.
        samples, leaning, far: scales of the disturbed answers.
    """

    name: str
    bases: list[tuple[torch.Tensor, torch.Tensor]]
    samples: list[torch.Tensor]
    leaning: list[torch.Tensor]
    far: list[torch.Tensor]


@dataclass
class Expected:
    """One output of a reference.

    Attributes:
        name: where it is: the number of what is returned, or the argument that is written.
        kind: "floats", "codes" (of FP8, whose numbers before them are known), "bytes", "integers".
        honest: the reference's own answer, in the call's own formats.
        exact: the answer in float64; of codes, the numbers before they were rounded.
        samples, leaning, far: disturbed ones: at random, to one side, and ``FAR`` times as much.
        scales: the scales of codes, where these are an output too.
    """

    name: str
    kind: str
    honest: torch.Tensor
    exact: torch.Tensor
    samples: list[torch.Tensor]
    leaning: list[torch.Tensor]
    far: list[torch.Tensor]
    scales: Scales | None = None
