"""What a law says in a worker in which Triton's interpreter runs kernels."""

from __future__ import annotations

from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import Problem


def ask(interpreter: Worker, law: str, implementation: str, problem: Problem) -> Verdict:
    """Return the verdict of a law on one problem; the fixture ``interpreter`` lends the worker."""
    payload = {
        "task": "judge", "law": law, "implementation": implementation,
        "problem": problem.to_json(), "device": "cpu",
    }  # fmt: skip
    return verdict_of(interpreter.run(payload, Deadlines(run=60.0)))
