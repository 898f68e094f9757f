"""Layouts against the real packages: what they make, and what they compute from it."""

import json
from pathlib import Path

import pytest

from tests.environments import run_with

SCRIPTS = Path(__file__).parent / "packages"
CPU_TORCH = "torch==2.13.0+cpu"


def judged(output):
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"model"')]
    return {row["model"]: row for row in rows}


@pytest.mark.slow
def test_queries_and_keys_of_transformers_are_those_that_it_computes():
    requirements = ("transformers==5.24.0", CPU_TORCH)
    rows = judged(run_with("transformers", requirements, SCRIPTS / "transformers_heads.py"))
    assert len(rows) == 32
    assert {x: row for x, row in rows.items() if not row["difference"] < 1e-5} == {}
    assert rows["gemma3_text"]["layout"] == "Hugging Face Gemma"
    assert rows["phi"]["layout"] == "Hugging Face Phi"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "requirements", "models"),
    [
        ("tunix", ("google-tunix==0.1.7",), 3),
        ("easydel", ("easydel==0.3.0", "pillow", CPU_TORCH), 4),
        ("equinox", ("equinox==0.13.8", "flax"), 2),
    ],
)
def test_heads_in_the_trees_of_jax_libraries_are_those_of_their_modules(
    package, requirements, models
):
    rows = judged(run_with(package, requirements, SCRIPTS / "jax_trees.py", package))
    assert len(rows) == models
    assert all(row["difference"] == 0 for row in rows.values())
