"""Runs replayed against clean ones of other seeds."""

from dataclasses import replace

import numpy as np
import pytest

from stabmon.output.comparison import compare, learn_reference
from stabmon.runs.run import load_run


@pytest.fixture(scope="module")
def runs(demo_runs):
    """Three clean runs that differ by noise, and the faulty one."""
    clean, faulty = (load_run(folder) for folder in demo_runs)
    rng = np.random.default_rng(0)
    noisy = lambda x: x * (1 + 0.02 * rng.standard_normal(x.shape))
    copies = [
        replace(
            clean,
            name=f"clean{i}",
            metrics={k: (s, noisy(x)) for k, (s, x) in clean.metrics.items()},
        )
        for i in range(3)
    ]
    return [*copies, faulty]


def test_the_fault_is_seen_first_in_the_increments_and_last_in_the_loss(runs):
    reference = learn_reference(runs[:2])
    faulty, clean = compare([runs[3], runs[2]], reference)
    assert faulty.onset == 300
    names = [row.monitor for row in faulty.table if row.first is not None]
    assert names[0] == "Δ2 modes, lag 50"
    assert names[-1] == "Loss"
    assert faulty.table[0].lead > 500
    assert [row.monitor for row in clean.table if row.first is not None] == []


def test_levels_of_a_seed_are_judged_by_the_runs_own_window(runs):
    bands = learn_reference(runs[:2], (100, 300)).bands
    judged = {key: band.judged for key, band in bands.items()}
    assert judged["attention/global/entropy/mean"] == "own"
    assert judged["weights/global/q/stable_rank/mean"] == "own"
    assert judged["symptoms/global/grad_norm/value"] == "reference"
    assert judged["delta50/global/delta2/modes/p10"] == "reference"


def test_one_clean_run_is_too_few(runs):
    with pytest.raises(ValueError, match="--reference: a spread needs at least two clean runs"):
        learn_reference(runs[:1])


def test_one_clean_run_given_twice_is_refused(runs):
    with pytest.raises(ValueError, match="--reference: clean0 is given twice"):
        learn_reference([runs[0], runs[1], runs[0]])


def test_a_run_does_not_judge_itself(runs):
    with pytest.raises(ValueError, match="run clean0 is in the reference: it would judge itself"):
        compare(runs[:1], learn_reference(runs[:2]))


def test_runs_without_a_common_metric_are_refused(runs):
    empty = replace(runs[0], metrics={})
    with pytest.raises(ValueError, match="have no metric in common"):
        learn_reference([runs[1], empty])


def test_a_run_without_the_metrics_of_the_reference_is_refused(runs):
    with pytest.raises(ValueError, match="run faulty has none of the reference's metrics, such as"):
        compare([replace(runs[3], metrics={})], learn_reference(runs[:2]))
