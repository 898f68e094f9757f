"""The rescue experiment at toy size: every arm is a run, and a finished one is not run again."""

import dataclasses

import jax
import pytest

import experiments.msign_rescue as rescue
import stabmon
from experiments.msign_rescue import ARMS, MAIN, Config, main, markdown, plan, settings_of
from experiments.session import identity
from experiments.step import OptimizerConfig, make_optimizer
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from models.gpt import init_params

MODEL = GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash")
TOY = Config(
    configurations=("fault",),
    arms=("clean", "adamw"),
    seeds=(0,),
    other_seeds=(0,),
    steps=1,
    model=MODEL,
)


def test_rows_are_written_once_and_read_again(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(TOY, runs=tmp_path)
    first = main(config)
    assert [row["arm"] for row in first.rows] == ["clean", "adamw"]
    assert "| adamw |" in capsys.readouterr().out
    assert first.figure.stat().st_size > 1_000_000
    monkeypatch.setattr(rescue, "train", None)
    again = main(config)
    assert [row["loss"] for row in again.rows] == [row["loss"] for row in first.rows]
    assert len(first.file.read_text().splitlines()) == 2


def test_the_plan_has_every_seed_of_the_main_arms_first():
    config = Config(configurations=("fault", "rate"), seeds=(3, 4), other_seeds=(5,))
    rows = plan(config)
    assert len(rows) == 2 * (2 * len(MAIN) + len(ARMS) - len(MAIN))
    assert {seed for _, arm, seed in rows if arm not in MAIN} == {5}
    assert all(arm in MAIN for _, arm, _ in rows[: 4 * len(MAIN)])


def test_clean_is_the_same_program_unarmed_or_the_other_matrices_rate():
    config = Config()
    clean, faulty = (settings_of(config, "fault", arm, 0) for arm in ("clean", "adamw"))
    assert dataclasses.replace(clean, armed=True, name=faulty.name) == faulty
    assert settings_of(config, "rate", "clean", 0).optimizer.rates == (("all", 3e-3),)
    assert len({settings_of(config, "fault", arm, 0).name for arm in ARMS}) == len(ARMS)


def test_the_table_compares_with_the_clean_run_of_the_seed():
    numbers = dict.fromkeys(("perplexity", "grad_max", "max_logit", "stable_rank"), 1.0)
    rows = [
        {"arm": arm, "seed": seed, "loss": loss} | numbers
        for arm, seed, loss in (("clean", 0, 2.0), ("clean", 1, 4.0), ("x", 0, 3.0), ("x", 1, 3.0))
    ]
    assert "| x | 3.00, 3.00 | +50.0 %, -25.0 % |" in markdown(rows)


def test_a_run_that_does_without_rates_is_what_it_was():
    assert not {"rates", "base"} & set(identity(TrainConfig())["optimizer"])


@pytest.mark.parametrize("base", ["adamw", "muon"])
def test_rates_scale_the_updates_of_their_group_and_nothing_else(base):
    params = init_params(MODEL, 0)
    layout = stabmon.find_layout(params)

    def updates(rates):
        tx = make_optimizer(OptimizerConfig(warmup=1, rates=rates, base=base), layout)
        state = tx.init(params)
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
