"""Published faults: one of each way of planting is convicted, and a run without one is quiet."""

import pytest

from experiments.real_faults import Config, main, restores, trained
from experiments.support.published import CLEAN, FAULTS


@pytest.mark.parametrize(
    "fault", ["routed experts get no gradient", "a tied embedding's gradient in part"]
)
def test_a_fault_is_convicted_within_five_samples(fault):
    row = main(Config(only=fault, samples=7, save=False))[0]
    assert row.leaf.startswith(FAULTS[fault].leaf)
    assert row.samples is not None
    assert row.samples <= 5
    assert row.others == 0


def test_a_run_without_a_fault_breaks_nothing():
    assert trained(CLEAN["AdamW, warm-up"], 6) == []


def test_each_restore_is_told_and_names_its_leaf():
    rows = [(leaf, found) for _, _, leaf, found, _ in restores()]
    assert len(rows) == 6
    assert all(leaf in found for leaf, found in rows)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_convicted_within_five_samples(fault):
    row = main(Config(only=fault, save=False))[0]
    assert row.samples is not None
    assert row.samples <= 5
