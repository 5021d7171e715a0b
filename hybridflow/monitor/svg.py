"""Charts as inline SVG, coloured by the page's CSS classes ``c0`` ... ``c7``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.monitor.page import escape
from hybridflow.monitor.series import Point, Series, smooth
from hybridflow.monitor.text import duration, number, tick

WIDTH, HEIGHT = 400, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 24
COLOURS = 8
_HOVER_COLUMNS = 100
_SMOOTH_FROM = 30  # points; below, the raw line is readable
_DOTS_UP_TO = 20


@dataclass(frozen=True)
class Frame:
    """The data range that a chart shows, and its mapping to SVG units."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[tuple[str, Series]]) -> str:
    """Lines over the steps; each series comes with its label. Values that are NaN are gaps."""
    drawn = [(label, line.points()) for label, line in series]
    frame = _frame([point for _, points in drawn for point in points])
    parts = [_axes(frame)]
    for index, (_, points) in enumerate(drawn):
        parts.append(_line(frame, points, index))
    parts.append(_hover(frame, drawn))
    return _svg(parts, "; ".join(label for label, _ in series))


def _svg(parts: Sequence[str], label: str) -> str:
    box = f"0 0 {WIDTH} {HEIGHT}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _frame(points: Sequence[Point]) -> Frame:
    steps = [point.step for point in points]
    values = [v for p in points if p.value == p.value for v in (p.low, p.high)] or [0.0, 1.0]
    low, high = min(values), max(values)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    x_low, x_high = min(steps), max(steps)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    return Frame(x_low, x_high, low, high + 0.04 * (high - low))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values within the range, about ``count`` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    gap = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda candidate: abs(candidate - raw))
    first = math.ceil(low / gap - 1e-9)
    last = math.floor(high / gap + 1e-9)
    return [index * gap for index in range(first, last + 1)]


def _axes(frame: Frame) -> str:
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" class="end">{tick(value)}</text>')
    whole = [value for value in ticks(frame.x_low, frame.x_high, 5) if value == int(value)]
    for value in whole:
        x, y = frame.x(value), HEIGHT - BOTTOM + 14
        parts.append(f'<text x="{x:.1f}" y="{y}" class="middle">{int(value):,}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _line(frame: Frame, points: Sequence[Point], index: int) -> str:
    colour = f"c{index % COLOURS}"
    values = [point.value for point in points]
    parts = []
    if any(point.high > point.low for point in points):
        parts.append(_band(frame, points, colour))
    if len(points) >= _SMOOTH_FROM:
        raw = _path(frame, points, values)
        parts.append(f'<path class="line raw {colour}" d="{raw}"/>')
        values = smooth(values, window=max(5, len(points) // 25))
    parts.append(f'<path class="line {colour}" d="{_path(frame, points, values)}"/>')
    if len(points) <= _DOTS_UP_TO:
        for point in points:
            if point.value == point.value:
                place = f'cx="{frame.x(point.step):.1f}" cy="{frame.y(point.value):.1f}"'
                parts.append(f'<circle class="dot {colour}" {place} r="2.6"/>')
    return "".join(parts)


def _path(frame: Frame, points: Sequence[Point], values: Sequence[float]) -> str:
    """The line's path data; it lifts the pen at each gap."""
    parts, pen_up = [], True
    for point, value in zip(points, values, strict=True):
        if value != value:
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{frame.x(point.step):.1f} {frame.y(value):.1f}")
        pen_up = False
    return "".join(parts)


def _band(frame: Frame, points: Sequence[Point], colour: str) -> str:
    """The range of the steps that each down-sampled point stands for."""
    kept = [point for point in points if point.value == point.value]
    upper = [f"{frame.x(p.step):.1f} {frame.y(p.high):.1f}" for p in kept]
    lower = [f"{frame.x(p.step):.1f} {frame.y(p.low):.1f}" for p in reversed(kept)]
    return f'<path class="band {colour}" d="M{"L".join(upper + lower)}Z"/>'


def _hover(frame: Frame, drawn: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Invisible columns whose tooltip tells the values at their step."""
    texts: dict[float, list[str]] = {}
    for label, points in drawn:
        for point in points[:: max(1, math.ceil(len(points) / _HOVER_COLUMNS))]:
            texts.setdefault(point.step, []).append(f"{label} {number(point.value)}")
    width = (WIDTH - LEFT - RIGHT) / max(1, len(texts))
    parts = []
    for step, lines in sorted(texts.items()):
        x = frame.x(step)
        title = escape(f"step {step:,.0f}: {', '.join(lines)}")
        parts.append(
            f'<g class="hit"><rect x="{x - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/><path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            f"<title>{title}</title></g>"
        )
    return "".join(parts)


def stacked_bars(names: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Bars of stacked seconds; each bar is (label, one value per name)."""
    highest = max((sum(values) for _, values in bars), default=0.0) or 1.0
    frame = Frame(0, max(1, len(bars)), 0.0, highest * 1.04)
    parts = [_bar_axes(frame, bars)]
    for index, (label, values) in enumerate(bars):
        parts.append(_bar(frame, names, index, label, values))
    return _svg(parts, "seconds per node")


def _bar_axes(frame: Frame, bars: Sequence[tuple[str, Sequence[float]]]) -> str:
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        text = f"{number(value)} s"
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" class="end">{text}</text>')
    every = max(1, math.ceil(len(bars) / 6))
    for index in range(0, len(bars), every):
        x, y = frame.x(index + 0.5), HEIGHT - BOTTOM + 14
        parts.append(f'<text x="{x:.1f}" y="{y}" class="middle">{escape(bars[index][0])}</text>')
    return "".join(parts)


def _bar(
    frame: Frame, names: Sequence[str], index: int, label: str, values: Sequence[float]
) -> str:
    left = frame.x(index)
    width = min(40.0, (frame.x(index + 1) - left) * 0.86)
    left += (frame.x(index + 1) - left - width) / 2
    parts, base = [], 0.0
    for colour, (name, value) in enumerate(zip(names, values, strict=True)):
        top = frame.y(base + value)
        height = frame.y(base) - top
        title = escape(f"step {label}: {name} {duration(value)}")
        parts.append(
            f'<rect class="fill c{colour % COLOURS}" x="{left:.1f}" y="{top:.2f}" '
            f'width="{width:.1f}" height="{height:.2f}"><title>{title}</title></rect>'
        )
        base += value
    return "".join(parts)
