"""The table of quantities and what the tiers emit are the same; alarms name the worst place."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stabmon
from optax_ext import skip_spikes, track_worst
from stabmon.alarms.standard import standard_detectors
from stabmon.metrics.jacobian import JacobianStats
from stabmon.monitor import forward, tiers
from stabmon.monitor.between import between_metrics
from stabmon.monitor.readings import aggregate
from stabmon.quantities import QUANTITIES, find, quantity_of, split_key, title_of
from stabmon.quantities.contracts import TITLES
from tests.stabmon import trees

# Given by the trainer, not by a tier of the monitor.
FROM_THE_HOST = {
    "evaluation/loss",
    "schedule/changed",
    "symptoms/update_per_rate",
    "schedule/learning_rate",
}
FROM_THE_HOST |= {f"contracts/{name}" for name in TITLES}
LAYERS, HEADS, EXPERTS, BATCH, CONTEXT, WIDTH = trees.L, trees.N, trees.E, 2, 8, trees.D
RANKS = {"none": 0, "layer": 1, "head": 2}


def intermediates():
    heads = jnp.zeros((LAYERS, HEADS))
    return {
        **dict.fromkeys(
            ("attention_entropy", "max_attention_logit", "sink_mass", "repeated_maximum"), heads
        ),
        "residual": jnp.zeros((LAYERS, BATCH, CONTEXT, WIDTH)),
        "tokens": jnp.zeros((BATCH, CONTEXT), jnp.int32),
        "router_logits": jnp.zeros((LAYERS, BATCH, CONTEXT, EXPERTS)),
        "dropped": jnp.zeros(LAYERS),
        "router_lm_gradient": jnp.zeros((LAYERS, EXPERTS)),
    }


def of_tree(tree, seen):
    """{monitor: {metric: array}} of every tier that reads parameters, on one tree."""
    layout = stabmon.find_layout(tree)
    scalar, layers = jnp.zeros(()), jnp.zeros(LAYERS)
    pairs, flag = layers[1:], scalar > 0
    stats = JacobianStats(layers, pairs, pairs, scalar, scalar, flag, layers, layers, flag)
    deltas = {50: tree, 200: tree}
    changes = tiers.delta_metrics(layout, tree, deltas)
    seeing_grads = track_worst(of="grad").init(tree)
    return {
        **{f"delta{lag}": metrics for lag, metrics in changes.items()},
        "weights": tiers.weight_metrics(layout, tree),
        "router": forward.router_metrics(layout, tree, seen, 2, 0.01),
        "symptoms": tiers.symptom_metrics(layout, tree, tree, tree, jnp.zeros(()))
        | between_metrics([skip_spikes(track_worst(loss=True)).init(tree), seeing_grads], 10),
        "jacobian": tiers.jacobian_metrics(stats),
        **forward.activation_tier(seen, 512, 0.5),
    }


@cache
def emitted():
    """{monitor/metric: number of axes} over trees that have every role between them."""
    found = {}
    for tree in (trees.scanned(moe=True, norm=True), trees.scanned(), trees.scanned_mla()):
        shapes = jax.eval_shape(of_tree, jax.tree.map(jnp.asarray, tree), intermediates())
        for monitor, metrics in shapes.items():
            for metric, x in metrics.items():
                quantity = find(monitor, metric)
                name = quantity.name if quantity else f"{monitor}/{metric}"
                found[name] = len(x.shape)
    return found


def test_every_key_that_a_tier_emits_is_registered():
    registered = {quantity.name for quantity in QUANTITIES}
    assert set(emitted()) - registered == set()


def test_every_registered_quantity_is_emitted():
    registered = {quantity.name for quantity in QUANTITIES}
    assert registered - set(emitted()) == FROM_THE_HOST


def test_each_has_as_many_places_as_it_says():
    known = {q.name: q for q in QUANTITIES}
    wrong = {name for name, axes in emitted().items() if RANKS[known[name].places] != axes}
    assert wrong == set()


def test_names_are_unique_and_titles_too():
    assert len({q.name for q in QUANTITIES}) == len({q.title for q in QUANTITIES})
    assert len({q.name for q in QUANTITIES}) == len(QUANTITIES)


def test_a_judged_place_is_kept_in_brief_with_what_is_judged():
    for quantity in QUANTITIES:
        if not quantity.judged or quantity.places == "none" or not quantity.brief:
            continue
        assert "worst_layer" in quantity.brief, quantity.name
        assert "worst_head" in quantity.brief or quantity.places == "layer", quantity.name


def test_an_unregistered_metric_is_refused():
    with pytest.raises(ValueError, match="weights/colour is not registered"):
        aggregate("weights", {"colour": jnp.zeros(3)}, lambda *_: True)


def values(quantity, level, worst, full):
    """One sample of a quantity, aggregated as the monitor does it."""
    heads = (4,) if quantity.places == "head" else ()
    x = np.full((3, *heads), level, np.float32)
    x[worst] = level * (2.0 if quantity.bad == "up" else 0.5)
    monitor = "delta50" if quantity.monitor == "delta" else quantity.monitor
    keep = lambda q, tail, by_layer: full or (not by_layer and tail in q.brief)
    keys, row = aggregate(monitor, {quantity.metric: jnp.asarray(x)}, keep)
    return dict(zip(keys, row.tolist(), strict=True))


PLACED = [q for q in QUANTITIES if q.judged and q.places != "none"]
CASES = [(q, full) for q in PLACED for full in (False, True) if full or q.brief]


@pytest.mark.parametrize(("quantity", "full"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_an_alarm_names_the_place_that_is_worst_on_its_bad_side(quantity, full):
    healthy = {"radial alignment": 0.01, "rank": 0.9}.get(quantity.evidence, 0.2)
    broken = 3e4 if quantity.bad == "up" else 1e-3
    before, after = (0, 0), (2, 3)
    if quantity.places == "layer":
        before, after = (0,), (2,)
    fine, bad = values(quantity, healthy, before, full), values(quantity, broken, after, full)
    detectors = standard_detectors()
    alarms = []
    for step in range(0, 1500, 10):
        sample = bad if step >= 900 else fine
        alarms += detectors.update(step, sample)
    own = [alarm for alarm in alarms if quantity_of(alarm.key) is quantity]
    assert own
    assert {alarm.step >= 900 for alarm in own} == {True}
    slow = [alarm for alarm in own if alarm.step > 900] or own
    head = 3 if quantity.places == "head" else None
    assert {(alarm.layer, alarm.head) for alarm in slow} == {(2, head)}


def test_a_key_is_split_and_titled():
    key = "delta50/layer_03/delta2/modes/p10"
    assert split_key(key) == ("delta50", "layer_03", "delta2/modes", "p10")
    assert [split_key(x) for x in ("a/global/mean", "a/other/b/mean", "loss")] == [None] * 3
    assert title_of("delta50/delta2/modes") == "Δ2 modes, lag 50"
    assert title_of("mine/own") == "mine/own"
