"""The process that asks one FlashInfer release about one chip.

It is a process of its own, since FlashInfer and its launcher keep the chip that they saw first. It
imports the release, puts the recording driver in the place of the chip, calls the release's Python
functions with tensors that nothing reads, and writes what each call launched.

    python -m kernelproof.ci.binaries.flashinfer.host REQUEST ANSWERS
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .experts import ENUMS, ON_GPU, NoMemberError, moe_arguments
from .products import gemm_arguments
from .questions import GEMM_FUNCTIONS, MOE_FUNCTIONS

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "nvfp4": torch.uint8,
}
FP4_BLOCK = 16
"""Elements of an NVFP4 cache that share a scale."""
LATENT_BLOCK = 128
"""Keys of which a row of latent attention's block table covers a multiple."""
WORKSPACE_BYTES = 256 << 20
PAGES = 8
"""Pages of a cache. Nothing reads it, so that block tables may name more than there are."""
WINDOW = 127
SCALES = ("kv_block_scales", "kv_cache_sf")
"""The parameter for the scales of an NVFP4 cache, until 0.6.7 and from 0.6.8."""
CELL_SECONDS = 30
"""Deadline of the calls of one kind."""
MOST_KEPT_TENSORS = 4000
DECODE, CONTEXT, RAGGED, LATENT = "decode", "context", "ragged", "latent"
DOWNLOADERS = ("get_artifact", "get_cubin", "load_cubin", "download_file")
"""Functions of FlashInfer that fetch kernels, all of which are replaced."""
LAUNCH = ("grid", "block", "cluster", "shared")
"""What is said of each launch of a precompiled kernel."""
Answer = dict[str, Any]


class Driver(Protocol):
    """What records the launches of a call."""

    def clear(self) -> None:
        """Forget what was recorded."""

    def log(self) -> list[dict[str, Any]]:
        """Return what was recorded since."""


class RecordingDriver:
    """The recording driver, as a library in this process."""

    def __init__(self, library: str, sm: int, multiprocessors: int, shared_memory: int) -> None:
        # Global: the launcher's library, which is loaded later, finds its CUDA in it.
        self._library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._library.recording_log.restype = ctypes.c_char_p
        self._library.recording_chip(sm, multiprocessors, shared_memory)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._library.recording_clear()

    def log(self) -> list[dict[str, Any]]:
        """Return what was recorded since."""
        found: list[dict[str, Any]] = json.loads(f"[{self._library.recording_log().decode()}]")
        return found


class Host:
    """A release's functions for attention, or for MoE, over a driver that records.

    Attributes:
        functions: the functions by kind, ``DECODE``, ``CONTEXT``, ``RAGGED``, ``LATENT``; those for
            MoE by their names.
        driver: what records their launches.
        missing: names of kernels that were wanted and are not shipped, of the last call.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        driver: Driver,
        enums: Mapping[str, Any] | None = None,
    ) -> None:
        self.functions, self.driver = functions, driver
        self._enums = enums or {}
        self.missing: list[str] = []
        self._parameters = {
            name: set(inspect.signature(inspect.unwrap(each)).parameters)
            for name, each in functions.items()
        }
        # Never touched, so that it has no memory, and forks need not copy its page tables.
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def ask(self, feature: Mapping[str, Any], call: Mapping[str, int]) -> Answer:
        """Return what a call launches, or the error that it raises.

        Args:
            feature: fields of the kind of call.
            call: its batch, lengths and number of KV heads.
        """
        self.driver.clear()
        self.missing.clear()
        error = ""
        try:
            kind, arguments = self._arguments(feature, call)
        except NoMemberError as lacking:
            return {"error": str(lacking)}
        if kind not in self.functions:
            return {"error": f"the release has no {kind}"}
        try:
            self.functions[kind](**arguments)
        except Exception as raised:  # noqa: BLE001  the release's answer, whatever it is
            error = f"{type(raised).__name__}: {raised}"
        log = self.driver.log()
        refused = [entry["refused"] for entry in log if "refused" in entry]
        launched = [entry for entry in log if "launch" in entry]
        if self.missing and not error:
            error = f"the kernel {self.missing[0]} is not shipped"
        if error or refused or not launched:
            reasons = [error, *(f"the driver refuses {each}" for each in refused)]
            return {"error": "; ".join(filter(None, reasons)) or "nothing was launched"}
        *before, last = (
            {"kernel": each["launch"], **{name: each[name] for name in LAUNCH}} for each in launched
        )
        # A MoE's own kernels route and add up: only attention's merge parts.
        other = feature["operation"] in ("moe", "gemm")
        reduces = not other and any("reduction" in entry for entry in log)
        return {**last, "reduces": reduces, **({"before": before} if before else {})}

    def _arguments(
        self, feature: Mapping[str, Any], call: Mapping[str, int]
    ) -> tuple[str, dict[str, Any]]:
        if feature["operation"] == "moe":
            return moe_arguments(self._tensor, feature, call, self._enums)
        if feature["operation"] == "gemm":
            return gemm_arguments(self._tensor, feature, call)
        if feature["operation"] == "mla":
            return LATENT, self._latent(feature, call)
        if feature["operation"] == "ragged_attention":
            return RAGGED, self._ragged(feature, call)
        kind = DECODE if feature["phase"] == "decode" else CONTEXT
        return kind, self._paged(kind, feature, call)

    def _tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of a shape, with any values: nothing reads them."""
        if len(self._tensors) > MOST_KEPT_TENSORS:
            self._tensors.clear()
        found = self._tensors.get((shape, dtype))
        if found is None:
            found = self._tensors[shape, dtype] = torch.empty(shape, dtype=dtype)
        return found

    def _int32(self, *shape: int) -> torch.Tensor:
        return self._tensor(*shape, dtype=torch.int32)

    def _paged(
        self, kind: str, feature: Mapping[str, Any], call: Mapping[str, int]
    ) -> dict[str, Any]:
        batch, heads = call["batch"], call["kv_heads"]
        page, dim = feature["page_size"], feature["head_dim_qk"]
        four = feature["kv_dtype"] == "nvfp4"
        rows = [heads, page] if feature["kv_layout"] == "HND" else [page, heads]
        width = dim // 2 if four else dim
        cache = self._tensor(PAGES, 2, *rows, width, dtype=DTYPES[feature["kv_dtype"]])
        arguments: dict[str, Any] = {
            "query": self._tensor(
                batch * call["query_len"],
                heads * feature["group_size"],
                dim,
                dtype=DTYPES[feature["q_dtype"]],
            ),
            "kv_cache": cache.unbind(1),
            "workspace_buffer": self._workspace,
            "block_tables": self._int32(batch, -(-call["kv_len"] // page)),
            "seq_lens": self._int32(batch),
            "bmm1_scale": 1.0,
            "bmm2_scale": 1.0,
            "kv_layout": feature["kv_layout"],
        }
        scales = next((name for name in SCALES if name in self._parameters[kind]), None)
        if four and scales is not None:
            scale = self._tensor(PAGES, *rows, dim // FP4_BLOCK, dtype=torch.float8_e4m3fn)
            arguments[scales] = (scale, scale)
        if feature["sinks"]:
            arguments["sinks"] = self._tensor(heads * feature["group_size"], dtype=torch.float32)
        if feature["window"]:
            arguments["window_left"] = WINDOW
        if kind == DECODE:
            more = {"max_seq_len": call["kv_len"], "q_len_per_req": call["query_len"]}
            return {**arguments, **more, "backend": "trtllm-gen"}
        ends = self._int32(batch + 1)
        arguments |= {"max_q_len": call["query_len"], "max_kv_len": call["kv_len"]}
        arguments |= {"batch_size": batch, "cum_seq_lens_q": ends, "cum_seq_lens_kv": ends}
        if feature["mask"] == "none":
            arguments["causal"] = False
        return arguments

    def _ragged(self, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
        batch, heads = call["batch"], call["kv_heads"]
        query_heads, keys = heads * feature["group_size"], batch * call["kv_len"]
        q_dtype, kv_dtype = DTYPES[feature["q_dtype"]], DTYPES[feature["kv_dtype"]]
        rows, ends = batch * call["query_len"], self._int32(batch + 1)
        out = torch.bfloat16 if q_dtype == torch.float8_e4m3fn else q_dtype
        arguments = {
            "query": self._tensor(rows, query_heads, feature["head_dim_qk"], dtype=q_dtype),
            "key": self._tensor(keys, heads, feature["head_dim_qk"], dtype=kv_dtype),
            "value": self._tensor(keys, heads, feature["head_dim_vo"], dtype=kv_dtype),
            "workspace_buffer": self._workspace,
            "seq_lens": self._int32(batch),
            "max_q_len": call["query_len"],
            "max_kv_len": call["kv_len"],
            "bmm1_scale": 1.0,
            "bmm2_scale": 1.0,
            "o_sf_scale": 1.0,
            "batch_size": batch,
            "window_left": WINDOW if feature["window"] else -1,
            "cum_seq_lens_q": ends,
            "cum_seq_lens_kv": ends,
            "enable_pdl": True,
            "is_causal": feature["mask"] == "causal",
            "return_lse": False,
            "out": self._tensor(rows, query_heads, feature["head_dim_vo"], dtype=out),
        }
        if feature["sinks"]:
            arguments["attention_sinks"] = self._tensor(query_heads, dtype=torch.float32)
        return arguments

    def _latent(self, feature: Mapping[str, Any], call: Mapping[str, int]) -> dict[str, Any]:
        batch, page, dim = call["batch"], feature["page_size"], feature["head_dim_qk"]
        # FlashInfer wants a whole number of blocks in a row of the table.
        step = max(page, LATENT_BLOCK)
        blocks = -(-call["kv_len"] // step) * step // page
        shape = (batch, call["query_len"], feature["group_size"], dim)
        rotated = dim - feature["head_dim_vo"]
        arguments = {
            "query": self._tensor(*shape, dtype=DTYPES[feature["q_dtype"]]),
            "kv_cache": self._tensor(PAGES, 1, page, dim, dtype=DTYPES[feature["kv_dtype"]]),
            "workspace_buffer": self._workspace,
            "qk_nope_head_dim": 128,
            "kv_lora_rank": feature["head_dim_vo"],
            "qk_rope_head_dim": rotated,
            "block_tables": self._int32(batch, blocks),
            "seq_lens": self._int32(batch),
            "max_seq_len": call["kv_len"],
            "bmm1_scale": 1.0,
            "bmm2_scale": 1.0,
            "backend": "trtllm-gen",
        }
        if feature["sinks"]:
            arguments["sinks"] = [self._tensor(feature["group_size"], dtype=torch.float32)]
        return arguments


def open_host(request: Mapping[str, Any]) -> Host:
    """Import the release that is first on the path, and put the recording driver under it.

    Args:
        request: ``operation``, of which MoE and GEMMs have launchers of their own; chip (``sm``,
            ``multiprocessors``, ``shared_memory``), libraries (``driver``, ``launcher``), and the
            names of the kernels that are ``shipped``.
    """
    chip = (request[name] for name in ("sm", "multiprocessors", "shared_memory"))
    driver = RecordingDriver(request["driver"], *chip)
    # Imported behind the driver, and only here: this process is for one release.
    import tvm_ffi

    from .on_gpu import Calls

    part = {"moe": _experts, "gemm": _products}.get(request["operation"], _attention)
    functions, enums = part()

    def chosen(tensor: torch.Tensor) -> bool:
        # What a launcher makes is like its inputs: MoE's are of this machine, as are its buffers.
        return part is _products or getattr(tensor, ON_GPU, False)

    shipped = set(request["shipped"])
    missing: list[str] = []

    def artifact(name: str, *_: object) -> bytes:
        kernel = Path(name).stem
        if kernel not in shipped:
            missing.append(kernel)
        return b"\0"

    class Module:
        """Stands for what FlashInfer would compile now."""

        def build_and_load(self, *_: object, **__: object) -> Any:  # noqa: ANN401  a module
            module = tvm_ffi.load_module(request["launcher"])
            return module if part is _attention else Calls(module, chosen)

        def get_library_path(self) -> str:
            return str(request["launcher"])

    replaced: dict[str, Any] = {
        **dict.fromkeys(DOWNLOADERS, artifact),
        "gen_trtllm_gen_fmha_module": lambda *_: Module(),
        "gen_trtllm_gen_fused_moe_sm100_module": lambda *_: Module(),
        "gen_trtllm_gen_gemm_module": lambda *_: Module(),
        "gen_trtllm_low_latency_gemm_module": lambda *_: Module(),
        "get_compute_capability": lambda _device: divmod(request["sm"], 10),
        "get_device_sm_count": lambda _device: request["multiprocessors"],
        "device_support_pdl": lambda _device: True,
        # Says whether CuTe DSL, another backend, takes a call: it needs that to be installed, and
        # nothing follows from it where trtllm-gen is asked for.
        "_cute_dsl_incompatibility_reason": lambda *_, **__: "CuTe DSL is not asked",
    }
    # A module that imported such a function has a name of its own for it.
    for module in [each for name, each in sys.modules.items() if name.startswith("flashinfer")]:
        for name in replaced.keys() & vars(module).keys():
            setattr(module, name, replaced[name])
    host = Host(functions, driver, enums)
    host.missing = missing
    return host


def remember_failed_imports() -> None:
    """Fail at once where an import failed before.

    Latent attention tries one in each call; its modules are executed again up to what is missing.
    """
    usual, failed = builtins.__import__, dict[tuple[Any, ...], ImportError]()

    def imported(
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002  as the function that it replaces
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:  # noqa: ANN401  a module
        key = name, (globals or {}).get("__package__"), tuple(fromlist or ()), level
        if key in failed:
            raise failed[key].with_traceback(None)
        try:
            return usual(name, globals, locals, fromlist or (), level)
        except ImportError as error:
            failed[key] = error
            raise

    builtins.__import__ = imported


Part = tuple[dict[str, Callable[..., Any]], dict[str, Any]]
"""Functions of a release, and enums that their arguments need."""


def _attention() -> Part:
    import flashinfer.decode
    import flashinfer.mla
    import flashinfer.prefill

    functions = {
        DECODE: flashinfer.decode.trtllm_batch_decode_with_kv_cache,
        CONTEXT: flashinfer.prefill.trtllm_batch_context_with_kv_cache,
        RAGGED: flashinfer.prefill.trtllm_ragged_attention_deepseek,
        LATENT: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla,
    }
    return functions, {}


def _experts() -> Part:
    import flashinfer.fused_moe as moe

    return _named(moe, MOE_FUNCTIONS), {name: getattr(moe, name) for name in ENUMS}


def _products() -> Part:
    from flashinfer import gemm

    return _named(gemm, GEMM_FUNCTIONS), {}


def _named(module: object, names: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """Return those functions that the release has: older ones lack some."""
    found = {name: getattr(module, name, None) for name in set(names.values())}
    return {name: each for name, each in found.items() if each is not None}


def answers_in_forks(host: Host, cells: Sequence[str]) -> Iterator[list[Answer]]:
    """Yield the answers to all cells, asked in forks: where one dies, the next goes on behind it.

    A host that divides by zero or follows a bad address in its selection ends its process.

    Args:
        host: the release.
        cells: JSON of a kind of call and its calls, each. It is read where it is asked: a fork pays
            for each object of the process that it touches.
    """
    done = 0
    gc.freeze()  # else a collection in each fork copies what is there already
    while done < len(cells):
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            _answer_and_exit(host, cells, done, writer)
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                if isinstance(found := json.loads(line), str):
                    message = f"asking about {cells[done]} failed: {found}"
                    raise RuntimeError(message)  # ours, not the host's
                yield found
                done += 1
        _, status = os.waitpid(process, 0)
        if done < len(cells):
            if not os.WIFSIGNALED(status):
                message = f"asking about {cells[done]} failed"  # ours, not the host's
                raise RuntimeError(message)
            yield [{"died": os.WTERMSIG(status)}]
            done += 1


def _answer_and_exit(host: Host, cells: Sequence[str], first: int, writer: int) -> None:
    """Write a line of answers a cell, in a process that a fault may end. It never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # FlashInfer's libraries may have handlers, which would print and go on.
        for name in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGALRM):
            signal.signal(name, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        with os.fdopen(writer, "w", encoding="utf-8") as lines:
            for place in range(first, len(cells)):
                signal.alarm(CELL_SECONDS)
                try:
                    feature, calls = json.loads(cells[place])
                    answers: object = [host.ask(feature, call) for call in calls]
                except Exception as error:  # noqa: BLE001  the parent raises it
                    answers = f"{type(error).__name__}: {error}"
                lines.write(json.dumps(answers) + "\n")
                lines.flush()
    finally:
        os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Answer a request, of which each cell is a line of JSON, into a file of a line a cell."""
    request, *cells = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
    host = open_host(json.loads(request))
    remember_failed_imports()
    with Path(arguments[1]).open("w", encoding="utf-8") as lines:
        for each in answers_in_forks(host, cells):
            lines.write(json.dumps(each) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
