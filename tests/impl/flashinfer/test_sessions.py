"""Sessions of FlashInfer's wrappers, and their graphs, without a GPU.

Stand-ins bind to the real signatures and answer by the oracle. They keep what the real ones keep: a
plan until the next, and in CUDA graph mode buffers of fixed size, whose contents a run reads.
"""

from __future__ import annotations

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Implementation, Target, find_implementation
from kernelproof.impl.flashinfer.calls import packed_bytes
from kernelproof.impl.protocol import GraphSession, ScratchSession
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import (
    AttentionOutput,
    AttentionProblem,
    BatchMetadata,
    KVLayout,
    materialise,
    oracle,
    paged_attention,
    ragged_attention,
)
from kernelproof.reference.attention.metadata import last_page_len

pytestmark = pytest.mark.skipif(
    missing("flashinfer", "flashinfer") is not None, reason="flashinfer is not installed"
)
OPTIONS = ("sm_scale", "window_left", "logits_soft_cap")


def bound(real: Any, method: str, *args: Any, **keywords: Any) -> None:  # noqa: ANN401
    """Check that a call fits a method of FlashInfer's class."""
    function = getattr(real, f"_{method}_impl", getattr(real, method))
    inspect.signature(function).bind(None, *args, **keywords)


def base_2(result: AttentionOutput, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return result.out.to(dtype), (result.lse * math.log2(math.e)).float()


class Wrapper:
    """Stands for a decode or prefill wrapper of paged caches, or for ``BatchAttention``."""

    def __init__(self, real: Any, **options: Any) -> None:  # noqa: ANN401  a class of FlashInfer
        inspect.signature(real.__init__).bind(None, **options)
        self._real, self._layout = real, options["kv_layout"]
        buffers = {
            k: v for k, v in options.items() if "_buf" in k and k.startswith(("qo", "paged"))
        }
        self._buffers = {k.removesuffix("fer").removesuffix("_buf"): v for k, v in buffers.items()}
        self._fixed = self.is_cuda_graph_enabled = options.get("use_cuda_graph", False)
        for name, buffer in self._buffers.items():
            setattr(self, f"_{name}_buf", buffer)
        self._mask = options.get("custom_mask_buf"), options.get("mask_indptr_buf")
        self._most_rows: int | None = None
        self._planned: dict[str, Any] = {}
        self.calls: list[str] = []

    def plan(self, **keywords: Any) -> None:  # noqa: ANN401
        bound(self._real, "plan", **keywords)
        self.calls.append("plan")
        named = {"indptr": "paged_kv_indptr", "indices": "paged_kv_indices",
                 "last_page_len": "paged_kv_last_page_len", "kv_indptr": "paged_kv_indptr",
                 "kv_indices": "paged_kv_indices"}  # fmt: skip
        planned = {named.get(name, name): value for name, value in keywords.items()}
        requests = len(planned["paged_kv_indptr"]) - 1
        each = planned.setdefault("q_len_per_req", 1)
        planned.setdefault("qo_indptr", torch.arange(requests + 1, dtype=torch.int32) * each)
        if "kv_len_arr" in planned:
            planned["paged_kv_last_page_len"] = torch.tensor(
                [last_page_len(int(s), planned["page_size"]) for s in planned["kv_len_arr"]],
                dtype=torch.int32,
            )
        if "uniform_q_len" in planned:
            lengths = set(planned["qo_indptr"].diff().tolist())
            assert lengths == {planned["uniform_q_len"]}, "the hint would be dropped"
        if self._fixed:
            if planned.get("custom_mask") is not None:
                self._keep_mask(planned)
            self._check(int(planned["qo_indptr"][-1]), requests)
            kept = self._planned.get("q_len_per_req", each)
            assert each == kept, "q_len_per_req is part of the frozen cudagraph shape"
            for name, buffer in self._buffers.items():
                buffer[: len(planned[name])].copy_(planned[name])
                planned[name] = buffer
        self._planned, self._cached_module = planned, None
        if each > 1:
            assert int(self._metadata().seq_lens.min()) >= each, "fewer keys than q_len_per_req"

    def fast_plan(self, **keywords: Any) -> None:  # noqa: ANN401
        """Plan as ``fast_decode_plan`` does: nothing is copied, and an earlier plan's is kept."""
        self.calls.append("fast plan")
        each = keywords["q_len_per_req"]
        assert self._planned["q_len_per_req"] == each, "causal is the earlier plan's"
        named = {
            f"paged_kv_{name}": keywords[name] for name in ("indptr", "indices", "last_page_len")
        }
        if self._fixed:
            assert all(named[name] is buffer for name, buffer in self._buffers.items())
        assert torch.equal(named["paged_kv_indptr"], keywords["global_override_indptr_cpu"])
        requests = torch.arange(len(keywords["last_page_len"]) + 1, dtype=torch.int32)
        self._planned = {**self._planned, **keywords, **named, "qo_indptr": requests * each}

    def _keep_mask(self, planned: dict[str, Any]) -> None:
        """Keep a mask as bits, where FlashInfer counts its requests' keys: by their last pages."""
        bits, indptr = self._mask
        assert bits is not None, "custom_mask_buf must be initialized in cuda graph mode"
        assert indptr is not None
        pages, size = planned["paged_kv_indptr"].cpu().diff(), planned["page_size"]
        keys = (pages - 1) * size + planned["paged_kv_last_page_len"].cpu()
        counts = (planned["qo_indptr"].diff() * keys).tolist()
        assert min(counts) >= 0, "a mask of fewer keys than none"
        assert sum(counts) == len(planned["custom_mask"])
        packed = packed_bytes(planned["custom_mask"], counts)
        bits[: len(packed)].copy_(packed)
        lengths = torch.tensor([0, *(-(-count // 8) for count in counts)])
        indptr.copy_(lengths.cumsum(0))

    def _kept_mask(self, metadata: BatchMetadata) -> torch.Tensor | None:
        """Return the mask that a run reads: a wrapper for graphs reads what its buffer holds."""
        bits, indptr = self._mask
        if bits is None or indptr is None:
            return self._planned.get("custom_mask")
        counts = (metadata.qo_indptr.diff() * metadata.seq_lens).tolist()
        places = torch.arange(8)
        return torch.cat(
            [
                (bits[begin : begin - (-count // 8)].unsqueeze(-1) >> places & 1).flatten()[:count]
                for begin, count in zip(indptr.tolist(), counts, strict=False)
            ]
        ).bool()

    def _check(self, rows: int, requests: int) -> None:
        if requests != len(self._buffers["paged_kv_indptr"]) - 1:
            message = "The batch size should be fixed in cudagraph mode"
            raise ValueError(message)
        if self._most_rows is None:
            self._most_rows = rows
        if rows > self._most_rows:
            message = "The total number of rows cannot exceed the number set during initialization"
            raise ValueError(message)

    def _metadata(self) -> BatchMetadata:
        planned = self._planned
        indptr, last = planned["paged_kv_indptr"].cpu(), planned["paged_kv_last_page_len"].cpu()
        pages, size = indptr.diff(), planned["page_size"]
        last = torch.where(pages == 0, 0, last)  # as kernels do
        return BatchMetadata(
            qo_indptr=planned["qo_indptr"].int().clone(),
            paged_kv_indptr=indptr.clone(),
            paged_kv_indices=planned["paged_kv_indices"][: int(indptr[-1])].clone(),
            paged_kv_last_page_len=last.clone(),
            seq_lens=((pages - 1).clamp(min=0) * size + last).int(),
            page_size=size,
        )

    def run(self, q: torch.Tensor, caches: Any, *args: Any, **keywords: Any) -> Any:  # noqa: ANN401
        bound(self._real, "run", q, caches, *args, **keywords)
        self.calls.append("run")
        metadata, planned = self._metadata(), self._planned
        assert q.dtype == planned["q_data_type"], "q is not of the planned dtype"
        assert caches[0].dtype == planned["kv_data_type"], "the cache is not of the planned dtype"
        tokens = int(metadata.qo_indptr[-1])
        if "Prefill" in self._real.__name__ and len(q) != tokens:  # as 0.7.2.post1 does
            message = f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({tokens})"
            raise ValueError(message)
        result = paged_attention(
            q[:tokens],
            caches[0],
            caches[1],
            metadata,
            kv_layout=self._layout,
            causal=planned.get("causal", True),
            custom_mask=self._kept_mask(metadata),
            k_scale=keywords.get("k_scale") or 1.0,
            v_scale=keywords.get("v_scale") or 1.0,
            **{name: planned[name] for name in OPTIONS if name in planned},
        )
        out = q.new_zeros((len(q), q.shape[1], result.out.shape[-1]))
        lse = q.new_zeros((len(q), q.shape[1]), dtype=torch.float32)
        out[:tokens], lse[:tokens] = base_2(result, q.dtype)
        return out, lse


class RaggedWrapper:
    """Stands for the prefill wrapper of ragged keys."""

    def __init__(self, real: Any, **options: Any) -> None:  # noqa: ANN401  a class of FlashInfer
        inspect.signature(real.__init__).bind(None, **options)
        self._real = real
        self._planned: dict[str, Any] = {}
        self.calls: list[str] = []

    def plan(self, **keywords: Any) -> None:  # noqa: ANN401
        bound(self._real, "plan", **keywords)
        self.calls.append("plan")
        self._planned = keywords

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> Any:  # noqa: ANN401
        bound(self._real, "run", q, k, v, **keywords)
        self.calls.append("run")
        planned = self._planned
        result = ragged_attention(
            q,
            k,
            v,
            planned["qo_indptr"],
            planned["kv_indptr"],
            causal=planned["causal"],
            custom_mask=planned["custom_mask"],
            **{name: planned[name] for name in OPTIONS},
        )
        return base_2(result, q.dtype)


Made = list["Wrapper | RaggedWrapper"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Put stand-ins in the place of FlashInfer's wrappers, and list those that are made."""
    import flashinfer

    from kernelproof.impl.flashinfer import (
        calls as flashinfer_calls,
    )
    from kernelproof.impl.flashinfer import (
        graphs as flashinfer_graphs,
    )
    from kernelproof.impl.flashinfer import (
        plans as flashinfer_plans,
    )
    from kernelproof.impl.flashinfer import (
        sessions as flashinfer_sessions,
    )

    wrappers: Made = []

    def stand_in(name: str, **options: Any) -> Wrapper | RaggedWrapper:  # noqa: ANN401
        kind = RaggedWrapper if "Ragged" in name else Wrapper
        wrappers.append(kind(getattr(flashinfer, name), **options))
        return wrappers[-1]

    def new_wrapper(name: str, _: torch.device, **options: Any) -> Wrapper | RaggedWrapper:  # noqa: ANN401
        return stand_in(name, float_workspace_buffer=None, **options)

    class Module:
        @staticmethod
        def BatchAttention(**options: Any) -> Wrapper | RaggedWrapper:  # noqa: ANN401, N802
            return stand_in("BatchAttention", **options)

        @staticmethod
        def fast_decode_plan(planned: Wrapper, **keywords: Any) -> None:  # noqa: ANN401
            inspect.signature(flashinfer.fast_decode_plan).bind(planned, **keywords)
            planned.fast_plan(**keywords)

    workspace = torch.zeros(16, dtype=torch.uint8)
    for module in (flashinfer_sessions, flashinfer_graphs):
        monkeypatch.setattr(module, "new_wrapper", new_wrapper)
        monkeypatch.setattr(module, "shared_workspace", lambda _: workspace)
    monkeypatch.setattr(flashinfer_sessions, "flashinfer", Module)
    monkeypatch.setattr(flashinfer_plans, "flashinfer", Module)
    monkeypatch.setattr(flashinfer_calls, "version", lambda: "0.7.2.post1")
    flashinfer_graphs._replays.cache_clear()
    return wrappers


class Anywhere:
    """Stages that nobody watches."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


def life_cycle(implementation: Implementation, problem: AttentionProblem) -> Verdict:
    # What is claimed on a GPU is tried here: the stand-ins need none.
    anywhere = replace(implementation, supports=_bfloat16_or_float16, backend="")
    try:
        return find_law("life_cycle").check(
            Subject(anywhere, Target.here("cpu"), Anywhere()), problem
        )
    except Stop as stop:
        return stop.verdict


def _bfloat16_or_float16(problem: Any, target: Target) -> bool | str:  # noqa: ANN401
    del target
    return problem.dtype != "float32" or "16-bit outputs"


DECODES = AttentionProblem(
    query_lens=(1, 1, 1),
    seq_lens=(9, 4, 6),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="bfloat16",
    page_size=4,
    causal=True,
)
PREFILLS = replace(DECODES, query_lens=(3, 1, 2), strided_q=True, strided_kv=True)
VERIFIES = replace(PREFILLS, query_lens=(2, 2, 2))
PLANNED = [
    ("decode", DECODES),
    ("decode-fa2", DECODES),
    ("decode-fa2-fast-plan", DECODES),
    ("prefill-fa2", PREFILLS),
    ("prefill-fa3", PREFILLS),
    ("batch-attention", PREFILLS),
    ("ragged-fa2", replace(PREFILLS, operation="ragged_attention")),
    ("ragged-fa3", replace(PREFILLS, operation="ragged_attention")),
]
GRAPHS = [
    ("decode-graph", DECODES),
    ("decode-fa2-graph", DECODES),
    ("decode-fa2-graph", VERIFIES),
    ("decode-fa2-fast-plan-graph", DECODES),
    ("decode-fa2-fast-plan-graph", VERIFIES),
    ("prefill-fa2-graph", PREFILLS),
    ("prefill-fa2-uniform-graph", VERIFIES),
    ("prefill-fa3-graph", PREFILLS),
]


@pytest.mark.parametrize(("name", "problem"), [*PLANNED, *GRAPHS], ids=lambda each: str(each)[:20])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_life_cycle_of_a_session_is_right(
    name: str, problem: AttentionProblem, layout: KVLayout, made: Made
) -> None:
    found = find_implementation(f"flashinfer-{name}")
    assert found.session is not None
    assert isinstance(found.session(), GraphSession) == name.endswith("-graph")
    assert isinstance(found.session(), ScratchSession) == (name != "batch-attention")
    for seed in range(4):
        verdict = life_cycle(found, replace(problem, seed=seed, kv_layout=layout))
        assert verdict.status == "PASS", verdict
        assert not verdict.vacuous
    assert {"plan", "run"} <= {call for each in made for call in each.calls}


@pytest.mark.parametrize(("name", "problem"), GRAPHS, ids=lambda each: str(each)[:20])
def test_a_batch_of_more_pages_than_usual_has_a_larger_buffer(
    name: str, problem: AttentionProblem, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 9 requests of 16,384 pages: single tokens of the verify steps of three."""
    monkeypatch.setattr("kernelproof.impl.flashinfer.graphs.MOST_PAGES", 1)
    few = replace(problem, seq_lens=tuple(4 for _ in problem.seq_lens))
    found = find_implementation(f"flashinfer-{name}")
    assert found.session is not None
    session: Any = found.session()
    for each in (few, replace(problem, seq_lens=tuple(400 for _ in problem.seq_lens))):
        inputs: Any = materialise(each)
        session.plan(inputs)
        out, _ = session.run(inputs)
        torch.testing.assert_close(out.double(), oracle.attention(inputs).out, rtol=0.02, atol=0.02)
    assert len(made) == 2, "the second batch has no room where the first was planned"


def test_a_mask_that_outlives_its_plan_is_found(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``BatchPrefillWithRaggedKVCacheWrapper.plan``, which never resets its mask."""
    plan = RaggedWrapper.plan

    def keeping(self: RaggedWrapper, **keywords: Any) -> None:  # noqa: ANN401
        before = self._planned.get("custom_mask")
        plan(self, **keywords)
        if keywords["custom_mask"] is None and before is not None:
            size = int((keywords["qo_indptr"].diff() * keywords["kv_indptr"].diff()).sum())
            short = torch.nn.functional.pad(before, (0, max(0, size - len(before))))
            self._planned = {**keywords, "custom_mask": short[:size]}

    monkeypatch.setattr(RaggedWrapper, "plan", keeping)
    found = find_implementation("flashinfer-ragged-fa2")
    problem = replace(PREFILLS, operation="ragged_attention")
    verdicts = [life_cycle(found, replace(problem, seed=seed)) for seed in range(8)]
    said = [verdict.message for verdict in verdicts if verdict.bad]
    assert any(message.startswith("plan the batch with a custom mask; plan") for message in said)
    assert made


@pytest.mark.parametrize(("name", "problem"), GRAPHS, ids=lambda each: str(each)[:20])
def test_calls_replay_one_graph_for_batches_of_one_size(
    name: str, problem: AttentionProblem, made: Made
) -> None:
    found = find_implementation(f"flashinfer-{name}")
    fewer = replace(problem, query_lens=problem.query_lens[1:], seq_lens=(4, 8))
    sizes = [problem, replace(problem, seed=7, page_order=3), fewer]
    for each in sizes:
        inputs: Any = materialise(each)
        out, lse = found(inputs)
        expected = oracle.attention(inputs)
        assert out.shape == expected.out.shape
        torch.testing.assert_close(out.double(), expected.out, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    # Six tokens have room for eight, three and four are below.
    assert len(made) == (2 if problem.most_queries > 1 else 1)


def test_a_graph_is_padded_as_engines_pad_it(made: Made) -> None:
    found = find_implementation("flashinfer-prefill-fa2-graph")
    assert found.session is not None
    session: Any = found.session()
    inputs: Any = materialise(PREFILLS)
    session.plan(inputs)
    session.capture(inputs)
    (wrapper,) = made
    assert isinstance(wrapper, Wrapper)
    assert wrapper._most_rows == 8, "six tokens, rounded up"
    assert wrapper._buffers["qo_indptr"].tolist() == [0, 3, 4, 6, 7, 8]
    assert wrapper._buffers["paged_kv_last_page_len"].tolist() == [1, 4, 2, 0, 0]
    assert wrapper.calls == ["plan", "plan"], "the largest batch comes first, and fixes the rows"
    four: Any = materialise(replace(PREFILLS, query_lens=(2, 1, 1, 1), seq_lens=(2, 3, 1, 4)))
    session.plan(four)
    session.run(four)
    assert len(made) == 1
    assert wrapper._buffers["qo_indptr"].tolist() == [0, 2, 3, 4, 5, 8], "none of the four's own"


def test_a_uniform_graph_is_of_one_number_of_tokens_a_request(made: Made) -> None:
    found = find_implementation("flashinfer-prefill-fa2-uniform-graph")
    three, two = (5, 5, 5), (7, 7)
    # Fifteen tokens of three requests, and sixteen of four or two, have room for as many.
    for lengths in (three, (4, 4, 4, 4), three, two):
        inputs: Any = materialise(
            replace(VERIFIES, query_lens=lengths, seq_lens=tuple(9 + t for t in lengths))
        )
        out, _ = found(inputs)
        wanted = oracle.attention(inputs).out
        torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.02)
    buffers = [each._buffers["qo_indptr"].tolist() for each in made if isinstance(each, Wrapper)]
    assert buffers == [[0, 5, 10, 15, 20, 25], [0, 4, 8, 12, 16, 20], [0, 7, 14, 21, 28, 35]]


def test_requests_that_are_added_to_a_decode_of_several_tokens_have_keys(made: Made) -> None:
    found = find_implementation("flashinfer-decode-fa2-graph")
    # Pages of two keys: requests that are added have three keys on two of them.
    for lengths in ((3, 3, 3), (1, 1, 1), (3, 3, 3, 3)):
        keys = (9, 4, 6, 3)[: len(lengths)]
        inputs: Any = materialise(replace(VERIFIES, query_lens=lengths, page_size=2, seq_lens=keys))
        out, lse = found(inputs)
        wanted = oracle.attention(inputs)
        torch.testing.assert_close(out.double(), wanted.out, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)
    three, one = (each for each in made if isinstance(each, Wrapper))
    assert three._buffers["paged_kv_indptr"].tolist() == [0, 5, 7, 10, 12]
    assert three._buffers["paged_kv_last_page_len"].tolist() == [1, 2, 2, 1]
    assert one._buffers["paged_kv_last_page_len"].tolist() == [1, 2, 2, 0]


@pytest.mark.parametrize("name", ["prefill-fa2-graph", "prefill-fa2-uniform-graph"])
def test_a_graph_reads_the_mask_of_its_last_plan(name: str, made: Made) -> None:
    found = find_implementation(f"flashinfer-{name}")
    masked = replace(VERIFIES, causal=False, custom_mask=True)
    tree = replace(VERIFIES, tree=2)
    fewer = replace(masked, query_lens=(2, 2), seq_lens=(4, 8))
    for each in (masked, VERIFIES, replace(masked, seed=5), fewer, tree, replace(tree, seed=5)):
        inputs: Any = materialise(each)
        out, _ = found(inputs)
        wanted = oracle.attention(inputs).out
        torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.02)
    buffers = [each._mask[0] is not None for each in made if isinstance(each, Wrapper)]
    assert buffers.count(False) == 1, "without a mask a wrapper has no room for one"
    assert {"custom_mask", "tree"} <= found.features


def test_what_was_not_captured_is_not_replayed(made: Made) -> None:
    del made
    found = find_implementation("flashinfer-decode-graph")
    assert found.session is not None
    session: Any = found.session()
    inputs: Any = materialise(DECODES)
    with pytest.raises(ValueError, match="come after plan"):
        session.capture(inputs)
    session.plan(inputs)
    with pytest.raises(ValueError, match="replay comes after capture"):
        session.replay(inputs)
    session.capture(inputs)
    larger: Any = materialise(replace(DECODES, query_lens=(1,) * 5, seq_lens=(2,) * 5))
    session.plan(larger)
    with pytest.raises(ValueError, match="a plan of a batch that fits"):
        session.replay(larger)
    session.plan(inputs)
    session.replay(inputs)


def test_a_latent_session_keeps_nothing_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MLA's plan is given from the host it copies without waiting."""
    from kernelproof.impl.flashinfer import mla as flashinfer_mla

    plans: list[dict[str, Any]] = []

    class Planned:
        def plan(self, **keywords: Any) -> None:  # noqa: ANN401
            plans.append(keywords)

    monkeypatch.setattr(flashinfer_mla, "_session_wrapper", lambda *_: Planned())
    monkeypatch.setattr(flashinfer_mla, "version", lambda: "0.6.13")
    inputs: Any = materialise(
        AttentionProblem(
            query_lens=(1, 2),
            seq_lens=(5, 3),
            head_dim_qk=576,
            head_dim_vo=512,
            page_size=2,
            dtype="bfloat16",
            values_in_keys=True,
        )
    )
    flashinfer_mla.latent_session("fa2").plan(inputs)
    before = {name: tensor.clone() for name, tensor in inputs.metadata.tensors().items()}
    for tensor in inputs.metadata.tensors().values():
        tensor.fill_(7)
    (given,) = plans
    assert torch.equal(given["qo_indptr"], before["qo_indptr"])
    assert torch.equal(given["kv_indptr"], before["paged_kv_indptr"])
    assert torch.equal(given["kv_indices"], before["paged_kv_indices"])
    assert torch.equal(given["kv_len_arr"], before["seq_lens"])
