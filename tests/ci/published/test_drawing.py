"""How problems of published calls are drawn: regimes of codes, and what a CPU gets fewer of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.ci.published import judging
from kernelproof.ci.published.answers import ask
from kernelproof.ci.published.arithmetic import _steps_of_codes
from kernelproof.ci.published.comparing import compare
from kernelproof.ci.published.faults import is_one_step, seeded
from kernelproof.ci.published.release import (
    BRIEF,
    LARGER,
    LARGEST,
    SIZES,
    TILE,
    Published,
    fewer_constants,
    in_regime,
    problems_of,
)
from kernelproof.ci.published.summary import accepted, one_step


class Var:
    """An axis of any size."""


class Const:
    """An axis of one size."""


def init(
    *, tokens: int, columns: int = 4096, depth: int = 4096, device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Make codes and scales of a product."""
    torch.manual_seed(seed)
    return {
        "a": torch.randn(tokens, depth, device=device).to(torch.float8_e4m3fn),
        "b": torch.randn(columns, depth, device=device).to(torch.float8_e4m3fn),
        "a_scale": torch.rand(tokens, depth // 128, device=device) + 0.5,
        "logits": torch.rand(tokens, 4, device=device),
    }


def multiply(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, **_: object) -> torch.Tensor:
    """Multiply codes as a reference does."""
    wide = a.to(torch.float32) * a_scale.repeat_interleave(128, -1)
    return (wide @ b.to(torch.float32).T).to(torch.bfloat16)


def published_product() -> Published:
    """Return a call whose weights are large."""
    names = {"a": ["tokens", "depth"], "b": ["columns", "depth"], "workspace": ["bytes"]}
    template = SimpleNamespace(
        axes={"tokens": Var(), "columns": Const(), "depth": Const()},
        inputs={name: SimpleNamespace(dim_names=each) for name, each in names.items()},
        outputs={},
        constraints=(),
        init=init,
        reference=multiply,
    )
    return Published("product", "gemm.product", multiply, template)


def test_a_cpu_gets_fewer_weights_first_and_then_what_an_init_has() -> None:
    published = published_product()
    found = [axes for axes, _ in problems_of(published, "cpu", 0, ((3,),))]
    assert found == [{"tokens": 3, "columns": TILE, "depth": TILE}, {"tokens": 3}]
    given = {"tokens": 3, "columns": 512, "depth": 512}
    assert not fewer_constants(published, given)


def test_small_codes_and_scales_show_an_offset() -> None:
    published = published_product()
    refused = {}
    for regime in ("as made", "small"):
        _, made = next(problems_of(published, "cpu", 0, ((3,),), regime))
        (expected,) = ask(multiply, dict(made)).outputs
        assert compare(expected, expected.honest) is None
        refused[regime] = compare(expected, seeded(expected)["+0.009"]) is not None
    assert refused == {"as made": False, "small": True}


def test_a_small_regime_leaves_logits_and_single_rows_of_scales() -> None:
    made = init(tokens=3, columns=256, depth=256)
    small = {name: in_regime(each, "small", scale="scale" in name) for name, each in made.items()}
    assert torch.equal(small["logits"], made["logits"])
    assert float(small["a_scale"].max()) < 2.0**-8
    assert 0 < float(small["a"].float().abs().max()) < float(made["a"].float().abs().max())
    assert torch.equal(in_regime(made["a"], "outliers").float(), made["a"].float())


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend to codes as a reference does."""
    weights = torch.softmax(q.to(torch.float32) @ k.to(torch.float32).T, dim=-1)
    return (weights @ v.to(torch.float32)).to(torch.bfloat16)


def codes(*shape: int, seed: int, times: float = 1.0) -> torch.Tensor:
    """Return numbers in FP8."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * times).to(torch.float8_e4m3fn)


def test_many_keys_show_what_one_rounded_probability_hides() -> None:
    k, v = codes(256, 64, seed=1, times=0.25), codes(256, 64, seed=2, times=0.25)
    refused = {}
    for times in (4.0, 0.25):
        q = codes(96, 64, seed=3, times=times)
        (expected,) = ask(attend, {"q": q, "k": k, "v": v}).outputs
        weights = torch.softmax(q.float() @ k.float().T, dim=-1)
        largest = weights.amax(-1, keepdim=True)
        rounded = (weights / largest).to(torch.float8_e4m3fn).float() * largest
        assert compare(expected, (rounded @ v.float()).to(torch.bfloat16)) is None
        refused[times] = compare(expected, seeded(expected)["x1.005"]) is not None
    assert refused == {4.0: False, 0.25: True}


def test_probabilities_have_steps_of_their_binade_below_the_largest() -> None:
    steps = _steps_of_codes(torch.tensor([[0.6, 0.4, 0.15, 0.0]], dtype=torch.float64))
    wanted = torch.tensor([[0.6, 0.3, 0.15, 0.0]], dtype=torch.float64)
    assert torch.allclose(steps, wanted, atol=1e-12)


def test_a_fault_of_one_step_of_fp8_is_not_counted() -> None:
    problem = {"faults": {"+0.009": {"0": "offset"}}, "steps": {"-10% of the largest": ["0"]}}
    assert one_step({"problems": [problem]}) == ["-10% of the largest of output 0"]
    assert not accepted({"problems": [problem]})
    # But another problem may have one of more steps.
    assert judging._accepted([problem])
    other = {"faults": {"-10% of the largest": {"0": ""}}, "steps": {}}
    assert not one_step({"problems": [problem, other]})
    assert accepted({"problems": [problem, other]}) == ["-10% of the largest of output 0"]


def test_one_step_is_one_neighbour_of_one_number() -> None:
    (expected,) = ask(lambda x: x.to(torch.float8_e4m3fn), {"x": torch.rand(64)}).outputs
    one, two, several = (expected.honest.view(torch.uint8).clone() for _ in range(3))
    one[3] += 1
    two[3] += 2
    several[3:5] += 1
    assert is_one_step(expected, one.view(torch.float8_e4m3fn))
    assert not is_one_step(expected, two.view(torch.float8_e4m3fn))
    assert not is_one_step(expected, several.view(torch.float8_e4m3fn))


@pytest.mark.parametrize(("seconds", "law"), [(0.1, ""), (9.0, ""), (9.0, "offset")])
def test_a_slow_first_problem_is_followed_by_a_brief_one(
    seconds: float, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def first(*given: Any) -> tuple[dict[str, Any], None]:  # noqa: ANN401
        asked.append(given[3])
        answer = {"state": "refused", "why": ""}
        return {"seconds": seconds, "faults": {"+0.009": {"0": law}}, "answer": answer}, None

    monkeypatch.setattr(judging, "_first", first)
    stages: Any = SimpleNamespace(advance=lambda: None)
    published = Published("one", "one", None, SimpleNamespace(reference=1, init=1))
    judging.judge(published, "cpu", 0, stages)
    drawn = [(each.sizes, each.regime) for each in asked]
    if seconds < 1:
        assert drawn == [(SIZES, "as made"), (LARGER, "outliers"), (LARGEST, "small")]
    elif law:
        assert drawn == [(SIZES, "as made")]
    else:
        assert drawn[:2] == [(SIZES, "as made"), (BRIEF, "small")]
