"""What an init lacks of what its call asks for; each entry says where that was read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

Inputs = Mapping[str, Any]


def completed(name: str, original: Any, template: Any, inputs: Inputs) -> Inputs:  # noqa: ANN401
    """Return inputs of a call as it takes them: its init's, completed where that is known."""
    found = _with_output_format(template, _with_formats(original, template, inputs))
    complete = COMPLETED.get(name)
    return found if complete is None else {**found, **complete(found)}


def _with_formats(original: Any, template: Any, inputs: Inputs) -> Inputs:  # noqa: ANN401
    """Return inputs with a format where a call asks for one and its init has a number of it."""
    said = {getattr(each, "dtype", None) for each in template.outputs.values()} - {None}
    own = getattr(torch, str(next(iter(said))), None) if len(said) == 1 else None
    if not isinstance(own, torch.dtype):
        return inputs
    asked = {
        key
        for key, each in inspect.signature(original).parameters.items()
        if each.annotation in (torch.dtype, "torch.dtype") and type(inputs.get(key)) is int
    }
    return {**inputs, **dict.fromkeys(asked, own)}


def _with_output_format(template: Any, inputs: Inputs) -> Inputs:  # noqa: ANN401
    """Return inputs with the format of an output that is given, if a reference has another.

    ``_xqa_mla_reference`` would round to the format of its queries, which is FP8, and copies that
    into an output of 16 bits.
    """
    output = inputs.get("output")
    if not isinstance(output, torch.Tensor) or template.reference is None:
        return inputs
    asked = inspect.signature(template.reference).parameters.get("output_dtype")
    unsaid = asked is not None and asked.default is None and "output_dtype" not in inputs
    return {**inputs, "output_dtype": output.dtype} if unsaid else inputs


def _columns_first(inputs: Inputs) -> Inputs:
    """Lay the second matrices of ``bmm_fp8`` column by column, as its words ask (gemm_base)."""
    return {"B": inputs["B"].transpose(-2, -1).contiguous().transpose(-2, -1)}


def _one_head(inputs: Inputs) -> Inputs:
    """Tie what a state-space head shares, which ``selective_state_update.cu`` asks of strides."""
    batch, dim = inputs["dt"].shape
    states = inputs["A"].shape[-1]

    def tied(name: str, *shape: int, strides: tuple[int, ...]) -> torch.Tensor:
        """Return rows that have their first number only."""
        firsts = inputs[name].reshape(shape[0], -1)[:, 0].clone()
        return torch.as_strided(firsts, shape, strides)

    return {
        "dt": tied("dt", batch, 1, dim, strides=(1, 1, 0)),
        "A": tied("A", 1, dim, states, strides=(1, 0, 0)),
        "D": tied("D", 1, dim, strides=(1, 0)),
        "dt_bias": tied("dt_bias", 1, dim, strides=(1, 0)),
    }


def _packed(inputs: Inputs) -> Inputs:
    """Return the layout that ``trtllm_fmha_v2_prefill`` asks for, and queries, keys and values."""
    one = inputs["qkv"]
    packed = torch.stack([one, one.roll(1, 1), one.flip(-1)], 1)
    return {"qkv": packed, "input_layout": "PACKED_QKV"}


def _tables(inputs: Inputs) -> Inputs:
    """Return a page for each score of ``top_k_page_table_transform``, and a table for each row."""
    scores, table = inputs["input"], inputs["src_page_table"]
    rows, width = scores.shape[0], max(scores.shape[1], table.shape[1])
    # Rows that have the same table, and pages that are not those of other rows in order.
    pages = torch.arange(table.shape[0] * width, dtype=table.dtype, device=table.device)
    return {
        **_few(inputs),
        "src_page_table": pages.flip(0).reshape(table.shape[0], width),
        "row_to_batch": torch.arange(rows, dtype=torch.int32, device=table.device) % table.shape[0],
    }


def _few(inputs: Inputs) -> Inputs:
    """Select no more than there are: a reference pads with 0, and the call's words say -1."""
    return {"k": min(inputs["k"], inputs["input"].shape[1])}


def _unnormalised(_: Inputs) -> Inputs:
    """Leave queries and keys as they are, as the reference of a decoding step does."""
    return {"use_qk_l2norm": False}


def _slots(inputs: Inputs) -> Inputs:
    """Have a state for each index of ``gated_delta_rule_mtp``."""
    states, rows = inputs["initial_state"], inputs["initial_state_indices"].shape[0]
    missing = max(0, rows - states.shape[0])
    more = states[torch.arange(missing, device=states.device) % states.shape[0]].flip(-1)
    return {"initial_state": torch.cat([states, more])}


def _segments(inputs: Inputs) -> Inputs:
    """Return the number of segments, and the layout of weights that the reference multiplies."""
    return {"batch_size": inputs["weights"].shape[0], "weight_column_major": False}


def _gates(inputs: Inputs) -> Inputs:
    """Have what the gates of ``chunk_gated_delta_rule`` follow from, which its reference takes."""
    heads = inputs["g"].shape[1]
    zeros = torch.zeros(heads, dtype=torch.float32, device=inputs["g"].device)
    open_, update = (inputs[key].clamp(0.01, 0.99) for key in ("g", "beta"))
    return {
        "g": open_,
        "beta": update,
        "A_log": zeros,
        "dt_bias": zeros.clone(),
        "a": -torch.logit(open_),
        "b": torch.logit(update),
    }


COMPLETED: dict[str, Callable[[Inputs], Inputs]] = {
    "SegmentGEMMWrapper.run:segment_gemm_run": _segments,
    "bmm_fp8": _columns_first,
    "selective_state_update": _one_head,
    "trtllm_fmha_v2_prefill": _packed,
    "top_k_page_table_transform": _tables,
    "top_k_ragged_transform": _few,
    "gated_delta_rule_decode_pretranspose:gdn_decode": _unnormalised,
    "gated_delta_rule_mtp:gdn_mtp": _slots,
    "chunk_gated_delta_rule:gdn_prefill": _gates,
}
"""What completes the inputs of a call, by the call's name."""
