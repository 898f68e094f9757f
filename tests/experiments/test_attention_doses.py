"""The dose experiment at toy size: two arms trained, judged and shown; the judge on made runs."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.attention_doses import (
    Config,
    figure,
    headline,
    main,
    settings_of,
    tables,
    train_config,
)
from experiments.loop.step import make_step
from experiments.support import recorded
from experiments.support.attention import ARMS, DOSES, MODELS, MONITORS, SPECTRA, clean_arm
from experiments.support.recorded import key
from experiments.train import Result
from models.config import GPTConfig
from stabmon.quantities import HELD_OUT
from stabmon.runs.runlog import RunLog

TOY = Config(
    arms=("7/0",),
    seeds=(0,),
    more_seeds=(10, 11),
    onset=110,
    steps=400,
    base=dataclasses.replace(
        DOSES, model=GPTConfig(layers=1, model=8, heads=2, context=8, backend="flash")
    ),
    window=(60, 110),
)
KEYS = {key for key, _ in MONITORS.values()} | set(SPECTRA.values())
FALLS = "delta200/global/delta2/modes/p10"


def made_up(settings):
    """A run without training: a level for each metric, noise by seed, Δ2 that falls at a fault."""
    rng = np.random.default_rng(settings.seed)
    folder = settings.runs / settings.name
    with RunLog.open(folder, {"seed": settings.seed}) as log:
        for step in range(0, settings.steps, 20):
            values = {name: 10 + rng.normal(0, 0.1) for name in sorted(KEYS | {HELD_OUT})}
            values["delta200/global/delta2/modes/worst_layer"] = 0.0
            if settings.armed and step > settings.fault.onset:
                values[FALLS] -= 0.02 * (step - settings.fault.onset)
            log.sample(step, values, tokens=step)
        log.event("finished", settings.steps, loss=1.0, held_out=1.0)
    return Result(folder, settings.steps, 1.0, 1.0)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    base = dataclasses.replace(TOY.base, runs=tmp_path_factory.mktemp("doses"))
    config = dataclasses.replace(TOY, base=base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "train", made_up)
        yield config, main(config)


def row_of(arm, seed, firsts, **more):
    """A row as tables see it."""
    names = ("Δ2 spectrum", "gradient norm", "held-out loss", "training loss")
    spectrum = [firsts[0], -7.0, 2, 100]
    row = {
        "arm": arm,
        "clean": "clean",
        "seed": seed,
        "steps": 2000,
        "firsts": dict(zip(names, firsts, strict=True)),
        "spectra": {"200, 2, p10": spectrum},
        "default": {"alarms": [], "early": 0, "first": 550, "loss": 1100, "judged": 1700},
        "loss": 2.0,
        "course": [[0, 40], [0.0, -6.0]],
        "gap": 0.2,
        "apart": 900,
        "worst_layers": [1, 1, 1, 0],
        "settings": {"onset": 300, "layers": 2, "seed": seed},
    }
    return row | more


NEVER = (None, None, None, None)
ROWS = [
    row_of("clean", 5, NEVER),
    row_of("clean", 6, NEVER),
    row_of("7/0", 0, (600, 700, 900, 1600)),
    row_of("7/0", 1, (500, 720, 1100, None)),
    row_of("6/0", 0, (700, 1300, 1500, None)),
    row_of("6/0", 1, (800, 1500, None, None)),
]


def test_every_arm_is_judged_and_a_second_time_nothing_is_measured(toy, monkeypatch):
    config, result = toy
    assert [(r["arm"], r["seed"]) for r in result.rows] == [
        ("clean", 0),
        ("clean", 10),
        ("clean", 11),
        ("7/0", 0),
    ]
    before = result.file.read_bytes()
    monkeypatch.setattr(recorded, "train", None)
    assert main(config).rows == result.rows
    assert result.file.read_bytes() == before


def test_a_row_says_by_whom_it_was_judged_and_what_fell(toy):
    config, result = toy
    row = result.rows[-1]
    assert key(row["settings"]) == key(settings_of(config, "7/0", 0))
    assert row["settings"]["judged_by"] == [10, 11]
    assert len(row["spectra"]) == 18
    fell = row["spectra"]["200, 2, p10"]
    assert fell[0] == row["firsts"]["Δ2 spectrum"] < 250
    assert fell[1] < -5
    assert row["spectra"]["50, 1, mean"][0] is None
    assert row["default"]["judged"] == 380 - 110
    assert row["gap"] == 0.0
    assert set(row["worst_layers"]) == {0}


def test_a_run_measures_what_is_judged():
    settings = train_config(TOY, "7/0", 0)
    init, step, monitor = make_step(
        settings.model, settings.optimizer, settings.monitor, settings.fault
    )
    tokens = jax.ShapeDtypeStruct((4, 9), np.int32)
    due = monitor.due(0)
    state = jax.eval_shape(init, 0)
    _, readings, _ = jax.eval_shape(
        lambda state, tokens: step(state, tokens, np.float32(1), due=due), state, tokens
    )
    emitted = {key for _, keys in readings.keys for key in keys}
    assert KEYS - {HELD_OUT} <= emitted
    assert "delta200/global/delta2/modes/worst_layer" in emitted


def test_tables_and_figure_of_what_was_measured(toy):
    _, result = toy
    text = tables(result.rows)
    assert "| 7/0 | 0 | 400 |" in text
    assert "| 200 | 2 | p10 |" in text
    assert "| 100 % |" in text
    assert result.figure.stat().st_size > 1_000_000


def test_every_model_has_a_clean_arm():
    assert {clean_arm(arm) for arm in ARMS} == {"clean", *(f"clean, {name}" for name in MODELS)}


def test_leads_are_counted_from_the_onset_and_bounds_are_marked():
    text = tables(ROWS)
    arm = next(x for x in text.splitlines() if x.startswith("| 7/0 | 0, 1 |"))
    assert (
        "| 300, 200 | 100, 220 | 300, 600 | 1000, > 1500 | 250, 250 | 550, 550 | 350, 550 |" in arm
    )
    assert arm.startswith("| 7/0 | 0, 1 | 2000 | +0.20, +0.20 | 600, 600 | 300, 200 |")
    assert arm.endswith("| 75 % |")
    assert "| held-out loss | 1000 (900–1100) | 1500, 1 never |" in text
    assert (
        "| 200 | 2 | p10 | 550 (500–600) | -7.0 | 750 (700–800) | -7.0 | 2.00 % | 0 of 2 |" in text
    )


def test_the_headline_takes_the_worst_seed_of_the_mild_arm():
    assert headline(ROWS).startswith(
        "reproduces: default alarms lead the loss's by 28 % (28 to 28) of the run at a mild dose, "
        "0 false ones in 3,400 clean steps"
    )
    assert headline(ROWS).endswith("in 12 of 12 comparisons")
    default = ROWS[-1]["default"] | {"loss": 900}
    short = [*ROWS[:-1], ROWS[-1] | {"default": default}]
    assert headline(short).startswith(
        "partly: default alarms lead the loss's by 22 % (18 to 28) of the run"
    )
    late = [row_of("7/0", 1, (800, 720, 1100, None)) if r["arm"] == "7/0" else r for r in ROWS]
    assert headline(late).startswith("partly: ")
    assert "in 10 of 12 comparisons" in headline(late)
    assert headline(ROWS[:4]) == "partly: 6/0 was not run"


def test_false_alarms_are_named_and_spoil_the_verdict():
    default = ROWS[0]["default"] | {"alarms": ["router surge 400"]}
    rows = [ROWS[0] | {"default": default}, *ROWS[1:]]
    assert "1 false ones in 3,400 clean steps" in headline(rows)
    assert headline(rows).startswith("partly: ")
    assert "`router surge 400` (clean, seed 5)" in tables(rows)


def test_the_figure_has_a_line_for_each_run_and_one_name_for_all_clean_ones():
    traces = figure(ROWS).to_dict()["data"]
    assert len(traces) == len(ROWS)
    shown = [x["name"] for x in traces if x["showlegend"]]
    assert sorted(shown) == sorted({"clean" if r["arm"] == r["clean"] else r["arm"] for r in ROWS})
