"""Curves and histograms as inline SVG for the report: drawn by Matplotlib, coloured by the page.

Lines keep their own colours; text, axes and grid take the page's text colour (`currentColor`), so that one picture
serves a light and a dark page. Nothing in the SVG refers to anything outside of it.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = "#3f7fd9", "#e0892c", "#37a06a", "#d3534f", "#8d68d4", "#2aa3ad"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
# Curves past the palette take its colours again, in another style.
LINE_STYLES = ("-", "--", ":", "-.")
MAX_TICKS = 7
MAX_LEGEND_COLUMNS = 4
# Stands for the page's text colour while Matplotlib draws, which knows real colours only.
TEXT_COLOR = "#010203"
FIGURE_INCHES = (4.5, 2.6)
MAX_POINTS = 400
# A running mean is drawn over the curve from this many points on; its window is this share of the points.
SMOOTH_FROM_POINTS = 20
SMOOTH_SHARE = 0.08
BINS = 24
# Values whose spread is a smaller share of them than this count as the same.
NARROWEST = 1e-9

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A labelled line. `band` is a half-width around each point (a standard deviation) or None. Points are finite."""

    label: str
    points: Sequence[Point]
    band: Sequence[float] | None = None
    markers: bool = False


@dataclass(frozen=True)
class Chart:
    """What one picture shows. With `stacked`, the curves are areas on top of each other and share their steps.

    `ticks`, where given, are places on the step axis and what is written there; of many, a few are shown.
    """

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    stacked: bool = False
    percent: bool = False
    logarithmic: bool = False
    ticks: Sequence[tuple[float, str]] = ()
    x_label: str = "step"


@dataclass(frozen=True)
class Histogram:
    """How the values of each group are spread: label -> values, finite and at least one. All groups share the bins."""

    title: str
    groups: Mapping[str, Sequence[float]]
    x_label: str = "score"


def draw(chart: Chart | Histogram) -> str:
    """The chart as an `<svg>` element, the same bytes every time."""
    import matplotlib

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.title,
        "font.size": 10,
        "font.family": "sans-serif",
        "text.color": TEXT_COLOR,
        "text.parse_math": False,
        "axes.labelcolor": TEXT_COLOR,
        "axes.edgecolor": TEXT_COLOR,
        "xtick.color": TEXT_COLOR,
        "ytick.color": TEXT_COLOR,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.formatter.useoffset": False,
    }
    with matplotlib.rc_context(settings):
        return _inline(_render(chart))


def _render(chart: Chart | Histogram) -> str:
    # The figure class alone: pyplot would look for a display and keep figures alive.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.grid(axis="y", color=TEXT_COLOR, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
    if isinstance(chart, Histogram):
        _draw_bars(axes, chart)
    else:
        _draw_curves(axes, chart)
    if len(chart.groups if isinstance(chart, Histogram) else chart.curves) > 1:
        _add_legend(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _add_legend(figure: Any) -> None:
    """A legend of as many columns, four at most, as the figure is wide enough for."""
    for columns in range(MAX_LEGEND_COLUMNS, 0, -1):
        legend = figure.legend(
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.2,
            borderaxespad=0.1,
        )
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def _draw_curves(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

    (_draw_areas if chart.stacked else _draw_lines)(axes, chart)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.unit)
    if chart.ticks:
        ticks = _spread(chart.ticks, MAX_TICKS)
        axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=MAX_TICKS, integer=True))
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.set_ylim(0, 1.02)
    if chart.logarithmic and all(value > 0 for curve in chart.curves for _, value in curve.points):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.yaxis.set_minor_locator(NullLocator())


def _draw_lines(axes: Any, chart: Chart) -> None:
    for index, curve in enumerate(chart.curves):
        color = PALETTE[index % len(PALETTE)]
        style = LINE_STYLES[index // len(PALETTE) % len(LINE_STYLES)]
        points = thin(curve.points)
        steps, values = [step for step, _ in points], [value for _, value in points]
        if curve.band is not None:
            width = [
                value for _, value in thin([(step, w) for (step, _), w in zip(curve.points, curve.band, strict=True)])
            ]
            low = [value - w for value, w in zip(values, width, strict=True)]
            high = [value + w for value, w in zip(values, width, strict=True)]
            axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
        marker = "o" if curve.markers or len(points) < 3 else None
        if len(points) >= SMOOTH_FROM_POINTS and not curve.markers:
            axes.plot(steps, values, style, color=color, alpha=0.35, linewidth=0.9)
            axes.plot(steps, running_mean(values), style, color=color, linewidth=1.9, label=curve.label)
        else:
            axes.plot(
                steps, values, style, color=color, linewidth=1.7, marker=marker, markersize=4.5, label=curve.label
            )


def _draw_areas(axes: Any, chart: Chart) -> None:
    thinned = [thin(curve.points) for curve in chart.curves]
    steps = [step for step, _ in thinned[0]]
    heights = [[value for _, value in points] for points in thinned]
    colors = [PALETTE[index % len(PALETTE)] for index in range(len(heights))]
    labels = [curve.label for curve in chart.curves]
    if len(steps) == 1:  # An area needs two points to be seen.
        steps, heights = [steps[0] - 0.4, steps[0] + 0.4], [row * 2 for row in heights]
    axes.stackplot(steps, heights, labels=labels, colors=colors, alpha=0.8, linewidth=0)
    axes.margins(x=0)


def _draw_bars(axes: Any, chart: Histogram) -> None:
    """The share of each group's values that falls into each bin, so that groups of other sizes can be compared."""
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    # Of all values together, so that the bars of all groups stand in the same places.
    values_of_all = [value for values in chart.groups.values() for value in values]
    low, high = min(values_of_all), max(values_of_all)
    if high - low <= NARROWEST * max(abs(low), abs(high)):  # No room for bins between numbers.
        margin = abs(high) or 1.0
        low, high = low - margin, high + margin
    edges = np.linspace(low, high, BINS + 1)
    for (label, values), color in zip(chart.groups.items(), PALETTE, strict=False):
        shares = np.full(len(values), 1 / len(values))
        axes.hist(values, bins=edges, weights=shares, color=color, alpha=0.55, label=label)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel("share")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _spread(ticks: Sequence[tuple[float, str]], limit: int) -> list[tuple[float, str]]:
    """At most `limit` of the ticks, evenly chosen, the first and the last among them."""
    if len(ticks) <= limit:
        return list(ticks)
    return [ticks[round(index * (len(ticks) - 1) / (limit - 1))] for index in range(limit)]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most `MAX_POINTS` points: long curves are averaged over equal runs of neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(p[0] for p in run) / len(run), sum(p[1] for p in run) / len(run)) for run in runs]


def running_mean(values: Sequence[float]) -> list[float]:
    """Each value averaged with its neighbours; the window is symmetric and shrinks at the ends."""
    reach = max(1, round(len(values) * SMOOTH_SHARE / 2))
    means = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        window = values[index - side : index + side + 1]
        means.append(sum(window) / len(window))
    return means


def _inline(document: str) -> str:
    """The `<svg>` element alone, scalable, in the page's colours, without declarations that name web addresses."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version)="[^"]*"', "", svg, count=3)
    svg = re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    replacements: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
        (r"xlink:href", "href"),
        (re.escape(TEXT_COLOR), "currentColor"),
        (r"font: ([\d.]+px) [^;\"]*", r"font-size: \1"),
    )
    for pattern, replacement in replacements:
        svg = re.sub(pattern, replacement, svg)
    return svg
