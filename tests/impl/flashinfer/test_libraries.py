"""What FlashInfer compiles for a problem, and whether it was compiled before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("flashinfer")

CODE = dedent(
    """
    import json
    from flashinfer.jit import env
    from kernelproof.impl import find_implementation
    from kernelproof.reference import AttentionProblem, RouteProblem

    def problem(dim):
        return AttentionProblem(head_dim_qk=dim, head_dim_vo=dim, dtype="bfloat16")

    names = ("flashinfer-decode", "flashinfer-prefill-fa2", "flashinfer-decode-fa2",
             "flashinfer-prefill-fa3", "flashinfer-cascade")
    from flashinfer import utils

    utils.is_sm90a_supported = lambda *_: {sm90}
    found = {name: [find_implementation(name).library_of(problem(dim)) for dim in (64, 128, 256)]
             for name in names}
    route = find_implementation("flashinfer-top-k-route")
    found["topk"] = [route.library_of(RouteProblem(4, 16, 2))]
    print(json.dumps([str(env.FLASHINFER_JIT_DIR), found]))
    """
)
CACHE = dedent(
    """
    from types import SimpleNamespace

    __version__ = {version!r}

    def get_jit_cache_dir():
        return {folder!r}

    def get_jit_cache_providers():
        return [SimpleNamespace(
            provider_id="sm90", distribution="flashinfer-jit-cache-sm90", version=__version__,
            jit_cache_dir={folder!r}, cuda_architectures=["sm90a"], modules=[{name!r}],
        )]
    """
)


def asked(base: Path, *, sm90: bool = True) -> tuple[Path, dict[str, list[tuple[str, bool]]]]:
    ended = subprocess.run(
        [sys.executable, "-c", CODE.replace("{sm90}", str(sm90))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "FLASHINFER_WORKSPACE_BASE": str(base),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "PYTHONPATH": os.pathsep.join([str(base), *filter(None, sys.path)]),
        },
    )
    folder, found = json.loads(ended.stdout.splitlines()[-1])
    return Path(folder), {name: [(of, there) for of, there in each] for name, each in found.items()}


def test_libraries_of_earlier_runs_and_of_the_package_exist(tmp_path: Path) -> None:
    import flashinfer

    folder, before = asked(tmp_path)
    assert not any(there for each in before.values() for _, there in each)
    # Decode with tensor cores is the prefill module; without them it has its own.
    assert before["flashinfer-prefill-fa2"] == before["flashinfer-decode-fa2"]
    assert not set(before["flashinfer-decode"]) & set(before["flashinfer-prefill-fa2"])
    compiled, packaged, _ = (name for name, _ in before["flashinfer-prefill-fa2"])
    package = tmp_path / "flashinfer_jit_cache"
    # 0.7.2.post1 compiles prefill for strides of keys and values that are equal, or not.
    equal = f"{compiled}_kv_stride_equal"
    for name, where in ((equal, folder), ("topk", folder), (packaged, package / "jit_cache")):
        (where / name).mkdir(parents=True)
        (where / name / f"{name}.so").touch()
    (package / "__init__.py").write_text(
        CACHE.format(
            version=flashinfer.__version__, folder=str(package / "jit_cache"), name=packaged
        )
    )
    _, after = asked(tmp_path)
    assert [there for _, there in after["flashinfer-prefill-fa2"]] == [True, True, False]
    assert not any(there for _, there in after["flashinfer-decode"])
    assert after["topk"] == [("topk", True)]


def test_the_library_of_a_cascade_is_that_of_the_backend_which_its_wrapper_chooses(
    tmp_path: Path,
) -> None:
    """Taken for FA2's it existed, and workers that judge compiled FA3's for minutes."""
    for sm90, backend in ((True, "fa3"), (False, "fa2")):
        _, found = asked(tmp_path, sm90=sm90)
        assert found["flashinfer-cascade"] == found[f"flashinfer-prefill-{backend}"]
