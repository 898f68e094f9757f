"""`Watch` around a stranger's loop: samples, alarms, incidents, resume, and what goes wrong."""

import json
import logging
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stabmon
from stabmon.quantities import HELD_OUT, LEARNING_RATE, LOSS
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run
from stabmon.runs.runlog import RunLog
from stabmon.watch.schedule import warmup_of
from tests.stabmon.watch.loop import CADENCES, build, init_params, make_step, run


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "clean"
    watch, tx, state = build(folder, config={"seed": 0})
    with watch:
        state = run(watch, tx, state, 60)
    return folder, watch, state


def test_a_clean_run_has_its_samples_and_no_alarm(clean):
    folder, watch, _ = clean
    found = load_run(folder)
    steps, losses = found.metrics[LOSS]
    assert steps.tolist() == list(range(60))
    assert np.isfinite(losses).all()
    assert found.metrics[LEARNING_RATE][1][0] == pytest.approx(0.003)
    assert "delta40/global/delta2/entropy/mean" in found.metrics
    assert found.events == ()
    assert (watch.exit_code, watch.step) == (0, 60)


def test_the_layout_tells_what_is_measured(tmp_path):
    watch = stabmon.Watch(tmp_path / "a", init_params())
    assert watch.monitor.router == 0
    with watch:
        pass


def test_a_fault_is_one_incident_with_its_name_and_the_callbacks_hear_of_it(tmp_path):
    heard = []
    watch, tx, state = build(
        tmp_path / "a", on_incident=[lambda change, found: heard.append((change.value, found))]
    )
    with watch:
        run(watch, tx, state, 60, gain=lambda step: 40.0 if step >= 40 else 1.0)
    rows = [row for row in load_run(watch.folder).events if row["kind"] == "incident"]
    assert rows[0]["change"] == "opened"
    assert {row["number"] for row in rows} == {1}
    assert 40 <= rows[0]["opened"] <= 45
    assert heard[0][0] == "opened"
    assert "since step" in heard[0][1].sentence()
    text = (watch.folder / "events.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_a_callback_that_raises_is_told_and_stops_nothing(tmp_path, caplog):
    def broken(change, found):
        raise RuntimeError("no route to host")

    watch, tx, state = build(tmp_path / "a", on_incident=[broken])
    with watch, caplog.at_level(logging.WARNING, logger="stabmon"):
        run(watch, tx, state, 60, gain=lambda step: 40.0 if step >= 40 else 1.0)
    assert watch.step == 60
    assert "no route to host" in caplog.text


def test_a_second_start_goes_on_with_the_folder(clean, tmp_path):
    watch, tx, state = build(tmp_path / "a", config={"seed": 0})
    with watch:
        state = run(watch, tx, state, 30)
    again, tx, _ = build(tmp_path / "a", config={"seed": 0})
    again.step = 30
    with again:
        run(again, tx, state, 60)
    whole, parts = load_run(clean[0]), load_run(tmp_path / "a")
    np.testing.assert_array_equal(whole.metrics[LOSS][1], parts.metrics[LOSS][1])


def test_another_configuration_is_refused(tmp_path):
    build(tmp_path / "a", config={"seed": 0})[0].journal.close()
    with pytest.raises(FileExistsError, match="another configuration"):
        build(tmp_path / "a", config={"seed": 1})


def test_two_watches_on_one_folder_are_refused(tmp_path):
    first, _, _ = build(tmp_path / "a")
    with first, pytest.raises(OSError, match=r"another|already|writes"):
        build(tmp_path / "a")


def test_saving_without_restoring_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected both"):
        stabmon.Watch(tmp_path / "a", init_params(), save=lambda step, state: None)


def test_a_missing_ring_is_an_error_that_says_so(tmp_path):
    import optax

    watch, _, state = build(tmp_path / "a")
    tx = optax.sgd(0.1)
    step = make_step(watch, tx)
    bare = state._replace(opt_state=tx.init(state.params))
    with watch, pytest.raises(ValueError, match="track_delta"):
        step(jnp.int32(0), bare, (jnp.ones((32, 8)), jnp.zeros(32, jnp.int32)), 1.0)


def test_beside_the_step_it_measures_what_is_due_and_else_nothing(tmp_path):
    watch, _, state = build(tmp_path / "a")
    with watch:
        assert watch.measure(3, state.params, state.opt_state, due=()) is None
        readings = watch.measure(10, state.params, state.opt_state, due=("weights",))
        watch.observe(10, readings)
    assert "weights/global/q/norm/mean" in load_run(watch.folder).metrics


def test_scalars_of_the_caller_are_kept_under_their_keys(tmp_path):
    watch, _, _ = build(tmp_path / "a")
    with watch:
        watch.observe(7, loss=2.0, held_out=jnp.float32(2.5), tokens=700, temperature=0.5)
    found = load_run(watch.folder)
    assert found.metrics[HELD_OUT][1].tolist() == [2.5]
    assert found.metrics["scalars/global/temperature/value"][1].tolist() == [0.5]
    assert read_jsonl(watch.folder / "metrics.jsonl")[0]["tokens"] == 700


class Late:
    """A number that is still being computed on the device."""

    def __init__(self):
        self.waited = False

    def is_ready(self):
        return False

    def __float__(self):
        self.waited = True
        return 1.0


def test_it_does_not_wait_for_the_device(tmp_path):
    watch, _, _ = build(tmp_path / "a")
    late = Late()
    watch.observe(0, loss=late)
    assert not late.waited
    assert load_run(watch.folder).metrics == {}
    watch.journal.drop()
    watch.journal.close()


def test_what_waits_is_written_when_the_loop_raises(tmp_path):
    watch, _, _ = build(tmp_path / "a")

    def train():
        with watch:
            watch.observe(0, loss=jnp.float32(2.0))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    found = load_run(watch.folder)
    assert found.metrics[LOSS][1].tolist() == [2.0]
    assert found.events[-1]["error"] == "RuntimeError: out of memory"


def test_sigterm_ends_the_run_with_its_samples(tmp_path):
    watch, _, _ = build(tmp_path / "a")

    def train():
        with watch:
            watch.observe(0, loss=jnp.float32(2.0))
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert load_run(watch.folder).metrics[LOSS][1].tolist() == [2.0]


def test_what_a_full_disk_refuses_waits_and_nothing_is_lost(tmp_path, monkeypatch, caplog):
    watch, _, _ = build(tmp_path / "a")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with watch, caplog.at_level(logging.ERROR, logger="stabmon"):
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "sample", full)
            watch.observe(0, loss=2.0)
            watch.observe(1, loss=3.0)
            assert (watch.journal.lost, watch.exit_code) == (2, 74)
        watch.observe(2, loss=4.0)
    assert caplog.text.count("No space left") == 1
    assert (watch.journal.lost, watch.exit_code) == (0, 0)
    assert load_run(watch.folder).metrics[LOSS][1].tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (None, 100),
        (1e-3, 0),
        (lambda s: min(s / 250, 1.0), 250),
        (lambda s: min(s / 40, 1.0) * 0.5 * (1 + np.cos(np.pi * min(s / 3000, 1))), 40),
        (lambda s: float(s), 100),
        (lambda s: float("nan"), 100),
    ],
)
def test_the_warm_up_is_read_off_the_schedule(schedule, steps):
    assert abs(warmup_of(schedule) - steps) <= 1


def test_the_journal_is_plain_json(clean):
    for line in (clean[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_measuring_changes_no_bit_of_the_run(clean, tmp_path):
    watch, tx, state = build(tmp_path / "a", config={"seed": 0})
    watch.monitor = stabmon.Monitor(watch.layout, delta=0, weights=0, activations=0, router=0)
    with watch:
        state = run(watch, tx, state, 60)
    jax.tree.map(np.testing.assert_array_equal, state.params, clean[2].params)


def test_a_step_at_which_nothing_is_due_writes_nothing(tmp_path):
    watch, tx, state = build(tmp_path / "a")
    watch.monitor = stabmon.Monitor(watch.layout, **CADENCES | {"symptoms": 10})
    with watch:
        run(watch, tx, state, 21)
    found = load_run(watch.folder)
    assert found.metrics[LOSS][0].tolist() == [0, 10, 20]
    assert len(read_jsonl(watch.folder / "metrics.jsonl")) == 3
    assert found.events == ()


def test_what_was_measured_in_the_step_and_beside_it_is_one_sample(tmp_path):
    watch, _, state = build(tmp_path / "a")
    with watch:
        parts = [
            watch.measure(0, state.params, state.opt_state, due=(tier,), loss=2.0)
            for tier in ("symptoms", "weights")
        ]
        watch.observe(0, *parts, None)
    (row,) = read_jsonl(watch.folder / "metrics.jsonl")
    assert {key.split("/")[0] for key in row["values"]} >= {"symptoms", "weights"}


def test_without_functions_of_the_callers_own_orbax_saves_and_restores(tmp_path):
    watch, tx, state = build(tmp_path / "a")
    with watch:
        state = run(watch, tx, state, 12)
        watch.checkpoint(state)
    again, tx, fresh = build(tmp_path / "a")
    with again:
        restored = again.resume(fresh)
        assert again.step == 12
        jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_the_layout_of_a_monitor_that_is_given_is_not_looked_for_again(tmp_path):
    params = {"blocks": {"0": {"mine": {x: jnp.ones((8, 8)) for x in "ab"}}}}
    rules = [stabmon.Rule(x, f"blocks/*/mine/{y}", "d (n h) -> n d h") for x, y in ("qa", "kb")]
    layout = stabmon.Layout("mine", tuple(rules), sizes=(("n", 2),))
    with stabmon.Watch(tmp_path / "a", params, monitor=stabmon.Monitor(layout)) as watch:
        assert watch.layout is layout
