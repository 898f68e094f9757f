"""Samples as a digest would give them, made by hand: two stacked leaves, a norm, moments."""

import numpy as np

from stabmon.contracts import Form
from stabmon.contracts.contract import Sample
from stabmon.contracts.parts import Leaf

LEAVES = (
    Leaf("layers/up", "float32", (2, 3, 4, 8), (0, 1), ("layer", "expert")),
    Leaf("layers/q", "float32", (2, 4, 4), (0,), ("layer",)),
    Leaf("norm", "float32", (4,)),
)
PARTS = {"layers/up": 6, "layers/q": 2, "norm": 1}


def healthy(step, leaves=LEAVES):
    """{(quantity, path): numbers} of a run in which everything moves."""
    values = {}
    for leaf in leaves:
        many = np.arange(np.prod(leaf.sizes, dtype=int), dtype=np.float32)
        for quantity, x in {
            "bits": 7 * step + many + 1,
            "gradient": 0.1 + 0 * many + 0.01 * np.sin(step),
            "update": 1e-3 + 0 * many,
            "size": 5e-4 + 0 * many,
            "bits of 0/mu": 3 * step + many + 1,
            "bits of 0/nu": 5 * step + many + 1,
        }.items():
            values[quantity, leaf.path] = np.asarray(x, np.float32)
    values["count", "0/count"] = np.array([step], np.float32)
    values["types", "parameter"] = np.array([1.0, 1.0, 1.0], np.float32)[: len(leaves)]
    values["loss", "loss"] = np.array([3.4], np.float32)
    values["spread", "norm"] = np.array([0.0], np.float32)
    values["rows", "batch"] = np.arange(8, dtype=np.float32) + 100 * step
    return values


def sample(step, values, rate=1e-3, unequal=(), leaves=LEAVES, **form):
    """A sample with these numbers."""
    form = Form(leaves, (), **{"vocabulary": 32} | form)
    return Sample(step, form, values, rate, unequal, rate)


def packed(values):
    """(row, blocks) from which a form unpacks `values`."""
    blocks = tuple((*key, len(x)) for key, x in values.items())
    return np.concatenate([*values.values()]), blocks


def run(judge, break_it=lambda step, values: values, steps=range(0, 100, 10), rate=1e-3, **form):
    """(contract, leaf, since, step) of every verdict of a run whose numbers are broken."""
    verdicts = []
    form = {"leaves": LEAVES, "vocabulary": 32} | form
    for step in steps:
        row, blocks = packed(break_it(step, healthy(step, leaves=form["leaves"])))
        declared = rate(step) if callable(rate) else rate
        found = judge.observe(step, row, Form(blocks=blocks, **form), declared, declared)[1]
        verdicts += [(x.contract, x.leaf, x.since, x.step) for x in found]
    return verdicts
