"""Curves, bands, marks and maps say what the runs hold."""

from pathlib import Path

import numpy as np
import pytest

from stabmon.output.figures import layer_figure, line_figure, share_colors
from stabmon.output.panels import Panel
from stabmon.output.styles import styles
from stabmon.runs.run import Run, load_run

STEM = "delta50/global/delta2/modes"
PANEL = Panel("Δ2", *(f"{STEM}/{aggregate}" for aggregate in ("mean", "p10", "p90", "min")))


@pytest.fixture(scope="module")
def drawn(demo_runs):
    return styles([load_run(folder) for folder in demo_runs])


def made(values, events=(), faults=(), **more):
    keys = {
        f"m/global/x/{name}": (np.arange(len(v)) * 10, np.array(v)) for name, v in values.items()
    }
    return styles([Run("made", Path("made"), {}, keys | more, events, faults)])


def test_clean_is_blue_and_faulty_vermillion_with_dashes_of_their_own(drawn):
    assert [(style.color, style.dash) for style in drawn] == [
        ("#0072B2", "solid"),
        ("#D55E00", "5px,1.5px"),
    ]
    assert drawn[0].shade(0.5) == "rgba(0,114,178,0.5)"


def test_twelve_clean_and_twelve_faulty_runs_are_told_apart():
    faults = [(), ({"kind": "rate", "onset": 3, "end": None},)]
    runs = [Run(str(i), Path(str(i)), {}, {}, (), faults[i % 2]) for i in range(24)]
    assert len({(style.color, style.dash) for style in styles(runs)}) == 24


def test_a_panel_has_band_worst_head_and_mean_for_each_run(drawn):
    figure = line_figure(PANEL, drawn, 2400)
    runs = [trace["run"] for trace in figure["data"]]
    assert runs == 4 * ["clean"] + 4 * ["faulty"] + ["faulty"]
    low, high, worst, mean = figure["data"][4:8]
    assert high["fill"] == "tonexty"
    assert all(lo <= m <= hi for lo, m, hi in zip(low["y"], mean["y"], high["y"], strict=True))
    assert all(w <= lo for w, lo in zip(worst["y"], low["y"], strict=True))
    assert worst["text"][-1] == " layer 2 head 1"
    steps, values = drawn[1].run.metrics[PANEL.mean_key]
    assert mean["x"] == steps.tolist()
    np.testing.assert_allclose(mean["y"], values, rtol=1e-5)


def test_all_panels_share_the_axis_and_hover_as_one(drawn):
    layout = line_figure(PANEL, drawn, 2400)["layout"]
    assert layout["xaxis"]["range"] == [0, 2400]
    assert layout["hovermode"] == "x unified"


def test_the_fault_is_shaded_and_named_at_its_onset(drawn):
    layout = line_figure(PANEL, drawn, 2400)["layout"]
    shade, line = layout["shapes"]
    assert (shade["x0"], shade["x1"], shade["type"]) == (300, 2400, "rect")
    assert line["x0"] == line["x1"] == 300
    assert layout["annotations"][0]["text"] == "attention fault on"


def test_a_fault_with_an_end_is_shaded_to_it():
    fault = {"kind": "rate", "onset": 10, "end": 20}
    layout = line_figure(Panel("x", "m/global/x/mean"), made({"mean": [1.0]}, (), (fault,)), 90)
    assert layout["layout"]["shapes"][0]["x1"] == 20


def test_the_first_alarm_is_marked_on_the_curve_it_speaks_of():
    events = tuple(
        {"kind": "alarm", "step": step, "key": f"m/{scope}/x/{aggregate}"}
        for step, scope, aggregate in [(10, "global", "min"), (20, "global", "mean")]
    )
    panel = Panel("x", "m/global/x/mean", worst_key="m/global/x/min")
    figure = line_figure(panel, made({"mean": [5.0, 6, 7], "min": [1.0, 2, 3]}, events), 90)
    marker = figure["data"][-1]
    assert (marker["mode"], marker["x"], marker["y"]) == ("markers", [10], [2.0])
    assert figure["layout"]["annotations"][-1]["text"] == "alarm 10"


def test_an_alarm_of_a_layer_is_marked_on_the_mean():
    events = ({"kind": "alarm", "step": 15, "key": "m/layer_03/x/min"},)
    figure = line_figure(Panel("x", "m/global/x/mean"), made({"mean": [5.0, 6, 8]}, events), 90)
    assert figure["data"][-1]["y"] == [7.0]


def test_an_alarm_on_what_is_not_finite_is_marked_at_the_top():
    events = ({"kind": "alarm", "step": 20, "key": "m/global/x/mean"},)
    values = {"mean": [5.0, 6, np.nan]}
    figure = line_figure(Panel("x", "m/global/x/mean"), made(values, events), 90)
    assert figure["data"][-1]["y"] == [6.0]


@pytest.mark.parametrize("key", ["m/global/other/mean", "nonsense", None])
def test_alarms_of_other_quantities_are_not_marked(key):
    events = ({"kind": "alarm", "step": 10, "key": key},)
    figure = line_figure(Panel("x", "m/global/x/mean"), made({"mean": [5.0, 6]}, events), 90)
    assert len(figure["data"]) == 1


def test_a_word_on_a_logarithmic_axis_stands_at_the_logarithm():
    events = ({"kind": "alarm", "step": 10, "key": "m/global/x/mean"},)
    panel = Panel("x", "m/global/x/mean", log=True)
    figure = line_figure(panel, made({"mean": [10.0, 1000.0]}, events), 90)
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["annotations"][-1]["y"] == pytest.approx(3)
    assert figure["data"][-1]["y"] == [1000.0]


def test_actions_are_dotted_lines():
    events = ({"kind": "rewind", "step": 10},)
    figure = line_figure(Panel("x", "m/global/x/mean"), made({"mean": [5.0, 6]}, events), 90)
    (line,) = figure["layout"]["shapes"]
    assert (line["x0"], line["line"]["dash"]) == (10, "dot")


def test_a_lower_edge_alone_is_a_line():
    panel = Panel("x", "m/global/x/mean", low_key="m/global/x/p10", high_key="m/global/x/p90")
    figure = line_figure(panel, made({"mean": [5.0, 6], "p10": [4.0, 5]}), 90)
    assert [trace.get("fill") for trace in figure["data"]] == [None, None]


def test_one_sample_is_a_dot():
    figure = line_figure(Panel("x", "m/global/x/mean"), made({"mean": [5.0]}), 90)
    assert figure["data"][0]["mode"] == "markers"


def test_a_map_has_a_row_for_each_layer_and_runs_share_its_colors(drawn):
    figures = [layer_figure(PANEL, style, 2400) for style in drawn]
    share_colors(figures)
    traces = [figure["data"][0] for figure in figures]
    assert traces[1]["y"] == ["0", "1", "2", "3"]
    assert [len(traces[1]["z"]), len(traces[1]["z"][0])] == [4, 241]
    values = drawn[1].run.metrics["delta50/layer_02/delta2/modes/mean"][1]
    np.testing.assert_allclose(traces[1]["z"][2], values, rtol=1e-5)
    assert traces[0]["zmin"] == traces[1]["zmin"] == min(map(min, traces[1]["z"]))
    assert traces[0]["zmax"] == traces[1]["zmax"]


def test_no_map_without_layers(drawn):
    assert layer_figure(Panel("x", "m/global/x/mean"), drawn[0], 90) is None


def test_a_map_of_nothing_finite_has_no_color_limits():
    key = {"m/layer_00/x/mean": (np.array([0]), np.array([np.nan]))}
    figure = layer_figure(Panel("x", "m/global/x/mean"), made({}, **key)[0], 90)
    share_colors([figure])
    assert "zmin" not in figure["data"][0]
    assert figure["data"][0]["z"] == [[None]]
