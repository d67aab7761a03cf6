"""The norm of an expert's output before its routing weight, and how far it carries an error.

Muse Spark normalises the output of each routed expert by its root mean square, before the sum over
experts: sglang's ``kernels/ops/communication/muse_spark_moe_finalize_all_reduce.py`` has the gain
before the norm or, as usual, after it:

    z = gain * y (first) or y,   out = z / sqrt(mean(z^2) + eps),   times gain if not first
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention.error_terms import LOGIT, SUM, growth


class OutputNorm(NamedTuple):
    """A norm by the root mean square.

    Attributes:
        eps: added to the mean of the squares.
        gain: [hidden] in the dtype of the computation, or None.
        first: whether the gain multiplies before the norm.
    """

    eps: float
    gain: torch.Tensor | None = None
    first: bool = False

    def value(self, y: torch.Tensor) -> torch.Tensor:
        """Return the norm of outputs [rows, hidden]."""
        z = y * self.gain if self.gain is not None and self.first else y
        z = z / self._root(z)
        return z * self.gain if self.gain is not None and not self.first else z

    def change(self, y: torch.Tensor, error: torch.Tensor, roundoff: float) -> torch.Tensor:
        """Bound how far an honest kernel's norm is off where y is off by at most ``error``.

        With e the error of z, the root moves by at most rms(e) (the triangle inequality), so that

            |z' / root' - z / root| <= (e + |z| rms(e) / root) / max(root - rms(e), sqrt(eps)).

        Rounding the sum of the squares and the gain adds u (n(hidden) + SUM + LOGIT) of the result.
        """
        z = y
        if self.gain is not None and self.first:
            z, error = y * self.gain, error * self.gain.abs()
            error = error + roundoff * z.abs()
        root, spread = self._root(z), error.square().mean(dim=1, keepdim=True).sqrt()
        least = (root - spread).clamp(min=self.eps**0.5)
        moved = (error + z.abs() * (spread / root)) / least
        if self.gain is not None and not self.first:
            moved = moved * self.gain.abs()
        return moved + roundoff * (growth(y.shape[1]) + SUM + LOGIT) * self.value(y).abs()

    def _root(self, z: torch.Tensor) -> torch.Tensor:
        return (z.square().mean(dim=1, keepdim=True) + self.eps).sqrt()
