"""Malformed files as data: who reads each, how it is made, and what the refusal must name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Make = bytes | Callable[[Path], object]
"""What a file holds, or what makes it."""
ANY = ""
JSON, TOML, TEXT = "JSON", "TOML", "text"

READERS = {
    "case": (JSON, "replay {file}"),
    "corpus": (JSON, "check torch-route --corpus {folder}"),
    "case of a corpus": (JSON, "corpus add {file} --folder {folder}/new"),
    "report": (JSON, "expectations update {file} --ledger {folder}/ledger.toml --reason r"),
    "comparison": (JSON, "merge {file}"),
    "costs": (JSON, "check torch-route --costs {file}"),
    "ledger": (TOML, "check torch-route --expectations {file}"),
    "policy": (TOML, "merge absent.json --policy {file}"),
    "rules": (TOML, "check torch-route --gating --rules {folder}"),
    "project": (TOML, "bump 0.6.13 --candidate-from {file}"),
    "pins": (TEXT, "bump 0.6.13 --candidate-from {file}"),
    "compile evidence": (JSON, "impl.gating.knowledge:read_compilation"),
    "gating evidence": (JSON, "impl.gating.knowledge:read_trials"),
    "journal": (TEXT, "ci.answers.journal:Journal"),
}
"""The language and the command of each, or the function that its command calls."""
SUFFIX = {JSON: "json", TOML: "toml", TEXT: "txt"}


def sparse(size: int) -> Callable[[Path], object]:
    """Return what makes a file of zeros that takes no room."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


EVERYWHERE: dict[str, tuple[Make, str]] = {
    "absent": (lambda _: None, "No such file"),
    "folder": (Path.mkdir, "directory|folder"),
    "pipe": (os.mkfifo, "pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "device"),
    "loop of links": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "200 MB": (sparse(200 << 20), "MiB|no journal"),
    "no UTF-8": (b"\xff\xfe{", "utf-8|UTF-8|no journal"),
}
"""What no reader takes."""
BY_LANGUAGE: dict[str, dict[str, tuple[bytes, str]]] = {
    JSON: {
        "empty": (b"", "not JSON"),
        "truncated": (b'{"schema": "kern', "not JSON"),
        "deep lists": (b"[" * 100_000, "nested"),
        "deep tables": (b'{"a":' * 100_000, "nested"),
        "deep and whole": (b"[" * 500 + b"]" * 500, "nested"),
        "a key twice": (b'{"law": 1, "law": 2}', "'law' is given twice"),
        "NaN": (b'{"a": [0, NaN]}', r"a\[1\] is nan"),
        "infinity": (b'{"a": -1e999}', "a is -inf"),
        "long number": (b'{"a": 1' + b"0" * 30 + b"}", "a is a number of more than 64 bits"),
        "longer number": (b"9" * 5_000, "not JSON"),
        "byte order mark": (b"\xef\xbb\xbf[]", "Expected `object`|schema|format|no results"),
        "text": (b'"kernelproof"', "Expected `object`|schema|format|no results"),
        "null": (b"null", "Expected `object`|schema|format|no results"),
    },
    TOML: {
        "truncated": (b"[[finding", "not TOML"),
        "deep lists": (b"a = " + b"[" * 100_000, "nested"),
        "deep tables": (b"a = " + b"{a=" * 100_000, "nested"),
        "long key": (b"a" + b".a" * 100_000 + b" = 1", "nested"),
        "a key twice": (b"a = 1\na = 2", "not TOML"),
        "infinity": (b"a = inf", "a is inf"),
        "NaN": (b"[a]\nb = nan", "a.b is nan"),
        "long number": (b"a = 1" + b"0" * 30, "a is a number of more than 64 bits"),
    },
    TEXT: {},
}
"""What no reader of a language takes."""

PROBLEM = {"schema": "kernelproof/problem/1", "type": "merge"}
CASE = {"law": "parity", "implementation": "torch-route", "problem": PROBLEM}
TARGET = {"device": "cpu", "sm": None, "flashinfer": None}
FINDING = {
    "implementation": "torch-route", "law": "parity", "status": "FAIL", "kind": "numeric",
    "problem": PROBLEM, "entry": "",
}  # fmt: skip
REPORT = {"schema": "kernelproof/report/1", "target": TARGET, "findings": [FINDING]}
ENTRY: dict[str, Any] = {
    "id": "e", "implementation": "torch-route", "status": "FAIL", "where": {}, "reason": "r",
    "case": "case.json",
}  # fmt: skip
COSTS = {"schema": "kernelproof-costs-1", "profile": "gate", "device": "cpu", "costs": {}}
HEAD = b'{"schema": "kernelproof/journal/1", "identity": {}}\n'


def changed(data: dict[str, Any], place: str, value: object) -> bytes:
    """Return JSON with another value at a place such as ``findings.0.problem``; "-" removes it."""
    made: Any = json.loads(json.dumps(data))
    *path, last = [int(step) if step.isdigit() else step for step in place.split(".")]
    at = made
    for step in path:
        at = at[step]
    if value == "-":
        del at[last]
    else:
        at[last] = value
    return json.dumps(made).encode()


def entry(**fields: object) -> bytes:
    """Return a ledger of one entry with other fields."""
    lines = [f"{name} = {value}" for name, value in fields.items()]
    kept = [f"{k} = {json.dumps(v)}" for k, v in ENTRY.items() if k not in fields and v != {}]
    where = [] if "where" in fields else ["where = {}"]
    return "\n".join(["[[finding]]", *kept, *where, *lines]).encode()


OWN: list[tuple[str, str, bytes, str]] = [
    ("case", "no law", changed(CASE, "law", "-"), "required field `law`"),
    ("case", "law of another type", changed(CASE, "law", []), r"at `\$\.law`"),
    ("case", "unknown law", changed(CASE, "law", "murphy"), "no law 'murphy'"),
    ("case", "problem is a list", changed(CASE, "problem", []), r"at `\$\.problem`"),
    ("case", "unknown field", changed(CASE, "problem.colour", 1), "problem field colour"),
    ("case", "many tokens", changed(CASE, "problem.num_tokens", 10**19), "num_tokens is"),
    ("case", "more tokens", changed(CASE, "problem.num_tokens", 10**30), "num_tokens is a number"),
    ("case", "many states", changed(CASE, "problem.num_states", 10**12), "num_states is"),
    ("case", "much work", changed(CASE, "problem", {
        **PROBLEM, "num_states": 2**31 - 1, "head_dim": 2**31 - 1}), "work of"),
    ("case", "no tokens", changed(CASE, "problem.num_tokens", -1), "num_tokens is -1"),
    ("case", "tokens in text", changed(CASE, "problem.num_tokens", "1"), "num_tokens is '1'"),
    ("case", "seed", changed(CASE, "problem.seed", 2**63), "seed is"),
    ("case", "soak", changed(CASE, "soak", 10**12), r"at `\$\.soak`"),
    ("case", "endless soak", changed(CASE, "soak", 10**30), "soak is a number"),
    ("case", "soak in text", changed(CASE, "soak", "many"), r"at `\$\.soak`"),
    ("case", "unknown device", changed(CASE, "device", "abacus"), "Invalid value 'abacus'"),
    ("case", "operation", changed(CASE, "operation", 3), r"at `\$\.operation`"),
    ("case", "sanitizer", changed(CASE, "sanitizer", "soap"), "Invalid value 'soap'"),
    ("case", "rules", changed(CASE, "without_rules", [1]), r"without_rules\[0\]`"),
    ("case", "implementation", changed(CASE, "implementation", None), r"\$\.implementation`"),
    ("case", "schema", changed(CASE, "schema", "kernelproof/case/9"), "schema is"),
    ("case", "escapes", changed(CASE, "law", "\x07\x1b[2J\nCONFORMING: all"), "no law"),
    ("case", "half a surrogate", changed(CASE, "law", "\ud800"), "no law"),
    ("corpus", "no law", changed(CASE, "law", "-"), "required field `law`"),
    ("case of a corpus", "no law", changed(CASE, "law", "-"), "required field `law`"),
    ("report", "no findings", changed(REPORT, "findings", "-"), "required field `findings`"),
    ("report", "findings", changed(REPORT, "findings", {}), r"at `\$\.findings`"),
    ("report", "no target", changed(REPORT, "target", "-"), "required field `target`"),
    ("report", "target", changed(REPORT, "target", []), r"at `\$\.target`"),
    ("report", "one finding", changed(REPORT, "findings.0", 1), r"findings\[0\]`"),
    ("report", "no status", changed(REPORT, "findings.0.status", "-"), "field `status`"),
    ("report", "problem", changed(REPORT, "findings.0.problem", 1), r"problem`"),
    ("report", "states", changed(REPORT, "findings.0.problem.num_states", 0), "num_states is 0"),
    ("report", "laws", changed(REPORT, "findings.0.laws", [1]), r"laws\[0\]`"),
    ("report", "unknown law", changed(REPORT, "findings.0.law", "murphy"), "value 'murphy'"),
    ("report", "cause", changed(REPORT, "findings.0.cause", {"values": {"colour": 1},
     "failing": 1, "passing": 0}), "colour"),
    ("report", "cause elsewhere", changed(REPORT, "findings.0.cause", {
        "values": {"num_states": 99}, "failing": 2, "passing": 0}), "does not cover its own case"),
    ("report", "implementations", changed(REPORT, "implementations", 1), r"\$\.implementations`"),
    ("report", "schema", changed(REPORT, "schema", "x"), "schema is 'x'"),
    ("comparison", "schema", changed(REPORT, "findings", []), "schema is"),
    ("comparison", "nothing", b'{"schema": "kernelproof/bump/1"}', "required field"),
    ("costs", "profile", changed(COSTS, "profile", "quick"), "profile is 'quick'|profile`"),
    ("costs", "class", changed(COSTS, "costs", {"a": {"name": "fast"}}),
     "required field `problems`"),
    ("costs", "share", changed(COSTS, "costs", {"a": {
        "name": "fast", "problems": 2.0, "max_work": 1}}), "problems`"),
    ("ledger", "finding", b"finding = 1", "finding`"),
    ("ledger", "no id", b"[[finding]]\n", "required field `id`"),
    ("ledger", "status", entry(status='"FINE"'), "Invalid value 'FINE'"),
    ("ledger", "laws", entry(laws='["murphy"]'), "Invalid value 'murphy'"),
    ("ledger", "where", entry(where="{ colour = 1 }"), "colour"),
    ("ledger", "limits", entry(where='{ num_tokens = { min = "many" } }'), "num_tokens"),
    ("ledger", "versions", entry(versions='{ flashinfer = "new" }'), "versions"),
    ("ledger", "case", entry(case='"\\u0000"'), "null"),
    ("ledger", "case is a device", entry(case='"/dev/zero"'), "device"),
    ("ledger", "case is a folder", entry(case='"."'), "directory|folder"),
    ("ledger", "sm", entry(sm='["90"]'), r"sm\[0\]`"),
    ("policy", "action", b'[actions]\nslower = "shout"', "Invalid value 'shout'"),
    ("policy", "change", b'[actions]\ncolour = "block"', "colour"),
    ("policy", "slower", b"[limits]\nslower = 0.5", "limits.slower`"),
    ("policy", "slower NaN", b"[limits]\nslower = nan", "slower is nan"),
    ("policy", "chips", b"[chips]\nrequired = [12345678901234567]", "required"),
    ("policy", "accept", b'[[accept]]\nfinding = ""\nreason = "r"', r"accept\[0\].finding`"),
    ("rules", "no id", b"[[rule]]\n", "required field"),
    ("rules", "rule", b"rule = 3", "rule`"),
    ("project", "project", b"project = 3", "project`"),
    ("project", "needs", b"[project]\ndependencies = 'torch'", "dependencies`"),
    ("project", "extras", b"[project.optional-dependencies]\na = 1", "dependencies"),
    ("project", "empty", b"", "pins no"),
    ("pins", "empty", b"", "pins no"),
    ("pins", "endless", b"-r /dev/zero\n", "device"),
    ("pins", "marker", b"flashinfer-python==0.7; colour == 'red'", "no requirement"),
    ("pins", "control characters", b"flashinfer-python\x1b[2J==0.7", "no requirement|pins no"),
    ("compile evidence", "format", b'{"format": "x"}', "format is 'x'"),
    ("compile evidence", "nothing", b'{"format": "kernelproof/compile-evidence/1"}',
     "required field"),
    ("gating evidence", "nothing", b'{"schema": "kernelproof/gating/1"}',
     "required field `target`"),
    ("gating evidence", "gating", b'{"gating": 3}', "schema is not"),
    ("journal", "another file", b"notes\n", "no journal"),
    ("journal", "deep head", b"[" * 100_000 + b"\n", "no journal"),
    ("journal", "head's shape", HEAD.replace(b"{}", b"[]"), "no journal"),
    ("journal", "older schema", HEAD.replace(b"/1", b"/0"), "schema"),
    ("journal", "deep line", HEAD + b"[" * 100_000 + b"\n", "line 2"),
    ("journal", "no UTF-8 in a line", HEAD + b"\xff\n", "line 2"),
    ("journal", "list", HEAD + b"[]\n", "line 2"),
    ("journal", "no digest", HEAD + b'{"question": "q", "answer": {}}\n',
     "required field `digest`"),
    ("journal", "another answer", HEAD + b'{"question": "q", "answer": 1, "digest": "0"}\n',
     "line 2: answer"),
]  # fmt: skip
"""What one reader refuses."""


class File(NamedTuple):
    """A malformed file.

    Attributes:
        name: what is wrong with it.
        reader: of ``READERS``.
        make: what it holds, or what makes it.
        word: that the sentence must name, as a pattern.
    """

    name: str
    reader: str
    make: Make
    word: str


FILES = [
    *(
        File(name, reader, make, word)
        for reader, (language, _) in READERS.items()
        for name, (make, word) in [*EVERYWHERE.items(), *BY_LANGUAGE[language].items()]
        # A corpus and rules are folders, a journal comes to be, and links among them are their own.
        if not (name == "absent" and reader in ("corpus", "rules", "journal"))
    ),
    *(File(name, reader, content, word) for reader, name, content, word in OWN),
]
