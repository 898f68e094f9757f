"""The README's example runs as it stands, and is as short as it says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parent.parent


def blocks():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_example_runs_and_measures_the_increment():
    namespace = {}
    exec(compile(blocks()[0], "README.md", "exec"), namespace)
    values = namespace["values"]
    assert values["delta20/global/delta2/effective_rank/p10"] > 1
    assert values["symptoms/global/loss/value"] > 1


def test_the_layout_example_runs():
    import stabmon

    namespace = {"stabmon": stabmon}
    exec(compile(blocks()[1], "README.md", "exec"), namespace)
    assert namespace["layout"].rules[0].rank == 3


def test_the_msign_example_runs():
    namespace = {}
    exec(compile(blocks()[2], "README.md", "exec"), namespace)
    params = {"layers": {"attn": {name: {"kernel": jnp.ones((1, 4, 2, 2))} for name in "qkv"}}}
    state = namespace["tx"].init(params)
    updates, _ = namespace["tx"].update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_every_path_that_is_named_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:stabmon|optax_ext|models|experiments|tests)/[\w./]*)`", text))
    assert paths
    assert [p for p in paths if not (ROOT / p).exists()] == []
