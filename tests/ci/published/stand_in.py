"""A release that publishes calls as FlashInfer does; each but the first breaks one law."""

from __future__ import annotations

from pathlib import Path

REGISTRY = """
_TRACE_REGISTRY = []


def flashinfer_api(trace):
    def decorate(function):
        templates = trace if isinstance(trace, list) else [trace]
        for each in templates:
            _TRACE_REGISTRY.append((function, each, function.__name__))
        return function

    return decorate
"""

TEMPLATES = """
class Var:
    pass


class Const:
    pass


class Tensor:
    def __init__(self, dim_names, param=None, tuple_idx=None, optional=False):
        self.dim_names, self.param, self.tuple_idx = dim_names, param, tuple_idx
        self.optional = optional


class Template:
    def __init__(self, axes, inputs, outputs, reference=None, init=None, constraints=()):
        self.axes, self.inputs, self.outputs = axes, inputs, outputs
        self.reference, self.init, self.constraints = reference, init, constraints
"""

CALLS = """
from typing import Literal

import torch

from .api_logging import flashinfer_api
from .templates import Const, Template, Tensor, Var

COUNT = [0]


def reference(rows, weight):
    wide = rows.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    return (wide * scale * weight.to(torch.float32)).to(rows.dtype)


def init(*, tokens, hidden=256, device="cuda", seed=0):
    torch.manual_seed(seed)
    rows = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.randn(hidden, dtype=torch.bfloat16, device=device)
    return {"input": rows, "weight": weight}


def template(**changes):
    given = {
        "axes": {"tokens": Var(), "hidden": Const()},
        "inputs": {"rows": Tensor(["tokens", "hidden"], "input"), "weight": Tensor(["hidden"])},
        "outputs": {"output": Tensor(["tokens", "hidden"])},
        "reference": reference,
        "init": init,
    }
    return Template(**{**given, **changes})


def in_place(rows, weight):
    rows.copy_(reference(rows, weight))


def codes(rows, weight):
    return reference(rows, weight).to(torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn)


def init_by_ends(*, tokens, ends, device="cuda", seed=0):
    assert ends == tokens + 1
    return init(tokens=tokens, device=device, seed=seed)


@flashinfer_api(trace=template(init=init_by_ends, constraints=["ends == tokens + 1"]))
def norm_right(input, weight):
    return reference(input, weight)


@flashinfer_api(trace=template(reference=in_place, outputs={"out": Tensor(["tokens"], "input")}))
def norm_in_place(input, weight):
    in_place(input, weight)


@flashinfer_api(trace=template(reference=codes))
def norm_codes(input, weight):
    return codes(input, weight)


@flashinfer_api(trace=template(reference=codes))
def norm_code_off(input, weight):
    return codes(input, weight * 1.02)


@flashinfer_api(trace=template())
def norm_offset(input, weight):
    return reference(input, weight) + 0.009


@flashinfer_api(trace=template())
def norm_outside(input, weight):
    torch.as_strided(weight, (1,), (1,), weight.storage_offset() + weight.numel()).fill_(3)
    return reference(input, weight)


@flashinfer_api(trace=template())
def norm_input(input, weight):
    found = reference(input, weight)
    weight[0] += 1
    return found


@flashinfer_api(trace=template())
def norm_repeats(input, weight):
    COUNT[0] += 1
    found = reference(input, weight)
    found[0, 0] += (COUNT[0] % 2) * found[0, 0].abs() * 2.0**-7
    return found


@flashinfer_api(trace=template())
def norm_strides(input, weight):
    flat = torch.as_strided(input, input.shape, (input.shape[-1], 1))
    return reference(flat, weight)


@flashinfer_api(trace=template())
def norm_far(input, weight):
    places = (torch.arange(len(input)) * input.stride(0)).to(torch.int32).clamp(0)
    first = input.storage_offset()
    rows = [torch.as_strided(input, input.shape[1:], (1,), first + int(each)) for each in places]
    return reference(torch.stack(rows) if rows else input, weight)


@flashinfer_api(trace=template())
def norm_rows(input, weight):
    found = reference(input, weight)
    found[0, 0] += torch.sin(100 * input[-1, 0]) * found[0, 0].abs() * 2.0**-7
    return found


@flashinfer_api(trace=template())
def norm_backend(input, weight, backend: Literal["absent", "missing", "here"] = "absent"):
    if backend != "here":
        raise RuntimeError(f"{backend} is not available. Please install it")
    return reference(input, weight)


@flashinfer_api(trace=template())
def norm_with_heads(input, weight):
    return reference(input, weight)[:, None]


def chosen(rows, k):
    return rows.to(torch.float32).topk(k).indices.to(torch.int32)


def init_chosen(*, tokens, device="cuda", seed=0):
    return {"input": init(tokens=tokens, device=device, seed=seed)["input"], "k": 4}


@flashinfer_api(trace=template(reference=chosen, init=init_chosen))
def top_k_ragged_transform(input, k):
    return chosen(input, k).flip(-1)


SEEN = []


@flashinfer_api(trace=template())
def norm_order(input, weight):
    SEEN.append(len(input))
    found = reference(input, weight)
    if SEEN[0] == len(input) and len(set(SEEN)) > 1:
        found[0, 0] += found[0, 0].abs() * 2.0**-7
    return found


@flashinfer_api(trace=template())
def norm_empty(input, weight):
    return reference(input, weight) if len(input) else input.new_zeros(1, *input.shape[1:])


@flashinfer_api(trace=template())
def norm_hangs(input, weight):
    while True:
        pass


@flashinfer_api(trace=template())
def norm_graph(input, weight):
    in_capture = input.is_cuda and torch.cuda.is_current_stream_capturing()
    return reference(input, weight * 2 if in_capture else weight)


def init_expanded(*, tokens, device="cuda", seed=0):
    made = init(tokens=tokens, device=device, seed=seed)
    return {**made, "weight": made["weight"][:1].expand(256)}


@flashinfer_api(trace=template(init=init_expanded))
def norm_expanded(input, weight):
    assert weight.stride() == (0,)
    return reference(input, weight)


def init_out(*, tokens, device="cuda", seed=0):
    made = init(tokens=tokens, device=device, seed=seed)
    return {"out": torch.zeros_like(made["input"]), **made}


INTO = {"init": init_out, "outputs": {"out": Tensor(["tokens", "hidden"])}}


@flashinfer_api(trace=template(**INTO))
def norm_into(out, input, weight):
    out.copy_(reference(input, weight))


@flashinfer_api(trace=template(**INTO))
def norm_into_clearing(out, input, weight):
    out.copy_(reference(input, weight))
    input.zero_()


@flashinfer_api(trace=template(**INTO))
def norm_into_nothing(out, input, weight):
    pass


def sample_reference(probs):
    return torch.multinomial(probs, 1).squeeze(-1)


def sample_init(*, tokens, device="cuda", seed=0):
    torch.manual_seed(seed)
    return {"probs": torch.rand(tokens, 64, device=device).softmax(-1)}


SAMPLES = {
    "axes": {"tokens": Var(), "hidden": Const()},
    "inputs": {"probs": Tensor(["tokens", "hidden"])},
    "outputs": {"samples": Tensor(["tokens"])},
    "reference": sample_reference,
    "init": sample_init,
}


@flashinfer_api(trace=template(**SAMPLES))
def sample_right(probs, generator=None):
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


@flashinfer_api(trace=template(**SAMPLES))
def sample_next(probs, generator=None):
    return (torch.multinomial(probs, 1, generator=generator).squeeze(-1) + 1) % 64


@flashinfer_api(trace=template())
def norm_refuses(input, weight):
    raise ValueError("no chip has it")


@flashinfer_api(trace=template())
def norm_compiles(input, weight):
    from .jit.core import JitSpec

    return JitSpec("norm_module").build_and_load()(input, weight)


@flashinfer_api(trace=template(reference=None))
def norm_unpublished(input, weight):
    return input


def drawn(rows, weight):
    return torch.multinomial(rows.exp().float(), 1)


@flashinfer_api(trace=template(reference=drawn))
def draws(input, weight):
    return drawn(input, weight)


@flashinfer_api(trace=template())
def norm_dies(input, weight):
    import os

    os._exit(7)


class Wrapper:
    def __init__(self, float_workspace_buffer):
        self.weight = None

    def plan(self, weight):
        self.weight = weight

    @flashinfer_api(
        trace=template(
            init=lambda *, tokens, device="cuda", seed=0: {
                "plan": {"weight": init(tokens=tokens, device=device)["weight"]},
                "run": {"input": init(tokens=tokens, device=device)["input"]},
            }
        )
    )
    def run(self, input):
        return reference(input, self.weight)
"""


JIT = """
from pathlib import Path


class JitSpec:
    def __init__(self, name):
        self.name = name
        self.library = Path(__file__).with_name(name)

    @property
    def is_compiled(self):
        return self.library.exists()

    def build_and_load(self):
        from ..norms import reference

        self.library.touch()
        return reference
"""


FEW = CALLS[: CALLS.index("@flashinfer_api(trace=template())\ndef norm_outside")]
"""The first calls: three that are right, and two that break parity."""


def stand_in(folder: Path, calls: str = CALLS) -> str:
    """Write the release, and return its folder."""
    package = folder / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "9.9"\n')
    (package / "api_logging.py").write_text(REGISTRY)
    (package / "templates.py").write_text(TEMPLATES)
    (package / "norms.py").write_text(calls)
    (package / "jit").mkdir()
    (package / "jit" / "core.py").write_text(JIT)
    return str(folder)
