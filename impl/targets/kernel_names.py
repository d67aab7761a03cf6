"""The names of GPU kernels: their short form, and which backend's kernels they are.

FlashInfer's names are those of the ``__global__`` functions of its sources, from 0.6.6 to
0.7.2.post1. A kernel of which no backend is known speaks for none and against none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .backends import TRITON

TORCH_PRODUCTS = "torch"
"""Name of what torch computes with where no fused kernel runs: products, and softmax."""
JIT = "triton"
"""Name of kernels that Triton launched."""
_FUSED = {
    "cuda-core": r"(Batch|Single)DecodeWith\w*KVCacheKernel",
    "fa2": r"(Batch|Single)PrefillWith\w*Kernel|(Batch)?PODWith\w*Kernel"
    r"|BatchMLAPagedAttentionKernel|PersistentKernelTemplate",
    "fa3": r"(FP8)?PrefillWithKVCacheKernel|BatchMLAPageAttentionHopperKernel",
    "xqa": r"kernel_mha\w*",
    "trtllm-gen": r"fmhaSm\d+\w*|fmhaReductionKernel",
    "cudnn": r"cudnn\w*",
    "cute-dsl": r"kernel_cutlass_\w*",
    "torch-sdpa": r"(flash_fwd|fmha_cutlass|fmha_kernel|attention_kernel_batched)\w*",
}
"""Kernels that attend, by backend: the last part of their short names."""
_PRODUCTS = r"\w*(gemm|gemv|gemmk1|nvjet|splitK|softmax)\w*|dot_kernel|Kernel2"
_KNOWN = [(backend, re.compile(names)) for backend, names in _FUSED.items()]
_TORCH = re.compile(_PRODUCTS, re.IGNORECASE)
FILLS = re.compile(r"at::native::FillFunctor|^(Memset|Memcpy) ")
"""What is no kernel, and torch's filling: the suite fills fresh memory during a call."""


class Claim(NamedTuple):
    """What an implementation says of the kernels of its calls.

    Attributes:
        backend: its backend on this machine; empty if it names none.
        compiler: the distribution that compiles its kernels when they are called.
        runs: short names of its kernels, if it names some: then the others say nothing.
        attends: whether it is attention: other kernels of a backend are not known by name.
    """

    backend: str = ""
    compiler: str = ""
    runs: frozenset[str] = frozenset()
    attends: bool = False


class Unclaimed(NamedTuple):
    """What ran in the place of a claimed backend, or beside it.

    Attributes:
        claimed: what was claimed.
        ran: backends of the kernels that ran; empty where none is known.
        kernels: their short names.
    """

    claimed: str
    ran: str
    kernels: tuple[str, ...]

    @property
    def message(self) -> str:
        """One sentence with both names."""
        kernels = ", ".join(self.kernels)
        told = f"it claims {self.claimed}; the call launched {kernels}"
        return f"{told}, of {self.ran}" if self.ran else told


@functools.lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """Return a demangled name without what it returns, its arguments and those of templates."""
    kept, depth = [], 0
    plain = name.replace("(anonymous namespace)::", "").replace("->", "")
    for character in plain:
        depth -= character in ">)"
        if depth <= 0 and character not in "<>()":
            kept.append(character)
        depth += character in "<("
    words = "".join(kept).split()
    return words[-1] if words else name


def backend_of(name: str, jitted: Collection[str] = ()) -> str:
    """Return whose kernel this is: a backend, ``TORCH_PRODUCTS`` or ``JIT``; empty if unknown.

    Args:
        name: its name, whole or short.
        jitted: names of functions that Triton launched in the same call.
    """
    if name in jitted:
        return JIT
    short = short_name(name)
    last = short.rpartition("::")[2]
    for backend, known in _KNOWN:
        if known.fullmatch(last):
            return "torch-sdpa" if short.startswith("pytorch_flash::") else backend
    return TORCH_PRODUCTS if _TORCH.fullmatch(last) else ""


def kernels_in(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are of kernels and of no filling, each once, in their order."""
    return tuple(dict.fromkeys(name for name in names if not FILLS.search(name)))


def unclaimed(
    claim: Claim, kernels: Sequence[str], jitted: Collection[str] = ()
) -> Unclaimed | None:
    """Return what ran that is not claimed; None if all is as claimed, or nothing is known.

    Where kernels of the claimed backend ran, only those that attend and are of another one are
    against it: torch's products may prepare a call.

    Args:
        claim: what is claimed.
        kernels: names of the kernels of a call.
        jitted: names of functions that Triton launched in it.
    """
    ran = {short_name(name): backend_of(name, jitted) for name in kernels}
    if claim.runs:
        return _unnamed(claim.runs, ran)
    wanted = JIT if claim.compiler == TRITON else claim.backend
    if wanted != JIT and not (wanted in _FUSED and claim.attends):
        return None
    against = {*_FUSED} - {wanted}
    if wanted not in ran.values() and claim.backend:
        against |= {TORCH_PRODUCTS, JIT} - {wanted}
    if wanted == "torch-sdpa":  # torch's own backends, and its arithmetic without one
        against -= {TORCH_PRODUCTS, "cudnn"}
    others = {name: found for name, found in ran.items() if found in against}
    if not others:
        return None
    named = f"the backend {claim.backend}" if claim.backend else "kernels of Triton"
    return Unclaimed(named, _backends(others.values()), tuple(others))


def _unnamed(runs: Collection[str], ran: Mapping[str, str]) -> Unclaimed | None:
    """Return what ran in the place of kernels that are claimed by name."""
    # torch's own copies and sums are in nobody's place.
    others = {name: of for name, of in ran.items() if of or not name.startswith("at::")}
    if not others or any({name, name.rpartition("::")[2]} & {*runs} for name in ran):
        return None
    return Unclaimed(f"the kernel {' or '.join(sorted(runs))}", _backends(others.values()),
                     tuple(others))  # fmt: skip


def _backends(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names) - {"", JIT}))
