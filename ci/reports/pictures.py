"""Pictures on the pages, as inline SVG, each with a title and a description in words.

Colours are classes of ``page.css``, which knows a light page and a dark one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence

from markupsafe import Markup

from ...properties.verdicts.text import printable

BAR, GAP, HALF, TEXT = 12, 2, 30, 14
"""Pixels: width of a bar, gap between bars, height of half a histogram and of a line of text."""
AXIS = 160
"""Width of a picture of ratios of time; pixels."""
METER = 120
"""Width of a picture of a part; pixels."""
SHARES = 480
"""Width of a picture of all parts of a whole; pixels."""
CELL, WIDEST, TALLEST = 24, 300, 288
"""Most pixels of a map's cell, of all its columns and of all its rows."""
LEAST_BAR = 0.06
"""Least part of its half that a bar takes which stands for something."""
LEAST_SHARE = 0.01
"""Least part of a picture of shares that one takes which stands for something."""
LEVELS = (0.1, 1.0, 10.0, 1000.0)
"""Edges of the levels of error over bound: each is the largest ratio of its level."""
LEVEL_WORDS = ("up to 0.1", "up to 1", "up to 10", "up to 1,000", "above, or NaN")
"""What a page calls the levels."""


def shape(name: str, **attributes: object) -> Markup:
    """Return an element of SVG; ``class_`` is its class, ``text_anchor`` its ``text-anchor``."""
    told = Markup(" ").join(
        Markup('{}="{}"').format(key.rstrip("_").replace("_", "-"), _plain(value))
        for key, value in attributes.items()
    )
    return Markup("<{} {}/>").format(name, told)


def words(text: object, x: float, y: float, anchor: str = "start") -> Markup:
    """Return a line of text in a picture."""
    form = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    return form.format(_plain(x), _plain(y), anchor, printable(str(text)))


def picture(
    width: float, height: float, title: str, description: str, parts: Iterable[Markup]
) -> Markup:
    """Return a picture that shrinks with what it stands in."""
    form = Markup(
        '<svg role="img" width="{0}" height="{1}" viewBox="0 0 {0} {1}">'
        "<title>{2}</title><desc>{3}</desc>{4}</svg>"
    )
    size = (_plain(width), _plain(height))
    return form.format(*size, printable(title), printable(description), Markup().join(parts))


def histogram(
    title: str,
    description: str,
    edges: Sequence[float],
    above: Sequence[int],
    below: Sequence[int] = (),
) -> Markup:
    """Draw how error over bound is spread, on a logarithmic axis with a line at the bound.

    Args:
        title: the title of the picture.
        description: the description of it, in words.
        edges: largest ratio of each bar, rising; one more count than edges is an open last bar.
        above, below: problems by bar, the second to be compared with the first.
    """
    step, tallest = BAR + GAP, max([1, *above, *below])
    bound = step * (bisect.bisect_left(edges, 1.0) + 1) - GAP / 2
    width = max(step * len(above), bound + GAP)
    bottom = HALF * (2 if below else 1)

    def bars(counts: Sequence[int], *, up: bool) -> Iterator[Markup]:
        for index, count in enumerate(counts):
            if count:
                height = HALF * max(LEAST_BAR, count / tallest)
                over = "over" if index * step > bound - step + GAP else "inside"
                yield shape(
                    "rect",
                    class_=over if not below else "first" if up else "second",
                    x=index * step,
                    y=HALF - height if up else HALF,
                    width=BAR,
                    height=height,
                )

    def parts() -> Iterator[Markup]:
        yield from bars(above, up=True)
        yield from bars(below, up=False)
        yield shape("line", class_="axis", x1=0, x2=width, y1=HALF, y2=HALF)
        yield shape("line", class_="limit", x1=bound, x2=bound, y1=0, y2=bottom)
        yield words(f"≤{edges[0]:.0e}".replace("e-0", "e-"), 0, bottom + 11)
        yield words("1", bound, bottom + 11, "middle" if bound < width - step else "end")
        if len(above) > len(edges):
            yield words(f">{edges[-1]:,.0f}", width, bottom + 11, "end")

    return picture(width, bottom + TEXT, title, description, parts())


def time_ratio(
    title: str, ratio: float, low: float, high: float, limit: float, span: float
) -> Markup:
    """Draw a ratio of time and its range, slower to the right; logarithmic.

    Args:
        title: the title that says the numbers.
        ratio, low, high: what was measured.
        limit: ratio from which it counts as slower.
        span: the axis goes from 1 / span to span.
    """

    def place(value: float) -> float:
        at = AXIS / 2 * (1 + math.log(value) / math.log(span))
        return min(max(at, 4.0), AXIS - 4.0)

    parts = [
        shape("line", class_="axis", x1=place(1.0), x2=place(1.0), y1=0, y2=16),
        shape("line", class_="limit", x1=place(limit), x2=place(limit), y1=3, y2=13),
        shape("line", class_="range", x1=place(low), x2=place(high), y1=8, y2=8),
        shape("circle", class_="second", cx=place(ratio), cy=8, r=4),
    ]
    return picture(AXIS, 16, title, "The line is the ratio 1, the short mark the limit.", parts)


def meter(title: str, part: int, whole: int) -> Markup:
    """Draw how much of a whole was reached."""
    filled = METER * part / whole if whole else 0.0
    parts = [
        shape("rect", class_="rest", x=0, y=0, width=METER, height=8, rx=2),
        shape("rect", class_="second", x=0, y=0, width=filled, height=8, rx=2),
    ]
    return picture(METER, 8, title, f"{part:,} of {whole:,}.", parts)


def shares(title: str, description: str, parts: Sequence[tuple[str, int]]) -> Markup:
    """Draw the parts of a whole side by side, each as wide as its share; empty ones are left out.

    Args:
        title: the title of the picture.
        description: the description of it, in words.
        parts: class and count of each part.
    """
    some = [(class_, count) for class_, count in parts if count]
    whole = sum(count for _, count in some)
    least = LEAST_SHARE * SHARES
    free = SHARES - least * len(some)

    def drawn() -> Iterator[Markup]:
        at = 0.0
        for class_, count in some:
            width = least + free * count / whole
            yield shape("rect", class_=class_, x=at, y=0, width=width - 1, height=BAR, rx=1)
            at += width

    return picture(SHARES, BAR, title, description, drawn())


def level(ratio: float) -> int:
    """Return the level of an error over its bound, see ``LEVELS``; the last one is for NaN too."""
    return len(LEVELS) if math.isnan(ratio) else bisect.bisect_left(LEVELS, ratio)


def grid(
    title: str,
    description: str,
    axes: tuple[str, str],
    rows: Sequence[Sequence[float]],
    step: Sequence[int] = (1, 1),
) -> Markup:
    """Draw error over bound as a map whose first axis, tokens, runs to the right.

    Args:
        title: the title of the picture.
        description: the description of it, in words.
        axes: what a row and a column of ``rows`` are, such as token and head.
        rows: ratios; drawn as columns.
        step: how many of each axis one cell stands for.
    """
    across, down = len(rows), len(rows[0])
    wide, tall = min(CELL, WIDEST / across), min(CELL, TALLEST / down)
    left, top = 40, TEXT + 4
    width, height = left + wide * across, top + tall * down
    gap = 1 if min(wide, tall) > 6 else 0  # noqa: PLR2004  pixels

    def parts() -> Iterator[Markup]:
        first, last = 0, (across - 1) * step[0]
        yield words(f"{axes[0]} {first}", left, TEXT - 2)
        if last and width - left > 90:  # noqa: PLR2004  pixels that two labels take
            yield words(last, width, TEXT - 2, "end")
        yield words(axes[1], 0, top + 10)
        yield words(0, left - 5, top + 10, "end")
        if down > 1 and tall * down > 2 * TEXT:
            yield words((down - 1) * step[1], left - 5, height - 2, "end")
        for x, row in enumerate(rows):
            for y, ratio in enumerate(row):
                yield shape(
                    "rect",
                    class_=f"level{level(ratio)}",
                    x=left + x * wide,
                    y=top + y * tall,
                    width=wide - gap,
                    height=tall - gap,
                )

    return picture(max(width, left + 60), height, title, description, parts())


def quantile_edge(counts: Sequence[int], edges: Sequence[float], part: float) -> float:
    """Return the edge that at most this part of the problems exceeds, infinity in an open bin."""
    wanted, seen = part * sum(counts), 0
    for edge, count in zip([*edges, math.inf], counts, strict=False):
        seen += count
        if seen >= wanted:
            return edge
    return math.inf


def ranges(numbers: Iterable[int], most: int = 4) -> str:
    """Return numbers as ranges, such as ``0 to 3, 7``."""
    runs: list[list[int]] = []
    for each in sorted(set(numbers)):
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    told = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:most]]
    return ", ".join([*told, *([f"and {len(runs) - most} more"] if len(runs) > most else [])])


def _plain(value: object) -> object:
    """Return a number without digits that nobody sees."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
