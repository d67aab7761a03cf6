"""Adapters to SGLang: stand-ins of its files show what they are given, and real files are judged.

A stand-in has the parameters of SGLang's function and computes by the oracle: parity then shows
that each argument arrives where SGLang expects it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.engines.sglang_calls import HOMES
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import laws_of
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import HANDLER
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import (
    AttentionProblem,
    BatchProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    RopeAppendProblem,
    RouteProblem,
)
from kernelproof.reference.operations import OPERATIONS as ORACLES

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

POOL = """
import torch
from kernelproof.reference import build_metadata, paged_attention
from sglang.srt.utils import is_hip


def over_slots(q, k, v, query_lens, indptr, slots, **options):
    lengths = indptr.diff()
    table = slots.new_zeros(len(lengths), int(lengths.max()) + 1, dtype=torch.int32)
    for row, (begin, end) in enumerate(zip(indptr.tolist(), indptr[1:].tolist())):
        table[row, : end - begin] = slots[begin:end]
    metadata = build_metadata(query_lens, lengths, table, 1)
    return paged_attention(q, k[:, None], v[:, None], metadata, **options)
"""
DECODE = """
import torch
from {home}.pool import over_slots


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits,
    max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0, sinks=None{newer}
):
    assert attn_logits.shape == (*attn_lse.shape, v_buffer.shape[-1])
    assert num_kv_splits.eq(max_kv_splits).all() and attn_lse.shape[2] == max_kv_splits
    found = over_slots(
        q, k_buffer, v_buffer, torch.ones_like(num_kv_splits), kv_indptr, kv_indices,
        sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale, logits_soft_cap=logit_cap, sinks=sinks,
    )
    o.copy_(found.out)
    attn_lse[..., 0] = found.lse
"""
EXTEND = """
import torch
from {home}.pool import over_slots


def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
    custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
    logit_cap=0.0, skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None,
    window_kv_offsets=None{newer}
):
    assert max_len_extend == qo_indptr.diff().max() and not skip_prefix_custom_mask
    prefixes = kv_indptr.diff()
    assert window_kv_offsets.shape == prefixes.shape and not window_kv_offsets.any()
    assert mask_indptr.diff().equal((prefixes + qo_indptr.diff()) * qo_indptr.diff())
    # The new keys follow those of the pool, as SGLang's kernel takes them after the prefix.
    slots, lengths = [], prefixes + qo_indptr.diff()
    for row in range(len(prefixes)):
        slots += kv_indices[kv_indptr[row] : kv_indptr[row + 1]].tolist()
        slots += range(len(k_buffer) + int(qo_indptr[row]), len(k_buffer) + int(qo_indptr[row + 1]))
    k = torch.cat([k_buffer * k_scale, k_extend])
    v = torch.cat([v_buffer * v_scale, v_extend])
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    found = over_slots(
        q_extend, k, v, qo_indptr.diff(), indptr, torch.tensor(slots), causal=is_causal,
        sm_scale=sm_scale, logits_soft_cap=logit_cap, window_left=sliding_window_size, sinks=sinks,
        custom_mask=None if custom_mask is None else custom_mask.bool(),
    )
    o_extend.copy_(found.out)
    {lse}
"""
PREFILL = """
from kernelproof.reference import ragged_attention
from sglang.srt.utils import is_cuda


def context_attention_fwd(
    q, k, v, o, b_start_loc, b_seq_len, max_input_len, is_causal=True{newer}
):
    assert b_start_loc.equal(b_seq_len.cumsum(0) - b_seq_len) and max_input_len == b_seq_len.max()
    indptr = b_seq_len.new_zeros(len(b_seq_len) + 1)
    indptr[1:] = b_seq_len.cumsum(0)
    o.copy_(ragged_attention(q, k, v, indptr, indptr, causal=is_causal{scale}).out)
"""
MERGE = """
import torch
from kernelproof.reference import merge_states


def merge_state_triton(
    prefix_output, prefix_lse, suffix_output, suffix_lse, output=None, output_lse=None
):
    found = merge_states(
        torch.stack([prefix_output, suffix_output]), torch.stack([prefix_lse, suffix_lse])
    )
    return output.copy_(found.out), output_lse.copy_(found.lse)
"""
MIXED = AttentionProblem(
    query_lens=(3, 1, 5),
    seq_lens=(4, 17, 5),
    num_kv_heads=2,
    group_size=2,
    causal=True,
    page_size=4,
    page_order=3,
)
DECODED = replace(MIXED, query_lens=(1, 1, 1), causal=False)
RAGGED = replace(
    MIXED, operation="ragged_attention", seq_lens=MIXED.query_lens, page_size=1, page_order=0
)


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def write(folder: Path, home: str, *, newest: bool) -> None:
    """Write stand-ins of a release's files, where and with the parameters that it has them."""
    place = folder.joinpath(*home.split("."))
    place.mkdir(parents=True)
    (folder / "sglang" / "srt").mkdir(exist_ok=True)
    (folder / "sglang" / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    version = "0.5.23" if newest else "0.5.10"
    text = f"version = '{version}'"
    (folder / "sglang" / "_version.py").write_text(text, encoding="utf-8")
    lse = "assert lse_extend is not None; lse_extend.copy_(found.lse)" if newest else ""
    extra = {
        "pool": {},
        "decode_attention": {"newer": ", has_mla=False, page_size=1" if newest else ""},
        "extend_attention": {
            "newer": ", lse_extend=None, page_size=1" if newest else "", "lse": lse
        },
        "prefill_attention": {
            "newer": ", sm_scale=None" if newest else "",
            "scale": ", sm_scale=sm_scale" if newest else "",
        },
        "merge_state": {},
    }  # fmt: skip
    texts = (POOL, DECODE, EXTEND, PREFILL, MERGE)
    for (name, fields), text in zip(extra.items(), texts, strict=True):
        found = text.format(home=home, **fields) if fields else text
        (place / f"{name}.py").write_text(found, encoding="utf-8")


@pytest.fixture(params=HOMES)
def sglang(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write stand-ins of each kind of release; return where it has its kernels."""
    write(tmp_path, request.param, newest=request.param == HOMES[0])
    monkeypatch.setenv(FROM, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return str(request.param)


def judged(name: str, problem: Problem) -> Verdict:
    (parity,) = (law for law in laws_of(problem.operation) if law.name.endswith("parity"))
    return parity.check(Subject(find_implementation(name), Target.here("cpu"), Stages()), problem)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sglang-decode", replace(DECODED, group_size=1)),
        ("sglang-decode-grouped", DECODED),
        ("sglang-decode-grouped", replace(DECODED, sinks=True, logits_soft_cap=3.0, sm_scale=0.5)),
        ("sglang-decode-grouped", replace(DECODED, k_scale=1.25, v_scale=2.0, strided_q=True)),
        ("sglang-decode-grouped", replace(DECODED, page_size=1, kv_layout="HND", strided_kv=True)),
        ("sglang-decode-grouped",
         replace(DECODED, num_kv_heads=1, head_dim_qk=24, values_in_keys=True)),
        ("sglang-extend", MIXED),
        ("sglang-extend", replace(MIXED, window_left=2, sinks=True, logits_soft_cap=3.0)),
        ("sglang-extend", replace(MIXED, k_scale=0.5, v_scale=2.0, sm_scale=0.5)),
        ("sglang-extend", replace(MIXED, causal=False, custom_mask=True, strided_q=True)),
        ("sglang-extend", replace(MIXED, query_lens=(0, 1, 5), page_size=1, strided_kv=True)),
        ("sglang-prefill", RAGGED),
        ("sglang-prefill", replace(RAGGED, causal=False, strided_q=True, strided_kv=True)),
        ("sglang-merge-state", MergeProblem(num_tokens=3, num_heads=2, empty="some")),
    ],
)  # fmt: skip
def test_each_argument_arrives(name: str, problem: Problem) -> None:
    verdict = judged(name, problem)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("sglang-decode", DECODED, "are sglang-decode-grouped"),
        ("sglang-decode-grouped", replace(DECODED, group_size=1), "is sglang-decode"),
        ("sglang-decode-grouped", MIXED, "one query a request"),
        ("sglang-decode-grouped", replace(DECODED, seq_lens=(4, 0, 5)), "without keys is NaN"),
        ("sglang-decode-grouped", replace(DECODED, window_left=3), "the window's keys only"),
        ("sglang-decode-grouped", replace(DECODED, kv_layout="HND"), "one behind the other"),
        ("sglang-decode-grouped", replace(DECODED, kv_cache="float8_e4m3fn"), "feature fp8_kv"),
        ("sglang-extend", replace(MIXED, query_lens=(5, 1, 1)), "new tokens are keys"),
        ("sglang-extend", replace(MIXED, k_scale=1.25), "than a power of two"),
        ("sglang-extend", replace(MIXED, causal=False, window_left=3), "has two sides"),
        ("sglang-extend", replace(MIXED, custom_mask=True), "stands in for the causal one"),
        ("sglang-extend", replace(MIXED, logits_bias="dense"), "no score modifiers"),
        ("sglang-prefill", replace(RAGGED, seq_lens=(4, 17, 5)), "as many queries as keys"),
        ("sglang-prefill", replace(RAGGED, head_dim_vo=32), "the same channels"),
        ("sglang-prefill", replace(RAGGED, sinks=True), "no sinks"),
        ("sglang-prefill", replace(RAGGED, v_scale=2.0), "no scales"),
        ("sglang-merge-state", MergeProblem(num_states=3), "merges 2 states"),
    ],
)
def test_what_is_not_claimed(name: str, problem: Problem, said: str) -> None:
    refusal = find_implementation(name).refusal(problem, Target.here("cpu"))
    assert refusal is not None
    assert said in refusal


def test_what_older_releases_do_not_have(sglang: str) -> None:
    for name, problem in (
        ("sglang-prefill", replace(RAGGED, sm_scale=0.5)),
        ("sglang-decode", replace(DECODED, group_size=1, dtype="float16")),
    ):
        refusal = find_implementation(name).refusal(problem, Target.here("cpu"))
        assert (refusal is None) == (sglang == HOMES[0])


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.startswith("sglang-")])
def test_a_module_is_named_alike_whatever_the_lengths(name: str) -> None:
    found = find_implementation(name)
    assert found.compile_key is not None
    if found.operation == "merge_state":
        merges = [MergeProblem(num_tokens=tokens, num_heads=3) for tokens in range(1, 9)]
        keys = {found.compile_key(problem) for problem in found.problems_of_module(merges[0])}
        assert {found.compile_key(problem) for problem in merges} <= keys
        return
    if found.operation == "moe":
        calls = [MoEProblem(num_tokens=tokens) for tokens in range(1, 65)]
        assert len({found.module_of(problem) for problem in calls}) == 1
        keys = {found.compile_key(problem) for problem in found.problems_of_module(calls[0])}
        assert {found.compile_key(problem) for problem in calls} <= keys
        return
    if found.operation == "route":  # Triton compiles for 1, and for what 16 divides
        kinds = [(1,), (16, 32, 48, 64), (2, 3, 8, 15, 17, 63)]
        modules = [
            {found.module_of(RouteProblem(num_tokens=tokens)) for tokens in kind} for kind in kinds
        ]
        assert [len(each) for each in modules] == [1, 1, 1]
        assert len(set.union(*modules)) == len(kinds)
        return
    if found.operation == "prepare_batch":  # compiled for each shape of tables and buffers
        steps = [(((1, 1), (keys, 17 - keys)),) for keys in range(1, 17)]
        assert (
            len({found.compile_key(BatchProblem(steps=each, page_size=32)) for each in steps}) == 1
        )
        return
    if found.operation in ("quantize", "norm_and_quantize"):  # Triton compiles for one token
        kind: Any = ORACLES[found.operation].problem
        named = {found.module_of(kind(num_tokens=tokens)) for tokens in range(2, 33)}
        assert len(named) == 1
        return
    if found.operation == "rope_and_append":
        named = {found.module_of(RopeAppendProblem((n,), (n + 3,))) for n in range(1, 33)}
        assert len(named) == 1
        return
    base = RAGGED if found.operation == "ragged_attention" else DECODED
    batches = [replace(base, query_lens=(1,) * n, seq_lens=(n,) * n) for n in (1, 2, 15, 16, 32)]
    assert len({found.module_of(problem) for problem in batches}) == 1
    keys = {found.compile_key(problem) for problem in found.problems_of_module(base)}
    assert {found.compile_key(problem) for problem in batches} <= keys


ENGINES = Path(__file__).parents[3] / ".engines"
RELEASES: list[str] = sorted(each.name for each in ENGINES.glob("sglang-*"))


@pytest.fixture(scope="module", params=RELEASES or [""])
def release(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """Lend a worker that loads the files of a release."""
    if not request.param:
        pytest.skip("the files of SGLang are not there: `make engines` fetches them")
    environment = {"TRITON_INTERPRET": "1", FROM: str(ENGINES / request.param)}
    preload = ("torch", "kernelproof.properties.worker.tasks")
    with (
        WorkerPool(HANDLER, preload=preload, environment=environment, standby=False) as pool,
        pool.lease() as lent,
    ):
        yield lent


LONG = replace(DECODED, seq_lens=(70, 1, 33), logits_soft_cap=5.0, sinks=True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sglang-decode", replace(LONG, group_size=1)),
        ("sglang-decode-grouped", LONG),
        ("sglang-extend", replace(MIXED, window_left=2, sinks=True)),
        ("sglang-extend", replace(MIXED, causal=False, custom_mask=True)),
        ("sglang-prefill", replace(RAGGED, query_lens=(70, 2), seq_lens=(70, 2))),
        ("sglang-merge-state", MergeProblem(num_tokens=3, num_heads=2)),
        ("sglang-kv-indices", BatchProblem(steps=(((1, 3), (70, 600)),), window_left=5)),
        ("sglang-decode-metadata", BatchProblem("page_table", (((1, 3), (70, 600)),), 16)),
    ],
)
def test_real_files(release: Worker, name: str, problem: Problem) -> None:
    (law,) = (law.name for law in laws_of(problem.operation) if law.name.endswith("parity"))
    address = Address(BUILT_IN[name], None, "cpu")
    outcome = release.run(address.case(law, problem), Deadlines(run=60.0))
    assert outcome.result is not None, outcome
    verdict = Verdict.from_json(outcome.result)
    assert verdict.status == "PASS", verdict.message
