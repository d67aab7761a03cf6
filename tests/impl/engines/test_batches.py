"""Adapters to kernels that prepare batches: what stand-ins are given, what is refused."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.engines.metadata.batches import builder
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM
from kernelproof.properties.laws import laws_of
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import BatchProblem, Problem, SlotsProblem, StepsProblem, materialise
from kernelproof.reference.attention.preparation import OUTPUTS
from kernelproof.reference.tensors.preparation import BatchInputs

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

FILES = {
    "vllm/__init__.py": "raise SystemExit",
    "sglang/__init__.py": "raise SystemExit",
    "vllm/v1/worker/gpu/cp_utils.py": """
def prepare_dcp_local_seq_lens(out, seq_lens, num_reqs, dcp_size, dcp_rank, cp_interleave):
    assert dcp_size > 1 and len(seq_lens) == num_reqs
    turns, rest = seq_lens // (dcp_size * cp_interleave), seq_lens % (dcp_size * cp_interleave)
    out.zero_()
    rest = (rest - dcp_rank * cp_interleave).clamp(0, cp_interleave)
    out[:num_reqs] = turns * cp_interleave + rest
""",
    "vllm/v1/worker/gpu/input_batch.py": """
import torch
_prepare_pos_seq_lens_kernel = None

def prepare_pos_seq_lens(idx_mapping, query_start_loc, num_computed_tokens, pos, seq_lens):
    news = query_start_loc.diff()
    before = num_computed_tokens[idx_mapping.long()]
    seq_lens.zero_()
    seq_lens[: len(news)] = before + news
    places = [torch.arange(n) + b for n, b in zip(news.tolist(), before.tolist())]
    pos[: query_start_loc[-1]] = torch.cat(places)
""",
    "vllm/v1/spec_decode/utils.py": "copy_and_expand_eagle_inputs_kernel = None",
    "sglang/kernels/ops/attention/pad.py": """
def pad_draft_extend_query(q, padded_q, seq_lens_q, cu_seqlens_q):
    assert padded_q.shape[2:] == q.shape[1:]
    for request, (start, count) in enumerate(zip(cu_seqlens_q.tolist(), seq_lens_q.tolist())):
        padded_q[request, :count] = q[start : start + count]
""",
    "sglang/kernels/ops/attention/trtllm_mha_page_table.py": """
def build_trtllm_mha_page_table(
    req_to_token, req_pool_indices, cache_seqlens, page_table, page_size, swa_page_table,
    full_to_swa,
):
    assert not page_table.any() and full_to_swa.unique().equal(full_to_swa.sort()[0])
    for request, keys in enumerate(cache_seqlens.tolist()):
        slots = req_to_token[req_pool_indices[request], :keys:page_size].long()
        swa_page_table[request, : len(slots)] = full_to_swa[slots] // page_size
""",
}
STEPS = (((1, 5, 2), (7, 5, 19)), ((1,), (8,)))
BATCH = BatchProblem("seq_lens", STEPS, 4, "zero_rows", spare_rows=1, spare_entries=3)
TABLE = replace(BATCH, output="page_table", rest="kept")
DRAFTS = replace(BATCH, output="padded_tokens", rest="kept", rejected=((0, 3, 1), (0,)), drafts=2)
EMPTY = BatchProblem(steps=(((), ()),))
EXPANDED = replace(DRAFTS, output="hidden_state_mapping", is_shifted=True)
RANKS = replace(BATCH, output="local_seq_lens", world=3, rank=1, interleave=2)
ROOMS = ("_batches:", "_drafts:", "_ranks:")
ADAPTERS = [name for name, place in BUILT_IN.items() if any(room in place for room in ROOMS)]


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


@pytest.fixture(autouse=True)
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write stand-ins of the engines' files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv(FROM, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm-local-seq-lens", RANKS),
        ("vllm-positions", BATCH),
        ("vllm-positions", replace(BATCH, output="positions", rest="kept")),
        ("sglang-trtllm-page-table", TABLE),
        ("sglang-pad-draft-query", DRAFTS),
    ],
)
def test_kernels_are_given_what_they_take(name: str, problem: BatchProblem) -> None:
    for law in laws_of("prepare_batch"):
        subject = Subject(find_implementation(name), Target.here("cpu"), Stages())
        found = law.check(subject, problem)
        assert found.status == "PASS", f"{law.name}: {found.message}"


@pytest.mark.parametrize(
    ("name", "problem", "why"),
    [
        ("vllm-positions", TABLE, "builds positions (kept), seq_lens (zero_rows)"),
        ("vllm-positions", replace(BATCH, rest="kept"), "builds positions (kept), seq_lens"),
        ("vllm-local-seq-lens", replace(RANKS, world=1, rank=0), "where there are several"),
        ("vllm-block-table", replace(TABLE, rest="zero_rows"), "has no vllm/v1/worker/gpu/block_"),
        ("vllm-expanded-rows", replace(TABLE, output="token_rows"), "no _expand_idx_mapping_kern"),
        ("sglang-trtllm-page-table", replace(TABLE, page_size=3), "a power of two keys"),
        ("sglang-trtllm-page-table", replace(TABLE, window_left=4), "knows no window"),
        (
            "sglang-pad-draft-query",
            replace(DRAFTS, steps=(((), ()),), rejected=()),
            "has a request",
        ),
        ("vllm-expanded-drafts", replace(EXPANDED, is_shifted=False), "takes no hidden states"),
        ("vllm-expanded-drafts", replace(EXPANDED, drafts=0), "and drafts another"),
        ("vllm-expanded-drafts", replace(EXPANDED, rejected=((1, 3, 1), (0,))), "keeps one of its"),
    ],
)
def test_what_a_kernel_does_not_take(name: str, problem: BatchProblem, why: str) -> None:
    refusal = find_implementation(name).refusal(problem, Target.here("cpu"))
    assert why in str(refusal)


@pytest.mark.parametrize("problem", [TABLE, replace(BATCH, output="token_rows", rest="kept")])
def test_what_a_release_lacks_is_named_with_its_file_for_whatever_problem(
    problem: BatchProblem,
) -> None:
    lacking = {
        "vllm-expanded-rows": "no _expand_idx_mapping_kernel in vllm/v1/worker/gpu/input_batch.py",
        "vllm-page-indices": "has no vllm/v1/attention/backends/flashinfer.py",
        "vllm-slot-mappings": "has no vllm/v1/worker/gpu/block_table.py",
        "sglang-seqlens-expand": "no seqlens_expand_kernel in sglang/kernels/ops/attention/pad.py",
        "sglang-dcp-page-table": "has no sglang/kernels/ops/attention/dcp_kernels.py",
        "sglang-dcp-packed-rows": "has no sglang/kernels/ops/kvcache/pd_dcp_gather.py",
        "sglang-steps": "has no sglang/kernels/ops/memory/common.py",
    }
    others: dict[str, Problem] = {"map_slots": SlotsProblem(), "prepare_steps": StepsProblem()}
    for name, why in lacking.items():
        asked = find_implementation(name)
        refusal = asked.refusal(others.get(asked.operation, problem), Target.here("cpu"))
        assert refusal is not None, name
        assert (why in refusal, refusal.code) == (True, "package"), refusal


def test_each_output_is_built_by_an_engine() -> None:
    asked = [
        BatchProblem(output, rest=rest)
        for output, each in OUTPUTS.items()
        for rest in ("kept", "zero_rows", "zero_tails")[: 2 + each.is_table]
    ]
    target = Target.here("cpu")
    built = {
        problem.output
        for name in ADAPTERS
        for problem in asked
        if not str(find_implementation(name).refusal(problem, target)).startswith("builds")
    }
    assert built == set(OUTPUTS)


def test_every_builder_lets_loaded_scalars_bound_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    monkeypatch.setattr("triton.__version__", "3.6.0")
    before, seen = interpreter._patch_lang_tensor, list[bool]()

    def kernel(_inputs: BatchInputs) -> None:
        seen.append(interpreter._patch_lang_tensor is not before)

    build = builder("asked", "vllm.v1.worker.gpu.input_batch", "kernel", {"seq_lens": "kept"})
    build(kernel).function(materialise(BATCH))
    assert seen == [True]
