"""The rescue experiment at toy size: every arm is a run, and a finished one is not run again."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import experiments.msign_rescue as rescue
import stabmon
from experiments.loop.optimizer import OptimizerConfig, make_optimizer
from experiments.loop.session import identity
from experiments.loop.step import MonitorConfig, make_step
from experiments.msign_rescue import Config, main, plan, settings_of
from experiments.support import recorded
from experiments.support.jacobians import block_jacobians, least
from experiments.support.recorded import settings_row
from experiments.support.rescue import ARMS, CONFIGURATIONS
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from models.gpt import apply, init_params

MODEL = GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash")
TOY = Config(configurations=("fault",), arms=("clean", "adamw"), seeds=(0,), steps=2, model=MODEL)


@pytest.mark.slow
def test_rows_are_written_once_and_read_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rescue, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(rescue, "EVERY", 1)
    config = dataclasses.replace(TOY, runs=tmp_path)
    first = main(config)
    assert [row["arm"] for row in first.rows] == ["clean", "adamw"]
    assert [at["step"] for at in first.rows[0]["jacobian"]] == [1]
    assert "| adamw |" in capsys.readouterr().out
    assert first.figure.stat().st_size > 1_000_000
    monkeypatch.setattr(recorded, "train", None)
    again = main(config)
    assert [row["loss"] for row in again.rows] == [row["loss"] for row in first.rows]
    assert len(first.file.read_text().splitlines()) == 2


def test_the_plan_has_the_seeds_of_an_arm_in_a_row_and_only_arms_of_the_configuration():
    rows = plan(Config(configurations=("fault", "rate"), seeds=(3, 4)))
    assert rows[:2] == [("fault", "clean", 3), ("fault", "clean", 4)]
    counts = [len(CONFIGURATIONS[name].arms) for name in ("fault", "rate")]
    assert len(rows) == len(set(rows)) == 2 * sum(counts)
    assert {arm for name, arm, _ in rows if name == "rate"} == set(CONFIGURATIONS["rate"].arms)


def test_clean_is_the_same_program_unarmed_or_the_other_matrices_rate():
    config = Config()
    clean, faulty = (settings_of(config, "fault", arm, 0) for arm in ("clean", "adamw"))
    assert dataclasses.replace(clean, armed=True, name=faulty.name) == faulty
    assert settings_of(config, "rate", "clean", 0).optimizer.rates == (("all", 3e-3),)
    every = [settings_of(config, "fault", arm, 0) for arm in ARMS]
    assert len({run.name for run in every}) == len(ARMS)
    assert len({str(settings_row(run)) for run in every}) == len(ARMS)


def test_the_window_is_whole_periods_and_no_evaluation_follows_a_period():
    for period in (10, 50, 100, 300, 1000):
        assert period > rescue.WINDOW or rescue.WINDOW % period == 0
        assert np.gcd(period, rescue.EVALUATE_EVERY) == 1


def test_a_run_that_does_without_later_options_is_what_it_was():
    assert not {"rates", "base", "qk_clip"} & set(identity(TrainConfig())["optimizer"])


@pytest.mark.slow
def test_qk_clip_holds_the_largest_logit_of_the_batch():
    model = dataclasses.replace(MODEL, std=2.0)
    quiet = MonitorConfig(delta=0, activations=0, weights=0, symptoms=0)
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, 256)

    def largest(clip):
        optimizer = OptimizerConfig(learning_rate=0.0, weight_decay=0.0, qk_clip=clip)
        init, step, _ = make_step(model, optimizer, quiet, None)
        state, *_ = step(init(0), tokens, jnp.float32(1), due=())
        seen = apply(model, state.params, tokens[:, :-1], capture=True)[1]
        return float(seen["max_attention_logit"].max())

    assert largest(None) > 30
    assert abs(largest(3.0) - 3) < 1e-3


@pytest.mark.slow
def test_jacobians_are_those_of_the_blocks_the_model_runs():
    model = dataclasses.replace(MODEL, layers=2, context=4, embedding_std=1.0)
    params = init_params(model, 0)
    tokens = jnp.arange(4)[None]
    found = least(block_jacobians(model, params, tokens))
    stream = params["embed"]["embedding"][tokens[0]] + params["positions"]["embedding"]
    one = dataclasses.replace(model, layers=1, vocabulary=4)

    def block(index, x):
        given = params | {"embed": {"embedding": x}, "positions": {"embedding": 0 * x}}
        given["layers"] = jax.tree.map(lambda leaf: leaf[index : index + 1], params["layers"])
        return apply(one, given, tokens, capture=True)[1]["residual"][0, 0]

    norms, ways = [], 1e-2 * jnp.eye(64).reshape(64, 4, 16)
    for index in range(2):
        moved = jax.jit(jax.vmap(lambda way, i=index, x=stream: block(i, x + way)))
        slopes = np.asarray(moved(ways) - moved(-ways), np.float64).reshape(64, 64) / 2e-2
        norms.append(np.linalg.norm(slopes, 2))
        stream = block(index, stream)
    assert abs(found["M"] / min(norms) - 1) < 1e-3
    assert abs(found["aM"] - found["a"] * found["M"]) < 1e-4


@pytest.mark.parametrize("base", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_rates_scale_the_updates_of_their_group_and_nothing_else(base):
    params = init_params(MODEL, 0)
    layout = stabmon.find_layout(params)

    def updates(rates) -> Any:
        tx = make_optimizer(OptimizerConfig(warmup=1, rates=rates, base=base), layout)
        state, found = tx.init(params), None
        for _ in range(2):
            found, state = tx.update(jax.tree.map(jax.numpy.ones_like, params), state, params)
        return found

    plain, scaled = updates(()), updates((("attention", 3e-3),))
    ratio = lambda *path: _at(scaled, path) / _at(plain, path)
    assert abs(ratio("layers", "attn", "q", "kernel") - 3).max() < 1e-5
    assert abs(ratio("layers", "mlp", "up", "kernel") - 1).max() < 1e-6
    assert abs(ratio("embed", "embedding") - 1).max() < 1e-6


def _at(tree, path):
    for name in path:
        tree = tree[name]
    return tree
