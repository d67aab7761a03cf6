"""The batches that kernels are timed on: equal requests in bfloat16, pages scattered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs
from .gpu import turns

HEAD_DIM = 128
PAGE_SIZE = 16
ELEMENT_SIZE = 2
SEED = 0


@dataclass(frozen=True)
class Case:
    """A batch of equal requests, causal, with pages of 16 keys in NHD.

    Attributes:
        requests: how many.
        queries: query tokens of each: 1 is a decode, ``DRAFTS`` a verify step.
        keys: number of keys of each request.
        qo_heads, kv_heads: numbers of heads, of 128 channels each.
    """

    requests: int
    queries: int
    keys: int
    qo_heads: int = 32
    kv_heads: int = 8

    @property
    def heads(self) -> str:
        """Query heads and key-value heads."""
        return f"{self.qo_heads}/{self.kv_heads}"

    @property
    def pages(self) -> int:
        """How many the batch has."""
        return self.requests * self.keys // PAGE_SIZE

    @property
    def page_bytes(self) -> int:
        """Of the keys and values of one page."""
        return 2 * PAGE_SIZE * self.kv_heads * HEAD_DIM * ELEMENT_SIZE

    @property
    def bytes_moved(self) -> int:
        """The fewest: queries, keys and values read once, outputs written once."""
        rows = self.requests * self.queries * self.qo_heads
        return self.pages * self.page_bytes + 2 * rows * HEAD_DIM * ELEMENT_SIZE

    @property
    def operations(self) -> int:
        """Of both products over the pairs that the mask keeps: 2 a multiplication and addition."""
        seen = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return 4 * HEAD_DIM * self.requests * self.qo_heads * seen


DRAFTS = 4
TARGET_VERIFIES = (Case(64, DRAFTS, 8192), Case(64, DRAFTS, 8192, 64))
TARGET_DECODES = (Case(64, 1, 8192), Case(64, 1, 8192, 64))
TARGET_PREFILLS = (Case(1, 8192, 8192), Case(1, 8192, 8192, 64))
"""What the requirements are about."""
VERIFIES = tuple(
    Case(requests, DRAFTS, keys, qo_heads)
    for qo_heads, keys, requests in product((32, 64), (1024, 8192, 32768), (1, 16, 64))
)
"""One number of tokens: XQA has a module for each."""
DECODES = tuple(
    Case(requests, 1, keys, qo_heads)
    for qo_heads, keys, requests in product(
        (32, 64), (1024, 2048, 8192, 32768), (1, 4, 16, 64, 256)
    )
)
PREFILLS = tuple(
    Case(1, tokens, tokens, qo_heads)
    for qo_heads, tokens in product((32, 64), (1024, 2048, 4096, 8192, 16384))
)


@dataclass(frozen=True, eq=False)
class Pool:
    """A cache that all cases take their pages from: k and v [pages, page_size, kv_heads, dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, cases: tuple[Case, ...], device: str = "cuda") -> Pool:
        """Make one that the largest case fits into, and small ones several times."""
        pages = max(case.pages * _turns(case) for case in cases)
        shape = (pages, PAGE_SIZE, cases[0].kv_heads, HEAD_DIM)
        generator = torch.Generator(device).manual_seed(SEED)
        k, v = (
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            for _ in range(2)
        )
        return cls(k, v)

    def batches(self, case: Case) -> list[PagedAttentionInputs]:
        """Return the same batch on other pages each time, so that no call finds its keys in L2."""
        device = self.k.device
        generator = torch.Generator(device).manual_seed(SEED)
        tokens = case.requests * case.queries
        q = torch.empty(
            tokens, case.qo_heads, HEAD_DIM, dtype=torch.bfloat16, device=device
        ).normal_(generator=generator)
        order = torch.randperm(case.pages, generator=generator, device=device, dtype=torch.int32)
        lengths = torch.full((case.requests,), case.keys, dtype=torch.int32, device=device)
        metadata = BatchMetadata(
            qo_indptr=_steps(case.requests, case.queries).to(device),
            paged_kv_indptr=_steps(case.requests, case.keys // PAGE_SIZE).to(device),
            paged_kv_indices=order,
            paged_kv_last_page_len=torch.full_like(lengths, PAGE_SIZE),
            seq_lens=lengths,
            page_size=PAGE_SIZE,
        )
        return [
            PagedAttentionInputs(
                q=q,
                k_cache=k,
                v_cache=v,
                metadata=metadata,
                block_table=order.view(case.requests, -1),
                kv_layout="NHD",
                causal=True,
                sm_scale=1.0 / math.sqrt(HEAD_DIM),
                window_left=-1,
                logits_soft_cap=0.0,
                sinks=None,
                custom_mask=None,
                k_scale=1.0,
                v_scale=1.0,
                out_dtype=torch.bfloat16,
            )
            for k, v in zip(
                self.k.split(case.pages)[: _turns(case)], self.v.split(case.pages), strict=False
            )
        ]


def _turns(case: Case) -> int:
    return turns(case.pages * case.page_bytes)


def _steps(count: int, step: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32) * step
