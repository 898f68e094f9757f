"""The bench on a mesh at toy size: spreading saves what the devices would repeat."""

from experiments.bench_sharded import Config, main


def test_a_row_comes_out():
    (row,) = main(Config(quick=True))
    assert float(row.measured.split("×")[0]) > 0
