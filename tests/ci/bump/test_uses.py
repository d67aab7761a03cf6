"""Small engines use what a release changed, or do not: each case stands for one rule."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.bump.report.contents import assemble, with_actions
from kernelproof.ci.bump.report.outline import to_markdown
from kernelproof.ci.bump.report.page import to_page
from kernelproof.ci.bump.surface import engine_files, engine_modules
from kernelproof.ci.bump.surface.uses import Source, with_uses
from kernelproof.ci.bump.verdicts.findings import (
    BLOCK,
    CONDITION,
    REPORT,
    Finding,
    finding,
    uses_in_words,
)
from kernelproof.ci.bump.verdicts.policy import DEFAULT
from kernelproof.ci.bump.verdicts.verdict import RAN, decide
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.impl.targets.data_files import read_bytes
from kernelproof.properties.findings.report import TERMINATED
from kernelproof.properties.search.ending import EndedError, Ending

USED, MAYBE, UNKNOWN, NOT = "used", "may be used", "receiver unknown", "not used"
MOE = "from flashinfer.fused_moe import moe\n"
OWN = "\n    def plan(self, *a): ...\n    def f(self):\n        self.plan(1, 2, 3)"
HELD = "\n    def __init__(self, plan, w):\n        self.plan = {}\n        f(self.plan)"
BARE = "def g(w):\n    plan = w.plan\n    plan(1)"
PAIR = MOE + "def get():\n    return moe, 1\n"
PARTIAL = MOE + "from functools import partial\n"
CALL = "from .x import moe\nmoe(1, 2, 3)"
ENUM = "from flashinfer.fused_moe.core import ActivationType\n"


def changed(change: str, subject: str, old: str, new: str, detail: str = "") -> Finding:
    sides: dict[str, Any] = {"baseline": {"signature": old}, "candidate": {"signature": new}}
    return finding(change, subject, f"{subject} changed", detail=detail, **sides)


WRAPPERS = "from flashinfer.decode import Wrapper\nfrom flashinfer.prefill import Other\n"
HOLDS = """class A:
    def __init__(self, x=None):
        self.w = None
        self.w = {}
    def f(self):
        self.w.plan(1, 2, 3)"""
MANY = """class A:
    def __init__(self):
        self.ws = []
        for i in range(3):
            self.ws.append({}(i))
    def f(self):
        for i, w in enumerate(self.ws):
            w.plan(1, 2, 3)
        self.ws[0].plan(1, 2, 3)"""

FINDINGS = {
    "gone": finding("callable-removed", "decode.OldWrapper", "it is gone"),
    "moved": changed("positional-meaning", "fused_moe.moe", "(x, w, a=1)", "(x, w, n=0, a=1)"),
    "method": changed(
        "positional-meaning", "decode.Wrapper.plan", "(self, x, w, a=1)", "(self, x, w, n=0, a=1)"
    ),
    "init": changed(
        "parameter-removed", "decode.Wrapper.__init__", "(self, x, a=1)", "(self, x)", "a"
    ),
    "refused": changed("positional-refused", "fused_moe.moe", "(x, w, a=1)", "(x, w, *, a=1)"),
    "removed": changed("parameter-removed", "fused_moe.moe", "(x, w, a=1)", "(x, w)", "a"),
    "open": changed("parameter-removed", "fused_moe.moe", "(x, **more)", "(x)", "**more"),
    "renamed": changed(
        "parameter-renamed", "fused_moe.moe", "(x, old_a=1)", "(x, new_a=1)", "new_a"
    ),
    "required": changed("parameter-required", "fused_moe.moe", "(x, a=1)", "(x, a)", "a"),
    "member": finding(
        "enum-member-removed",
        "ActivationType",
        "a member is gone",
        baseline={"Silu": 2, "Identity": 8},
        candidate={"Silu": 2},
    ),
    "number": finding(
        "enum-number-moved",
        "ActivationType",
        "a number moved",
        baseline={"Silu": 2, "Identity": 8},
        candidate={"Silu": 2, "GegluTanh": 8, "Identity": 9},
    ),
    "name": finding(
        "name-removed", "flashinfer.utils", "offers no helper", baseline={"helper": "function"}
    ),
    "inner name": finding(
        "name-removed", "flashinfer.triton.cascade", "offers no state", baseline={"state": "class"}
    ),
}


def uses_of(folder: Path, what: str, files: dict[str, str]) -> dict[str, Any]:
    """Return what an engine of some files says of a finding."""
    for name, text in files.items():
        path = folder / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found, _ = with_uses([FINDINGS[what]], [Source.read(folder / "engine")])
    assert found[0].uses is not None
    return dict(found[0].uses)


@pytest.mark.parametrize(
    ("what", "code", "status"),
    [
        # How a name is reached.
        ("gone", "import flashinfer\nflashinfer.decode.OldWrapper(1)", USED),
        ("gone", "import flashinfer as fi\nfi.OldWrapper(1)", USED),
        ("gone", "import flashinfer.decode as d\nd.OldWrapper(1)", USED),
        ("gone", "from flashinfer.decode import OldWrapper as Y", USED),
        ("gone", "def f():\n    from flashinfer.decode import OldWrapper", USED),
        ("gone", "if TYPE_CHECKING:\n    from flashinfer import OldWrapper", USED),
        (
            "gone",
            "try:\n    from flashinfer import OldWrapper\nexcept ImportError:\n    pass",
            USED,
        ),
        ("gone", "import flashinfer\nm = flashinfer.decode\nm.OldWrapper(1)", USED),
        ("gone", "import importlib\nimportlib.import_module('flashinfer.decode').OldWrapper", USED),
        ("gone", "m = __import__('flashinfer.decode')\nm.OldWrapper", USED),
        ("gone", "import sys\nsys.modules['flashinfer.decode'].OldWrapper", USED),
        ("gone", "import flashinfer\ngetattr(flashinfer, 'OldWrapper')(1)", USED),
        ("gone", "import torch\ntorch.ops.flashinfer.OldWrapper(1)", USED),
        ("gone", "import flashinfer\nfrom flashinfer import OtherWrapper\nOtherWrapper(1)", NOT),
        # Dynamic use.
        ("gone", "import flashinfer\ngetattr(flashinfer.decode, name)(1)", MAYBE),
        ("gone", "import flashinfer\nvars(flashinfer.decode)[name](1)", MAYBE),
        ("gone", "import flashinfer\nflashinfer.decode.__dict__[name](1)", MAYBE),
        ("gone", "from flashinfer.decode import *", MAYBE),
        ("gone", "from flashinfer.prefill import *", NOT),
        ("gone", "import flashinfer\nload('flashinfer.decode', 'OldWrapper')", MAYBE),
        ("gone", "import torch\ntorch.library.opcheck('flashinfer::OldWrapper')", MAYBE),
        ("gone", "import flashinfer\neval('flashinfer.OldWrapper(1)')", MAYBE),
        ("gone", "import flashinfer\ngetattr(module, f'Old{kind}rapper')(1)", MAYBE),
        ("gone", "import flashinfer\ngetattr(module, 'OldWrap' + end)(1)", MAYBE),
        ("gone", "import flashinfer\nprint(f'{kind}per')", NOT),
        ("gone", "import importlib\nimportlib.import_module(f'flashinfer.{x}').OldWrapper", USED),
        ("gone", "import flashinfer\nmodule().OldWrapper(1)", MAYBE),
        ("gone", "import flashinfer\n'''OldWrapper'''\n# OldWrapper", NOT),
        ("gone", "import flashinfer\nlog('OldWrapper is deprecated')", NOT),
        # Another thing of the same name.
        ("gone", "import flashinfer\nclass OldWrapper: ...\nOldWrapper(1)", NOT),
        ("gone", "import flashinfer\nfrom torch.nn import OldWrapper\nOldWrapper(1)", NOT),
        ("gone", "from elsewhere import OldWrapper\nOldWrapper(1)", NOT),
        # What is no Python is searched as text.
        ("gone", "flashinfer = (", NOT),
        ("gone", "flashinfer = ( OldWrapper", MAYBE),
        # Values by position.
        ("moved", MOE + "moe(1, 2)", NOT),
        ("moved", MOE + "moe(1, 2, 3)", USED),
        ("moved", MOE + "moe(1, 2, a=3)", NOT),
        ("moved", MOE + "moe(1, 2, **options)", NOT),
        ("moved", MOE + "moe(*values)", MAYBE),
        ("moved", MOE + "moe(1, *values)", MAYBE),
        ("moved", MOE + "partial(moe, 1)", MAYBE),
        ("moved", MOE + "TABLE = {'moe': moe}", MAYBE),
        ("moved", MOE + "def get():\n    return moe", MAYBE),
        ("moved", MOE + "moe", MAYBE),  # imported, and no call is seen
        ("moved", MOE + "run = moe\nrun(1, 2, 3)", USED),
        ("moved", MOE + "run = moe\nrun(1, 2)", NOT),
        ("moved", MOE + "run = moe if fast else None\nrun(1, 2, 3)", USED),
        ("moved", MOE + "if moe is not None and callable(moe):\n    moe(1, 2)", NOT),
        ("moved", MOE + "def f(x: moe) -> moe:\n    moe(1, 2)", NOT),
        ("moved", "import flashinfer\na = b\nb = a\nb = flashinfer.moe\na(1, 2, 3)", USED),
        ("refused", MOE + "moe(1, 2)", NOT),
        ("refused", MOE + "moe(1, 2, 3)", USED),
        # A method is called on an object of which nothing is known.
        ("method", "import flashinfer\nw.plan(1, 2, 3)", UNKNOWN),
        ("method", "import flashinfer\nw.plan(1, 2)", NOT),
        ("method", "import flashinfer\nw.run(1, 2, 3)", NOT),
        ("method", "import flashinfer, trip\ntrip.plan(1, 2, 3)", NOT),
        ("method", "import flashinfer\nmode = 'plan'", NOT),
        ("method", "import flashinfer\ngetattr(w, 'plan')(1, 2, 3)", UNKNOWN),
        ("method", "import flashinfer\nmethodcaller('plan', 1, 2, 3)(w)", MAYBE),
        ("method", "import flashinfer\nw.plan(*values)", UNKNOWN),
        ("method", "w.plan(1, 2, 3)", NOT),  # FlashInfer is named nowhere
        (
            "method",
            "import flashinfer\nclass A:" + OWN,
            NOT,
        ),
        (
            "method",
            "from flashinfer import Wrapper\nclass A(Wrapper):" + OWN,
            NOT,
        ),
        ("init", "from flashinfer import Wrapper\nWrapper(1)", NOT),
        ("init", "from flashinfer import Wrapper\nWrapper(1, 2)", USED),
        ("init", "from flashinfer import Wrapper\nclass A(Wrapper): ...", MAYBE),
        # The class of the receiver decides.
        ("method", WRAPPERS + "Wrapper(1).plan(1, 2, 3)", USED),
        ("method", WRAPPERS + "Wrapper(1).plan(1, 2)", NOT),
        ("method", WRAPPERS + "Wrapper(1).plan(*x)", MAYBE),
        ("method", WRAPPERS + "Other(1).plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "def f():\n    w = Wrapper()\n    w.plan(1, 2, 3)", USED),
        ("method", WRAPPERS + "def f():\n    w = Other()\n    w.begin_forward(1, 2, 3)", NOT),
        ("method", WRAPPERS + "def f():\n    w = Wrapper() if x else Other()\n    w.plan(1, 2, 3)",
         MAYBE),
        ("method", WRAPPERS + "def f(x):\n    if x:\n        w = Other()\n        w.plan(1, 2, 3)\n"
         "    else:\n        w = Wrapper()\n        w.plan(1, 2)", NOT),
        ("method", WRAPPERS + "def f(x):\n    w = Other()\n    for _ in x:\n"
         "        w.plan(1, 2, 3)\n        w = Wrapper()", MAYBE),
        ("method", WRAPPERS + "def f(w: Wrapper):\n    w.plan(1, 2, 3)", USED),
        ("method", WRAPPERS + "def f(w: 'Other | None'):\n    w.plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "def f(w: Any):\n    w.plan(1, 2, 3)", UNKNOWN),
        ("method", WRAPPERS + "def f(ws: dict[int, list[Other]]):\n    for w in ws[0]:\n"
         "        w.plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + HOLDS.format("Other()"), NOT),
        ("method", WRAPPERS + HOLDS.format("Wrapper()"), USED),
        ("method", WRAPPERS + HOLDS.format("x"), UNKNOWN),
        ("method", WRAPPERS + HOLDS.format("x") + "\nA(Other())", NOT),
        ("method", WRAPPERS + HOLDS.format("x") + "\nA(Wrapper())", USED),
        ("method", WRAPPERS + HOLDS.format("make()") + "\ndef make():\n    return Other()", NOT),
        ("method", WRAPPERS + HOLDS.format("make()") + "\ndef make() -> Wrapper: ...", USED),
        ("method", WRAPPERS + MANY.format("Other"), NOT),
        ("method", WRAPPERS + MANY.format("Wrapper"), USED),
        ("method", WRAPPERS + "d = {0: Other()}\nd[0].plan(1, 2, 3)\nd.get(1).plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "d = {}\nd[0] = Wrapper()\nd[0].plan(1, 2, 3)", USED),
        ("method", WRAPPERS + "d = {}\nd[0] = Other()\nfor w in d.values(): w.plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "class B(Other): ...\nB().plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "class B(Wrapper): ...\nB().plan(1, 2, 3)", USED),
        ("method", WRAPPERS + "from nowhere import B\nB().plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "from nowhere import b\nb().plan(1, 2, 3)", UNKNOWN),
        ("method", WRAPPERS + "import torch\ntorch.x().plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "class Own:\n    def plan(self, *a): ...\nOwn().plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "class C:\n    w: Other\ndef f(c: C):\n    c.w.plan(1, 2, 3)", NOT),
        ("method", WRAPPERS + "def f(w):\n    w.plan(1, 2, 3)\nf(Other())", NOT),
        ("method", WRAPPERS + "def f(w):\n    w.plan(1, 2, 3)\nf(Wrapper())\nf(Other())", MAYBE),
        ("method", WRAPPERS + "def f(w):\n    w.plan(1, 2, 3)\nf(Other())\ng(f)", UNKNOWN),
        ("method", WRAPPERS + "def f(w=None):\n    w.plan(1, 2, 3)\nf(**x)", UNKNOWN),
        # A name is read in the scope that binds it.
        ("moved", MOE + "def f(moe):\n    moe(1, 2, 3)\nmoe(1, 2)", NOT),
        ("moved", MOE + "[moe(1, 2, 3) for moe in own]\nmoe(1, 2)", NOT),
        ("moved", MOE + "def f(moe=moe):\n    moe(1, 2, 3)", MAYBE),
        ("moved", MOE + "def f(moe=moe(1, 2, 3)): ...", USED),
        ("moved", MOE + "def f(moe, g=lambda: moe(1, 2, 3)): ...", USED),
        ("moved", MOE + "def f():\n    [0 for moe in own]\n    moe(1, 2, 3)", USED),
        ("moved", MOE + "def f():\n    [0 for moe in moe(1, 2, 3)]", USED),
        ("moved", MOE + "class A:\n    moe = 1\n    def f(self):\n        moe(1, 2, 3)", USED),
        ("moved", MOE + "def f():\n    global moe\n    moe = moe or 1\n    moe(1, 2, 3)", USED),
        ("moved", "def f():\n    " + MOE + "    def g():\n        moe(1, 2, 3)", USED),
        ("moved", MOE + "def f(x):\n    [y := moe for _ in x]\n    y(1, 2, 3)", USED),
        ("moved", MOE + "def f(x):\n    match x:\n        case moe: moe(1, 2, 3)", USED),
        ("method", "import flashinfer\ndef f(ps):\n    for plan in ps: h(plan)\n" + BARE, NOT),
        ("method", "import flashinfer\ndef f(w):\n    plan = w.plan\n    plan(1, 2, 3)", UNKNOWN),
        # What a class assigns to its attribute is no method of what it does not inherit.
        ("method", "import flashinfer\nclass A:" + HELD.format("plan"), NOT),
        ("method", "import flashinfer\nclass A:" + HELD.format("w.plan"), UNKNOWN),
        ("method", "from flashinfer import Wrapper\nclass B(Wrapper): ...\nclass A(B):"
         + HELD.format("plan"), MAYBE),
        ("method", "import flashinfer\nfrom .x import B\nclass A(B):" + HELD.format("plan"),
         UNKNOWN),
        # FlashInfer's second name of a method.
        ("method", "import flashinfer\nw.begin_forward(1, 2, 3)", UNKNOWN),
        ("method", "import flashinfer\nw.begin_forward(1, 2)", NOT),
        # Functions that return it, to callers that are all seen.
        ("moved", PAIR + "moe, _ = get()\nmoe(1, 2)", NOT),
        ("moved", PAIR + "run, _ = get()\nrun(1, 2, 3)", USED),
        ("moved", PAIR + "def f():\n    _, run = get()\n    run(1, 2, 3)\nmoe(1, 2)", NOT),
        ("moved", PAIR + "run, _ = get()\nboth = get()\nboth[0](1, 2, 3)", MAYBE),
        ("moved", PAIR + "run, _ = get()\nf(get)", MAYBE),
        ("moved", PAIR + "run, _ = get()\nf('get')", MAYBE),
        ("moved", PAIR + "run, self.x = get()", MAYBE),
        ("moved", PAIR + "run, *x = get()", MAYBE),
        ("moved", PAIR + "_, x = get()\n_(1, 2, 3)", MAYBE),
        ("moved", PAIR + "run, _ = get()\nf(run)", MAYBE),
        ("moved", PAIR + "run, _ = x.get()\nrun(1, 2, 3)", MAYBE),
        ("moved", "@wrapped\n".join(PAIR.split("\n", 1)) + "run, _ = get()", MAYBE),
        ("moved", MOE + "def get():\n    return moe\nget()(1, 2, 3)", USED),
        ("moved", MOE + "def get():\n    return moe\nget()(1, 2)", NOT),
        ("gone", "import flashinfer\ndef get(x): return flashinfer\nget(1).OldWrapper", USED),
        # Partials, whose values by position count.
        ("moved", PARTIAL + "def f():\n    run = partial(moe, 1)\n    run(2)", NOT),
        ("moved", PARTIAL + "def f():\n    run = partial(moe, 1)\n    run(2, 3)", USED),
        ("removed", PARTIAL + "def f():\n    run = partial(moe, a=1)\n    run(2)", USED),
        ("moved", PARTIAL + "def f():\n    run = partial(moe, *x)\n    run(2)", MAYBE),
        ("moved", PARTIAL + "def f():\n    run = partial(moe, 1)\n    run(2)\n    g(run)", MAYBE),
        ("moved", PARTIAL + "run = partial(moe, 1)\nrun(2)", MAYBE),
        ("moved", PARTIAL + "w.go = partial(moe, w)\nw.go(2)\nw.go.func == moe", NOT),
        ("moved", PARTIAL + "w.go = partial(moe, w)\nw.go(2)\nx.go(2, 3)", MAYBE),
        ("moved", PARTIAL + "w.go = partial(moe, w)\nw.go(2)\nw.go.func(1, 2, 3)", MAYBE),
        ("moved", PARTIAL + "w.go = partial(moe, w)\nw.go(2)\ngetattr(w, 'go')(2, 3)", MAYBE),
        ("moved", PARTIAL + "w.go = partial(moe, w)\nw.go(2)\nf = w.go\nf(2, 3)", MAYBE),
        ("moved", PARTIAL + "w.go = partial(moe, w)", MAYBE),
        ("moved", PARTIAL + "w.go = partial(moe, cfg)\nw.go(2)", MAYBE),
        ("moved", PARTIAL + "w.forward = partial(moe, w)\nw.forward(2)", MAYBE),
        ("moved", "def partial(f, *a): f(1, 2, 3)\n" + MOE
         + "def f():\n    run = partial(moe, 1)\n    run(2)", MAYBE),
        # Parameters.
        ("removed", MOE + "moe(1, 2)", NOT),
        ("removed", MOE + "moe(1, 2, a=3)", USED),
        ("removed", MOE + "moe(1, 2, 3)", USED),
        ("removed", MOE + "moe(1, 2, **options)", USED),
        ("open", MOE + "moe(x=1)", NOT),
        ("open", MOE + "moe(1, other=2)", USED),
        ("renamed", MOE + "moe(1, 2)", NOT),
        ("renamed", MOE + "moe(1, old_a=2)", USED),
        ("renamed", MOE + "moe(1, new_a=2)", NOT),
        ("required", MOE + "moe(1)", USED),
        ("required", MOE + "moe(1, 2)", NOT),
        ("required", MOE + "moe(1, a=2)", NOT),
        ("required", MOE + "moe(1, **options)", USED),
        # Members of an enum.
        ("member", ENUM + "ActivationType.Identity", USED),
        ("member", ENUM + "ActivationType.Silu", NOT),
        ("member", ENUM + "getattr(ActivationType, 'Identity')", USED),
        ("member", ENUM + "getattr(ActivationType, 'Silu')", NOT),
        ("member", ENUM + "getattr(ActivationType, name)", MAYBE),
        ("member", ENUM + "ActivationType['Identity']", USED),
        ("member", ENUM + "ActivationType[name]", MAYBE),
        ("member", ENUM + "[each for each in ActivationType]", MAYBE),
        ("number", ENUM + "ActivationType.Identity", NOT),
        ("number", ENUM + "ActivationType(8)", USED),
        ("number", ENUM + "ActivationType(2)", NOT),
        ("number", ENUM + "ActivationType(number)", MAYBE),
        ("number", MOE + "moe(activation_type=8)", MAYBE),
        ("number", MOE + "moe(activation_type=2)", NOT),
        ("number", MOE + "class ActivationType(IntEnum):\n    Identity = 8", MAYBE),
        ("number", MOE + "class ActivationType(IntEnum):\n    Identity = (8,)", MAYBE),
        ("number", MOE + "class ActivationType(IntEnum):\n    Silu = 2", NOT),
        # Public names are used beyond doubt, or not.
        ("name", "from flashinfer.utils import helper", USED),
        ("name", "from flashinfer.other import helper", NOT),
        ("inner name", "from flashinfer.triton.cascade import state", USED),
        ("name", "import flashinfer\nself.helper()", NOT),
    ],
)  # fmt: skip
def test_a_rule(tmp_path: Path, what: str, code: str, status: str) -> None:
    assert uses_of(tmp_path, what, {"a.py": code})["status"] == status


LAZY = """import importlib
def lazy(module, name):
    def wrapper(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
    return wrapper
fused = lazy("flashinfer.fused_moe", "moe")
"""
CHECK = """
names = [("flashinfer.fused_moe", "moe")]
for module, name in names:
    if not hasattr(load(module), name):
        raise ImportError
"""


@pytest.mark.parametrize(
    ("files", "status", "place"),
    [
        # Through modules of the engine.
        ({"x.py": MOE, "a.py": CALL}, USED, "a.py:2"),
        ({"x.py": MOE, "a.py": "from engine.x import moe as m\nm(1, 2, 3)"}, USED, "a.py:2"),
        ({"x.py": MOE, "a.py": "from engine import x\nx.moe(1, 2, 3)"}, USED, "a.py:2"),
        ({"x.py": MOE, "a.py": "from engine import x\nx.moe(1, 2)"}, NOT, ""),
        ({"x.py": MOE, "y.py": "from .x import *", "a.py": CALL.replace("x", "y")},
         USED, "a.py:2"),
        ({"x.py": "flashinfer = moe = 1\ndef __getattr__(n): ...", "a.py": CALL},
         MAYBE, "a.py:2"),
        ({"x.py": "import flashinfer", "y.py": "def moe(): ...", "a.py": CALL.replace("x", "y")},
         NOT, ""),
        ({"x.py": MOE + "fused = moe", "a.py": "import engine.x\nengine.x.fused(1, 2, 3)"},
         USED, "a.py:2"),
        ({"p/__init__.py": "from .x import moe", "p/x.py": MOE, "a.py": CALL.replace("x", "p")},
         USED, "a.py:2"),
        # Functions that import when they are called, as vllm/utils/flashinfer.py has them.
        ({"x.py": LAZY, "a.py": "from .x import fused\nfused(1, 2, 3)"}, USED, "a.py:2"),
        ({"x.py": LAZY, "a.py": "from .x import fused\nfused(1, a=3)"}, NOT, ""),
        ({"x.py": LAZY.replace("(*args, **kwargs)\n    ret", "(*args, 0, **kwargs)\n    ret"),
          "a.py": "from .x import fused\nfused(1, a=3)"}, MAYBE, "x.py:6"),
        ({"x.py": MOE + "__all__ = ['moe']\nmoe(1, 2)"}, NOT, ""),
        ({"x.py": MOE + "__all__ = ['moe']"}, MAYBE, "x.py:1"),
        # A list of names that are only asked for.
        ({"x.py": CHECK}, NOT, ""),
        ({"x.py": CHECK.replace("hasattr", "getattr")}, MAYBE, "x.py:2"),
    ],
)  # fmt: skip
def test_names_are_followed_through_the_engine(
    tmp_path: Path, files: dict[str, str], status: str, place: str
) -> None:
    found = uses_of(tmp_path, "moved", files)
    places = [f"{each['file']}:{each['line']}" for each in found["places"]]
    assert found["status"] == status
    assert not place or places[0].endswith(f"/{place}")


def test_calls_on_objects_of_unknown_class_are_listed_apart_and_do_not_block(
    tmp_path: Path,
) -> None:
    found = uses_of(
        tmp_path,
        "method",
        {
            "a.py": WRAPPERS + "def f(w):\n    w.plan(1, 2, 3)",
            "b.py": WRAPPERS + "Other().plan(1, 2, 3)",
        },
    )
    assert (found["count"], found["unknown_count"]) == (0, 1)
    assert [(Path(e["file"]).name, e["line"]) for e in found["unknown"]] == [("a.py", 4)]
    asked = DEFAULT.apply(replace(FINDINGS["method"], uses=found))
    assert asked.action == CONDITION
    assert "receiver unknown: " in uses_in_words(found)
    both = uses_of(tmp_path, "method", {"c.py": WRAPPERS + "Wrapper().plan(1, 2, 3)"})
    assert (both["status"], both["count"], both["unknown_count"]) == (USED, 1, 1)
    assert DEFAULT.apply(replace(FINDINGS["method"], uses=both)).action == BLOCK
    assert "receiver unknown, and not counted: " in uses_in_words(both)


def test_places_are_those_beyond_doubt_first_and_five(tmp_path: Path) -> None:
    calls = MOE + "moe(1, 2, 3)\n" * 6
    found = uses_of(tmp_path, "moved", {"a.py": "import flashinfer\nf('moe')", "b.py": calls})
    assert found["count"] == 7
    assert [each["line"] for each in found["places"]] == [2, 3, 4, 5, 6]
    assert found["places"][0]["how"] == "called with 3 values by position"


def test_what_cannot_be_read_may_use_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_files, "read_bytes", partial(read_bytes, most=40))
    found = uses_of(tmp_path, "gone", {"a.py": "import flashinfer", "b.py": "# long\n" * 10})
    assert found["status"] == MAYBE
    assert "larger than" in found["places"][0]["how"]


def test_a_linked_folder_may_use_everything(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "link").symlink_to(tmp_path)
    found = uses_of(tmp_path, "gone", {"a.py": "import flashinfer"})
    assert found["status"] == MAYBE
    assert "link to a folder" in found["places"][0]["how"]


def test_a_package_named_flashinfer_inside_of_the_engines_is_read(tmp_path: Path) -> None:
    code = {"__init__.py": "", "flashinfer/__init__.py": MOE + "moe(1, 2, 3)"}
    assert uses_of(tmp_path, "moved", code)["status"] != NOT


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name.replace("__", "/") + ".py", text)
    return path


def test_a_wheel_is_read_and_flashinfer_beside_it_is_not(tmp_path: Path) -> None:
    path = wheel(
        tmp_path / "e.whl", engine__a=MOE + "moe(1, 2)", flashinfer__b=MOE + "moe(1, 2, 3)"
    )
    found, engines = with_uses([FINDINGS["moved"]], [Source.read(path)])
    assert found[0].uses is not None
    assert found[0].uses["status"] == NOT
    assert engines == [{"path": str(path), "files": 1, "naming": 1, "unread": []}]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "cannot be read (No such file or directory)"),
        ("empty", "holds no Python files"),
        ("text.whl", "is no folder, wheel or Python file"),
        ("a\0b", "cannot be read (embedded null"),
    ],
)
def test_a_path_that_is_no_engine_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.whl").write_text("no zip")
    with pytest.raises(UsageRefusedError) as refused:
        Source.read(tmp_path / name)
    assert refused.value.message.startswith(f"--uses {tmp_path / name}: ")
    assert said in refused.value.message


def test_too_much_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "MOST_SOURCE", 10)
    (tmp_path / "a.py").write_text("x = 12345678")
    with pytest.raises(UsageRefusedError, match="more than 0 MiB of Python"):
        Source.read(tmp_path)


def write_report(path: Path, *names: str) -> None:
    found = with_actions([FINDINGS[each] for each in names or ("gone", "moved")], DEFAULT)
    side = {"given": "9", "own_environment": False, "artifacts": {}, "not_imported": {}}
    side |= dict.fromkeys(("flashinfer", "torch", "triton", "cuda"))
    report = assemble(
        decide(found, {90: RAN}, DEFAULT, baseline="9"),
        found,
        DEFAULT,
        sides={"baseline": side, "candidate": side},
        features=None,
        machines=[],
        not_tested=[],
        failures=[],
        command="",
    )
    path.write_text(json.dumps(report))


def test_a_kept_report_is_read_against_an_engine_and_merging_keeps_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, used, again = (tmp_path / name for name in ("kept.json", "used.json", "again.json"))
    write_report(kept)
    assert json.loads(kept.read_text())["verdict"] == "do not bump"
    assert main(["merge", str(kept), "--html", str(page := tmp_path / "none.html")]) == 1
    advice = "2 of the 2 that block or set a condition may concern nobody: give --uses PATH"
    assert advice in " ".join(capsys.readouterr().out.split())
    assert advice in page.read_text()
    assert "What concerns nobody" not in page.read_text()
    source = tmp_path / "engine.py"
    source.write_text(MOE + "moe(1, 2)")
    page, comment, junit = (tmp_path / name for name in ("p.html", "c.md", "j.xml"))
    outputs = ["--html", str(page), "--markdown", str(comment), "--junit", str(junit)]
    assert main(["merge", str(kept), "--uses", str(source), "--json", str(used), *outputs]) == 0
    report = json.loads(used.read_text())
    assert {each["action"] for each in report["findings"]} == {REPORT}
    (line,) = [
        each
        for each in capsys.readouterr().out.splitlines()
        if each.startswith("not used by the engine: ")
    ]
    assert "; positional-meaning fused_moe.moe" in line
    _, _, apart = page.read_text().partition('<section id="nobody"')
    assert "Not used by the engine's source (2)" in apart.replace("&#39;", "'")
    assert "Nothing was found to differ in what the engine uses" in page.read_text()
    assert all("--uses PATH" not in each.read_text() for each in (page, comment))
    assert "Not used by the engine's source (2)" in comment.read_text()
    assert "engine: not used" in junit.read_text()

    source.write_text(MOE + "moe(1, 2, 3)")
    assert main(["merge", str(used), "--json", str(again)]) == 0  # as the report says
    assert json.loads(again.read_text())["engines"] == report["engines"]
    assert main(["merge", str(used), "--uses", str(source), "--json", str(again)]) == 1
    report = json.loads(again.read_text())
    assert [each["action"] for each in report["findings"]] == [BLOCK, REPORT]
    place = f"{source.name}:2 (called with 3 values by position)"
    assert f"used: {place}" in capsys.readouterr().out
    assert source.name in to_page(report)
    assert "called with 3 values" in to_markdown(report)


def test_of_two_reports_the_source_that_uses_a_change_counts(tmp_path: Path) -> None:
    reports = []
    for name, call in (("one", "moe(1, 2)"), ("two", "moe(1, 2, 3)")):
        write_report(tmp_path / "kept.json")
        source = tmp_path / f"{name}.py"
        source.write_text(MOE + call)
        reports.append(str(tmp_path / f"{name}.json"))
        words = ["--uses", str(source), "--json", reports[-1]]
        main(["merge", str(tmp_path / "kept.json"), *words])
    assert main(["merge", *reports, "--json", str(tmp_path / "all.json")]) == 1
    found = json.loads((tmp_path / "all.json").read_text())
    assert {e["change"]: e["uses"]["status"] for e in found["findings"]} == {
        "positional-meaning": USED,
        "callable-removed": NOT,
    }
    assert len(found["engines"]) == 2


def test_a_search_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("import flashinfer\n")
    ending = Ending()
    ending.end(TERMINATED)
    with pytest.raises(EndedError, match=TERMINATED):
        with_uses([FINDINGS["moved"]], [Source.read(tmp_path)], ending.refuse)


@pytest.mark.parametrize(("call", "status"), [("moe(1, 2)", MAYBE), ("moe(1, 2, 3)", USED)])
def test_an_engine_that_was_not_asked_about_a_change_may_use_it(
    tmp_path: Path, call: str, status: str
) -> None:
    reports = []
    for name, found in (("one", ("gone", "moved")), ("two", ("gone",))):
        write_report(tmp_path / "kept.json", *found)
        source = tmp_path / f"{name}.py"
        source.write_text(MOE + call)
        reports.append(str(tmp_path / f"{name}.json"))
        main(["merge", str(tmp_path / "kept.json"), "--uses", str(source), "--json", reports[-1]])
    assert main(["merge", *reports, "--json", str(tmp_path / "all.json")]) == 1
    found = json.loads((tmp_path / "all.json").read_text())["findings"]
    uses = {each["change"]: each["uses"] for each in found}
    assert uses["callable-removed"]["status"] == NOT
    assert uses["positional-meaning"]["status"] == status
    if status == MAYBE:
        how = "not read by the machine that has this finding"
        assert uses["positional-meaning"]["places"] == [
            {"file": str(tmp_path / "two.py"), "line": 0, "how": how}
        ]


def test_places_in_two_engines_are_both_named(tmp_path: Path) -> None:
    reports = []
    for name in ("one", "two"):
        write_report(tmp_path / "kept.json", "moved")
        source = tmp_path / f"{name}.py"
        source.write_text(MOE + "moe(1, 2, 3)")
        reports.append(str(tmp_path / f"{name}.json"))
        main(["merge", str(tmp_path / "kept.json"), "--uses", str(source), "--json", reports[-1]])
    main(["merge", *reports, reports[0], "--json", str(tmp_path / "all.json")])
    (found,) = json.loads((tmp_path / "all.json").read_text())["findings"]
    files = [Path(each["file"]).name for each in found["uses"]["places"]]
    assert files == ["one.py", "two.py"]
    assert found["uses"]["count"] == len(files)


CHAINS = {
    "attributes": MOE + "import flashinfer\nflashinfer" + ".a" * 1_200 + ".moe(1, 2, 3)",
    "conditions": MOE + "y = " + "x if c else " * 1_200 + "moe\ny(1, 2, 3)",
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_long_chain_is_followed(tmp_path: Path, chain: str) -> None:
    assert uses_of(tmp_path, "moved", {"a.py": CHAINS[chain]})["status"] == USED


def test_a_name_that_many_modules_hand_on_is_followed(tmp_path: Path) -> None:
    files = {f"m{i:03}.py": f"from .m{i + 1:03} import moe\n" for i in range(300)}
    files |= {"m300.py": MOE, "z.py": "from .m000 import moe\nmoe(1, 2, 3)"}
    uses = uses_of(tmp_path, "moved", files)
    assert uses["status"] in (USED, MAYBE)
    assert uses["count"]


def test_no_more_source_stays_parsed_than_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_modules, "KEPT_SOURCE", 0)
    files = {"b.py": MOE, "a.py": "from .b import moe\nmoe(1, 2, 3)"}
    assert uses_of(tmp_path, "moved", files)["status"] == USED
    engine = engine_modules.Engine(Source.read(tmp_path / "engine").files)
    parsed = [engine.module(each) for each in engine.files]
    assert len(parsed) == 2
    assert engine.module(engine.files[1]) is parsed[1]
    assert engine.module(engine.files[0]) is not parsed[0]
