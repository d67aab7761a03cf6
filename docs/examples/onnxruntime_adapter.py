"""An adapter to onnxruntime's GroupQueryAttention, which appends keys and attends in one call."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from kernelproof.impl import PagedAttentionInputs, Target, implementation
from kernelproof.reference import AttentionProblem

TENSORS = ("query", "key", "value", "past_key", "past_value")
LENGTHS = ("seqlens_k", "total_sequence_length")
RESULTS = ("output", "present_key", "present_value")


def its_own(problem: AttentionProblem, _: Target) -> bool | str:
    """Refuse what the operator has no words for."""
    if problem.dtype != "float32" or not problem.causal or problem.sinks:
        return "causal attention in float32 without sinks"
    if 0 in problem.query_lens:
        return "each request has a query token"
    if problem.head_dim_qk != problem.head_dim_vo or problem.head_dim_qk % 8:
        return "one head dim, a multiple of 8"
    return True


def session_of(**attributes: float) -> ort.InferenceSession:
    """Make a model of one node."""
    given = [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in TENSORS]
    given += [helper.make_tensor_value_info(each, TensorProto.INT32, None) for each in LENGTHS]
    made = [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in RESULTS]
    name, domain = "GroupQueryAttention", "com.microsoft"
    node = helper.make_node(name, [*TENSORS, *LENGTHS], RESULTS, domain=domain, **attributes)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    graph = helper.make_graph([node], "attention", given, made)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@implementation(
    "paged_attention",
    name="my-gqa",
    supports=its_own,
    features=("append_and_attend",),
    hidden_keys="finite",  # it multiplies the values of hidden keys by 0
)
def attend(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Append each request's new keys and values to its pages, and attend, in one call."""
    assert inputs.new_k is not None and inputs.new_v is not None  # noqa: S101, PT018  a feature's
    session = session_of(
        num_heads=inputs.q.shape[1],
        kv_num_heads=inputs.new_k.shape[1],
        scale=inputs.sm_scale * float(inputs.k_scale),
        softcap=inputs.logits_soft_cap,
        local_window_size=inputs.window_left + 1 if inputs.window_left >= 0 else -1,
    )
    caches = [inputs.k_cache, inputs.v_cache]
    if inputs.kv_layout == "HND":
        caches = [each.transpose(1, 2) for each in caches]
    out = inputs.q.new_zeros(*inputs.q.shape[:2], inputs.v_cache.shape[-1])
    rows, size = inputs.qo_indptr.tolist(), inputs.metadata.page_size
    for request, length in enumerate(inputs.metadata.seq_lens.tolist()):
        mine, keys = slice(rows[request], rows[request + 1]), torch.arange(length)
        past = length - (mine.stop - mine.start)
        places = inputs.block_table[request, keys // size].long(), keys % size
        new = {"query": inputs.q[mine], "key": inputs.new_k[mine], "value": inputs.new_v[mine]}
        before = [cache[places][:past].transpose(0, 1)[None] for cache in caches]
        feed = {name: each.flatten(1)[None] for name, each in new.items()}
        feed |= dict(zip(("past_key", "past_value"), before, strict=True))
        given = {name: np.ascontiguousarray(each.numpy()) for name, each in feed.items()}
        lengths = (np.array([length - 1], np.int32), np.array(length, np.int32))
        result = session.run(None, given | dict(zip(LENGTHS, lengths, strict=True)))
        out[mine] = torch.from_numpy(result[0])[0].view(out[mine].shape)
        for cache, present in zip(caches, result[1:], strict=True):
            cache[places] = torch.from_numpy(present)[0].transpose(0, 1)
    return out * float(inputs.v_scale), None
