"""The study on a toy: every program compiles, and the tables follow from the rows."""

import jax
import pytest

from experiments import scale_study
from experiments.scale_study import PARTS, Config, figure, headline, study, tables
from models.config import GPTConfig

TOY = GPTConfig(layers=2, model=64, heads=8, context=16, vocabulary=64, positions="rope")


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scale_study.PRESETS, "toy", TOY)
        return list(study(Config(models=("toy",))))


def test_a_row_for_each_program(rows):
    assert [row["part"] for row in rows] == list(PARTS)
    assert {row["devices"] for row in rows} == {jax.device_count()}
    assert all(row["peak_bytes"] > 0 and row["flops"] > 0 for row in rows)


def test_a_sampled_step_sends_more_and_msign_sends_matrices(rows):
    sent = {row["part"]: row["sent_bytes"] for row in rows}
    assert sent["symptoms"] >= sent["base"]
    # Two mesh axes, in and out, of two layers of four matrices, an eighth on each device.
    kinds = [{k: v["count"] for k, v in row["collectives"].items()} for row in rows]
    base, msign = kinds[0], kinds[PARTS.index("msign")]
    assert msign["all-to-all"] - base.get("all-to-all", 0) == 4


def test_tables_and_headline(rows):
    assert tables(rows).count("| toy | 8 |") == 2
    traces = figure(rows).to_dict()["data"]
    assert [(x["name"], x["xaxis"]) for x in traces if "monitors" in x["name"]] == [
        ("toy, monitors", "x"),
        ("toy, monitors", "x2"),
    ]
    assert traces[-1]["y"] == [rows[-1]["compile_seconds"]]
    calm = [row | {"peak_bytes": 100, "compile_seconds": 2.0} for row in rows]
    assert headline(calm).startswith("peak memory met: +0.0% at 8 devices [< 5 %]")
    more = [row | {"peak_bytes": 150 if row["part"] == "monitors" else 100} for row in calm]
    assert headline(more).startswith("peak memory not met: +50.0%")
    assert "| toy | 8 | 0 MiB | +50.0% |" in tables(more)
