"""The command new: an adapter to start from and a test beside it, for somebody's first kernel."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path

from ...fixtures.suggestions import did_you_mean
from ..console.errors import CONFORMING, UsageRefusedError
from ..console.lines import tell

USED = ("implementation", "reference", "supports", "torch")
"""Names that an adapter uses itself."""

ADAPTER = '''\
"""{name}: a kernel for {operation}, tested by Kernelproof.

    kernelproof check {name}.py:{name} --profile quick
    kernelproof check {name}.py:{name} --device cuda
    pytest test_{name}.py
"""

from __future__ import annotations

from kernelproof import reference
from kernelproof.impl import implementation


def supports(problem, target):
    """Return True if the kernel takes this problem on this machine, else the reason why not."""
    # Print a problem to see its fields. For example:
    #     if {example}:
    #         return "{reason}"
    # target.sm is (9, 0) on an H100 and None on a CPU.
    return True


@implementation(
    "{operation}",
    name="{name}",
    supports=supports,
    # What the kernel rounds; the error bound follows from it. Everything in float32 by default.
    # arithmetic=reference.Arithmetic(accumulate="float32", probabilities="bfloat16"),
    # Problems with an optional feature are drawn only if it is named here.
    features=(),
)
def {name}(inputs):
    """Run the kernel on the inputs of one problem."""
    # TO REPLACE: this calls the oracle. Call your kernel, on the same inputs, instead.
{call}
'''
TEST = '''\
"""The laws of {operation} on {name}, at the quick profile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KERNEL = Path(__file__).with_name("{name}.py")


def test_{name}_conforms() -> None:
    # On a GPU add "--device", "cuda"; to look harder, "--profile", "gate".
    command = ["check", f"{{KERNEL}}:{name}", "--profile", "quick"]
    ended = subprocess.run([sys.executable, "-m", "kernelproof", *command], check=False)
    assert ended.returncode == 0, "see the findings above"
'''

OPTIONS = """\
        causal=inputs.causal,
        sm_scale=inputs.sm_scale,  # a number; multiplies q k
        window_left=inputs.window_left,  # keys before the query's own that it sees; -1: all
        logits_soft_cap=inputs.logits_soft_cap,  # 0: none
        sinks=inputs.sinks,  # [query heads] float32, or None
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,  # multiplies before out is rounded
    )
    return out.to(inputs.out_dtype), lse.float()  # lse: natural logarithm, sinks included"""
CACHES = """\
        # Caches are [pages, page_size, KV heads, head_dim] if inputs.kv_layout is "NHD",
        # and [pages, KV heads, page_size, head_dim] if it is "HND".
        inputs.k_cache,
        inputs.v_cache,"""
METADATA = """\
        # indptr and indices are int32: qo_indptr, paged_kv_indptr, paged_kv_indices,
        # paged_kv_last_page_len, seq_lens; page_size is an int."""

CALLS = {
    "paged_attention": f"""\
    out, lse = reference.paged_attention(
        # Tensors may be views: use their strides, or refuse strided_q and strided_kv above.
        inputs.q,  # [tokens, query heads, head_dim_qk]
{CACHES}
{METADATA}
        inputs.metadata,  # inputs.block_table [requests, pages] is there too
        kv_layout=inputs.kv_layout,
{OPTIONS}""",
    "ragged_attention": f"""\
    out, lse = reference.ragged_attention(
        # Tensors may be views: use their strides, or refuse strided_q and strided_kv above.
        inputs.q,  # [tokens, query heads, head_dim_qk]
        inputs.k,  # [keys, KV heads, head_dim_qk]
        inputs.v,  # [keys, KV heads, head_dim_vo]
        inputs.qo_indptr,  # [requests + 1] int32: where each request's tokens begin
        inputs.kv_indptr,  # [requests + 1] int32: where its keys begin
{OPTIONS}""",
    "merge_state": """\
    out, lse = reference.merge_states(
        inputs.outs,  # [states, tokens, heads, head_dim]
        inputs.lses,  # [states, tokens, heads] float32, natural logarithm; -inf: an empty state
    )
    return out.to(inputs.out_dtype), lse.float()""",
    "append_paged_kv": f"""\
    # The caches are yours to write if inputs.in_place, and must stay as they are if not.
    return reference.append_paged_kv(
        inputs.k,  # [tokens, KV heads, head_dim]: the last keys of each request
        inputs.v,
{CACHES}
{METADATA}
        inputs.metadata,
        kv_layout=inputs.kv_layout,
        in_place=inputs.in_place,
    )""",
    "build_metadata": """\
    # Return an object with the attributes of reference.BatchMetadata.
    return reference.build_metadata(
        inputs.query_lens,  # [requests] int32
        inputs.seq_lens,  # [requests] int32
        inputs.block_table,  # [requests, pages] int32; entries past a request's pages are garbage
        inputs.page_size,
    )""",
    "slice_context_parallel": """\
    # Return an object with the attributes of reference.BatchMetadata.
    return reference.slice_context_parallel(
        inputs.metadata,  # of the whole batch, in virtual pages of page_size * world keys
        inputs.rank,
        inputs.world,  # ranks
        inputs.interleave,  # keys in a row that one rank holds
    )""",
    "map_slots": """\
    # Return the slots of all tokens, with -1 behind them up to the buffer's end. You may write them
    # into inputs.slot_mapping, [slots] int64, and return it.
    return reference.map_slots(
        inputs.query_start_loc,  # [requests + 1] int32: where each request's tokens begin
        inputs.positions,  # [tokens] int64: the place of each token in its request
        inputs.block_table,  # [rows, pages] int32; entries that no token lies in are garbage
        inputs.page_size,
        rows=inputs.rows,  # [requests] int32: each request's row; -1: it has none
        num_slots=len(inputs.slot_mapping),
        rank=inputs.rank,
        world=inputs.world,  # ranks
        interleave=inputs.interleave,  # tokens in a row that one rank holds
    )""",
    "prepare_batch": """\
    # Return the buffer after the call. You may write the entries into inputs.buffer, and return it.
    return reference.prepare_batch(
        inputs.output,  # such as kv_indices, page_table, positions
        inputs.query_start_loc,  # [requests + 1] int32: where each request's new tokens begin
        inputs.seq_lens,  # [requests] int32: keys, new tokens included
        inputs.block_table,  # [rows, pages] int32; entries past a request's pages are garbage
        inputs.page_size,
        rows=inputs.rows,  # [requests] int32: each request's row
        buffer=inputs.buffer,
        rest=inputs.rest,  # what becomes of the buffer behind the entries
        window_left=inputs.window_left,
        rank=inputs.rank,
        world=inputs.world,  # ranks
        interleave=inputs.interleave,  # keys in a row that one rank holds
        drafts=inputs.drafts,  # rejected tokens, and what is drafted next
        splits=inputs.splits,
    )""",
    "prepare_steps": """\
    # Return each buffer after each step, [steps, ...] by name. You may write inputs.buffers: they
    # are zero before the first step, and what a step leaves is there in the next one.
    import torch

    found = {}
    for buffer in inputs.buffers:  # name, rest: what becomes of it behind the entries, tensor
        left, after = buffer.tensor, []
        for step in inputs.steps:  # step.requests say what the host knows of each request
            batch = step.table if buffer.name == "page_table" else step.batch
            if buffer.name == "slot_mapping":
                left = reference.map_slots(
                    step.slots.query_start_loc,
                    step.slots.positions,
                    step.slots.block_table,
                    inputs.page_size,
                    rows=step.slots.rows,
                    num_slots=len(left),
                )
            else:
                left = reference.prepare_batch(
                    buffer.name,  # such as kv_indices, page_table, positions
                    batch.query_start_loc,  # [requests + 1] int32
                    batch.seq_lens,  # [requests] int32: keys, new tokens included
                    batch.block_table,  # [rows, pages] int32
                    inputs.page_size,
                    rows=batch.rows,  # [requests] int32: each request's row
                    buffer=left,
                    rest=buffer.rest,
                )
            after.append(left)
        found[buffer.name] = torch.stack(after)
    return found""",
    "plan": """\
    # Write the plan's integers into inputs.workspace, as FlashInfer's kernels read them, and return
    # its vector, int64: sizes and offsets by the names of reference.tensors.plan.LAYOUTS. Return
    # an empty one where the workspace has no room.
    return reference.plan(inputs)  # inputs.call: the batch, its options, the chip""",
    "route": """\
    topk_ids, topk_weights = reference.route(
        inputs.logits,  # [tokens, experts]
        inputs.top_k,
        method=inputs.method,  # such as renormalize, deepseek_v3
        bias=inputs.bias,  # [experts] float32, or None
        num_groups=inputs.num_groups,  # None: no groups
        topk_groups=inputs.topk_groups,
        scaling_factor=inputs.scaling_factor,
        masked_groups=inputs.masked_groups,
    )
    return topk_ids.int(), topk_weights.float()  # both [tokens, top_k]""",
    "moe": """\
    out = reference.moe(
        inputs.hidden,  # [tokens, hidden]
        inputs.w13,  # [experts, 2 * inter, hidden]: gate rows first, then up rows
        inputs.w2,  # [experts, hidden, inter]
        inputs.topk_ids,  # [tokens, top_k] int32
        inputs.topk_weights,  # [tokens, top_k] float32
        **inputs.keywords(),  # activation and what the features ask for
    )
    return out.to(inputs.out_dtype)  # [tokens, hidden]""",
    "batched_moe": """\
    out = reference.batched_moe(
        inputs.hidden,  # [experts, rows, hidden]
        inputs.w13,  # [experts, 2 * inter, hidden]: gate rows first, then up rows
        inputs.w2,  # [experts, hidden, inter]
        inputs.counts,  # [experts] int32: rows in use; those behind hold anything
        **inputs.keywords(),  # activation and what the features ask for
    )
    return out.to(inputs.out_dtype)  # [experts, rows, hidden]""",
    "quantize": """\
    # Return the codes, and the scales of blocks unless one was given: float32 [rows, columns].
    import torch

    found = reference.quantize(
        inputs.x,  # [tokens, channels]; rows may lie apart: spare_channels
        inputs.to,  # dtype of the codes, block, scale_format, floor, saturate
        scale=inputs.scale,  # float32 [1], or None
    )
    if found.scales is None:
        return found.codes, None
    scales = torch.empty_strided(  # as inputs.scale_layout says
        found.scales.shape, inputs.scale_strides, device=inputs.x.device
    )
    return found.codes, scales.copy_(found.scales)""",
    "norm_and_quantize": """\
    # Return the codes, and the scales of blocks unless one was given: float32 [rows, columns].
    import torch

    found = reference.norm_and_quantize(
        inputs.x,  # [tokens, channels]; rows may lie apart: spare_channels
        inputs.gamma,  # [channels], the gains
        inputs.to,  # dtype of the codes, block, scale_format, floor
        residual=inputs.residual,  # [tokens, channels], or None
        gamma_offset=inputs.gamma_offset,  # what is added to the gains
        eps=inputs.eps,
        scale=inputs.scale,  # float32 [1], or None
    )
    if inputs.residual is not None:
        inputs.residual.copy_(found.residual)  # in place
    if found.scales is None:
        return found.codes, None
    scales = torch.empty_strided(  # as inputs.scale_layout says
        found.scales.shape, inputs.scale_strides, device=inputs.x.device
    )
    return found.codes, scales.copy_(found.scales)""",
    "rearrange": """\
    # Return the matrices in the order that inputs.arrangement names, see reference.rearrange.
    return reference.rearrange(
        inputs.x,  # uint8 or bfloat16 [rows, columns] or [experts, rows, columns]
        inputs.arrangement,
        tile=inputs.tile,  # rows of a tile of the kernel, of shuffled rows
        group=inputs.group,  # weights that share a scale
    )""",
    "rope_and_append": """\
    # Return the queries, and write the caches in place; of slots -1 nothing is written.
    found = reference.rope_and_append(
        inputs.q,  # [tokens, qo_heads, channels]; rows may lie apart: spare_channels
        inputs.k,  # [tokens, kv_heads, channels]
        inputs.v,  # the same, or None: keys hold the values, and their last channels turn
        inputs.cos_sin,  # float32 [rows, channels that turn]: cosines, then sines
        inputs.positions,  # [tokens], rows of cos_sin
        inputs.slots,  # [tokens]; inputs.requests, places, page_indptr, page_indices say the same
        (inputs.k_cache, inputs.v_cache),  # [pages, page_size, kv_heads, channels], or HND
        interleaved=inputs.interleaved,
        kv_layout=inputs.kv_layout,
        q_dtype=inputs.q_dtype,
        q_scale=inputs.q_scale,  # rows are divided by scales
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
    )
    inputs.k_cache.copy_(found.k_cache)
    if inputs.v_cache is not None:
        inputs.v_cache.copy_(found.v_cache)
    return found.q""",
}
"""Body of an adapter that calls the oracle, by operation."""
EXAMPLES = {
    "merge_state": ("problem.num_states > 2", "merges two states only"),
    "append_paged_kv": ('problem.kv_layout == "HND"', "takes NHD only"),
    "paged_attention": ("problem.head_dim_qk > 128", "head dims above 128 are not there yet"),
    "ragged_attention": ("problem.head_dim_qk > 128", "head dims above 128 are not there yet"),
    "build_metadata": ("problem.page_size > 64", "pages hold at most 64 keys"),
    "slice_context_parallel": ("problem.world > 8", "at most 8 ranks"),
    "map_slots": ("problem.world > 1", "one rank only"),
    "prepare_batch": ('problem.output != "kv_indices"', "builds kv_indices only"),
    "prepare_steps": ('problem.engine != "vllm"', "keeps vLLM's buffers"),
    "plan": ('problem.family != "decode"', "plans decode only"),
    "route": ('problem.method != "renormalize"', "renormalize only"),
    "moe": ('problem.activation != "swiglu"', "swiglu only"),
    "batched_moe": ('problem.activation != "swiglu"', "swiglu only"),
    "quantize": ('problem.scale_layout != "rows"', "scales lie row after row"),
    "norm_and_quantize": ("problem.gamma_offset", "gains have no offset"),
    "rearrange": ('problem.arrangement == "int4_mixed"', "no weights of four bits"),
    "rope_and_append": ("problem.latent", "keys do not hold the values"),
}
"""What a kernel may not take, and how it says so, by operation."""


def write_adapter(name: str, operation: str) -> int:
    """Write NAME.py and test_NAME.py into the current folder, and print how to run them.

    Raises:
        UsageRefusedError: no such operation; the name cannot be a module's; a file is there.
    """
    if operation not in CALLS:
        meant = did_you_mean(operation, CALLS)
        message = f"--operation {operation!r}: {meant}there are {', '.join(CALLS)}"
        raise UsageRefusedError(message)
    _check_name(name)
    example, reason = EXAMPLES[operation]
    texts = {
        Path(f"{name}.py"): ADAPTER.format(
            name=name, operation=operation, call=CALLS[operation], example=example, reason=reason
        ),
        Path(f"test_{name}.py"): TEST.format(name=name, operation=operation),
    }
    for path in texts:
        if path.exists():
            message = f"{path}: is there already, and stays as it is"
            raise UsageRefusedError(message)
    try:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"{path}: cannot be written ({error.strerror})"
        raise UsageRefusedError(message) from error
    tell(f"wrote {' and '.join(map(str, texts))}; next:")
    tell(f"  kernelproof check {name}.py:{name} --profile quick")
    tell(f"  pytest test_{name}.py")
    return CONFORMING


def _check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        message = f"NAME is {name!r}; it must be a Python identifier, such as my_kernel"
        raise UsageRefusedError(message)
    if name in USED:
        message = f"NAME is {name!r}, which the adapter needs for something else"
        raise UsageRefusedError(message)
    try:
        spec = importlib.util.find_spec(name)
    except ValueError as error:
        message = f"NAME is {name!r}, which is no name for a module of yours"
        raise UsageRefusedError(message) from error
    if spec is not None and spec.origin != str(Path(f"{name}.py").resolve()):
        message = f"NAME is {name!r}, and {name}.py would hide the module {spec.origin or name}"
        raise UsageRefusedError(message)
