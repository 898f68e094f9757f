"""Panels are those that the keys suggest; thinning keeps what a person would miss."""

from pathlib import Path

import numpy as np
import pytest

from stabmon.output.panels import Panel, default_panels, layers_over_steps, thin
from stabmon.quantities import split_key
from stabmon.runs.run import Run, load_run


def run_with(*keys, **fields):
    series = (np.array([0, 10]), np.array([1.0, 2.0]))
    given = {"events": (), "faults": ()} | fields
    return Run("made", Path("made"), {}, dict.fromkeys(keys, series), **given)


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("delta50/layer_03/delta2/modes/p10", ("delta50", "layer_03", "delta2/modes", "p10")),
        ("a/global/b/mean", ("a", "global", "b", "mean")),
        ("a/global/mean", None),
        ("a/other/b/mean", None),
        ("loss", None),
    ],
)
def test_a_key_is_split(key, parts):
    assert split_key(key) == parts


def test_the_demo_has_the_panels_of_its_keys(demo_runs):
    panels = default_panels([load_run(folder) for folder in demo_runs])
    assert [panel.title for panel in panels] == [
        "Loss",
        "Gradient norm",
        "Δ2 modes, lag 50",
        "ΔW_q modes, lag 50",
        "Attention entropy",
        "Largest attention logit",
        "Stable rank of W_q",
    ]
    stem = "delta50/global/delta2/modes"
    keys = [f"{stem}/{aggregate}" for aggregate in ("mean", "p10", "p90", "min")]
    assert panels[2] == Panel("Δ2 modes, lag 50", *keys)
    assert panels[5].worst_key == "attention/global/max_logit/max"
    assert [panel.log for panel in panels] == [False, True, False, False, False, True, False]


def test_lags_are_in_the_order_of_numbers_and_the_best_statistic_is_shown():
    keys = [
        f"delta{lag}/global/delta2/{stat}/mean"
        for lag in (200, 50)
        for stat in ("entropy", "effective_rank")
    ]
    titles = [panel.title for panel in default_panels([run_with(*keys)])]
    assert titles == ["Δ2 effective rank, lag 50", "Δ2 effective rank, lag 200"]


def test_unknown_quantities_are_shown_where_no_known_one_is():
    runs = [run_with("mine/global/own/p50", "mine/layer_00/own/p50", "noise")]
    assert default_panels(runs) == [Panel("mine/own", "mine/global/own/p50")]


def test_the_only_curve_is_not_its_own_worst():
    (panel,) = default_panels([run_with("mine/global/own/min")])
    assert panel == Panel("mine/own", "mine/global/own/min")


def test_a_run_without_metrics_has_no_panels():
    assert default_panels([run_with()]) == []


def test_layers_stand_in_order_with_gaps_where_there_is_no_sample():
    run = Run(
        "r",
        Path("r"),
        {},
        {
            "m/layer_10/x/mean": (np.array([0, 20]), np.array([1.0, 2.0])),
            "m/layer_9/x/mean": (np.array([0, 10]), np.array([3.0, 4.0])),
            "m/layer_9/x/min": (np.array([0]), np.array([9.0])),
            "m/layer_9/y/mean": (np.array([5]), np.array([9.0])),
        },
        (),
        (),
    )
    layers, steps, values = layers_over_steps(run, Panel("x", "m/global/x/mean"))
    assert layers == ["layer_9", "layer_10"]
    np.testing.assert_array_equal(steps, [0, 10, 20])
    np.testing.assert_array_equal(values, [[3, 4, np.nan], [1, np.nan, 2]])
    assert layers_over_steps(run, Panel("z", "m/global/z/mean")) is None


def test_short_series_are_left_as_they_are():
    steps, values = np.arange(1500), np.full(1500, np.nan)
    kept = thin(steps, values)
    assert kept[0] is steps
    assert kept[1] is values


def test_thinning_keeps_peaks_and_the_first_value_that_is_not_finite():
    rng = np.random.default_rng(0)
    steps = np.arange(0, 1_000_000, 10)
    values = rng.standard_normal(100_000)
    values[54_321], values[12_345] = 50.0, -60.0
    values[12_300], values[77_777:] = np.inf, np.nan
    kept_steps, kept = thin(steps, values)
    assert len(kept) <= 1500
    assert np.nanmin(kept) == -60
    assert 50 in kept
    assert kept_steps[~np.isfinite(kept)][0] == 123_000
    assert (np.diff(kept_steps) > 0).all()
    np.testing.assert_array_equal(kept, values[kept_steps // 10])
