"""Laws of parts of a batch say which problem they made of the one that they were given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from kernelproof.impl import Target, find_implementation, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem, problem_from_json
from kernelproof.reference.tensors.inputs import PagedAttentionInputs


class _Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


@implementation("paged_attention", name="nan-beside-long-requests")
def nan_beside_long_requests(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = find_implementation("torch-sdpa-paged")(inputs)
    lengths = inputs.metadata.seq_lens
    if int(lengths.max()) > 8:
        out[lengths == 0] = torch.nan  # one query token each
    return out, lse


def test_doubled_keys_says_that_a_request_has_none_left() -> None:
    problem = AttentionProblem(query_lens=(1, 1), seq_lens=(1, 8), page_size=2, causal=True)
    subject = Subject(nan_beside_long_requests, Target.here("cpu"), _Anywhere())
    verdict = find_law("doubled_keys").check(subject, problem)
    assert (verdict.status, verdict.kind) == ("FAIL", "nan")
    assert verdict.about is not None
    made = problem_from_json(verdict.about)
    assert isinstance(made, AttentionProblem)
    assert made.seq_lens == (0, 16)
