"""What can be said of a row whose logits are so far off that its keys may change places.

Where FP8 is multiplied in fixed point, a logit of 1e6 is off by hundreds: any key in
reach of that may be the one that counts. Part 2 of the derivation in ``error_terms``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST_LOGIT_ERROR = 30.0
"""Above, expm1 says nothing any more, and would overflow."""


class LogitErrors(NamedTuple):
    """What the logits of a block are off by; R = rows * G.

    Attributes:
        absolute: [N, K, R, S'], d_j; 0 where masked.
        largest: [N, K, R, 1], max d.
        mean: [N, K, R, 1], sum P_j e_j, the sink's share included.
        deviation: [N, K, R, 1], sqrt(sum P_j e_j^2), likewise.
    """

    absolute: torch.Tensor
    largest: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor

    @property
    def reorder(self) -> torch.Tensor:
        """Return the rows [N, K, R, 1] whose keys may change places."""
        return (self.deviation > 1) | (self.largest > LARGEST_LOGIT_ERROR)


def may_reorder(errors: LogitErrors) -> bool:
    """Whether any row's keys may change places; True on a GPU, which is not waited for."""
    if not errors.absolute.shape[-1]:
        return False
    return errors.largest.is_cuda or bool(errors.reorder.any())


def largest_sum(log_weights: torch.Tensor, v: torch.Tensor, errors: LogitErrors) -> torch.Tensor:
    """Return the most that sum P'_j |V_j| may be, P' being any weights within the errors.

    Args:
        log_weights: [N, K, R, S'], log P, -inf where masked.
        v: [N, K, S', E], S' > 0, zero where an entry is no key.
        errors: the errors of the logits.

    Returns:
        [N, K, R, E].
    """
    sizes = v.abs()
    most = (log_weights + errors.absolute).add_(errors.largest).clamp_(max=0.0).exp_()
    return torch.minimum(most @ sizes, sizes.amax(dim=2, keepdim=True))
