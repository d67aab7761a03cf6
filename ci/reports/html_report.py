"""The results of a run as one page that needs nothing else, and that no message can break."""

from __future__ import annotations

from ...properties.findings.cases import versions
from ...properties.findings.coverage import Coverage
from ...properties.findings.report import LawReport
from ...properties.laws import LAWS
from ...properties.verdicts.text import defaults
from ..console.rendering import render
from .claims import claims_rows
from .figures import error_maps, heat, spreads
from .kernels import kernel_sources, launched_rows
from .outline import filled
from .pictures import LEVEL_WORDS, meter
from .run_outline import outline_of
from .summary import WORDS, Summary, in_order, not_run

ENDED = {
    "": "",
    "time": "out of time",
    "stopped": "the run ended",
    "idle": "nothing to judge",
    "rare": "too little to judge",
    "room": "no room on the GPU",
}
"""Why a law ended before it had its problems, in words."""
TONES = {"conforming": "good", "nonconforming": "bad", "incomplete": "warn", "error": "bad"}
MARKS = {"conforming": "✓", "nonconforming": "✗", "incomplete": "!", "error": "✗"}
STATEMENTS = {law.name: f"{law.statement[0].upper()}{law.statement[1:]}." for law in LAWS}
"""What each law says, as a sentence, by its name."""


def to_html(summary: Summary) -> str:
    """Return a self-contained page: the outline of the run, and what only a page can show."""
    report = summary.report
    facts = [
        ("command", summary.command),
        ("date", summary.date),
        ("profile", report.profile),
        ("seed", report.seed),
        ("device", " ".join(str(report.target.get(n) or "") for n in ("device", "device_name"))),
        *((name, value) for name, value in versions(report.target).items() if value),
    ]
    idle = [each for each, _ in not_run(summary)]
    run = [each for each in in_order(report.implementations) if each not in idle]
    return render(
        "check.html.jinja",
        verdict=WORDS[summary.verdict],
        mark=MARKS[summary.verdict],
        tone=TONES[summary.verdict],
        sentence=summary.sentence.removeprefix(f"{WORDS[summary.verdict]}: "),
        outline=filled(outline_of(summary, whole=True))[1:],
        statements=STATEMENTS,
        error_maps=error_maps,
        defaults=defaults,
        levels=LEVEL_WORDS,
        heats=list(heat(run)),
        names=list(dict.fromkeys(law.law for each in run for law in each.laws)),
        laws=[(each.name, [_law(law) for law in each.laws]) for each in run if each.laws],
        spreads=spreads(run),
        coverage=[_coverage(each.name, each.coverage) for each in run if each.laws],
        kernels=kernel_sources(run),
        launched=launched_rows(run),
        claims=[(each.name, claims_rows(each)) for each in run if each.claimed_space],
        facts=facts,
    )


def _coverage(name: str, coverage: Coverage) -> tuple[object, ...]:
    """Return the pictures of laws and of pairs, and the coverage in words."""
    laws = meter(f"Laws of {name}", sum(map(bool, coverage.judged.values())), coverage.asked)
    pairs = meter(f"Pairs of values of {name}", *coverage.pairs) if coverage.pairs[1] else ""
    return name, laws, pairs, coverage.text


def _law(law: LawReport) -> tuple[object, ...]:
    return (
        law.law,
        law.verdict,
        law.judged,
        law.unsupported,
        law.vacuous,
        law.rejected,
        law.worst_ratio,
        law.seconds,
        ENDED[law.ended],
    )
