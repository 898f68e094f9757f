"""Curves: dots where the values are, gaps where there are none."""

import math

import pytest

from stabmon.output.curves import Curve, Scale, draw

WIDTH, HEIGHT = 27, 4


def plot(samples, scale, **options):
    curve = Curve(samples, "cyan")
    return [line.plain for line in draw([curve], WIDTH, HEIGHT, scale, **options)]


def marked(lines):
    """Rows and columns of the cells with dots."""
    blank = {" ", "⠀"}
    return {
        (r, c) for r, line in enumerate(lines) for c, x in enumerate(line[7:]) if x not in blank
    }


def test_a_line_runs_from_corner_to_corner():
    lines = plot({0: 0.0, 100: 1.0}, Scale(0, 1))
    assert {len(line) for line in lines} == {WIDTH}
    cells = marked(lines)
    assert (HEIGHT - 1, 0) in cells
    assert (0, WIDTH - 8) in cells
    assert {c for _, c in cells} == set(range(WIDTH - 7))
    assert lines[0].split()[0] == "1"
    assert lines[-1].split()[0] == "0"


def test_a_peak_among_thousands_of_samples_is_drawn():
    samples = dict.fromkeys(range(5000), 0.0) | {2500: 9.0}
    assert any(r == 0 for r, _ in marked(plot(samples, Scale())))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_gap(bad):
    lines = plot({0: 0.0, 40: 0.0, 50: bad, 60: 0.0, 100: 0.0}, Scale(0, 1))
    columns = {c for _, c in marked(lines)}
    assert columns
    assert set(range(WIDTH - 7)) - columns == {8, 9, 10, 11} - columns
    assert 9 not in columns


@pytest.mark.parametrize("samples", [{}, {3: 2.0}, {3: 0.0, 4: 0.0}, {3: math.nan}])
def test_there_is_a_picture_of_almost_nothing(samples):
    assert len(plot(samples, Scale())) == HEIGHT
    assert len(plot(samples, Scale(log=True))) == HEIGHT


def test_a_logarithmic_axis_is_labelled_with_values():
    lines = plot({0: 0.01, 1: 100.0, 2: -1.0}, Scale(log=True))
    assert lines[0].split()[0] == "100"
    assert lines[-1].split()[0] == "0.01"


def test_a_terminal_without_unicode_gets_ascii():
    lines = plot({0: 0.0, 1: 1.0}, Scale(), ascii_only=True)
    assert "".join(lines).isascii()
    assert "*" in lines[0]
