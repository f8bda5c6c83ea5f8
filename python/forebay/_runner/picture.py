"""Draws the curves of a run as an SVG: a panel for each policy, with its reward and its components."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .progress import Curve

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""They can be distinguished in print and by people with colour blindness."""

WIDTH, PANEL, LEFT, TOP, RIGHT, BOTTOM = 760, 230, 60, 34, 130, 34

SMOOTH = 10
"""Steps of which a line shows the mean. Single steps are drawn in a pale colour behind it."""

POINTS_MAX = 500
"""The most points of a line; of more, every second, third and so on is drawn."""


def draw(title: str, curves: dict[str, Curve]) -> str:
    """The picture. Many panels are in several columns, so that it is about as wide as it is high."""
    columns = max(1, math.isqrt(len(curves) * PANEL // WIDTH))
    width, height = WIDTH * columns, TOP + PANEL * max(1, math.ceil(len(curves) / columns))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20"><tspan font-size="14" font-weight="bold">{escape(title)}</tspan>'
        f'<tspan dx="12">by steps of training; bold: the mean of the last {SMOOTH} steps</tspan></text>',
    ]
    for place, (name, curve) in enumerate(curves.items()):
        row, column = divmod(place, columns)
        lines += [f'<g transform="translate({column * WIDTH} 0)">', *_panel(name, curve, TOP + row * PANEL), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(name: str, curve: Curve, top: int) -> list[str]:
    series = {each: points for each in ("reward", *curve.components()) if (points := curve.series(each))}
    values = [value for points in series.values() for _, value in points]
    low, high = min([0.0, *values]), max([1.0, *values])
    last = max([1, *(step for points in series.values() for step, _ in points)])
    plot_top, plot_height = top + 22, PANEL - 22 - BOTTOM
    plot_width = WIDTH - LEFT - RIGHT

    def x(step: float) -> float:
        return LEFT + plot_width * step / last

    def y(value: float) -> float:
        return plot_top + plot_height * (high - value) / (high - low)

    lines = [f'<text x="{LEFT}" y="{top + 14}">{escape(name)}</text>']
    for part in range(5):
        value = low + (high - low) * part / 4
        lines.append(f'<path d="M{LEFT} {y(value):.1f}H{LEFT + plot_width}" stroke="#e6e6e6"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for part in range(5):
        step = round(last * part / 4)
        lines.append(f'<text x="{x(step):.1f}" y="{plot_top + plot_height + 16}" text-anchor="middle">{step}</text>')
    for place, (each, points) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        lines.append(_line([(x(step), y(value)) for step, value in points], colour, 0.8, 0.25))
        lines.append(_line([(x(step), y(value)) for step, value in smoothed(points)], colour, 1.8, 1.0))
        at = plot_top + 12 + 18 * place
        lines.append(f'<text x="{LEFT + plot_width + 10}" y="{at}" fill="{colour}">{escape(each)}</text>')
    return lines


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The mean of the last values at each step."""
    smooth: list[tuple[int, float]] = []
    for end in range(1, len(points) + 1):
        window = points[max(0, end - SMOOTH) : end]
        smooth.append((points[end - 1][0], sum(value for _, value in window) / len(window)))
    return smooth


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
    kept = points[:: 1 + len(points) // POINTS_MAX]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in kept)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"/>'
