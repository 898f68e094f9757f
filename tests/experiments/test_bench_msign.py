"""The MSign bench at toy size: rows come out, and the errors in them are what they claim."""

from experiments.bench_msign import Config, flop_rows, method_rows


def test_method_rows_hold_their_target():
    row = next(method_rows(Config(quick=True)))
    assert row.met
    assert "newton_schulz" in row.measured


def test_one_application_at_the_llama_shape_stays_within_its_share_of_a_step():
    rows = [row for row in flop_rows(Config(quick=True)) if "LLaMA" in row.what]
    assert len(rows) == 2
    assert all(row.met for row in rows)
