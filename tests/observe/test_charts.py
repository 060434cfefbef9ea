import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.charts import MAX_POINTS, MAX_TICKS, Chart, Curve, Histogram, draw, running_mean, thin


def test_a_chart_is_a_well_formed_svg_that_names_no_address() -> None:
    svg = draw(Chart("Reward", [Curve("mean", [(s, s / 10) for s in range(30)], band=[0.1] * 30)], "unit"))
    assert ElementTree.fromstring(svg).tag == "svg"
    assert "://" not in svg and "xlink" not in svg
    assert re.findall(r'href="([^"]*)"', svg)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', svg))


def test_text_takes_the_colour_of_the_page_and_the_size_is_left_to_it() -> None:
    svg = draw(Chart("Reward", [Curve("a", [(1, 1.0)]), Curve("b", [(1, 2.0)])]))
    assert "currentColor" in svg and "#010203" not in svg
    head = svg[: svg.index(">")]
    assert "viewBox" in head and "width=" not in head and "height=" not in head


def test_the_same_chart_gives_the_same_bytes() -> None:
    chart = Chart("Phase times", [Curve("train", [(1, 1.0), (2, 2.0)])], stacked=True)
    assert draw(chart) == draw(chart)


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, 0.0)] * 3, [(1, -1e300), (2, 1e300)]])
@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"percent": True}, {"logarithmic": True}])
def test_odd_data_is_drawn(points: list[tuple[float, float]], options: dict[str, bool]) -> None:
    assert draw(Chart("Odd", [Curve("a", points)], **options)).startswith("<svg")


def test_ticks_of_its_own_replace_the_steps_and_a_few_of_many_are_shown() -> None:
    ticks = [(step, f"{step}\nv{step + 1}") for step in range(0, 1000, 10)]
    svg = draw(Chart("x", [Curve("a", [(step, 1.0) for step, _ in ticks], markers=True)], ticks=ticks))
    shown = re.findall(r">v(\d+)<", svg)
    assert len(shown) == MAX_TICKS and (shown[0], shown[-1]) == ("1", "991")


def test_more_curves_than_colours_are_all_drawn() -> None:
    svg = draw(Chart("x", [Curve(f"curve {index}", [(1, 1.0), (2, index)]) for index in range(9)]))
    assert all(f">curve {index}<" in svg for index in range(9))


@pytest.mark.parametrize("curves", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("letters", [2, 12, 40])
def test_a_legend_is_not_cut(curves: int, letters: int) -> None:
    svg = draw(Chart("x", [Curve(f"{index}" * letters, [(1, 1.0), (2, index)]) for index in range(curves)]))
    [width] = re.findall(r'viewBox="0 0 ([0-9.]+) ', svg)
    for index in range(curves):
        [start] = re.findall(rf'x="([0-9.]+)"[^>]*>{str(index) * letters}<', svg)
        assert float(start) + 6.0 * letters < float(width), "a digit is wider than 6"


def test_labels_are_text_not_markup_and_not_formulas() -> None:
    svg = draw(Chart("x", [Curve("<script>$a_1$", [(1, 1.0), (2, 1.0)]), Curve("b", [(1, 1.0)])], "<b>"))
    assert "<script>" not in svg and "&lt;script&gt;$a_1$" in svg and "<b>" not in svg


def test_a_histogram_shows_all_groups_in_the_same_bins_the_same_bytes_every_time() -> None:
    histogram = Histogram("Scores", {"<right>": [0.9, 0.8, 0.85], "wrong": [0.1]})
    svg = draw(histogram)
    assert ElementTree.fromstring(svg).tag == "svg" and svg == draw(histogram)
    assert ">&lt;right&gt;<" in svg and ">wrong<" in svg and ">score<" in svg


@pytest.mark.parametrize("values", [[0.0], [2.0] * 3, [-1e300, 1e300], [0.5, math.nextafter(0.5, 1)]])
def test_odd_scores_are_drawn(values: list[float]) -> None:
    assert draw(Histogram("Scores", {"a": values})).startswith("<svg")


@given(st.lists(st.floats(-1e6, 1e6), max_size=3 * MAX_POINTS))
def test_thinning_bounds_the_points_and_keeps_the_mean(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS
    if len(points) <= MAX_POINTS:
        assert thinned == points
    elif len(points) % MAX_POINTS == 0:
        assert sum(v for _, v in thinned) / len(thinned) == pytest.approx(sum(values) / len(values), abs=1e-3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100))
def test_a_running_mean_stays_within_the_values_and_keeps_a_line(values: list[float]) -> None:
    means = running_mean(values)
    assert len(means) == len(values)
    assert all(min(values) - 1e-6 <= mean <= max(values) + 1e-6 for mean in means)
    line = [float(index) for index in range(len(values))]
    assert running_mean(line) == pytest.approx(line)
