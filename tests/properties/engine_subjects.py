"""Small implementations with one behaviour each, for the tests of the engine."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kernelproof.impl import Target, UnsupportedError, implementation
from kernelproof.reference import AttentionOutput, AttentionProblem, MergeProblem, Problem, oracle
from kernelproof.reference.tensors.inputs import MergeInputs, PagedAttentionInputs

Attention = tuple[torch.Tensor, torch.Tensor]
calls = 0
calls_of_one = itertools.count(1)
last: Attention | None = None
child: subprocess.Popen[bytes] | None = None


def plain_only(problem: Problem, target: Target) -> bool | str:
    """Support little, so that few draws suffice and they cost little."""
    del target
    if isinstance(problem, AttentionProblem) and (
        problem.head_dim_qk > 32 or problem.num_qo_heads > 8 or problem.page_size > 16
    ):
        return "only small problems"
    return True


def honest(inputs: PagedAttentionInputs) -> Attention:
    out, lse = oracle.attention(inputs)
    return out.to(inputs.out_dtype), lse.to(torch.float32)


def lengths(inputs: PagedAttentionInputs) -> list[int]:
    return [int(length) for length in inputs.metadata.seq_lens]


@implementation("paged_attention", name="honest", supports=plain_only)
def honest_attention(inputs: PagedAttentionInputs) -> Attention:
    return honest(inputs)


@implementation("paged_attention", name="leaves-a-process", supports=plain_only)
def leaves_a_process(inputs: PagedAttentionInputs) -> Attention:
    """Leave one process in a session of its own, from its first call on."""
    global child  # noqa: PLW0603
    child = child or subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: S607
    return honest(inputs)


@implementation("paged_attention", name="wrong-from-five", supports=plain_only)
def wrong_from_five(inputs: PagedAttentionInputs) -> Attention:
    """Be wrong in every request of five keys or more."""
    out, lse = honest(inputs)
    rows = inputs.metadata.qo_indptr.tolist()
    for request, length in enumerate(lengths(inputs)):
        if length >= 5:
            out[rows[request] : rows[request + 1]] += 1.0
    return out, lse


@implementation("paged_attention", name="always-causal", supports=plain_only)
def always_causal(inputs: PagedAttentionInputs) -> Attention:
    """Be right under a causal mask, and under a window."""
    return honest(replace(inputs, causal=inputs.causal or inputs.window_left < 0))


@implementation("paged_attention", name="wrong-twice", supports=plain_only)
def wrong_twice(inputs: PagedAttentionInputs) -> Attention:
    """Be wrong in a partial last page that some query reads, and with sinks under a causal mask."""
    out, lse = honest(inputs)
    queries, size = inputs.metadata.qo_indptr.diff().tolist(), inputs.metadata.page_size
    rare = inputs.sinks is not None and inputs.causal
    if rare or any(t and s % size for t, s in zip(queries, lengths(inputs), strict=True)):
        out = out + 1.0
    return out, lse


def switched(name: str, behaviour: Callable[[PagedAttentionInputs], None]) -> object:
    @implementation("paged_attention", name=name, supports=plain_only)
    def run(inputs: PagedAttentionInputs) -> Attention:
        note_process()
        behaviour(inputs)
        return honest(inputs)

    return run


def note_process() -> None:
    """Leave this process's number where the test looks for orphans."""
    record(str(os.getpid()))


def record(line: str) -> None:
    path = os.environ.get("KERNELPROOF_TEST_RECORD")
    if path:
        with Path(path).open("a", encoding="ascii") as file:
            file.write(line + "\n")


def _hang(inputs: PagedAttentionInputs) -> None:
    if max(lengths(inputs), default=0) >= 4:
        while True:
            time.sleep(60)


def _hang_from(least: int) -> Callable[[PagedAttentionInputs], None]:
    def hang(inputs: PagedAttentionInputs) -> None:
        queries = inputs.metadata.qo_indptr.diff().tolist()
        if inputs.window_left >= 0 and max(queries, default=0) >= least:
            while True:
                time.sleep(60)

    return hang


def _hang_while_blocking(inputs: PagedAttentionInputs) -> None:
    del inputs
    while os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        time.sleep(60)


def _race(inputs: PagedAttentionInputs) -> None:
    """Write what compute-sanitizer would write of a race into its log."""
    if inputs.causal and os.environ.get("KERNELPROOF_TEST_TOOL") == "racecheck":
        with Path(os.environ["KERNELPROOF_TEST_LOG"]).open("a", encoding="ascii") as log:
            log.write(
                "========= Error: Race reported between Write access at races()+0x10\n"
                "=========     and Read access at races()+0x20 [64 hazards]\n"
                "=========\n"
            )


def _abort(inputs: PagedAttentionInputs) -> None:
    if inputs.k_cache.stride(0) != inputs.k_cache[0].numel():  # a view of something larger
        os.abort()


def _raise(inputs: PagedAttentionInputs) -> None:
    if inputs.logits_soft_cap:
        message = "no soft cap\nand more"
        raise KeyError(message)


def _reject(inputs: PagedAttentionInputs) -> None:
    if inputs.window_left >= 0:
        message = "windows need another kernel"
        raise UnsupportedError(message)


hangs = switched("hangs", _hang)
hangs_from_21 = switched("hangs-from-21", _hang_from(21))
hangs_while_blocking = switched("hangs-while-blocking", _hang_while_blocking)
aborts = switched("aborts", _abort)
races = switched("races", _race)
raises = switched("raises", _raise)
rejects = switched("rejects", _reject)


def merged(inputs: MergeInputs) -> Attention:
    bounded = oracle.bounded_merge(inputs, merges.arithmetic)
    return bounded.expected.out.to(inputs.out_dtype), bounded.expected.lse.to(torch.float32)


def narrow_merges(problem: Problem, target: Target) -> bool | str:
    del target
    if isinstance(problem, MergeProblem) and problem.head_dim > 16:
        return "only head_dim 16 or less"
    return True


@implementation("merge_state", name="merges", supports=narrow_merges)
def merges(inputs: MergeInputs) -> Attention:
    return merged(inputs)


@implementation("merge_state", name="fifth-call", supports=narrow_merges)
def fifth_call(inputs: MergeInputs) -> Attention:
    """Be wrong in one call of each process, of its own: workers are shared."""
    out, lse = merged(inputs)
    wrong = out.numel() > 0 and next(calls_of_one) == 15
    return out + (1.0 if wrong else 0.0), lse


@implementation("merge_state", name="wears-out", supports=narrow_merges)
def wears_out(inputs: MergeInputs) -> Attention:
    """Be wrong after fifteen calls of a process."""
    global calls  # noqa: PLW0603
    calls += 1
    out, lse = merged(inputs)
    return out + (1.0 if calls > 15 else 0.0), lse


@implementation("merge_state", name="spoils", supports=narrow_merges)
def spoils(inputs: MergeInputs) -> Attention:
    """Make whatever else runs in the process wrong."""
    global calls  # noqa: PLW0603
    calls = -1
    return merged(inputs)


@implementation("merge_state", name="victim", supports=narrow_merges)
def victim(inputs: MergeInputs) -> Attention:
    """Be right in a process of its own."""
    out, lse = merged(inputs)
    return out + (1.0 if calls < 0 else 0.0), lse


@implementation("merge_state", name="starts-slowly", supports=narrow_merges)
def starts_slowly(inputs: MergeInputs) -> Attention:
    """Round otherwise in a process's first call of 9 to 63 tokens, which warm it up.

    What a call costs is tried on 8 tokens and, where these are fast, on 64: such a trial must not
    be the first call.
    """
    global calls  # noqa: PLW0603
    out, lse = merged(inputs)
    between = 8 < len(lse) < 64
    calls += between
    return out, lse * (1.0 + 2.0**-23) if between and calls == 1 else lse


def noisy(inputs: MergeInputs) -> Attention:
    global calls  # noqa: PLW0603
    calls += 1
    out, lse = merged(inputs)
    return out, lse * (1.0 + 2.0**-23) if calls % 2 else lse


noisy_and_says_so = implementation(
    "merge_state", name="noisy", supports=narrow_merges, features=("nondeterministic",)
)(noisy)
noisy_in_secret = implementation("merge_state", name="secretive", supports=narrow_merges)(noisy)


@implementation("merge_state", name="tires", supports=narrow_merges)
def tires(inputs: MergeInputs) -> Attention:
    """Be wrong in every hundredth call in a row on the same states."""
    global calls, last
    now = (inputs.outs.clone(), inputs.lses.clone())
    same = last is not None and all(map(torch.equal, last, now))
    calls, last = (calls + 1 if same else 1), now
    out, lse = merged(inputs)
    return out + (0.0 if calls % 100 else 1.0), lse


@implementation("merge_state", name="writes", supports=narrow_merges, writes_out=True)
def writes(inputs: MergeInputs) -> None:
    assert inputs.out is not None
    assert inputs.lse is not None
    out, lse = merged(inputs)
    inputs.out.copy_(out)
    inputs.lse.copy_(lse)


@implementation("merge_state", name="writes-out-only", supports=narrow_merges, writes_out=True)
def writes_out_only(inputs: MergeInputs) -> tuple[torch.Tensor, None]:
    assert inputs.out is not None
    inputs.out.copy_(merged(inputs)[0])
    return inputs.out, None


@implementation("merge_state", name="writes-wrong-lse", supports=narrow_merges, writes_out=True)
def writes_wrong_lse(inputs: MergeInputs) -> tuple[torch.Tensor, None]:
    """Write an LSE, and return (out, None) all the same."""
    assert inputs.lse is not None
    inputs.lse.copy_(merged(inputs)[1] + 1.0)
    return writes_out_only.function(inputs)  # type: ignore[no-any-return]


@implementation("merge_state", name="writes-too-far", supports=narrow_merges, writes_out=True)
def writes_too_far(inputs: MergeInputs) -> None:
    writes(inputs)
    out = inputs.out
    assert out is not None
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)


@implementation("merge_state", name="writes-nothing", supports=narrow_merges, writes_out=True)
def writes_nothing(inputs: MergeInputs) -> None:
    del inputs


def _recorded(problem: Problem, target: Target) -> bool | str:
    record(problem.id)
    return narrow_merges(problem, target)


@implementation("merge_state", name="recorded", supports=_recorded)
def recorded(inputs: MergeInputs) -> Attention:
    """Be so fast that the machine's load does not change what is drawn."""
    shape = inputs.outs.shape[1:]
    return torch.zeros(shape, dtype=inputs.out_dtype), torch.zeros(shape[:2])


@implementation("merge_state", name="sleeps", supports=narrow_merges)
def sleeps(inputs: MergeInputs) -> Attention:
    time.sleep(0.02)
    return merged(inputs)


def _never(problem: Problem, target: Target) -> str:
    del problem
    return f"not on a {target.device}"


def _broken(problem: Problem, target: Target) -> bool:
    return bool(problem.seed / (1 if target.device == "cuda" else 0))


def _stumbles(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, MergeProblem) and problem.num_tokens > 1:
        message = "no such row"
        raise KeyError(message)
    return narrow_merges(problem, target)


never = implementation("merge_state", name="never", supports=_never)(merged)
broken_supports = implementation("merge_state", name="broken", supports=_broken)(merged)
stumbling_supports = implementation("merge_state", name="stumbling", supports=_stumbles)(merged)


def plain(inputs: MergeInputs) -> AttentionOutput:
    """Be a function without a decorator."""
    return AttentionOutput(*merged(inputs))


def faulty(kind: str, good: Attention) -> Attention:
    """Return a right answer with a fault of a kind, or raise."""
    out, lse = good
    if kind == "RuntimeError":
        raise RuntimeError(kind)
    wrong = {"numeric": out + 1.0, "nan": out * torch.nan, "dtype": out.double()}
    return wrong[kind], lse


def two_faults(kind: str) -> object:
    """Have a fault of a kind where a state is empty, and the same one with three states."""

    @implementation("merge_state", name=f"two-faults-{kind}", supports=narrow_merges)
    def merge(inputs: MergeInputs) -> Attention:
        good = merged(inputs)
        known = bool(inputs.lses.isneginf().any())
        return faulty(kind, good) if known or len(inputs.outs) >= 3 else good

    return merge


TWO_FAULTS = ("numeric", "nan", "dtype", "RuntimeError")
for each_kind in TWO_FAULTS:
    globals()[f"two_faults_{each_kind}"] = two_faults(each_kind)
