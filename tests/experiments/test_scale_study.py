"""The study: tables from rows, bytes from programs; slow, every program of a toy compiles."""

import jax
import pytest

from experiments import scale_study
from experiments.scale_study import (
    PARTS,
    Config,
    collectives,
    compile_program,
    figure,
    headline,
    study,
    tables,
)
from models.config import GPTConfig

TOY = GPTConfig(layers=2, model=64, heads=8, context=16, vocabulary=64, positions="rope")


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scale_study.PRESETS, "toy", TOY)
        return list(study(Config(models=("toy",))))


@pytest.mark.slow
def test_a_row_for_each_program(rows):
    assert [row["part"] for row in rows] == list(PARTS)
    assert {row["devices"] for row in rows} == {jax.device_count()}
    assert all(row["peak_bytes"] > 0 and row["flops"] > 0 for row in rows)


@pytest.mark.slow
def test_a_sampled_step_sends_more_and_msign_sends_matrices(rows):
    sent = {row["part"]: row["sent_bytes"] for row in rows}
    assert sent["symptoms"] >= sent["base"]
    # Two mesh axes, in and out, of two layers of four matrices, an eighth on each device.
    kinds = [{k: v["count"] for k, v in row["collectives"].items()} for row in rows]
    base, msign = kinds[0], kinds[PARTS.index("msign")]
    assert msign["all-to-all"] - base.get("all-to-all", 0) == 4


def test_a_step_of_the_toy_compiles_for_all_devices():
    compiled = compile_program(TOY, "base")
    assert compiled.cost_analysis()["flops"] > 0
    assert collectives(compiled.as_text())["all-reduce"]["bytes"] > 0


def test_collectives_are_counted_with_the_bytes_of_their_results():
    text = """
      %a = f32[2,3]{1,0} all-reduce(%x), channel_id=1
      %b = (bf16[4]{0}, s32[]) all-reduce-start(%x, %y), channel_id=2
      %c = f32[2,3]{1,0} all-reduce-done(%b)
      %d = f32[8]{0} all-to-all(%x), channel_id=3
      %e = f32[100]{0} add(%x, %y)
    """
    assert collectives(text) == {
        "all-reduce": {"count": 2, "bytes": 24 + 8 + 4, "largest": 24},
        "all-to-all": {"count": 1, "bytes": 32, "largest": 32},
    }


def made_rows(**peaks):
    """A row for each program: 100 bytes at peak where no other number is given."""
    return [
        {
            "model": "toy",
            "devices": 8,
            "part": part,
            "compile_seconds": 2.0 + i,
            "peak_bytes": peaks.get(part, 100),
            "sent_bytes": 2**20 * (i + 1),
        }
        for i, part in enumerate(PARTS)
    ]


def test_tables_and_headline():
    rows = made_rows()
    assert tables(rows).count("| toy | 8 |") == 2
    # Sent besides the base: by the monitors' program and the symptoms' difference, by MSign.
    assert "| toy | 8 | 0 MiB | +0.0% | +0.0% | 1 MiB | 4 MiB | 3 MiB |" in tables(rows)
    assert "| toy | 8 | 2.0 s | 3.0 s | 4.0 s | 5.0 s |" in tables(rows)
    traces = figure(rows).to_dict()["data"]
    assert [(x["name"], x["xaxis"]) for x in traces if "monitors" in x["name"]] == [
        ("toy, monitors", "x"),
        ("toy, monitors", "x2"),
    ]
    assert list(traces[-1]["y"]) == [5.0]
    assert headline(rows).startswith("peak memory met: +0.0% at 8 devices [< 5 %]")
    more = made_rows(monitors=150)
    assert headline(more).startswith("peak memory not met: +50.0%")
    assert "| toy | 8 | 0 MiB | +50.0% |" in tables(more)
