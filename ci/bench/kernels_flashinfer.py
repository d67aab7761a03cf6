"""FlashInfer's kernels as contenders of ``kernelproof bench kernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ...impl.flashinfer.calls import new_wrapper, plan_options
from ...impl.targets.optional import missing
from ...reference.tensors.inputs import PagedAttentionInputs
from .gpu import Call
from .kernels_cases import HEAD_DIM, Case, Pool

CUDA_CORES, FA2, FA3 = "FlashInfer CUDA cores", "FlashInfer fa2", "FlashInfer fa3"
DECODERS = {CUDA_CORES: False, FA2: True}
"""Whether a decode wrapper uses tensor cores."""
PREFILLERS = {FA2: "fa2", FA3: "fa3"}


def absent() -> str | None:
    """Return why FlashInfer is not among the contenders; None if it is."""
    return missing("flashinfer", "flashinfer")


def fa3_here() -> bool:
    """Whether this GPU has FA3's instructions: only Hopper has them."""
    return torch.cuda.get_device_capability()[0] == 9  # noqa: PLR2004  compute capability


def build() -> None:
    """Compile what the cases need, all modules at once; planning a small batch does it."""
    case = Case(1, 1, 16)
    [batch, *_] = Pool.of((case,)).batches(case)
    plans = [functools.partial(decoder, batch, cores) for cores in DECODERS.values()]
    plans += [functools.partial(prefiller, batch, backend) for backend in backends().values()]
    with ThreadPoolExecutor(len(plans)) as threads:
        for built in [threads.submit(plan) for plan in plans]:
            built.result()


def backends() -> dict[str, str]:
    """Return the backends of the prefill wrapper that this GPU runs, by contender."""
    return {name: backend for name, backend in PREFILLERS.items() if backend != "fa3" or fa3_here()}


def decoder(batch: PagedAttentionInputs, tensor_cores: bool) -> Callable[..., Any]:  # noqa: FBT001
    """Plan a decode wrapper for a batch and give its ``run``."""
    wrapper = new_wrapper(
        "BatchDecodeWithPagedKVCacheWrapper", batch.q.device, kv_layout=batch.kv_layout,
        use_tensor_cores=tensor_cores, backend="fa2" if tensor_cores else "auto",
    )  # fmt: skip
    metadata = batch.metadata
    wrapper.plan(
        indptr=metadata.paged_kv_indptr, indices=metadata.paged_kv_indices,
        last_page_len=metadata.paged_kv_last_page_len, head_dim=HEAD_DIM,
        page_size=metadata.page_size, **_heads(batch), **plan_options(batch, batch.k_cache.dtype),
    )  # fmt: skip
    return wrapper.run  # type: ignore[no-any-return]


def prefiller(batch: PagedAttentionInputs, backend: str) -> Callable[..., Any]:
    """Plan a prefill wrapper for a batch and give its ``run``."""
    wrapper = new_wrapper(
        "BatchPrefillWithPagedKVCacheWrapper", batch.q.device, kv_layout=batch.kv_layout,
        backend=backend,
    )  # fmt: skip
    metadata = batch.metadata
    wrapper.plan(
        qo_indptr=metadata.qo_indptr, paged_kv_indptr=metadata.paged_kv_indptr,
        paged_kv_indices=metadata.paged_kv_indices,
        paged_kv_last_page_len=metadata.paged_kv_last_page_len, head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM, page_size=metadata.page_size, causal=batch.causal,
        **_heads(batch), **plan_options(batch, batch.k_cache.dtype),
    )  # fmt: skip
    return wrapper.run  # type: ignore[no-any-return]


def contenders(case: Case, batches: list[PagedAttentionInputs]) -> dict[str, list[Call]]:
    """Return each backend's calls, one a batch, without LSE: the least that it can be asked."""
    if case.queries == 1:
        runs = {name: decoder(batches[0], cores) for name, cores in DECODERS.items()}
    else:
        runs = {name: prefiller(batches[0], backend) for name, backend in backends().items()}
    return {
        name: [functools.partial(run, each.q, (each.k_cache, each.v_cache)) for each in batches]
        for name, run in runs.items()
    }


def _heads(batch: PagedAttentionInputs) -> dict[str, int]:
    return {"num_qo_heads": batch.q.shape[1], "num_kv_heads": batch.k_cache.shape[2]}
