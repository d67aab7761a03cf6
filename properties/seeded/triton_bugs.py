"""Faults of Kernelproof's own Triton kernels: split, reduce, tile edges, what an answer hides.

Each is one substitution in a kernel's source. They stand beside the catalogue: they need triton,
and on a CPU its interpreter. ``kernelproof score`` has them as a group of their own, under the laws
that they were written for.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

from ...impl.protocol import Implementation
from ...impl.targets.optional import require
from ...impl.triton import append, attention, attention_call, merge
from .catalogue import SeededBug

BUGS: list[SeededBug] = []
LAWS = ("parity", "algebra", "touched_memory")
"""Laws that they were written for."""


def _bug(
    name: str,
    launcher: ModuleType,
    honest: Implementation,
    before: str,
    after: str,
    description: str,
    law: str = "parity",
) -> Implementation:
    """Enter a bug into the list.

    Args:
        name: the name of the implementation, with dashes; this module has it with underscores.
        launcher: the module whose ``KERNEL`` names the module of the kernel.
        honest: the implementation that launches the kernel.
        before: text that occurs once in the kernel's source.
        after: what stands there instead.
        description: what it does wrong, in one sentence.
        law: the law that it was written for.
    """
    source, faulty = launcher.KERNEL, f"{launcher.KERNEL}__{name.replace('-', '_')}"

    def run(inputs: Any) -> Any:  # noqa: ANN401  the record of its operation
        _substitute(source, faulty, before, after)
        with mock.patch.object(launcher, "KERNEL", faulty):
            return honest.function(inputs)

    reference = f"{__name__}:{name.replace('-', '_')}"
    BUGS.append(SeededBug(name, reference, honest.operation, description, law, control="tile"))
    # A session would launch the honest kernel.
    return replace(honest, name=name, function=run, session=None)


@functools.cache
def _substitute(source: str, faulty: str, before: str, after: str) -> None:
    """Make a module of a kernel's source with one text replaced.

    Raises:
        ValueError: the text does not occur, or more than once.
    """
    text = inspect.getsource(require(source, "triton"))
    if text.count(before) != 1:
        message = f"{source} has {before!r} {text.count(before)} times, not once: mend the bug"
        raise ValueError(message)
    text = text.replace(before, after)
    module = ModuleType(faulty)
    module.__package__ = faulty.rpartition(".")[0]
    # Triton reads a kernel's source, and finds it there.
    linecache.cache[faulty] = len(text), None, text.splitlines(keepends=True), faulty
    exec(compile(text, faulty, "exec"), module.__dict__)  # noqa: S102  our own source
    sys.modules[faulty] = module


window_of_first_row = _bug(
    "window-of-first-row",
    attention_call,
    attention.paged,
    "inner = tl.maximum(last_position - left, low)",
    "inner = tl.maximum(first_position - left, low)",
    "Leave unmasked the tiles that the window of a block's first row sees in full.",
)
causal_tile_unmasked = _bug(
    "causal-tile-unmasked",
    attention_call,
    attention.paged,
    "tl.minimum(first_position + right + 1, high)",
    "tl.minimum(last_position + right + 1, high)",
    "Leave unmasked the tiles that the last row of a block sees in full.",
)
edge_not_rescaled = _bug(
    "edge-not-rescaled",
    attention_call,
    attention.ragged,
    "attended * fading[:, None]",
    "attended * tl.where(block > 0, fading, 1.0)[:, None]",
    "Forget to rescale what was attended when the first masked tile has a larger maximum.",
)
tail_of_one_key = _bug(
    "tail-of-one-key",
    attention_call,
    attention.paged,
    "(tl.maximum(high - inner_end, 0) + BLOCK_N - 1)",
    "(tl.maximum(high - inner_end, 0) + BLOCK_N - 1 - (blocks > 0).to(tl.int32))",
    "Drop the last key where full tiles and one key more end there.",
)
page_of_key_before = _bug(
    "page-of-key-before",
    attention_call,
    attention.paged,
    "place_of(key + BLOCK_N, page_shift",
    "place_of(key + BLOCK_N - 1, page_shift",
    "Load the next tile's pages for the keys before its own.",
)
mask_of_first_tile = _bug(
    "mask-of-first-tile",
    attention_call,
    attention.ragged,
    "mask_row[:, None] + key[None, :]",
    "mask_row[:, None] + (key % BLOCK_N)[None, :]",
    "Read every tile's custom mask where the first one's lies.",
)
splits_share_a_key = _bug(
    "splits-share-a-key",
    attention_call,
    attention.split_kv,
    "low += split * share",
    "low += split * (share - 1)",
    "Begin each split a key early: count a key twice, and drop the last key of a full last split.",
)
empty_split_weighs = _bug(
    "empty-split-weighs",
    attention_call,
    attention.split_kv,
    "(largest + tl.log2(divisor)) * lse_factor",
    "tl.where((total == 0.0) & (split > 0), 0.0, largest + tl.log2(divisor)) * lse_factor",
    "Give a later split without keys a log-sum-exp of 0.",
)
sink_in_every_split = _bug(
    "sink-in-every-split",
    attention_call,
    attention.split_kv,
    "(has_sinks != 0) & (split == 0)",
    "(has_sinks != 0) & ((split == 0) | (low < high))",
    "Count the sink once more in each later split with keys.",
)
lse_of_largest_split = _bug(
    "lse-of-largest-split",
    merge,
    attention.split_kv,
    "largest * out_factor + tl.log2(divisor) * 0.6931471805599453",
    "largest * out_factor",
    "Give the largest log-sum-exp of the splits for that of all.",
)
eps_in_the_denominator = _bug(
    "eps-in-the-denominator",
    attention_call,
    attention.paged,
    "divisor = tl.where(total == 0.0, 1.0, total)",
    "divisor = tl.where(total == 0.0, 1.0, total + 1e-9)",
    "Add 1e-9 to the sum that the output is divided by.",
    "algebra",
)
faint_keys_left_out = _bug(
    "faint-keys-left-out",
    attention_call,
    attention.ragged,
    "weights = tl.exp2(logits - base[:, None])",
    "weights = tl.exp2(logits - base[:, None])\n"
    "            weights = tl.where(weights < 2e-9, 0.0, weights)",
    "Cut exponents off at -20: keys of a smaller weight are left out.",
    "algebra",
)
eps_in_the_merge = _bug(
    "eps-in-the-merge",
    merge,
    merge.merge_state,
    "(merged / divisor[:, None])",
    "(merged / (divisor[:, None] + 1e-8))",
    "Add 1e-8 to the sum of weights that a merged output is divided by.",
    "algebra",
)
pages_of_no_token = _bug(
    "pages-of-no-token",
    append,
    append.append,
    "position // page_size, mask=is_token, other=0\n",
    "position // page_size\n",
    "Read the page of rows behind the last token too, behind the table's end.",
    "touched_memory",
)
undefined_states = _bug(
    "undefined-states",
    merge,
    merge.merge_state,
    "[:, :, None] & (channel < DIM)[None, None, :],\n            other=0.0,",
    "[:, :, None] & (channel < DIM)[None, None, :],",
    "Take what a load leaves undefined of a state without keys for zeros.",
    "touched_memory",
)
channels_behind_the_last_key = _bug(
    "channels-behind-the-last-key",
    attention_call,
    attention.ragged,
    "load_rows(k_base + k_offset, k_dim, present, HEAD_DIM_QK, BLOCK_QK)",
    "load_rows(k_base + k_offset, k_dim, present, "
    "BLOCK_QK if present is None else HEAD_DIM_QK, BLOCK_QK)",
    "Read channels up to a power of two in full tiles: behind the last key, which ends one.",
    "touched_memory",
)
