"""Draft trees: what each of a request's last tokens sees, and problems that cannot have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernelproof.reference import AttentionProblem, materialise, paged_attention, problem_from_json
from kernelproof.reference.tensors.trees import ancestry, mask_of_trees, tree_parents

TREE = AttentionProblem(query_lens=(7, 1, 16), seq_lens=(20, 5, 16), page_size=4, tree=1)


def test_parents_come_first_and_chains_and_siblings_occur() -> None:
    shapes = set()
    for number in range(1, 40):
        problem = AttentionProblem(query_lens=(8,), seq_lens=(9,), tree=number)
        parents = tree_parents(problem, 0)
        assert all(-1 <= parent < row for row, parent in enumerate(parents))
        chain, star = parents == list(range(-1, 7)), parents == [-1] + [0] * 7
        shapes.add("chain" if chain else "siblings" if star else "mixed")
    assert shapes == {"chain", "siblings", "mixed"}


def test_a_token_sees_its_ancestors_and_itself() -> None:
    mask = ancestry([-1, 0, 0, 1, -1])
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    flat = mask_of_trees([mask], [7]).view(5, 7)
    assert flat[:, :2].all()
    assert torch.equal(flat[:, 2:], mask)


def test_a_request_keeps_its_tree_in_another_batch() -> None:
    alone = AttentionProblem(query_lens=(16,), seq_lens=(16,), tree=1, request_ids=(2,))
    assert tree_parents(alone, 0) == tree_parents(TREE, 2)
    assert tree_parents(alone, 0) != tree_parents(replace(alone, tree=2), 0)


def test_the_oracle_agrees_with_torch_on_a_tree() -> None:
    inputs: Any = materialise(TREE, "cpu")
    out = paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, **inputs.keywords()
    ).out
    row = start = 0
    for request, (t, s) in enumerate(zip(TREE.query_lens, TREE.seq_lens, strict=True)):
        pages = inputs.block_table[request, : -(-s // TREE.page_size)].long()
        k, v = (
            cache[pages].flatten(0, 1)[:s].double().transpose(0, 1)
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        seen = torch.ones(t, s, dtype=torch.bool)
        seen[:, s - t :] = inputs.tree_mask[start : start + t * t].view(t, t)
        q = inputs.q[row : row + t].double().transpose(0, 1)
        expected = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        torch.testing.assert_close(out[row : row + t], expected.transpose(0, 1))
        row, start = row + t, start + t * t


@pytest.mark.parametrize(
    "changed",
    [{"custom_mask": True}, {"seq_lens": (6, 5, 16)}, {"tree": -1},
     {"operation": "append_paged_kv"}],
)  # fmt: skip
def test_what_has_no_tree(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"problem field (tree|seq_lens)"):
        replace(TREE, **changed)


def test_json_names_a_tree_only_where_there_is_one() -> None:
    assert problem_from_json(TREE.to_json()) == TREE
    assert "tree" not in AttentionProblem().to_json()
    assert not AttentionProblem(seq_lens=(4097,), regime="exact_grid").exact
