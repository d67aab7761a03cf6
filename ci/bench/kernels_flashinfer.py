"""FlashInfer's kernels as contenders of ``kernelproof bench kernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from ...impl import Target
from ...impl.flashinfer.calls import new_wrapper, plan_options
from ...impl.flashinfer.libraries import attention_library
from ...impl.flashinfer.trtllm import prepared
from ...impl.gating import Feature, decide
from ...impl.targets.exceptions import sentence_of
from ...impl.targets.optional import missing
from ...reference import AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from .gpu import Call
from .kernels_cases import DRAFTS, HEAD_DIM, PAGE_SIZE, Case, Pool

CUDA_CORES, FA2, FA3 = "FlashInfer CUDA cores", "FlashInfer fa2", "FlashInfer fa3"
DECODE_FA2, XQA = "FlashInfer fa2 decode", "FlashInfer xqa"
DECODERS = {CUDA_CORES: False, FA2: True}
"""Whether a decode wrapper uses tensor cores."""
VERIFIERS = {DECODE_FA2: "fa2", XQA: "xqa"}
"""Backends of calls that decode several query tokens of a request."""
PREFILLERS = {FA2: "fa2", FA3: "fa3"}
MODULE = AttentionProblem(
    query_lens=(1,), seq_lens=(1,), head_dim_qk=HEAD_DIM, head_dim_vo=HEAD_DIM, dtype="bfloat16"
)
"""A problem of the module that all cases take."""


def absent() -> str | None:
    """Return why FlashInfer is not among the contenders; None if it is."""
    return missing("flashinfer", "flashinfer")


def verifiers(case: Case) -> list[str]:
    """Return who decodes a case's query tokens here, by the support rules."""
    group = case.qo_heads // case.kv_heads
    call = Feature(page_size=PAGE_SIZE, group_size=group, query_len=case.queries)
    here = Target.here("cuda")
    return [
        name
        for name, each in VERIFIERS.items()
        if decide(replace(call, backend=each), here).supported
    ]


def fa3_here() -> bool:
    """Whether this GPU has FA3's instructions: only Hopper has them."""
    return torch.cuda.get_device_capability()[0] == 9  # noqa: PLR2004  compute capability


def build(cases: Collection[Case], *, quick: bool) -> dict[str, str]:
    """Compile what cases need, all modules at once; planning a small batch does it, XQA is run.

    Args:
        cases: what is timed.
        quick: whether FA3's module, which takes minutes, is left out where it does not exist and
            no requirement is about it.

    Returns:
        Why a contender cannot run, by its name.
    """
    small = Case(1, 1, PAGE_SIZE)
    [batch, *_] = Pool.of((small,)).batches(small)
    jobs: list[tuple[str, Call]] = []
    if any(case.queries == 1 for case in cases):
        jobs += [
            (name, functools.partial(decoder, batch, cores)) for name, cores in DECODERS.items()
        ]
    if any(case.queries > 1 for case in cases):
        jobs += [
            (name, functools.partial(prefiller, batch, backend))
            for name, backend in backends().items()
        ]
    for each in {replace(each, requests=1, keys=PAGE_SIZE) for each in cases}:
        if each.queries == DRAFTS and XQA in verifiers(each):
            verify = Pool.of((each,)).batches(each)[0]
            jobs.append((XQA, functools.partial(_run, verify)))
    absent: dict[str, str] = {}
    library, exists = attention_library("batch_prefill", "fa3")(MODULE)
    needed = any(case.queries > DRAFTS for case in cases)
    if quick and not (exists or needed) and FA3 in dict(jobs):
        absent[FA3] = f"its module {library} does not exist, and takes minutes: run without --quick"
        jobs = [(name, job) for name, job in jobs if name != FA3]
    with ThreadPoolExecutor(max(len(jobs), 1)) as threads:
        for name, built in [(name, threads.submit(job)) for name, job in jobs]:
            if (error := built.exception()) is not None:
                absent[name] = sentence_of(error)
    return absent


def _run(batch: PagedAttentionInputs) -> object:
    return prepared(batch, "xqa")()


def backends() -> dict[str, str]:
    """Return the backends of the prefill wrapper that this GPU runs, by contender."""
    return {name: backend for name, backend in PREFILLERS.items() if backend != "fa3" or fa3_here()}


def decoder(batch: PagedAttentionInputs, tensor_cores: bool) -> Callable[..., Any]:  # noqa: FBT001
    """Plan a decode wrapper for a batch and give its ``run``."""
    wrapper = new_wrapper(
        "BatchDecodeWithPagedKVCacheWrapper",
        batch.q.device,
        kv_layout=batch.kv_layout,
        use_tensor_cores=tensor_cores,
        backend="fa2" if tensor_cores else "auto",
    )
    metadata = batch.metadata
    tokens = len(batch.q) // metadata.num_requests
    wrapper.plan(
        indptr=metadata.paged_kv_indptr,
        indices=metadata.paged_kv_indices,
        last_page_len=metadata.paged_kv_last_page_len,
        head_dim=HEAD_DIM,
        page_size=metadata.page_size,
        **_heads(batch),
        **plan_options(batch, batch.k_cache.dtype),
        **({"q_len_per_req": tokens} if tokens > 1 else {}),
    )
    return wrapper.run  # type: ignore[no-any-return]


def prefiller(batch: PagedAttentionInputs, backend: str) -> Callable[..., Any]:
    """Plan a prefill wrapper for a batch and give its ``run``."""
    wrapper = new_wrapper(
        "BatchPrefillWithPagedKVCacheWrapper",
        batch.q.device,
        kv_layout=batch.kv_layout,
        backend=backend,
    )
    metadata = batch.metadata
    wrapper.plan(
        qo_indptr=metadata.qo_indptr,
        paged_kv_indptr=metadata.paged_kv_indptr,
        paged_kv_indices=metadata.paged_kv_indices,
        paged_kv_last_page_len=metadata.paged_kv_last_page_len,
        head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM,
        page_size=metadata.page_size,
        causal=batch.causal,
        **_heads(batch),
        **plan_options(batch, batch.k_cache.dtype),
    )
    return wrapper.run  # type: ignore[no-any-return]


def contenders(
    case: Case, batches: list[PagedAttentionInputs]
) -> dict[str, Callable[[], list[Call]]]:
    """Return what makes each backend's calls, one a batch.

    They give no LSE: that is the least that a backend can be asked.
    """
    makers: dict[str, Callable[[], Callable[..., Any]]] = {}
    if case.queries == 1:
        for name, cores in DECODERS.items():
            makers[name] = functools.partial(decoder, batches[0], cores)
    else:
        for name, backend in backends().items():
            makers[name] = functools.partial(prefiller, batches[0], backend)
    verifying = verifiers(case) if case.queries == DRAFTS else []
    if DECODE_FA2 in verifying:
        makers[DECODE_FA2] = functools.partial(decoder, batches[0], True)  # noqa: FBT003

    def planned(make: Callable[[], Callable[..., Any]]) -> list[Call]:
        run = make()
        return [functools.partial(run, each.q, (each.k_cache, each.v_cache)) for each in batches]

    found = {name: functools.partial(planned, make) for name, make in makers.items()}
    if XQA in verifying:
        return {**found, XQA: lambda: [prepared(each, "xqa") for each in batches]}
    return {**found}


def _heads(batch: PagedAttentionInputs) -> dict[str, int]:
    return {"num_qo_heads": batch.q.shape[1], "num_kv_heads": batch.k_cache.shape[2]}
