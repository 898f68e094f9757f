"""What happens between samples is in the next one, and alarms where steps are lost."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
import stabmon
from stabmon.alarms.detectors.counts import Rise
from stabmon.alarms.standard import standard_detectors
from stabmon.monitor.between import between_metrics
from tests.models.quick import quick_jit

PARAMS = {"layers": {"attn": {x: {"kernel": jnp.ones((1, 4, 2, 2))} for x in "qk"}}}
SKIPPED = "symptoms/global/skipped/value"


def run(tx, steps, scale, loss=lambda i: 1.0):
    """Samples of the symptoms, each 10 steps, of gradients of the scales given."""
    layout = stabmon.find_layout(PARAMS)
    monitor = stabmon.Monitor(layout, router=0, delta=0, activations=0, weights=0, symptoms=10)

    @quick_jit
    def step(i, state, factor, loss):
        readings = monitor(i, PARAMS, state, loss=loss)
        grads = jax.tree.map(lambda x: x * factor, PARAMS)
        return readings, tx.update(grads, state, PARAMS, value=loss)[1]

    state, found = tx.init(PARAMS), {}
    for i in range(steps):
        readings, state = step(i, state, scale(i), jnp.float32(loss(i)))
        if i % 10 == 0:
            found[i] = readings.flatten()
    return found


def test_a_spike_and_a_nan_between_samples_are_in_the_next():
    chain = optax.chain(optax_ext.track_worst(10, of="grad", loss=True), optax.sgd(0.1))
    scale = lambda i: {3: 50.0, 14: jnp.nan}.get(i, 1.0)
    found = run(chain, 41, scale, lambda i: 9.0 if i == 17 else 2.0)
    norm = [found[i]["symptoms/global/worst_grad_norm/value"] for i in (0, 10, 20, 40)]
    assert norm == pytest.approx([0, 50 * 32**0.5, 50 * 32**0.5, 32**0.5])
    loss = [found[i]["symptoms/global/worst_loss/value"] for i in (10, 20, 40)]
    assert loss == [2.0, 9.0, 2.0]
    broken = [found[i]["symptoms/global/nonfinite_steps/value"] for i in (10, 20, 40)]
    assert broken == [0, 1, 1]


@pytest.mark.parametrize("wrap", [optax_ext.skip_spikes, lambda tx: optax.apply_if_finite(tx, 99)])
def test_steps_that_an_optimizer_skips_alarm(wrap):
    """70 of 100 steps have no finite gradient, and none of those that are sampled."""
    found = run(wrap(optax.sgd(0.1)), 101, lambda i: jnp.nan if i % 10 > 2 else 1.0)
    assert [found[i][SKIPPED] for i in (0, 10, 100)] == [0, 7, 70]
    detectors = standard_detectors()
    alarms = [alarm for step, values in found.items() for alarm in detectors.update(step, values)]
    assert [(alarm.step, alarm.rule) for alarm in alarms if alarm.key == SKIPPED] == [(10, "count")]


def test_no_wrapper_no_count():
    assert between_metrics(optax.adam(0.1).init(PARAMS), 10) == {}


def test_a_window_that_forgets_is_left_out():
    state = optax_ext.track_worst(5).init(PARAMS)
    assert between_metrics(state, 5).keys() == {"nonfinite_steps", "worst_update_norm"}
    assert between_metrics(state, 10).keys() == {"nonfinite_steps"}


def test_two_that_see_the_same_are_refused():
    state = [optax_ext.track_worst(10).init(PARAMS)] * 2
    with pytest.raises(ValueError, match="two track_worst"):
        between_metrics(state, 10)


def test_loss_is_missed_where_it_is_to_be_tracked():
    tx = optax_ext.track_worst(loss=True)
    with pytest.raises(ValueError, match="loss=True, but `update` got no value"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("options", [{"every": 0}, {"of": "loss"}])
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match="track_worst: "):
        optax_ext.track_worst(**options)


def test_a_counter_that_falls_begins_anew():
    detector = Rise("count", ".*", limit=2)
    totals = [5.0, 5.0, 0.0, 2.0, 2.0, 9.0]
    raised = [len(detector.update(600 * i, {"x": total})) for i, total in enumerate(totals)]
    assert raised == [1, 0, 0, 0, 0, 1]
