"""A kernel that fails, for what the ledger and the corpus then keep."""

from __future__ import annotations

import pytest

WRONG = """
import torch
from kernelproof.impl import implementation


@implementation("merge_state", name="mine")
def merge(inputs):
    lse = torch.logsumexp(inputs.lses.double(), dim=0)
    weights = torch.exp(inputs.lses - lse).unsqueeze(-1)
    return (weights * inputs.outs).sum(dim=0).to(inputs.out_dtype), lse.float()
"""


@pytest.fixture(scope="session")
def wrong_merge() -> str:
    """Return the source of a kernel named "mine", wrong where all states of a row are empty."""
    return WRONG
