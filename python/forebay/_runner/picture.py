"""Draws the curves of a run as an SVG: a panel for each policy, with its reward, its components, and its criteria."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .progress import Curve, Points
from .settings import Pass

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""They can be distinguished in print and by people with colour blindness."""

WIDTH, PANEL, LEFT, TOP, RIGHT, BOTTOM = 760, 230, 60, 34, 130, 34

SMOOTH = 10
"""Steps of which a line shows the mean. Single steps are drawn in a pale colour behind it."""

TICKS = 5
"""About how many numbers an axis has."""

ROUNDING = 1e-9
"""How far a quotient of floats may be from a whole number and still count as one."""

POINTS_MAX = 500
"""The most points of a line; of more, every second, third and so on is drawn."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What a panel shows: series by their names, and the bounds for the last steps of some of them."""

    name: str
    series: dict[str, Points]
    bounds: dict[str, list[float]]


def draw(title: str, curves: dict[str, Curve], passes: Sequence[Pass] = ()) -> str:
    """The picture. Many panels are in several columns, so that it is about as wide as it is high."""
    panels = panels_of(curves, passes)
    columns = max(1, math.isqrt(len(panels) * PANEL // WIDTH))
    width, height = WIDTH * columns, TOP + PANEL * max(1, math.ceil(len(panels) / columns))
    how = f"by steps; bold: mean of {SMOOTH} steps"
    if any(panel.series.keys() & panel.bounds.keys() for panel in panels):
        how += "; dashed: wanted at the end"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20"><tspan font-size="14" font-weight="bold">{escape(title)}</tspan>'
        f'<tspan dx="12">{how}</tspan></text>',
    ]
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        lines += [f'<g transform="translate({column * WIDTH} 0)">', *_panel(panel, TOP + row * PANEL), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def panels_of(curves: dict[str, Curve], passes: Sequence[Pass]) -> list[Panel]:
    """A panel for each mean that is judged, and one for each policy."""
    means = {criterion.policy: None for criterion in passes if criterion.of == "mean"}
    panels: list[Panel] = []
    for glob in means:
        judged = [each for each in passes if each.of == "mean" and each.policy == glob]
        found = [series_of(curve) for name, curve in curves.items() if judged[0].judges(name)]
        panels.append(Panel(name=f"{glob}, the mean of {len(found)}", series=mean_of(found), bounds=bounds_of(judged)))
    for name, curve in curves.items():
        judged = [each for each in passes if each.of == "each" and each.judges(name)]
        panels.append(Panel(name=name, series=series_of(curve), bounds=bounds_of(judged)))
    return panels


def series_of(curve: Curve) -> dict[str, Points]:
    """The series of a policy that have points."""
    return {each: points for each in ("reward", *curve.components()) if (points := curve.series(each))}


def mean_of(several: Sequence[dict[str, Points]]) -> dict[str, Points]:
    """The means of series that several policies have, at the steps that all of them have.

    A criterion takes the last steps of each policy, so it may differ a little.
    """
    if not several:
        return {}
    means: dict[str, Points] = {}
    for name in several[0]:
        values = [dict(series.get(name, [])) for series in several]
        steps = sorted(set(values[0]).intersection(*values[1:]))
        if steps:
            means[name] = [(step, sum(each[step] for each in values) / len(values)) for step in steps]
    return means


def bounds_of(judged: Sequence[Pass]) -> dict[str, list[float]]:
    """What the last steps of series have to reach, or to stay below."""
    bounds: dict[str, list[float]] = {}
    for criterion in judged:
        limits = [limit for limit in (criterion.last, criterion.last_below) if limit is not None]
        bounds.setdefault(criterion.series, []).extend(limits)
    return bounds


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about five."""
    least = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(part * power for part in (1, 2, 5, 10) if part * power >= least * (1 - ROUNDING))
    first, last = math.ceil(low / step - ROUNDING), math.floor(high / step + ROUNDING)
    return [round(place * step, 9) for place in range(first, last + 1)]


def _panel(panel: Panel, top: int) -> list[str]:
    values = [value for points in panel.series.values() for _, value in points]
    values += [limit for limits in panel.bounds.values() for limit in limits]
    low, high = min([0.0, *values]), max([1.0, *values])
    last = max([1, *(step for points in panel.series.values() for step, _ in points)])
    plot_top, plot_height = top + 22, PANEL - 22 - BOTTOM
    plot_width = WIDTH - LEFT - RIGHT

    def x(step: float) -> float:
        return LEFT + plot_width * step / last

    def y(value: float) -> float:
        return plot_top + plot_height * (high - value) / (high - low)

    lines = [f'<text x="{LEFT}" y="{top + 14}">{escape(panel.name)}</text>']
    for value in ticks(low, high):
        lines.append(f'<path d="M{LEFT} {y(value):.1f}H{LEFT + plot_width}" stroke="#e6e6e6"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in filter(float.is_integer, ticks(0, last)):
        lines.append(f'<text x="{x(step):.1f}" y="{plot_top + plot_height + 16}" text-anchor="middle">{step:g}</text>')
    for place, (each, points) in enumerate(panel.series.items()):
        colour = COLOURS[place % len(COLOURS)]
        for limit in panel.bounds.get(each, []):
            dashed = f'stroke="{colour}" stroke-dasharray="5 4" stroke-opacity="0.7"'
            lines.append(f'<path d="M{LEFT} {y(limit):.1f}H{LEFT + plot_width}" {dashed}/>')
        lines.append(_line([(x(step), y(value)) for step, value in points], colour, 0.8, 0.25))
        lines.append(_line([(x(step), y(value)) for step, value in smoothed(points)], colour, 1.8, 1.0))
        at = plot_top + 12 + 18 * place
        lines.append(f'<text x="{LEFT + plot_width + 10}" y="{at}" fill="{colour}">{escape(each)}</text>')
    return lines


def smoothed(points: Points) -> Points:
    """The mean of the last values at each step."""
    smooth: Points = []
    for end in range(1, len(points) + 1):
        window = points[max(0, end - SMOOTH) : end]
        smooth.append((points[end - 1][0], sum(value for _, value in window) / len(window)))
    return smooth


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
    kept = points[:: 1 + len(points) // POINTS_MAX]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in kept)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"/>'
