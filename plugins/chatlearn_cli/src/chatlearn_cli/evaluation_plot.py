"""Draws metrics against the step as SVG: a panel per metric, intervals as bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from chatlearn_core.printable import printable

WIDTH, HEIGHT = 360, 240
"""Size of a panel, pixels."""
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 40, 40
COLUMNS = 3
MOST_LABELS = 7
"""Number of labels of the x axis that fit side by side."""
LINE, BAND, INK, FAINT, GRID = "#1f5fa8", "#1f5fa8", "#1c1c1c", "#5b5b5b", "#e3e3e3"


@dataclass(slots=True, frozen=True)
class Point:
    """A model's value of a metric."""

    name: str
    step: int | None
    """None for a model without a step; it is drawn to the right of the others."""
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(slots=True, frozen=True)
class Panel:
    """One metric."""

    title: str
    points: Sequence[Point]


def plot(panels: Sequence[Panel]) -> str:
    """The panels side by side as one SVG document, readable on any background."""
    columns = min(COLUMNS, max(1, len(panels)))
    rows = math.ceil(len(panels) / columns)
    width, height = columns * WIDTH, max(1, rows) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(f'<g transform="translate({column * WIDTH},{row * HEIGHT})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers, about ``count``, that span [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _panel(panel: Panel) -> str:
    points = [point for point in panel.points if math.isfinite(point.value)]
    title = _text(printable(panel.title), LEFT, 22, INK, weight="600", size=13)
    if not points:
        return title + _text("no finite value", LEFT, HEIGHT / 2, FAINT)
    ends = [end for p in points for end in (p.value, p.low, p.high) if end is not None and math.isfinite(end)]
    lowest, highest = min(ends), max(ends)
    if highest - lowest < 1e-9 * max(1.0, abs(highest)):  # one value: an axis needs a length
        margin = max(0.05, 0.1 * abs(highest))
        lowest, highest = lowest - margin, highest + margin
        if min(ends) >= 0:
            lowest = max(0.0, lowest)
    marks = ticks(lowest, highest)
    bottom, top = HEIGHT - BOTTOM, TOP

    def y(value: float) -> float:
        return bottom - (value - marks[0]) / (marks[-1] - marks[0]) * (bottom - top)

    digits = max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9) + (0 if _is_round(marks) else 1))
    parts = [title]
    for mark in marks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="{GRID}"/>')
        parts.append(_text(f"{mark:.{digits}f}", LEFT - 6, y(mark) + 4, FAINT, anchor="end"))
    of_steps = sorted((p for p in points if p.step is not None), key=lambda p: p.step or 0)
    others = [point for point in points if point.step is None]
    placed = [*zip(_positions(of_steps, len(others)), of_steps, strict=True)]
    placed += [(_slot(len(others) - i - 1, bool(of_steps), len(others)), p) for i, p in enumerate(others)]
    if len(of_steps) > 1:
        path = " ".join(f"{x:.1f},{y(point.value):.1f}" for x, point in placed[: len(of_steps)])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
    labelled: list[float] = []
    for x, point in reversed(placed):  # from the right, so that the last step has its label
        parts += _marker(x, point, y)
        label = str(point.step) if point.step is not None else _short(point.name)
        room = (WIDTH - LEFT - RIGHT) / MOST_LABELS * (1.0 if point.step is not None else 0.0)
        if not labelled or labelled[-1] - x >= room:
            parts.append(_text(printable(label), x, bottom + 16, FAINT, anchor="middle"))
            labelled.append(x)
    if of_steps:
        parts.append(_text("step", LEFT, HEIGHT - 8, FAINT))
    return "".join(parts)


def _marker(x: float, point: Point, y: Callable[[float], float]) -> list[str]:
    """The interval as a bar and the value as a dot (a square for models without a step)."""
    about = f"{printable(point.name)}: {point.value:.4g}"
    parts: list[str] = []
    if point.low is not None and point.high is not None:
        about += f" [{point.low:.4g}, {point.high:.4g}]"
        parts.append(
            f'<path d="M{x - 4:.1f},{y(point.low):.1f}h8M{x - 4:.1f},{y(point.high):.1f}h8'
            f'M{x:.1f},{y(point.low):.1f}V{y(point.high):.1f}" stroke="{BAND}" stroke-opacity="0.55" fill="none"/>'
        )
    middle = y(point.value)
    shape = f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="3.5" fill="{LINE}">'
    end = "</circle>"
    if point.step is None:
        shape = f'<rect x="{x - 3.5:.1f}" y="{middle - 3.5:.1f}" width="7" height="7" fill="{INK}">'
        end = "</rect>"
    return [*parts, f"{shape}<title>{escape(about)}</title>{end}"]


def _positions(of_steps: Sequence[Point], num_others: int) -> list[float]:
    """Horizontal places of checkpoints, in proportion to their step."""
    left, right = LEFT + 14.0, WIDTH - RIGHT - 14.0 - (_reserved(num_others) if num_others else 0)
    steps = [point.step or 0 for point in of_steps]
    if len(steps) < 2:
        return [(left + right) / 2] * len(steps)
    return [left + (step - steps[0]) / (steps[-1] - steps[0]) * (right - left) for step in steps]


def _reserved(num_others: int) -> float:
    """Width for models without a step beside those with one, at most half of the panel."""
    return min(70.0 * num_others, (WIDTH - LEFT - RIGHT) / 2)


def _slot(from_right: int, beside_steps: bool, num_others: int) -> float:
    """Horizontal place of a model without a step, counted from the right."""
    width = _reserved(num_others) if beside_steps else float(WIDTH - LEFT - RIGHT)
    return WIDTH - RIGHT - (from_right + 0.5) * width / num_others


def _is_round(marks: Sequence[float]) -> bool:
    """Whether the ticks need no digit more than their distance's leading one."""
    step = marks[1] - marks[0]
    leading = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    return abs(leading - round(leading)) < 1e-6


def _short(name: str) -> str:
    return name if len(name) <= 12 else f"{name[:11]}…"


def _text(
    text: str, x: float, y: float, colour: str, *, anchor: str = "start", weight: str = "400", size: int = 11
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
