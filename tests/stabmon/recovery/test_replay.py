"""A recorded run replayed: the samples in order, and what the alarms say about them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stabmon.alarms.standard import standard_detectors
from stabmon.recovery.ladder import Policy
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.replay import has_qk_norm, replay_events
from stabmon.recovery.watcher import Watcher
from stabmon.runs.run import Run
from stabmon.runs.samples import samples
from tests.stabmon.alarms.streams import GRADIENT, LOSS, RADIAL, UPDATE, stream


def recorded(rows):
    """A run whose log holds the rows."""
    series = {}
    for step, values in rows:
        for key, value in values.items():
            series.setdefault(key, []).append((step, value))
    metrics = {
        key: (np.array([s for s, _ in x], np.int64), np.array([v for _, v in x]))
        for key, x in series.items()
    }
    return Run("r", Path("r"), {}, metrics, (), ())


def test_the_samples_of_a_run_come_back_in_order_each_with_its_own_keys():
    rows = list(stream(0, 200))
    assert list(samples(recorded(rows))) == rows


def test_a_replay_says_what_a_watcher_says_while_the_run_goes_on():
    rows = list(stream(0, 1400, 800, {UPDATE: 8.0, GRADIENT: 9.0, LOSS: 1.5}))
    watcher = Watcher(standard_detectors(), Recovery())
    live = [row for step, values in rows for row in watcher.observe(step, values).events()]
    assert replay_events(recorded(rows)) == live
    order = ["alarm", "diagnosis", "incident", "action"]
    places = [(x["step"], order.index(x["kind"])) for x in live]
    assert places == sorted(places)
    assert {x["kind"] for x in live} == set(order)
    assert live[-1]["step"] >= 800


def test_a_clean_run_has_no_events():
    assert replay_events(recorded(stream(0, 1400))) == []


def test_a_diagnosis_is_said_once():
    rows = recorded(stream(0, 1400, 800, {UPDATE: 8.0}))
    assert [x["fault"] for x in replay_events(rows) if x["kind"] == "diagnosis"] == [
        "learning rate"
    ]


def test_whether_there_is_a_qk_norm_stands_in_the_configuration():
    run = recorded(stream(0, 20))
    assert not has_qk_norm(run)
    assert has_qk_norm(replace(run, config={"model": {"qk_norm": True}}))


def test_a_run_with_normalised_queries_is_replayed_as_one():
    rows = recorded(stream(0, 1400, 600, {RADIAL: -3.0}))
    normed = replace(rows, config={"model": {"qk_norm": True}})
    alarms = lambda run: {x["key"] for x in replay_events(run) if x["kind"] == "alarm"}
    assert RADIAL in alarms(rows)
    assert alarms(normed) == set()


def test_what_is_over_cannot_be_acted_on():
    watcher = Watcher(standard_detectors(), Recovery(Policy(act=True)))
    with pytest.raises(ValueError, match="cannot be acted on"):
        replay_events(recorded(stream(0, 20)), watcher)
