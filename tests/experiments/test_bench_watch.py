"""The benchmark of Watch runs and says all four of its rows."""

import pytest

from experiments.bench_watch import Config, main


@pytest.mark.slow
def test_it_says_all_four_rows():
    rows = main(Config(steps=50, first=11))
    assert [row.target for row in rows] == ["≤ 0.5 %", "≤ 1 %", "≤ 2 s", "≤ 1 ms"]
    assert all(row.met is not None for row in rows)
