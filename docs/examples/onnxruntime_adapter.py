"""An adapter to onnxruntime's GroupQueryAttention, which appends keys and attends in one call."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from kernelproof.impl import RaggedAttentionInputs, Target, implementation
from kernelproof.reference import AttentionProblem

TENSORS = ("query", "key", "value", "past_key", "past_value")
LENGTHS = ("seqlens_k", "total_sequence_length")
RESULTS = ("output", "present_key", "present_value")


def its_own(problem: AttentionProblem, _: Target) -> bool | str:
    """Refuse what the operator has no words for."""
    if problem.dtype != "float32" or not problem.causal or problem.sinks:
        return "causal attention in float32 without sinks"
    if any(not 0 < t <= s for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)):
        return "each query token brings its key"
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


@implementation("ragged_attention", name="my-gqa", supports=its_own)
def attend(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Return outputs of requests whose last keys are handed over as new, and others as the past."""
    session = session_of(
        num_heads=inputs.q.shape[1],
        kv_num_heads=inputs.k.shape[1],
        scale=inputs.sm_scale * float(inputs.k_scale),
        softcap=inputs.logits_soft_cap,
        local_window_size=inputs.window_left + 1 if inputs.window_left >= 0 else -1,
    )
    out = inputs.q.new_zeros(*inputs.q.shape[:2], inputs.v.shape[-1])
    rows, keys = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    for request in range(len(rows) - 1):
        mine = slice(rows[request], rows[request + 1])
        k, v = (each[keys[request] : keys[request + 1]] for each in (inputs.k, inputs.v))
        q, past = inputs.q[mine], len(k) - (mine.stop - mine.start)
        new = {"query": q, "key": k[past:], "value": v[past:]}
        before = {"past_key": k[:past], "past_value": v[:past]}
        feed = {name: each.flatten(1)[None] for name, each in new.items()}
        feed |= {name: each.transpose(0, 1)[None] for name, each in before.items()}
        given = {name: np.ascontiguousarray(each.numpy()) for name, each in feed.items()}
        lengths = (np.array([len(k) - 1], np.int32), np.array(len(k), np.int32))
        result = session.run(None, given | dict(zip(LENGTHS, lengths, strict=True)))
        out[mine] = torch.from_numpy(result[0])[0].view(out[mine].shape)
    return out * float(inputs.v_scale), None
