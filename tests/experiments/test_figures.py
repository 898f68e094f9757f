"""Pictures of experiments: panels, curves, and what stands in the way of an image."""

import plotly.graph_objects as go
import pytest

from experiments.support import figures
from experiments.support.figures import COLOURS, colour, curves, panels, write_images, write_page

ROWS = [
    {"arm": arm, "seed": seed, "curves": {"loss": [[0, 1], [2.0, seed]], "rank": [[0], [1.0]]}}
    for arm in ("clean", "faulty")
    for seed in (0, 1)
]


def test_a_line_for_each_run_in_each_panel_and_a_name_for_each_arm():
    traces = curves(ROWS, ("loss", "rank")).to_dict()["data"]
    assert len(traces) == 2 * len(ROWS)
    assert [x["name"] for x in traces if x["showlegend"]] == ["clean", "faulty"]
    of = lambda arm: {x["line"]["color"] for x in traces if x["name"] == arm}
    assert (of("clean"), of("faulty")) == ({colour(0)}, {colour(1)})
    second = [x for x in traces if x["text"] == "faulty, seed 1"]
    assert [(x["y"], x["xaxis"]) for x in second] == [([2.0, 1], "x"), ([1.0], "x2")]


def test_colours_begin_again():
    assert colour(len(COLOURS)) == colour(0)


@pytest.mark.parametrize(("count", "height"), [(0, 410), (4, 410), (5, 710)])
def test_panels_wrap_after_four(count, height):
    layout = panels([f"panel {i}" for i in range(count)]).to_dict()["layout"]
    assert layout["height"] == height
    assert [x["text"] for x in layout.get("annotations", ())] == [
        f"panel {i}" for i in range(count)
    ]


def test_a_page_is_complete_in_itself(tmp_path):
    page = write_page(curves(ROWS, ("loss",)), tmp_path / "deep" / "x.html")
    assert page.stat().st_size > 1_000_000


def test_an_image_without_a_browser_says_what_it_needs(tmp_path, monkeypatch):
    def failing(self, path):
        raise RuntimeError("no browser found")

    monkeypatch.setattr(figures, "find_spec", lambda _: True)
    monkeypatch.setattr(go.Figure, "write_image", failing)
    with pytest.raises(RuntimeError, match=r"x\.svg: images need Chrome or Chromium: no browser"):
        write_images({tmp_path / "x.svg": go.Figure()})
