"""Runs of the suites of benign changes and of faults, replayed: what is said of them, and what not.

Each file holds the judged metrics of one run of `experiments.benign` or `experiments.faults_suite`
(two layers, width 64, one seed), four digits a value; −inf stands for no sample.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stabmon.alarms.signatures import Fault
from stabmon.alarms.standard import standard_detectors
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.watcher import Watcher

RECORDED = Path(__file__).parent / "recorded"
ONSET = 500
HEALTHY = ("cosine", "restart", "lion", "context")


def samples(name):
    with np.load(RECORDED / f"{name}.npz") as held:
        steps, keys, values = held["steps"], [str(x) for x in held["keys"]], held["values"]
    for i, step in enumerate(steps):
        there = ~np.isneginf(values[:, i])
        yield int(step), {keys[j]: float(values[j, i]) for j in np.flatnonzero(there)}


@cache
def said(name):
    """Alarms, diagnoses and actions of the default alarms over a recorded run."""
    watcher = Watcher(standard_detectors(), Recovery())
    rows = [row for step, x in samples(name) for row in watcher.observe(step, x).events()]
    kinds = ("alarm", "diagnosis", "action")
    return {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_draws_neither_alarm_nor_advice(name):
    assert said(name) == {"alarm": [], "diagnosis": [], "action": []}


@pytest.mark.parametrize(
    ("name", "fault", "within"),
    [
        ("dirty", Fault.DATA, 200),
        ("shifted", Fault.DATA, 200),
        ("leak", Fault.REPEATED_DATA, 200),
        ("rate_zero", Fault.STILL, 50),
        ("attention", Fault.ATTENTION, 350),
    ],
)
def test_a_fault_is_named_soon_and_by_no_other_name(name, fault, within):
    told = said(name)
    assert told["alarm"][0]["step"] >= ONSET
    assert {row["fault"] for row in told["diagnosis"]} - {Fault.UNKNOWN} == {fault}
    named = next(row["step"] for row in told["diagnosis"] if row["fault"] == fault)
    assert named <= ONSET + within


def test_of_changed_data_a_smaller_rate_is_no_cure():
    assert said("dirty")["action"] == said("shifted")["action"] == said("rate_zero")["action"] == []


def test_without_the_size_of_updates_spectra_alone_name_nothing():
    watcher = Watcher(standard_detectors(), Recovery())
    hidden = ("update_norm", "update_ratio", "qk_over_vo")
    rows = []
    for step, values in samples("attention"):
        seen = {k: x for k, x in values.items() if not any(word in k for word in hidden)}
        rows += watcher.observe(step, seen).events()
    last = [row for row in rows if row["kind"] == "diagnosis"]
    assert [row for row in rows if row["kind"] == "alarm"]
    assert all(row["fault"] != Fault.ATTENTION for row in last)
