"""A report says how many contracts hold, and which are broken where."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from stabmon.output.contracts import contract_line
from stabmon.output.verdict import story
from stabmon.runs.run import Run


def made(counts, *events):
    series = lambda x: (np.array([0, 50]), np.array([0.0, x]))
    metrics = {f"contracts/global/{name}/value": series(x) for name, x in counts.items()}
    return replace(Run("a", Path("a"), {}, metrics, (), ()), events=events)


EVENT = {
    **{"kind": "contract", "step": 50, "contract": "moves", "leaf": "norm", "since": 10},
    "sentence": "it does not move",
}


def test_the_line_counts_and_names():
    assert contract_line(made({})) == ""
    assert contract_line(made({"moves": 0, "rate": 0})) == "2 contracts hold."
    line = contract_line(made({"moves": 1, "rate": 0}, EVENT))
    assert line.startswith("1 contract holds; ")
    assert line.endswith("is broken: norm since step 10.")


def test_one_that_holds_again_is_not_broken_and_a_restore_is():
    assert contract_line(made({"moves": 0}, EVENT)) == "1 contract holds."
    line = contract_line(made({"moves": 0}, EVENT | {"contract": "restore"}))
    assert "“what is restored is what was saved” is broken: norm since step 10" in line


def test_the_story_tells_it():
    rows = story([made({"moves": 1}, EVENT)])
    assert rows == [{"step": 50, "what": "contract moves broken: norm", "why": "it does not move"}]
