"""Kernelproof tests attention and MoE inference kernels against an oracle before they ship.

The public names live in the sub-packages, each importable without the ones after it:

- ``kernelproof.reference``: the oracle, tensors in and tensors out (``paged_attention``,
  ``ragged_attention``, ``merge_states``, ``append_paged_kv``, ``build_metadata``, error bounds).
  It needs torch and nothing else.
- ``kernelproof.impl``: what is under test, and the decorator ``implementation`` for one's own.
- ``kernelproof.properties``: the laws, the problems that are drawn, and the isolated worker.
- ``kernelproof.fixtures``: data: the ledger of findings, the regression corpus, evidence.
- ``kernelproof.ci``: the command ``kernelproof``. It needs the extra ``suite``.

For tests and notebooks, ``kernelproof.check`` does what the command does, and
``kernelproof.strategies`` draws problems. Both need the extra ``suite``, and are imported when they
are first used: importing this package imports no torch and touches no device.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ci.check.calling import Report, check
    from .properties import strategies

__all__ = ["Report", "__version__", "check", "strategies"]

__version__ = "0.1.0"

_HOMES = {
    "Report": ".ci.check.calling",
    "check": ".ci.check.calling",
    "strategies": ".properties.strategies",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  whatever the name stands for
    """Import a public name at its first use."""
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    import importlib

    from .fixtures.suggestions import missing_of_suite

    try:
        module = importlib.import_module(_HOMES[name], __name__)
    except ModuleNotFoundError as error:
        if not (why := missing_of_suite(error)):
            raise
        message = f"kernelproof.{name} needs {why}"
        raise ModuleNotFoundError(message, name=error.name) from error
    value = module if name == "strategies" else getattr(module, name)
    globals()[name] = value
    return value


class _Strategies(ModuleType):
    """What ``from kernelproof.strategies import problems`` finds: the root has no such file."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        # Whoever looks through all modules asks for other names, and must not import this one.
        if name != "problems":
            message = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        return __getattr__("strategies").problems


sys.modules[f"{__name__}.strategies"] = _Strategies(f"{__name__}.strategies")


def __dir__() -> list[str]:
    """List public names, imported or not."""
    return __all__
